"""Families whose rows of queries and keys lie in another order, and names of tensors that only some files have."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from engine import Engine
from models.checkpoint.headers import Checkpoint
from models.families import FAMILIES
from models.shard import Shard
from models.sharding import Partition, in_halves
from tests.models.copies import GOLDEN, changed

TEXT = list(range(3, 30))
ORDERED = {  # the modules that make queries and keys
    "glm/four": ("self_attn.q_proj", "self_attn.k_proj"),
    "cohere/norms": ("self_attn.q_proj", "self_attn.v_proj"),
    "gpt_neox/plain": ("attention.query_key_value",),
    "gpt_neox/gptj": ("attn.q_proj", "attn.k_proj"),
    "gpt_neox/falcon_groups": ("self_attention.query_key_value",),
    "experts/afmoe": ("self_attn.gate_proj", "self_attn.q_proj"),
    "alibi/bloom": ("self_attention.query_key_value",),
    "relatives/codegen": ("attn.qkv_proj",),
    "relatives/persimmon": ("self_attn.query_key_value",),
}
Changed = Callable[[dict[str, Tensor]], dict[str, Tensor]]


def logits(folder: Path, **options: Any) -> Tensor:
    return Engine.load(folder, dtype="float32", kv_memory="4M", threads=2, **options).logits(TEXT)


@pytest.mark.parametrize("variant", ORDERED)
def test_adapters_change_the_rows_that_they_are_for(variant: str, tmp_path: Path):
    """Against the model with the products added to its weights."""
    factors, added, draw = dict[str, Tensor](), dict[str, Tensor](), torch.Generator().manual_seed(1)
    for name, x in load_file(GOLDEN / variant / "model.safetensors").items():
        if name.removesuffix(".weight").endswith(ORDERED[variant]) and name.endswith(".weight"):
            a, b = (torch.randn(*size, generator=draw) / 4 for size in ((2, x.shape[1]), (x.shape[0], 2)))
            module = "base_model.model." + name.removesuffix(".weight")
            factors |= {f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}
            added[name] = b @ a
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    targets = [name.rpartition(".")[2] for name in ORDERED[variant]]
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": targets}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    save_file(factors, adapter / "adapter_model.safetensors")
    whole = changed(
        tmp_path, variant, tensors=lambda stored: {n: x.float() + added.get(n, 0) for n, x in stored.items()}
    )
    want, plain = logits(whole), logits(GOLDEN / variant)
    assert (logits(GOLDEN / variant, adapters=[adapter]) - want).abs().max() <= 2e-5 * want.abs().max()
    assert (want - plain).abs().max() > 0.05 * want.abs().max()


@pytest.mark.parametrize(
    "variant", ["glm/four", "cohere/norms", "gpt_neox/plain", "gpt_neox/falcon_groups", "relatives/codegen"]
)
def test_processes_have_all_rows_between_them(variant: str):
    checkpoint = Checkpoint.open(GOLDEN / variant)
    family = FAMILIES[checkpoint.architecture]
    c = family.read(checkpoint.fields)
    both = [Partition.of(c, Shard(rank, 2), "").qkv or () for rank in range(2)]
    rows = [[row for some in part for row in some] for part in both]
    assert len(rows[0]) == len(rows[1]) == (c.heads + 2 * c.kv_heads) * c.head_dim // 2
    assert sorted(rows[0] + rows[1]) == [*range(2 * len(rows[0]))]
    whole = [row for some in Partition.of(c, Shard(0, 1), "").qkv or () for row in some]
    size = c.heads * c.head_dim
    assert whole[: size // 2] == rows[0][: size // 2] and whole[size // 2 : size] == rows[1][: size // 2]


def test_neighbours_go_to_the_halves_of_what_is_rotated():
    checkpoint = Checkpoint.open(GOLDEN / "glm/plain")
    c = FAMILIES[checkpoint.architecture].read(checkpoint.fields)
    assert [i for some in in_halves(c, 16) for i in some] == [16, 18, 17, 19, 20, 21, 22, 23]


def renamed(old: str, new: str) -> Changed:
    return lambda stored: {name.replace(old, new): x for name, x in stored.items()}


def with_more(name: str) -> Changed:
    return lambda stored: stored | {name: torch.ones(3)}


def by_expert(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """The names of MiniMax's own files."""
    found = {}
    for name, x in stored.items():
        layer, _, part = name.partition(".mlp.")
        if part == "experts.gate_up_proj":
            for i, both in enumerate(x):
                for own, half in zip(("w1", "w3"), both.chunk(2), strict=True):
                    found[f"{layer}.block_sparse_moe.experts.{i}.{own}.weight"] = half.contiguous()
        elif part == "experts.down_proj":
            found |= {f"{layer}.block_sparse_moe.experts.{i}.w2.weight": own.contiguous() for i, own in enumerate(x)}
        else:
            found[name.replace(".mlp.", ".block_sparse_moe.")] = x
    return found


@pytest.mark.parametrize(
    ("variant", "tensors"),
    [
        ("gpt_neox/plain", renamed("lm_head.", "embed_out.")),
        ("gpt_neox/plain", with_more("gpt_neox.layers.0.attention.masked_bias")),
        ("gpt_neox/gptj", with_more("transformer.h.0.attn.bias")),
        ("glm/moe", with_more("model.layers.46.eh_proj.weight")),
        ("experts/ernie", renamed(".gate.moe_statics.", ".moe_statics.")),
        ("experts/ernie", with_more("model.mtp_linear_proj.0.weight")),
        ("experts/minimax", by_expert),
        ("relatives/codegen", with_more("transformer.h.0.attn.causal_mask")),
        ("alibi/mpt", with_more("transformer.blocks.0.norm_1.bias")),
        ("relatives/gpt", with_more("transformer.h.0.attn.bias")),
        ("relatives/xglm", with_more("model.embed_positions.weights")),
        ("relatives/gpt_neo", with_more("transformer.h.1.attn.attention.masked_bias")),
        ("relatives/exaone_moe", renamed(".gate.e_score_correction_bias", ".e_score_correction_bias")),
        ("relatives/exaone_moe", with_more("mtp.fc.weight")),
        ("relatives/mellum", with_more("mtp.fc.weight")),
    ],
)
def test_names_of_other_files(variant: str, tensors: Changed, tmp_path: Path):
    assert logits(changed(tmp_path, variant, tensors=tensors)).equal(logits(GOLDEN / variant))
