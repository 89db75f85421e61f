"""Runs the operator calls of layers in Python, one by one or, on a GPU, some of them fused.

Shape legend: T tokens of a pass, H query heads, G key/value heads, D head size, E width.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.channel_scan import channel_conv, channel_scan
from kernels.delta_net import delta_net
from kernels.kv_write import HeadTransform, kv_write, rotary_write
from kernels.layout import DeltaPaths, KVCache, TreeLayout
from kernels.low_rank import low_rank
from kernels.rows import activation, activation_mul, add_norm, add_weighted, rotary, sigmoid_mul, sparsify, xielu
from kernels.scan import scan
from kernels.short_conv import short_conv
from kernels.stack.calls import Call, Heads
from kernels.tree_attention import tree_attention
from models.config import Config
from models.norms import DividedNorm


class Registers(dict[str, Any]):
    """The tensors that the calls of a pass read and write (`kernels.stack.calls.REGISTERS`). "heads" has several parts
    once it is split: rotated heads, in one or two tensors, and values.

    Args:
        stream_TE: the input of the first layer.
        angles: the angles of each rotary table, see `models.rope`.

    Attributes:
        gates_TM: the gates stored before the queries of "heads".
        together: whether operators are fused, see `fused`.
        chunked: layouts by the size of their chunks.
    """

    gates_TM: Tensor

    def __init__(
        self,
        stream_TE: Tensor,
        config: Config,
        angles: Sequence[tuple[Tensor, ...]],
        cache: KVCache,
        layout: TreeLayout,
    ):
        super().__init__(stream=stream_TE)
        self.config, self.angles, self.cache, self.layout, self.impl = config, angles, cache, layout, layout.rows_impl
        self.together = self.impl == "triton"
        self.chunked: dict[int, TreeLayout] = {}

    def in_chunks(self, size: int) -> TreeLayout:
        """The layout for attention in chunks, which layers share."""
        if size not in self.chunked:
            self.chunked[size] = self.layout.in_chunks(size)
        return self.chunked[size]

    def split(self, heads: Heads, *, queries: bool = True) -> list[Tensor]:
        """Return queries, keys and values; unless `queries`, queries and keys may stay one tensor."""
        (G, H, K, V), parts = heads[:4], self["heads"]
        if isinstance(parts, Tensor):
            rows_THD = parts.unflatten(-1, (-1, heads.size))
            if G:
                self.gates_TM, rows_THD = rows_THD[:, :G].flatten(1), rows_THD[:, G:]
            parts = rows_THD.split([H, K, V] if queries else [H + K, V], 1)
        elif queries and len(parts) == 2:
            parts = [*parts[0].split([H, K], 1), parts[1]]
        return list(parts)


def run(calls: "Sequence[Call | Together]", registers: Registers) -> None:
    """Run calls in order."""
    for call in calls:
        OPERATORS[call.code](call, registers)


def _heads(call: Call) -> Heads:
    assert call.heads is not None
    return call.heads


def _norm(call: Call, r: Registers) -> None:
    r[call.target] = call.norm(r[call.source], r.impl)


def _product(call: Call, r: Registers) -> None:
    r[call.target] = call.matrix(r[call.source])


def _head_norms(call: Call, r: Registers) -> None:
    def normed(x_THD: Tensor, norm: Any) -> Tensor:
        if norm is None:
            return x_THD
        return norm(x_THD.flatten(1), r.impl).view(x_THD.shape) if call.all_heads else norm(x_THD, r.impl)

    norms = call.norm, call.more, call.third
    r["heads"] = [normed(x, norm) for x, norm in zip(r.split(_heads(call)), norms, strict=True)]


def _rotate(call: Call, r: Registers) -> None:
    angles = r.angles[call.table]
    *turned, v_TGD = r.split(_heads(call), queries=len(angles) > 2)
    tables = angles[-2:], angles[:2]  # those of queries, and those of keys
    turned = [rotary(x, *table, impl=r.impl) if x.shape[1] else x for x, table in zip(turned, tables, strict=False)]
    r["heads"] = [*turned, v_TGD] if _heads(call).keys else turned[0].flatten(1)


def _write(call: Call, r: Registers) -> None:
    k_GSD, v_GSD = r.cache.layers[call.table]
    r["heads"] = _, k_TGD, v_TGD = r.split(_heads(call))
    if not v_TGD.shape[1]:
        v_TGD = k_TGD
    kv_write(k_GSD, v_GSD, k_TGD, v_TGD, r.layout.write_slots_T, impl=r.layout.impl)


def _attend(call: Call, r: Registers) -> None:
    latent = r.config.latent
    options: dict[str, Any] = {"scale": call.scale, "window": call.window, "cap": call.cap}
    options |= {"sinks_H": call.sinks, "slopes_H": call.slopes}
    options |= {"unread": latent.rotated} if latent else {}
    k_GSD, v_GSD = r.cache.layers[call.table]
    q_THD = r.split(_heads(call))[0]
    layout = r.in_chunks(call.window) if call.chunked and call.window is not None else r.layout
    r[call.target] = tree_attention(q_THD, k_GSD, v_GSD, layout, **options).flatten(1)


def _convolve(call: Call, r: Registers) -> None:
    x_TF, [rows_1SE] = r[call.source], r.cache.layers[call.table]
    slots_T, ancestors_TN = r.layout.write_slots_T, r.layout.ancestors_TN
    if ancestors_TN is None:  # a single tap reads no ancestors
        ancestors_TN = slots_T.new_empty(len(x_TF), 0)
    weights = call.norm.weight, call.norm.bias
    r[call.target] = short_conv(x_TF, *weights, rows_1SE[0], slots_T, ancestors_TN, impl=r.layout.impl)


def _recur(call: Call, r: Registers) -> None:
    x_TF, (rows_RW, states_SHKV), paths = r[call.source], r.cache.layers[call.table], _paths(r)
    if call.code == "recur" and call.delta.order is not None:
        x_TF = x_TF.index_select(1, call.delta.order)
    operator, weights = scan if call.code == "scan" else delta_net, call.delta.weights
    found_TF = operator(_single(x_TF), weights, rows_RW, states_SHKV, paths, impl=r.layout.impl)
    r[call.target] = found_TF.to(x_TF.dtype)


def _single(x: Tensor) -> Tensor:
    """Input of float64 as float32: rows and states are float32 in every model, as in transformers."""
    return x.float() if x.dtype == torch.float64 else x


def _channel_conv(call: Call, r: Registers) -> None:
    x_TF, rows_RW, paths = r[call.source], r.cache.layers[call.table][0], _paths(r)
    found_TC = channel_conv(_single(x_TF), call.delta.weights, rows_RW, paths, impl=r.layout.impl)
    r[call.target] = found_TC.to(x_TF.dtype)


def _part(call: Call, r: Registers) -> None:
    r[call.target] = r[call.source][:, : call.delta.weights.rank].contiguous()


def _join(call: Call, r: Registers) -> None:
    r[call.target] = torch.cat([r[call.target], r[call.source]], 1) if call.table else r[call.source]


def _channel_scan(call: Call, r: Registers) -> None:
    x_TF, (rows_RW, states_SHKV), paths = r[call.source], r.cache.layers[call.table], _paths(r)
    inputs = _single(x_TF), _single(r["convolved"]), _single(r["low"]), _single(r["steps"])
    found_TC = channel_scan(*inputs, call.delta.weights, rows_RW, states_SHKV, paths, impl=r.layout.impl)
    r[call.target] = found_TC.to(x_TF.dtype)


def _paths(r: Registers) -> DeltaPaths:
    if r.layout.paths is None:
        raise ValueError("a recurrent layer: expected a layout with paths")
    return r.layout.paths


def _activate(call: Call, r: Registers) -> None:
    r[call.target] = (activation_mul if call.gated else activation)(r[call.source], call.function, impl=r.impl)


def _xielu(call: Call, r: Registers) -> None:
    r[call.target] = xielu(r[call.source], call.norm.weight, impl=r.impl)


def _scale(call: Call, r: Registers) -> None:
    r[call.target] = r[call.source] * call.scale


def _add(call: Call, r: Registers) -> None:
    r[call.target] = r[call.target] + r[call.source]


def _adapt(call: Call, r: Registers) -> None:
    if (adapters_T := r.layout.adapters_T) is not None:
        impl = "cpp" if r.layout.impl == "cpp" else "torch"
        low_rank(r[call.target], r[call.source], call.adapters, adapters_T, impl=impl)


def _mix(call: Call, r: Registers) -> None:
    scored_TE = r[call.beside] if call.beside else None
    r[call.target] = call.mixture(r[call.source], r.impl, scored_TE)


def _gate(call: Call, r: Registers) -> None:
    gates = r.gates_TM if _heads(call).gates else r[call.source]
    r[call.target] = sigmoid_mul(r[call.target], gates, call.softplus, impl=r.impl)


def _absorb(call: Call, r: Registers) -> None:
    r[call.target] = call.latent.absorb(r[call.source], r["latent"], r.impl)


def _expand(call: Call, r: Registers) -> None:
    r[call.target] = call.latent.expand(r[call.source], r.impl)


def _tap(call: Call, r: Registers) -> None:
    if (tapped_TNE := r.get("tapped")) is not None:
        tapped_TNE[:, call.table] = r[call.source]


def _inject(call: Call, r: Registers) -> None:
    x_TP = r[call.source]
    P = x_TP.shape[1]
    input_TP = r[call.beside][:, call.table * P : (call.table + 1) * P]
    r[call.target] = activation_mul(torch.cat((x_TP, input_TP), 1), call.function, impl=r.impl)


def _clip(call: Call, r: Registers) -> None:
    parts = r[call.target]
    if isinstance(parts, Tensor):
        r[call.target] = parts.clamp(-call.scale, call.scale)
    else:
        r[call.target] = [part.clamp(-call.scale, call.scale) for part in parts]


def _sparsify(call: Call, r: Registers) -> None:
    r[call.target] = sparsify(r[call.source], call.scale, impl=r.impl)


def _predict(call: Call, r: Registers) -> None:
    _change(call, r, add_weighted(r["streams"], r["streams"], r[call.source], impl=r.impl))


def _correct(call: Call, r: Registers) -> None:
    innovation_T1E = (r["stream"] - r["streams"][:, call.table]).unsqueeze(1)
    _change(call, r, add_weighted(r["streams"], innovation_T1E, r[call.source] + 1, impl=r.impl))


def _spread(call: Call, r: Registers) -> None:
    first_T1E, others_TNE = r["streams"].split([1, r["streams"].shape[1] - 1], 1)
    _change(call, r, torch.cat((first_T1E, others_TNE + r[call.source].unsqueeze(1)), 1))


def _change(call: Call, r: Registers, streams_TNE: Tensor) -> None:
    """Take other streams, and copy the active one."""
    r["streams"], active_TE = streams_TNE, streams_TNE[:, call.table].contiguous()
    r[call.target] = active_TE if call.norm is None else active_TE * call.norm.weight


# --- several calls as one, on a GPU ---


class Together(NamedTuple):
    """Calls that are fused into one operator, see `OPERATORS`."""

    code: str
    calls: Sequence[Call]


def _turn_and_write(together: Together, r: Registers) -> None:
    """Norm and rotate heads, and write keys and values."""
    turns = together.calls
    norms = next((call for call in turns if call.code == "head_norms"), None)
    rotation = next((call for call in turns if call.code == "rotate"), None)
    q_norm, k_norm = (x and (x.weight, x.bias) for x in (norms.norm, norms.more)) if norms else (None, None)
    turn = HeadTransform(
        () if rotation is None else r.angles[rotation.table],
        q_norm,
        k_norm,
        r.config.norm_eps,
        norms_last=turns[0].code == "rotate",
        all_heads=norms is not None and norms.all_heads,
        own_norms=norms is not None and norms.own_norms,
        value_norms=norms is not None and norms.third is not None,
    )
    (k_GSD, v_GSD), (q_THD, k_TGD, v_TGD) = r.cache.layers[turns[-1].table], r.split(_heads(turns[-1]))
    r["heads"] = [rotary_write(k_GSD, v_GSD, q_THD, k_TGD, v_TGD, r.layout.write_slots_T, turn, impl=r.impl)]


def _absorb_and_write(together: Together, r: Registers) -> None:
    """Rotate queries and the cached row of each token, unless the model rotates none, and write that row."""
    absorbing, *rotations, write = together.calls
    angles = r.angles[rotations[0].table] if rotations else ()
    k_GSD, latent = r.cache.layers[write.table][0], absorbing.latent
    r["heads"] = [latent.absorb_and_write(k_GSD, r[absorbing.source], r["latent"], angles, r.layout.write_slots_T)]


def _add_and_norm(together: Together, r: Registers) -> None:
    """Add outputs to the stream, and apply the norm that follows."""
    sums = together.calls
    adds = [call for call in sums if call.code == "add"]
    last = sums[-1] if sums[-1].code == "norm" else None
    output = next((call.norm for call in sums if call.code == "norm" and call is not last), None)
    scale = next((call.scale for call in sums if call.code == "scale"), 1.0)
    eps = next((call.norm.eps for call in sums if call.norm is not None), 0.0)
    norm, out_norm = (x and (x.weight, x.bias) for x in (last and last.norm, output))
    addends = [r[call.source] for call in reversed(adds)]
    r["stream"], read_TE = add_norm(r["stream"], addends, norm, out_norm, scale=scale, eps=eps, impl=r.impl)
    if last is not None:
        r[last.target] = read_TE


LATENT = ["absorb", "rotate", "write"], ["absorb", "write"]


def fused(calls: Sequence[Call]) -> "list[Call | Together]":
    """Fuse calls for a GPU: rotations of heads with the writing of keys, and sums with the following norm."""
    found: list[Call | Together] = []
    start = 0
    while start < len(calls):
        codes = [call.code for call in calls[start : start + 3]]
        if latent := next((some for some in LATENT if codes[: len(some)] == some), None):
            end = start + len(latent)
            found.append(Together("latent", calls[start:end]))
        elif (end := _end_of_turns(calls, start) or _end_of_sums(calls, start)) is None:
            found.append(calls[start])
            end = start + 1
        else:
            found.append(Together("sums" if calls[end - 1].code != "write" else "turns", calls[start:end]))
        start = end
    return found


def _end_of_turns(calls: Sequence[Call], start: int) -> int | None:
    """Return where rotations of heads and the following write end; None if there are none, or if one operator cannot
    perform them."""
    end = start
    while end < len(calls) and calls[end].code in ("head_norms", "rotate"):
        if isinstance(calls[end].norm, DividedNorm):
            return None
        end += 1
    return end + 1 if end > start and calls[end].code == "write" else None


def _end_of_sums(calls: Sequence[Call], start: int) -> int | None:
    """Return where the sums that begin at `start`, and the norm of the stream after them, end; None if there are none,
    or if one operator cannot perform them: it applies one norm or none to all addends, then one factor or none, and has
    one epsilon."""
    added, normed, scaled, norms, factors = list[str](), list[str](), list[str](), list[Any](), set[float]()
    for end in range(start, len(calls)):
        call = calls[end]
        if call.code == "add" and call.target == "stream":
            sums = sorted([*added, call.source])
            if any(some and sorted(some) != sums for some in (normed, scaled)) or len(factors) > 1:
                return None
            following = calls[end + 1 : end + 2]
            if not following or (following[0].code, following[0].source) != ("norm", "stream"):
                return end + 1
            return end + 1 + all(norm.eps == following[0].norm.eps for norm in norms)
        if call.source == "stream" or call.code not in ("norm", "scale", "add"):
            return None
        if call.code == "norm":
            if added or call.source in scaled or any(norm is not call.norm for norm in norms):
                return None
            normed.append(call.source)
            norms.append(call.norm)
        added += [call.source] if call.code == "add" else []
        if call.code == "scale":
            scaled.append(call.source)
            factors.add(call.scale)
    return None


OPERATORS: dict[str, Callable[[Any, Registers], None]] = {
    "norm": _norm,
    "product": _product,
    "head_norms": _head_norms,
    "rotate": _rotate,
    "write": _write,
    "attend": _attend,
    "convolve": _convolve,
    "recur": _recur,
    "scan": _recur,
    "channel_conv": _channel_conv,
    "part": _part,
    "channel_scan": _channel_scan,
    "join": _join,
    "activate": _activate,
    "scale": _scale,
    "add": _add,
    "adapt": _adapt,
    "mix": _mix,
    "gate": _gate,
    "absorb": _absorb,
    "expand": _expand,
    "tap": _tap,
    "inject": _inject,
    "xielu": _xielu,
    "sparsify": _sparsify,
    "predict": _predict,
    "correct": _correct,
    "spread": _spread,
    "clip": _clip,
    "turns": _turn_and_write,
    "latent": _absorb_and_write,
    "sums": _add_and_norm,
}
