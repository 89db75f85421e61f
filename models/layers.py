"""The parts of a decoder: attention, MLP, their norms, and the layer that they form, a list of operator calls
(`kernels.stack.calls`). `models/running.py` executes each call.

Shape legend: E width, K taps of a convolution.
"""

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels.delta_net import DeltaWeights
from kernels.layout import ChannelKind, DeltaKind, ScanKind
from kernels.scan import ScanWeights
from kernels.stack.calls import Call, Heads
from models.checkpoint.weights import Weights
from models.config import XIELU, Config, Recurrent, ShortConvs
from models.latent import LatentAttention
from models.layer_inputs import LayerInput
from models.mamba import Mamba
from models.mixture import Mixture
from models.names import CURVE, Names
from models.norms import Norm, PlainNorm, head_norm, norm_of_part
from models.running import Registers, Together, run
from models.streams import Laurel, StreamUpdates


class Attention(nn.Module):
    """Attention of tokens to the trunks and branches from which they descend; the tokens' keys and values are written
    first."""

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        layer, transposed = names.layer.format(index), names.transposed
        qkv, part = (layer + name for name in names.heads_of(c, index)), weights.part
        self.qkv = weights.linear(*qkv, bias=c.attention_bias, transposed=transposed, outs=part.qkv)
        self.out = weights.linear(layer + names.out, bias=c.has_out_bias(index), transposed=transposed, ins=part.heads)
        (kv_heads, size), self.reads = c.kv_size(index), c.reads(index)
        own = kv_heads if self.reads == index else 0
        queries = c.query_heads(index)
        self.heads = Heads(queries if c.query_gate else 0, queries, own, own, size, kv_heads)
        normed = c.norms_heads(index)
        k_normed = normed and own > 0
        self.q_norm = head_norm(c, weights, layer + names.q_norm, part.q_norm, queries) if normed else None
        self.k_norm = head_norm(c, weights, layer + names.k_norm, part.k_norm, kv_heads) if k_normed else None
        self.v_norm = PlainNorm(c, weights, size) if c.value_norms and own else None
        self.all_heads, self.own_norms = c.head_norms == "all", c.head_norms == "own"
        self.norms_last, self.table, self.clip = c.norms_last, c.table(index), c.clip
        self.scale, self.window, self.cap = c.scale(index), c.window(index), c.attention_cap
        self.chunked = c.chunks and self.window is not None
        elements = c.head_gates == "elements"
        gates = part.heads if elements else part.sinks
        outs = None if gates is None else [gates]
        self.gate = weights.linear(layer + names.head_gate, outs=outs) if c.head_gates else None
        self.softplus = c.head_gates in ("softplus", "elements")
        self.gated = Heads(0, queries * size, 0, 0, 1, 0) if elements else self.heads
        sub = c, weights, layer + names.attention_sub_norm, part.heads
        self.sub_norm = norm_of_part(*sub) if c.sub_norms else None
        self.out_scale = c.output_factors.attention
        sinks = layer + names.sinks
        self.sinks_H = weights.vector(sinks, some=part.sinks, dtype=torch.float32) if c.sinks else None
        self.slopes_H = slopes_of(c, weights, self.scale)

    def calls(self, source: str) -> Iterator[Call]:
        """The calls from the register `source` to "out"."""
        yield Call("product", source, "heads", matrix=self.qkv)
        if self.gate is not None:
            yield Call("product", source, "gates", matrix=self.gate)
        on_heads: dict[str, Any] = {"source": "heads", "heads": self.heads}
        norms: dict[str, Any] = {"norm": self.q_norm, "more": self.k_norm, "third": self.v_norm}
        kinds: dict[str, Any] = {"all_heads": self.all_heads, "own_norms": self.own_norms}
        turns = [] if self.q_norm is None else [Call("head_norms", target="heads", **on_heads, **norms, **kinds)]
        if self.table is not None:
            rotation = Call("rotate", target="heads", table=self.table, **on_heads)
            turns.insert(0 if self.norms_last else 1, rotation)
        if self.clip is not None:
            turns.insert(0 if self.q_norm is None else 1, Call("clip", "heads", "heads", scale=self.clip))
        yield from turns
        if self.heads.keys:
            yield Call("write", table=self.reads, **on_heads)
        options: dict[str, Any] = {"scale": self.scale, "window": self.window, "chunked": self.chunked}
        options |= {"cap": self.cap, "sinks": self.sinks_H, "slopes": self.slopes_H}
        yield Call("attend", target="mixed", table=self.reads, **on_heads, **options)
        if self.heads.gates:
            yield Call("gate", target="mixed", **on_heads)
        if self.gate is not None:
            yield Call("gate", "gates", "mixed", heads=self.gated, softplus=self.softplus)
        if self.sub_norm is not None:
            yield Call("norm", "mixed", "mixed", norm=self.sub_norm)
        yield Call("product", "mixed", "out", matrix=self.out)
        yield from scaled("out", self.out_scale)


def slopes_of(c: Config, weights: Weights, scale: float) -> Tensor | None:
    """The slopes of this process's query heads, as `kernels.tree_attention` takes them; None: there are none."""
    if not c.slopes:
        return None
    some = weights.part.sinks or range(len(c.slopes))
    slopes_H = torch.tensor(c.slopes[some.start : some.stop], device=weights.device)
    return slopes_H.bfloat16() if c.coarse_slopes else slopes_H / scale


class Taps(nn.Module):
    """The weights [K, E] of a short convolution, the last for the token itself, and its bias [E]."""

    def __init__(self, weight: Tensor, bias: Tensor | None):
        super().__init__()
        self.weight, self.bias = weight, bias


class ShortConv(nn.Module):
    """A gated short convolution over the ancestors of tokens, instead of attention; the cache stores its inputs."""

    def __init__(self, names: Names, weights: Weights, convs: ShortConvs, index: int):
        super().__init__()
        (into, conv, out), bias = (names.layer.format(index) + name for name in names.conv), convs.bias
        self.index = index
        some = weights.part.channels
        self.into = weights.linear(into, bias=bias, outs=weights.part.into)
        self.out = weights.linear(out, bias=bias, ins=some)
        weight_KE = weights.vector(f"{conv}.weight", some=some).squeeze(1).T.contiguous()
        self.taps = Taps(weight_KE, weights.vector(f"{conv}.bias", some=some) if bias else None)

    def calls(self, source: str) -> Iterator[Call]:
        """The calls from the register `source` to "out"."""
        yield Call("product", source, "gates", matrix=self.into)
        yield Call("convolve", "gates", "convolved", norm=self.taps, table=self.index)
        yield Call("product", "convolved", "out", matrix=self.out)


class GatedDeltaNet(nn.Module):
    """A gated delta net over the ancestors of tokens, instead of attention (`kernels.delta_net`).

    Attributes:
        weights: its own, float32 whatever the model's dtype.
        order: the positions of the operator's inputs among the outputs of interleaved matrices; None: already in order.
    """

    def __init__(self, c: Config, names: Names, weights: Weights, recurrent: Recurrent, index: int):
        super().__init__()
        layer, kind = names.layer.format(index), recurrent.kind
        into, low = ([layer + name for name in some] for some in (names.recurrent_in, names.recurrent_low))
        self.into = weights.linear(*(into[:-3] if recurrent.rank else into))
        apart = [[low[0], into[-3]], [into[-2]], [low[1], into[-1]]] if recurrent.rank else []
        self.apart = nn.ModuleList(nn.ModuleList(map(weights.linear, some)) for some in apart)  # type: ignore[arg-type]
        self.out = weights.linear(layer + names.recurrent_out)

        def vector(name: str) -> Tensor:
            return weights.vector(layer + name).float()

        taps_KC = vector(names.delta_taps).squeeze(1).T.contiguous()
        decay_H, bias_D = weights.decays(layer + names.delta_decay), vector(names.delta_bias)
        eps = c.norm_eps if recurrent.eps is None else recurrent.eps
        rules = eps, recurrent.most, recurrent.bound, recurrent.sigmoid
        self.weights = DeltaWeights(kind, taps_KC, decay_H, bias_D, vector(names.delta_norm), *rules)
        self.order = interleaved(kind).to(weights.device) if recurrent.interleaved else None
        self.place = c.place(index)

    def calls(self, source: str) -> Iterator[Call]:
        """The calls from the register `source` to "out"."""
        yield Call("product", source, "gates", matrix=self.into)
        yield from self._apart(source)
        yield Call("recur", "gates", "convolved", delta=self, table=self.place)
        yield Call("product", "convolved", "out", matrix=self.out)

    def _apart(self, source: str) -> Iterator[Call]:
        """Yield the calls that compute gates, strengths and inputs of decays one by one, and put them behind the rest
        of "gates"."""
        kind, width = self.weights.kind, 0
        outs = kind.value_heads * kind.value_size, kind.value_heads, kind.decays
        for matrices, count in zip(self.apart, outs, strict=False):
            *low, last = cast(Sequence[Any], matrices)
            if low:
                yield Call("product", source, "low", matrix=low[0])
            made = "steps" if width else "values"
            yield Call("product", "low" if low else source, made, matrix=last)
            if width:
                yield Call("join", made, "values", table=width)
            width += count
        if width:
            yield Call("join", "values", "gates", table=kind.channels)


class SelectiveScan(nn.Module):
    """A Mamba-2 selective scan over the ancestors of tokens, instead of attention or in parallel with it
    (`kernels.scan`).

    Attributes:
        weights: its own, float32 whatever the model's dtype.
    """

    def __init__(self, c: Config, names: Names, weights: Weights, recurrent: Recurrent, kind: ScanKind, index: int):
        super().__init__()
        layer = names.layer.format(index)
        self.into = weights.linear(*(layer + name for name in names.recurrent_in), bias=recurrent.bias)
        self.out = weights.linear(layer + names.recurrent_out, bias=recurrent.bias)

        def vector(name: str) -> Tensor:
            return weights.vector(layer + name).float()

        gate, *channels, step = recurrent.factors
        keys, values = kind.key_heads * kind.key_size, kind.value_heads * kind.value_size
        taps_CK = vector(names.delta_taps).squeeze(1)
        parts = zip(taps_CK.split([values, keys, keys]), channels, strict=True)
        taps_KC = torch.cat([part * factor for part, factor in parts]).T.contiguous()
        shift_C = vector(names.scan_shift) if recurrent.conv_bias else taps_KC.new_zeros(kind.channels)
        decay_H, bias_H = weights.decays(layer + names.delta_decay), vector(names.delta_bias)
        norm_E = vector(names.delta_norm) if recurrent.normed else None
        vectors = taps_KC, shift_C, decay_H, bias_H, vector(names.scan_skip), norm_E
        eps = c.norm_eps if recurrent.eps is None else recurrent.eps
        self.weights = ScanWeights(kind, *vectors, eps, *recurrent.steps, gate, step)
        self.place, self.out_scale = c.place(index), c.output_factors.scan

    def calls(self, source: str) -> Iterator[Call]:
        """The calls from the register `source` to "out"."""
        yield Call("product", source, "gates", matrix=self.into)
        yield Call("scan", "gates", "convolved", delta=self, table=self.place)
        yield Call("product", "convolved", "out", matrix=self.out)
        yield from scaled("out", self.out_scale)


def interleaved(kind: DeltaKind) -> Tensor:
    """Return the positions of `delta_net`'s inputs among the outputs of Qwen3-Next's two matrices, int64.

    For each key head, the first matrix produces a query, a key, the head's values and their gates; the second one
    produces the strengths of the head's value heads, and the inputs of their decays.
    """
    G, (H, K, V) = kind.key_heads, kind.state
    sizes = K, K, H // G * V, H // G * V
    first = torch.arange(kind.channels + H * V)
    parts = [*first.view(G, -1).split(sizes, 1), *(first[-1] + 1 + torch.arange(2 * H)).view(G, -1).chunk(2, 1)]
    return torch.cat([part.flatten() for part in parts])


class Curve(nn.Module):
    """The four parameters of a layer's xIELU, `weight` [4], float32: see `kernels.rows.xielu`. Softplus is applied to
    two of the checkpoint's numbers."""

    bias = None

    def __init__(self, weights: Weights, name: str):
        super().__init__()
        positive, negative, slope, near = (
            weights.vector(f"{name}.{part}", dtype=torch.float64).view(1) for part in CURVE
        )
        made = F.softplus(positive), slope + F.softplus(negative), slope, near
        self.weight = torch.cat(made).float()


class MLP(nn.Module):
    """Two matrix multiplications with an activation between them; if gated, the activated half is multiplied by the
    other half."""

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        layer = names.layer.format(index)
        options: dict[str, Any] = {"bias": c.mlp_bias, "transposed": names.transposed}
        self.up = weights.linear(*(layer + name for name in names.up), outs=weights.part.up, **options)
        self.down = weights.linear(layer + names.down, ins=weights.part.inner, **options)
        self.activation, self.gated = c.activation, c.gated
        sub = c, weights, layer + names.mlp_sub_norm, weights.part.inner
        self.sub_norm = norm_of_part(*sub) if c.sub_norms else None
        self.curve = Curve(weights, layer + names.curve) if c.activation == XIELU else None
        self.sparsity = c.sparsity[index] if c.sparsity else None
        self.scale, self.out_scale = c.mlp_scale, c.output_factors.mlp

    def calls(self, source: str) -> Iterator[Call]:
        """The calls from the register `source` to "read"."""
        yield Call("product", source, "up", matrix=self.up)
        if self.sparsity is not None:
            yield Call("sparsify", "up", "up", scale=self.sparsity)
        yield from scaled("up", self.scale)
        if self.curve is not None:
            yield Call("xielu", "up", "middle", norm=self.curve)
        else:
            yield Call("activate", "up", "middle", function=self.activation, gated=self.gated)
        if self.sub_norm is not None:
            yield Call("norm", "middle", "middle", norm=self.sub_norm)
        yield Call("product", "middle", "read", matrix=self.down)
        yield from scaled("read", self.out_scale)


class BesideMLP(nn.Module):
    """An MLP in parallel with experts, which read the stream through their own norm; both outputs are normed and
    added."""

    def __init__(self, c: Config, names: Names, weights: Weights, mixture: Mixture, index: int):
        super().__init__()
        layer = names.layer.format(index)
        self.mlp, self.mixture = MLP(c, names, weights, index), mixture
        each = names.experts_norm, names.experts_out_norm, names.mlp_own_norm
        self.input_norm, self.output_norm, self.mlp_norm = (Norm(c, weights, layer + name) for name in each)
        self.router_norm, self.router_scale = PlainNorm(c, weights, c.width), c.width**-0.5
        self.router_norm.weight = weights.vector(layer + names.router_scale)

    def calls(self, source: str) -> Iterator[Call]:
        """The calls from the stream and the register `source`, the MLP's input, to "read"."""
        yield Call("norm", "stream", "mixed", norm=self.router_norm)
        yield Call("scale", "mixed", "mixed", scale=self.router_scale)
        yield Call("norm", "stream", "out", norm=self.input_norm)
        yield Call("mix", "out", "out", "mixed", mixture=self.mixture)
        yield Call("norm", "out", "out", norm=self.output_norm)
        yield from self.mlp.calls(source)
        yield Call("norm", "read", "read", norm=self.mlp_norm)
        yield Call("add", "out", "read")


class Residual(nn.Module):
    """The norms of attention or of an MLP, see `Config.norms`, and the factor of its contribution to the stream.

    Args:
        bare: there is no norm on the input.
    """

    def __init__(self, c: Config, weights: Weights, index: int, name: str, out_name: str, *, bare: bool = False):
        super().__init__()
        norms = [norm for norm in c.norms_of(index) if not (bare and norm == "input")]
        self.input = Norm(c, weights, name) if "input" in norms else None
        self.stream = Norm(c, weights, name) if "stream" in norms else None
        self.output = Norm(c, weights, out_name, eps=c.out_norm_eps) if "output" in norms else None
        self.sum = Norm(c, weights, name) if "sum" in norms else None
        self.scale = c.residual_scale

    def read(self, source: str = "stream") -> list[Call]:
        """The calls from the stream, or another register, to "read". If there is no norm on the input, the stream is
        what is read: no call, or one that changes it."""
        if self.stream is not None:
            return [Call("norm", "stream", "stream", norm=self.stream)]
        return [] if self.input is None else [Call("norm", source, "read", norm=self.input)]

    def add(self, *outputs: str) -> Iterator[Call]:
        """Add the outputs in one or two registers to the stream."""
        for output in outputs:
            if self.output is not None:
                yield Call("norm", output, output, norm=self.output)
            yield from scaled(output, self.scale)
        for source, target in zip(outputs, (*outputs[1:], "stream"), strict=True):
            yield Call("add", source, target)
        if self.sum is not None:
            yield Call("norm", "stream", "stream", norm=self.sum)


def scaled(register: str, scale: float) -> list[Call]:
    """The call that multiplies a register; none for a factor of 1."""
    return [] if scale == 1.0 else [Call("scale", register, register, scale=scale)]


class Layer(nn.Module):
    """Attention and MLP, or one of them, each added to the stream; `Config.norms` gives the positions of their norms. A
    scan may read what attention reads, and is added likewise; or it reads what a block computes.

    Args:
        block: a `models.shared_blocks.BlockUse`, or None.

    Attributes:
        calls: the layer's operator calls.
        together: the calls for a GPU, some of them fused; they end with the first norm of the next layer.
    """

    together: list[Call | Together]

    def __init__(self, c: Config, names: Names, weights: Weights, index: int, block: Any = None):
        super().__init__()
        layer, self.block = names.layer.format(index), block
        norms = names.attention_norm, names.attention_out_norm
        attends, feeds = c.has("attention", index), c.has("mlp", index)
        bare, each = index == 0 and not c.first_norm, [layer + name for name in norms]
        self.attention_residual = Residual(c, weights, index, *each, bare=bare) if attends else None
        norms, own = (names.mlp_norm, names.mlp_out_norm), feeds and c.parallel != "shared"
        self.mlp_residual = Residual(c, weights, index, *(layer + name for name in norms)) if own else None
        self.parallel = c.parallel != ""
        recurrent = None
        if c.recurrent is not None and c.recurs(index):
            if isinstance(kind := c.recurrent.kind, ScanKind):
                recurrent = SelectiveScan(c, names, weights, c.recurrent, kind, index)
            elif isinstance(kind, ChannelKind):
                recurrent = Mamba(c, names, weights, c.recurrent, kind, index)
            else:
                recurrent = GatedDeltaNet(c, names, weights, c.recurrent, index)
        self.beside = recurrent if c.has_both(index) and block is None else None
        if not attends:
            self.attention = None
        elif recurrent is not None and self.beside is None:
            self.attention = recurrent
        elif c.latent is not None:
            self.attention = LatentAttention(c, names, weights, c.latent, index)
        elif c.convs is not None and c.convolves(index):
            self.attention = ShortConv(names, weights, c.convs, index)
        else:
            self.attention = Attention(c, names, weights, index)
        self.mlp = (Mixture if c.mixed(index) else MLP)(c, names, weights, index) if feeds else None
        if isinstance(self.mlp, Mixture) and c.experts is not None and c.experts.beside_mlp:
            self.mlp = BesideMLP(c, names, weights, self.mlp, index)
        self.input = LayerInput(c, names, weights, index) if c.layer_inputs else None
        self.streams = StreamUpdates(c, names, weights, c.streams, index) if c.streams else None
        self.laurel = Laurel(c, names, weights, index) if c.laurel else None
        self.scale = weights.scalar(layer + names.layer_scale) if c.layer_scales else 1.0
        self.calls = list(self._calls())

    def _calls(self) -> Iterator[Call]:
        attending, feeding = self.attention_residual, self.mlp_residual
        if self.streams is not None:
            yield from self.streams.predict()
        if self.attention is not None and attending is not None:
            yield from [] if self.block is None else self.block.calls()
            yield from attending.read("stream" if self.block is None else "out")
            source = "stream" if attending.input is None else "read"
            if self.laurel is not None:
                yield from self.laurel.calls(source)
            yield from self.attention.calls(source)
            if self.parallel and self.mlp is not None:
                yield from [] if feeding is None else feeding.read()
                yield from self.mlp.calls(source)
                yield from attending.add("read", "out")
                return
            yield from attending.add("out")
            if self.laurel is not None:
                yield Call("scale", "stream", "stream", scale=2**-0.5)
            if self.beside is not None:
                yield from self.beside.calls(source)
                yield from attending.add("out")
        if self.mlp is not None and feeding is not None:
            yield from feeding.read()
            yield from self.mlp.calls("stream" if feeding.input is None else "read")
            yield from feeding.add("read")
        if self.streams is not None:
            yield from self.streams.correct()
        if self.input is not None:
            yield from self.input.calls()
        if self.scale != 1.0:
            yield Call("scale", "stream", "stream", scale=self.scale)

    def forward(self, registers: Registers) -> Tensor:
        """Run the layer, and return the stream after it."""
        run(self.together if registers.together else self.calls, registers)
        return registers["stream"]
