"""The C++ tree attention gives a row the same bits, whatever is beside it and wherever its keys lie."""

import random

import pytest
import torch

from kernels.layout import NULL_SLOT, WORD, TreeLayout
from kernels.tree_attention import tree_attention
from tests.kernels.forests import cached
from tests.marks import needs_cpp

pytestmark = needs_cpp

PAGE = 16
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
CACHES = pytest.mark.parametrize("kept", [None, torch.int8], ids=["as queries", "int8"])
# Key/value heads, query heads and elements of a head: with and without lanes, words and pairs that are not filled.
HEADS = [(2, 2, 64), (1, 3, 40), (1, 70, 8), (1, 4, 33)]


class Sequences:
    """Sequences that have a common beginning, with a query, key and value for each of their tokens."""

    def __init__(self, seed, length, shared, count, heads):
        G, H, D = heads
        self.rng = random.Random(seed)
        generator = torch.Generator().manual_seed(seed)
        self.shared = shared
        draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        self.common = draw(shared, 3, max(G, H), D)
        self.tails = [draw(length - shared, 3, max(G, H), D) for _ in range(count)]
        self.rows = [torch.cat([self.common, tail]) for tail in self.tails]  # by sequence
        self.heads = heads

    def attend(
        self, asked, trunk, dtype, kept, *, alone=None, tokens=1, threads=1, impl="cpp", device="cpu", **options
    ):
        """Returns the outputs of the last `tokens` tokens of sequences.

        Args:
            asked: numbers of sequences; the first `trunk` tokens of the first one lie in the trunk.
            alone: a sequence of which all tokens lie in the trunk.
        """
        G, H, D = self.heads
        rng, length = self.rng, len(self.rows[0])
        trunk = length if alone is not None else trunk
        pages = rng.sample(range(1, 1 + -(-trunk // PAGE) + 3), -(-trunk // PAGE))
        slot_of = {p: pages[p // PAGE] * PAGE + p % PAGE for p in range(trunk)}
        first = (max(pages, default=0) + 5) * PAGE
        sequences = [alone] if alone is not None else asked
        nodes = {}  # (sequence or None for what all have, position): column of the table
        for i in sequences:
            for p in range(trunk, length):
                nodes.setdefault((None if p < self.shared else i, p), None)
        columns = rng.sample(range(len(nodes) + 7), len(nodes))
        nodes = dict(zip(nodes, columns, strict=True))
        W = -(-(len(nodes) + 7) // WORD) * WORD if nodes else 0
        S = first + W + PAGE
        k, v = (torch.full((G, S, D), float("nan")) for _ in range(2))
        k[:, NULL_SLOT] = v[:, NULL_SLOT] = 0
        table, places = [NULL_SLOT] * W, [0] * W
        stem = self.rows[sequences[0]][:trunk].transpose(0, 2)
        slots = [*slot_of.values()]
        k[:, slots], v[:, slots] = stem[:G, 1], stem[:G, 2]
        for (i, p), column in nodes.items():
            table[column], places[column] = first + column, p
            row = (self.common if i is None else self.rows[i])[p]
            k[:, first + column], v[:, first + column] = row[1, :G], row[2, :G]
        q, positions, seen, bits = [], [], [], []
        for i in sequences:
            for p in range(length - tokens, length):
                q.append(self.rows[i][p, 0, :H])
                positions.append(p)
                seen.append(min(trunk, p + 1))
                path = [nodes[None if at < self.shared else i, at] for at in range(trunk, p + 1)]
                bits.append(sum(1 << column for column in path))
        C, T = W // WORD, len(q)
        packed = bytearray(b"".join(b.to_bytes(C * 4, "little") for b in bits))
        runs = [(0, pages[i] * PAGE, min(PAGE, trunk - i * PAGE)) for i in range(len(pages))]
        layout = TreeLayout(
            positions_T=torch.tensor(positions),
            write_slots_T=torch.full((T,), 1),
            token_starts=torch.tensor([0, T], dtype=torch.int32),
            trunk_seen_T=torch.tensor(seen, dtype=torch.int32),
            trunk_pages_RP=torch.tensor([pages], dtype=torch.int32),
            trunk_len_R=torch.tensor([trunk], dtype=torch.int32),
            trunk_runs=torch.tensor(runs, dtype=torch.int32).view(-1, 3),
            branch_slots_RW=torch.tensor([table], dtype=torch.int64),
            branch_len_R=torch.tensor([W], dtype=torch.int32),
            branch_positions_RW=torch.tensor([places], dtype=torch.int32),
            ancestry_TC=torch.frombuffer(packed or bytearray(4), dtype=torch.int32)[: T * C].view(T, C),
            page_size=PAGE,
        )
        cache = [x.to(dtype) if kept is None else cached(x.to(dtype), kept) for x in (k, v)]
        before = torch.get_num_threads()
        torch.set_num_threads(threads)
        try:
            options = {name: x.to(device) if isinstance(x, torch.Tensor) else x for name, x in options.items()}
            there = [x.to(device) for x in (torch.stack(q).to(dtype), *cache)]
            out = tree_attention(*there, layout.to(device), scale=D**-0.5, impl=impl, **options).cpu()
        finally:
            torch.set_num_threads(before)
        return out.view(len(sequences), tokens, H, D)


@CACHES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_neighbours_and_where_keys_lie_do_not_show(heads, dtype, kept):
    """Lengths around the ends of blocks of 32 and cuts of 256 positions; trunks that end anywhere."""
    for seed, length in enumerate((1, 33, 97, 300) if heads[1] < 64 else (33,)):
        shared = length * 2 // 3
        sequences = Sequences(seed, length, shared, 9, heads)
        expected = [sequences.attend([], 0, dtype, kept, alone=i)[0] for i in range(9)]
        for count in (1, 3, 9):
            asked = sequences.rng.sample(range(9), count)
            for trunk in {0, shared, sequences.rng.randint(0, shared)}:
                out = sequences.attend(asked, trunk, dtype, kept, threads=1 + (count == 3))
                for i, row in zip(asked, out, strict=True):
                    assert row.isfinite().all() and row.equal(expected[i]), (length, trunk, asked, i)


SINKS = {"window": 300, "sinks_H": torch.tensor([1.5, -2.0, 0.0, 4.0, -0.5, 2.5])}
SLOPES = torch.tensor([0.5, 0.25, 0.1, 0.0, -0.01, 1.5])
SLOPED = {"slopes_H": SLOPES}, {"window": 40, "slopes_H": SLOPES.bfloat16()}
OPTIONS = {"window": 1}, {"window": 40}, {"window": 300}, {"cap": 2.0}, SINKS, *SLOPED


@CACHES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_windows_caps_sinks_and_slopes(options, dtype, kept):
    for seed, length in enumerate((70, 520)):
        sequences = Sequences(seed, length, length // 2, 4, (2, 6, 64))
        expected = [sequences.attend([], 0, dtype, kept, alone=i, **options)[0] for i in range(4)]
        for trunk in (0, length // 2):
            out = sequences.attend([2, 0, 3], trunk, dtype, kept, threads=2, **options)
            for i, row in zip([2, 0, 3], out, strict=True):
                assert row.equal(expected[i])


@CACHES
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_chunks_of_a_prompt(dtype, kept):
    """The last tokens of a prompt, one by one, in chunks, as a whole, and as a chain of branch nodes."""
    for length in (75, 300):
        sequences = Sequences(length, length, length, 1, (2, 6, 64))
        whole = sequences.attend([], 0, dtype, kept, alone=0, tokens=length, threads=2)[0]
        for tokens in (1, 7, 19):
            assert sequences.attend([], 0, dtype, kept, alone=0, tokens=tokens)[0].equal(whole[-tokens:])
            assert sequences.attend([0], length - tokens, dtype, kept, tokens=tokens)[0].equal(whole[-tokens:])
