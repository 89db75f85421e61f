"""Packed matrices whose elements lie in groups: against the definition."""

import pytest
import torch

from kernels import cpp
from kernels.linear import Groups, Packed, Steps, linear, pack, pack_groups, reference
from kernels.linear.panels import GROUP_STEPS, LEAST_ONLY, SHARES, TABLES, WHOLE, WITHOUT_ZEROS, ZEROS
from kernels.whole_graph import traceable

pytestmark = pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")

SIZES = [
    (64, 64, 32),
    (100, 72, 24),
    (257, 1000, 40),
    (65, 2048, 128),
    (130, 5, 5),
    (300, 512, 512),
    (70, 100, 16),
    (130, 96, 32),
]
COUNTS = (1, 2, 3, 5, 15, 16, 17, 61, 130)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# The largest codes. The other kinds that have tables are multiplied like iq4 and iq2.
MOST = {
    "int1": 1,
    "int2": 3,
    "int4": 15,
    "int8": 255,
    "float8": 0x7E,
    "float4": 15,
    "iq4": 15,
    "iq2": 15,
    "int5": 31,
    "int6": 63,
}
LARGEST = MOST | {"int1": 2, "float8": 448, "float4": 12, "iq4": 127}  # numbers
ROUNDED = [(kind, 127) for kind in MOST if kind != "float8"]


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def matrix(kind, outs, width, size, *, zeros=False, ordered=False, levels=0.0, dtype=torch.float16):
    """A packed matrix of random codes, and the codes; `zeros`: of groups, or "least" for minimums."""
    if kind in LEAST_ONLY and zeros is True:
        pytest.skip(f"{kind} has no zeros")
    if kind in WHOLE and (width % GROUP_STEPS[kind][0] or size % GROUP_STEPS[kind][0]):
        pytest.skip(f"rows and groups of {kind} are whole steps")
    random = torch.Generator().manual_seed(outs * width)
    codes_OI = torch.randint(0, MOST.get(kind, 15) + 1, (outs, width), dtype=torch.uint8, generator=random)
    if kind == "float8":
        codes_OI |= torch.randint(0, 2, (outs, width), dtype=torch.uint8, generator=random) << 7
    scale_OG = ((draw(outs, -(-width // size), seed=1).abs() + 0.5) / 64).to(dtype).float()  # sums fit into float16
    if kind == "float4":
        scale_OG, dtype = scale_OG.log2().round().exp2(), torch.uint8
    zero_OG = torch.randint(MOST[kind] + 2, scale_OG.shape, generator=random).float() if zeros is True else None
    least_OG = draw(*scale_OG.shape, seed=3).to(dtype).float() if zeros == "least" else None
    values = codes_OI, scale_OG, zero_OG, least_OG
    blocks = [[x if x is None else x[rows] for x in values] for rows in (slice(9), slice(9, None))]
    panels, groups = pack_groups(blocks, kind, outs, width, size)
    assert groups.scale.dtype == dtype
    order_I = torch.randperm(width, generator=random).int() if ordered else None
    return Packed(panels, outs, width, groups=groups, order_I=order_I, levels=levels), codes_OI


@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize(("outs", "width", "size"), SIZES)
def test_packing_keeps_every_code(kind, outs, width, size):
    packed, codes_OI = matrix(kind, outs, width, size)
    assert reference.unpack(packed).equal(codes_OI)


@pytest.mark.parametrize("zeros", [False, True, "least"])
@pytest.mark.parametrize("kind", ["int1", "int2", "int4", "int5", "int6", "int8"])
@pytest.mark.parametrize(("outs", "width", "size"), SIZES)
def test_some_outputs_of_a_matrix_are_those_of_the_whole(kind, zeros, outs, width, size):
    packed, codes_OI = matrix(kind, outs, width, size, zeros=zeros, ordered=True)
    ids, x = torch.randperm(outs, generator=torch.Generator().manual_seed(1))[:70], draw(5, width)
    some = packed.rows(ids)
    assert reference.unpack(some).equal(codes_OI[ids])
    assert linear(x, some).equal(linear(x, packed)[:, ids])


@pytest.mark.parametrize("of_x", DTYPES, ids=str)
@pytest.mark.parametrize(("zeros", "ordered"), [
    (False, False), (True, False), ("least", False), (False, True), ("least", True),
])  # fmt: skip
@pytest.mark.parametrize("kind", MOST)
@pytest.mark.parametrize(("outs", "width", "size"), SIZES)
def test_floats_are_multiplied_to_rounding(kind, of_x, zeros, ordered, outs, width, size):
    if kind in WITHOUT_ZEROS and zeros:
        pytest.skip(f"{kind} has no zeros")
    packed, _ = matrix(kind, outs, width, size, zeros=zeros, ordered=ordered)
    weight_OI, bias_O = reference.unpacked(packed).double(), draw(outs, seed=2).to(of_x)
    codes = packed.groups.values()[0].max() * LARGEST[kind]
    for count in COUNTS:
        x = draw(count, width, seed=10 + count).to(of_x)
        found, exact = linear(x, packed, bias_O), reference.linear(x.double(), packed, bias_O)
        sizes = x.double().abs() @ weight_OI.abs().T + 4
        if zeros:  # the sum with the codes is larger than what it stands for
            sizes += x.double().abs().sum(1, keepdim=True) * codes
        allowed = torch.finfo(torch.float32).eps * 16 * sizes + torch.finfo(of_x).eps * exact.abs()
        assert found.dtype == of_x and ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("of_x", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "zeros", "ordered"), [
    *((kind, *how) for kind in ("int1", "int2", "int4", "int5", "int6", "int8") for how in (
        (False, False), (True, False), (True, True), ("least", False),
    )),
    ("float4", False, False), ("float4", False, True),
])  # fmt: skip
@pytest.mark.parametrize(("outs", "width", "size"), SIZES)
def test_rounded_rows_are_multiplied_exactly_in_a_group(of_x, kind, zeros, ordered, outs, width, size):
    """Rows whose steps are whole numbers, which all ways to round agree on."""
    packed, _ = matrix(kind, outs, width, size, zeros=zeros, ordered=ordered, levels=127)
    weight_OI, bias_O = reference.unpacked(packed).double(), draw(outs, seed=2).to(of_x)
    for count in COUNTS:
        x = (draw(count, width, seed=10 + count) * 30).round().clamp(-127, 127)
        largest = packed.order_I[::8] if ordered else torch.arange(0, width, 8)  # in all chunks of all groups
        x[:, largest] = torch.where(largest % 16 == 0, 127.0, -127.0)  # of both signs: sums fit into float16
        found, exact = linear(x.to(of_x), packed, bias_O), reference.linear(x.double(), packed, bias_O)
        sizes = x.double().abs() @ weight_OI.abs().T + 4
        if zeros and kind == "int8":  # the sum with the codes is larger than what it stands for
            sizes += x.double().abs().sum(1, keepdim=True) * packed.groups.values()[0].max() * LARGEST[kind]
        allowed = torch.finfo(torch.float32).eps * 4 * sizes + torch.finfo(of_x).eps * exact.abs()
        assert ((found.double() - exact).abs() <= allowed).all()


@pytest.mark.parametrize("zeros", [False, True, "least"])
@pytest.mark.parametrize("kind", ["int1", "int2", "int4", "int5", "int6", "int8", "float4"])
@pytest.mark.parametrize(("outs", "width", "size"), SIZES)
def test_rows_are_rounded_as_they_are_defined_to_be(kind, zeros, outs, width, size):
    """By the largest of each 32 of a group: the definition in float64 rounds a few that lie on ties differently."""
    packed, _ = matrix(kind, outs, width, size, zeros=kind != "float4" and zeros, levels=127)
    assert packed.rounding() is packed
    plain = Packed(packed.panels, outs, width, groups=packed.groups)
    assert plain.rounding().levels == 127 and plain.levels == 0
    x = draw(15, width, seed=5)
    found, exact, unrounded = linear(x, plain.rounding()), reference.linear(x.double(), packed), linear(x, plain)
    spread = exact.std()
    assert (found - exact).abs().max() < 1e-3 * spread < 4e-3 * spread < (found - unrounded).abs().max()


@pytest.mark.parametrize("kind", ["int1", "int2", "int4", "int5", "int6"])
def test_the_largest_products_of_few_bits_do_not_overflow(kind):
    width, most = 256, LARGEST[kind]
    codes_OI = torch.tensor([[MOST[kind]], [0]], dtype=torch.uint8).expand(2, width)
    none = [None, torch.zeros(2, 8)] if kind in LEAST_ONLY else [torch.zeros(2, 8), None]  # so that numbers are codes
    panels, groups = pack_groups([(codes_OI, torch.ones(2, 8), *none)], kind, 2, width, 32)
    packed = Packed(panels, 2, width, groups=groups, levels=127)
    assert linear(torch.ones(1, width), packed).tolist() == [[most * width, 0]]
    assert linear(-torch.ones(1, width), packed).tolist() == [[-most * width, 0]]


@pytest.mark.parametrize("kind", ["int1", "int2", "int4", "int5", "int6", "int8"])
def test_the_largest_products_of_floats_do_not_overflow(kind):
    """In the widest rows, also where a group is a whole row and its sum is multiplied by a zero."""
    width, most = 1 << 16, LARGEST[kind]
    codes_OI = torch.tensor([[MOST[kind]], [0]], dtype=torch.uint8).expand(2, width)
    middle = ZEROS[kind] if kind in LEAST_ONLY else 0
    for size, zero in ((32, middle), (width, middle), (width, middle or most)):
        scale_OG = torch.ones(2, width // size)
        zero_OG = None if kind in LEAST_ONLY else scale_OG * zero
        panels, groups = pack_groups([(codes_OI, scale_OG, zero_OG)], kind, 2, width, size)
        packed, exact = Packed(panels, 2, width, groups=groups), torch.tensor([most - zero, -zero]) * width
        for x in (1.0, -1.0, 2.0**90):
            found = linear(torch.full((1, width), x), packed)[0] / x
            assert (found - exact).abs().max() <= 1e-4 * most * width  # 2,048 chunks are added in float32


@pytest.mark.parametrize("kind", ["int1", "int2", "int4", "int5", "int6", "int8"])
def test_digits_of_whole_steps(kind):
    """Every digit at its ends: of a row of whole numbers up to 0x7f7f7f each counts as it is, however small."""
    codes_OI = torch.randint(1, MOST[kind] + 1, (70, 96), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    scale_OG = torch.tensor([1.0, 1.0, 0.0]).expand(70, 3)  # the last group's holds the largest number of a row
    none = [None, torch.zeros(70, 3)] if kind in LEAST_ONLY else [torch.zeros(70, 3), None]  # so that numbers are codes
    panels, groups = pack_groups([(codes_OI, scale_OG, *none)], kind, 70, 96, 32)
    packed, x = Packed(panels, 70, 96, groups=groups), torch.zeros(16, 96)
    ends = torch.tensor([0x7F7F7F, 0x7F7E80, 0x8080, 0x7F80, 0x7F7F, 0x80, 0x7F, 1])
    for row, end in enumerate([*ends, *-ends]):
        x[row, 4 * row], x[row, 95] = end, -0x7F7F7F
    found, exact = linear(x, packed), reference.linear(x.double(), packed)
    allowed = torch.finfo(torch.float32).eps * 2 * LARGEST[kind] * x[:, :95].abs().amax(1, keepdim=True)
    assert ((found - exact).abs() <= allowed).all()


def test_every_number_of_float8():
    codes_OI = torch.arange(256, dtype=torch.uint8).view(1, -1)
    codes_OI[codes_OI & 0x7F == 0x7F] = 0
    panels, groups = pack_groups([(codes_OI, torch.ones(1, 1), None)], "float8", 1, 256, 256)
    found = linear(torch.eye(256), Packed(panels, 1, 256, groups=groups))
    assert found.flatten().equal(codes_OI.view(torch.float8_e4m3fn).float().flatten())


def test_every_number_of_float4():
    """With scales from the smallest to the largest: twice e2m1, half the scale."""
    sizes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    codes_OI, exponents = torch.arange(16, dtype=torch.uint8).expand(7, 16), torch.tensor([0, 1, 2, 100, 127, 128, 255])
    scale_OG = (exponents.double() - 128).exp2().unsqueeze(1)
    panels, groups = pack_groups([(codes_OI, scale_OG.float())], "float4", 7, 16, 16)
    packed = Packed(panels, 7, 16, groups=groups)
    assert groups.scale[0, 0, :7].equal(exponents.byte()) and panels.shape == (4, 2, 16, 4)
    exact = (torch.cat([sizes, -sizes]) * 2 * scale_OG).float()
    assert reference.unpacked(packed).equal(exact)
    found = linear(torch.eye(16), packed).T[:6]  # products with steps of rows leave the range of floats by the last
    assert ((found - exact[:6]).abs() <= 256 * torch.finfo(torch.float32).eps * scale_OG[:6]).all()


@pytest.mark.parametrize("of_x", DTYPES, ids=str)
@pytest.mark.parametrize("kind", TABLES)
def test_numbers_of_a_table_are_int8_of_the_same_to_the_bit(kind, of_x):
    whole = torch.tensor([number + 128 for number in TABLES[kind]]).byte()
    for outs, width, size in SIZES:
        packed, codes_OI = matrix(kind, outs, width, size, ordered=True)
        scale_OG = packed.groups.values()[0].transpose(1, 2).flatten(0, 1)[:outs]
        scale_OG = scale_OG * SHARES.get(kind, 1)
        panels, groups = pack_groups([(whole[codes_OI.int()], scale_OG)], "int8", outs, width, size)
        wide, x = Packed(panels, outs, width, groups=groups, order_I=packed.order_I), draw(130, width).to(of_x)
        for count in COUNTS:
            assert linear(x[:count], packed).equal(linear(x[:count], wide))
            assert linear(x[:count], packed.rounding()).equal(linear(x[:count], wide.rounding()))


def test_every_number_of_iq4():
    exact = [-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113]  # kvalues_iq4nl of ggml
    scale_OG = torch.tensor([[1.0], [0.5], [-3.0]])
    panels, groups = pack_groups([(torch.arange(16, dtype=torch.uint8).expand(3, 16), scale_OG)], "iq4", 3, 16, 16)
    packed = Packed(panels, 3, 16, groups=groups)
    assert panels.shape == (4, 2, 16, 4) and groups.scale.dtype == torch.float16
    assert reference.unpacked(packed).equal(torch.tensor(exact) * scale_OG)
    assert (linear(torch.eye(16), packed).T - torch.tensor(exact) * scale_OG).abs().max() <= 1e-4


@pytest.mark.parametrize("of_x", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["int1", "int2", "int4", "int5", "int8", "float4"])
@pytest.mark.parametrize("ordered", [False, True])
def test_rows_may_be_rounded_by_their_own_largest_magnitude(kind, ordered, of_x):
    width, size = (512, 64) if kind in WHOLE else (520, 40)
    plain, _ = matrix(kind, 96, width, size, ordered=ordered and kind not in WHOLE)
    packed = Packed(plain.panels, 96, width, groups=plain.groups, order_I=plain.order_I, levels=127, by_row=True)
    x = draw(20, width, seed=3).to(of_x)
    x[1], x[2] = 0, x[2] * 1e-10
    x[:, 7] *= 20  # the others have few steps
    found, exact = linear(x, packed), reference.linear(x.double(), packed)
    assert (found - exact).abs().max() <= (1e-5 + torch.finfo(of_x).eps) * exact.abs().max()
    assert (found - linear(x, plain.rounding())).norm() > 1e-2 * exact.norm()
    assert not found[1:3].any() and packed.rounding() is packed
    for count in COUNTS[:-1]:
        assert linear(x[:count], packed).equal(found[:count])


def test_scales_of_float4_are_powers_of_two():
    with pytest.raises(ValueError, match="scale: expected powers of two"):
        pack_groups([(torch.zeros(1, 8, dtype=torch.uint8), torch.full((1, 1), 3.0))], "float4", 1, 8, 8)


def test_int8_of_other_levels():
    """127.5, whose steps go from -128 to 127."""
    weight_OI = (draw(64, 100, seed=1) * 40).clamp(-128, 127).to(torch.int8)
    packed = Packed(pack([weight_OI], torch.int8, 64, 100), 64, 100, torch.rand(64) / 127.5, levels=127.5)
    x = draw(5, 100)
    x[0], x[1, 0], x[2, 0] = 0, 127.5, -127.5
    steps, _ = reference.quantize(x[1:3, :64], 127.5)
    assert (steps[0].max(), steps[1].min()) == (127, -128)
    found, exact = linear(x, packed), reference.linear(x.double(), packed)
    assert found[0].eq(0).all() and (found[1:] - exact[1:]).abs().max() <= 1e-5 * exact[1:].abs().max()


@pytest.mark.parametrize("of_x", DTYPES, ids=str)
@pytest.mark.parametrize(("kind", "levels"), [*((kind, 0) for kind in MOST), *ROUNDED])
def test_rows_do_not_depend_on_those_beside_them(kind, levels, of_x):
    width, size = (512, 64) if kind in WHOLE else (520, 40)
    packed, _ = matrix(kind, 96, width, size, zeros=kind not in (*WITHOUT_ZEROS, *LEAST_ONLY), levels=levels)
    x = draw(130, width, seed=1).to(of_x)
    whole = linear(x, packed)
    for count in COUNTS:
        assert linear(x[:count], packed).equal(whole[:count])


def test_scales_that_float16_lacks_stay_float32():
    packed, _ = matrix("int4", 64, 64, 32, dtype=torch.float32, zeros=True)
    assert packed.groups.zero.dtype == torch.float32
    x = draw(3, 64)
    assert (linear(x, packed) - reference.linear(x, packed)).abs().max() < 1e-3


def test_what_is_not_finite_stays_in_its_row():
    for kind, levels in (("int4", 0), *ROUNDED):
        width, size = (64, 32) if kind in WHOLE else (40, 8)
        packed, _ = matrix(kind, 70, width, size, zeros=kind not in (*WITHOUT_ZEROS, *LEAST_ONLY), levels=levels)
        x = draw(6, width)
        x[1, 3], x[4, width - 1] = float("nan"), float("inf")
        assert linear(x, packed).isfinite().all(-1).tolist() == [True, False, True, True, False, True]
        if levels:  # beyond the steps, infinity is the last of them
            stepped = Packed(packed.panels, 70, width, groups=packed.groups, levels=levels, steps=Steps(0.1))
            assert linear(x, stepped).isfinite().all(-1).tolist() == [True, False, True, True, True, True]


@pytest.mark.parametrize("kind", WHOLE)
def test_rows_of_other_widths_than_whole_steps(kind):
    codes_OI, scale_OG = torch.zeros(4, 24, dtype=torch.uint8), torch.ones(4, 1)
    panels, groups = pack_groups([(codes_OI, scale_OG)], kind, 4, 24, 24)
    with pytest.raises(ValueError, match=f"width: expected a multiple of .* for {kind}, got 24"):
        Packed(panels, 4, 24, groups=groups)


def test_compilers_see_an_operator():
    packed, _ = matrix("int4", 64, 64, 32, zeros=True, ordered=True, levels=127)
    x = draw(3, 64)
    traceable()
    run = torch.compile(lambda x: linear(x, packed) * 2, backend="eager", fullgraph=True)
    assert run(x).equal(linear(x, packed) * 2)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 20}, "multiple of 8, or the width 64, got 20"),
        ({"kind": "int7"}, "int7"),
        ({"scale": torch.ones(4, 2, 16, dtype=torch.float64)}, "float16 or float32"),
        ({"scale": torch.ones(4, 3, 16)}, "scale"),
        ({"zero": torch.ones(4, 2, 16, dtype=torch.float32)}, "zero"),
        ({"kind": "float4"}, "scale: expected uint8"),
    ],
)
def test_groups_that_do_not_fit(change, message):
    packed, _ = matrix("int4", 64, 64, 32)
    with pytest.raises((ValueError, KeyError), match=message):
        Packed(packed.panels, 64, 64, groups=packed.groups._replace(**change))


def test_orders_and_levels_that_do_not_fit():
    packed, _ = matrix("float8", 64, 64, 32)
    given = {"groups": packed.groups}
    assert packed.rounding() is packed
    with pytest.raises(ValueError, match="every element"):
        Packed(packed.panels, 64, 64, **given, order_I=torch.zeros(64, dtype=torch.int32))
    with pytest.raises(ValueError, match="levels"):
        Packed(packed.panels, 64, 64, **given, levels=127)
    with pytest.raises(ValueError, match=r"float8, float4, iq4, .* without zeros, float8, float4 without units"):
        Packed(packed.panels, 64, 64, groups=Groups("float8", 32, packed.groups.scale, packed.groups.scale))


@pytest.mark.parametrize("of_x", DTYPES, ids=str)
@pytest.mark.parametrize("kind", ["int1", "int2", "int4", "int5", "int6", "int8"])
@pytest.mark.parametrize("ordered", [False, True])
def test_multiples_of_a_static_step_are_multiplied_as_integers(kind, ordered, of_x):
    """Levels do not round them further, whatever the largest magnitude of a row."""
    width, size = (512, 64) if kind in WHOLE else (520, 40)
    plain, _ = matrix(kind, 96, width, size, ordered=ordered and kind not in WHOLE)
    options = {"groups": plain.groups, "order_I": plain.order_I, "steps": Steps(0.03)}
    floats, packed = (Packed(plain.panels, 96, width, levels=levels, **options) for levels in (0, 127))
    x = draw(20, width, seed=3).to(of_x)
    x[:, 7] *= 20  # beyond the steps
    x[1], x[2] = 0, x[2] * 0.01
    found, exact = linear(x, packed), reference.linear(x.double(), packed)
    assert (found - exact).abs().max() <= (1e-5 + 2 * torch.finfo(of_x).eps) * exact.abs().max()
    assert (found - linear(x, floats)).abs().max() <= (1e-5 + 2 * torch.finfo(of_x).eps) * exact.abs().max()
    assert not found[1].any() and found[2].any() and packed.rounding() is packed
    for count in COUNTS[:-1]:
        assert linear(x[:count], packed).equal(found[:count])
