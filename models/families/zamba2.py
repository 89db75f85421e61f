"""Zamba2 (Zyphra 2024): scans of Mamba-2; some of them also read what a block of attention and an MLP makes of the
stream and the embedding. Each of a few blocks serves every so many of these layers."""

import math
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from kernels.layout import ScanKind, TreeLayout
from models.adapters import Adapter
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.config import RECURRENT, Config, Recurrent, SharedBlocks
from models.decoder import Decoder
from models.errors import CheckpointError, show
from models.families.granite_hybrid import SCANS
from models.names import Names
from models.reading import OLD_KINDS, rotary

HYBRID, BLOCK = "hybrid", "shared_transformer."  # the kind of layers with a block, and the name of the block
QUERIES = f"{BLOCK}self_attn.q_proj."
IN_BLOCK = re.compile(rf"((?:.+\.)?layers\.)(\d+)\.({re.escape(BLOCK)}.+)")
OWN = re.compile(r"_adapter_list\.(\d+)\.")  # of matrices of a use, by its number
OWNERS = "block_owners"  # a field of `view`
KINDS = [HYBRID if i in (6, 12, 18, 24, 30, 36, 42, 47, 51) else RECURRENT for i in range(54)]  # of absent fields
LONG = 16384  # positions of `use_long_context`


class Zamba2(Decoder):
    """All layers are scans; the norm after the gates has an epsilon of its own."""

    architectures = ("Zamba2ForCausalLM", "Zamba2ForSequenceClassification")
    default_pad_token_id = 0
    names = Names(
        **SCANS,
        norm="model.final_layernorm",
        qkv=tuple(f"{BLOCK}self_attn.{name}_proj" for name in "qkv"),
        out=f"{BLOCK}self_attn.o_proj",
        mlp_norm=f"{BLOCK}pre_ff_layernorm",
        up=(f"{BLOCK}feed_forward.gate_up_proj",),
        down=f"{BLOCK}feed_forward.down_proj",
    )

    @classmethod
    def view(cls, checkpoint: Checkpoint) -> Checkpoint:
        """With a field that names the layer that has the block of each layer: itself if the file has a block under its
        name, which transformers then does not share, or any that shares it; and with each use's own matrices under the
        name of its layer."""
        kinds, tensors = kinds_of(checkpoint.fields), dict(checkpoint.tensors)
        layers, blocks = [i for i, kind in enumerate(kinds) if kind == HYBRID], number_of_blocks(checkpoint.fields)
        found = {name: match for name in tensors if (match := IN_BLOCK.fullmatch(name))}
        stored = {int(match[2]) for match in found.values() if match[3].startswith(QUERIES)}
        for name, match in found.items():
            use = OWN.search(match[3])
            if use and int(use[1]) < len(layers) and (layer := layers[int(use[1])]) != int(match[2]):
                info = tensors.pop(name)
                tensors.setdefault(f"{match[1]}{layer}.{match[3]}", replace(info, name=info.name or name))
        owners = [
            next((j for j in (i, *layers[use % blocks :: blocks]) if j in stored), i) for use, i in enumerate(layers)
        ]
        return replace(checkpoint, tensors=tensors, config={**checkpoint.config, OWNERS: owners})

    @staticmethod
    def read(fields: Fields) -> Config:
        kinds = kinds_of(fields)
        width = fields.int("hidden_size", default=2560)
        heads = fields.int("num_attention_heads", default=32, high=2**14)
        size = fields.int("attention_head_dim", default=2 * width // heads, high=2**14)
        if fields.config.get("attention_hidden_size") not in (None, 2 * width):
            raise fields.error("attention_hidden_size", f"2 * hidden_size, which is {2 * width}")
        positions = {"max_position_embeddings": LONG} if fields.bool("use_long_context", default=False) else {}
        sizes = {"hidden_size": width, "num_attention_heads": heads, "head_dim": size, "num_hidden_layers": len(kinds)}
        turned = fields.bool("use_mem_rope", default=False)
        options: dict[str, Any] = rotary(
            fields.changed(sizes | positions), positions=4096, activation="gelu", tied=True, eps=1e-5, one_rope=turned,
            mlp_width=fields.int("intermediate_size", default=0, low=0) or 4 * width,
        )  # fmt: skip
        bias = fields.bool("add_bias_linear", default=False)
        return Config(
            **options,
            mlp_bias=bias,
            scales=((size / 2) ** -0.5,) * len(kinds),
            alone=("attention",) * len(kinds),
            recurrent=_scans(fields, len(kinds), width, bias),
            shared=_shared(fields, kinds, options) if HYBRID in kinds else None,
        )

    def adapt(self, adapters: Sequence[Adapter]) -> None:
        """See `Decoder`. Raises CheckpointError for adapters of blocks, which differ from use to use."""
        for adapter in adapters:
            if module := next((module for module in adapter.modules if f".{BLOCK}" in module), None):
                what = f"{show(module)}: adapters of blocks that layers share are not supported"
                raise CheckpointError(what, where=show(adapter.folder), remedy="Train one of other matrices.")
        super().adapt(adapters)

    def _inputs(self, tokens_T: Tensor, x_TE: Tensor, layout: TreeLayout) -> Tensor | None:
        """The embedding, a copy because stacks overwrite it."""
        return x_TE.clone() if self.config.shared else None


def kinds_of(fields: Fields) -> Sequence[str]:
    """Read the kind of each layer. Raises CheckpointError naming the field."""
    layers = fields.int("num_hidden_layers", default=54, high=2**14)
    found = fields.config.get("layers_block_type")
    found = KINDS if found is None else found
    kinds = [OLD_KINDS.get(kind, kind) if type(kind) is str else kind for kind in found] if type(found) is list else []
    if len(kinds) != layers or any(kind not in (RECURRENT, HYBRID) for kind in kinds):
        raise fields.error("layers_block_type", f"{layers} of {RECURRENT} and {HYBRID}")
    for name, value in (("layer_types", kinds), ("hybrid_layer_ids", [i for i in range(layers) if kinds[i] == HYBRID])):
        if fields.config.get(name) not in (None, value, found):
            raise fields.error(name, "the layers of layers_block_type")
    return kinds


def _scans(fields: Fields, layers: int, width: int, bias: bool) -> Recurrent:
    values = fields.int("mamba_expand", default=2, high=2**8) * width
    heads, groups = fields.int("n_mamba_heads", default=8, high=2**16), fields.int("mamba_ngroups", default=1)
    if values % heads or fields.config.get("mamba_headdim") not in (None, values // heads):
        raise fields.error("n_mamba_heads", f"mamba_expand * hidden_size / mamba_headdim, a divisor of {values}")
    if heads % groups:
        raise fields.error("mamba_ngroups", f"a divisor of n_mamba_heads {heads}")
    state, taps = fields.int("mamba_d_state", default=64, high=2**16), fields.int("mamba_d_conv", default=4, high=64)
    steps = fields.float("time_step_min", default=0.001, low=0.0), math.inf
    kind = ScanKind(groups, heads, state, values // heads, taps)
    return Recurrent(kind, (True,) * layers, bias=bias, conv_bias=True, steps=steps, eps=1e-5)


def number_of_blocks(fields: Fields) -> int:
    """Read the number of blocks, which layers use in turn."""
    return fields.int("num_mem_blocks", default=1)


def _shared(fields: Fields, kinds: Sequence[str], options: dict[str, Any]) -> SharedBlocks:
    blocks, rank = number_of_blocks(fields), fields.int("adapter_rank", default=128, high=2**16)
    adapted = fields.bool("use_shared_attention_adapter", default=False)
    sizes = {options["head_dim"] * options[name] for name in ("heads", "kv_heads")}
    if adapted and sizes != {2 * options["width"]}:
        raise fields.error("use_shared_attention_adapter", "false, unless all heads fill 2 * hidden_size")
    layers = [i for i, kind in enumerate(kinds) if kind == HYBRID]
    found = fields.config.get(OWNERS, [layers[use % blocks] for use in range(len(layers))])
    owners = dict(zip(layers, found, strict=True))
    return SharedBlocks(tuple(map(owners.get, range(len(kinds)))), rank, adapted)
