"""Short convolutions: implementations against the definition, the slots of ancestors, what is refused."""

import random
import re

import pytest
import torch

from engine.cache.pool import PagePool
from engine.cache.tree import TokenTree
from engine.step.packing import Chunk, pack
from kernels import cpp
from kernels.kv_write import kv_copier
from kernels.layout import NULL_SLOT, TRASH_SLOT
from kernels.short_conv import short_conv
from models.shape import ModelShape
from tests.invariants import check_tree
from tests.kernels.test_checks import refusals
from tests.marks import INTERPRETED, on_gpu

FAST = ["torch", *([] if cpp.why_not() else ["cpp"]), *(["triton"] if INTERPRETED else [])]
ANYWHERE = [*FAST, pytest.param("cuda", marks=on_gpu)]  # by Triton
SLOTS = 60


def arguments(seed=0, tokens=9, width=37, taps=3, dtype=torch.float32, kept=None, bias=True):
    """A pass over a cache in which NaN stands wherever nobody may read: tokens follow each other or older slots."""
    draw, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    x, weight, vector = (torch.randn(n, generator=draw) for n in (tokens * 3 * width, taps * width, width))
    rows = torch.full((SLOTS, width), float("nan"))
    slots, ancestors, older = rng.sample(range(20, SLOTS), tokens), [], list(range(2, 20))
    rows[2:20] = torch.randn(18, width, generator=draw)
    rows[NULL_SLOT] = 0
    for t in range(tokens):
        path = rng.sample(older + slots[:t], taps - 1)
        ancestors.append(path[: rng.randint(0, taps - 1)])
        ancestors[-1] += [NULL_SLOT] * (taps - 1 - len(ancestors[-1]))
    return {
        "x_TF": x.view(tokens, -1).to(dtype),
        "weight_KE": weight.view(taps, -1).to(dtype),
        "bias_E": vector.to(dtype) if bias else None,
        "rows_SE": rows.to(kept or dtype),
        "slots_T": torch.tensor(slots),
        "ancestors_TN": torch.tensor(ancestors, dtype=torch.int64).view(tokens, taps - 1),
    }


def run(impl, options):
    if impl == "cuda":
        moved = {name: x if x is None else x.cuda() for name, x in options.items()}
        return [x.cpu() for x in run("triton", moved)]
    rows = options["rows_SE"].clone()
    return short_conv(**options | {"rows_SE": rows}, impl=impl), rows


@pytest.mark.parametrize("impl", ANYWHERE)
@pytest.mark.parametrize(
    ("dtype", "kept"),
    [(torch.float32, None), (torch.bfloat16, None), (torch.float16, None), (torch.float32, torch.bfloat16)],
)
@pytest.mark.parametrize("shape", [{}, {"taps": 1}, {"taps": 5, "bias": False}, {"width": 1, "tokens": 1}])
def test_implementations_equal_the_definition(impl, dtype, kept, shape):
    options = arguments(1, dtype=dtype, kept=kept, **shape)
    expected, rows = run("reference", options)
    found, written = run(impl, options)
    assert expected.isfinite().all()
    off = 0.0
    if impl == "triton" and torch.bfloat16 in (dtype, kept):  # its interpreter cuts bits off instead of rounding
        off = torch.finfo(torch.bfloat16).eps
    torch.testing.assert_close(written.float(), rows.float(), rtol=2 * off, atol=0, equal_nan=True)
    torch.testing.assert_close(found, expected, rtol=2 * torch.finfo(dtype).eps, atol=1e-5 + 20 * off)


def test_the_definition_is_a_convolution():
    """For one sequence it is torch's, gated on both sides."""
    options = arguments(2, tokens=20, taps=4)
    options["slots_T"], options["rows_SE"] = torch.arange(30, 50), torch.zeros(SLOTS, 37)
    options["ancestors_TN"] = torch.tensor([[30 + t - i if t >= i else 0 for i in (1, 2, 3)] for t in range(20)])
    b, c, x = options["x_TF"].double().chunk(3, -1)
    weight, bias = options["weight_KE"].double(), options["bias_E"].double()
    mixed = torch.nn.functional.conv1d((b * x).T, weight.T.unsqueeze(1), bias, padding=3, groups=37)[:, :20]
    torch.testing.assert_close(run("reference", options)[0].double(), c * mixed.T, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("impl", ANYWHERE)
def test_padding_harms_nobody(impl):
    """Padding tokens of NaN share a slot that nobody reads."""
    options = arguments(3)
    alone, _ = run(impl, options)
    nothing = torch.full((4,), TRASH_SLOT)
    options["x_TF"] = torch.cat([options["x_TF"], torch.full((4, 111), float("nan"))])
    options["slots_T"] = torch.cat([options["slots_T"], nothing])
    options["ancestors_TN"] = torch.cat([options["ancestors_TN"], torch.zeros(4, 2, dtype=torch.int64)])
    found, rows = run(impl, options)
    assert found[:9].equal(alone) and rows[NULL_SLOT].eq(0).all()


@pytest.mark.parametrize(
    ("name", "spoil"),
    [
        ("x_TF", lambda x: x[:, 1:]),
        ("x_TF", lambda x: x.long()),
        ("weight_KE", lambda x: x.double()),
        ("weight_KE", lambda x: x[:0]),
        ("weight_KE", lambda x: x.T.contiguous().T),
        ("bias_E", lambda x: x[1:]),
        ("rows_SE", lambda x: x[:, 1:].contiguous()),
        ("rows_SE", lambda x: x.long()),
        ("rows_SE", lambda x: x.T.contiguous().T),
        ("slots_T", lambda x: x.int()),
        ("slots_T", lambda x: x[1:]),
        ("slots_T", lambda x: x + SLOTS),
        ("slots_T", lambda x: -x),
        ("ancestors_TN", lambda x: x[:, 1:].contiguous()),
        ("ancestors_TN", lambda x: x.int()),
        ("ancestors_TN", lambda x: x - 1),
        ("ancestors_TN", lambda x: x + 10**9),
    ],
)
def test_what_is_refused(name, spoil):
    options = arguments(4)
    options[name] = spoil(options[name])
    before = options["rows_SE"].clone()
    said = refusals(lambda impl: short_conv(**options, impl=impl), ["reference", *FAST])
    assert re.match(r"(x_TF|weight_KE|bias_E|rows_SE|slots_T|ancestors_TN): expected ", said)
    assert torch.equal(before.nan_to_num(7), options["rows_SE"].nan_to_num(7))


def test_an_unknown_implementation():
    with pytest.raises(ValueError, match="impl: expected one of reference, torch, cpp, triton, got 'c'"):
        short_conv(**arguments(), impl="c")


@pytest.mark.parametrize("page", [1, 4, 16])
def test_ancestors(page):
    """Ancestors of tokens of prompts and branches, before and after promotion, several trees and padding in a pass."""
    rng = random.Random(page)
    pool = PagePool(ModelShape(1, 1, 1, 1, None), 1000 // page, page)
    trees = [TokenTree(pool, list(range(n))) for n in (1, 2, 13)]
    live = [[tree.root] for tree in trees]
    for step in range(6):
        chunks = []
        for tree, nodes in zip(trees, live, strict=True):
            nodes += [n for _ in range(5) for n in tree.grow([rng.choice(nodes)], [rng.randrange(9)])]
            trunk, fresh = tree.pending(nodes)
            chunks.append(Chunk(tree, trunk, fresh, tree.allocate(trunk, fresh)))
        layout = pack(chunks, page, ancestors=4, token_buckets=(64, 256)).layout
        assert layout.ancestors_TN is not None and layout.ancestors_TN.dtype == torch.int64
        expected = []
        for chunk in chunks:
            tree, table = chunk.tree, chunk.tree.slots.table[0]
            ends = range(tree.trunk.cached - chunk.trunk_tokens, tree.trunk.cached)
            in_trunk = [tree.trunk.slot(i, page) for i in range(tree.trunk.cached)]
            paths = [in_trunk[:end] for end in ends]
            for node in chunk.nodes:
                path, above = [], tree.parent(node)
                while tree._slot[above] >= 0:
                    path.append(table[tree._slot[above]])
                    above = tree.parent(above)
                paths.append(in_trunk + path[::-1])
            expected += [[*path[::-1], 0, 0, 0, 0][:4] for path in paths]
        padding = len(layout.positions_T) - len(expected)
        assert pack(chunks, page).layout.ancestors_TN is None
        assert layout.ancestors_TN.tolist() == expected + [[0] * 4] * padding
        for i, tree in enumerate(trees):
            if step % 2:
                tree.keep(rng.sample([n for n in live[i] if tree.is_live(n)], rng.choice([1, 2, 3])))
            live[i] = [n for n in live[i] if tree.is_live(n)]
            check_tree(tree)


def test_copies_of_one_tensor():
    cache = torch.randn(3, 1, 20, 7)
    before = cache.clone()
    kv_copier(cache)([3, 4, 5], [4, 5, 19])
    expected = before.clone()
    expected[:, :, [4, 5, 19]] = before[:, :, [3, 4, 5]]
    assert cache.equal(expected)
