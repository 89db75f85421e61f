"""Random models whose layers are attention and gated delta nets or scans, small enough to be evaluated afresh often."""

from dataclasses import replace
from typing import Any

import torch
from safetensors.torch import save_file

from kernels.layout import ChannelKind, DeltaKind, ScanKind
from models import FAMILIES
from models.checkpoint.headers import Checkpoint
from models.config import Recurrent, SharedBlocks
from models.families.granite_hybrid import SCANS
from models.families.llama import Llama
from models.families.zamba2 import Zamba2
from tests.invariants import check_recurrent
from tools.random_checkpoint import draw, make

VOCAB = 120
KIND = DeltaKind(key_heads=2, value_heads=4, key_size=8, value_size=6, taps=4)
BY_KEY = replace(KIND, key_decays=True)
SCAN = ScanKind(key_heads=2, value_heads=4, key_size=8, value_size=6, taps=4)
CHANNELS = ChannelKind(key_heads=1, value_heads=1, key_size=8, value_size=24, taps=4)
MAMBA = SCANS | {"scan_norms": ("mamba.dt_layernorm", "mamba.b_layernorm", "mamba.c_layernorm")}


def hybrid(
    folder,
    monkeypatch,
    *,
    kind=KIND,
    layers="rar",
    interleaved=False,
    beside=False,
    shared=False,
    seed=1,
    scale=0.7,
    **options,
):
    """Write a checkpoint of a family that is a Llama but for recurrent layers: those that `layers` names "r"; `beside`:
    they have attention as well; `shared`: all are scans, and those that it names "a" share a block."""
    scans = isinstance(kind, ScanKind | ChannelKind)
    matrices: dict[str, Any] = MAMBA if scans else {}
    more = {"rank": 5, "part_norms": "own"} if isinstance(kind, ChannelKind) else {}
    if interleaved:
        matrices = {"recurrent_in": ("linear_attn.in_proj_qkvz", "linear_attn.in_proj_ba")}

    family: Any = Zamba2 if shared else Llama

    class Hybrid(family):
        names = replace(family.names, **matrices)

        @classmethod
        def view(cls, checkpoint):
            return checkpoint

        @staticmethod
        def read(fields):
            recurs = tuple(shared or layer == "r" for layer in layers)
            recurrent = Recurrent(kind, recurs, interleaved, scans, scans, beside=beside, **more)
            rope: dict[str, Any] = {} if beside or "a" in layers else {"rope": None}
            if shared and "a" in layers:
                owners = tuple(layers.index("a") if layer == "a" else None for layer in layers)
                rope |= {"shared": SharedBlocks(owners, 3, adapted=True)}
            if shared:
                rope |= {"alone": ("attention",) * len(layers)}
            return replace(Llama.read(fields), recurrent=recurrent, **rope)

    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", Hybrid)
    sizes: dict[str, Any] = {"width": 32, "mlp": 48, "heads": 4, "kv_heads": 2, "vocab": VOCAB, "max_positions": 400}
    make(folder, layers=len(layers), seed=seed, scale=scale, **sizes | options)
    shapes = Hybrid.names.tensors(Hybrid.read(Checkpoint.open(folder).fields))
    generator, tensors = torch.Generator().manual_seed(seed), {}
    for name, shape in shapes.items():
        if name.endswith(("A_log", "dt_bias", "dt_proj.bias", "conv1d.weight", ".D")):
            tensors[name] = torch.rand(shape, generator=generator) - 0.5
        else:
            tensors[name] = draw(name, shape, seed=seed, scale=scale, tied=False)
    save_file(tensors, folder / "model.safetensors")
    return folder


def check_stores(engine, trees=()):
    """Nothing but these trees holds rows or states of recurrent layers."""
    check_recurrent(engine.pool, [tree.states_held for tree in trees])
    rows, states = engine.pool.cache.recurrent
    assert rows[:, 0].eq(0).all() and states[:, 0].eq(0).all()


def fresh(engine, ids):
    """Log-probabilities after every token of a sequence that is evaluated by itself, float32 [len(ids), V]."""
    return torch.log_softmax(engine.runner.logits(ids), -1)
