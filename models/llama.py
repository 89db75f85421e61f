"""Llama 1, 2, 3.x and what shares its layout (Touvron et al. 2023).

Shape legend: T tokens of a pass, N asked rows, E width, H query heads, G key/value heads, D head size, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.kv_write import kv_write
from kernels.layout import KVCache, TreeLayout
from kernels.rows import rotary
from kernels.tree_attention import tree_attention
from models.checkpoint import Checkpoint
from models.fields import Fields
from models.layers import ACTIVATIONS, ModelShape, RMSNorm, architecture, gated, has_scalar_head, head_shape, stacked
from models.rope import BUFFERS, RopeConfig, RotaryEmbedding
from models.weights import Weights

ARCHITECTURES = (
    "LlamaForCausalLM",
    "LlamaForSequenceClassification",
    "MistralForCausalLM",
    "MistralForSequenceClassification",
)
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class LlamaConfig:
    """The fields of config.json that change what a Llama computes."""

    vocab_size: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    attention_bias: bool
    mlp_bias: bool
    tied: bool
    scores: bool  # a scalar head in place of the language model's
    max_positions: int
    window: int | None
    rope: RopeConfig

    @staticmethod
    def from_hf(fields: Fields) -> "LlamaConfig":
        """Read and check a Hugging Face config. Raises CheckpointError naming the field."""
        width = fields.int("hidden_size")
        heads = fields.int("num_attention_heads", high=2**14)
        # The family is told by its architecture, as a config may lack `model_type`; transformers' defaults differ.
        mistral = architecture(fields).startswith("Mistral")
        absent = 8 if mistral and "num_key_value_heads" not in fields.config else heads
        kv_heads = fields.int("num_key_value_heads", default=absent, high=2**14)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
        if fields.config.get("head_dim") is None and width % heads:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads {heads}")
        head_dim = fields.int("head_dim", default=width // heads, high=2**14)
        if head_dim % 2:
            raise fields.error("head_dim", "an even number")
        max_positions = fields.int("max_position_embeddings", default=4096 * 32 if mistral else 2048, high=2**31)
        window = None
        if mistral:  # null is none, absent is not
            window = fields.int("sliding_window", None, high=2**31) if "sliding_window" in fields.config else 4096
        return LlamaConfig(
            vocab_size=fields.int("vocab_size"),
            width=width,
            mlp_width=fields.int("intermediate_size"),
            layers=fields.int("num_hidden_layers", high=2**14),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=fields.float("rms_norm_eps", default=1e-6, low=0.0),
            activation=ACTIVATIONS[fields.choice("hidden_act", set(ACTIVATIONS), default="silu")],
            attention_bias=not mistral and fields.bool("attention_bias", default=False),
            mlp_bias=not mistral and fields.bool("mlp_bias", default=False),
            tied=fields.bool("tie_word_embeddings", default=False),
            scores=has_scalar_head(fields),
            max_positions=max_positions,
            window=window,
            rope=RopeConfig.from_hf(fields, head_dim, max_positions),
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of everything the checkpoint must hold."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        matrices = {
            "self_attn.q_proj": (q, self.width, self.attention_bias),
            "self_attn.k_proj": (kv, self.width, self.attention_bias),
            "self_attn.v_proj": (kv, self.width, self.attention_bias),
            "self_attn.o_proj": (self.width, q, self.attention_bias),
            "mlp.gate_proj": (self.mlp_width, self.width, self.mlp_bias),
            "mlp.up_proj": (self.mlp_width, self.width, self.mlp_bias),
            "mlp.down_proj": (self.width, self.mlp_width, self.mlp_bias),
        }
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.width)}
        for i in range(self.layers):
            layer = f"model.layers.{i}."
            shapes[layer + "input_layernorm.weight"] = (self.width,)
            shapes[layer + "post_attention_layernorm.weight"] = (self.width,)
            for name, (rows, columns, bias) in matrices.items():
                shapes[f"{layer}{name}.weight"] = (rows, columns)
                if bias:
                    shapes[f"{layer}{name}.bias"] = (rows,)
        return shapes | {"model.norm.weight": (self.width,)} | head_shape(self.scores, self.vocab_size, self.width)


class LlamaLayer(nn.Module):
    """Pre-norm attention and gated MLP, each added to the stream."""

    def __init__(self, config: LlamaConfig, weights: Weights, prefix: str):
        super().__init__()
        self.config = config
        attention, mlp = f"{prefix}.self_attn", f"{prefix}.mlp"
        self.attention_norm = RMSNorm(weights.vector(f"{prefix}.input_layernorm.weight"), config.norm_eps)
        self.mlp_norm = RMSNorm(weights.vector(f"{prefix}.post_attention_layernorm.weight"), config.norm_eps)
        qkv = (f"{attention}.q_proj", f"{attention}.k_proj", f"{attention}.v_proj")
        self.qkv = weights.linear(*qkv, bias=config.attention_bias)
        self.out = weights.linear(f"{attention}.o_proj", bias=config.attention_bias)
        self.gate_up = weights.linear(f"{mlp}.gate_proj", f"{mlp}.up_proj", bias=config.mlp_bias)
        self.down = weights.linear(f"{mlp}.down_proj", bias=config.mlp_bias)
        self.gate = gated(config.activation)

    def forward(
        self, x_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, k_GSD: Tensor, v_GSD: Tensor, layout: TreeLayout
    ) -> Tensor:
        x_TE = x_TE + self.attention(self.attention_norm(x_TE, layout.impl), cos_TD, sin_TD, k_GSD, v_GSD, layout)
        middle_TM = self.gate(self.gate_up(self.mlp_norm(x_TE, layout.impl)), impl=layout.impl)
        return x_TE + self.down(middle_TM)

    def attention(
        self, x_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, k_GSD: Tensor, v_GSD: Tensor, layout: TreeLayout
    ) -> Tensor:
        c = self.config
        rows_THD = self.qkv(x_TE).unflatten(-1, (c.heads + 2 * c.kv_heads, c.head_dim))
        turned_THD, v_TGD = rows_THD.split([c.heads + c.kv_heads, c.kv_heads], 1)
        q_THD, k_TGD = rotary(turned_THD, cos_TD, sin_TD, impl=layout.impl).split([c.heads, c.kv_heads], 1)
        kv_write(k_GSD, v_GSD, k_TGD, v_TGD, layout.write_slots_T, impl=layout.impl)
        mixed_THD = tree_attention(q_THD, k_GSD, v_GSD, layout, scale=c.head_dim**-0.5, window=c.window)
        return self.out(mixed_THD.flatten(1))


class Llama(nn.Module):
    """A causal language model: tokens, positions and a layout to hidden rows, hidden rows to logits."""

    default_eos_token_ids = frozenset([2])  # where no file of the checkpoint says anything

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quant: str = "none"):
        """Load from a checkpoint.

        Raises:
            CheckpointError: wrong fields or tensors; before any tensor is read.
        """
        super().__init__()
        self.config = config = LlamaConfig.from_hf(checkpoint.fields)
        tied = {"lm_head.weight": EMBEDDING} if config.tied and not config.scores else {}
        stored = checkpoint.check(config.tensors(), ignore=BUFFERS, tied=tied)
        weights = Weights(checkpoint, stored, dtype, device, quant)
        self.shape = ModelShape(
            config.layers,
            config.kv_heads,
            config.head_dim,
            config.vocab_size,
            config.rope.reach(config.max_positions),
            steady_length=config.rope.steady_length,
            switch_length=config.rope.switch_length,
            scores=config.scores,
        )
        self.embedding = weights.embedding(EMBEDDING)
        self.layers = nn.ModuleList(LlamaLayer(config, weights, f"model.layers.{i}") for i in range(config.layers))
        self.norm = RMSNorm(weights.vector("model.norm.weight"), config.norm_eps)
        self.head = weights.linear("score" if config.scores else "lm_head")
        self.rotary = RotaryEmbedding(config.rope).to(device)
        parts = [(x.attention_norm, x.mlp_norm, x.qkv, x.out, x.gate_up, x.down) for x in self.layers]
        options = {"gated": True, "window": config.window}
        self.stack = stacked(parts, self.norm, self.shape, config.heads, config.activation, **options)

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, spans_T: Tensor, cache: KVCache, layout: TreeLayout
    ) -> Tensor:
        """Evaluate the T tokens of a pass; their keys and values go into the cache.

        Args:
            tokens_T, positions_T: int64.
            spans_T: int64, length of each token's sequence when it was evaluated (for length-dependent rotary kinds).

        Returns:
            hidden rows [T, E], final norm applied.
        """
        x_TE = self.embedding(tokens_T)
        cos_TD, sin_TD = self.rotary.cos_sin(positions_T, spans_T, x_TE.dtype)
        if self.stack is not None and self.stack.takes(x_TE, layout):
            return self.stack(x_TE, (cos_TD, sin_TD), cache, layout)
        for i, layer in enumerate(self.layers):
            x_TE = layer(x_TE, cos_TD, sin_TD, cache.k_LGSD[i], cache.v_LGSD[i], layout)
        return self.norm(x_TE, layout.impl)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Hidden rows [N, E] to next-token logits [N, V] (scores [N, 1] of a scalar head) in the model's dtype."""
        return self.head(hidden_NE)
