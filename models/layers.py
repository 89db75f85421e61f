"""The parts of a decoder: norms, attention, MLP, and the layer they make.

Shape legend: T tokens of a pass, E width, M MLP width, H query heads, G key/value heads, D head size (of cos and sin:
the rotated dims), S cache slots.
"""

import torch
from torch import Tensor, nn

from kernels import stack
from kernels.kv_write import kv_write
from kernels.layout import TreeLayout
from kernels.rows import activation, layer_norm, rms_norm, rotary, silu_mul
from kernels.tree_attention import tree_attention
from models.config import Config, Names
from models.weights import Weights

Rope = tuple[Tensor, Tensor] | None  # cos_TD and sin_TD; None: nothing is rotated


class Norm(nn.Module):
    """An RMSNorm, x / rms(x) * weight (Zhang and Sennrich, 2019), or, with a bias, a LayerNorm, (x - mean(x)) / std(x)
    * weight + bias (Ba et al., 2016); float32 inside, whatever the dtype.

    Args:
        c, weights: of the model.
        name: of its vectors; a norm that is not `affine` has ones and zeros for them.
    """

    def __init__(self, c: Config, weights: Weights, name: str):
        super().__init__()
        self.eps = c.norm_eps
        self.bias: Tensor | None = None
        if c.affine:
            self.weight = weights.vector(f"{name}.weight")
            self.bias = None if c.rms else weights.vector(f"{name}.bias")
        else:
            self.weight = torch.ones(c.width, dtype=weights.dtype, device=weights.device)
            self.bias = torch.zeros_like(self.weight)

    @property
    def vectors(self) -> stack.Norm:
        """For a stack."""
        return stack.Norm(self.weight, self.bias)

    def forward(self, x: Tensor, impl: str) -> Tensor:
        """[..., E] -> the same; `impl` is the pass's."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, impl=impl)
        return layer_norm(x, self.weight, self.bias, self.eps, impl=impl)


class Attention(nn.Module):
    """Attention of tokens to the trunks and branches they descend from, their keys and values written first."""

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        layer, bias, options = names.layer.format(index), c.attention_bias, {"transposed": names.transposed}
        self.qkv = weights.linear(*(layer + name for name in names.qkv), bias=bias, **options)
        self.out = weights.linear(layer + names.out, bias=bias and c.out_bias, **options)
        self.q_norm = Norm(c, weights, layer + names.q_norm) if c.head_norms else None
        self.k_norm = Norm(c, weights, layer + names.k_norm) if c.head_norms else None
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.scale, self.window = c.scale(index), c.window(index)

    def forward(self, x_TE: Tensor, rope: Rope, k_GSD: Tensor, v_GSD: Tensor, layout: TreeLayout) -> Tensor:
        H, G, impl = self.heads, self.kv_heads, layout.impl
        rows_THD = self.qkv(x_TE).unflatten(-1, (H + 2 * G, self.head_dim))
        if self.q_norm is not None and self.k_norm is not None:
            q_THD, k_TGD, v_TGD = rows_THD.split([H, G, G], 1)
            q_THD, k_TGD = self.q_norm(q_THD, impl), self.k_norm(k_TGD, impl)
            if rope is not None:
                q_THD, k_TGD = rotary(q_THD, *rope, impl=impl), rotary(k_TGD, *rope, impl=impl)
        else:
            turned_THD, v_TGD = rows_THD.split([H + G, G], 1)
            if rope is not None:
                turned_THD = rotary(turned_THD, *rope, impl=impl)
            q_THD, k_TGD = turned_THD.split([H, G], 1)
        kv_write(k_GSD, v_GSD, k_TGD, v_TGD, layout.write_slots_T, impl=impl)
        mixed_THD = tree_attention(q_THD, k_GSD, v_GSD, layout, scale=self.scale, window=self.window)
        return self.out(mixed_THD.flatten(1))


class MLP(nn.Module):
    """Two products and an activation between them; gated, the activated half is multiplied with the other half."""

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        layer, options = names.layer.format(index), {"bias": c.mlp_bias, "transposed": names.transposed}
        self.up = weights.linear(*(layer + name for name in names.up), **options)
        self.down = weights.linear(layer + names.down, **options)
        self.activation, self.gated = c.activation, c.gated

    def forward(self, x_TE: Tensor, impl: str) -> Tensor:
        up_TM = self.up(x_TE)
        if not self.gated:
            return self.down(activation(up_TM, self.activation, impl=impl))
        if self.activation == "silu":
            return self.down(silu_mul(up_TM, impl=impl))
        gate_TM, up_TM = up_TM.chunk(2, -1)
        return self.down(activation(gate_TM, self.activation, impl=impl) * up_TM)


class Layer(nn.Module):
    """Attention and MLP, each added to the stream; where their norms stand is `Config.order`."""

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        layer, self.order = names.layer.format(index), c.order
        self.attention_norm = Norm(c, weights, layer + names.attention_norm)
        self.mlp_norm = Norm(c, weights, layer + names.mlp_norm) if c.order != "parallel" else None
        self.attention, self.mlp = Attention(c, names, weights, index), MLP(c, names, weights, index)

    def described(self, table: int | None) -> stack.Layer | None:
        """For a stack, whose angles of number `table` rotate queries and keys; None: it has no product of a matrix."""
        attention, mlp = self.attention, self.mlp
        norms = (self.attention_norm, self.mlp_norm, attention.q_norm, attention.k_norm)
        attention_norm, mlp_norm, q_norm, k_norm = (norm and norm.vectors for norm in norms)
        qkv, out, up, down = (part.matrix for part in (attention.qkv, attention.out, mlp.up, mlp.down))
        if attention_norm is None or qkv is None or out is None or up is None or down is None:
            return None
        options = {"scale": attention.scale, "window": attention.window, "order": self.order, "table": table}
        norms = {"attention_norm": attention_norm, "mlp_norm": mlp_norm, "q_norm": q_norm, "k_norm": k_norm}
        return stack.Layer(qkv=qkv, out=out, up=up, down=down, **norms, **options)

    def forward(self, x_TE: Tensor, rope: Rope, k_GSD: Tensor, v_GSD: Tensor, layout: TreeLayout) -> Tensor:
        # Not the modules' calls, which take microseconds per layer.
        attend, feed, cache, impl = self.attention.forward, self.mlp.forward, (k_GSD, v_GSD, layout), layout.impl
        if self.mlp_norm is None:
            normed_TE = self.attention_norm(x_TE, impl)
            return attend(normed_TE, rope, *cache) + feed(normed_TE, impl) + x_TE
        if self.order == "after":
            x_TE = self.attention_norm(x_TE + attend(x_TE, rope, *cache), impl)
            return self.mlp_norm(x_TE + feed(x_TE, impl), impl)
        x_TE = x_TE + attend(self.attention_norm(x_TE, impl), rope, *cache)
        return x_TE + feed(self.mlp_norm(x_TE, impl), impl)
