"""GPT-2 (Radford et al. 2019): learned positions, matrices stored [in, out].

Shape legend: T tokens of a pass, N asked rows, E width, P positions, H heads, D head size, S cache slots, V vocabulary.
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

ARCHITECTURES = ("GPT2LMHeadModel", "GPT2ForSequenceClassification")
BASE = "transformer."  # a save of the bare GPT2Model lacks it: OpenAI's own checkpoints
EMBEDDING, POSITIONS = "transformer.wte.weight", "transformer.wpe.weight"
IGNORED = (re.compile(r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias"),)  # the causal mask and what it masks with


@dataclass(frozen=True)
class GPT2Config:
    """The fields of config.json that change what a GPT-2 computes."""

    vocab_size: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    norm_eps: float
    activation: str
    scaled: bool  # attention by 1 / sqrt(head size)
    scaled_by_layer: bool  # and by 1 / (layer + 1)
    tied: bool
    scores: bool  # a scalar head in place of the language model's
    max_positions: int

    @property
    def head_dim(self) -> int:
        return self.width // self.heads

    def scale(self, layer: int) -> float:
        """Of a layer's attention."""
        return (self.head_dim**-0.5 if self.scaled else 1.0) / (layer + 1 if self.scaled_by_layer else 1)

    @staticmethod
    def from_hf(fields: Fields) -> "GPT2Config":
        """Read and check a Hugging Face config. Raises CheckpointError naming the field."""
        width = fields.int("n_embd")
        heads = fields.int("n_head", high=2**14)
        if width % heads:
            raise fields.error("n_embd", f"a multiple of n_head {heads}")
        if fields.bool("add_cross_attention", default=False):
            raise fields.error("add_cross_attention", "false: decoders of an encoder's output are not supported")
        fields.bool("reorder_and_upcast_attn", default=False)  # how half precision rounds: the kernels have their way
        return GPT2Config(
            vocab_size=fields.int("vocab_size"),
            width=width,
            mlp_width=fields.int("n_inner", default=4 * width),
            layers=fields.int("n_layer", high=2**14),
            heads=heads,
            norm_eps=fields.float("layer_norm_epsilon", default=1e-5, low=0.0),
            activation=ACTIVATIONS[fields.choice("activation_function", set(ACTIVATIONS), default="gelu_new")],
            scaled=fields.bool("scale_attn_weights", default=True),
            scaled_by_layer=fields.bool("scale_attn_by_inverse_layer_idx", default=False),
            tied=fields.bool("tie_word_embeddings", default=True),
            scores=has_scalar_head(fields),
            max_positions=fields.int("n_positions", default=1024),
        )

    def tensors(self) -> dict[str, tuple[int, ...]]:
        """Names and shapes of everything the checkpoint must hold."""
        layer: dict[str, tuple[int, ...]] = {
            "ln_1": (self.width,),
            "attn.c_attn": (self.width, 3 * self.width),
            "attn.c_proj": (self.width, self.width),
            "ln_2": (self.width,),
            "mlp.c_fc": (self.width, self.mlp_width),
            "mlp.c_proj": (self.mlp_width, self.width),
        }
        shapes: dict[str, tuple[int, ...]] = {
            EMBEDDING: (self.vocab_size, self.width),
            POSITIONS: (self.max_positions, self.width),
        }
        for name, shape in [
            *((f"transformer.h.{i}.{name}", shape) for i in range(self.layers) for name, shape in layer.items()),
            ("transformer.ln_f", (self.width,)),
        ]:
            shapes |= {f"{name}.weight": shape, f"{name}.bias": shape[-1:]}
        return shapes | head_shape(self.scores, self.vocab_size, self.width)


class GPT2Layer(nn.Module):
    """Pre-norm attention and MLP, each added to the stream."""

    def __init__(self, config: GPT2Config, weights: Weights, index: int):
        super().__init__()
        self.config = config
        prefix = f"transformer.h.{index}"
        self.attention_norm = layer_norm(config, weights, f"{prefix}.ln_1")
        self.mlp_norm = layer_norm(config, weights, f"{prefix}.ln_2")
        self.qkv = weights.linear(f"{prefix}.attn.c_attn", bias=True, transposed=True)
        self.out = weights.linear(f"{prefix}.attn.c_proj", bias=True, transposed=True)
        self.up = weights.linear(f"{prefix}.mlp.c_fc", bias=True, transposed=True)
        self.down = weights.linear(f"{prefix}.mlp.c_proj", bias=True, transposed=True)
        self.scale = config.scale(index)

    def forward(self, x_TE: Tensor, k_HSD: Tensor, v_HSD: Tensor, layout: TreeLayout) -> Tensor:
        x_TE = x_TE + self.attention(self.attention_norm(x_TE, layout.impl), k_HSD, v_HSD, layout)
        middle_TM = activation(self.up(self.mlp_norm(x_TE, layout.impl)), self.config.activation, impl=layout.impl)
        return x_TE + self.down(middle_TM)

    def attention(self, x_TE: Tensor, k_HSD: Tensor, v_HSD: Tensor, layout: TreeLayout) -> Tensor:
        q_THD, k_THD, v_THD = self.qkv(x_TE).unflatten(-1, (3, self.config.heads, self.config.head_dim)).unbind(1)
        kv_write(k_HSD, v_HSD, k_THD, v_THD, layout.write_slots_T, impl=layout.impl)
        return self.out(tree_attention(q_THD, k_HSD, v_HSD, layout, scale=self.scale).flatten(1))


def layer_norm(config: GPT2Config, weights: Weights, name: str) -> LayerNorm:
    return LayerNorm(weights.vector(f"{name}.weight"), weights.vector(f"{name}.bias"), config.norm_eps)


class GPT2(nn.Module):
    """A causal language model: tokens, positions and a layout to hidden rows, hidden rows to logits."""

    default_eos_token_ids = frozenset([50256])  # where no file of the checkpoint says anything

    def __init__(self, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device, quant: str = "none"):
        """Load from a checkpoint.

        Raises:
            CheckpointError: wrong fields or tensors; before any tensor is read.
        """
        super().__init__()
        self.config = config = GPT2Config.from_hf(checkpoint.fields)
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
        self.embedding = weights.embedding(EMBEDDING)
        self.positions_PE = weights.vector(POSITIONS)
        self.layers = nn.ModuleList(GPT2Layer(config, weights, i) for i in range(config.layers))
        self.norm = layer_norm(config, weights, "transformer.ln_f")
        self.head = weights.linear("score" if config.scores else "lm_head")
        parts = [(x.attention_norm, x.mlp_norm, x.qkv, x.out, x.up, x.down) for x in self.layers]
        told = parts, self.norm, self.shape, config.heads, config.activation
        # A stack has one scale for all layers.
        self.stack = None if config.scaled_by_layer else stacked(*told, scale=config.scale(0))

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
        x_TE = self.embedding(tokens_T) + F.embedding(positions_T, self.positions_PE)
        if self.stack is not None and self.stack.takes(x_TE, layout):
            return self.stack(x_TE, None, cache, layout)
        for i, layer in enumerate(self.layers):
            x_TE = layer(x_TE, cache.k_LGSD[i], cache.v_LGSD[i], layout)
        return self.norm(x_TE, layout.impl)

    def logits(self, hidden_NE: Tensor) -> Tensor:
        """Hidden rows [N, E] to next-token logits [N, V] (scores [N, 1] of a scalar head) in the model's dtype."""
        return self.head(hidden_NE)
