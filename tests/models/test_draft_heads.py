"""EAGLE-3 heads: their logits are those of the definition, the model taps what they read, and misfits are refused."""

import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from engine import Engine, UsageError
from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.load.budget import plan
from engine.load.options import LoadOptions
from engine.load.sizes import Workload
from engine.step.graphs import make_runner
from engine.step.packing import Chunk
from models import Checkpoint, CheckpointError, load_model
from models.checkpoint.sizes import measure
from models.draft_heads import Eagle3
from models.formats.floats import has_kernels
from models.shard import Shard
from tests.draft_heads import make_eagle, random_tensors
from tests.engine.load.test_budget import tensors_in
from tools.random_checkpoint import make

CPU = torch.device("cpu")
VOCAB, KNOWN, WIDTH = 260, 130, 64
SIZES = {"width": WIDTH, "mlp": 96, "heads": 4, "kv_heads": 2, "vocab": VOCAB, "max_positions": 400}
IDS = "eagle_aux_hidden_state_layer_ids"


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    folder = tmp_path_factory.mktemp("target")
    make(folder, layers=4, seed=1, **SIZES)
    return folder


@pytest.fixture(scope="module")
def deep(tmp_path_factory):
    """A model of as many layers as the default needs."""
    folder = tmp_path_factory.mktemp("deep")
    make(folder, layers=8, seed=2, **SIZES)
    return folder


def opened(folder) -> Eagle3:
    return load_model(Checkpoint.open(folder), torch.float32, CPU)


def rms(x, weight):
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight


def rotated(x, at):
    """Halves of heads turned by the angles of a position."""
    half = x.shape[-1] // 2
    angle = at * 10000.0 ** (-torch.arange(half).double() / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)


def defined(w, embedding, tokens, rows, layer="midlayer.", normed=False):
    """The head's last row and logits after a text without its first token, float64.

    Args:
        rows: of the token before each, one of width E.
    """
    keys, values, heads = [], [], 4
    for at, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        own = rms(row, w[f"{layer}hidden_norm.weight"])
        x = torch.cat([rms(embedding[token], w[f"{layer}input_layernorm.weight"]), own])
        q, k, v = (w[f"{layer}self_attn.{name}_proj.weight"] @ x for name in "qkv")
        q, k = q.view(heads, -1), k.view(2, -1)
        if f"{layer}self_attn.q_norm.weight" in w:
            q, k = rms(q, w[f"{layer}self_attn.q_norm.weight"]), rms(k, w[f"{layer}self_attn.k_norm.weight"])
        keys.append(rotated(k, at))
        values.append(v.view(2, -1))
        q = rotated(q, at)
        mixed = []
        for head in range(heads):
            scores = torch.stack([q[head] @ key[head // 2] for key in keys]) / math.sqrt(q.shape[-1])
            mixed.append(scores.softmax(0) @ torch.stack([value[head // 2] for value in values]))
        stream = (own if normed else row) + w[f"{layer}self_attn.o_proj.weight"] @ torch.cat(mixed)
        read = rms(stream, w[f"{layer}post_attention_layernorm.weight"])
        up = F.silu(w[f"{layer}mlp.gate_proj.weight"] @ read) * (w[f"{layer}mlp.up_proj.weight"] @ read)
        stream = stream + w[f"{layer}mlp.down_proj.weight"] @ up
    return stream, w["lm_head.weight"] @ rms(stream, w["norm.weight"])


EACH = {f"fc_norm.{i}.weight": (WIDTH,) for i in range(3)}
SPECULATORS = {  # kinds of its heads: fields of the head, `model_type` of the layer, tensors
    "speculators": ({}, "llama", {}),
    "qwen3": ({}, "qwen3", {f"layers.0.self_attn.{part}_norm.weight": (WIDTH // 4,) for part in "qk"}),
    "norm_before_fc": ({"norm_before_fc": True}, "llama", {"input_norm.weight": (3 * WIDTH,)}),
    "fc_norm": ({"fc_norm": True}, "llama", EACH),
    "norm_output": ({"norm_output": True}, "llama", {}),
}


def speculators(folder: Path, kind: str = "speculators") -> None:
    """Make of a head what the library "speculators" would have written."""
    fields, layer, more = SPECULATORS[kind]
    config = json.loads((folder / "config.json").read_text()) | {"model_type": layer}
    outer = fields | {"architectures": ["Eagle3Speculator"], "draft_vocab_size": config.pop("draft_vocab_size")}
    outer |= {IDS: config.pop(IDS), "speculators_model_type": "eagle3", "transformer_layer_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    tensors = load_file(folder / "model.safetensors")
    tensors |= random_tensors({"embed_tokens.weight": (VOCAB, WIDTH), **more}, seed=9, scale=8.0)
    save_file(tensors, folder / "model.safetensors")


@pytest.mark.parametrize("kind", ["authors", *SPECULATORS])
def test_logits_are_those_of_the_definition(kind, target, tmp_path):
    """In a tree: a trunk, and two branches of two tokens."""
    layer = "midlayer." if kind == "authors" else "layers.0."
    make_eagle(tmp_path, width=WIDTH, vocab=VOCAB, known=KNOWN, read=[0, 2, 4], layer=layer)
    if kind != "authors":
        speculators(tmp_path, kind)
    model, head = load_model(Checkpoint.open(target), torch.float32, CPU), opened(tmp_path)
    head.attach(model)
    pool = PagePool(head.shape, 64, 1, torch.float32, CPU)
    runner = make_runner(head, pool, VOCAB)
    tree = TokenTree(pool, [5, 6, 7, 8, 9])
    branches = [tree.grow_path(tree.root, path) for path in ([3, 4], [11, 12])]
    order = sorted(node for branch in branches for node in branch)
    rows = torch.randn(5 + len(order), WIDTH, generator=torch.Generator().manual_seed(1))
    chunk = Chunk(tree, 5, order, tree.allocate(5, order))
    p = runner.pack([chunk])
    with torch.inference_mode():
        own = head(rows, p.tokens_T, p.layout.positions_T, p.spans_T, pool.cache, p.layout)
        logits = head.logits(own)
    stored = load_file(tmp_path / "model.safetensors")
    w = {name: tensor.double() for name, tensor in stored.items()}
    kept = load_file(target / "model.safetensors")["model.embed_tokens.weight"]
    embedding = stored.get("embed_tokens.weight", kept).double()
    for branch in branches:
        for length in (1, 2):
            path = branch[:length]
            places = [*range(5), *(5 + order.index(node) for node in path)]
            tokens = [*tree.trunk.tokens, *map(tree.token, path)]
            given = rows[places].double()
            stream, want = defined(w, embedding, tokens, given, layer, kind != "authors")
            stream = rms(stream, w["norm.weight"]) if kind == "norm_output" else stream
            torch.testing.assert_close(own[places[-1]].double(), stream, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(logits[places[-1]].double(), want, rtol=1e-4, atol=1e-4)
    chosen = torch.arange(KNOWN) * VOCAB // KNOWN
    assert head.tokens_V is not None and head.tokens_V.equal(chosen)
    three = torch.randn(2, 3, WIDTH)
    normed = three
    if kind == "norm_before_fc":
        normed = rms(three.flatten(1), stored["input_norm.weight"])
    elif kind == "fc_norm":
        normed = torch.stack([rms(three[:, i], stored[f"fc_norm.{i}.weight"]) for i in range(3)], 1)
    torch.testing.assert_close(head.taken(three), normed.flatten(1) @ stored["fc.weight"].T)


@pytest.mark.parametrize(
    ("config", "tapped"),
    [({}, (2, 4, 5)), ({IDS: [7, 1, 8]}, (1, 7, 8)), ({"eagle_config": {IDS: [1, 3, 4]}}, (2, 4, 5))],
    ids=["default", "given", "as sglang"],
)
def test_layers(config, tapped, deep, tmp_path):
    make_eagle(tmp_path, width=WIDTH, vocab=VOCAB, known=KNOWN, **config)
    model = load_model(Checkpoint.open(deep), torch.float32, CPU)
    opened(tmp_path).attach(model)
    assert model.tapped == tapped


def edited(name, change):
    """Changes a tensor of a head."""

    def edit(folder):
        tensors = load_file(folder / "model.safetensors")
        found = change(tensors.pop(name))
        save_file(tensors | ({} if found is None else {name: found}), folder / "model.safetensors")

    return edit


FAULTS = {
    "vocabulary": ({"vocab_size": 300}, None, "it has a vocabulary of 300 tokens, the model one of 260"),
    "rows": ({"target_hidden_size": 32}, edited("fc.weight", lambda x: x[:, :96].clone()), "it has rows of width 32"),
    "fc": ({}, edited("fc.weight", lambda x: x[:, :128].clone()), "fc.weight in model.safetensors: expected .64, 192"),
    "layer": ({}, edited("midlayer.hidden_norm.weight", lambda x: None), "missing midlayer.hidden_norm.weight"),
    "two ways to norm": ({"norm_before_fc": True, "fc_norm": True}, None, "fc_norm: expected false, as norm_before_fc"),
    "two layers": ({"num_hidden_layers": 2}, None, "num_hidden_layers: expected 1"),
    "layers by default": ({IDS: None}, None, "by default are 2, 2, 1, and the model has 4"),
    "equal layers": ({IDS: [1, 1, 2]}, None, "its config names the layers 1, 1, 2"),
    "a layer too many": ({IDS: [1, 2, 5]}, None, "its config names the layers 1, 2, 5, and the model has 4"),
    "two numbers": ({IDS: [1, 2]}, None, f"{IDS}: expected 3 numbers of layers"),
    "no numbers": ({IDS: None, "eagle_config": {IDS: "all"}}, None, f"eagle_config.{IDS}: expected 3 numbers"),
    "no map": ({}, edited("d2t", lambda x: None), "knows 130 of 260 tokens, and no tensor d2t"),
    "a map too short": ({}, edited("d2t", lambda x: x[1:].clone()), "d2t: expected .130. of int64, got .129."),
    "a map of floats": ({}, edited("d2t", lambda x: x.float()), "d2t: expected .130. of int64, got .130. of float32"),
    "tokens too high": ({}, edited("d2t", lambda x: x + 131), "d2t: expected offsets to 130 different tokens below"),
    "a token twice": ({}, edited("d2t", lambda x: -torch.arange(KNOWN).div(2).long()), "130 different tokens"),
    "more logits": ({"draft_vocab_size": 140}, None, "lm_head.weight in model.safetensors: expected .140, 64."),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_misfits_are_refused(fault, target, tmp_path):
    config, edit, message = FAULTS[fault]
    make_eagle(tmp_path, width=WIDTH, vocab=VOCAB, known=KNOWN, **{IDS: [0, 2, 4]} | config)
    if edit:
        edit(tmp_path)
    with pytest.raises(CheckpointError, match=message):
        Engine.load(target, draft=tmp_path, drafts="model", kv_memory=1 << 22)


def test_a_head_without_an_embedding_is_as_wide_as_the_models(target, tmp_path):
    make_eagle(tmp_path, width=WIDTH // 2, vocab=VOCAB, known=KNOWN, read=[0, 2, 4], target_hidden_size=WIDTH)
    edited("fc.weight", lambda x: torch.zeros(WIDTH // 2, 3 * WIDTH))(tmp_path)
    with pytest.raises(CheckpointError, match="it has no embedding and a width of 32, the model an embedding of 64"):
        Engine.load(target, draft=tmp_path, drafts="model", kv_memory=1 << 22)


def test_pickles_are_refused_by_name(target, tmp_path):
    make_eagle(tmp_path, width=WIDTH, vocab=VOCAB, known=KNOWN, read=[0, 2, 4])
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"the weights are pickles \(pytorch_model.bin\)"):
        Engine.load(target, draft=tmp_path, drafts="model", kv_memory=1 << 22)


@pytest.mark.parametrize("options", [{"shard": Shard(0, 2)}, {"device": torch.device("cuda")}], ids=["shard", "gpu"])
def test_where_heads_do_not_run(options, tmp_path):
    make_eagle(tmp_path, width=WIDTH, vocab=VOCAB, known=KNOWN)
    with pytest.raises(CheckpointError, match=r"draft heads (cannot be divided|run on a CPU only)"):
        measure(Checkpoint.open(tmp_path), **{"dtype": torch.float32, "device": CPU} | options)


def test_bytes_are_counted(target, tmp_path):
    make_eagle(tmp_path, width=WIDTH, vocab=VOCAB, known=KNOWN, read=[0, 2, 4])
    for quant in ("none", "int8"):
        size = measure(Checkpoint.open(tmp_path), torch.float32, CPU, quant)
        head = load_model(Checkpoint.open(tmp_path), torch.float32, CPU, quant)
        if has_kernels(torch.float32, CPU):
            assert size.matrices == sum(x.nbytes for x in tensors_in(head.modules()))
        assert size.shape == head.shape
    lines = plan(LoadOptions(target, draft=tmp_path, drafts="model", dtype="float32"), Workload()).lines
    assert lines["rows of prompts for the draft head"] == WIDTH * 4 and lines["draft weights"] > 0


def test_a_head_is_no_model(target, tmp_path):
    make_eagle(tmp_path, width=WIDTH, vocab=VOCAB, known=KNOWN, read=[0, 2, 4])
    with pytest.raises(UsageError, match="a draft head cannot be the model: it drafts for one"):
        Engine.load(tmp_path, kv_memory=1 << 22)
    with pytest.raises(UsageError, match="a draft head cannot be the reward: it drafts for one"):
        Engine.load(target, reward=tmp_path, kv_memory=1 << 22)
