"""ModernBERT decoders (Ettin; Weller et al. 2025): LayerNorms, windows in two of three layers, a dense layer before the
head."""

from models.checkpoint.fields import Fields
from models.config import FULL, SLIDING, Config
from models.decoder import Decoder
from models.names import Names
from models.reading import ACTIVATIONS, layer_types, ropes, rotary, true_if_absent, windows


class ModernBertDecoder(Decoder):
    """The embedding is normed, and the first layer's attention reads it without another norm."""

    architectures = ("ModernBertDecoderForCausalLM",)
    default_eos_token_ids = frozenset([50282])
    names = Names(
        embedding="model.embeddings.tok_embeddings",
        embedding_norm="model.embeddings.norm",
        attention_norm="attn_norm",
        qkv=("attn.q_proj", "attn.k_proj", "attn.v_proj"),
        out="attn.Wo",
        mlp_norm="mlp_norm",
        up=("mlp.Wi",),
        down="mlp.Wo",
        norm="model.final_norm",
    )

    @staticmethod
    def read(fields: Fields) -> Config:
        if fields.sub("rope_scaling"):
            raise fields.error("rope_scaling", "nothing: give rope_parameters for each kind of layer")
        defaults = {"positions": 8192, "activation": "gelu", "activation_field": "hidden_activation", "tied": True}
        options = rotary(fields, one_rope=False, **defaults, bias=False)
        every = fields.int("global_attn_every_n_layers", default=3)
        kinds = layer_types(fields, [SLIDING if i % every else FULL for i in range(options["layers"])])
        twice = fields.int("local_attention", default=128, low=2, high=2**31)
        bases = {FULL: ("global_rope_theta", 160000.0), SLIDING: ("local_rope_theta", 10000.0)}
        dense = fields.choice("classifier_activation", {*ACTIVATIONS}, default="gelu")
        return Config(
            **options,
            norm_eps=fields.float("norm_eps", default=1e-5, low=0.0),
            rms=False,
            norm_bias=fields.bool("norm_bias", default=False),
            first_norm=False,
            embedding_norm=True,
            mlp_bias=fields.bool("mlp_bias", default=False),
            head_bias=true_if_absent(fields, "decoder_bias"),
            head_dense=ACTIVATIONS[dense],
            head_dense_bias=fields.bool("classifier_bias", default=False),
            windows=windows(fields, kinds, fields.int("sliding_window", default=twice // 2, high=2**31)),
            ropes=ropes(fields, kinds, options["head_dim"], options["max_positions"], bases),
        )
