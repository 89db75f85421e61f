"""The parts of a decoder: norms, attention, MLP, and the layer they make.

Shape legend: T tokens of a pass, E width, M MLP width, H query heads, G key/value heads, D head size (of cos and sin:
the rotated dims), S cache slots.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from kernels import stack
from kernels.kv_write import HeadTransform, kv_write, rotary_write
from kernels.layout import TreeLayout
from kernels.rows import activation, activation_mul, add_norm, layer_norm, rms_norm, rotary
from kernels.short_conv import short_conv
from kernels.tree_attention import tree_attention
from models.checkpoint.weights import Weights
from models.config import Config, Names

Rope = tuple[Tensor, ...] | None  # cos_TD and sin_TD, and then those of queries if they are others; None: none


class Norm(nn.Module):
    """An RMSNorm, x / rms(x) * weight (Zhang and Sennrich, 2019), or, with a bias, a LayerNorm, (x - mean(x)) / std(x)
    * weight + bias (Ba et al., 2016); float32 inside, whatever the dtype. `Config.plus_one` is part of the weight.

    Args:
        c, weights: of the model.
        name: of its vectors; a norm that is not `affine` has ones and zeros for them.
        some: elements of the vectors; None: all.
    """

    def __init__(self, c: Config, weights: Weights, name: str, some: range | None = None):
        super().__init__()
        self.eps = c.norm_eps
        self.bias: Tensor | None = None
        if c.affine:
            self.weight = weights.vector(f"{name}.weight", plus_one=c.plus_one, some=some)
            self.bias = None if c.rms else weights.vector(f"{name}.bias")
        else:
            self.weight = torch.ones(c.width, dtype=weights.dtype, device=weights.device)
            self.bias = torch.zeros_like(self.weight)

    @property
    def vectors(self) -> stack.StackNorm:
        """For a stack."""
        return stack.StackNorm(self.weight, self.bias)

    def forward(self, x: Tensor, impl: str) -> Tensor:
        """[..., E] -> the same; `impl` is the pass's."""
        if self.bias is None:
            return rms_norm(x, self.weight, self.eps, impl=impl)
        return layer_norm(x, self.weight, self.bias, self.eps, impl=impl)


class DividedNorm(Norm):
    """An RMSNorm of rows of which each process has a part; the mean is that of the whole row."""

    def __init__(self, c: Config, weights: Weights, name: str, some: range):
        super().__init__(c, weights, name, some)
        self.shard = weights.shard

    def forward(self, x: Tensor, impl: str) -> Tensor:
        """[..., elements of this process] -> the same."""
        x_float = x.float()
        mean = self.shard.sum(x_float.square().mean(-1, keepdim=True)) / self.shard.size  # all parts are of one size
        return (x_float * torch.rsqrt(mean + self.eps) * self.weight.float()).to(x.dtype)


class Attention(nn.Module):
    """Attention of tokens to the trunks and branches they descend from, their keys and values written first."""

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        layer, transposed = names.layer.format(index), names.transposed
        out_bias = c.attention_bias if c.out_bias is None else c.out_bias
        qkv, part = (layer + name for name in names.qkv), weights.part
        self.qkv = weights.linear(*qkv, bias=c.attention_bias, transposed=transposed, outs=part.qkv)
        self.out = weights.linear(layer + names.out, bias=out_bias, transposed=transposed, ins=part.heads)
        self.q_norm = head_norm(c, weights, layer + names.q_norm, part.q_norm) if c.head_norms else None
        self.k_norm = head_norm(c, weights, layer + names.k_norm, part.k_norm) if c.head_norms else None
        self.all_heads, self.norms_last, self.eps = c.head_norms == "all", c.norms_last, c.norm_eps
        self.heads, self.kv_heads, self.head_dim = c.heads, c.kv_heads, c.head_dim
        self.scale, self.window, self.cap = c.scale(index), c.window(index), c.attention_cap

    def forward(self, x_TE: Tensor, rope: Rope, kept: Sequence[Tensor], layout: TreeLayout) -> Tensor:
        impl, (k_GSD, v_GSD) = layout.rows_impl, kept
        rows_THD = self.qkv(x_TE).unflatten(-1, (self.heads + 2 * self.kv_heads, self.head_dim))
        turned = rope is not None or self.q_norm is not None
        if impl == "triton" and turned and not isinstance(self.q_norm, DividedNorm):
            q_norm, k_norm = (norm and (norm.weight, norm.bias) for norm in (self.q_norm, self.k_norm))
            turn = HeadTransform(rope or (), q_norm, k_norm, self.eps, self.norms_last, self.all_heads)
            q_THD, k_TGD, v_TGD = self._split(rows_THD)
            q_THD = rotary_write(k_GSD, v_GSD, q_THD, k_TGD, v_TGD, layout.write_slots_T, turn, impl=impl)
        else:
            q_THD, k_TGD, v_TGD = self._turned(rows_THD, rope, impl)
            kv_write(k_GSD, v_GSD, k_TGD, v_TGD, layout.write_slots_T, impl=layout.impl)
        mixed_THD = tree_attention(q_THD, k_GSD, v_GSD, layout, scale=self.scale, window=self.window, cap=self.cap)
        return self.out(mixed_THD.flatten(1))

    def _split(self, rows_THD: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values."""
        q_THD, k_TGD, v_TGD = rows_THD.split([self.heads, self.kv_heads, self.kv_heads], 1)
        return q_THD, k_TGD, v_TGD

    def _turned(self, rows_THD: Tensor, rope: Rope, impl: str) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, the first two normed and rotated, each step an operator of its own."""
        H, G = self.heads, self.kv_heads
        if self.q_norm is None and (rope is None or len(rope) == 2):
            turned_THD, v_TGD = rows_THD.split([H + G, G], 1)
            if rope is not None:
                turned_THD = rotary(turned_THD, *rope, impl=impl)
            q_THD, k_TGD = turned_THD.split([H, G], 1)
            return q_THD, k_TGD, v_TGD
        q_THD, k_TGD, v_TGD = self._split(rows_THD)
        if not self.norms_last:
            q_THD, k_TGD = self._normed(q_THD, self.q_norm, impl), self._normed(k_TGD, self.k_norm, impl)
        if rope is not None:
            q_THD, k_TGD = rotary(q_THD, *rope[-2:], impl=impl), rotary(k_TGD, *rope[:2], impl=impl)
        if self.norms_last:
            q_THD, k_TGD = self._normed(q_THD, self.q_norm, impl), self._normed(k_TGD, self.k_norm, impl)
        return q_THD, k_TGD, v_TGD

    @property
    def matrices(self) -> tuple[stack.Matrix | None, stack.Matrix | None]:
        """For a stack."""
        return self.qkv.matrix, self.out.matrix

    def described(self) -> dict[str, Any]:
        """Arguments of a stack's layer."""
        norms = {name: norm and norm.vectors for name, norm in (("q_norm", self.q_norm), ("k_norm", self.k_norm))}
        options = {"all_heads": self.all_heads, "norms_last": self.norms_last}
        return {"scale": self.scale, "window": self.window, "cap": self.cap} | norms | options

    def _normed(self, x_THD: Tensor, norm: Norm | None, impl: str) -> Tensor:
        if norm is None:
            return x_THD
        return norm(x_THD.flatten(1), impl).view(x_THD.shape) if self.all_heads else norm(x_THD, impl)


def head_norm(c: Config, weights: Weights, name: str, some: range | None) -> Norm:
    """The norm of each head, or of all of them, of which this process has `some` elements."""
    return Norm(c, weights, name) if some is None else DividedNorm(c, weights, name, some)


class ShortConv(nn.Module):
    """A gated short convolution over the ancestors of tokens, in the place of attention; its inputs are kept."""

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        (into, conv, out), bias = (names.layer.format(index) + name for name in names.conv), c.conv_bias
        some = weights.part.channels
        self.into = weights.linear(into, bias=bias, outs=weights.part.into)
        self.out = weights.linear(out, bias=bias, ins=some)
        self.weight_KE = weights.vector(f"{conv}.weight", some=some).squeeze(1).T.contiguous()
        self.bias_E = weights.vector(f"{conv}.bias", some=some) if bias else None

    def forward(self, x_TE: Tensor, rope: Rope, kept: Sequence[Tensor], layout: TreeLayout) -> Tensor:
        [rows_1SE], ancestors_TN = kept, layout.ancestors_TN
        if ancestors_TN is None:  # of one tap
            ancestors_TN = layout.write_slots_T.new_empty(len(x_TE), 0)
        weights = self.weight_KE, self.bias_E
        slots = layout.write_slots_T, ancestors_TN
        return self.out(short_conv(self.into(x_TE), *weights, rows_1SE[0], *slots, impl=layout.impl))

    @property
    def matrices(self) -> tuple[stack.Matrix | None, stack.Matrix | None]:
        """For a stack."""
        return self.into.matrix, self.out.matrix

    def described(self) -> dict[str, Any]:
        """Arguments of a stack's layer."""
        return {"scale": 1.0, "conv": stack.Conv(self.weight_KE, self.bias_E)}


class MLP(nn.Module):
    """Two products and an activation between them; gated, the activated half is multiplied with the other half."""

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        layer = names.layer.format(index)
        options: dict[str, Any] = {"bias": c.mlp_bias, "transposed": names.transposed}
        self.up = weights.linear(*(layer + name for name in names.up), outs=weights.part.up, **options)
        self.down = weights.linear(layer + names.down, ins=weights.part.inner, **options)
        self.activation, self.gated = c.activation, c.gated

    def forward(self, x_TE: Tensor, impl: str) -> Tensor:
        up_TM = self.up(x_TE)
        if not self.gated:
            return self.down(activation(up_TM, self.activation, impl=impl))
        return self.down(activation_mul(up_TM, self.activation, impl=impl))


class Residual(nn.Module):
    """The norms of attention or of an MLP, see `Config.norms`, and the factor of what it adds to the stream."""

    def __init__(self, c: Config, weights: Weights, name: str, out_name: str):
        super().__init__()
        self.input = Norm(c, weights, name) if "input" in c.norms else None
        self.output = Norm(c, weights, out_name) if "output" in c.norms else None
        self.sum = Norm(c, weights, name) if "sum" in c.norms else None
        self.scale, self.eps = c.residual_scale, c.norm_eps

    @property
    def norms(self) -> stack.Norms:
        """For a stack."""
        return stack.Norms(*(norm and norm.vectors for norm in (self.input, self.output, self.sum)))

    def read(self, x_TE: Tensor, impl: str) -> Tensor:
        """What the part computes on, of the stream."""
        return x_TE if self.input is None else self.input(x_TE, impl)

    def leave(self, out_TE: Tensor, impl: str) -> Tensor:
        """What is added to the stream, of the part's output."""
        if self.output is not None:
            out_TE = self.output(out_TE, impl)
        return out_TE if self.scale == 1.0 else out_TE * self.scale

    def add(self, x_TE: Tensor, out_TE: Tensor, impl: str) -> Tensor:
        """The stream after the part."""
        x_TE = x_TE + self.leave(out_TE, impl)
        return x_TE if self.sum is None else self.sum(x_TE, impl)

    def fused(self, x_TE: Tensor, outs: Sequence[Tensor], following: Norm | None, impl: str) -> tuple[Tensor, Tensor]:
        """The stream after one part, or two side by side, and what `following` makes of it, by one operator."""
        norm, out_norm = (norm and (norm.weight, norm.bias) for norm in (self.sum or following, self.output))
        x_TE, read_TE = add_norm(x_TE, outs, norm, out_norm, scale=self.scale, eps=self.eps, impl=impl)
        if self.sum is None:
            return x_TE, read_TE
        return read_TE, read_TE if following is None else following(read_TE, impl)


class Layer(nn.Module):
    """Attention and MLP, each added to the stream; where their norms stand is `Config.norms`."""

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        layer = names.layer.format(index)
        self.attention_residual = Residual(c, weights, layer + names.attention_norm, layer + names.attention_out_norm)
        self.mlp_residual = (
            None if c.parallel else Residual(c, weights, layer + names.mlp_norm, layer + names.mlp_out_norm)
        )
        mixer = ShortConv if c.taps and c.taps[index] else Attention
        self.attention, self.mlp = mixer(c, names, weights, index), MLP(c, names, weights, index)
        self.table = c.table(index)

    def described(self) -> stack.StackLayer | None:
        """For a stack; None: it has no product of a matrix."""
        (into, out), (up, down) = self.attention.matrices, (self.mlp.up.matrix, self.mlp.down.matrix)
        if into is None or out is None or up is None or down is None:
            return None
        return stack.StackLayer(
            attention_norms=self.attention_residual.norms,
            mlp_norms=self.mlp_residual and self.mlp_residual.norms,
            qkv=into,
            out=out,
            up=up,
            down=down,
            residual_scale=self.attention_residual.scale,
            table=self.table,
            **self.attention.described(),
        )

    def forward(
        self,
        x_TE: Tensor,
        rope: Rope,
        kept: Sequence[Tensor],
        layout: TreeLayout,
        ahead: tuple[Tensor, Norm | None] | None = None,
    ) -> Any:
        """The stream after this layer.

        Args:
            ahead: what attention reads, and the norm that follows the layer, None if none does: sums and norms are
                computed together, and the result is the stream and what the next layer reads.
        """
        # Not the modules' calls, which take microseconds per layer.
        attend, feed, cache, impl = self.attention.forward, self.mlp.forward, (kept, layout), layout.rows_impl
        attending, feeding = self.attention_residual, self.mlp_residual
        if ahead is not None:
            read_TE, following = ahead
            out_TE = attend(read_TE, rope, *cache)
            if feeding is None:
                return attending.fused(x_TE, [out_TE, feed(read_TE, impl)], following, impl)
            x_TE, read_TE = attending.fused(x_TE, [out_TE], feeding.input, impl)
            return feeding.fused(x_TE, [feed(read_TE, impl)], following, impl)
        read_TE = attending.read(x_TE, impl)
        if feeding is None:
            added_TE = attending.leave(attend(read_TE, rope, *cache), impl)
            return added_TE + attending.leave(feed(read_TE, impl), impl) + x_TE
        x_TE = attending.add(x_TE, attend(read_TE, rope, *cache), impl)
        return feeding.add(x_TE, feed(feeding.read(x_TE, impl), impl), impl)
