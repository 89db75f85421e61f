"""Mixtral (Jiang et al. 2024), Phi-3.5-MoE (Abdin et al. 2024), Aria (Rhymes AI 2024): experts in all layers."""

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES
from models.reading import experts, rotary


class Mixtral(Decoder):
    """A Mistral with experts, whose weights add up to 1."""

    architectures = ("MixtralForCausalLM", "MixtralForSequenceClassification")

    @staticmethod
    def read(fields: Fields) -> Config:
        fields = with_base(fields)
        width = fields.int("intermediate_size", default=14336)
        options = rotary(fields, positions=4096 * 32, kv_heads=8, mlp_width=width, eps=1e-5)
        layers = options["layers"]
        return Config(
            windows=(fields.int("sliding_window", None, high=2**31),) * layers,
            experts=experts(fields, count=8, chosen=2, width=width, layers=[True] * layers, normalized=True),
            **options,
        )


class Aria(Decoder):
    """The text model: a Llama with experts, some of which all tokens share."""

    architectures = ("AriaTextForCausalLM",)
    names = NAMES

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.bool("mlp_bias", default=False):
            raise fields.error("mlp_bias", "false: experts with biases are not supported")
        if fields.str("hidden_act", "silu") != "silu":
            raise fields.error("hidden_act", "silu, which transformers uses in chosen experts whatever the config says")
        width = fields.int("intermediate_size", default=4096)
        count, chosen = fields.int("moe_num_experts", default=8), fields.int("moe_topk", default=2)
        options = rotary(fields, positions=2048, mlp_width=width, eps=1e-6, bias=False)
        return Config(
            experts=experts(
                fields.changed({"num_experts": count, "num_experts_per_tok": chosen}),
                count=count,
                chosen=chosen,
                width=width,
                layers=[True] * options["layers"],
                scores="softmax_of_chosen",
                shared_width=width * fields.int("moe_num_shared_experts", default=2, high=2**8),
            ),
            **options,
        )


class PhiMoe(Decoder):
    """LayerNorms, biases, and two experts chosen one after the other, by the rules of SparseMixer."""

    architectures = ("PhimoeForCausalLM", "PhiMoEForCausalLM", "PhimoeForSequenceClassification")
    default_eos_token_ids = frozenset([32000])

    @staticmethod
    def read(fields: Fields) -> Config:
        fields = _scaled(with_base(fields))
        width = fields.int("intermediate_size", default=6400)
        kinds = {"default": "default", "longrope": "longrope", "su": "longrope"}
        options = rotary(fields, positions=4096 * 32, kv_heads=8, mlp_width=width, kinds=kinds, eps=1e-5, bias=False)
        layers = options["layers"]
        mixed = experts(
            fields,
            count=16,
            chosen=2,
            width=width,
            layers=[True] * layers,
            scores="sparsemixer",
            jitter=fields.float("router_jitter_noise", default=0.01, low=0.0),
        )
        if mixed is None or mixed.routing.chosen != 2:
            raise fields.error("num_experts_per_tok", "2: SparseMixer chooses as many")
        return Config(
            rms=False,
            head_bias=fields.bool("lm_head_bias", default=False),
            windows=(fields.int("sliding_window", None, high=2**31),) * layers,
            experts=mixed,
            **options,
        )


def _scaled(fields: Fields) -> Fields:
    """Return the fields with longrope's scale by its usual name. Both lengths may have one; they must be equal."""
    name = "rope_scaling" if fields.sub("rope_scaling") else "rope_parameters"
    rope = fields.sub(name)
    if rope is None or rope.str("rope_type", rope.str("type", "default")) == "default":
        return fields
    short, long = (rope.float(f"{length}_mscale", low=1e-3, high=1e3) for length in ("short", "long"))
    if short != long:
        raise rope.error("long_mscale", f"the short_mscale, {short:g}")
    plain = {key: value for key, value in rope.config.items() if not key.endswith("_mscale")}
    return fields.changed({name: plain | {"attention_factor": short}})


def with_base(fields: Fields) -> Fields:
    """Return the fields, with the rotary base of these families, 1e6, if there is none."""
    base = fields.config.get("rope_theta")
    return fields.changed({"rope_theta": 1e6 if base is None else base})
