"""Operators on rows in Triton against the definitions: the error is at most twice that of plain PyTorch in the same
dtype, both measured against float64. Interpreted where there is no GPU, and compiled by `make gpu`."""

import itertools
import math

import pytest
import torch

from kernels import rows
from kernels.kv_fp8 import DTYPE as FP8
from kernels.kv_kinds import floats, parts, row_width
from kernels.kv_write import HeadTransform, rotary_write
from kernels.rows import reference
from kernels.rows.checks import TopSums
from kernels.whole_graph import traceable
from tests.gpu_errors import FAST
from tests.marks import DEVICES, needs_interpreter

DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
# What a GPU's exponential and quotient add to functions, relative to them; of tanh they give what lacks to 1, 0.24.
ADDED = dict.fromkeys(("gelu_tanh", "silu", "quick_gelu", "clamped_swiglu"), 2 * FAST) | {"tanh": FAST / 2}


def draw(*shape, dtype=torch.float32, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def no_worse(found, plain, exact, fast=0.0):
    """Largest error and root mean square; or a step of rounding, where plain PyTorch is luckier than that.

    `fast`: what fast operations of a GPU may add to the error of an element, relative to it.
    """
    assert found.dtype == plain.dtype and found.shape == plain.shape and not found.isnan().any()
    error, allowed = ((x.cpu().double() - exact).abs() for x in (found, plain))
    error = (error - fast * exact.abs()).clamp(min=0)
    step = torch.finfo(found.dtype).eps * exact.abs().max() / 2
    assert error.max() <= 2 * allowed.max() + step
    assert error.square().mean().sqrt() <= 2 * allowed.square().mean().sqrt() + step / 8


def vectors(kind, width, dtype, seed):
    if kind == "none":
        return None
    return 1 + draw(width, dtype=dtype, seed=seed) / 4, draw(
        width, dtype=dtype, seed=seed + 1
    ) if kind == "ln" else None


def moved(x, device, dtype=None):
    """Tensors on a device, perhaps as another dtype, wherever they stand in tuples."""
    if isinstance(x, torch.Tensor):
        return x.to(device, dtype)
    return type(x)(moved(y, device, dtype) for y in x) if isinstance(x, tuple) else x


@DEVICES
@DTYPES
@pytest.mark.parametrize(("count", "width"), [(1, 1), (18, 100), (5, 1024)])
@pytest.mark.parametrize(("addends", "kind", "out_kind", "scale"), [
    (1, "rms", "none", 1.0), (2, "ln", "none", 1.0), (1, "none", "none", 0.22), (1, "rms", "rms", 1.0),
    (2, "rms", "ln", 3.0),
])  # fmt: skip
def test_add_norm(count, width, addends, kind, out_kind, scale, dtype, device):
    x, *more = (draw(count, 2 * width, dtype=dtype, seed=i)[:, :width] for i in range(1 + addends))
    norm, out_norm = vectors(kind, width, dtype, 5), vectors(out_kind, width, dtype, 7)
    run = lambda impl, where, dtype: rows.add_norm(  # noqa: E731
        moved(x, where, dtype), moved(tuple(more), where, dtype), moved(norm, where, dtype),
        moved(out_norm, where, dtype), scale=scale, eps=1e-5, impl=impl)  # fmt: skip
    for found, plain, exact in zip(*(run(*how) for how in (("triton", device, None), ("torch", "cpu", None),
                                                           ("torch", "cpu", torch.float64))), strict=True):  # fmt: skip
        no_worse(found, plain, exact)


@DEVICES
@DTYPES
@pytest.mark.parametrize("shape", [(17, 33), (3, 2, 40)], ids=str)
def test_norms(shape, dtype, device):
    x = draw(*shape[:-1], 2 * shape[-1], dtype=dtype)[..., : shape[-1]] * 3 + 1
    weight, bias = vectors("ln", shape[-1], dtype, 3)
    for name, of in (("rms_norm", (weight,)), ("layer_norm", (weight, bias))):
        found = getattr(rows, name)(*moved((x, *of), device), 1e-6, impl="triton")
        plain, exact = (getattr(reference, name)(*moved((x, *of), "cpu", kind), 1e-6) for kind in (None, torch.float64))
        no_worse(found, plain, exact)


@DEVICES
def test_vectors_of_norms_may_be_strided(device):
    x, strided = draw(3, 8).to(device), draw(8, 4, seed=1).to(device).unbind(1)
    found, expected = (
        (
            rows.rms_norm(x, one, 1e-5, impl="triton"),
            *rows.add_norm(x, (x,), (one, two), (three, four), eps=1e-5, impl="triton"),
        )
        for one, two, three, four in (strided, [y.contiguous() for y in strided])
    )
    assert all(y.equal(z) for y, z in zip(found, expected, strict=True))


@DEVICES
@DTYPES
@pytest.mark.parametrize("name", [*reference.ACTIVATIONS, *reference.GATES])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (18, 600)])
def test_activations(name, count, width, dtype, device):
    check_activations(name, count, width, dtype, device)


def check_activations(name, count, width, dtype, device, fast=None):
    """Compare with PyTorch; `fast`: whether operations may err as a GPU's (None: if it is one)."""
    fast = ADDED.get(name, 0.0) * (device == "cuda" if fast is None else fast)
    x = draw(count, 2 * width, dtype=dtype) * 4
    x[0, 0] = 200
    x[-1, -1] = -200
    both = (rows.activation, reference.activation), (rows.activation_mul, reference.activation_mul)
    for run, plain in both[name in reference.GATES :]:
        found = run(x.to(device), name, impl="triton")
        no_worse(found, plain(x, name), plain(x.double(), name), fast)
    bad = run(torch.full((1, 2), math.nan, device=device), name, impl="triton")
    assert bad.isnan().all()


@needs_interpreter
def test_errors_of_a_gpus_fast_operations_do_not_show(monkeypatch):
    """A row's factor, of which all elements have the error, and a function near 1, where PyTorch's is nearly exact."""
    from tests.interpreter import err_as_gpus

    err_as_gpus(monkeypatch)
    for norms in (("rms", "none"), ("ln", "none"), ("rms", "rms")):
        test_add_norm(1, 1, 1, *norms, 1.0, torch.float32, "cpu")
    test_activations("tanh", 18, 600, torch.float32, "cpu")


@needs_interpreter
@pytest.mark.parametrize("alike", [1.0, -1.0])
def test_fast_operations_add_what_they_may(alike, monkeypatch):
    """If all are off by most in one direction, some error is more than the tests allow elsewhere, and none is more than
    they allow on a GPU."""
    from tests.interpreter import err_as_gpus

    err_as_gpus(monkeypatch, alike)
    cases = [(check_activations, name, *size) for name in ("tanh", "clamped_swiglu") for size in ((1, 1), (18, 600))]
    cases += [(check_gates, 1, 1), (check_gates, 18, 600)]
    failed = 0
    for check, *case in cases:
        check(*case, torch.float32, "cpu", fast=True)
        try:
            check(*case, torch.float32, "cpu", fast=False)
        except AssertionError:
            failed += 1
    assert failed


@DEVICES
@DTYPES
@pytest.mark.parametrize("near", [-1e-6, -0.3, 0.0])
@pytest.mark.parametrize(("count", "width"), [(1, 1), (18, 600)])
def test_xielu(count, width, near, dtype, device):
    wide, curve = draw(count, width + 3, dtype=dtype) * 4, torch.tensor([0.7, 1.3, 0.5, near])
    wide[0, 0], wide[-1, width - 1] = 200, -200
    x = wide[:, :width]
    found = rows.xielu(x.to(device), curve.to(device), impl="triton")
    no_worse(found, reference.xielu(x, curve), reference.xielu(x.double(), curve))
    assert rows.xielu(torch.full((1, 2), math.nan, device=device), curve.to(device), impl="triton").isnan().all()


@DEVICES
@DTYPES
@pytest.mark.parametrize(("count", "width"), [(1, 1), (18, 600)])
def test_gates(count, width, dtype, device):
    check_gates(count, width, dtype, device)


def check_gates(count, width, dtype, device, fast=None):
    """Compare with PyTorch; `fast` as in `check_activations`."""
    fast = 2 * FAST * (device == "cuda" if fast is None else fast)
    wide = draw(count, 3 * width, dtype=dtype) * 4
    wide[0, width] = 200
    wide[-1, -1] = -40
    x, gate = wide[:, :width], wide[:, 2 * width :]
    for gates in (gate, gate[:, : max(1, width // 4)]):  # one for each element, one for each few
        for softplus in (False, True):
            found = rows.sigmoid_mul(x.to(device), gates.to(device), softplus, impl="triton")
            exact = reference.sigmoid_mul(x.double(), gates.double(), softplus)
            no_worse(found, reference.sigmoid_mul(x, gates, softplus), exact, fast)


@DEVICES
@DTYPES
@pytest.mark.parametrize(("count", "width", "size"), [(1, 100, 97), (18, 4500, 4400), (2, 129, 129)])
def test_log_softmax(count, width, size, dtype, device):
    x = draw(count, width + 3, dtype=dtype)[:, :width] * 5
    x[-1] += 500
    found, finite, peaks = rows.log_softmax(x.to(device), size, impl="triton")
    assert finite.dtype == torch.bool and finite.all() and (found[:, size:] == -math.inf).all()
    assert peaks.equal(reference.peaks(found)), "of what was stored, bit by bit"
    no_worse(found[:, :size], reference.log_softmax(x, size)[0][:, :size], x.double().log_softmax(-1)[:, :size])


@DEVICES
@pytest.mark.parametrize("place", [0, 4499])
def test_log_softmax_tells_rows_that_are_not_finite(place, device):
    x = draw(5, 4500).to(device)
    expected = rows.log_softmax(x, 4400, impl="triton")
    for row, bad in enumerate((math.nan, math.inf, -math.inf)):
        x[row + 1, place] = bad
    found, finite, peaks = rows.log_softmax(x, 4400, impl="triton")
    assert finite.tolist() == [True, False, False, False, True]
    assert found[finite].equal(expected[0][finite]) and peaks[finite].equal(expected[2][finite])


def ranked(x, sums, k):
    """The definition: the largest first, of equal ones the first."""
    values, places = (x + torch.tensor(sums).unsqueeze(1)).view(-1).sort(descending=True, stable=True)
    return torch.cat([values[:k].double(), places[:k].double(), torch.tensor([math.inf])])


SHAPES = [
    (1, 1, 1, 2048),
    (1, 100, 40, 2048),
    (33, 129, 7, 2048),
    (15, 300, 600, 2048),
    (2, 9, 30, 128),
    (33, 1000, 1, 128),  # by groups of blocks; the others of this tile by several tiles of blocks, and both
    (33, 1000, 40, 128),
    (5, 70000, 20, 128),
]


@DEVICES
@pytest.mark.parametrize("most", [0, 1000], ids=["sorted", "ranked"])
@pytest.mark.parametrize("many", [False, True], ids=["few ties", "many ties"])
@pytest.mark.parametrize(("count", "width", "k", "tile"), SHAPES)
def test_top_sums(count, width, k, tile, many, most, device, monkeypatch):
    """Bit by bit, in the order of places among equals, whether peaks are known or not, and however they are sorted."""
    monkeypatch.setattr("kernels.rows.triton_sums.TILE", tile)
    monkeypatch.setattr("kernels.rows.triton_sums.MOST_RANKED", most)
    x = draw(count, width)
    x = x.round() if many else x
    x[-1, width // 2 :] = -math.inf
    sums = (draw(count, seed=1) * 2).round().tolist()
    if count == 33:
        sums[5:30] = [-math.inf] * 25
    told = rows.top_sums(x.to(device), sums, k, None if many else reference.peaks(x).to(device), impl="triton")
    assert told.cpu().equal(ranked(x, sums, k))


@DEVICES
def test_top_sums_of_several_ranges(device):
    """A row with NaN may give anything, in its own range alone."""
    x, sums = draw(9, 300).round(), draw(9, seed=1).round()
    x[4] = math.nan
    wanted = [(slice(0, 3), TopSums(sums[:3].tolist(), 20)), (slice(3, 5), TopSums([0.0, 1.0], 700))]
    wanted += [(slice(5, 9), TopSums(sums[5:].to(device), 3)), (slice(1, 2), TopSums([-0.0], 40))]
    expected = [ranked(x[rows], torch.as_tensor(sums).tolist(), k) for rows, (sums, k) in wanted]
    for some in (wanted, wanted[2:3]):
        told = rows.top_sums_of(x.to(device), some, reference.peaks(x).to(device), impl="triton")
        assert [len(each) for each in told] == [2 * min(k, len(sums) * 300) + 1 for _, (sums, k) in some]
        for each, found in zip(some, told, strict=True):
            if each[0].start != 3:
                assert found.cpu().equal(expected[wanted.index(each)])
    rest = rows.top_sums_of(x.to(device), wanted, impl="torch")
    assert all(len(found) == len(right) for found, right in zip(rest, expected, strict=True))


TURNS = [  # norms, after the rotation, rotated thirds of dims, tables of angles, of all heads or of each its own
    ("none", False, 8, 2, False),
    ("rms", False, 8, 2, False),
    ("rms", True, 8, 2, False),
    ("ln", False, 4, 2, False),
    ("rms", False, 8, 4, False),
    ("rms", False, 0, 0, False),
    ("rms", False, 8, 2, True),
    ("ln", True, 4, 4, True),
    ("ln", False, 4, 2, "own"),
    ("rms", True, 8, 2, "own"),
    ("rms", False, 8, 2, "values"),
]


@DEVICES
@DTYPES
@pytest.mark.parametrize("kept", [None, torch.int8, FP8], ids=["as keys", "int8", "fp8"])
@pytest.mark.parametrize(("kind", "last", "dims", "tables", "whole"), TURNS)
def test_heads_are_normed_rotated_and_written(kind, last, dims, tables, whole, kept, dtype, device):
    """Rows are views of one product, as they are in a layer; 3 query heads to a key/value head, of an odd size."""
    (T, H, G, D), dims = (3 if whole else 7, 6, 2, 24), 3 * dims
    kinds, values = (whole is True, whole == "own", whole == "values"), whole == "values"
    split = lambda x: x.split([H, G, G], 1)  # noqa: E731
    x = draw(T, H + 2 * G, D, dtype=dtype)
    angles = tuple(draw(T, max(dims // 2, 1), seed=9 + i).repeat(1, 2).cos().to(dtype) for i in range(tables))
    norms = tuple(vectors(kind, D * (heads if any(kinds[:2]) else 1), dtype, i) for heads, i in ((H, 3), (G, 5)))
    slots = torch.tensor([4, 9, 2, 1, 7, 3, 11])[:T]

    def run(impl, where, own, kept=kept):
        caches = [torch.zeros(G, 12, row_width(D, kept or own), dtype=kept or own, device=where) for _ in "kv"]
        for part in (part for cache in caches for part in parts(cache)):
            part.fill_(5)
        turn = HeadTransform(
            moved(angles, where, own), *(moved(norm, where, own) for norm in norms), 1e-5, last, *kinds
        )
        q = rotary_write(*caches, *split(x.to(where, own)), slots.to(where), turn, impl=impl)
        return q, *caches

    found, plain = run("triton", device, dtype), run("reference", "cpu", dtype)
    exact = run("reference", "cpu", torch.float64, None)
    no_worse(found[0], plain[0], exact[0])
    for got, want, right in zip(found[1:], plain[1:], exact[1:], strict=True):
        got = got.cpu()
        untouched = [s for s in range(12) if s not in slots.tolist()]
        assert all(part[:, untouched].eq(5).all() for part in parts(got))
        if kept is None:
            no_worse(got[:, slots], want[:, slots], right[:, slots])
        else:
            right = right[:, slots]
            step = right.abs() / 8 if kept == FP8 else right.abs().amax(-1, keepdim=True) / 127
            error = (floats(parts(got), torch.float32)[:, slots] - right).abs()
            assert (error <= step * 0.52 + 3 * torch.finfo(dtype).eps).all()
    same = all(x.equal(y) for x, y in zip(parts(found[2].cpu()), parts(plain[2]), strict=True))
    assert same or values, "values as they are"


@DEVICES
@pytest.mark.parametrize("norm", ["none", "rms", "ln"])
def test_compilers_see_heads_turned_and_written_as_an_operator(norm, device):
    """One that says what it writes to, and whose result is made of empty tensors as it is of real ones."""
    T, H, G, D = 3, 4, 2, 8
    q, k, v = draw(T, H + 2 * G, D).to(device).split([H, G, G], 1)
    angles = tuple(draw(T, D // 2, seed=i).repeat(1, 2).to(device) for i in (1, 2))
    q_norm, k_norm = (moved(vectors(norm, D, torch.float32, i), device, torch.float32) for i in (3, 5))
    slots, turn = torch.tensor([4, 9, 2], device=device), HeadTransform(angles, q_norm, k_norm, 1e-5)

    def run(k_GSD, v_GSD):
        return rotary_write(k_GSD, v_GSD, q, k, v, slots, turn, impl="triton")

    traceable()
    found, wanted = ([torch.zeros(G, 12, D, device=device) for _ in "kv"] for _ in range(2))
    out = torch.compile(run, backend="aot_eager", fullgraph=True)(*found)
    assert all(x.equal(y) for x, y in zip((out, *found), (run(*wanted), *wanted), strict=True))
    assert found[0][:, slots].ne(0).any()
    norms = [x for pair in (q_norm, k_norm) for x in (pair or (None, None))]
    operator, given = torch.ops.coppice.rotary_write_triton.default, (*wanted, q, k, v, slots, angles, *norms)
    torch.library.opcheck(operator, (*given, *turn[3:]), test_utils=("test_schema", "test_faketensor"))


def test_fronts_check_their_arguments():
    x, w = torch.zeros(2, 8), torch.ones(8)
    for addends, norm, message in (
        ((), None, "one or two"),
        ((x[:, :4],), None, "addends"),
        ((x,), (w[:4], None), "weight_E"),
    ):
        with pytest.raises(ValueError, match=message):
            rows.add_norm(x, addends, norm, eps=1e-5, impl="torch")
    q, cache, slots = torch.zeros(2, 2, 8), torch.zeros(2, 4, 8), torch.tensor([2, 3])
    cos = torch.ones(2, 8)
    short = w[:4], None
    for turn, message in (
        (HeadTransform((cos,)), "angles"),
        (HeadTransform((cos[:, :3], cos[:, :3])), "even number"),
        (HeadTransform(q_norm=(w, None)), "both or none"),
        (HeadTransform((), short, short), "q_norm"),
    ):
        with pytest.raises(ValueError, match=message):
            rotary_write(cache, cache.clone(), q, q, q, slots, turn)
    with pytest.raises(ValueError, match="reference or triton"):
        rotary_write(cache, cache.clone(), q, q, q, slots, HeadTransform(), impl="cpp")
    with pytest.raises(ValueError, match="slots_T: expected slots from 0 to 3, got 8"):
        rotary_write(cache, cache.clone(), q, q, q, slots + 6, HeadTransform())
    assert all(a.equal(b) for a, b in itertools.pairwise([rows.add_norm(x, [x], None, eps=0.0, impl="torch")[0], x]))


@DEVICES
@pytest.mark.parametrize("ends", [(), (3,), (5, 0, 9, 3), tuple(range(10))])
@pytest.mark.parametrize(("words", "joined"), [(0, True), (3, True), (3, False)])
def test_next_nodes(ends, words, joined, device):
    """Searches of one, of several and of many sums, numbers that are not finite among them; slots of several words."""
    vocab_size, draws = 10, torch.Generator().manual_seed(len(ends))
    words_TC = torch.randint(-(2**31), 2**31 - 1, (21, words), dtype=torch.int32, generator=draws)
    numbers, wanted = [], []
    for width, k, parents in ((1, 1, [4]), (3, 5, [0, 2]), (70, 150, [*range(5, 20)])):
        values = torch.randn(k, generator=draws).sort(descending=True).values
        places = torch.randint(len(parents) * vocab_size, (k,), generator=draws).double()
        if k == 5:
            values[-1], places[2], places[3] = -math.inf, math.nan, math.inf
        numbers.append(torch.cat([values.double(), places, torch.zeros(1)]).to(device))
        live_C = torch.randint(-(2**31), 2**31 - 1, (words,), generator=draws).tolist()
        wanted.append(rows.NextNodes(width, frozenset(ends), parents, live_C))
    if joined:
        numbers = [*torch.cat(numbers).split([len(x) for x in numbers])]
    strided_TC = torch.stack([words_TC, words_TC], 1).to(device)[:, 0]
    found = rows.next_nodes(numbers, wanted, strided_TC, vocab_size, impl="triton")
    expected = reference.next_nodes([x.cpu() for x in numbers], wanted, words_TC, vocab_size)
    assert [x.tolist() for x in found] == [x.tolist() for x in expected]


@DEVICES
@pytest.mark.parametrize("impl", ["torch", "triton"])
def test_log_softmax_writes_where_it_is_told(impl, device):
    x = draw(3, 300).to(device)
    expected = rows.log_softmax(x, 290, impl=impl)
    places = [torch.zeros(5, 300), torch.zeros(5, dtype=torch.bool), torch.zeros(5, 3)]
    out = tuple(place.to(device)[:3] for place in places)
    found = rows.log_softmax(x, 290, impl=impl, out=out)
    for place, result, wanted in zip(out, found, expected, strict=True):
        assert wanted is None or (result is place and torch.equal(place, wanted))
    for i, wrong in enumerate((out[0][:2], out[1].float(), out[2][:, :2])):
        with pytest.raises(ValueError, match="out"):
            rows.log_softmax(x, 290, impl=impl, out=(*out[:i], wrong, *out[i + 1 :]))
