"""MiniMax-M2 (MiniMax 2025): experts in all layers, norms over all heads as one row, partially rotated heads;
MiniMax-M3 (2026): clamped gates, norms of each head, indexers."""

import re
from dataclasses import replace
from typing import Any

from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.checkpoint.tensor_files import FLOATS
from models.checkpoint.tensors import Cut
from models.config import FULL, Config
from models.decoder import Decoder
from models.errors import CheckpointError, show
from models.families.deepseek_v2 import NAMES
from models.families.gpt_oss import CLAMPED, clamped_gates
from models.reading import experts, layer_types, rotary, sparse_layers
from models.rope import BUFFERS

SPARSE, MLPS = "minimax_m3_sparse", ("dense", "sparse")


class MiniMaxM2(Decoder):
    """Sigmoids choose the experts, with a bias, and their weights add up to 1."""

    architectures = ("MiniMaxM2ForCausalLM",)
    names = NAMES
    default_eos_token_ids = frozenset([200020])

    @staticmethod
    def read(fields: Fields) -> Config:
        width, head_dim = fields.int("intermediate_size", default=1536), fields.int("head_dim", default=128)
        if fields.config.get("partial_rotary_factor") is None and fields.config.get("rotary_dim") is not None:
            share = fields.int("rotary_dim", high=head_dim) / head_dim  # as in released files
            fields = fields.changed({"partial_rotary_factor": share})
        more = {"mlp_width": width, "head_dim": head_dim, "partial": 1.0, "theta": 5e6}
        options = rotary(fields, positions=196608, kv_heads=8, **more, eps=1e-6)
        rules = {"scores": "sigmoid", "normalized": True, "choice_bias": True}
        return Config(
            head_norms="all",
            experts=experts(fields, count=256, chosen=8, width=width, layers=[True] * options["layers"], **rules),
            **options,
        )


class MiniMaxM3(Decoder):
    """In layers of sparse attention an indexer selects blocks of keys. It selects all as long as there are no more than
    it may select, so it is left out, and the context ends there (`Config.selected`)."""

    architectures = ("MiniMaxM3VLForCausalLM",)
    names = NAMES
    default_eos_token_ids = frozenset([200020])
    ignored = (
        *BUFFERS,
        re.compile(r"(model\.)?mtp\..*"),
        re.compile(r"(model\.)?layers\.\d+\.self_attn\.index(er\.[qk]|_[qk])_(proj|norm)\..*"),
    )

    @classmethod
    def view(cls, checkpoint: Checkpoint) -> Checkpoint:
        """Gate and up in one tensor, which transformers saves of the text model alone, are two. Raises CheckpointError
        if it is quantised."""
        tensors = dict(checkpoint.tensors)
        for name, whole in checkpoint.tensors.items():
            if ".gate_up_proj." in name and (whole.dtype not in FLOATS.values() or not name.endswith(".weight")):
                what = f"{show(name)}: a quantised matrix of gate and up is not supported"
                remedy = "Use a checkpoint with a gate_proj and an up_proj for each, or one that is not quantised."
                raise CheckpointError(what, where=show(checkpoint.folder), remedy=remedy)
            if name.endswith(".gate_up_proj.weight") and len(whole.shape) == 2 and whole.shape[0] % 2 == 0:
                rows, width = tensors.pop(name).shape
                for number, half in enumerate((".gate_proj.", ".up_proj.")):
                    part = Cut(number, 0, rows // 2, below=2)
                    own = replace(whole, shape=(rows // 2, width), name=whole.name or name, part=part)
                    tensors[name.replace(".gate_up_proj.", half)] = own
        return replace(checkpoint, tensors=tensors)

    @staticmethod
    def read(fields: Fields) -> Config:
        clamped_gates(fields)
        dense, width = (
            fields.int("dense_intermediate_size", default=12288),
            fields.int("intermediate_size", default=3072),
        )
        sizes = {"mlp_width": dense, "kv_heads": 4, "head_dim": 128, "partial": 1.0, "theta": 5e6, "eps": 1e-6}
        gates = fields.changed({"hidden_act": None})  # published files name the clamped gates there
        options: dict[str, Any] = rotary(gates, positions=524288, **sizes) | {"activation": CLAMPED}
        layers, old = options["layers"], fields.within("sparse_attention_config")
        kinds = layer_types(fields, _chosen(old, "sparse_attention_freq", layers, (FULL, SPARSE), FULL), (FULL, SPARSE))
        mlps = fields.config.get("mlp_layer_types") or _chosen(fields, "moe_layer_freq", layers, MLPS, MLPS[1])
        blocks = old.int("sparse_topk_blocks", fields.int("index_topk_blocks", default=16))
        size = old.int("sparse_block_size", fields.int("index_block_size", default=128))
        rules = {
            "scores": "sigmoid",
            "normalized": True,
            "choice_bias": True,
            "scale": fields.float("routed_scaling_factor", default=2.0),
            "shared_width": fields.int("shared_intermediate_size", default=3072),
        }
        sparse = sparse_layers(fields.changed({"mlp_layer_types": mlps}), layers, 0)
        return Config(
            head_norms="each",
            plus_one=True,
            experts=experts(fields, count=128, chosen=4, width=width, layers=sparse, **rules),
            selected=blocks * size if SPARSE in kinds else None,
            **options,
        )


def _chosen(fields: Fields, name: str, layers: int, kinds: tuple[str, str], absent: str) -> list[str]:
    """Return the kind of each layer by a list of zeros and ones, or truth values."""
    given = fields.config.get(name)
    if given is None:
        return [absent] * layers
    if (
        type(given) is not list
        or len(given) != layers
        or any(type(one) not in (int, bool) or one not in (0, 1) for one in given)
    ):
        raise fields.error(name, f"{layers} of 0 and 1")
    return [kinds[one] for one in given]
