"""The prior tool: vectors of a model's own continuations, in a file that the search takes."""

import json

import pytest
import torch

from engine import Engine
from search import ULTS
from search.ults.prior import WIDTH, Vectors
from tools.random_checkpoint import make
from tools.ults_prior import main


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make(folder, layers=1, width=32, mlp=48, heads=4, vocab=260, max_positions=64, seed=2)
    return folder


def write(path, *records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def test_vectors_are_the_models(folder, tmp_path, capsys):
    prompts = [[1, 5, 6], [1, 9], [1, 40, 41, 42]]
    source = write(tmp_path / "in.jsonl", {"prompt": "Hello"}, *({"prompt_ids": ids} for ids in prompts))
    out = tmp_path / "prior.safetensors"
    argv = ["--model", str(folder), "--input", source, "--output", str(out), "--depth", "6", "--completions", "3"]
    assert main([*argv, "--kv-memory", "1M"]) == 0
    err = capsys.readouterr().err
    assert "4 of 4 prompts" in err and "quartiles" in err
    vectors = Vectors.load(out)
    assert vectors.logp_RK.shape[1] == WIDTH and 4 < len(vectors.logp_RK) <= 4 * (1 + 5 * 3)
    engine = Engine.load(folder, kv_memory=1 << 20)
    for ids in prompts:  # the first vector of every prompt is among them
        logp = torch.log_softmax(engine.logits(ids)[-1, : engine.runner.vocab_size], -1)
        assert float((vectors.logp_RK - logp.topk(WIDTH).values).abs().amax(1).min()) < 1e-4
    again = tmp_path / "again.safetensors"
    assert main([*argv[:5], str(again), *argv[6:], "--kv-memory", "1M", "-q"]) == 0
    assert capsys.readouterr().err == ""
    assert Vectors.load(again).logp_RK.equal(vectors.logp_RK)
    [result] = engine.generate([[1, 5, 6]], ULTS(prior=str(out), k_max=3), max_new_tokens=6)
    assert result.stats["prior"] == str(out) and result.outputs[0].token_ids


def test_no_more_vectors_than_asked_for(folder, tmp_path):
    source = write(tmp_path / "in.jsonl", {"prompt_ids": [1, 7]})
    out = tmp_path / "deep" / "prior"
    assert main(["--model", str(folder), "--input", source, "--output", str(out), "--vectors", "5"]) == 0
    assert len(Vectors.load(out).logp_RK) == 5


def test_without_an_output_searches_find_it(folder, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = write(tmp_path / "in.jsonl", {"prompt_ids": [1, 7]}, {"prompt_ids": [1, 8]})
    argv = ["--model", str(folder), "--input", source, "--depth", "6", "--children", "5", "--kv-memory", "1M"]
    assert main(argv) == 0
    [kept] = (tmp_path / "cache" / "coppice" / "ults").iterdir()
    assert str(kept) in capsys.readouterr().err
    engine = Engine.load(folder, kv_memory=1 << 20)
    for depth, children, prior in ((6, 5, "cached"), (7, 5, "gathered"), (6, 4, "gathered")):
        [result] = engine.generate([[1, 5, 6]], ULTS(children=children), max_new_tokens=depth)
        assert result.stats["prior"] == prior


@pytest.mark.parametrize(
    ("content", "flags", "says"),
    [
        ("", [], "no prompts"),
        ('{"prompt_ids": [1]}\nnonsense\n', [], "line 2"),
        ('{"prompt": 3}\n', [], "expected a string"),
        ('{"prompt_ids": [999]}\n', [], "token"),
        ('{"prompt_ids": [1]}\n', ["--depth", "0"], "--depth: expected"),
        ('{"prompt_ids": [1]}\n', ["--vectors", "-3"], "--vectors: expected"),
    ],
)
def test_errors(folder, tmp_path, capsys, content, flags, says):
    (tmp_path / "in").write_text(content)
    argv = ["--model", str(folder), "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out"), *flags]
    assert main(argv) == 2
    err = capsys.readouterr().err
    assert says in err and "Traceback" not in err and not (tmp_path / "out").exists()


def test_files_that_cannot_be_read_or_written(folder, tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", {"prompt_ids": [1]})
    assert main(["--model", str(folder), "--input", str(tmp_path / "absent"), "--output", "x"]) == 2
    assert "No such file" in capsys.readouterr().err
    assert main(["--model", str(folder), "--input", source, "--output", str(tmp_path / "in.jsonl" / "x")]) == 2
    assert "in.jsonl" in capsys.readouterr().err
