"""OPT (Zhang et al. 2022): learned positions, norms before (or, 350m, after) each block, ReLU.

Shape legend: T tokens of a pass, N asked rows, E width, P positions, H heads, D head size, S cache
slots, V vocabulary.
"""

import re
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.kv_write import kv_write
from kernels.layout import KVCache, TreeLayout
from kernels.rows import activation
from kernels.tree_attention import tree_attention
from models.checkpoint import Checkpoint
from models.fields import Fields
from models.layers import ACTIVATIONS, LayerNorm, ModelShape, has_scalar_head, head_shape, stacked
from models.weights import Weights

ARCHITECTURES = ("OPTForCausalLM", "OPTForSequenceClassification")
BASE = "model."  # a save of the bare OPTModel lacks it
EMBEDDING, POSITIONS = "model.decoder.embed_tokens.weight", "model.decoder.embed_positions.weight"
IGNORED = (re.compile(r"(model\.)?decoder\.version"),)
OFFSET = 2  # position p has row p + 2 of its table; the first two, once for padding, are never read
NORM_EPS = 1e-5  # no field of the config


@dataclass(frozen=True)
class OPTConfig:
    """The fields of config.json that change what an OPT computes."""

    vocab_size: int
    width: int
    embedding_width: int
    mlp_width: int
    layers: int
    heads: int
    activation: str
    pre_norm: bool
    final_norm: bool
    affine: bool  # norms have weights and biases
    bias: bool
    tied: bool
    scores: bool  # a scalar head in place of the language model's
    max_positions: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    @staticmethod
    def from_hf(fields: Fields) -> "OPTConfig":
        """Read and check a Hugging Face config. Raises CheckpointError naming the field."""
        width = fields.int("hidden_size")
        heads = fields.int("num_attention_heads", high=2**14)
        if width % heads:
            raise fields.error("hidden_size", f"a multiple of num_attention_heads {heads}")
        pre_norm = fields.bool("do_layer_norm_before", default=True)
        return OPTConfig(
            vocab_size=fields.int("vocab_size"),
            width=width,
            embedding_width=fields.int("word_embed_proj_dim", default=width),
            mlp_width=fields.int("ffn_dim"),
            layers=fields.int("num_hidden_layers", high=2**14),
            heads=heads,
            activation=ACTIVATIONS[fields.choice("activation_function", set(ACTIVATIONS), default="relu")],
            pre_norm=pre_norm,
            final_norm=pre_norm and not fields.bool("_remove_final_layer_norm", default=False),
            affine=fields.bool("layer_norm_elementwise_affine", default=True),
            bias=fields.bool("enable_bias", default=True),
            tied=fields.bool("tie_word_embeddings", default=True),
            scores=has_scalar_head(fields),
            max_positions=fields.int("max_position_embeddings", default=2048),
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of everything the checkpoint must hold."""
        matrices: dict[str, tuple[int, ...]] = {
            "self_attn.q_proj": (self.width, self.width),
            "self_attn.k_proj": (self.width, self.width),
            "self_attn.v_proj": (self.width, self.width),
            "self_attn.out_proj": (self.width, self.width),
            "fc1": (self.mlp_width, self.width),
            "fc2": (self.width, self.mlp_width),
        }
        shapes: dict[str, tuple[int, ...]] = {
            EMBEDDING: (self.vocab_size, self.embedding_width),
            POSITIONS: (self.max_positions + OFFSET, self.width),
        }
        if self.embedding_width != self.width:
            shapes["model.decoder.project_in.weight"] = (self.width, self.embedding_width)
            shapes["model.decoder.project_out.weight"] = (self.embedding_width, self.width)
        norms = ["model.decoder.final_layer_norm"] if self.final_norm else []
        for i in range(self.layers):
            layer = f"model.decoder.layers.{i}."
            norms += [layer + "self_attn_layer_norm", layer + "final_layer_norm"]
            for name, shape in matrices.items():
                shapes[f"{layer}{name}.weight"] = shape
                if self.bias:
                    shapes[f"{layer}{name}.bias"] = shape[:1]
        if self.affine:
            shapes |= {f"{norm}.{part}": (self.width,) for norm in norms for part in ("weight", "bias")}
        return shapes | head_shape(self.scores, self.vocab_size, self.embedding_width)


class OPTLayer(nn.Module):
    """Attention and MLP, each added to the stream; the norm reads each one's input, or its sum with the stream."""

    def __init__(self, config: OPTConfig, weights: Weights, prefix: str):
        super().__init__()
        self.config = config
        attention = f"{prefix}.self_attn"
        self.attention_norm = layer_norm(config, weights, f"{prefix}.self_attn_layer_norm")
        self.mlp_norm = layer_norm(config, weights, f"{prefix}.final_layer_norm")
        self.qkv = weights.linear(*(f"{attention}.{part}_proj" for part in "qkv"), bias=config.bias)
        self.out = weights.linear(f"{attention}.out_proj", bias=config.bias)
        self.up = weights.linear(f"{prefix}.fc1", bias=config.bias)
        self.down = weights.linear(f"{prefix}.fc2", bias=config.bias)

    def forward(self, x_TE: Tensor, k_HSD: Tensor, v_HSD: Tensor, layout: TreeLayout) -> Tensor:
        if self.config.pre_norm:
            x_TE = x_TE + self.attention(self.attention_norm(x_TE, layout.impl), k_HSD, v_HSD, layout)
            return x_TE + self.mlp(self.mlp_norm(x_TE, layout.impl), layout)
        x_TE = self.attention_norm(x_TE + self.attention(x_TE, k_HSD, v_HSD, layout), layout.impl)
        return self.mlp_norm(x_TE + self.mlp(x_TE, layout), layout.impl)

    def attention(self, x_TE: Tensor, k_HSD: Tensor, v_HSD: Tensor, layout: TreeLayout) -> Tensor:
        c = self.config
        q_THD, k_THD, v_THD = self.qkv(x_TE).unflatten(-1, (3, c.heads, c.head_dim)).unbind(1)
        kv_write(k_HSD, v_HSD, k_THD, v_THD, layout.write_slots_T, impl=layout.impl)
        return self.out(tree_attention(q_THD, k_HSD, v_HSD, layout, scale=c.head_dim**-0.5).flatten(1))

    def mlp(self, x_TE: Tensor, layout: TreeLayout) -> Tensor:
        return self.down(activation(self.up(x_TE), self.config.activation, impl=layout.impl))


def layer_norm(config: OPTConfig, weights: Weights, name: str) -> LayerNorm:
    if not config.affine:
        one_E = torch.ones(config.width, dtype=weights.dtype, device=weights.device)
        return LayerNorm(one_E, torch.zeros_like(one_E), NORM_EPS)
    return LayerNorm(weights.vector(f"{name}.weight"), weights.vector(f"{name}.bias"), NORM_EPS)


class OPT(nn.Module):
    """A causal language model: tokens, positions and a layout to hidden rows, hidden rows to logits."""

    default_eos_token_ids = frozenset([2])  # where no file of the checkpoint says anything

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quant: str = "none"):
        """Load from a checkpoint.

        Raises:
            CheckpointError: wrong fields or tensors; before any tensor is read.
        """
        super().__init__()
        self.config = config = OPTConfig.from_hf(checkpoint.fields)
        tied = {"lm_head.weight": EMBEDDING} if config.tied and not config.scores else {}
        stored = checkpoint.check(config.tensors(), ignore=IGNORED, tied=tied, base=BASE)
        weights = Weights(checkpoint, stored, dtype, device, quant)
        self.shape = ModelShape(
            config.layers,
            config.heads,
            config.head_dim,
            config.vocab_size,
            config.max_positions,
            scores=config.scores,
        )
        projected = config.embedding_width != config.width
        self.embedding = weights.embedding(EMBEDDING)
        self.positions_PE = weights.vector(POSITIONS)
        self.project_in = weights.linear("model.decoder.project_in") if projected else nn.Identity()
        self.layers = nn.ModuleList(
            OPTLayer(config, weights, f"model.decoder.layers.{i}") for i in range(config.layers)
        )
        self.norm = layer_norm(config, weights, "model.decoder.final_layer_norm") if config.final_norm else None
        self.project_out = weights.linear("model.decoder.project_out") if projected else nn.Identity()
        self.head = weights.linear("score" if config.scores else "lm_head")
        parts = [(x.attention_norm, x.mlp_norm, x.qkv, x.out, x.up, x.down) for x in self.layers]
        self.stack = None  # which has no norms after blocks, and needs a last one
        if self.norm is not None:
            self.stack = stacked(parts, self.norm, self.shape, config.heads, config.activation)

    def forward(
        self, tokens_T: Tensor, positions_T: Tensor, spans_T: Tensor, cache: KVCache, layout: TreeLayout
    ) -> Tensor:
        """Evaluate the T tokens of a pass; their keys and values go into the cache.

        Args:
            tokens_T, positions_T: int64; positions below `shape.max_positions`.
            spans_T: int64, not used: what a token computes depends on its position alone.

        Returns:
            hidden rows [T, E], final norm applied.
        """
        x_TE = self.project_in(self.embedding(tokens_T)) + F.embedding(positions_T + OFFSET, self.positions_PE)
        if self.stack is not None and self.stack.takes(x_TE, layout):
            return self.stack(x_TE, None, cache, layout)
        for i, layer in enumerate(self.layers):
            x_TE = layer(x_TE, cache.k_LGSD[i], cache.v_LGSD[i], layout)
        return x_TE if self.norm is None else self.norm(x_TE, layout.impl)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Hidden rows [N, E] to next-token logits [N, V] (scores [N, 1] of a scalar head) in the model's dtype."""
        return self.head(self.project_out(hidden_NE))
