"""Kimi Linear and Ling 3: spellings of tensors and fields, lists of layers."""

import re

import pytest
import torch

from engine import Engine
from models.checkpoint.fields import Fields
from models.errors import CheckpointError
from models.families.kimi_linear import KimiLinear
from tests.models.copies import GOLDEN, changed

TEXT = [(7 * i * i + 3 * i) % 101 + 3 for i in range(70)]
SIZES = {"vocab_size": 100, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}


def same_logits(folder, variant):
    plain, found = (Engine.load(path, dtype="float32") for path in (GOLDEN / variant, folder))
    assert found.logits(TEXT).equal(plain.logits(TEXT))


def test_names_that_transformers_saves(tmp_path):
    """A matrix for each expert, and a dense layer's MLP under the name of experts; decays in one dimension, as other
    files of such layers have them."""

    def saved(tensors):
        found = {}
        for name, x in tensors.items():
            experts, end = name.rpartition("experts.")[::2]
            if end == "gate_up_proj":
                halves = [part.chunk(2) for part in x]
                found |= {f"{experts}experts.{i}.w1.weight": pair[0] for i, pair in enumerate(halves)}
                found |= {f"{experts}experts.{i}.w3.weight": pair[1] for i, pair in enumerate(halves)}
            elif end == "down_proj":
                found |= {f"{experts}experts.{i}.w2.weight": part for i, part in enumerate(x)}
            else:
                found[name.replace(".mlp.", ".block_sparse_moe.")] = x.flatten() if name.endswith("A_log") else x
        return {name: x.contiguous() for name, x in found.items()}

    same_logits(changed(tmp_path, "kimi_linear/plain", {}, saved), "kimi_linear/plain")


def test_ling_as_transformers_saves_it(tmp_path):
    """Other numbers in `head_dim`; with a draft head, which is left out."""
    sizes = {"head_dim": 8, "linear_head_dim": 6, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}

    def with_draft(tensors):
        return tensors | {"model.layers.3.eh_proj.weight": torch.zeros(24, 48, dtype=torch.bfloat16)}

    same_logits(changed(tmp_path, "bailing_hybrid/plain", sizes, with_draft), "bailing_hybrid/plain")


@pytest.mark.parametrize(
    ("kda", "full", "message"),
    [
        ([1, 2], [3], None),
        ([3, 1], [2], None),
        ([1, 2, 3], [], None),
        ([0, 2], [3], "linear_attn_config.kda_layers: expected a list of layers, numbers from 1 to 3"),
        ([1, 2], 3, "linear_attn_config.full_attn_layers: expected a list of layers, numbers from 1 to 3"),
        ([1, 2], [2, 3], "linear_attn_config.full_attn_layers: expected layers that kda_layers does not have"),
        ([1], [3], "linear_attn_config.full_attn_layers: expected all layers that kda_layers does not have"),
    ],
)
def test_lists_of_layers(kda, full, message):
    fields = SIZES | {"linear_attn_config": {"kda_layers": kda, "full_attn_layers": full, "head_dim": 8}}
    if message is None:
        found = KimiLinear.read(Fields(fields, "config.json")).recurrent
        assert found is not None and found.layers == tuple(i in kda for i in (1, 2, 3)) and found.kind.key_size == 8
        kinds = {"layer_types": ["full_attention", "full_attention", "linear_attention"]}
        found = KimiLinear.read(Fields(fields | kinds, "config.json")).recurrent
        assert found is not None and found.layers == (False, False, True)
        return
    with pytest.raises(CheckpointError, match=re.escape(message)):
        KimiLinear.read(Fields(fields, "config.json"))


def test_layers_of_one_kind(tmp_path):
    """Only gated delta nets, or none: pages hold latents that no layer has, or there are no states."""
    for kind, attends in (("linear_attention", False), ("full_attention", True)):
        fields = SIZES | {"layer_types": [kind] * 3}
        c = KimiLinear.read(Fields(fields, "config.json"))
        assert [c.attends(i) for i in range(3)] == [attends] * 3 and (c.recurrent is None) is attends
