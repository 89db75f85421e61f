"""Calls of the C++ operators, with what the definitions make of them.

Sizes fill vectors and do not, rows are not finite, slots that nobody may read are NaN, layouts have every form.

    python -m tests.kernels.replay.cases FILE       for the driver, to be run on another machine
"""

import dataclasses
import itertools
import math
import random
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from kernels import cpp
from kernels.channel_scan import channel_conv, channel_scan
from kernels.channel_scan import native as by_channels_native
from kernels.delta_net import native as delta_native
from kernels.kv_int8 import quantise
from kernels.kv_kinds import parts
from kernels.layout import ChannelKind, DeltaKind, ScanKind
from kernels.linear import Steps
from kernels.linear import reference as products
from kernels.linear.panels import LEAST_ONLY, STEPS, WHOLE, WITHOUT_ZEROS, Packed, pack, pack_groups
from kernels.rows import reference
from kernels.rows.checks import ACTIVATIONS, GATES
from kernels.scan import native as scanning
from kernels.short_conv import reference as convolutions
from kernels.suffixes import BOUNDARY, Suffixes
from kernels.suffixes import reference as texts
from kernels.suffixes.state import SuffixSource
from kernels.tree_attention import native as tree_native
from kernels.tree_attention import reference as tree_reference
from tests.kernels.forests import FORESTS, Forest, cast, forest, hash_of
from tests.kernels.replay.recording import Expected, Pointer, Recording
from tests.kernels.test_channel_scan import BARE, ByChannels
from tests.kernels.test_delta_net import Growing, doubled
from tests.kernels.test_scan import Scanned

WIDTHS = (1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 17, 31, 33, 64, 100, 259)
EPS = 1e-5
CHANNEL_FIELDS = "taps_KC", "shift_C", "rates_KC", "bias_C", "skip_C", "norms_E"
STRANGE = math.nan, math.inf, -math.inf


def record() -> Recording:
    """Returns all cases."""
    recording = Recording()
    rows = norms, rotary, halves, gates, shared_gates, curves, sparse, streams, log_softmax, best, draws, windows
    trees = kv_write, kv_write_int8, kv_copy, short_conv, recurrent, by_channels, layouts, tree_attention, suffixes
    for add in (*rows, linear, grouped, *trees):
        torch.manual_seed(0)
        add(recording)
    return recording


def draw(*shape: int, dtype: torch.dtype = torch.float32, scale: float = 1.0) -> Tensor:
    return (torch.randn(*shape) * scale).to(dtype)


def kinds() -> Iterator[tuple[str, int, torch.dtype]]:
    for dtype, kind in cpp.KINDS.items():
        yield str(dtype).removeprefix("torch."), kind, dtype


def written(before: Tensor, exact: Tensor, plain: Tensor) -> Expected:
    """An output that may be off by as much as plain PyTorch in the same dtype, or by its last rounding."""
    off = (plain.double() - exact).abs()
    absolute = off[off.isfinite()].max().item() if off.isfinite().any() else 0.0
    return Expected(before, exact, absolute + 1e-6, 2 * torch.finfo(before.dtype).eps)


def blank(like: Tensor, *shape: int) -> Tensor:
    """The contents of an output before the call: nothing that a sum or a product could hide."""
    return torch.full(shape or like.shape, math.nan, dtype=like.dtype)


def norms(recording: Recording) -> None:
    threads = itertools.cycle((1, 2))
    for (name, kind, dtype), width in itertools.product(kinds(), WIDTHS):
        weight, bias = draw(width, dtype=dtype), draw(width, dtype=dtype)
        for rows, offset in ((1, 0), (3, 0), (3, 50), (80, 0)):
            if rows == 80 and width < 259:  # only for the largest are threads worth their while
                continue
            x, of = draw(rows, width, dtype=dtype, scale=3.0) + offset, f"{name} {rows} x {width}, mean {offset}"
            if rows == 3:
                x[1] = offset
            if rows == 80:
                x[7, 3], x[9, 5] = STRANGE[:2]
            for function, vectors in (("rms_norm", (weight,)), ("layer_norm", (weight, bias))):
                define = getattr(reference, function)
                exact = define(x.double(), *(v.double() for v in vectors), EPS)
                out = written(blank(x), exact, define(x, *vectors, EPS))
                more = (0,) if function == "rms_norm" else ()
                recording.add(of, function, kind, next(threads), x, *vectors, out, rows, width, EPS, *more)
        heads, stride = 3, 4 * width + 1
        wide = draw(5, stride, dtype=dtype, scale=2.0)
        for vectors in ((weight,), (weight, bias)):
            define = reference.layer_norm if len(vectors) == 2 else reference.rms_norm
            after, plain, inner = wide.double(), wide.clone(), slice(0, heads * width)
            for x in (after, plain):
                own = x[:, inner].reshape(5, heads, width)
                x[:, inner] = define(own, *(v.to(x.dtype) for v in vectors), EPS).flatten(1)
            out = written(wide, after, plain)
            both = *vectors, *(() if len(vectors) == 2 else (None,))
            sizes = 5, heads, width, stride, 0, EPS, 0
            recording.add(f"{name} heads of {width}", "head_norm", kind, next(threads), out, *both, *sizes)
        vectors = draw(heads, width, dtype=dtype, scale=2.0), draw(heads, width, dtype=dtype)
        after, plain = wide.double(), wide.clone()
        for x in (after, plain):
            for h in range(heads):
                own = x[:, h * width : (h + 1) * width]
                own.copy_(reference.layer_norm(own.clone(), *(v[h].to(x.dtype) for v in vectors), EPS))
        sizes = 5, heads, width, stride, width, EPS, 0
        out = written(wide, after, plain)
        recording.add(f"{name} own heads of {width}", "head_norm", kind, next(threads), out, *vectors, *sizes)


def rotary(recording: Recording) -> None:
    for (name, kind, dtype), (width, dims) in itertools.product(
        kinds(), ((2, 2), (8, 8), (10, 6), (33, 14), (64, 64), (80, 32), (96, 90))
    ):
        tokens, heads, of = 5, 3, f"{name} {dims} of {width}"
        angles = torch.randn(tokens, dims // 2).repeat(1, 2)
        cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
        for places in (heads, heads + 2):  # of the heads of x, which lie apart or not
            x = draw(tokens, places, width, dtype=dtype)
            own = x[:, :heads]
            exact, plain = (reference.rotary(*(v.to(t) for v in (own, cos, sin))) for t in (torch.float64, dtype))
            sizes = tokens, heads, width, dims, places * width, width
            out = written(blank(x, tokens, heads, width), exact, plain)
            recording.add(f"{of}, {places}", "rotary", kind, 1, x, cos, sin, out, *sizes, heads * width)
            both = [x.double(), x.clone()]
            for whole, turned in zip(both, (exact, plain), strict=True):
                whole[:, :heads] = turned
            same = written(x, *both)
            recording.add(f"{of} in place", "rotary", kind, 2, same, cos, sin, same, *sizes, places * width)


def halves(recording: Recording) -> None:
    """Conversions of 16-bit elements: all of them, and products of them that are exact before they are rounded."""
    for name, kind, dtype in list(kinds())[1:]:
        every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)
        some = every[torch.randperm(1 << 16)]
        ties = 1 + torch.randint(0, 1 << 10, (1 << 14,)) / 1024
        below = torch.tensor([2.0**-k for k in range(9, 24)]).repeat(1 << 11)[: len(ties)]
        for of, x, cos, y, sin in (
            ("every element", every, torch.ones_like(every), torch.zeros_like(every), torch.zeros_like(every)),
            ("products", some, some.flip(0), torch.zeros_like(some), torch.zeros_like(some)),
            ("powers of two", some, torch.full_like(some, 2.0**-9), torch.zeros_like(some), torch.zeros_like(some)),
            ("near ties", ties.to(dtype), torch.ones(len(ties), dtype=dtype), torch.ones(len(ties), dtype=dtype),
             (below * torch.tensor([1, -1]).repeat(len(ties) // 2)).to(dtype)),
        ):  # fmt: skip
            wide = [v.float() for v in (x, cos, y, sin)]
            first, second = wide[0] * wide[1] - wide[2] * wide[3], wide[2] * wide[1] + wide[0] * wide[3]
            exact = torch.cat([first, second]).to(dtype).double()
            sizes = 1, 1, 2 * len(x), 2 * len(x), 2 * len(x), 2 * len(x), 2 * len(x)
            both, c, s = torch.cat([x, y]), torch.cat([cos, cos]), torch.cat([sin, sin])
            recording.add(f"{name}, {of}", "rotary", kind, 1, both, c, s, Expected(blank(both), exact), *sizes)


def gates(recording: Recording) -> None:
    for (name, kind, dtype), width in itertools.product(kinds(), WIDTHS):
        for rows in (1, 3, 70) if width == 259 else (3,):
            x, of = draw(rows, 2 * width, dtype=dtype, scale=4.0), f"{name} {rows} x {width}"
            x[0, 0], x[-1, 0] = 1000, -1000
            for number, activation in enumerate(ACTIVATIONS + GATES):
                own = x.clamp(-50, 50) if activation == "relu_squared" else x  # float16 ends at 65504
                exact, plain = (reference.activation_mul(v, activation) for v in (own.double(), own))
                out = written(blank(plain), exact, plain)
                recording.add(f"{activation} {of}", "activation_mul", kind, 2, number, own, out, rows, width)
            x = x[:, :width].contiguous()
            x[rows // 2, width // 2] = math.nan
            for number, activation in enumerate(ACTIVATIONS):
                own = x.clamp(-50, 50) if activation == "relu_squared" else x
                exact, plain = (reference.activation(v, activation) for v in (own.double(), own))
                out = written(blank(x), exact, plain)
                recording.add(f"{activation} {of}", "activation", kind, 2, number, own, out, rows, width)


def shared_gates(recording: Recording) -> None:
    """Gates that scale as many elements each, in rows that lie apart."""
    for (name, kind, dtype), (count, share), softplus in itertools.product(
        kinds(), ((1, 1), (5, 1), (4, 7), (3, 16), (2, 33), (259, 1)), (False, True)
    ):
        x, wide = draw(3, count * share, dtype=dtype), draw(3, count + 2, dtype=dtype, scale=4.0)
        x[1, share - 1], wide[0, 0], wide[2, 0] = math.nan, 100, -100
        exact, plain = (
            reference.sigmoid_mul(*(v.to(t) for v in (x, wide[:, :count])), softplus) for t in (torch.float64, dtype)
        )
        out, sizes = written(blank(x), exact, plain), (3, count * share, count + 2, share, int(softplus))
        recording.add(f"{name} {count} x {share}, softplus {softplus}", "sigmoid_mul", kind, 2, x, wide, out, *sizes)


def curves(recording: Recording) -> None:
    for (name, kind, dtype), width, near in itertools.product(kinds(), WIDTHS, (-1e-6, -0.3, 0.0)):
        curve, x = torch.tensor([0.7, 1.3, 0.5, near]), draw(3, width, dtype=dtype, scale=4.0)
        x[0, 0], x[1, width // 2], x[2, -1] = -1000, math.nan, 50
        exact, plain = (reference.xielu(v, curve) for v in (x.double(), x))
        out = written(blank(x), exact, plain)
        recording.add(f"{name} 3 x {width} near {near}", "xielu", kind, 2, x, curve, out, 3, width)


def sparse(recording: Recording) -> None:
    for (name, kind, dtype), width in itertools.product(kinds(), WIDTHS):
        x = draw(3, 2 * width, dtype=dtype, scale=4.0)
        exact, plain = (reference.sparsify(v, 0.5) for v in (x.double(), x))
        out = written(blank(x), exact, plain)
        recording.add(f"{name} 3 x {width}", "sparsify", kind, 2, x, out, 3, width, 0.5)


def streams(recording: Recording) -> None:
    for (name, kind, dtype), width, sources in itertools.product(kinds(), WIDTHS, (4, 1)):
        x, more = draw(3, 4, width, dtype=dtype), draw(3, sources, width, dtype=dtype)
        weights = draw(3, 4 * sources, dtype=dtype)
        exact = reference.add_weighted(*(v.double() for v in (x, more, weights)))
        out = written(blank(x), exact, reference.add_weighted(x, more, weights))
        arguments = x, more, weights, out, 3, 4, sources, width
        recording.add(f"{name} 3 x 4 x {width} of {sources}", "add_weighted", kind, 2, *arguments)


def log_softmax(recording: Recording) -> None:
    sizes = (1, 1), (2, 1), (7, 7), (16, 9), (40, 40), (129, 128), (300, 129), (1000, 999)
    for (name, kind, dtype), (width, size) in itertools.product(kinds(), sizes):
        x = draw(5, width, dtype=dtype, scale=5.0)
        x[1], x[2], x[3] = 7, x[2] + 200, x[3] - 200
        exact = torch.log_softmax(x.double(), -1)
        exact[:, size:] = -math.inf
        plain, finite, _ = reference.log_softmax(x, size)
        out, peaks = written(blank(plain), exact, plain), reference.peaks(exact)
        tops = Expected(blank(plain, *peaks.shape), peaks, out.absolute, out.relative)
        told = Expected(torch.zeros(5, dtype=torch.bool), finite)
        recording.add(f"{name} {size} of {width}", "log_softmax", kind, 2, x, out, told, tops, 5, width, size)
    for (name, kind, dtype), bad, place in itertools.product(kinds(), STRANGE, (0, 17, 39)):
        x = draw(1, 40, dtype=dtype)
        x[0, place] = bad
        outs = torch.zeros(1, 40), torch.zeros(1, dtype=torch.bool), torch.zeros(1, 1)
        told = Expected(torch.ones(1, dtype=torch.bool), outs[1])
        free = [Expected(v, v.double(), math.inf) for v in (outs[0], outs[2])]  # nobody reads these
        recording.add(f"{name} {bad} at {place}", "log_softmax", kind, 1, x, free[0], told, free[1], 1, 40, 40)


def best(recording: Recording) -> None:
    """top_k, top_sums and at_least: exact, of equal values the first."""
    for width in (1, 5, 128, 340, 1000, 2015):
        for x in (draw(3, width), draw(3, width).sort(1).values, (draw(3, width) * 2).round()):
            x[2, width // 2 :] = -math.inf
            peaks = reference.peaks(x)
            for k in {0, 1, min(3, width), min(21, width), min(300, width)}:
                ranked = x.sort(dim=1, descending=True, stable=True)
                pairs = torch.stack([ranked.values[:, :k].double(), ranked.indices[:, :k].double()], 1)
                out = Expected(blank(pairs), pairs)
                recording.add(f"{k} of {width}", "top_k", 2, x, out, 3, width, k)
                sums = (torch.randn(3) * 3).round()
                flat = (x + sums.unsqueeze(1)).view(-1).sort(descending=True, stable=True)
                pairs = torch.stack([flat.values[:k].double(), flat.indices[:k].double()])
                for known in (None, peaks) if k else ():
                    out = Expected(blank(pairs), pairs)
                    recording.add(f"{k} of 3 x {width}", "top_sums", x, known, sums, out, 3, width, k)
                least = x[0].sort(descending=True).values[min(k, width - 1)].item()
                pairs = torch.full((3, 2, k), math.nan, dtype=torch.float64)
                for row in range(3):
                    places = (x[row] >= least).nonzero().view(-1)[:k]
                    pairs[row, 0, : len(places)], pairs[row, 1, : len(places)] = (
                        x[row, places].double(),
                        places.double(),
                    )
                for known in (None, peaks):
                    out = Expected(torch.zeros_like(pairs), pairs)
                    recording.add(f"{k} of {width}", "at_least", x, known, out, 3, width, k, least)


def draws(recording: Recording) -> None:
    for width, scale in itertools.product((1, 15, 16, 100, 3001), (0.0, 1.0, 20.0)):
        keys, logp = torch.randint(1 << 32, (40,)), draw(20, width, scale=scale)
        logp[5], logp[6, 1:], logp[7, ::2] = -math.inf, -math.inf, -math.inf
        tokens = reference.gumbel_argmax(logp, keys.tolist())
        words, out = keys.to(torch.int32), Expected(torch.full((20,), -1), tokens)
        recording.add(f"{width}, scale {scale}", "gumbel_argmax", 2, logp, words, out, 20, width)


def windows(recording: Recording) -> None:
    for width, (few, many) in itertools.product((1, 7, 16, 100), ((1, 1), (5, 20))):
        tape, sums = draw(1, 500, scale=3).view(-1), draw(few, many)
        sums[0, 1:2] = -math.inf
        starts = torch.randint(500 - width + 1, (few, many))
        most = reference.window_max(tape, starts, sums, width)
        best = most.amax(0)
        out, count = Expected(torch.zeros_like(most), most), reference.window_wins(tape, starts, sums, best)
        recording.add(f"{few} x {many} x {width}", "window_max", 2, tape, starts, sums, out, few, many, width)
        out = Expected(torch.full_like(count, -1), count)
        recording.add(f"{few} x {many} x {width}", "window_wins", 2, tape, starts, sums, best, out, few, many, width)


def linear(recording: Recording) -> None:
    """Rows and matrices of all kinds; sizes that fill words, panels, pieces and blocks of rows, and that do not."""
    sizes = (1, 1, 1), (1, 16, 7), (1, 130, 300), (3, 65, 33), (4, 64, 64), (15, 20, 130), (40, 17, 9)
    for (name, kind, dtype), of in itertools.product(kinds(), STEPS):
        for (rows, outs, width), biased in zip(sizes, itertools.cycle((True, False))):
            weight = torch.randint(-127, 128, (outs, width)) if of == torch.int8 else draw(outs, width)
            scale = torch.rand(outs) / 127 if of == torch.int8 else None
            matrix = Packed(pack([weight], of, outs, width), outs, width, scale)
            x, bias = draw(rows, width, dtype=dtype), draw(outs, dtype=dtype) if biased else None
            exact = products.linear(x.double(), matrix, None if bias is None else bias.double())
            plain = products.linear(x, matrix, bias)
            tensors = {"panels": matrix.panels, "scale": scale, "bias": bias}
            fields = {name: x for name, x in tensors.items() if x is not None}
            out = written(blank(plain), exact, plain)
            out = dataclasses.replace(out, absolute=2 * out.absolute + 2e-6 * width**0.5)
            case = f"{name}, {rows} rows x {of} {outs} x {width}"
            recording.add(case, "linear", kind, 2, Pointer(matrix.described(bias), fields), x, out, rows)


def grouped(recording: Recording) -> None:
    """Elements in groups, of rows that are rounded, to static steps too, or not."""
    sizes = (1, 1, 1, 1), (1, 130, 300, 32), (3, 65, 33, 33), (4, 64, 64, 16), (15, 20, 130, 40), (40, 17, 9, 8)
    whole = (1, 64, 32, 32), (3, 65, 96, 32), (4, 64, 64, 64), (15, 20, 160, 32), (40, 17, 32, 32)  # steps of all kinds
    most = {"int4": (16, 0), "int8": (256, 0), "float8": (127, 0), "float4": (16, 0), "iq4": (16, 0)}
    most |= {
        "int1": (2, 0),
        "int2": (4, 0),
        "int5": (32, 0),
        "int6": (64, 0),
        "iq2": (16, 0),
    }  # the other tables are multiplied alike
    most |= {f"{of} by int8": (numbers, 127) for of, (numbers, _) in most.items() if of != "float8"}
    most |= {f"{of} by steps": (most[of][0], 127) for of in ("int1", "int2", "int4", "int5", "int6", "int8")}
    for (name, kind, dtype), (of, (codes, levels)) in itertools.product(kinds(), most.items()):
        for (rows, outs, width, size), more in zip(
            whole if of.split()[0] in WHOLE else sizes, itertools.cycle(("zero", "least", ""))
        ):
            values = of.split()[0] not in (*WITHOUT_ZEROS, *LEAST_ONLY)
            scale = torch.rand(outs, -(-width // size)).half().float() / 16
            scale = scale.clamp(min=2**-20).log2().round().exp2() if "float4" in of else scale
            zero = torch.randint_like(scale, 0, codes) if more == "zero" and values else None
            least = torch.rand_like(scale).half().float() if more == "least" and values else None
            numbers = torch.randint(codes, (outs, width), dtype=torch.uint8)
            panels, groups = pack_groups([(numbers, scale, zero, least)], of.split()[0], outs, width, size)
            order = torch.randperm(width).int() if more else None
            steps = Steps(before=0.03 if of.endswith("steps") else 0)
            matrix = Packed(panels, outs, width, groups=groups, order_I=order, levels=levels, steps=steps)
            x = draw(rows, width, dtype=dtype)
            exact, plain = products.linear(x.double(), matrix), products.linear(x, matrix)
            tensors = {"panels": panels, "order": order}
            tensors |= {name: getattr(groups, name) for name in ("scale", "zero", "least")}
            fields = {name: x for name, x in tensors.items() if x is not None}
            out = written(blank(plain), exact, plain)
            largest = {"float8": 480, "iq4": 127}.get(of.split()[0], codes)
            most_of_x = x.double().abs().sum(1).max() * largest / 16
            out = dataclasses.replace(out, absolute=2 * out.absolute + 1e-6 * float(most_of_x))
            case = f"{name}, {rows} rows x {of} {outs} x {width} in groups of {size}"
            recording.add(case, "linear", kind, 2, Pointer(matrix.described(None), fields), x, out, rows)


def kv_write(recording: Recording) -> None:
    for row, tokens in itertools.product((1, 14, 64, 100, 256), (1, 7, 40)):
        heads, slots = 2, 50
        k, v = (torch.randint(256, (heads, slots, row), dtype=torch.uint8) for _ in range(2))
        wide = torch.randint(256, (tokens, 2 * heads + 1, row), dtype=torch.uint8)
        strides = (2 * heads + 1) * row, 2 * row
        places = torch.randperm(slots)[:tokens]
        for bad in (None, -1, slots):
            k_after, v_after, at = k.clone(), v.clone(), places.clone()
            if bad is None:
                k_after[:, places] = wide[:, 0 : 2 * heads : 2].transpose(0, 1)
                v_after[:, places] = wide[:, 0 : 2 * heads : 2].transpose(0, 1)
            else:
                at[-1] = bad
            sizes = tokens, heads, slots, row, *strides, *strides
            caches = Expected(k, k_after), Expected(v, v_after)
            name = f"{tokens} rows of {row} bytes, slot {bad}"
            recording.add(name, "kv_write", 2, *caches, wide, wide, at, *sizes, returns=int(bad is None))


def kv_write_int8(recording: Recording) -> None:
    """Every bit is that of the definition: rows of any magnitude, 0, ties, and what is not finite."""
    for (kind, number, dtype), size, tokens in itertools.product(kinds(), (1, 7, 16, 33, 80), (1, 40)):
        heads, slots = 2, 50
        magnitudes = torch.logspace(-6, 4, tokens) if dtype == torch.float16 else torch.logspace(-37, 38, tokens)
        wide = (torch.randn(tokens, 2 * heads + 1, size) * magnitudes.view(-1, 1, 1)).to(dtype)
        if tokens > 4:
            wide[1], wide[2, :, 0], wide[3, :, -1] = 0, math.nan, math.inf
            wide[4] = torch.randint(-254, 255, wide[4].shape) / 2
            wide[4, :, 0] = 127
        k, v = (torch.randint(-128, 128, (heads, slots, size + 2), dtype=torch.int8) for _ in range(2))
        places = torch.randperm(slots)[:tokens]
        for bad in (None, slots):
            caches, at = [Expected(x, x.clone()) for x in (k, v)], places.clone()
            if bad is None:
                for cache in caches:
                    for part, x in zip(parts(cache.after), quantise(wide[:, 0 : 2 * heads : 2]), strict=True):
                        part[:, places] = x.transpose(0, 1)
            else:
                at[-1] = bad
            strides = (2 * heads + 1) * size, 2 * size
            name = f"{tokens} rows of {size} {kind} as int8, slot {bad}"
            sizes = tokens, heads, slots, size, *strides, *strides
            recording.add(name, "kv_write_int8", number, 2, *caches, wide, wide, at, *sizes, returns=int(bad is None))


def kv_copy(recording: Recording) -> None:
    for row, scale, tokens in itertools.product((1, 14, 256), (0, 2), (1, 5, 40)):
        heads, slots, dtype = 3, 50, torch.int8 if scale else torch.uint8
        k, v = (torch.randint(256, (heads, slots, row + scale), dtype=torch.uint8).view(dtype) for _ in range(2))
        source, target = torch.randint(slots, (tokens,)), torch.randperm(slots)[:tokens]
        after = k.clone(), v.clone()
        for x, from_ in zip(after, (k, v), strict=True):
            for to, part in zip(parts(x), parts(from_), strict=True):
                to[:, target] = part[:, source]
        caches = (Expected(x, y) for x, y in zip((k, v), after, strict=True))
        sizes = tokens, heads, slots, row, scale
        recording.add(f"{tokens} rows of {row} bytes, scales of {scale}", "kv_copy", 2, *caches, source, target, *sizes)


def short_conv(recording: Recording) -> None:
    """Taps of older slots and of tokens of the pass, in a cache that is NaN elsewhere; slots outside it."""
    for (name, kind, dtype), width, taps in itertools.product(kinds(), (1, 8, 33, 259), (1, 3, 5)):
        tokens, slots = 9 if width < 259 else 40, 70
        x, weight, bias = draw(tokens, 3 * width, dtype=dtype), draw(taps, width, dtype=dtype), draw(width, dtype=dtype)
        at = torch.randperm(slots - 20)[:tokens] + 20
        readable = [torch.tensor([0, *range(2, 20), *at[:t].tolist()]) for t in range(tokens)]
        before = torch.stack([some[torch.randperm(len(some))[: taps - 1]] for some in readable])
        for kept, number in {dtype: kind, torch.bfloat16: cpp.KINDS[torch.bfloat16]}.items():
            rows = torch.full((slots, width), math.nan, dtype=kept)
            rows[:20] = draw(20, width, dtype=kept)
            for own, bad in ((bias, None), (None, None), (bias, at), (bias, before)):
                if bad is before and taps == 1:
                    continue
                after, wrong = rows.clone(), [x.clone() for x in (at, before)]
                plain = convolutions.short_conv(x, weight, own, after, at, before)
                wide = (None if v is None else v.double() for v in (weight, own))
                b, c, values = x.chunk(3, -1)
                exact = convolutions.short_conv(
                    torch.cat([(b * values).to(kept).double(), c.double(), torch.ones_like(c).double()], 1), *wide,
                    rows.double(), at, before)  # fmt: skip
                if bad is not None:
                    wrong[bad is before].view(-1)[-1] = slots
                out = (
                    Expected(blank(plain), blank(plain).double())
                    if bad is not None
                    else written(blank(plain), exact, plain)
                )
                cache = Expected(rows, rows if bad is not None else after)
                sizes = tokens, width, taps - 1, slots
                of = f"{name} in {kept}, {taps} taps, {tokens} x {width}, bias {own is not None}, bad {bad is not None}"
                arguments = kind, number, 2, x, weight, own, cache, *wrong, out, *sizes
                recording.add(of, "short_conv", *arguments, returns=int(bad is None))


def recurrent(recording: Recording) -> None:
    """Two passes over trees, whose tokens read states, older rows and each other; NaN where nobody may read."""
    shapes = (2, 4, 8, 6, 4), (1, 1, 5, 3, 1), (1, 3, 33, 9, 2), (2, 2, 16, 64, 3)
    sizes = [kind(*shape) for kind in (DeltaKind, ScanKind) for shape in shapes]
    sizes += [DeltaKind(*shape, key_decays=True) for shape in ((1, 3, 33, 9, 2), (3, 3, 16, 64, 4))]
    for (name, kind, dtype), shape in itertools.product(kinds(), sizes):
        scans = isinstance(shape, ScanKind)
        grown = Scanned(shape, 1) if scans else Growing(shape, 1)
        sizes, w, run = grown.kind, grown.weights, grown.operator
        for tokens, chains in ((40, 36), (9, 2)):
            x, paths = grown.grow(tokens, chains)
            x = x.to(dtype)
            kept = [grown.rows.clone(), grown.states.clone()]
            wide = [each.double() for each in kept]
            plain = run(x, w, grown.rows, grown.states, paths, impl="reference")
            exact = run(x.double(), doubled(w), *wide, paths, impl="reference")
            cache = [
                bounded(before, after, found)
                for before, after, found in zip(kept, wide, (grown.rows, grown.states), strict=True)
            ]
            widths = [sizes.row, sizes.key_heads * sizes.key_size]
            widths += [sizes.value_heads * sizes.value_size, sizes.key_heads * (sizes.reach + 1)] if scans else []
            blanks = (torch.full((tokens * width,), math.nan) for width in widths)
            rooms = [Expected(each, each.double(), math.inf) for each in blanks]
            numbers = paths.rows_T, paths.paths_TN, paths.lengths_T, paths.bases_T, paths.folds_T
            out, case = bounded(blank(plain), exact, plain), f"{name}, {tokens} tokens of {sizes}"
            described = (scanning if scans else delta_native).described(w)
            names = [field for field, *_ in described._fields_]
            vectors = w[1:7] if scans else w[1:5]
            weights = Pointer(described, dict(zip(names[: len(vectors)], vectors, strict=True)))
            places = cpp.OPERATORS.structures["Paths"](*[None] * 7, sizes.reach, *map(len, kept))
            fields = (field for field, *_ in places._fields_[:7])
            at = Pointer(places, dict(zip(fields, (*numbers, *cache), strict=True)))
            recording.add(case, "scan" if scans else "delta_net", kind, 2, x, weights, at, *rooms, out, tokens)


def by_channels(recording: Recording) -> None:
    """Two passes over trees, as above: the convolution, and the scan of steps, B and C that are drawn."""
    shapes = (16, 37, 4), (5, 16, 2), (1, 3, 1), (17, 8, 7)
    for (name, kind, dtype), (states, channels, taps) in itertools.product(kinds(), shapes):
        grown = ByChannels(BARE if states == 5 else ChannelKind(1, 1, states, channels, taps), 1)
        sizes, w = grown.kind, grown.weights.weights
        exactly = grown.doubled(grown.weights).weights
        for tokens, chains in ((30, 26), (9, 2)):
            x, paths = grown.grow(tokens, chains)
            widths = channels, w.rank + 2 * states, channels
            x, *inputs = (each.to(dtype) for each in (x, *(draw(tokens, width) for width in widths)))
            case, numbers = f"{name}, {tokens} tokens of {sizes}", [
                *(paths.rows_T, paths.paths_TN, paths.lengths_T, paths.bases_T, paths.folds_T)
            ]  # fmt: skip
            weights = Pointer(by_channels_native.described(w), dict(zip(CHANNEL_FIELDS, w[2:8], strict=True)))

            kept = [grown.rows.clone(), grown.states.clone()]
            structure = cpp.OPERATORS.structures["Paths"]
            places = structure(*[None] * 7, sizes.reach, *map(len, kept))
            names = [field for field, *_ in structure._fields_[:7]]
            before = Pointer(places, dict(zip(names, (*numbers, *kept), strict=True)))
            plain = channel_conv(x, w, grown.rows, paths, impl="reference")
            exact = channel_conv(x.double(), exactly, grown.rows.double(), paths, impl="reference")
            found = bounded(blank(plain), exact, plain)
            recording.add(case, "channel_conv", kind, 2, x, weights, before, found, tokens)

            wide = [each.double() for each in kept]
            given = (each.double() for each in (x, *inputs))
            plain = channel_scan(x, *inputs, w, grown.rows, grown.states, paths, impl="reference")
            exact = channel_scan(*given, exactly, *wide, paths, impl="reference")
            stored = zip(kept, wide, (grown.rows, grown.states), strict=True)
            cache = [bounded(old, new, made) for old, new, made in stored]
            blanks = (torch.full((tokens * width,), math.nan) for width in (sizes.row, states))
            rooms = [Expected(each, each.double(), math.inf) for each in blanks]
            out = bounded(blank(plain), exact, plain)
            at = Pointer(places, dict(zip(names, (*numbers, *cache), strict=True)))
            recording.add(case, "channel_scan", kind, 2, x, *inputs, weights, at, *rooms, out, tokens)


def bounded(before: Tensor, exact: Tensor, plain: Tensor) -> Expected:
    """An output whose sums may be made in another order, see `written`."""
    found = written(before, exact, plain)
    return dataclasses.replace(found, absolute=3 * found.absolute)


def layouts(recording: Recording) -> None:
    """A layout that leads to slots of the cache only, and one number of it wrong."""
    f = forest(3, [(45, 9, 18, 6), (30, 30, 0, 0)], page=4)
    layout, slots = f.layout, f.cache.k_LGSD.shape[2]

    def add(name: str, fits: bool, change: Callable[[dict[str, Tensor]], object], pages: bool = True) -> None:
        x = {name: getattr(layout, name).clone() for name in ("token_starts", "trunk_seen_T", "trunk_runs")}
        x |= {"branch": layout.branch_slots_RW.clone(), "pages": layout.trunk_pages_RP.clone()}
        x["slots"] = layout.write_slots_T.clone()
        change(x)
        table = x["pages"] if pages else None
        sizes = len(x["slots"]), 2, len(x["trunk_runs"]), x["branch"].shape[1], slots, 4
        strides = x["pages"].shape[1] if pages else -1, *x["pages"].stride()
        tensors = (x[name] for name in ("token_starts", "trunk_seen_T", "trunk_runs", "branch"))
        written = x["slots"] if pages else None
        recording.add(name, "layout_fits", *sizes, *strides, *tensors, table, written, returns=int(fits))

    def set_to(name: str, at: int, number: int) -> Callable[[dict[str, Tensor]], object]:
        return lambda x: x[name].view(-1).__setitem__(at, number)

    add("as it is", True, lambda _: None)
    add("without pages", True, set_to("pages", 0, -1), pages=False)
    for name, at, number in (
        ("token_starts", 0, 1), ("token_starts", 1, 99), ("token_starts", 2, 1), ("trunk_seen_T", 3, -1),
        ("trunk_seen_T", 3, 46), ("trunk_runs", 0, 2), ("trunk_runs", 0, -1), ("trunk_runs", 1, slots),
        ("trunk_runs", 2, 1 << 30), ("trunk_runs", 2, -1), ("branch", 5, slots), ("branch", 5, -1),
        ("pages", 2, slots // 4), ("pages", 2, -1), ("slots", 0, slots), ("slots", 0, -1),
    ):  # fmt: skip
        add(f"{name}[{at}] = {number}", False, set_to(name, at, number))


def tree_attention(recording: Recording) -> None:
    for name, (trees, shape) in FORESTS.items():
        f = forest(hash_of(name), trees, **shape)
        for window, (kind, _, dtype) in zip((None, 7, 64), kinds(), strict=True):
            attention(recording, f"{name}, {kind}, window {window}", f, dtype, window)
            attention(recording, f"{name}, {kind}, window {window}, int8 cache", f, dtype, window, kept=torch.int8)
    for threads, window in itertools.product((1, 2, 7), (None, 300)):
        f = forest(6, [(2100, 0, 70, 9), (700, 3, 0, 0), (1, 0, 33, 4)], heads=4, padding=3)
        attention(recording, f"{threads} threads, window {window}", f, torch.float32, window, threads)
    rng = random.Random(0)
    for (kind, _, dtype), rows, head_dim in itertools.product(kinds(), range(1, 10), (4, 33, 64)):
        f = forest(rows, [(40 + rng.randrange(90), 0, rows + 5, rows)], heads=1, kv_heads=1, head_dim=head_dim)
        for kept in (None, torch.int8):
            name = f"{kind}, {rows} rows of {head_dim}, cache of {kept or dtype}"
            attention(recording, name, f, dtype, rng.choice((None, 9)), kept=kept)
    f = forest(6, [(90, 0, 33, 4), (20, 20, 0, 0)], heads=142, kv_heads=2, head_dim=8)
    attention(recording, "more heads than rows of a tile", f, torch.float32)
    for (kind, _, dtype), (rows, cap) in itertools.product(kinds(), ((1, 0.5), (3, 50.0), (9, 2.0))):
        f = forest(rows, [(90, 0, 20, rows), (40, 9, 0, 0)], head_dim=33)
        for kept in (None, torch.int8):
            name = f"{kind}, {rows} rows, cap {cap}, cache of {kept or dtype}"
            attention(recording, name, f, dtype, 30, kept=kept, cap=cap)
    for (kind, _, dtype), rows in itertools.product(kinds(), (1, 3, 9)):
        f = forest(rows, [(300, 0, 20, rows), (40, 9, 0, 0)], head_dim=33, padding=2)
        for kept in (None, torch.int8):
            sinks = torch.tensor([1.5, -2.0, 30.0, -torch.inf])
            name = f"{kind}, {rows} rows, sinks, cache of {kept or dtype}"
            attention(recording, name, f, dtype, 280, kept=kept, sinks=sinks)
            slopes = torch.tensor([0.5, 0.03, 0.0, -0.01]).to(torch.float32 if rows < 9 else torch.bfloat16)
            name = f"{kind}, {rows} rows, slopes of {slopes.dtype}, cache of {kept or dtype}"
            attention(recording, name, f, dtype, 280, kept=kept, slopes=slopes)
    f = forest(6, [(70, 0, 33, 4)])
    f.cache.v_LGSD[..., 3] = math.nan
    attention(recording, "values of NaN", f, torch.float32)


def attention(
    recording: Recording,
    name: str,
    f: Forest,
    dtype: torch.dtype,
    window: int | None = None,
    threads: int = 2,
    kept: torch.dtype | None = None,
    cap: float | None = None,
    sinks: torch.Tensor | None = None,
    slopes: torch.Tensor | None = None,
):
    (q, k, v), wide = ([x.nan_to_num(0.5), *others] for x, *others in cast(f, dtype, kept))  # the queries of padding
    options = 0.3, window, cap, sinks, slopes
    exact, plain = (tree_reference.tree_attention(*x, f.layout, *options) for x in (wide, (q, k, v)))
    off = (plain.double() - exact).abs()
    absolute = 2 * off[off.isfinite()].max().item() if off.isfinite().any() else 0.0
    seen = tree_native._seen(f.layout.seen)
    asked = tree_native.problem(q, k, seen, 0.3, window, threads, cap, sinks, slopes)
    names = "positions", "starts", "seen", "runs", "branch_slots", "branch_positions", "ancestry"
    more = {name: x for name, x in (("sinks", sinks), ("slopes", slopes)) if x is not None}
    pointer = Pointer(asked, dict(zip(names, f.layout.seen, strict=True)) | more)
    out = Expected(blank(q), exact, absolute + 4e-6, 2 * torch.finfo(dtype).eps)
    recording.add(name, "tree_attention", pointer, q, k, v, out)


TABLES = (
    *("symbols", "short_back", "long_back", "pair_back", "single_back"),
    *("single_heads", "pair_heads", "short_heads", "long_heads"),
)


def suffixes(recording: Recording) -> None:
    rng = random.Random(0)
    for vocab, capacity, fine in itertools.product((3, 40), (70, 400), (False, True)):
        text, mark = Suffixes(capacity, vocab, fine), 1 << texts.token_bits(vocab)
        for _ in range(8):
            texts.add(text, [BOUNDARY, *(rng.randrange(vocab) for _ in range(60))], mark)
        views = {name: getattr(text, name) for name in TABLES}
        tables = {name: torch.frombuffer(view, dtype=torch.int32) for name, view in views.items() if len(view)}
        held = Pointer(text.fields, tables)
        for length in (0, 2, 5, 40):
            tail = [rng.randrange(vocab) for _ in range(length)]
            symbols = torch.tensor(tail, dtype=torch.int32)
            name = f"{vocab} tokens, {capacity} kept, fine {fine}, a tail of {length}"
            known = texts.known(text, tail, mark)
            recording.add(name, "suffixes_known", held, symbols, length, mark, returns=known)
            source = Pointer(SuffixSource(mark=mark, bonus=2), {"text": held})
            found = texts.propose([(text, mark, 2)], tail, 12, 9, 1 / 256)
            kinds = torch.int64, torch.int64, torch.float64
            outs = [filled(torch.tensor(x, dtype=kind), 12) for x, kind in zip(found, kinds, strict=True)]
            sizes = length, 12, 9, 1 / 256
            recording.add(name, "suffixes_propose", source, 1, symbols, *sizes, *outs, returns=len(found[0]))


def filled(x: Tensor, size: int) -> Expected:
    """An output whose first elements are written."""
    before = torch.full((size,), 7, dtype=x.dtype)
    return Expected(before, torch.cat([x, before[len(x) :]]))


if __name__ == "__main__":
    record().save(Path(sys.argv[1]))
