"""Phi-3, 3.5 and 4-mini (Abdin et al. 2024): a Llama with fused projections, stretched by LongRoPE (Ding et al. 2024).

Shape legend: T tokens of a pass, N asked rows, E width, M MLP width, H query heads, G key/value heads, D head size (of
cos and sin: the rotated dims), S cache slots, V vocabulary.
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
from models.layers import ACTIVATIONS, ModelShape, RMSNorm, gated, has_scalar_head, head_shape, stacked
from models.rope import BUFFERS, RopeConfig, RotaryEmbedding
from models.weights import Weights

ARCHITECTURES = ("Phi3ForCausalLM", "Phi3ForSequenceClassification")
EMBEDDING = "model.embed_tokens.weight"
# The first Phi-3 configs call longrope `su`, or `yarn`, which it is not.
ROPE_KINDS = {"default": "default", "longrope": "longrope", "su": "longrope", "yarn": "longrope"}


@dataclass(frozen=True)
class Phi3Config:
    """The fields of config.json that change what a Phi-3 computes."""

    vocab_size: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    tied: bool
    scores: bool  # a scalar head in place of the language model's
    max_positions: int
    window: int | None
    rope: RopeConfig

    @staticmethod
    def from_hf(fields: Fields) -> "Phi3Config":
        """Read and check a Hugging Face config. Raises CheckpointError naming the field."""
        width = fields.int("hidden_size")
        heads = fields.int("num_attention_heads", high=2**14)
        kv_heads = fields.int("num_key_value_heads", default=heads, high=2**14)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
        if fields.config.get("head_dim") is None and width % heads:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads {heads}")
        head_dim = fields.int("head_dim", default=width // heads, high=2**14)
        max_positions = fields.int("max_position_embeddings", default=4096, high=2**31)
        return Phi3Config(
            vocab_size=fields.int("vocab_size"),
            width=width,
            mlp_width=fields.int("intermediate_size"),
            layers=fields.int("num_hidden_layers", high=2**14),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=fields.float("rms_norm_eps", default=1e-5, low=0.0),
            activation=ACTIVATIONS[fields.choice("hidden_act", set(ACTIVATIONS), default="silu")],
            tied=fields.bool("tie_word_embeddings", default=False),
            scores=has_scalar_head(fields),
            max_positions=max_positions,
            window=fields.int("sliding_window", default=None, high=2**31),
            rope=RopeConfig.from_hf(fields, head_dim, max_positions, partial=1.0, kinds=ROPE_KINDS, original=4096),
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of everything the checkpoint must hold."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        layer: dict[str, tuple[int, ...]] = {
            "self_attn.qkv_proj": (q + 2 * kv, self.width),
            "self_attn.o_proj": (self.width, q),
            "mlp.gate_up_proj": (2 * self.mlp_width, self.width),
            "mlp.down_proj": (self.width, self.mlp_width),
            "input_layernorm": (self.width,),
            "post_attention_layernorm": (self.width,),
        }
        shapes = {f"model.layers.{i}.{name}.weight": layer[name] for i in range(self.layers) for name in layer}
        shapes |= {EMBEDDING: (self.vocab_size, self.width), "model.norm.weight": (self.width,)}
        return shapes | head_shape(self.scores, self.vocab_size, self.width)


class Phi3Layer(nn.Module):
    """Pre-norm attention and gated MLP, each added to the stream."""

    def __init__(self, config: Phi3Config, weights: Weights, prefix: str):
        super().__init__()
        self.config = config
        self.attention_norm = RMSNorm(weights.vector(f"{prefix}.input_layernorm.weight"), config.norm_eps)
        self.mlp_norm = RMSNorm(weights.vector(f"{prefix}.post_attention_layernorm.weight"), config.norm_eps)
        self.qkv = weights.linear(f"{prefix}.self_attn.qkv_proj")
        self.out = weights.linear(f"{prefix}.self_attn.o_proj")
        self.gate_up = weights.linear(f"{prefix}.mlp.gate_up_proj")
        self.down = weights.linear(f"{prefix}.mlp.down_proj")
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


class Phi3(nn.Module):
    """A causal language model: tokens, positions and a layout to hidden rows, hidden rows to logits."""

    default_eos_token_ids = frozenset([32000])  # where no file of the checkpoint says anything

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quant: str = "none"):
        """Load from a checkpoint.

        Raises:
            CheckpointError: wrong fields or tensors; before any tensor is read.
        """
        super().__init__()
        self.config = config = Phi3Config.from_hf(checkpoint.fields)
        tied = {"lm_head.weight": EMBEDDING} if config.tied and not config.scores else {}
        stored = checkpoint.check(config.tensors(), ignore=BUFFERS, tied=tied)
        weights = Weights(checkpoint, stored, dtype, device, quant)
        self.shape = ModelShape(
            config.layers,
            config.kv_heads,
            config.head_dim,
            config.vocab_size,
            config.rope.reach(config.max_positions),
            switch_length=config.rope.switch_length,
            scores=config.scores,
        )
        self.embedding = weights.embedding(EMBEDDING)
        self.layers = nn.ModuleList(Phi3Layer(config, weights, f"model.layers.{i}") for i in range(config.layers))
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
            spans_T: int64, length of each token's sequence when it was evaluated: it picks longrope's factors.

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
