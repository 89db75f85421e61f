"""Follows the widths of registers through the calls of layers, and checks what the calls read against them."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from kernels import checks
from kernels.checks import expect
from kernels.layout import DeltaKind
from kernels.rows.checks import MOST_ROWS
from kernels.stack.calls import REGISTERS, Call

_CPU = torch.device("cpu")
Widths = Mapping[str, int]


def followed(
    calls: Sequence[Call], dtype: torch.dtype, width: int, streams: int = 0
) -> tuple[list[int], dict[str, int]]:
    """The width of the register that each call writes, and the largest width of each register.

    Args:
        dtype, width: of the stream.
        streams: how many AltUp has.

    Raises:
        ValueError: vectors and matrices that do not fit the registers that they read and write.
    """
    now = dict.fromkeys(REGISTERS, 0) | {"stream": width, "streams": streams * width}
    layers = {call.table for call in calls if call.code == "inject"}
    narrow = next((call.matrix.matrix.packed.outs for call in calls if call.target == "narrow"), 0)
    whole = width * any(call.source == "inputs" for call in calls)
    now["inputs"] = whole or narrow * (1 + max(layers, default=-1))
    most, found = dict(now), []
    follow = _Following(dtype, width)
    for call in calls:
        made = follow.of(call, now)
        if call.target:
            now[call.target] = made
            most[call.target] = max(made, most[call.target])
        found.append(made)
    return found, most


class _Following:
    """Computes the widths that calls write from those of the registers that they read.

    Args:
        dtype, width: of the stream.
    """

    def __init__(self, dtype: torch.dtype, width: int):
        self.dtype, self.width = dtype, width
        self.delta: DeltaKind | None = None
        self.latent: Any = None

    def of(self, call: Call, now: Widths) -> int:
        """The width of the rows that a call writes, of registers as wide as they are `now`; see `followed`."""
        make: Callable[[Call, Widths], int] | None = getattr(self, f"_{call.code}", None)
        if make is not None:
            return make(call, now)
        if call.code in ("add", "scale", "clip") and now[call.source] != now[call.target]:
            raise ValueError(f"{call.code}: expected rows of {now[call.target]}, got {now[call.source]}")
        return now[call.target] if call.target else 0

    def _vectors(self, name: str, vectors: Any, *shape: int) -> None:
        exact = vectors.bias is None and vectors.weight.dtype == torch.float32 and name != "a convolution"
        expect(f"{name}'s weight", vectors.weight, torch.float32 if exact else self.dtype, shape, _CPU)
        if vectors.bias is not None:
            expect(f"{name}'s bias", vectors.bias, self.dtype, shape[-1:], _CPU)

    def _heads(self, call: Call, now: Widths) -> Any:
        heads = call.heads
        if heads is None or heads.count * heads.size != now["heads"]:
            raise ValueError(f"{call.code}: expected rows of {heads}, got {now['heads']} elements")
        if heads.keys and heads.kept != heads.keys:
            raise ValueError(f"{call.code}: expected {heads.keys} heads in the cache, got {heads.kept}")
        return heads

    def _norm(self, call: Call, now: Widths) -> int:
        self._vectors("a norm", call.norm, now[call.source])
        return now[call.source]

    def _product(self, call: Call, now: Widths) -> int:
        packed, bias = call.matrix.matrix
        width = now[call.source]
        if packed.width != width:
            raise ValueError(f"expected a matrix {[packed.outs, width]}, got {[packed.outs, packed.width]}")
        if bias is not None:
            expect("a matrix's bias", bias, self.dtype, (packed.outs,), _CPU)
        return packed.outs

    def _head_norms(self, call: Call, now: Widths) -> int:
        heads = self._heads(call, now)
        for norm, count in ((call.norm, heads.queries), (call.more, heads.keys), (call.third, heads.values)):
            if norm is not None:
                self._vectors("a head's norm", norm, (count if call.all_heads or call.own_norms else 1) * heads.size)
        return now["heads"]

    def _rotate(self, call: Call, now: Widths) -> int:
        self._heads(call, now)
        return now["heads"]

    def _write(self, call: Call, now: Widths) -> int:
        if not self._heads(call, now).keys:
            raise ValueError("write: expected heads of keys")
        return 0

    def _attend(self, call: Call, now: Widths) -> int:
        heads = self._heads(call, now)
        if heads.queries % heads.kept:
            raise ValueError(f"attend: expected a multiple of {heads.kept} heads, got {heads.queries}")
        if call.sinks is not None:
            expect("an attention's sinks", call.sinks, torch.float32, (heads.queries,), _CPU)
        if call.slopes is not None and call.chunked:
            raise ValueError("attend: slopes need the positions of tokens, which chunks replace")
        if call.slopes is not None:
            kind = torch.bfloat16 if call.slopes.dtype == torch.bfloat16 else torch.float32
            expect("an attention's slopes", call.slopes, kind, (heads.queries,), _CPU)
        return heads.queries * heads.size

    def _gate(self, call: Call, now: Widths) -> int:
        heads = call.heads if call.source == "gates" and call.heads else self._heads(call, now)
        gates = heads.gates or now[call.source]
        if gates != heads.queries or now[call.target] != heads.queries * heads.size:
            raise ValueError(f"gate: expected gates of {heads.queries} heads, got {gates} of {heads}")
        return now[call.target]

    def _convolve(self, call: Call, now: Widths) -> int:
        if now[call.source] != 3 * self.width:
            raise ValueError(f"convolve: expected rows of {3 * self.width}, got {now[call.source]}")
        self._vectors("a convolution", call.norm, len(call.norm.weight), self.width)
        return self.width

    def _activate(self, call: Call, now: Widths) -> int:
        width, rest = divmod(now[call.source], 2 if call.gated else 1)
        if rest:
            raise ValueError(f"activate: expected an even number of elements, got {now[call.source]}")
        return width

    def _xielu(self, call: Call, now: Widths) -> int:
        expect("the numbers of xielu", call.norm.weight, torch.float32, (4,), _CPU)
        return now[call.source]

    def _sparsify(self, call: Call, now: Widths) -> int:
        if now[call.source] % 2:
            raise ValueError(f"sparsify: expected an even number of elements, got {now[call.source]}")
        return now[call.source]

    def _predict(self, call: Call, now: Widths) -> int:
        return self._changed(call, now, (now["streams"] // self.width) ** 2)

    def _correct(self, call: Call, now: Widths) -> int:
        return self._changed(call, now, now["streams"] // self.width)

    def _spread(self, call: Call, now: Widths) -> int:
        return self._changed(call, now, self.width)

    def _changed(self, call: Call, now: Widths, reads: int) -> int:
        """The width of a stream, after a call that changes streams and reads so many elements."""
        if not call.table < (count := now["streams"] // self.width) <= MOST_ROWS:
            raise ValueError(f"{call.code}: expected more than {call.table} streams, at most {MOST_ROWS}, got {count}")
        if now[call.source] != reads:
            raise ValueError(f"{call.code}: expected rows of {reads}, got {now[call.source]}")
        if call.norm is not None:
            expect("the factors of a stream", call.norm.weight, self.dtype, (self.width,), _CPU)
        return self.width

    def _recur(self, call: Call, now: Widths) -> int:
        kind = call.delta.weights.kind
        self.delta = self.delta or kind
        if kind != self.delta or now[call.source] != kind.width:
            raise ValueError(f"expected layers with a state of {self.delta}, got {kind} of {now[call.source]} elements")
        fits = {"recur": checks.delta_weights, "scan": checks.scan_weights}.get(call.code, checks.channel_weights)
        fits(call.delta.weights, torch.float32, _CPU)
        if call.code == "recur" and call.delta.order is not None:
            expect("an order", call.delta.order, torch.int64, (kind.width,), _CPU)
        return kind.value_heads * kind.value_size

    _scan = _channel_conv = _recur

    def _part(self, call: Call, now: Widths) -> int:
        rank, size = call.delta.weights.rank, call.delta.weights.kind.key_size
        if now[call.source] != rank + 2 * size:
            raise ValueError(f"part: expected rows of {rank + 2 * size}, got {now[call.source]}")
        return rank

    def _channel_scan(self, call: Call, now: Widths) -> int:
        channels = self._recur(call, now)
        self._part(call._replace(source="low"), now)
        found = {name: now[name] for name in ("convolved", "steps")}
        if call.target != "convolved" or any(width != channels for width in found.values()):
            raise ValueError(f"channel_scan: expected rows of {channels}, got {found}")
        return channels

    def _join(self, call: Call, now: Widths) -> int:
        if (call.table and now[call.target] != call.table) or call.source == call.target:
            raise ValueError(
                f"join: expected rows of {call.table} before those of {call.source}, got {now[call.target]}"
            )
        return call.table + now[call.source]

    def _absorb(self, call: Call, now: Widths) -> int:
        sizes = call.latent.heads.sizes
        widths = sizes.heads * (sizes.plain + sizes.rotated), sizes.width
        if (found := (now[call.source], now["latent"])) != widths:
            raise ValueError(f"expected latents of {[*found]} elements, got {sizes}")
        expect("a latent's norm", call.latent.heads.norm_C, self.dtype, (sizes.rank,), _CPU)
        return (sizes.heads + 1) * sizes.width

    def _expand(self, call: Call, now: Widths) -> int:
        sizes = call.latent.heads.sizes
        if now[call.source] != sizes.heads * sizes.width:
            raise ValueError(f"expected latents of {now[call.source]} elements, got {sizes}")
        return sizes.heads * sizes.value

    def _mix(self, call: Call, now: Widths) -> int:
        widths, made = (now[call.source], now[call.beside or call.source]), call.mixture.matrices
        if (made.width, made.scored_width) != widths:
            raise ValueError(
                f"expected experts and a router of widths {[*widths]}, got {made.width, made.scored_width}"
            )
        return widths[0]

    def _adapt(self, call: Call, now: Widths) -> int:
        outs, width = now[call.target], now[call.source]
        if (found := (call.adapters.outs, call.adapters.width)) != (outs, width):
            raise ValueError(f"expected adapters of a matrix {[outs, width]}, got {[*found]}")
        return outs

    def _inject(self, call: Call, now: Widths) -> int:
        if now["inputs"] < (call.table + 1) * now[call.source]:
            raise ValueError(f"inject: expected an input of {now[call.source]} elements, got {now['inputs']} of all")
        return now[call.source]
