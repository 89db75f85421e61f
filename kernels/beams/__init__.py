"""Calls the C++ joint distributions of beams (beams.cpp): their best cells, draws, and which drafts are accepted.

`search.joint` and `search.verify` are the definition. Cells are numbers node * vocab + token.
"""

import ctypes
from array import array
from collections.abc import Callable, Sequence

from kernels.cpp import function

Distribution = tuple["array[int]", "array[float]"]  # cells and their probabilities
Key = tuple[int, int, int]  # of keyed numbers: seed, stream, position


def _function(name: str, signature: str) -> Callable[..., None]:
    return function(f"coppice_{name}", signature, brief=True)


def leaders(
    beams: Sequence[tuple[float, float, float]],
    rows: Sequence[tuple[int, int, int]],
    vocab: int,
    warp: tuple[float, int, float],
) -> tuple["array[int]", "array[float]", "array[float]"] | None:
    """The cells of a joint distribution, best first.

    Args:
        beams: of each its weight (a logarithm), the bound of the log-probabilities that are not known of its row, the
            logarithm of that row's mass.
        rows: of each beam its node, the address of its known log-probabilities, best first, and their tokens, all of
            them float64, and how many these are.
        vocab: tokens of a row.
        warp: temperature, top-k, top-p.

    Returns:
        cells, probabilities, log-probabilities of the tokens; None if more than is known may be drawn.
    """
    measures, places = array("d", [x for beam in beams for x in beam]), array("q", [x for row in rows for x in row])
    size, count = sum(places[2::3]), ctypes.c_int64()
    cells, probs, logps = array("q", bytes(8 * size)), array("d", bytes(8 * size)), array("d", bytes(8 * size))
    _function("leaders", "ippididpppp")(
        *(len(beams), measures.buffer_info()[0], places.buffer_info()[0], vocab, *warp),
        *(probs.buffer_info()[0], logps.buffer_info()[0], cells.buffer_info()[0], ctypes.addressof(count)),
    )
    n = count.value
    return (cells[:n], probs[:n], logps[:n]) if n >= 0 else None


def draw(probs: "array[float]", n: int, *, iid: bool, key: Key) -> list[int]:
    """See `search.verify.draw`."""
    drawn, count = array("q", bytes(8 * n)), ctypes.c_int64()
    _function("draw", "piiiiiipp")(
        *(probs.buffer_info()[0], len(probs), n, iid, *key, drawn.buffer_info()[0], ctypes.addressof(count))
    )
    return drawn[: count.value].tolist()


def judge(
    p: Distribution,
    q: Distribution,
    drawn: Sequence[int],
    parents: Sequence[int],
    vocab: int,
    *,
    iid: bool,
    width: int,
    draft_beams: int,
    min_width: int,
    threshold: float,
    room: int,
    key: Key,
) -> tuple[int, int, int, list[int]]:
    """See `search.dsbd.DSBD.judge`: the width, how many drafts were accepted, and tried, and the entries."""
    drafts, nodes = array("q", drawn), array("q", parents)
    out = array("q", bytes(8 * (3 + room)))
    _function("judge", "ippippipipiiiiidiiiip")(
        *(len(p[0]), p[0].buffer_info()[0], p[1].buffer_info()[0]),
        *(len(q[0]), q[0].buffer_info()[0], q[1].buffer_info()[0]),
        *(len(drafts), drafts.buffer_info()[0], len(nodes), nodes.buffer_info()[0], vocab),
        *(iid, width, draft_beams, min_width, threshold, room, *key, out.buffer_info()[0]),
    )
    width, accepted, tried = out[:3]
    return width, accepted, tried, out[3 : 3 + width].tolist()
