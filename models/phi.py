"""Phi 1, 1.5 and 2 (Gunasekar et al. 2023, Li et al. 2023): attention and MLP side by side, heads rotated in part.

Shape legend: T tokens of a pass, N asked rows, E width, H query heads, G key/value heads, D head size (of cos and sin:
the rotated dims), S cache slots, V vocabulary.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from kernels.kv_write import kv_write
from kernels.layout import KVCache, TreeLayout
from kernels.rows import activation, rotary
from kernels.tree_attention import tree_attention
from models.checkpoint import Checkpoint
from models.fields import Fields
from models.layers import ACTIVATIONS, LayerNorm, ModelShape, has_scalar_head, head_shape, stacked
from models.rope import BUFFERS, RopeConfig, RotaryEmbedding
from models.weights import Weights

ARCHITECTURES = ("PhiForCausalLM", "PhiForSequenceClassification")
EMBEDDING = "model.embed_tokens.weight"


@dataclass(frozen=True)
class PhiConfig:
    """The fields of config.json that change what a Phi computes."""

    vocab_size: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    qk_norm: bool
    tied: bool
    scores: bool  # a scalar head in place of the language model's
    max_positions: int
    rope: RopeConfig

    @staticmethod
    def from_hf(fields: Fields) -> "PhiConfig":
        """Read and check a Hugging Face config. Raises CheckpointError naming the field."""
        width = fields.int("hidden_size")
        heads = fields.int("num_attention_heads", high=2**14)
        kv_heads = fields.int("num_key_value_heads", default=heads, high=2**14)
        if heads % kv_heads:
            raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
        if fields.config.get("head_dim") is None and width % heads:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads {heads}")
        head_dim = fields.int("head_dim", default=width // heads, high=2**14)
        max_positions = fields.int("max_position_embeddings", default=2048, high=2**31)
        return PhiConfig(
            vocab_size=fields.int("vocab_size"),
            width=width,
            mlp_width=fields.int("intermediate_size"),
            layers=fields.int("num_hidden_layers", high=2**14),
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            norm_eps=fields.float("layer_norm_eps", default=1e-5, low=0.0),
            activation=ACTIVATIONS[fields.choice("hidden_act", set(ACTIVATIONS), default="gelu_new")],
            qk_norm=fields.bool("qk_layernorm", default=False),
            tied=fields.bool("tie_word_embeddings", default=False),
            scores=has_scalar_head(fields),
            max_positions=max_positions,
            rope=RopeConfig.from_hf(fields, head_dim, max_positions, partial=0.5),
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of everything the checkpoint must hold."""
        q, kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        biased: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (q, self.width),
            "self_attn.k_proj": (kv, self.width),
            "self_attn.v_proj": (kv, self.width),
            "self_attn.dense": (self.width, q),
            "mlp.fc1": (self.mlp_width, self.width),
            "mlp.fc2": (self.width, self.mlp_width),
            "input_layernorm": (self.width,),
        }
        if self.qk_norm:
            biased |= {"self_attn.q_layernorm": (self.head_dim,), "self_attn.k_layernorm": (self.head_dim,)}
        shapes: dict[str, tuple[int, ...]] = {EMBEDDING: (self.vocab_size, self.width)}
        for name, shape in [
            *((f"model.layers.{i}.{name}", shape) for i in range(self.layers) for name, shape in biased.items()),
            ("model.final_layernorm", (self.width,)),
        ]:
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[:1]}
        shapes |= head_shape(self.scores, self.vocab_size, self.width)
        return shapes if self.scores else shapes | {"lm_head.bias": (self.vocab_size,)}


class PhiLayer(nn.Module):
    """Attention and MLP read one norm of the stream, and both are added to it."""

    def __init__(self, config: PhiConfig, weights: Weights, prefix: str):
        super().__init__()
        self.config = config
        attention = f"{prefix}.self_attn"
        self.norm = layer_norm(config, weights, f"{prefix}.input_layernorm")
        self.qkv = weights.linear(*(f"{attention}.{part}_proj" for part in "qkv"), bias=True)
        self.out = weights.linear(f"{attention}.dense", bias=True)
        self.up = weights.linear(f"{prefix}.mlp.fc1", bias=True)
        self.down = weights.linear(f"{prefix}.mlp.fc2", bias=True)
        self.q_norm = layer_norm(config, weights, f"{attention}.q_layernorm") if config.qk_norm else None
        self.k_norm = layer_norm(config, weights, f"{attention}.k_layernorm") if config.qk_norm else None

    def forward(
        self, x_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, k_GSD: Tensor, v_GSD: Tensor, layout: TreeLayout
    ) -> Tensor:
        normed_TE = self.norm(x_TE, layout.impl)
        mixed_TE = self.attention(normed_TE, cos_TD, sin_TD, k_GSD, v_GSD, layout)
        middle_TM = activation(self.up(normed_TE), self.config.activation, impl=layout.impl)
        return mixed_TE + self.down(middle_TM) + x_TE

    def attention(
        self, x_TE: Tensor, cos_TD: Tensor, sin_TD: Tensor, k_GSD: Tensor, v_GSD: Tensor, layout: TreeLayout
    ) -> Tensor:
        c = self.config
        rows_THD = self.qkv(x_TE).unflatten(-1, (c.heads + 2 * c.kv_heads, c.head_dim))
        q_THD, k_TGD, v_TGD = rows_THD.split([c.heads, c.kv_heads, c.kv_heads], 1)
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TGD = self.q_norm(q_THD, layout.impl), self.k_norm(k_TGD, layout.impl)
        q_THD = rotary(q_THD, cos_TD, sin_TD, impl=layout.impl)
        k_TGD = rotary(k_TGD, cos_TD, sin_TD, impl=layout.impl)
        kv_write(k_GSD, v_GSD, k_TGD, v_TGD, layout.write_slots_T, impl=layout.impl)
        return self.out(tree_attention(q_THD, k_GSD, v_GSD, layout, scale=c.head_dim**-0.5).flatten(1))


def layer_norm(config: PhiConfig, weights: Weights, name: str) -> LayerNorm:
    return LayerNorm(weights.vector(f"{name}.weight"), weights.vector(f"{name}.bias"), config.norm_eps)


class Phi(nn.Module):
    """A causal language model: tokens, positions and a layout to hidden rows, hidden rows to logits."""

    default_eos_token_ids = frozenset([2])  # where no file of the checkpoint says anything

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quant: str = "none"):
        """Load from a checkpoint.

        Raises:
            CheckpointError: wrong fields or tensors; before any tensor is read.
        """
        super().__init__()
        self.config = config = PhiConfig.from_hf(checkpoint.fields)
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
        self.layers = nn.ModuleList(PhiLayer(config, weights, f"model.layers.{i}") for i in range(config.layers))
        self.norm = layer_norm(config, weights, "model.final_layernorm")
        self.head = weights.linear("score") if config.scores else weights.linear("lm_head", bias=True)
        self.rotary = RotaryEmbedding(config.rope).to(device)
        parts = [(x.norm, None, x.qkv, x.out, x.up, x.down) for x in self.layers]
        told = parts, self.norm, self.shape, config.heads, config.activation
        self.stack = None if config.qk_norm else stacked(*told)  # which has no norms of heads

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
