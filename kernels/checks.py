"""Checks before an operator takes an address or computes: dtype, shape, device, memory layout, range.

Every implementation of an operator refuses the same inputs with the same error. An implementation itself refuses
what only it does not support, for example a dtype that C++ does not have.
"""

import math
from collections.abc import Collection, Iterable, Sequence
from importlib import import_module
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from kernels.cpp import KINDS
from kernels.kv_fp8 import DTYPE as FP8
from kernels.kv_kinds import SCALE_BYTES
from kernels.layout import WORD, DeltaPaths, TreeLayout


def expect(
    name: str,
    x: Tensor,
    dtype: torch.dtype,
    shape: Sequence[int],
    device: torch.device,
    *,
    contiguous: bool = True,
) -> None:
    """Raises ValueError unless a tensor is what an operator takes; `contiguous`: its elements lie in order."""
    if x.dtype == dtype and x.shape == shape and x.device == device and (not contiguous or x.is_contiguous()):
        return
    order = "contiguous " if contiguous else ""
    raise ValueError(
        f"{name}: expected {order}{_short(dtype)} {list(shape)} on {device}, "
        f"got {_short(x.dtype)} {list(x.shape)} on {x.device}, strides {list(x.stride())}"
    )


def implementation(impl: str, known: Collection[str]) -> None:
    """Raises ValueError unless an operator has an implementation of this name."""
    if impl not in known:
        raise ValueError(f"impl: expected one of {', '.join(known)}, got {impl!r}")


def module(package: str, impl: str) -> ModuleType:
    """A package's implementation of its operators; Triton's is absent on some machines, and slow to import."""
    return import_module(f"{package}.{'native' if impl == 'cpp' else impl}")


def floats(name: str, x: Tensor, dims: int | None = None) -> None:
    """Raises ValueError unless a tensor is of floats, with so many dimensions, of which the last is not empty."""
    if not x.dtype.is_floating_point:
        raise ValueError(f"{name}: expected a floating-point dtype, got {_short(x.dtype)}")
    if (x.dim() != dims if dims else not x.dim()) or not x.shape[-1]:
        wanted = f"{dims} dimensions" if dims else "one dimension or more"
        raise ValueError(f"{name}: expected {wanted}, the last not empty, got {list(x.shape)}")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def native(x: Tensor, *dtypes: torch.dtype) -> None:
    """Raises ValueError for a dtype (by default: all but those of `KINDS`) or a device that C++ does not have."""
    if x.dtype in (dtypes or KINDS) and x.is_cpu:
        return
    *others, last = map(_short, dtypes or KINDS)
    wanted = f"{', '.join(others)} or {last}" if others else last
    raise ValueError(f"impl 'cpp': expected {wanted} on a CPU, got {x.dtype} on {x.device}")


def native_cache(k_GSD: Tensor) -> None:
    """Raises ValueError for a cache that C++ cannot read."""
    if k_GSD.dtype == FP8 or not k_GSD.is_cpu:
        raise ValueError(f"impl 'cpp': expected a cache on a CPU, and none of FP8, got {k_GSD.dtype} on {k_GSD.device}")


def within(name: str, numbers: Iterable[int], end: int, what: str = "slots") -> None:
    """Raises ValueError unless numbers are from 0 to end - 1."""
    bad = next((number for number in numbers if not 0 <= number < end), None)
    if bad is not None:
        raise ValueError(f"{name}: expected {what} from 0 to {end - 1}, got {bad}")


AXES = {"L": "layers", "G": "heads", "S": "slots", "D": "head size"}


def cache(k: Tensor, v: Tensor, axes: str = "GSD") -> None:
    """Raises ValueError unless keys and values are a cache, by default of one layer: alike, contiguous, not empty."""
    if k.dim() != len(axes) or not k.numel():
        shape = ", ".join(AXES[axis] for axis in axes)
        raise ValueError(f"k_{axes}: expected [{shape}], none of them 0, got {list(k.shape)}")
    expect(f"k_{axes}", k, k.dtype, k.shape, k.device)
    expect(f"v_{axes}", v, k.dtype, k.shape, k.device)


def elements(k_GSD: Tensor, rows: Tensor) -> tuple[int, torch.dtype]:
    """The size of a head, and the dtype of rows for a cache: its own, or, if it has scales, the one that these have."""
    if not (scale := SCALE_BYTES.get(k_GSD.dtype)):
        return k_GSD.shape[2], k_GSD.dtype
    _, S, width = k_GSD.shape
    if width <= scale:
        raise ValueError(
            f"k_GSD: expected {_short(k_GSD.dtype)} rows of more than a scale's {scale} bytes, got {width}"
        )
    if S * (width - scale) % scale:
        raise ValueError(f"k_GSD: expected a multiple of {scale} elements in the slots of a head, got {S} of {width}")
    return width - scale, rows.dtype


def copies(source: Sequence[int], target: Sequence[int], size: int) -> None:
    """Raises ValueError unless slots can be copied to others in a cache of `size` slots."""
    if len(source) != len(target) or any(
        slots and not 0 <= min(slots) <= max(slots) < size for slots in (source, target)
    ):
        raise ValueError(f"expected slots below {size}, as many to read as to write, got {source} and {target}")


def kv_write(k_GSD: Tensor, v_GSD: Tensor, k_TGD: Tensor, v_TGD: Tensor, slots_T: Tensor) -> None:
    """Raises ValueError for tensors that `kernels.kv_write.kv_write` does not take, but for slots out of range."""
    cache(k_GSD, v_GSD)
    (G, *_), (D, dtype), device = k_GSD.shape, elements(k_GSD, k_TGD), k_GSD.device
    if k_GSD.dtype in SCALE_BYTES:
        floats("k_TGD", k_TGD)
    expect("slots_T", slots_T, torch.int64, slots_T.shape[:1] or (1,), device)
    expect("k_TGD", k_TGD, dtype, (slots_T.shape[0], G, D), device, contiguous=False)
    expect("v_TGD", v_TGD, dtype, (slots_T.shape[0], G, D), device, contiguous=False)


def turn(q_THD: Tensor, k_TGD: Tensor, turn: Any) -> None:
    """Raises ValueError for queries, or a `kernels.kv_write.HeadTransform`, that do not fit the keys."""
    (T, _, D), dtype, device = k_TGD.shape, k_TGD.dtype, k_TGD.device
    floats("q_THD", q_THD, 3)
    expect("q_THD", q_THD, dtype, (T, q_THD.shape[1], D), device, contiguous=False)
    if len(turn.angles) not in (0, 2, 4):
        raise ValueError(f"angles: expected none, 2 or 4, got {len(turn.angles)}")
    for x in turn.angles:
        R = x.shape[-1]
        if R % 2 or R > D:
            raise ValueError(f"angles: expected an even number of columns, at most {D}, got {R}")
        expect("angles", x, dtype, (T, turn.angles[0].shape[-1]), device, contiguous=False)
    if (turn.q_norm is None) != (turn.k_norm is None):
        raise ValueError("q_norm, k_norm: expected both or none")
    for name, norm, heads in (("q_norm", turn.q_norm, q_THD.shape[1]), ("k_norm", turn.k_norm, k_TGD.shape[1])):
        for x in norm or ():
            if x is not None:
                exact = norm[1] is None and x.dtype == torch.float32
                size = D * heads if turn.all_heads or turn.own_norms else D
                expect(name, x, torch.float32 if exact else dtype, (size,), device)


def short_conv(
    x_TF: Tensor, weight_KE: Tensor, bias_E: Tensor | None, rows_SE: Tensor, slots_T: Tensor, ancestors_TN: Tensor
) -> None:
    """Raises ValueError for what `kernels.short_conv.short_conv` does not take, but for slots out of range."""
    floats("x_TF", x_TF, 2)
    floats("weight_KE", weight_KE, 2)
    floats("rows_SE", rows_SE, 2)
    (T, _), (K, E), device = x_TF.shape, weight_KE.shape, x_TF.device
    if not K:
        raise ValueError(f"weight_KE: expected a tap or more, got {list(weight_KE.shape)}")
    expect("weight_KE", weight_KE, x_TF.dtype, (K, E), device)
    expect("x_TF", x_TF, x_TF.dtype, (T, 3 * E), device, contiguous=False)
    expect("rows_SE", rows_SE, rows_SE.dtype, (len(rows_SE), E), device)
    if bias_E is not None:
        expect("bias_E", bias_E, x_TF.dtype, (E,), device)
    expect("slots_T", slots_T, torch.int64, (T,), device)
    expect("ancestors_TN", ancestors_TN, torch.int64, (T, K - 1), device)


def delta_net(x_TF: Tensor, weights: Any, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> None:
    """Raises ValueError for what `kernels.delta_net.delta_net` does not take."""
    floats("x_TF", x_TF, 2)
    delta_weights(weights, torch.promote_types(x_TF.dtype, torch.float32), x_TF.device)
    _recurrent(x_TF, weights.kind, rows_RW, states_SHKV, paths)


def _recurrent(x_TF: Tensor, kind: Any, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> None:
    device, wide = x_TF.device, torch.promote_types(x_TF.dtype, torch.float32)
    expect("x_TF", x_TF, x_TF.dtype, (len(x_TF), kind.width), device, contiguous=False)
    expect("rows_RW", rows_RW, wide, (len(rows_RW), kind.row), device)
    expect("states_SHKV", states_SHKV, wide, (len(states_SHKV), *kind.state), device)
    delta_paths(paths, len(x_TF), kind, len(rows_RW), len(states_SHKV), device)


def delta_weights(weights: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError for sizes and weights of a gated delta net that do not fit together."""
    kind, H, V = weights.kind, weights.kind.value_heads, weights.kind.value_size
    _sizes(kind)
    shapes = {"taps_KC": (kind.taps, kind.channels), "decay_H": (H,), "bias_D": (kind.decays,), "norm_V": (V,)}
    for name, shape in shapes.items():
        expect(name, getattr(weights, name), dtype, shape, device)


def _sizes(kind: Any) -> None:
    if kind.taps < 1 or min(kind.key_heads, *kind.state) < 1 or kind.value_heads % kind.key_heads:
        raise ValueError(f"weights: expected a tap, a head of a size and a multiple of key heads or more, got {kind}")


def scan(x_TF: Tensor, weights: Any, rows_RW: Tensor, states_SHKV: Tensor, paths: DeltaPaths) -> None:
    """Raises ValueError for what `kernels.scan.scan` does not take."""
    floats("x_TF", x_TF, 2)
    scan_weights(weights, torch.promote_types(x_TF.dtype, torch.float32), x_TF.device)
    _recurrent(x_TF, weights.kind, rows_RW, states_SHKV, paths)


def scan_weights(weights: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError for sizes and weights of a layer of Mamba-2 that do not fit together."""
    kind, H, V = weights.kind, weights.kind.value_heads, weights.kind.value_size
    _sizes(kind)
    if not 0 <= weights.least <= weights.most:
        raise ValueError(f"least: expected a step of 0 or more, at most {weights.most}, got {weights.least}")
    shapes = {"taps_KC": (kind.taps, kind.channels), "shift_C": (kind.channels,)}
    shapes |= {} if weights.norm_E is None else {"norm_E": (H * V,)}
    for name, shape in (shapes | dict.fromkeys(("decay_H", "bias_H", "skip_H"), (H,))).items():
        expect(name, getattr(weights, name), dtype, shape, device)


def channel_conv(x_TF: Tensor, weights: Any, rows_RW: Tensor, paths: DeltaPaths) -> None:
    """Raises ValueError for what `kernels.channel_scan.channel_conv` does not take."""
    floats("x_TF", x_TF, 2)
    kind, device, wide = weights.kind, x_TF.device, torch.promote_types(x_TF.dtype, torch.float32)
    channel_weights(weights, wide, device)
    expect("x_TF", x_TF, x_TF.dtype, (len(x_TF), kind.width), device, contiguous=False)
    expect("rows_RW", rows_RW, wide, (len(rows_RW), kind.row), device)
    delta_paths(paths, len(x_TF), kind, len(rows_RW), None, device)


def channel_scan(
    x_TF: Tensor,
    convolved_TC: Tensor,
    low_TL: Tensor,
    steps_TC: Tensor,
    weights: Any,
    rows_RW: Tensor,
    states_SHKV: Tensor,
    paths: DeltaPaths,
) -> None:
    """Raises ValueError for what `kernels.channel_scan.channel_scan` does not take."""
    floats("x_TF", x_TF, 2)
    T, dtype, device, kind = len(x_TF), x_TF.dtype, x_TF.device, weights.kind
    channel_weights(weights, torch.promote_types(dtype, torch.float32), device)
    _recurrent(x_TF, kind, rows_RW, states_SHKV, paths)
    for name, x in (("convolved_TC", convolved_TC), ("steps_TC", steps_TC)):
        expect(name, x, dtype, (T, kind.channels), device, contiguous=False)
    expect("low_TL", low_TL, dtype, (T, weights.rank + 2 * kind.key_size), device, contiguous=False)


def channel_weights(weights: Any, dtype: torch.dtype, device: torch.device) -> None:
    """Raises ValueError for sizes and weights of a Mamba layer that do not fit together."""
    kind, K, C = weights.kind, weights.kind.key_size, weights.kind.channels
    _sizes(kind)
    if (kind.key_heads, kind.value_heads) != (1, 1) or weights.rank < 1:
        raise ValueError(f"weights: expected a rank, and one head, whose values are channels, got {kind}")
    shapes: dict[str, tuple[int, ...]] = {"taps_KC": (kind.taps, C), "rates_KC": (K, C)}
    shapes |= {} if weights.norms_E is None else {"norms_E": (2 * K,)}
    for name, shape in (shapes | dict.fromkeys(("shift_C", "bias_C", "skip_C"), (C,))).items():
        expect(name, getattr(weights, name), dtype, shape, device)


def delta_paths(paths: DeltaPaths, tokens: int, kind: Any, rows: int, states: int | None, device: torch.device) -> None:
    """Raises ValueError for paths that lead outside the rows and states, on a CPU; once for each pass.

    Args:
        states: how many there are; None: they are not read.
    """
    fits = vars(paths).setdefault("_fits", set())
    if (sizes := (tokens, kind.reach, kind.block, rows, states)) not in fits:
        _paths(paths, tokens, kind, rows, states, device)
        fits.add(sizes)


def _paths(paths: DeltaPaths, tokens: int, kind: Any, rows: int, states: int | None, device: torch.device) -> None:
    for name in ("rows_T", "lengths_T", "bases_T", "folds_T"):
        expect(name, getattr(paths, name), torch.int64, (tokens,), device)
    expect("paths_TN", paths.paths_TN, torch.int64, (tokens, kind.reach), device)
    if not tokens or device.type != "cpu":
        return
    for name, end in (("rows_T", rows), ("bases_T", states), ("folds_T", states), ("lengths_T", kind.block)):
        if end is not None:
            within(name, getattr(paths, name).tolist(), end)
    least_T, most_T = paths.paths_TN.aminmax(dim=1)
    if int(most_T.max()) >= rows or not bool((least_T >= -torch.arange(tokens, device=device)).all()):
        raise ValueError(f"paths_TN: expected rows below {rows}, or earlier tokens, got {paths.paths_TN.tolist()}")


def queries(
    q_THD: Tensor,
    k_GSD: Tensor,
    v_GSD: Tensor,
    window: int | None,
    cap: float | None,
    sinks_H: Tensor | None = None,
    slopes_H: Tensor | None = None,
) -> None:
    """Raises ValueError for queries and a cache that `kernels.tree_attention.tree_attention` does not take."""
    cache(k_GSD, v_GSD)
    floats("q_THD", q_THD, 3)
    G, (D, dtype) = k_GSD.shape[0], elements(k_GSD, q_THD)
    T, H, _ = q_THD.shape
    if H % G or not H:
        raise ValueError(f"q_THD: expected a multiple of the cache's {G} heads, got {H}")
    expect("q_THD", q_THD, dtype, (T, H, D), k_GSD.device, contiguous=False)
    if window is not None and window < 0:
        raise ValueError(f"window: expected None or at least 0, got {window}")
    if cap is not None and not 0 < cap < math.inf:
        raise ValueError(f"cap: expected None or more than 0, got {cap}")
    if sinks_H is not None:
        expect("sinks_H", sinks_H, torch.float32, (H,), k_GSD.device)
    if slopes_H is not None:
        kind = torch.bfloat16 if slopes_H.dtype == torch.bfloat16 else torch.float32
        expect("slopes_H", slopes_H, kind, (H,), k_GSD.device)
        if cap is not None:
            raise ValueError(f"slopes_H: expected None with a cap, got one of {cap}")


def unread(q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor, count: int) -> None:
    """Raises ValueError unless the first `count` elements can be left out of values that are also the keys."""
    if not 0 <= count < q_THD.shape[2]:
        raise ValueError(f"unread: expected at least 0 and less than {q_THD.shape[2]}, got {count}")
    if count and k_GSD.data_ptr() != v_GSD.data_ptr():
        raise ValueError(f"unread: expected 0, or keys that are the values, got {count}")


def tensors(layout: TreeLayout, device: torch.device) -> None:
    """Raises ValueError for a layout whose tensors do not fit together; what they hold is not read."""
    T, R = layout.positions_T.shape[0], layout.token_starts.shape[0] - 1
    if R < 1 or layout.page_size < 1:
        raise ValueError(f"layout: expected a tree or more and pages of a slot or more, got {R}, {layout.page_size}")
    pages = layout.trunk_pages_RP
    seen_tensors(layout.seen, T, device)
    expect("write_slots_T", layout.write_slots_T, torch.int64, (T,), device)
    expect("trunk_len_R", layout.trunk_len_R, torch.int32, (R,), device)
    expect("branch_len_R", layout.branch_len_R, torch.int32, (R,), device)
    expect("trunk_pages_RP", pages, torch.int32, (R, pages.shape[-1]), device, contiguous=False)


def seen_tensors(seen: Sequence[Tensor], T: int, device: torch.device) -> None:
    """Raises ValueError for tensors of `TreeLayout.seen` that do not fit together, for T tokens."""
    positions_T, token_starts, trunk_seen_T, trunk_runs, branch_slots_RW, branch_positions_RW, ancestry_TC = seen
    R, W = token_starts.shape[0] - 1, branch_slots_RW.shape[-1]
    expect("positions_T", positions_T, torch.int64, (T,), device)
    expect("token_starts", token_starts, torch.int32, (R + 1,), device)
    expect("trunk_seen_T", trunk_seen_T, torch.int32, (T,), device)
    expect("trunk_runs", trunk_runs, torch.int32, (trunk_runs.shape[0], 3), _HOST)
    expect("branch_slots_RW", branch_slots_RW, torch.int64, (R, W), device)
    expect("branch_positions_RW", branch_positions_RW, torch.int32, (R, W), device)
    expect("ancestry_TC", ancestry_TC, torch.int32, (T, W // WORD), device)
    if W % WORD:
        raise ValueError(f"branch_slots_RW: expected a multiple of {WORD} columns, got {W}")


_HOST = torch.device("cpu")


def ranges(layout: TreeLayout, slots: int) -> None:
    """Raises ValueError for a layout that leads outside a cache of `slots` slots; reads tensors on the host."""
    starts, seen, page = layout.token_starts.tolist(), layout.trunk_seen_T.tolist(), layout.page_size
    R, T = len(starts) - 1, len(seen)
    if starts[0] != 0 or starts[-1] != T or any(first > last for first, last in pairwise(starts)):
        raise ValueError(f"token_starts: expected numbers that ascend from 0 to {T}, got {starts}")
    lengths = [0] * R
    for r, first, length in layout.trunk_runs.tolist():
        if not 0 <= r < R or length < 0 or not 0 <= first <= first + length <= slots:
            raise ValueError(f"trunk_runs: expected trees below {R} and slots below {slots}, got {[r, first, length]}")
        lengths[r] += length
    for r, (table, length) in enumerate(zip(layout.trunk_pages_RP.tolist(), lengths, strict=True)):
        most = max(seen[starts[r] : starts[r + 1]], default=0)
        if min(seen[starts[r] : starts[r + 1]], default=0) < 0 or most > length or most > len(table) * page:
            raise ValueError(f"trunk_seen_T: expected at most the trunk of tree {r}, {length} tokens, got {most}")
        if any(not 0 <= number < slots // page for number in table[: -(-most // page)]):
            raise ValueError(f"trunk_pages_RP: expected pages below {slots // page} of tree {r}, got {table}")
    within("branch_slots_RW", layout.branch_slots_RW.flatten().tolist(), slots)
    within("write_slots_T", layout.write_slots_T.tolist(), slots)


def fits(layout: TreeLayout, slots: int, device: torch.device) -> None:
    """Raises ValueError unless a layout fits a cache of `slots` slots on a device; once for each layout.

    Values are checked on the host only; on a GPU the code that made the tensors is responsible for them.
    """
    kept = vars(layout)
    if kept.get("_fits") != (slots, device):
        tensors(layout, device)
        if device.type == "cpu":
            ranges(layout, slots)
        kept["_fits"] = slots, device
