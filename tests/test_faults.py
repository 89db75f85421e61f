"""Every fault of docs/checkpoints.md, provoked through the command lines: exit code, message, nothing lost or leaked.

What the parts make of each fault in detail is tested beside them; here it is that users are told, by both commands
alike, and that files, pages and conversations are as they were.
"""

import errno
import gc
import io
import itertools
import json
import os
import random
import re
import shutil
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from engine.app import batch, chat
from engine.app.sink import Sink
from engine.cache.tree import TokenTree
from engine.engine import Done, Engine, Prefill, Session
from engine.step.driver import Driver
from engine.step.runner import Runner
from models.checkpoint.headers import Checkpoint
from search.greedy import Greedy
from search.sample import Sample
from search.trie import Trie
from tests.engine.app.typist import Terminal
from tests.invariants import check_pool
from tools.random_checkpoint import make

ROOT = Path(__file__).parent.parent
SHAPE: dict[str, Any] = {"layers": 2, "width": 32, "mlp": 48, "heads": 4, "kv_heads": 2, "vocab": 300, "scale": 1.5}
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 3\n"
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
OUT_OF_MEMORY = "[enforce fail at alloc_cpu.cpp:121] DefaultCPUAllocator: can't allocate memory: you tried to allocate"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("base") / "model"
    make(folder, max_positions=64, **SHAPE)
    return folder


@pytest.fixture
def folder(base: Path, tmp_path: Path) -> Path:
    """A copy that a test may break."""
    return Path(shutil.copytree(base, tmp_path / "model"))


@pytest.fixture(scope="module")
def engine(base: Path) -> Engine:
    return Engine.load(base, threads=1, kv_memory=1 << 16)


@pytest.fixture(autouse=True)
def no_pages_left(request: pytest.FixtureRequest) -> Iterator[None]:
    yield
    if "engine" in request.fixturenames:
        check_pool(request.getfixturevalue("engine").pool, [])


class Commands:
    """Both command lines, in this process: (exit code, stdout, stderr)."""

    def __init__(self, patch: pytest.MonkeyPatch, model: Path):
        self.patch, self.model = patch, ["--model", model]  # unless another one is given

    def use(self, engine: Engine) -> None:
        """Answer with this engine instead of loading one."""
        self.patch.setattr(chat.cli, "load_engine", lambda args, shard=None: engine)
        self.patch.setattr(batch, "load_engine", lambda args, shard=None: engine)

    def chat(self, *argv: str | Path, typed: str = "") -> tuple[int, str, str]:
        streams = {"stdin": Terminal(typed), "stdout": io.StringIO(), "stderr": io.StringIO()}
        return self._run(lambda: chat.main(list(map(str, [*self.model, *argv]))), streams)

    def batch(self, lines: list[Any], *argv: str | Path) -> tuple[int, list[dict[str, Any]], str]:
        out, text = io.BytesIO(), b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        run = lambda: batch.main(list(map(str, [*self.model, *argv])), io.BytesIO(text), out)  # noqa: E731
        code, _, err = self._run(run, {"stderr": io.StringIO()})
        return code, [json.loads(line) for line in out.getvalue().splitlines()], err

    def refuse(self, folder: Path, code: int, *words: str, flags: tuple[str, ...] = ()) -> str:
        """Both end with this code, nothing on stdout, and an error that has these words; returns it."""
        argv, files = ["--model", folder, "--threads", "1", "--kv-memory", "64K", *flags], len(open_files())
        one = self.chat(*argv, "-p", "a")
        two = self.batch([{"prompt": "a"}], *argv)
        assert (one[0], one[1], one[2]) == (code, "", two[2]) and (two[0], two[1]) == (code, [])
        what, *rest = one[2].splitlines()
        assert what.startswith("error: ") and rest, "where or what to do"
        assert all(word in one[2] for word in words), one[2]
        if len(open_files()) > files:
            gc.collect()
        assert len(open_files()) <= files, "left open"
        return one[2]

    def _run(self, main: Callable[[], int], streams: dict[str, Any]) -> tuple[int, str, str]:
        with self.patch.context() as patch:
            for name, stream in streams.items():
                patch.setattr(sys, name, stream)
            try:
                code = main()
            except SystemExit as end:
                code = end.code if isinstance(end.code, int) else 1
        return code, streams.get("stdout", io.StringIO()).getvalue(), streams["stderr"].getvalue()


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch, base: Path) -> Commands:
    return Commands(monkeypatch, base)


def open_files() -> list[str]:
    return os.listdir("/proc/self/fd") if os.path.isdir("/proc/self/fd") else []


def edit(path: Path, **changes: Any) -> None:
    """Change fields of a JSON file; `...` takes one away."""
    old = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in old.items() if value is not ...}))


def texts(records: list[dict[str, Any]]) -> list[Any]:
    return [[o["token_ids"] for o in r["outputs"]] if "outputs" in r else r["error"]["code"] for r in records]


def read(path: Path) -> list[dict[str, Any]]:
    """The answers of an output file, whose lines are whole."""
    data = path.read_bytes()
    assert data[-1:] in (b"", b"\n")
    return [json.loads(line) for line in data.splitlines()]


# --- 1 to 3: files that are no weights ---


def header(entries: dict[str, Any], data: bytes = b"") -> bytes:
    text = json.dumps(entries).encode()
    return struct.pack("<Q", len(text)) + text + data


def floats(shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


@pytest.mark.parametrize(
    "raw",
    [
        struct.pack("<Q", 2**63) + b"{}",
        struct.pack("<Q", 100) + b"{}",
        b"",
        header({"a": floats([2], 0, 8), "b": floats([2], 4, 12)}, bytes(12)),
        header({"a": floats([1], 4, 8)}, bytes(8)),
        header({"a": floats([2**40, 2**40], 0, 4)}, bytes(4)),
        header({"a": floats([4], 0, 16)}, bytes(15)),
    ],
    ids=["length", "truncated", "empty", "overlap", "hole", "overflow", "short"],
)
def test_damaged_weights(commands: Commands, folder: Path, raw: bytes):
    (folder / WEIGHTS).write_bytes(raw)
    commands.refuse(folder, 3, "not a valid safetensors file", str(folder / WEIGHTS), "Download the file again")


def test_a_git_lfs_pointer(commands: Commands, folder: Path):
    (folder / WEIGHTS).write_bytes(LFS)
    commands.refuse(folder, 3, "git-LFS pointer", str(folder / WEIGHTS), "git lfs pull")


def test_pickles(commands: Commands, folder: Path):
    torch.save({"a": torch.ones(1)}, folder / WEIGHTS)
    commands.refuse(folder, 3, "pickle", str(folder / WEIGHTS), "python -m tools.convert")
    (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
    commands.refuse(folder, 3, "pickle", "pytorch_model.bin", "python -m tools.convert")


# --- 4 and 5: the index ---


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make(tmp_path / "model", max_positions=64, shards=2, **SHAPE)
    return tmp_path / "model"


def test_an_index_that_leads_elsewhere(commands: Commands, sharded: Path, tmp_path: Path):
    index = json.loads((sharded / INDEX).read_text())
    name, file = next(iter(index["weight_map"].items()))
    for outside in ("../x.safetensors", str(tmp_path / "x.safetensors"), "sub/x.safetensors", "..", ""):
        edit(sharded / INDEX, weight_map=index["weight_map"] | {name: outside})
        commands.refuse(sharded, 3, "no plain name", INDEX)
    edit(sharded / INDEX, **index)
    (sharded / file).rename(tmp_path / "x.safetensors")
    (sharded / file).symlink_to(tmp_path / "x.safetensors")
    commands.refuse(sharded, 3, "a link that leads out of the model folder", "Put the file itself there")


def test_an_index_that_does_not_fit(commands: Commands, sharded: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Checkpoint, "read", None)  # nothing is read, so nothing is allocated
    index = json.loads((sharded / INDEX).read_text())
    weight_map = index["weight_map"]
    one, two = sorted(set(weight_map.values()))
    name = next(n for n, file in weight_map.items() if file == one)
    for changed, message in [
        (weight_map | {name: "absent.safetensors"}, "absent.safetensors is not there"),
        (weight_map | {name: two}, f"tensor {name} is not in {two}"),
        (weight_map | {"more": one}, f"tensor more is not in {one}"),
        ({}, "weight_map: expected"),
    ]:
        edit(sharded / INDEX, weight_map=changed)
        commands.refuse(sharded, 3, message)
    twice = json.dumps(index).replace("{", '{"weight_map": {}, ', 1)
    (sharded / INDEX).write_text(twice)
    commands.refuse(sharded, 3, "the key weight_map occurs twice", INDEX)
    edit(sharded / INDEX, weight_map=weight_map)
    save_file(load_file(sharded / one) | {"lm_head.weight": torch.ones(1)}, sharded / one)
    commands.refuse(sharded, 3, "tensor lm_head.weight lies in two files", one, two)


def test_sizes_that_no_machine_has(commands: Commands, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Checkpoint, "read", None)
    (folder / WEIGHTS).write_bytes(header({"a": floats([0, 10**18], 0, 0)}))
    commands.refuse(folder, 3, "unusable shape", WEIGHTS)
    (folder / WEIGHTS).unlink()
    (folder / INDEX).write_text('{"metadata": {"total_size": 1' + "0" * 5000 + '}, "weight_map": {}}')
    commands.refuse(folder, 3, INDEX)


# --- what lies in a model's place, or beside it ---

LORA = {"peft_type": "LORA", "base_model_name_or_path": "org/base-7B", "r": 8, "target_modules": ["q_proj"]}


@pytest.mark.parametrize("beside", [[], ["config.json"], ["adapter_model.safetensors"]], ids=str)
def test_an_adapter_instead_of_a_model(commands: Commands, folder: Path, tmp_path: Path, beside: list[str]):
    alone = tmp_path / "adapter"
    alone.mkdir()
    (alone / "adapter_config.json").write_text(json.dumps(LORA))
    for name in beside:
        shutil.copy(folder / ("config.json" if name == "config.json" else WEIGHTS), alone / name)
    commands.refuse(alone, 3, "an adapter (LoRA) for org/base-7B, not a model", str(alone), "merge_and_unload")
    (alone / "adapter_config.json").write_text("[" * 100_000)
    commands.refuse(alone, 3, "an adapter (LoRA) for a model that it does not name", str(alone))


def test_an_adapter_beside_a_model_is_named(commands: Commands, base: Path, folder: Path):
    (folder / "adapter_config.json").write_text(json.dumps(LORA))
    argv = ["--model", folder, "--threads", "1", "--kv-memory", "64K", "--max-new-tokens", "2"]
    one, two = commands.chat(*argv, "-p", "a"), commands.batch([{"prompt": "a"}], *argv)
    for code, err in ((one[0], one[2]), (two[0], two[2])):
        assert code == 0 and "the adapter (LoRA) beside the weights, for org/base-7B, is not applied" in err
    assert commands.chat(*argv, "-p", "a", "-q")[2] == ""
    err = commands.chat("--model", base, "--draft", folder, *argv[2:], "-p", "a")[2]
    assert "draft: the adapter (LoRA) beside the weights, for org/base-7B, is not applied" in err


@pytest.fixture
def hub(folder: Path, tmp_path: Path) -> Path:
    """A model as the hub's cache has it: files are links to blobs. Its folder."""
    home, names = tmp_path / "models--org--name", sorted(path.name for path in folder.iterdir())
    (home / "blobs").mkdir(parents=True)
    (home / "snapshots" / "0a1b2c").mkdir(parents=True)
    (home / "refs").mkdir()
    (home / "refs/main").write_text("0a1b2c")
    for i, name in enumerate(names):
        shutil.copy(folder / name, home / "blobs" / f"{i:x}")
        (home / "snapshots/0a1b2c" / name).symlink_to(f"../../blobs/{i:x}")
    return home


def test_folders_of_the_hubs_cache(commands: Commands, folder: Path, hub: Path, tmp_path: Path):
    argv = ["-p", "ab", "--threads", "1", "--kv-memory", "64K", "--max-new-tokens", "4"]
    _, expected, _ = commands.chat("--model", folder, *argv)
    (hub / "snapshots" / "ffff").mkdir()  # of another revision, incomplete
    for place in (hub, hub / "snapshots", hub / "snapshots/0a1b2c"):
        assert commands.chat("--model", place, *argv)[:2] == (0, expected), place
    link = tmp_path / "link"
    link.symlink_to(hub)
    assert commands.chat("--model", link, *argv)[:2] == (0, expected)
    for wrong in ("absent", "../snapshots/0a1b2c", "", "."):
        (hub / "refs/main").write_text(wrong)
        commands.refuse(hub, 3, "refs/main names no snapshot that is there (there are: 0a1b2c, ffff)", str(hub))
    (hub / "refs/main").unlink()
    commands.refuse(hub / "snapshots", 3, "refs/main names no snapshot")
    (hub / "snapshots" / "ffff").rmdir()  # the only one left
    assert commands.chat("--model", hub, *argv)[:2] == (0, expected)
    (hub / "snapshots/0a1b2c/config.json").unlink()
    commands.refuse(hub, 3, "holds no config.json", str(hub / "snapshots/0a1b2c"))


@pytest.mark.parametrize("flag", ["--save-prefix", "--save", "--trace"])
def test_a_file_that_cannot_be_written_is_named_before_the_model_is_loaded(
    commands: Commands, base: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, flag: str
):
    monkeypatch.setattr(chat.cli, "load_engine", None)
    for path, words in ((tmp_path / "none" / "x.json", "no such folder"), (tmp_path, "")):
        code, out, err = commands.chat("-p", "a", flag, path)
        assert (code, out) == (2, "") and "annot" in err and words in err and str(path.parent) in err


# --- 6 to 8: what does not fit together ---


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model.norm.weight": None}, ["missing model.norm.weight"]),
        ({"model.norm.weight": None, "model.norm.weights": torch.ones(32)}, ["(nearest: model.norm.weights)"]),
        ({"model.norm.bias": torch.ones(32)}, ["unknown model.norm.bias in model.safetensors"]),
        ({"model.norm.weight": torch.ones(31)}, ["expected [32] of floats, got [31] of float32"]),
        ({"model.norm.weight": torch.ones(32, dtype=torch.int32)}, ["got [32] of int32"]),
        ({f"extra.{i}": torch.ones(1) for i in range(40)}, ["40 tensors at fault", "extra.0", "and 30 more"]),
    ],
    ids=["missing", "misspelt", "extra", "shape", "dtype", "many"],
)
def test_tensors_that_do_not_fit(commands: Commands, folder: Path, change: dict[str, Any], words: list[str]):
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()} | change
    save_file({name: tensor for name, tensor in tensors.items() if tensor is not None}, folder / WEIGHTS)
    commands.refuse(folder, 3, "the weights do not fit the config", str(folder), *words)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(
            ["hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size", "intermediate_size"],
            [0, -1, 10**18, "32", 1.5, None],
        ),
        ("num_attention_heads", 5),
        ("num_key_value_heads", 3),
        ("head_dim", 7),
        ("max_position_embeddings", 10**18),
        ("rms_norm_eps", float("nan")),
        ("rope_parameters", {"rope_type": "default", "rope_theta": float("nan")}),
        ("rope_parameters", {"rope_type": "default", "rope_theta": -1}),
        ("rope_parameters", {"rope_type": "linear", "rope_theta": 1e4, "factor": float("inf")}),
        ("eos_token_id", -1),
    ],
)
def test_config_fields(commands: Commands, folder: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any):
    monkeypatch.setattr(Checkpoint, "read", None)  # refused before a weight is looked at
    monkeypatch.setattr(Checkpoint, "rows", None)
    edit(folder / "config.json", **{field: value})
    named = {"num_attention_heads": "heads", "rope_parameters": "rope_"}.get(field, field)
    commands.refuse(folder, 3, named, "config.json")


MIXTURE = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "head_dim": 8,
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(["num_experts", "num_experts_per_tok", "moe_intermediate_size"], [-1, 10**18, "4", 1.5]),
        ("num_experts_per_tok", 0),
        ("moe_intermediate_size", 0),
        ("num_experts_per_tok", 5),
        ("decoder_sparse_step", 0),
        ("mlp_only_layers", 1),
        ("mlp_only_layers", ["a"]),
        ("norm_topk_prob", "yes"),
    ],
)
def test_fields_of_experts(commands: Commands, folder: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any):
    monkeypatch.setattr(Checkpoint, "read", None)  # refused before a weight is looked at
    monkeypatch.setattr(Checkpoint, "rows", None)
    edit(folder / "config.json", **(MIXTURE | {field: value}))
    commands.refuse(folder, 3, field, "config.json")


@pytest.mark.parametrize(
    ("field", "value"),
    [("swiglu_limit", 6.5), ("swiglu_alpha", "1.702"), ("num_local_experts", 1), ("sliding_window", None),
     ("attention_bias", 1), ("layer_types", [])],
)  # fmt: skip
def test_fields_of_gpt_oss(commands: Commands, folder: Path, monkeypatch: pytest.MonkeyPatch, field: str, value: Any):
    monkeypatch.setattr(Checkpoint, "read", None)  # refused before a weight is looked at
    monkeypatch.setattr(Checkpoint, "rows", None)
    named = {"num_local_experts": "num_experts_per_tok", "layer_types": "the weights do not fit"}.get(field, field)
    model = {"architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss", "head_dim": 8}
    edit(folder / "config.json", **model | {"num_local_experts": 4, "num_experts_per_tok": 2, field: value})
    commands.refuse(folder, 3, named)


def test_a_mixture_whose_experts_are_not_there(commands: Commands, folder: Path):
    edit(folder / "config.json", **MIXTURE)
    commands.refuse(folder, 3, "the weights do not fit the config", "mlp.experts.0.", str(folder))


def test_unsupported_models(commands: Commands, folder: Path):
    edit(folder / "config.json", architectures=["MistraleForCausalLM"])
    near = "the nearest: MistralForCausalLM, "
    commands.refuse(folder, 3, "'MistraleForCausalLM' is not supported", near, "docs/checkpoints.md", "config.json")
    edit(folder / "config.json", architectures=["LlamaForCausalLM"], rope_parameters={"rope_type": "spiral"})
    commands.refuse(folder, 3, "rope_type", "spiral", "llama3", "yarn", "config.json")


# --- 9: a file cut short under a running engine ---


@pytest.mark.skipif(not os.path.exists("/proc/self/maps"), reason="reads Linux's list of mappings")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_weights_cut_short_while_they_are_in_use(commands: Commands, folder: Path, dtype: str):
    """Loading copies every matrix, and rows of the embedding are read: nothing is left that could kill the process."""
    engine = Engine.load(folder, threads=1, kv_memory=1 << 16, dtype=dtype)
    if str(folder) in Path("/proc/self/maps").read_text():
        pytest.skip("this machine cannot prepack this dtype: the weights stay mapped")
    commands.use(engine)
    assert commands.chat("-p", "a", "--max-new-tokens", "4")[0] == 0
    os.truncate(folder / WEIGHTS, 4096)
    code, out, err = commands.chat("-p", "zzz", "--max-new-tokens", "4")
    assert (code, out) == (3, "") and "is cut short" in err and WEIGHTS in err
    check_pool(engine.pool, [])


# --- 10 and 11: templates and tokenizers ---


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{% include 'tokenizer.json' %}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% set n = namespace(x='a') %}{% for i in range(99999) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
        "{{ nowhere.to.be.found }}",
        "{% if %}",
    ],
    ids=["escape", "include", "loops", "memory", "undefined", "syntax"],
)
def test_hostile_templates(commands: Commands, folder: Path, source: str, monkeypatch: pytest.MonkeyPatch):
    (folder / "chat_template.jinja").write_text(source)
    argv = ["--model", folder, "--threads", "1", "--kv-memory", "64K", "--max-new-tokens", "2"]
    with monkeypatch.context() as patch:
        patch.setattr(Runner, "forward", lambda *_: pytest.fail("it is refused before anything is evaluated"))
        code, out, err = commands.chat(*argv, "-p", "a")
    assert (code, out) == (3, "") and "the chat template is refused" in err
    assert "chat_template.jinja" in err and "--chat-template none" in err
    code, [record], _ = commands.batch([{"messages": [{"role": "user", "content": "a"}]}], *argv)
    assert (
        code == 2 and record["error"]["code"] == "checkpoint" and "--chat-template none" in record["error"]["message"]
    )
    assert commands.chat(*argv, "-p", "a", "--chat-template", "none")[0] == 0


def test_tokenizers_that_hold_nothing(commands: Commands, folder: Path):
    text = (folder / "tokenizer.json").read_text()
    for broken in ("", "{}", text[:1000], text.replace('"type": "BPE"', '"type": "Nothing"')):
        (folder / "tokenizer.json").write_text(broken)
        commands.refuse(folder, 3, str(folder))
    data = json.loads(text)
    data["model"] |= {"vocab": {}, "merges": []}
    data |= {"added_tokens": [], "post_processor": None}
    (folder / "tokenizer.json").write_text(json.dumps(data))
    commands.refuse(folder, 3, "vocabulary mismatch", "tokenizer.json")
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(b"")
    code, out, err = commands.chat("--model", folder, "-p", "a")
    assert (code, out) == (3, "") and "tokenizer.model" in err and "vocabulary mismatch" in err
    (folder / "tokenizer.model").unlink()
    code, out, err = commands.chat("--model", folder, "-p", "a")
    assert (code, out) == (3, "") and "has no tokenizer" in err


# --- 12: numbers that are none ---


@pytest.mark.parametrize(
    ("name", "value", "where"),
    [
        ("model.layers.0.mlp.down_proj.weight", float("nan"), "in layer 1 of 2"),
        ("model.layers.1.self_attn.o_proj.weight", float("inf"), "in layer 2 of 2"),
        ("model.layers.1.input_layernorm.weight", float("-inf"), "in layer 2 of 2"),
        ("lm_head.weight", float("nan"), "after the last layer"),
    ],
)
def test_weights_that_are_no_numbers(commands: Commands, folder: Path, name: str, value: float, where: str):
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    tensors[name].view(-1)[0] = value
    save_file(tensors, folder / WEIGHTS)
    engine = Engine.load(folder, threads=1, kv_memory=1 << 16)
    commands.use(engine)
    for search in ("greedy", "sample", "trie"):
        code, out, err = commands.chat("-p", "ab", "--search", search)
        assert (code, out) == (5, "")
        assert err == f"error: the model computed NaN or Inf\n{where}, at token 2 of the sequence\n" + (
            "try --dtype float32, or check the weights\n"
        )
        check_pool(engine.pool, [])


def test_one_line_of_a_batch_without_numbers(commands: Commands, folder: Path):
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / WEIGHTS).items()}
    tensors["model.embed_tokens.weight"][7] = torch.nan
    save_file(tensors, folder / WEIGHTS)
    engine = Engine.load(folder, threads=1, kv_memory=1 << 16)
    commands.use(engine)
    lines = [{"prompt_ids": [5]}, {"prompt_ids": [5, 7]}, {"prompt_ids": [5]}]
    code, records, _ = commands.batch(lines, "--max-new-tokens", "2")
    assert code == 2 and texts(records) == [texts(records)[2], "numerics", texts(records)[2]]
    assert "line 2: " in records[1]["error"]["message"] and "in the embedding" in records[1]["error"]["message"]
    check_pool(engine.pool, [])


# --- 13 to 16: requests that cannot be served ---


def test_an_empty_prompt(commands: Commands, folder: Path):
    edit(folder / "tokenizer.json", post_processor=None)
    argv = ["--model", folder, "--threads", "1", "--kv-memory", "64K", "--max-new-tokens", "2"]
    code, out, err = commands.chat(*argv, "-p", "")
    assert (code, out) == (2, "") and "the prompt is empty, and this tokenizer adds no token" in err
    code, records, _ = commands.batch([{"prompt": ""}, {"prompt": "a"}, {"prompt_ids": []}], *argv)
    assert code == 2 and [("error" in r) for r in records] == [True, False, True]
    assert "the prompt is empty" in records[0]["error"]["message"]


@pytest.fixture
def idle(engine: Engine, commands: Commands, monkeypatch: pytest.MonkeyPatch) -> Engine:
    """An engine that must not evaluate anything."""
    monkeypatch.setattr(engine.runner, "forward", None)
    commands.use(engine)
    return engine


def test_a_prompt_beyond_the_context(commands: Commands, idle: Engine):
    code, out, err = commands.chat("-p", "z" * 64)
    assert (code, out) == (
        2,
        "",
    ) and "the prompt has 65 tokens, this model's maximum context length is 64\nshorten" in err
    code, [record], _ = commands.batch([{"prompt_ids": [5] * 65}])
    assert code == 2 and "the prompt has 65 tokens" in record["error"]["message"]


@pytest.mark.parametrize("beams", [0, -1, 300, 10**9, 10**30])
def test_beam_counts(commands: Commands, idle: Engine, beams: int):
    limit = "expected an integer >= 1" if beams < 1 else "at most 299 fit this model"
    code, out, err = commands.chat("-p", "a", "--search", "trie", f"--beams={beams}")
    assert (code, out) == (2, "") and limit in err and str(beams) in err
    code, [record], _ = commands.batch([{"prompt": "a", "params": {"search": "trie", "beams": beams}}])
    assert code == 2 and record["error"]["code"] == "usage"
    assert (limit if beams < 2**63 else "out of range") in record["error"]["message"]


def test_more_than_the_memory_limit(commands: Commands, engine: Engine, base: Path, monkeypatch: pytest.MonkeyPatch):
    argv = ["--max-new-tokens", "8", "--search", "trie"]
    small = Engine.load(base, threads=1, kv_memory=40 * engine.pool.bytes_per_token)
    commands.use(small)
    with monkeypatch.context() as patch:
        patch.setattr(small.runner, "forward", None)  # before prefill
        code, out, err = commands.chat("-p", "abc", *argv, "--beams", "100")
        assert (code, out) == (4, "") and "holds 40 tokens" in err
        unit = engine.pool.bytes_per_token
        assert f"(prompt 3 + new tokens 8 - 1 + branches 99) x {unit} bytes per token" in err
        code, [record], _ = commands.batch([{"prompt": "abc"}], *argv, "--beams", "100")
        assert code == 2 and record["error"]["code"] == "memory"
    advised = re.search(r"--beams at most (\d+), the largest beam count that is sure to fit", err)
    assert advised and commands.chat("-p", "abc", *argv, "--beams", advised[1])[0] == 0
    assert commands.chat("-p", "abc", *argv, "--beams", "4")[0] == 0
    check_pool(small.pool, [])


def test_weights_that_the_machine_cannot_map(commands: Commands, folder: Path, monkeypatch: pytest.MonkeyPatch):
    error = SafetensorError("Error while opening: Cannot allocate memory (os error 12)")
    monkeypatch.setattr("models.checkpoint.tensor_files.safe_open", Mock(side_effect=error))
    commands.refuse(folder, 4, "the machine ran out of memory")


@pytest.mark.parametrize("size", ["10", "900T", "8000000T"])
def test_caches_that_cannot_be(commands: Commands, base: Path, size: str):
    commands.refuse(base, 4, "--kv-memory", flags=("--kv-memory", size))


# --- 17: the machine's memory runs out ---


def failing(monkeypatch: pytest.MonkeyPatch, owner: Any, name: str, when: int, error: BaseException) -> None:
    """Let the when-th call of a function raise, once."""
    real, calls = getattr(owner, name), itertools.count(1)

    def call(*args: Any, **options: Any) -> Any:
        if next(calls) == when:
            raise error
        return real(*args, **options)

    monkeypatch.setattr(owner, name, call)


MEMORY_ERRORS = [MemoryError(), RuntimeError(OUT_OF_MEMORY), RuntimeError("std::bad_alloc"), torch.OutOfMemoryError()]


@pytest.mark.parametrize("error", MEMORY_ERRORS, ids=repr)
@pytest.mark.parametrize("where", [(Driver, "_account"), (Runner, "pack"), (TokenTree, "grow"), (TokenTree, "keep")])
def test_running_out_of_memory(
    commands: Commands, engine: Engine, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str], error: Exception
):
    commands.use(engine)
    argv = ["--search", "trie", "--beams", "3", "--max-new-tokens", "6", "--ignore-eos"]
    good = commands.chat("-p", "ab", *argv)
    for when in (1, 4):
        with monkeypatch.context() as patch:
            failing(patch, *where, when, error)
            code, out, err = commands.chat("-p", "ab", *argv)
            assert code == 4 and good[1].startswith(out.removesuffix("\n")) and "ran out of memory" in err
            check_pool(engine.pool, [])
        with monkeypatch.context() as patch:  # in a conversation: told, and the next turn is answered
            failing(patch, *where, when, error)
            code, out, err = commands.chat(*argv, typed="ab\n/reset\nab\n")
            assert code == 0 and "error: the machine ran out of memory" in err and out.endswith(good[1])
            check_pool(engine.pool, [])


def test_a_batch_that_ran_out_of_memory_goes_on(
    commands: Commands, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    commands.use(engine)
    monkeypatch.setattr(engine, "parallel", 2)
    lines, argv = [{"prompt": "a" * (1 + i % 3)} for i in range(12)], ["--max-new-tokens", "4"]
    _, whole, _ = commands.batch(lines, *argv)
    for when in (1, 9, 14):
        path = tmp_path / f"out{when}"
        with monkeypatch.context() as patch:
            failing(patch, Runner, "pack", when, RuntimeError(OUT_OF_MEMORY))
            assert commands.batch(lines, *argv, "--output", path)[0] == 4
        check_pool(engine.pool, [])
        done = read(path)
        assert len(done) < 12 and texts(done) == texts(whole)[: len(done)]
        assert commands.batch(lines, *argv, "--output", path, "--resume")[0] == 0
        assert texts(read(path)) == texts(whole)


REAL = """
import io, re, resource, sys
from engine.app import batch
from engine.engine import Engine
from tests.invariants import check_pool
engine = Engine.load(sys.argv[1], threads=1, kv_memory=4 << 20)
batch.load_engine = lambda args, shard=None: engine
line = '{"prompt": "%s", "params": {"search": "trie", "beams": %d, "max_new_tokens": 3}}'
wide, small = (line % ("a b " * words, beams) for words, beams in ((int(sys.argv[2]), int(sys.argv[3])), (1, 2)))
limit = resource.getrlimit(resource.RLIMIT_AS)
status = open("/proc/self/status").read()
size = int(re.search(r"VmSize:\\s+(\\d+)", status)[1]) << 10
codes = []
for line, room in ((small, None), (wide, int(sys.argv[4])), (small, None), (wide, None)):
    resource.setrlimit(resource.RLIMIT_AS, (size + room if room else limit[0], limit[1]))
    codes.append(batch.main([], io.BytesIO(line.encode()), io.BytesIO()))
    resource.setrlimit(resource.RLIMIT_AS, limit)
    check_pool(engine.pool, [])
print(codes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="limits the address space as Linux does")
@pytest.mark.parametrize(
    ("shape", "words", "beams", "room"),
    [({"vocab": 18000}, 1, 600, 16 << 20), ({"mlp": 8000, "vocab": 300}, 120, 2, 2 << 20)],
    ids=["43 MB of logits", "layers, in C++"],
)
def test_really_running_out_of_memory(shape: dict[str, int], words: int, beams: int, room: int, tmp_path: Path):
    make(tmp_path, max_positions=1024, **(SHAPE | shape))
    command = [sys.executable, "-c", REAL, tmp_path, *map(str, (words, beams, room))]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.stderr.splitlines()[:1]) == ("[0, 4, 0, 0]\n", ["error: the machine ran out of memory"])


# --- 18: interrupts ---

SEARCHES = [Greedy(), Sample(num_return_sequences=3, seed=1), Trie(beams=4)]
CALLS = [
    (Driver, "_account"),
    (Runner, "pack"),
    (Driver, "_begin"),
    (Driver, "_allocate"),
    (Driver, "_resume"),
    (Driver, "_schedule"),
    (Driver, "_run"),
    (Driver, "_commit"),
    (TokenTree, "allocate"),
    (TokenTree, "grow"),
    (TokenTree, "keep"),
]


def test_a_thousand_interrupts(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """Asked for after a step, by leaving the generator, by Ctrl-C inside the machine; alone and in a conversation."""
    draw = random.Random(0)
    monkeypatch.setattr(engine.runner, "budget", 8)  # prompts go in chunks
    session, ended = Session(engine), 0
    prompts = [[5 + i % 90 for i in range(1 + 6 * k)] for k in range(4)]
    fresh = {(i, k): engine.generate([p], s, max_new_tokens=6)[0].outputs for i, s in enumerate(SEARCHES) for k, p in
             enumerate(prompts)}  # fmt: skip
    for n in range(1000):
        which, k = draw.randrange(len(SEARCHES)), draw.randrange(len(prompts))
        source, moment = draw.choice([engine, session]), draw.randrange(1, 9)
        steps = itertools.count(1)
        with monkeypatch.context() as patch:
            options: dict[str, Any] = {"max_new_tokens": 6}
            match n % 3:
                case 0:
                    options["interrupted"] = lambda steps=steps, moment=moment: next(steps) == moment
                case 1:
                    failing(patch, *draw.choice(CALLS), moment, KeyboardInterrupt())
            events = source.stream(prompts[k], SEARCHES[which], **options)
            try:
                for count, event in enumerate(events, 1):
                    if isinstance(event, Done) and event.result.outputs[0].finish_reason != "interrupted":
                        ended += 1
                        assert [o.token_ids for o in event.result.outputs] == [o.token_ids for o in fresh[which, k]]
                    if n % 3 == 2 and count == moment:
                        events.close()  # type: ignore[attr-defined]
                        break
            except KeyboardInterrupt:
                pass
        check_pool(engine.pool, session.trunk.pages if session.trunk else [])
    session.close()
    check_pool(engine.pool, [])
    assert 100 < ended < 600, ended


@pytest.mark.skipif(sys.gettrace() is not None, reason="a debugger or a coverage measurement traces already")
def test_ctrl_c_at_any_line(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    """The signal itself, at any line of the machine's bookkeeping."""
    draw, session, prompt = random.Random(2), Session(engine), [5 + i for i in range(12)]
    monkeypatch.setattr(engine.runner, "budget", 8)
    places = (
        "driver.py",
        "jobs.py",
        "runner.py",
        "tree.py",
        "slots.py",
        "pool.py",
        "packing.py",
        "greedy.py",
        "sample.py",
        "trie.py",
    )
    interrupted = 0

    def trace(frame: Any, *_: Any) -> Any:
        return line if frame.f_code.co_filename.endswith(places) else None

    def line(_: Any, event: str, __: Any) -> Any:
        if event == "line" and next(lines) == moment:
            signal.raise_signal(signal.SIGINT)
        return line

    for _ in range(200):
        lines, moment = itertools.count(), draw.randrange(1500)
        try:
            for event in draw.choice([engine, session]).stream(prompt, draw.choice(SEARCHES), max_new_tokens=4):
                if isinstance(event, Prefill) and not sys.gettrace():
                    sys.settrace(trace)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(None)
        check_pool(engine.pool, session.trunk.pages if session.trunk else [])
    session.close()
    assert interrupted > 60


def test_interrupted_batches(commands: Commands, engine: Engine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    """Whatever Ctrl-C hits: 130, whole lines, all pages back; --resume completes the file."""
    commands.use(engine)
    draw, argv = random.Random(1), ["--max-new-tokens", "4", "--search", "sample", "--num-return-sequences", "2"]
    lines = [{"prompt": "a" * (1 + i % 3), "params": {"seed": i}} for i in range(20)]
    _, whole, _ = commands.batch(lines, *argv)
    path = tmp_path / "out"
    for _ in range(20):
        path.unlink(missing_ok=True)
        with monkeypatch.context() as patch:
            failing(patch, *draw.choice([*CALLS, (Sink, "put")]), draw.randrange(1, 6), KeyboardInterrupt())
            code, _, err = commands.batch(lines, *argv, "--output", path)
        assert code == 130 and "--resume continues" in err
        check_pool(engine.pool, [])
        assert texts(read(path)) == texts(whole)[: len(read(path))]
        assert commands.batch(lines, *argv, "--output", path, "--resume")[0] == 0
        assert texts(read(path)) == texts(whole)


def command(name: str, folder: Path, *flags: str | Path) -> list[str]:
    return [sys.executable, "-m", f"engine.{name}", "--model", str(folder), "--threads", "1", *map(str, flags)]


def test_ctrl_c(commands: Commands, engine: Engine, base: Path, tmp_path: Path):
    path = tmp_path / "out"
    argv = command("batch", base, "--output", path)
    process = subprocess.Popen(argv, cwd=ROOT, stdin=subprocess.PIPE, stderr=subprocess.PIPE)
    assert process.stdin and process.stderr
    with process:
        process.stdin.write(b'{"prompt": "a"}\n' * 2)
        process.stdin.flush()
        until = time.monotonic() + 60
        while not (path.exists() and path.read_bytes().count(b"\n") == 2) and time.monotonic() < until:
            time.sleep(0.02)
        process.send_signal(signal.SIGINT)
        assert process.stderr.read().decode() == (
            f"interrupted: {path} has the answers so far; the same command with --resume continues\n"
        )
        assert process.wait(120) == 130
    commands.use(engine)
    assert len(read(path)) == 2
    assert commands.batch([{"prompt": "a"}] * 3, "--output", path, "--resume")[0] == 0
    assert len(set(map(str, texts(read(path))))) == 1 and len(read(path)) == 3


# --- 19: a long life ---


TURNS = """
import io, os, sys
from engine.app import chat
from engine.engine import Engine
from tests.invariants import check_pool

engine = Engine.load(sys.argv[1], threads=1, kv_memory=1 << 16)
chat.cli.load_engine = lambda args, shard=None: engine
sets = ["search=greedy", "search=sample num_return_sequences=2", "search=trie beams=5 num_return_sequences=1"]
turns = "".join(f"/set {s} max_new_tokens=6\\nHi there\\nand\\n{'x' * 70}\\n/stats\\n/reset\\n" for s in sets)

class Terminal(io.StringIO):
    isatty = lambda self: True

def live(times):
    sys.stdin, sys.stdout, sys.stderr = Terminal(turns * times), io.StringIO(), io.StringIO()
    code = chat.main(["--model", sys.argv[1]])
    errors, sys.stdout, sys.stderr = sys.stderr.getvalue(), sys.__stdout__, sys.__stderr__
    assert code == 0 and errors.count("error: ") == 3 * times, errors  # the one that is too long, each time
    check_pool(engine.pool, [])
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

live(40)  # what the C library keeps of freed memory settles only after hundreds of turns
before = live(1)
print((live(40) - before) / (40 * 9))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="reads Linux's figures")
def test_many_turns_leave_nothing_behind(base: Path):
    """A chat over all searches, conversations begun anew now and then, errors in between: no memory is left behind.

    In a process of its own: what other tests leave in a heap hides it.
    """
    done = subprocess.run([sys.executable, "-c", TURNS, base], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 2048, "bytes for each turn"


# --- 20: lines, pipes, disks ---


def test_a_closed_pipe(base: Path):
    """`| head -1` closes it, for example."""
    argv = command("batch", base, "--max-new-tokens", "20")
    process = subprocess.Popen(
        argv, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, bufsize=0
    )
    assert process.stdin and process.stdout and process.stderr
    with process:
        process.stdin.write(b'{"prompt": "a"}\n')
        assert process.stdout.read(1) == b"{"
        process.stdout.close()
        process.stdin.write(b'{"prompt": "a"}\n' * 1000)
        process.stdin.close()
        assert (process.wait(120), process.stderr.read()) == (141, b"")


LIMITED = "import resource, sys; from engine import batch; resource.setrlimit(resource.RLIMIT_FSIZE, (2000, 2000)); "


def test_a_full_disk(commands: Commands, engine: Engine, base: Path, tmp_path: Path):
    path, text = tmp_path / "out", b'{"prompt": "a"}\n' * 20
    flags = ["--model", str(base), "--threads", "1", "--output", str(path)]
    argv = [sys.executable, "-c", LIMITED + f"sys.exit(batch.main({flags}))"]
    done = subprocess.run(argv, cwd=ROOT, input=text, capture_output=True, timeout=120)
    assert done.returncode == 2 and os.strerror(errno.EFBIG) in done.stderr.decode()
    assert "make room, and continue with --resume" in done.stderr.decode()
    kept = len(read(path))
    assert 0 < kept < 20
    commands.use(engine)
    assert commands.batch([{"prompt": "a"}] * 20, "--output", path, "--resume")[0] == 0
    assert len(set(map(str, texts(read(path))))) == 1 and len(read(path)) == 20


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_reply_that_cannot_be_written(base: Path):
    with open("/dev/full", "wb") as full:
        argv = command("chat", base, "--max-new-tokens", "4", "-p", "a")
        done = subprocess.run(
            argv, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, timeout=120
        )
    assert done.returncode == 2 and b"No space left on device" in done.stderr
    assert b"Traceback" not in done.stderr and b"Exception ignored" not in done.stderr
