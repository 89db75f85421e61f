"""Heads of multi-token prediction: logits are those of the definition; checkpoints without all of one are refused."""

import json
import math
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch.nn import functional as F

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.load.budget import plan
from engine.load.options import LoadOptions
from engine.load.sizes import Workload
from engine.step.graphs import make_runner
from engine.step.packing import Chunk
from models import FAMILIES, Checkpoint, CheckpointError, load_model
from models.checkpoint.sizes import measure
from models.formats.floats import has_kernels
from models.mtp import MTP
from tests.draft_heads import add_mtp
from tests.engine.load.test_budget import tensors_in

CPU = torch.device("cpu")
GOLDEN = Path(__file__).parents[1] / "golden"
DENSE = GOLDEN / "qwen3_5/plain"


@pytest.fixture
def folder(tmp_path):
    """A dense model with a head."""
    shutil.copytree(DENSE, tmp_path, dirs_exist_ok=True)
    add_mtp(tmp_path)
    return tmp_path


def opened(folder: Path) -> MTP:
    checkpoint = Checkpoint.open(folder)
    return MTP(checkpoint, FAMILIES[checkpoint.architecture], torch.float32, CPU)


def defined(w, config, tokens, rows):
    """The head's last row after tokens and the model's rows of those before them, float64."""

    def normed(x, name):
        return x / (x.square().mean(-1, keepdim=True) + config["rms_norm_eps"]).sqrt() * (1 + w[f"mtp.{name}.weight"])

    def product(name, x):
        return w[f"mtp.{name}.weight"] @ x

    rope, D = config["rope_parameters"], config["head_dim"]
    half = int(D * rope["partial_rotary_factor"]) // 2
    keys, values, layer, streams = [], [], "layers.0.", []

    def rotated(x, at):
        angle = at * rope["rope_theta"] ** (-torch.arange(half).double() / half)
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin(), rest], -1)

    for at, (token, row) in enumerate(zip(tokens, rows, strict=True)):
        embedded = w["model.embed_tokens.weight"][token]
        x = product("fc", torch.cat([normed(embedded, "pre_fc_norm_embedding"), normed(row, "pre_fc_norm_hidden")]))
        read = normed(x, f"{layer}input_layernorm")
        q, gate = product(f"{layer}self_attn.q_proj", read).view(-1, 2 * D).chunk(2, -1)
        k, v = (product(f"{layer}self_attn.{name}_proj", read).view(-1, D) for name in "kv")
        q, k = rotated(normed(q, f"{layer}self_attn.q_norm"), at), rotated(normed(k, f"{layer}self_attn.k_norm"), at)
        keys.append(k)
        values.append(v)
        mixed = []
        for head in range(len(q)):
            group = head * len(k) // len(q)
            scores = torch.stack([q[head] @ key[group] for key in keys]) / math.sqrt(D)
            mixed.append(scores.softmax(0) @ torch.stack([value[group] for value in values]))
        x = x + product(f"{layer}self_attn.o_proj", (torch.stack(mixed) * gate.sigmoid()).flatten())
        read = normed(x, f"{layer}post_attention_layernorm")
        up = F.silu(product(f"{layer}mlp.gate_proj", read)) * product(f"{layer}mlp.up_proj", read)
        streams.append(normed(x + product(f"{layer}mlp.down_proj", up), "norm"))
    return streams[-1]


def test_logits_are_those_of_the_definition(folder):
    model, head = load_model(Checkpoint.open(folder), torch.float32, CPU), opened(folder)
    head.attach(model)
    pool = PagePool(head.shape, 64, 1, torch.float32, CPU)
    runner = make_runner(head, pool, head.shape.vocab_size)
    tree = TokenTree(pool, [5, 6, 7, 8])
    nodes = [*tree.grow_path(tree.root, [3, 4]), tree.child(tree.root, 9)]
    rows = torch.randn(7, head.config.width, generator=torch.Generator().manual_seed(1))
    p = runner.pack([Chunk(tree, 4, nodes, tree.allocate(4, nodes))])
    with torch.inference_mode():
        own = head(head.taken(rows), p.tokens_T, p.layout.positions_T, p.spans_T, pool.cache, p.layout)
        logits = head.logits(own)
    w = {name: tensor.double() for name, tensor in load_file(folder / "model.safetensors").items()}
    config = json.loads((folder / "config.json").read_text())
    for places in ([0, 1, 2, 3], [0, 1, 2, 3, 4, 5], [0, 1, 2, 3, 6]):
        tokens = [[5, 6, 7, 8, 3, 4, 9][place] for place in places]
        want = defined(w, config, tokens, rows[places].double())
        torch.testing.assert_close(own[places[-1]].double(), want, rtol=1e-4, atol=1e-4)
        head_matrix = w.get("lm_head.weight", w["model.embed_tokens.weight"])
        torch.testing.assert_close(logits[places[-1]].double(), head_matrix @ want, rtol=1e-4, atol=1e-4)


def test_bytes_are_counted(folder):
    size, head = measure(Checkpoint.open(folder), torch.float32, CPU, own_head=True), opened(folder)
    if has_kernels(torch.float32, CPU):
        assert size.matrices == sum(x.nbytes for x in tensors_in(head.modules()))
    lines = plan(LoadOptions(folder, drafts="mtp", dtype="float32"), Workload()).lines
    assert lines["rows of prompts for the draft head"] == head.config.width * 4
    assert "draft tokenizer" not in lines


def test_a_model_with_a_head_loads_without_it(folder):
    model = load_model(Checkpoint.open(folder), torch.float32, CPU)
    bare = load_model(Checkpoint.open(DENSE), torch.float32, CPU)
    assert [*dict(model.named_modules())] == [*dict(bare.named_modules())]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x: {n: t for n, t in x.items() if n != "mtp.fc.weight"}, "missing mtp.fc.weight"),
        (lambda x: x | {"mtp.layers.1.extra": torch.ones(3)}, "unknown mtp.layers.1.extra"),
        (lambda x: x | {"mtp.fc.weight": x["mtp.fc.weight"].T.contiguous()}, "mtp.fc.weight in model.safetensors: exp"),
        (lambda x: {n: t for n, t in x.items() if not n.startswith("mtp.")}, "has no draft head of its own"),
    ],
    ids=["missing", "more", "shape", "none"],
)
def test_what_is_no_head(change, message, folder):
    tensors = load_file(folder / "model.safetensors")
    save_file(change(tensors), folder / "model.safetensors")
    with pytest.raises(CheckpointError, match=message):
        opened(folder)
