"""Calls the C++ joint distributions of beams (beams.cpp): their best cells, draws, and which drafts are accepted.

`search.dsbd.joint` and `search.dsbd.verify` are the definition. Cells are numbers node * vocab + token, ascending.
"""

import ctypes
from array import array
from collections.abc import Sequence

import torch
from torch import Tensor

from kernels.checks import expect
from kernels.cpp import function

Distribution = tuple["array[int]", "array[float]"]  # cells and their probabilities
WHOLE, MASSED, DENSE = 1, 2, 4  # nothing else is possible; the row's mass is not 1; all of it is there, as float32
Key = tuple[int, int, int]  # of keyed numbers: seed, stream, position


_HOST = torch.device("cpu")


def address(numbers: "Tensor | array[float]", dtype: torch.dtype = torch.float64) -> int:
    """Returns where numbers lie that C++ is going to read, for `Leaders`; they have to live as long as it may.

    Raises:
        ValueError: they are not contiguous numbers of this dtype on the host.
    """
    if isinstance(numbers, Tensor):
        expect("numbers", numbers, dtype, (*numbers.shape,), _HOST)
        return numbers.data_ptr()
    return _place(numbers, "d")


def _place(numbers: array, typecode: str, size: int | None = None) -> int:
    """The address of an array of this type and size."""
    if not isinstance(numbers, array) or numbers.typecode != typecode or len(numbers) != (size or len(numbers)):
        got = f"{numbers.typecode!r} of {len(numbers)}" if isinstance(numbers, array) else type(numbers).__name__
        raise ValueError(f"expected an array of {typecode!r}{'' if size is None else f' of {size}'}, got {got}")
    return numbers.buffer_info()[0]


class Leaders:
    """Finds the cells that a warp leaves of joint distributions, where they are few.

    Args:
        vocab: tokens of a row.
        temperature, top_k, top_p: of the warp.
        room: for so many cells.
    """

    def __init__(self, vocab: int, temperature: float, top_k: int, top_p: float, room: int):
        if vocab < 1 or room < 1:
            raise ValueError(f"expected a token or more, and room for a cell or more, got {vocab} and {room}")
        self._cells, self._numbers, self._count = (
            array("q", bytes(8 * room)),
            array("d", bytes(16 * room)),
            array("q", [0]),
        )
        cells, numbers, count = (x.buffer_info()[0] for x in (self._cells, self._numbers, self._count))
        self._run, self._room = function("leaders", brief=True), room
        self._options = vocab, temperature, top_k, top_p, room, numbers, numbers + 8 * room, cells, count

    def __call__(
        self, logprobs: Sequence[float], rows: Sequence[int]
    ) -> tuple["array[int]", "array[float]", "array[float]"] | None:
        """The cells of one, ascending.

        Args:
            logprobs: of the beams.
            rows: of each beam in turn its node, its entries, and what is known of its row (`search.dsbd.joint.Told`):
                the address, how many log-probabilities, WHOLE, MASSED or DENSE, the address of its peaks if it is
                dense (0: unknown). Addresses are those of `address`.

        Returns:
            cells, probabilities, log-probabilities of the tokens; None if more may be drawn than is known or fits.

        Raises:
            ValueError: no beams, or not six places for each.
        """
        if not len(logprobs) or len(rows) != 6 * len(logprobs):
            raise ValueError(f"expected six places for each beam, and a beam, got {len(rows)} for {len(logprobs)}")
        offsets, places = array("d", logprobs), array("q", rows)
        self._run(len(offsets), offsets.buffer_info()[0], places.buffer_info()[0], *self._options)
        n, room = self._count[0], self._room
        return (self._cells[:n], self._numbers[:n], self._numbers[room : room + n]) if n >= 0 else None


def draw(probs: "array[float]", n: int, *, iid: bool, key: Key) -> list[int]:
    """See `search.dsbd.verify.draw`. Raises ValueError for no distribution of float64, or fewer than no draws."""
    where = _place(probs, "d")
    if n < 0 or not len(probs):
        raise ValueError(f"expected a cell or more, and no draw or more, got {len(probs)} and {n}")
    drawn, count = array("q", bytes(8 * n)), ctypes.c_int64()
    function("draw", brief=True)(*(where, len(probs), n, iid, *key, drawn.buffer_info()[0], ctypes.addressof(count)))
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
    """See `search.dsbd.DSBD.judge`: the width, how many drafts were accepted, and tried, and the entries.

    Raises:
        ValueError: distributions that are not cells and as many probabilities, drafts that are no places in q, or a
            negative number of beams.
    """
    if drawn and not 0 <= min(drawn) <= max(drawn) < len(q[0]):
        raise ValueError(f"expected drafts from 0 to {len(q[0]) - 1}, got {min(drawn)} to {max(drawn)}")
    if vocab < 1 or min(room, width, draft_beams, min_width) < 0 or not len(p[0]):
        got = f"vocab {vocab}, room {room}, widths {width}, {draft_beams}, {min_width}, {len(p[0])} cells"
        raise ValueError(f"expected a token, a cell, and no width below 0, got {got}")
    drafts, nodes = array("q", drawn), array("q", parents)
    out = array("q", bytes(8 * (3 + room)))
    function("judge", brief=True)(
        *(len(p[0]), _place(p[0], "q"), _place(p[1], "d", len(p[0]))),
        *(len(q[0]), _place(q[0], "q"), _place(q[1], "d", len(q[0]))),
        *(len(drafts), drafts.buffer_info()[0], len(nodes), nodes.buffer_info()[0], vocab),
        *(iid, width, draft_beams, min_width, threshold, room, *key, out.buffer_info()[0]),
    )
    width, accepted, tried = out[:3]
    return width, accepted, tried, out[3 : 3 + width].tolist()
