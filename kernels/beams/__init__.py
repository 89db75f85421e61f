"""Calls the C++ joint distributions of beams (beams.cpp): their best cells, draws, and which drafts are accepted.

`search.joint` and `search.verify` are the definition. Cells are numbers node * vocab + token.
"""

import ctypes
from array import array
from collections.abc import Sequence

from kernels.cpp import function

Distribution = tuple["array[int]", "array[float]"]  # cells and their probabilities
WHOLE, MASSED, DENSE = 1, 2, 4  # nothing else is possible; the row's mass is not 1; all of it is there, as float32
Key = tuple[int, int, int]  # of keyed numbers: seed, stream, position


class Leaders:
    """Finds the best cells of joint distributions.

    Args:
        vocab: tokens of a row.
        temperature, top_k, top_p: of the warp.
        room: for so many cells.
    """

    def __init__(self, vocab: int, temperature: float, top_k: int, top_p: float, room: int):
        self._cells, self._numbers, self._count = (
            array("q", bytes(8 * room)),
            array("d", bytes(16 * room)),
            array("q", [0]),
        )
        cells, numbers, count = (x.buffer_info()[0] for x in (self._cells, self._numbers, self._count))
        self._run, self._room = function("leaders", brief=True), room
        self._options = vocab, temperature, top_k, top_p, room, numbers, numbers + 8 * room, cells, count

    def __call__(
        self, weights: Sequence[float], rows: Sequence[int]
    ) -> tuple["array[int]", "array[float]", "array[float]"] | None:
        """The cells of one, best first.

        Args:
            weights: of the beams (logarithms).
            rows: of each beam in turn its node, and what is known of its row (see `search.joint.Told`): the address,
                how many log-probabilities, WHOLE, MASSED or DENSE, the address of its peaks if it is dense (0:
                unknown).

        Returns:
            cells, probabilities, log-probabilities of the tokens; None if more may be drawn than is known or fits.
        """
        offsets, places = array("d", weights), array("q", rows)
        self._run(len(offsets), offsets.buffer_info()[0], places.buffer_info()[0], *self._options)
        n, room = self._count[0], self._room
        return (self._cells[:n], self._numbers[:n], self._numbers[room : room + n]) if n >= 0 else None


def draw(probs: "array[float]", n: int, *, iid: bool, key: Key) -> list[int]:
    """See `search.verify.draw`."""
    drawn, count = array("q", bytes(8 * n)), ctypes.c_int64()
    function("draw", brief=True)(
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
    function("judge", brief=True)(
        *(len(p[0]), p[0].buffer_info()[0], p[1].buffer_info()[0]),
        *(len(q[0]), q[0].buffer_info()[0], q[1].buffer_info()[0]),
        *(len(drafts), drafts.buffer_info()[0], len(nodes), nodes.buffer_info()[0], vocab),
        *(iid, width, draft_beams, min_width, threshold, room, *key, out.buffer_info()[0]),
    )
    width, accepted, tried = out[:3]
    return width, accepted, tried, out[3 : 3 + width].tolist()
