"""DeepSeek-V2 (DeepSeek-AI, 2024): latent attention, and experts after the first layers."""

import math
from collections.abc import Sequence
from typing import Any

from models.checkpoint.fields import Fields
from models.config import Config, Experts, Latent
from models.decoder import Decoder
from models.names import Names
from models.reading import after_dense, experts, rotary
from models.rope import RopeConfig

NAMES = Names(
    shared=("mlp.shared_experts.gate_proj", "mlp.shared_experts.up_proj", "mlp.shared_experts.down_proj"),
)
GREEDY, LIMITED = "greedy", "group_limited_greedy"


class DeepseekV2(Decoder):
    """Experts are chosen by their part of a softmax, from all of them or from the best groups."""

    architectures = ("DeepseekV2ForCausalLM", "DeepseekV2ForSequenceClassification")
    names = NAMES

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.bool("mlp_bias", default=False):
            raise fields.error("mlp_bias", "false: experts with biases are not supported")
        options = latent_attention(fields, positions=2048, mlp_width=11008, query_rank=1536)
        sparse, rules = after_dense(fields, options["layers"], 0), dict[str, Any]()
        if any(sparse) and fields.choice("topk_method", (GREEDY, LIMITED), default=GREEDY) == LIMITED:
            rules = {"groups": fields.int("n_group"), "kept": fields.int("topk_group")}
        return Config(**options, experts=mixture(fields, sparse, count=64, width=1407, shared=2, scale=1.0, **rules))


def latent_attention(
    fields: Fields,
    *,
    query_rank: int,
    rank: int = 512,
    plain: int = 128,
    rotated: int = 64,
    value: int = 128,
    interleaved: bool = True,
    mlp_width: int,
    eps: float = 1e-6,
    partial: float | None = None,
    **more: Any,
) -> dict[str, Any]:
    """Read the arguments of a `Config` except experts.

    Args:
        query_rank, rank, plain, rotated, value: values of absent fields, see `Latent`; interleaved: see `Latent`.
        mlp_width, eps: values of absent fields.
        partial: see `RopeConfig.from_hf`.
        more: arguments of `rotary`.

    Raises:
        CheckpointError: it names the field.
    """
    rotated = fields.int("qk_rope_head_dim", default=rotated, high=2**12)
    if rotated % 2:
        raise fields.error("qk_rope_head_dim", "an even number")
    own = fields.changed({"head_dim": rotated})
    options = rotary(own, inner=mlp_width, one_rope=False, eps=eps, bias=False, **more)
    if options["kv_heads"] != options["heads"]:
        raise fields.error("num_key_value_heads", f"num_attention_heads, which is {options['heads']}")
    if fields.config.get("q_lora_rank", query_rank) is None:
        query_rank = 0
    latent = Latent(
        rank=fields.int("kv_lora_rank", default=rank, high=2**14),
        query_rank=fields.int("q_lora_rank", default=query_rank, high=2**16),
        plain=fields.int("qk_nope_head_dim", default=plain, high=2**12),
        rotated=rotated,
        value=fields.int("v_head_dim", default=value, high=2**12),
        interleaved=interleaved,
        split=fields.bool("kv_b_split", default=False),  # a field of GGUF files
    )
    rope = RopeConfig.from_hf(fields, rotated, options["max_positions"], partial=partial)
    if rope.head_dim != rotated:
        raise fields.error("partial_rotary_factor", "1: qk_rope_head_dim elements are rotated")
    scale = (latent.plain + rotated) ** -0.5 * _stretched(fields, rope)
    sizes = {"kv_heads": 1, "head_dim": rotated + latent.rank, "rope": rope, "scales": (scale,) * options["layers"]}
    return options | sizes | {"latent": latent}


def _stretched(fields: Fields, rope: RopeConfig) -> float:
    """Return the factor of scores that compensates for longer sequences (YaRN, section 3.4)."""
    stretching = fields.sub("rope_scaling") or fields.sub("rope_parameters")
    share = stretching.float("mscale_all_dim", 0.0) if stretching and rope.kind != "default" else 0.0
    return (0.1 * share * math.log(rope.factor) + 1.0) ** 2 if share and rope.factor > 1 else 1.0


def mixture(
    fields: Fields, sparse: Sequence[bool], *, count: int, width: int, shared: int, **rules: Any
) -> Experts | None:
    """Read `Config.experts` of these layers; None: no layer has experts.

    Args:
        sparse: whether each layer has experts.
        count, width: the number of experts and their inner width, if the fields are absent.
        shared: the number of experts that all tokens use, if the field is absent; they form one, as wide as all.
        rules: `scale` if the field is absent; other arguments of `Routing`, including `chosen`, and of `Experts`;
            `name` as of `experts`.

    Raises:
        CheckpointError: it names the field.
    """
    if not any(sparse):
        return None
    width = fields.int("moe_intermediate_size", default=width)
    chosen = rules.pop("chosen", None) or fields.int("num_experts_per_tok")
    scale = fields.float("routed_scaling_factor", default=rules.pop("scale"))
    wide = {"width": width, "shared_width": width * fields.int("n_shared_experts", default=shared, high=2**8)}
    named = {"name": rules.pop("name", "n_routed_experts"), "layers": sparse}
    return experts(fields, count=count, chosen=chosen, scale=scale, **named, **wide, **rules)
