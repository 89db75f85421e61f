"""Several processes that share models: the same tokens, half the memory, and an end for all when one ends."""

import json
import os
import signal
import socket
import subprocess
import sys
import weakref
from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.app import batch, chat
from engine.load.budget import plan
from engine.load.distributed import process_count
from engine.load.options import LoadOptions
from engine.load.sizes import Workload
from engine.serve import command
from models import load_model
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import measure
from models.checkpoint.weights import Weights
from models.errors import CheckpointError
from models.formats.floats import has_kernels
from models.formats.linear import FORMATS
from models.shard import Shard
from models.sharding import Partition, part
from search import Sample
from tools import random_checkpoint
from tools.pack import pack

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
CPU = torch.device("cpu")


def golden(variant):
    return json.loads((GOLDEN / variant / "golden.json").read_text())


def has_tokens(variant):
    """A classifier has scores; the other cannot be divided."""
    return "runs" in golden(variant) and "desc_act" not in variant


# One of each family; what differs when it is divided: biases, fused and transposed matrices, shared key/value heads,
# norms of all heads, convolutions, a projected embedding, scalar heads, quantised weights.
FEW = ("gpt2/plain", "lfm2/bias", "llama/classifier", "olmo/plain", "opt/post_norm", "quantized/awq")
VARIANTS = (
    *FEW,
    "bitnet/plain",
    "gemma/two",
    "gemma/two_full",
    "granite/hybrid",
    "hunyuan/plain",
    "lfm3/plain",
    "llama/gqa",
    "mistral/ministral3",
    "phi/qk_layernorm",
    "phi3/longrope",
    "qwen2/plain",
    "qwen3/plain",
    "qwen3_5/bias",
    "smollm3/plain",
    "stablelm/parallel",
    "stablelm/qk_layernorm",
    "cohere/norms",
    "gpt_neox/falcon_groups",
    "alibi/bloom",
    "alibi/falcon",
    "alibi/mpt",
    "relatives/codegen",
    "relatives/ctrl",
    "relatives/nanochat",
    "quantized/gptq_conv1d",
    "quantized/gptq_desc_act",
    "quantized/hqq",
    "quantized/torchao",
)
each_variant = pytest.mark.parametrize(
    "variant", [v if v in FEW else pytest.param(v, marks=pytest.mark.full) for v in VARIANTS if has_tokens(v)]
)


def start(*command, size=2, **options):
    """The processes of a command, as torchrun starts them."""
    kept = socket.socket()  # nobody else gets its port before the first process listens there, as this option allows
    kept.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    kept.bind(("127.0.0.1", 0))
    port = kept.getsockname()[1]
    place = {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    place |= {"OMP_NUM_THREADS": 1, "PYTHONPATH": str(ROOT)}
    pipes = {"cwd": ROOT, "stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | options
    processes = [
        subprocess.Popen(
            [sys.executable, *map(str, command)],
            env=os.environ | {name: str(value) for name, value in (place | {"RANK": i, "LOCAL_RANK": i}).items()},
            **pipes,
        )
        for i in range(size)
    ]
    weakref.finalize(processes[0], kept.close)
    return processes


def ended(processes, given=b""):
    """The output of processes, and their exit codes; the first one reads `given`."""
    try:
        for process in processes[1:]:
            process.stdin.close()
            process.stdin = None
        found = [process.communicate(given if not i else None, timeout=600) for i, process in enumerate(processes)]
        return [(out.decode(), err.decode(), p.returncode) for (out, err), p in zip(found, processes, strict=True)]
    finally:
        for process in processes:
            process.kill()


@pytest.fixture(scope="module")
def found(tmp_path_factory, pytestconfig):
    """The answers of two processes to the golden runs, by variant."""
    folder, variants = tmp_path_factory.mktemp("shards"), VARIANTS if pytestconfig.getoption("full") else FEW
    for _, errors, code in ended(start("tests/engine/shards.py", folder, *variants)):
        assert code == 0, errors
    both = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]
    for variant in variants:
        assert both[0][variant].keys() == both[1][variant].keys()
        if "error" not in both[0][variant]:
            assert both[0][variant] == both[1][variant]  # to the bit
    return both[0]


def chosen(variant):
    greedy, beams = ([run for run in golden(variant)["runs"] if run["search"] == s] for s in ("greedy", "trie"))
    return [*greedy[:1], *beams[:1]]


@each_variant
def test_tokens_are_those_of_one_process(found, variant):
    answers = found[variant]["answers"]
    for run, outputs in zip(chosen(variant), answers[:-1], strict=True):
        assert [tokens for tokens, _ in outputs] == [output["token_ids"] for output in run["outputs"]]
        assert [logp for _, logp in outputs] == pytest.approx([o["logprob"] for o in run["outputs"]], abs=1e-3)
    assert found[variant]["gathered"] <= 20  # of 52 tokens of each row: the beams' sums, and two numbers for each row


def test_scores_are_those_of_one_process(found):
    expected = [entry["score"] for entry in golden("llama/classifier")["scores"]]
    assert found["llama/classifier"]["scores"] == pytest.approx(expected, abs=1e-4)


@pytest.mark.full
def test_what_cannot_be_divided_is_refused(found):
    assert "an order of their own (desc_act)" in found["quantized/gptq_desc_act"]["error"]


@each_variant
def test_samples_of_gathered_rows_are_those_of_one_process(found, variant):
    alone = Engine.load(GOLDEN / variant, dtype="float32", device="cpu", kv_memory="1M")
    prompt = golden(variant)["logits"][0]["prompt_ids"]
    [result] = alone.generate([prompt], Sample(num_return_sequences=2, seed=5), max_new_tokens=4)
    assert [tokens for tokens, _ in found[variant]["answers"][-1]] == [o.token_ids for o in result.outputs]
    logits_V = alone.logits(prompt)[-1]
    spread = float(logits_V.max() - logits_V.min())
    assert found[variant]["logits"] == pytest.approx(logits_V.tolist(), abs=1e-5 * spread)
    heads = alone.shape.kv_heads
    assert found[variant]["slot"] == alone.pool.bytes_per_token // (2 if heads > 1 else 1)


MIXED = [
    {"id": "trie", "prompt": "Once upon a time", "params": {"search": "trie", "beams": 4}},
    {"id": "sbon", "prompt": "Once upon a time", "params": {"search": "sbon"}},
    {"id": "dsbd", "prompt": "The little dog", "params": {"search": "dsbd"}},
    {"id": "aded", "prompt": "The little dog", "params": {"search": "aded"}},
    {
        "id": "choices",
        "prompt": "The little dog was ",
        "params": {"search": "trie", "choices": ["happy", "sad", "very sad"], "constraint_scores": "renormalised"},
    },
    {"id": "penalty", "prompt": "The little dog was ", "params": {"search": "trie", "repetition_penalty": 1.3}},
    {"id": "refused", "prompt": "a", "params": {"beams": -1}},
]
FLAGS = ("--dtype", "float32", "--device", "cpu", "--max-new-tokens", "12", "--kv-memory", "64M")


def test_batch_answers_as_one_process_does(tmp_path, capfdbinary):
    """Lines of a pipe with different searches, companions and constraints; the second process writes nothing."""
    lines = b"".join(json.dumps(line).encode() + b"\n" for line in MIXED)
    first, second = ended(start("-m", "engine.batch", *FLAGS), lines)
    assert first[2] == second[2] == 2 and second[0] == ""  # one line has an error for an answer
    (tmp_path / "lines").write_bytes(lines)
    assert batch.main(["--input", str(tmp_path / "lines"), "-q", *FLAGS]) == 2
    alone = capfdbinary.readouterr().out.decode()
    for mine, other in zip(first[0].splitlines(), alone.splitlines(), strict=True):
        mine, other = json.loads(mine), json.loads(other)
        assert mine["id"] == other["id"] and mine.get("error") == other.get("error")
        tokens = ([output["token_ids"] for output in answer.get("outputs", ())] for answer in (mine, other))
        assert next(tokens) == next(tokens), mine["id"]


def test_resume(tmp_path):
    """The first process alone has the file; all agree on what is answered."""
    lines = [json.dumps({"prompt_ids": [5, 6, i]}) for i in range(4)]
    (tmp_path / "in").write_text("\n".join(lines))
    flags = ("--model", GOLDEN / "llama" / "gqa", "--input", tmp_path / "in", "--output", tmp_path / "out")
    assert batch.main([*FLAGS, *map(str, flags), "-q"]) == 0
    whole = (tmp_path / "out").read_text().splitlines(True)
    (tmp_path / "out").write_text("".join(whole[:2]) + whole[2][:9])
    assert [code for _, _, code in ended(start("-m", "engine.batch", *FLAGS, *flags, "--resume"))] == [0, 0]
    again = (tmp_path / "out").read_text().splitlines(True)
    tokens = [[json.loads(line)["outputs"][0]["token_ids"] for line in lines] for lines in (again, whole)]
    assert tokens[0] == tokens[1] and again[:2] == whole[:2]


def test_a_process_that_ends_ends_the_others():
    """The first one is waiting for input when the second is killed."""
    first, second = processes = start("-m", "engine.batch", *FLAGS, "--model", GOLDEN / "llama" / "gqa")
    try:
        first.stdin.write(b'{"prompt_ids": [5, 6]}\n')
        first.stdin.flush()
        assert json.loads(first.stdout.readline())["id"] == 0
        second.send_signal(signal.SIGKILL)
        first.stdin.write(b'{"prompt_ids": [5, 7]}\n')
        first.stdin.flush()
        _, errors = first.communicate(timeout=300)
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert first.returncode == 6 and b"another process has ended or does not answer" in errors


# --- without other processes ---


def tensors_in(model):
    """The tensors of packed matrices, each once."""
    packed = {id(x.packed): x.packed for x in model.modules() if getattr(x, "packed", None) is not None}
    for found in packed.values():
        yield from (x for x in (*vars(found).values(), *(found.groups or ())) if isinstance(x, torch.Tensor))


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint whose vocabulary is small beside its layers."""
    folder = tmp_path_factory.mktemp("shards") / "model"
    random_checkpoint.make(folder, layers=4, width=256, mlp=768, heads=8, vocab=1000)
    return folder


@pytest.mark.skipif(not has_kernels(torch.float32, CPU), reason="needs C++ kernels, whose panels are counted")
@pytest.mark.parametrize("quant", FORMATS)
def test_a_process_holds_half_and_the_plan_says_so(checkpoint, quant):
    opened, place = Checkpoint.open(checkpoint), Shard(1, 2)
    whole, half = (measure(opened, torch.float32, CPU, quant, shard) for shard in (Shard(), place))
    model = load_model(opened, torch.float32, CPU, quant, lambda *given: Weights(*given, shard=place))
    assert half.matrices == sum(x.nbytes for x in tensors_in(model))
    assert half.shape == model.shape and half.config == model.config
    assert half.weights <= 0.55 * whole.weights
    assert half.shape.kv_bytes_per_token(torch.float32) * 2 == whole.shape.kv_bytes_per_token(torch.float32)
    options = LoadOptions(checkpoint, dtype="float32", device="cpu", quant=quant, shard=place)
    assert plan(options, Workload(), 0).lines[f"weights{f' ({quant})' if quant != 'none' else ''}"] == half.weights


def test_the_table_of_a_plan_counts_a_process(checkpoint, capsys):
    flags = ["--plan", str(checkpoint), "--context", "512", "--max-new-tokens", "24", "--dtype", "float32"]
    assert chat.main(flags) == 0 and chat.main([*flags, "--processes", "2"]) == 0
    alone, each = (text.splitlines() for text in capsys.readouterr().out.split("runtime: ")[:2])
    rows = [next(line for line in lines if line.startswith("none")).split() for lines in (alone, each)]
    assert any("each of 2 processes" in line for line in each)
    assert float(rows[1][1]) < 0.55 * float(rows[0][1]) and float(rows[1][4]) < 0.51 * float(rows[0][4])


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
@pytest.mark.parametrize(("total", "unit"), [(8, 1), (48, 8), (1000, 1)])
def test_parts_are_even_and_whole(total, unit, size):
    parts = [part(total, Shard(rank, size), unit) for rank in range(size)]
    assert [i for some in parts for i in some] == [*range(total)]
    assert max(map(len, parts)) - min(map(len, parts)) <= unit and all(some.start % unit == 0 for some in parts)


def test_heads_that_cannot_be_divided_are_refused():
    with pytest.raises(CheckpointError, match=r"3 heads with 1 of keys and values cannot be divided among 2 processes"):
        measure(Checkpoint.open(GOLDEN / "phi3" / "mini"), torch.float32, CPU, "none", Shard(0, 2))


def test_key_value_heads_that_are_fewer_than_processes_are_repeated():
    c = measure(Checkpoint.open(GOLDEN / "llama" / "gqa"), torch.float32, CPU).config
    parts = [Partition.of(c, Shard(rank, 4), "") for rank in range(4)]
    assert [p.config.kv_heads for p in parts] == [1] * 4 and [p.config.heads for p in parts] == [1] * 4
    assert [p.k_norm for p in parts] == [None] * 4
    assert len({p.qkv[0] for p in parts}) == 4 and len({p.qkv[1] for p in parts}) == 2


@pytest.mark.skipif(not has_kernels(torch.float32, CPU), reason="packs matrices")
def test_packed_checkpoints_are_refused(checkpoint, tmp_path):
    pack(checkpoint, tmp_path / "packed")
    with pytest.raises(CheckpointError, match="packed ahead cannot be divided"):
        measure(Checkpoint.open(tmp_path / "packed"), torch.float32, CPU, "none", Shard(0, 2))


def test_commands_of_one_process_refuse_several(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert process_count() == 2
    assert chat.main(["-p", "hello"]) == 2
    assert "engine.chat runs in one process, torchrun started 2" in capsys.readouterr().err
    assert command.main(["-q"]) == 2 and "engine.serve runs in one process" in capsys.readouterr().err
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    assert batch.main(["-q"]) == 2 and "not as torchrun sets it" in capsys.readouterr().err
