"""Benchmarks on tiny shapes: they run, their figures agree, the page's sections are replaced and nothing else."""

import importlib.util
import json
import re
import subprocess
import sys
from argparse import Namespace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from engine import Engine
from engine.demo import demo_folder
from models.checkpoint.headers import Checkpoint
from models.formats.int4 import Int4
from search import Trie
from tests.models.gguf.files import WIDE, File, gguf, random
from tests.tools.output import last_line
from tools.bench import checkpoints, peers, report, texts, variants, worker
from tools.bench.__main__ import main
from tools.bench.measure import PeakMemory, memory
from tools.random_checkpoint import make

TINY = ["--layers", "2", "--width", "64", "--heads", "4", "--vocab", "300"]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench") / "tiny"
    make(folder, layers=2, width=64, mlp=96, heads=4, vocab=300)
    return str(folder)


def test_cache_compares_with_the_float32_cache(model, capsys, tmp_path):
    page = tmp_path / "page.md"
    command = ["cache", "--model", model, "--texts", "2", "--new-tokens", "12", "--save", str(page)]
    assert main([*command, "--threads", "1"]) == 0
    rows = last_line(capsys)["results"]
    assert [(row["model"], row["cache"]) for row in rows] == [
        (name, cache) for name in ("demo", "tiny") for cache in ("bfloat16", "int8", "fp8")
    ]
    for sixteen, *eights in (rows[:3], rows[3:]):
        for eight in eights:
            assert sixteen["positions"] == eight["positions"] == 2 * 13
            assert 0 < sixteen["mean"] < eight["mean"] < 0.01 and eight["same"] > 0.8
            assert eight["bytes"] < 0.7 * sixteen["bytes"]
    assert "same best token" in page.read_text()


def test_prefixes_compares_with_cold_prompts(model, capsys, tmp_path):
    command = ["prefixes", "--model", model, "--document", "40", "--questions", "5", "--cold", "2", "--threads", "1"]
    assert main([*command, "--save", str(tmp_path / "page.md")]) == 0
    [row] = last_line(capsys)["results"]
    assert (row["model"], row["same"], row["compared"]) == ("tiny", 2, 2) and row["warm"] > 0 < row["cold"]
    assert "one cached" in (tmp_path / "page.md").read_text()
    assert main(["prefixes", "--questions", "1"]) == 2 and "nothing to compare" in capsys.readouterr().err


@pytest.mark.skipif(bool(Int4().why_not(torch.device("cpu"))), reason="int4 weights need the C++ kernels")
def test_quant_compares_with_float32_weights(model, capsys, tmp_path):
    page = tmp_path / "page.md"
    command = ["quant", "--model", model, "--texts", "2", "--new-tokens", "12", "--save", str(page)]
    assert main([*command, "--threads", "1"]) == 0
    rows = {(row["model"], row["weights"]): row for row in last_line(capsys)["results"]}
    eight, four, head = (rows["demo", weights] for weights in ("int8", "int4", "int4-head"))
    assert len(rows) == 9 + 4 and 0 < eight["mean"] < four["mean"] < head["mean"] < 0.5
    assert rows["demo", "none"]["mean"] == 0 < rows["demo", "none"]["nats"] < four["nats"] + 1
    assert head["bytes"] < four["bytes"]
    assert four["bytes"] < eight["bytes"] < 0.6
    assert "same best token" in page.read_text()


def test_what_is_wrong_with_a_checkpoint_is_said_without_traceback(capsys, tmp_path):
    assert main(["speed", "--model", str(tmp_path / "absent")]) == 3
    (tmp_path / "config.json").touch()
    assert main(["speed", "--random", str(tmp_path), *TINY]) == 2  # never over what is there
    told = capsys.readouterr().err
    assert "not empty" in told and "Traceback" not in told


def peers_command(model, *names):
    return ["peers", "--model", model, "--peers", *names, "--beams", "1", "3", "--prompt-tokens", "24",
            "--new-tokens", "8", "--runs", "2", "--threads", "1"]  # fmt: skip


def test_peers_measures_ours_in_a_process_of_its_own(model, capsys, tmp_path):
    page = tmp_path / "page.md"
    assert main([*peers_command(model, "coppice"), "--save", str(page)]) == 0
    rows = last_line(capsys)["results"]
    assert [(row["peer"], row["beams"]) for row in rows] == [("coppice", 1), ("coppice", 3)]
    for row in rows:
        assert len(row["tokens"]) == row["steps"] == 8 and row["repeatable"]
        low, middle, high = (row["seconds"][k] for k in ("min", "median", "max"))
        assert 0 < row["prefill_seconds"]["min"] < low <= middle <= high
        assert row["tokens_per_second"]["min"] <= row["tokens_per_second"]["median"] <= row["tokens_per_second"]["max"]
        if sys.platform == "linux":
            assert row["loaded_bytes"] > 50e6 and 0 <= row["growth_bytes"]["median"] < 200e6
            assert row["growth_bytes_per_token"] == row["growth_bytes"]["median"] / (24 + 8)
    assert "| coppice |" in page.read_text() and "kB/token" in page.read_text()


@pytest.mark.skipif(not importlib.util.find_spec("transformers"), reason="transformers is not installed (extra bench)")
def test_peers_with_transformers_produces_the_same_tokens(model, capsys):
    assert main(peers_command(model, "coppice", "transformers")) == 0
    rows = last_line(capsys)["results"]
    theirs = [row for row in rows if row["peer"] == "transformers"]
    assert [row["steps"] for row in theirs] == [8, 8]
    assert all(row["versus"]["same_tokens"] and row["versus"]["seconds"] > 0 for row in theirs)


FAKE_LLAMA = """#!/bin/sh
case "$1" in
  --version) echo "version: 7 (fake)";;
  -m) echo "$@" > "{words}"; echo '{{"pp": 24, "tg": 8, "pl": 3, "t_pp": 0.5, "t_tg": 0.8, "t": 1.3}}';;
  *) cp "$1" "$2";;
esac
"""


def test_llama_cpp_gets_the_checkpoint_as_gguf_and_its_times_are_read(model, capsys, tmp_path):
    program, words, kept = tmp_path / "llama-batched-bench", tmp_path / "words", tmp_path / "kept"
    for file in (program, tmp_path / "llama-quantize"):
        file.write_text(FAKE_LLAMA.format(words=words))
        file.chmod(0o755)
    options = ["--llama", str(program), "--kinds", "float32", "int8", "--converted", str(kept)]
    assert main([*peers_command(model, "coppice:float32", "llama.cpp"), *options]) == 0
    rows = last_line(capsys)["results"]
    assert [(row["peer"], row["dtype"], row["beams"]) for row in rows][2:4] == [
        ("llama.cpp", "int8", 1), ("coppice", "float32", 3),
    ]  # fmt: skip
    for row in (row for row in rows if row["peer"] == "llama.cpp"):
        assert row["steps_per_second"]["median"] == pytest.approx(10) and row["prefill_seconds"]["median"] == 0.5
        assert row["seconds"]["median"] == pytest.approx(1.2) and row["growth_bytes"] is None
    assert "Q8_0.gguf -c 256 " in words.read_text()
    assert "-npp 24 -ntg 8 -npl 3 -pps -kvu -fa on -t 1 -tb 1 " in words.read_text()
    assert rows[1]["versions"] == {"llama.cpp": "7 (fake)"}
    assert sorted(file.name for file in kept.iterdir()) == ["F32.gguf", "Q8_0.gguf"]
    assert main([*peers_command(model, "llama.cpp")]) == 0
    assert "llama.cpp: --llama was not given" in capsys.readouterr().out


def test_a_gguf_file_has_the_tensors_of_the_checkpoint(model, tmp_path):
    checkpoint = Checkpoint.open(model)
    variants.write_gguf(checkpoint, tmp_path / "m.gguf")
    written = Checkpoint.open(tmp_path / "m.gguf")
    fields = written.config.keys() & checkpoint.config.keys() - {"rope_scaling", "dtype"}
    assert len(fields) > 8 and all(written.config[name] == checkpoint.config[name] for name in fields)
    expected, found = (one.read(one.tensors) for one in (checkpoint, written))
    assert found.keys() == expected.keys() and all(found[name].equal(x) for name, x in expected.items())


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    """A Llama of blocks, with queries and keys in the order of interleaved rotation."""
    folder = tmp_path_factory.mktemp("files")
    blocks = File(random(folder / "source", "llama/tied", **WIDE), gguf.GGMLQuantizationType.Q8_0)
    return blocks.write(folder / "smollm2-135m-instruct-tiny.gguf")


def test_blocks_become_the_floats_that_they_stand_for(file, tmp_path):
    made = variants.in_dtype(file, "float32", tmp_path)
    ours, theirs = (Engine.load(path, dtype="float32", kv_memory=1 << 22) for path in (made, file))
    exact, found = (one.logits(list(range(3, 40))) for one in (theirs, ours))
    assert Checkpoint.open(made).quantization is None and (exact - found).abs().max() <= 1e-5 * exact.std()
    assert variants.in_dtype(file, "float32", tmp_path) == made and ours.eos_token_ids == theirs.eos_token_ids
    assert Checkpoint.open(variants.in_dtype(file, "bfloat16", tmp_path)).torch_dtype == torch.bfloat16


def test_peers_run_the_very_same_gguf_file(file, capsys, tmp_path):
    program, words = tmp_path / "llama-batched-bench", tmp_path / "words"
    program.write_text(FAKE_LLAMA.format(words=words))
    program.chmod(0o755)
    assert main([*peers_command(str(file), "coppice", "llama.cpp"), "--llama", str(program)]) == 0
    told = capsys.readouterr().out
    rows = json.loads(told.splitlines()[-1])["results"]
    assert [(row["peer"], row["dtype"]) for row in rows] == [("coppice", "gguf"), ("llama.cpp", "gguf")] * 2
    assert f"-m {file} " in words.read_text() and "24 tokens of Python's documentation" in told
    engine = Engine.load(file, kv_memory=1 << 22)
    [best] = engine.generate([texts.plain(engine, 24)], Trie(beams=3), max_new_tokens=8, ignore_eos=True)
    assert rows[2]["tokens"] == best.outputs[0].token_ids
    assert main(["peers", "--random", *TINY, "--kinds", "gguf"]) == 2 and "no GGUF file" in capsys.readouterr().err


def test_starts_are_processes_of_their_own(file, capsys, tmp_path):
    program, words = tmp_path / "llama-batched-bench", tmp_path / "words"
    program.write_text(FAKE_LLAMA.format(words=words))
    program.chmod(0o755)
    command = ["starts", "--model", str(file), "--runs", "1", "--threads", "1", "--llama", str(program)]
    assert main([*command, "--save", str(tmp_path / "page.md")]) == 0
    rows = last_line(capsys)["results"]
    assert [(row["engine"], row["start"]) for row in rows] == [
        ("coppice", "first"), ("llama.cpp", "first"), ("coppice", "later"), ("llama.cpp", "later"),
    ]  # fmt: skip
    ours, theirs = rows[0], rows[1]
    assert ours["seconds"] > theirs["seconds"] > 0 and ours["cpu"] > 0.2 and ours["bytes"] > 100e6 > theirs["bytes"]
    assert f"-m {file} " in words.read_text() and " llama.cpp |" in (tmp_path / "page.md").read_text()


def test_a_folder_of_real_models_gives_the_default(file, model, monkeypatch, capsys, tmp_path):
    (tmp_path / "Qwen2.5-Coder-0.5B-x").symlink_to(model)
    (tmp_path / "SmolLM2-135M-Instruct.gguf").symlink_to(file)
    (tmp_path / "smollm2-135m-instruct.txt").touch()
    assert checkpoints.find(checkpoints.CHAT) is None
    monkeypatch.setenv("COPPICE_CHECKPOINTS", str(tmp_path))
    assert [path.name for path in checkpoints.defaults([])] == [
        "SmolLM2-135M-Instruct.gguf", "Qwen2.5-Coder-0.5B-x",
    ]  # fmt: skip
    assert checkpoints.defaults([model]) == [Path(model)]
    assert main(["memory", "--only", "--beams", "1", "--caches", "auto", "--formats", "int8", "--prompt", "9",
                 "--new-tokens", "3", "--threads", "1"]) == 0  # fmt: skip
    rows = last_line(capsys)["results"]
    assert (rows[0]["model"], rows[0]["format"]) == ("smollm2-135m-instruct-tiny.gguf", "gguf")
    assert rows[1]["format"] == "int8" and all(row["peak"] > row["loaded"] > 0 for row in rows)


def test_real_texts_have_the_length_that_is_asked_for():
    engine = Engine.load(demo_folder(), kv_memory="64M")
    assert len(texts.plain(engine, 700)) == 700 and texts.plain(engine, 50) != texts.plain(engine, 50, 1)
    asked = texts.summaries(engine, 3, 200)
    assert len({tuple(one.ids) for one in asked}) == 3 and all(190 < len(one.ids) <= 200 for one in asked)
    for one, (old, new) in zip(texts.edits(engine, 8), texts.EDITED.values(), strict=True):
        text = engine.tokenizer.decode(one.ids)
        assert f"`{old}` to `{new}`" in text and text.count(old) > 2 and one.ends == asked[0].ends


def test_a_checkpoint_in_another_dtype(model, tmp_path):
    made = variants.in_dtype(Path(model), "bfloat16", tmp_path)
    one, other = Checkpoint.open(model), Checkpoint.open(made)
    assert other.torch_dtype == torch.bfloat16 and (made / "tokenizer.json").exists()
    other_values = other.read(other.tensors)
    assert all(torch.equal(x.bfloat16(), other_values[name]) for name, x in one.read(one.tensors).items())
    assert variants.in_dtype(made, "bfloat16", tmp_path / "none") == made


def test_ratios_are_theirs_over_ours():
    def row(peer, seconds, speed, growth, tokens):
        return {
            "peer": peer, "beams": 4, "seconds": {"median": seconds}, "prefill_seconds": {"median": seconds},
            "steps_per_second": {"median": speed}, "tokens_per_second": {"median": 2 * speed},
            "growth_bytes": {"median": growth}, "tokens": tokens,
            "cpu_seconds": seconds / 2,
        }  # fmt: skip

    rows = [row("coppice", 2, 20, 10, [1, 2, 3]), row("transformers", 10, 5, 150, [1, 2, 4]), {"peer": "x", "beams": 4}]
    peers.compare(rows)
    assert "versus" not in rows[0] and "versus" not in rows[2]
    assert rows[1]["versus"] == {
        "seconds": 5, "prefill_seconds": 5, "cpu_seconds": 5, "steps_per_second": 4, "tokens_per_second": 4,
        "growth_bytes": 15, "same_tokens": False, "first_difference": 2,
    }  # fmt: skip


def test_openvino_is_held_to_float32_in_those_rows_alone(model, monkeypatch, tmp_path):
    made = []

    def pipeline(folder, device, scheduler_config, **options):
        made.append((Path(folder).name, options))

    genai = SimpleNamespace(SchedulerConfig=SimpleNamespace, LLMPipeline=pipeline, __version__="0")
    for name, module in (("openvino", SimpleNamespace()), ("openvino_genai", genai), ("numpy", SimpleNamespace())):
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("openvino-float32", "openvino-int8"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "done").touch()
    args = Namespace(threads=2, openvino_python=None, peer_python="python")
    for kind in ("float32", "bfloat16", "int8"):
        asked = peers.ask(kind, "openvino", args, Path(model), tmp_path, 1, "cpu")
        assert not isinstance(asked, str) and asked[1]["folder"] == str(model)
        worker.OpenVINO(asked[1])
    threads = {"INFERENCE_NUM_THREADS": 2}
    exact = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
    assert made == [("openvino-float32", threads | exact), ("openvino-float32", threads), ("openvino-int8", threads)]


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("sampled", [False, True])
def test_peak_memory_sees_what_is_gone_again(sampled, monkeypatch):
    if sampled:
        monkeypatch.setattr(PeakMemory, "_reset", lambda self: False)
    code = "import sys\nfor line in sys.stdin:\n b = bytearray(b'x') * int(line)\n del b\n print(flush=True)"
    process = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin and process.stdout
    with process:
        for size in (300_000_000, 100_000_000, 1_000):  # a peak is forgotten when the next one is measured
            before = memory(process.pid, "VmRSS")
            assert before is not None
            with PeakMemory(process.pid) as peak:
                print(size, file=process.stdin, flush=True)
                process.stdout.readline()
            assert peak.bytes is not None and peak.bytes - before < size + 30e6
            assert peak.sampled or peak.bytes - before > size - 5e6
        process.stdin.close()


@pytest.mark.parametrize("terminal", [True, False])
def test_figures_for_programs_are_left_out_on_a_terminal(terminal, monkeypatch, capsys):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: terminal)
    report.finish("speed", {}, "a table", {"results": []}, None)
    assert capsys.readouterr().out == "a table\n" + ("" if terminal else '{"bench": "speed", "results": []}\n')


def test_the_page_has_a_section_for_every_command():
    text = (report.RESULTS / "benchmarks.md").read_text(encoding="utf-8")
    for name in ("memory", "peers-[a-z0-9-]+", "speed-[a-z0-9-]+"):
        begins, ends = (re.findall(f"<!-- {slash}bench:({name}) -->", text) for slash in ("", "/"))
        assert begins == ends and begins and len(set(begins)) == len(begins)


@pytest.mark.parametrize("command", [[], ["memory"], ["peers"], ["speed"], ["papers"]])
def test_help(command, capsys):
    with pytest.raises(SystemExit) as stopped:
        main([*command, "--help"])
    assert stopped.value.code == 0 and "usage:" in capsys.readouterr().out
