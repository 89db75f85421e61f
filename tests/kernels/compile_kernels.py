"""Compiles the Triton kernels to machine code for GPUs that need not be here. Run without TRITON_INTERPRET.

    python -m tests.kernels.compile_kernels --write docs/results/kernels.md

writes the registers, spills and shared memory of the attention kernels into the page's tables, without the checks.
"""

import itertools
import operator
import sys
from functools import partial
from pathlib import Path

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from kernels import recurrent
from kernels.channel_scan import triton as on_channels
from kernels.delta_net import triton as on_deltas
from kernels.experts import triton as on_experts
from kernels.gpu import FUSED, Properties, after_the_last
from kernels.kv_write import triton as kv_write
from kernels.latent import triton as on_latents
from kernels.layout import ChannelKind, DeltaKind, ScanKind
from kernels.linear import triton as products
from kernels.linear.codes import Codes
from kernels.rows import triton as on_rows
from kernels.rows import triton_next, triton_sums
from kernels.scan import triton as on_scans
from kernels.tree_attention import triton as tree_attention
from kernels.tree_attention import triton_fixed, triton_shares
from tests.kernels.sass import before_the_wait, main_loops, printed, usage

WHOLE, LAST, LATER = (getattr(tree_attention, name).value for name in ("WHOLE", "LAST", "LATER"))
NAMES = {torch.float16: "fp16", torch.bfloat16: "bf16", torch.float32: "fp32"}
BYTES = {"int8": "*i8", "fp8": "*u8"}  # caches of 8 bits, as kernels take them
SHARED = {80: 166_912, 86: 101_376, 90: 232_448}  # bytes that one program may have
OLD = tuple(map(int, triton.__version__.split(".")[:2])) < (3, 7)  # its loops over keys are a fifth longer
EARLY = {"EARLY": False}  # whether kernels may be launched early
TABLE = torch.empty(2, 1, dtype=torch.uint8)  # in the place of a matrix's numbers and of its scales
WAITING = set()  # kernels that were compiled so, and wait before they touch memory
OTHERS = {89: 101_376, 100: 232_448, 120: 101_376}  # compiled for the table only
GPUS = {80: "A100", 86: "A10, RTX 30", 89: "L4, L40, RTX 40", 90: "H100, H200", 100: "B200", 120: "RTX 50"}
THREADS = {80: 2048, 86: 1536, 89: 1536, 90: 2048, 100: 2048, 120: 1536}  # of a multiprocessor


def compile(kernel, capability, types, constants, **options):
    """Compile for arguments of these types, pointers and strides aligned as PyTorch's are."""
    constants = constants | (EARLY if "EARLY" in kernel.arg_names else {})
    signature = {name: types.get(name, "i32") for name in kernel.arg_names} | dict.fromkeys(constants, "constexpr")
    aligned = [i for i, (name, kind) in enumerate(signature.items()) if kind[0] == "*" or name.startswith("stride_")]
    source = ASTSource(
        kernel,
        signature,
        {(kernel.arg_names.index(name),): value for name, value in constants.items()},
        {(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=FUSED | options)
    assert compiled.metadata.shared <= (SHARED | OTHERS)[capability], (capability, constants, compiled.metadata.shared)
    if constants.get("EARLY"):
        listing = printed(compiled, "-sass")
        assert before_the_wait(listing) == [] and "PREEXIT" in listing, (kernel, before_the_wait(listing))
        WAITING.add(kernel)
    return compiled


def attend(
    capability, rows, head, dtype, *,
    windowed=False, capped=False, split=LAST, cache=None, sinks=False, slopes=None, rotated=0,
):  # fmt: skip
    """`rotated`: keys are the values without so many elements, which `head` does not count."""
    roomy = (SHARED | OTHERS)[capability] >= 160_000
    if rotated:
        sizes = tree_attention._latent_sizes(rows, dtype, roomy=roomy)
    else:
        sizes = tree_attention._sizes(rows, head, dtype, roomy=roomy, windowed=windowed)
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    e = NAMES[dtype]
    types = {name: BYTES.get(cache, f"*{e}") for name in ("k_ptr", "v_ptr")} | {"q_ptr": f"*{e}"}
    types |= {"out_ptr": f"*{e}", "share_ptr": "*fp32", "log_ptr": "*fp32", "scale": "fp32", "cap": "fp32"}
    types |= {"positions_ptr": "*i64", "slots_ptr": "*i64", "stride_kg": "i64", "stride_vg": "i64"}
    types |= ({"sinks_ptr": "*fp32"} if sinks else {}) | ({"slopes_ptr": slopes} if slopes else {})
    types |= {f"{name}_ptr": "*i32" for name in ("count", "task", "seen", "pages", "places", "words")}
    constants = {
        "WINDOWED": windowed,
        "CAPPED": capped,
        "SPLIT": split,
        "GROUP": 16 if rotated else 4,
        "HEADS": 16 if rotated else 32,
        "PAGE": 16,
        "D": rotated + head,
        "R": rotated,
        "R2": triton.next_power_of_2(rotated) if rotated else 0,
    }
    constants |= {"TURN": 1} | ({} if sinks else {"sinks_ptr": None}) | ({} if slopes else {"slopes_ptr": None})
    constants |= {"SCALE": {None: 0, "int8": 2, "fp8": 4}[cache], "D2": max(16, triton.next_power_of_2(head))}
    if bulk(capability, sizes["M"], head, windowed, cache) and not rotated:
        types |= dict.fromkeys(("k_blocks", "v_blocks"), f"tensordesc<{e}[{sizes['N']},{head}]>")
    else:
        constants |= {"k_blocks": None, "v_blocks": None}
    compiled = compile(tree_attention._attend, capability, types, constants | sizes, **options)
    if dtype != torch.float32 and capability == 90 and not head % 8:
        assert "cp.async.cg" in compiled.asm["ptx"], "keys and values are not fetched ahead, 16 bytes at a time"
        assert ("cp.async.bulk.tensor" in compiled.asm["ptx"]) == bulk(capability, sizes["M"], head, windowed, cache)
    return compiled


def attend_fixed(
    capability, head, dtype, *, windowed=False, capped=False, cache=None, sinks=False, slopes=None, group=4
):
    roomy = (SHARED | OTHERS)[capability] >= 160_000
    shape = triton_fixed.sizes(head, dtype, roomy)
    options = {name: shape.pop(name) for name in ("num_warps", "num_stages")}
    pointers = {name for name in triton_fixed._attend.arg_names if name.endswith("_ptr")}
    types = dict.fromkeys(pointers, "*i32") | dict.fromkeys(("q_ptr", "out_ptr"), f"*{NAMES[dtype]}")
    types |= dict.fromkeys(("k_ptr", "v_ptr"), BYTES.get(cache, f"*{NAMES[dtype]}"))
    types |= {"level_ptr": "*fp32", "log_ptr": "*fp32", "scale": "fp32", "cap": "fp32", "positions_ptr": "*i64"}
    types |= {"stride_kg": "i64", "stride_vg": "i64"} | ({"sinks_ptr": "*fp32"} if sinks else {})
    types |= {"slopes_ptr": slopes} if slopes else {}
    constants = {"WINDOWED": windowed, "CAPPED": capped, "GROUP": group, "HEADS": 32, "PAGE": 16, "D": head}
    constants |= {"SCALE": {None: 0, "int8": 2, "fp8": 4}[cache], "D2": max(16, triton.next_power_of_2(head))}
    constants |= ({} if sinks else {"sinks_ptr": None}) | ({} if slopes else {"slopes_ptr": None})
    return compile(triton_fixed._attend, capability, types, constants | shape, **options)


def around_fixed(capability, trees):
    """The kernels that list what attention in one order does, and the one that joins its shares."""
    sizes = {"PAGE": 16, "N": 32, "R2": trees}
    types = dict.fromkeys((name for name in triton_fixed.list_paths.arg_names if name.endswith("_ptr")), "*i32")
    yield compile(triton_fixed.list_paths, capability, types | {"slots_ptr": "*i64"}, sizes)
    types = dict.fromkeys((name for name in triton_fixed.list_shares.arg_names if name.endswith("_ptr")), "*i32")
    sizes = {"WINDOWED": True, "R2": trees, "GROUP": 4, "G": 8, "M": 64, "P": 32, "K": 64}
    yield compile(triton_fixed.list_shares, capability, types, sizes | {"SPLIT": True})
    yield compile(triton_fixed.list_shares, capability, types, sizes | {"SPLIT": False, "token_ptr": None})
    types = {"out_ptr": "*bf16", "sinks_ptr": "*fp32", "level_ptr": "*fp32", "log_ptr": "*fp32", "token_ptr": "*i32"}
    sizes = {"GROUP": 4, "HEADS": 32, "D": 128, "D2": 128, "M": 64, "LEVELS": triton_fixed.LEVELS}
    yield compile(triton_fixed._join_shares, capability, types, sizes)


def merges(capability):
    """The kernel that merges shares, of values of their own and of latents."""
    types = {"share_ptr": "*fp32", "log_ptr": "*fp32", "out_ptr": "*bf16", "token_ptr": "*i32"}
    sizes = {"GROUP": 4, "HEADS": 32, "D": 128, "D2": 128, "M": 64, "K": 16}
    for more in ({}, {"D": 576, "D2": 512, "R": 64, "K": 8}):
        yield compile(tree_attention.merge, capability, types, sizes | more, num_warps=2)


def writes(capability):
    """The kernels that write keys and values as they are, and in 8 bits."""
    types = {"slots_ptr": "*i64"} | {f"{name}_ptr": "*bf16" for name in ("k", "v", "new_k", "new_v")}
    yield compile(kv_write._write, capability, types, {"G": 32, "D": 128, "BLOCK": kv_write.BLOCK})
    sizes = {"G": 8, "D": 80, "D2": 128, "M": 4}
    for kind in BYTES.values():
        yield compile(kv_write._write_rows, capability, types | {"k_ptr": kind, "v_ptr": kind}, sizes, num_warps=1)


def before_latents(capability, heads, cache=None, turned=True):
    """The kernel between the product of heads and attention, in the shape of DeepSeek-V2-Lite; not turned: of Kimi
    Linear."""
    pointers = {name for name in on_latents._turn.arg_names if name.endswith("_ptr")}
    types = dict.fromkeys(pointers, "*bf16") | {"slots_ptr": "*i64", "k_ptr": BYTES.get(cache, "*bf16")}
    types |= {"stride_kg": "i64", "eps": "fp32"}
    M = min(heads, on_latents.ELEMENTS // 64)
    sizes = {"H": heads, "N": 128, "R": 64, "R2": 64, "C": 512, "D2": 1024, "M": M, "PAIRS": turned, "TURN": turned}
    return compile(on_latents._turn, capability, types, sizes)


def tasks(capability, split, trees):
    types = {f"{name}_ptr": "*i32" for name in ("task", "token", "starts", "lengths", "branches")}
    sizes = {"WINDOWED": True, "SPLIT": split, "R2": trees, "GROUP": 4, "G": 8, "D2": 128, "M": 64, "N": 32}
    sizes |= {"P": min(128, triton_shares.LISTED // trees)} | ({} if split == LATER else {"token_ptr": None})
    return compile(triton_shares.list_tasks, capability, types, sizes)


def bulk(capability, rows, head, windowed, cache):
    """Whether blocks of keys and values are copied at once."""
    able = capability >= 90 and (SHARED | OTHERS)[capability] >= 160_000 and head == triton.next_power_of_2(head)
    return able and rows == tree_attention.LONG and not windowed and cache is None


def turn(capability, head, norm, cache=None, heads=0, values=False):
    """`heads`: of so many query heads all are normed as one row; `values`: those of values are normed."""
    pointers = {name for name in kv_write._turn.arg_names if name.endswith("_ptr")}
    types = {"slots_ptr": "*i64", "eps": "fp32", "stride_kg": "i64", "stride_vg": "i64"}
    types |= dict.fromkeys(("k_ptr", "v_ptr"), BYTES.get(cache, "*bf16"))
    types = dict.fromkeys(pointers, "*bf16") | types
    sizes = {"H": heads or 32, "G": 8, "D": head, "D2": head, "R": head, "NORM": norm, "LAST": False}
    sizes |= {"M": triton.next_power_of_2(heads) if heads else 4, "ALL": heads > 0, "OWN": False, "VALUES": values}
    warps = kv_write.warps(sizes["M"] * head) if heads else 1
    return compile(kv_write._turn, capability, types, sizes, num_warps=warps)


def product(capability, kind, rows, dtype=torch.bfloat16, group=128, **more):
    """An int8 matrix is a group a row; of few rows the width is split."""
    matrix = Codes({4: "int4", 5: "int8", 6: "float8"}[kind], group, 4096, 4096, *TABLE)
    types = {name: f"*{NAMES[dtype]}" for name in products._product.arg_names if name.endswith("_ptr")}
    types |= {"codes_ptr": "*u8", "scale_ptr": "*fp16", "zero_ptr": "*fp16", "least_ptr": "*fp16", "order_ptr": "*i64"}
    types |= {"part_ptr": "*fp32" if rows <= 16 else f"*{NAMES[dtype]}", "count_ptr": "*i32"}
    sizes = products.shape(matrix, rows)
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"OUTS": 4096, "WIDTH": 4096, "BYTES": 2048 if kind == 4 else 4096, "GROUP": group, "KIND": kind}
    constants |= {
        "ZEROS": False,
        "LEAST": False,
        "ORDERED": False,
        "BIAS": True,
        "SPLIT": rows <= 16,
        "TURNS": 1,
    } | more
    return compile(products._product, capability, types, constants | sizes, **options)


def floats(capability, dtype, turns=1):
    """A product of floats in one order, of a few rows or of many."""
    types = {name: f"*{NAMES[dtype]}" for name in products._product.arg_names if name.endswith("_ptr")}
    types |= {"part_ptr": "*fp32" if turns == 1 else f"*{NAMES[dtype]}", "count_ptr": "*i32"}
    sizes = products.shape(Codes("int8", 4096, 4096, 4096, *TABLE), products.SAME_ROWS[dtype])
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    constants = {"OUTS": 4096, "WIDTH": 4096, "BYTES": 4096, "GROUP": 4096, "KIND": products.FLOATS.value}
    constants |= {"ZEROS": False, "LEAST": False, "ORDERED": False, "BIAS": True, "SPLIT": turns == 1, "TURNS": turns}
    return compile(products._product, capability, types, constants | sizes, **options)


def of_experts(capability, kind, rows, dtype=torch.bfloat16, function=3, group=128, experts=128, **more):
    """A product of tiles of 128 experts of 768 rows, gated, or of 2048; kind 7 is of floats."""
    outs, width = (2048, 768) if function < 0 else (1536, 2048)
    name = {4: "int4", 5: "int8", 6: "float8", 7: "int8"}[kind]
    whole = {5: width, 7: width}.get(kind, group)
    sizes = products.shape(Codes(name, whole, outs, width, *(TABLE.to(dtype) if kind == 7 else TABLE)), rows)
    options = {name: sizes.pop(name) for name in ("num_warps", "num_stages")}
    types = {name: f"*{NAMES[dtype]}" for name in on_experts._product.arg_names if name.endswith("_ptr")}
    types |= {"codes_ptr": "*u8", "scale_ptr": "*fp16", "zero_ptr": "*fp16", "least_ptr": "*fp16"} if kind < 7 else {}
    types |= dict.fromkeys(("order_ptr", "tiles_ptr", "count_ptr"), "*i32")
    types |= {"columns_ptr": "*i64", "part_ptr": "*fp32" if more.get("SPLIT") else f"*{NAMES[dtype]}"}
    flags = ("ZEROS", "LEAST", "ORDERED", "BIAS", "SPLIT")
    constants = {"C": 8, "ALL": experts * outs, "OUTS": outs, "WIDTH": width, "BYTES": width // (2 if kind == 4 else 1)}
    constants |= {"GROUP": whole, "KIND": kind, "FUNCTION": function} | dict.fromkeys(flags, False)
    constants |= {"GATED": function >= 0} | more
    return compile(on_experts._product, capability, types, constants | sizes, **options)


def around_experts(capability, experts, chosen, scores=0, groups=1):
    """The choice of experts, the tiles of their rows, the sums."""
    types = {
        "logits_ptr": "*bf16",
        "bias_ptr": "*fp32",
        "factors_ptr": "*fp32",
        "experts_ptr": "*i32",
        "weights_ptr": "*fp32",
    }
    types |= dict.fromkeys(("epsilon", "scale", "far"), "fp32")
    X2, C2 = triton.next_power_of_2(experts), triton.next_power_of_2(chosen)
    sizes = {"X": experts, "X2": X2, "C": chosen, "C2": C2, "SCORES": scores, "ROWS": 1}
    flags = {
        "NORMALIZED": scores != 1,
        "BIASED": scores == 2,
        "FACTORS": scores == 0,
        "G": groups,
        "G2": groups,
        "KEPT": 4,
        "BEST": 2,
    }
    yield compile(on_experts._choose, capability, types, sizes | flags, num_warps=1)
    types = dict.fromkeys(("experts_ptr", "order_ptr", "tiles_ptr"), "*i32")
    yield compile(on_experts._sort, capability, types, {"X2": X2, "M": 16, "ENTRIES": on_experts.ENTRIES})
    types = dict.fromkeys(("made_ptr", "shared_ptr", "gate_ptr", "out_ptr"), "*bf16") | {"weights_ptr": "*fp32"}
    sizes = {"E": 2048, "C": chosen, "SHARED": True, "GATED": True, "ROWS": 1, "BLOCK": on_experts.BLOCK}
    yield compile(on_experts._add_up, capability, types, sizes)


def add_norm(capability, width):
    types = {name: "*bf16" for name in on_rows._sum.arg_names if name.endswith("_ptr")} | {
        "scale": "fp32",
        "eps": "fp32",
    }
    sizes = {"ADDENDS": 1, "NORM": 1, "OUT_NORM": 1, "SCALED": True, "E": width, "E2": width, "M": 1}
    return compile(on_rows._sum, capability, types, sizes, num_warps=16)


def gate(capability, width):
    sizes = {"KIND": 3, "GATED": True, "WIDTH": width, "M": 1, "BLOCK": on_rows.BLOCK // 2}
    return compile(on_rows._activate, capability, {"x_ptr": "*bf16", "out_ptr": "*bf16"}, sizes)


def xielu(capability):
    types = dict.fromkeys(("x_ptr", "out_ptr"), "*bf16") | {"curve_ptr": "*fp32"}
    return compile(on_rows._xielu, capability, types, {"WIDTH": 14336, "M": 1, "BLOCK": on_rows.BLOCK // 2})


def let_through(capability, softplus):
    types = dict.fromkeys(("x_ptr", "gate_ptr", "out_ptr"), "*bf16")
    sizes = {"WIDTH": 4096, "SHARE": 128 if softplus else 1, "SOFTPLUS": softplus, "M": 1, "BLOCK": on_rows.BLOCK}
    return compile(on_rows._let_through, capability, types, sizes)


def log_softmax(capability, width):
    e, f, blocks = {"x_ptr": "*bf16"}, {"part_ptr": "*fp32"}, -(-width // on_rows.WIDE)
    sizes = {"V": width, "M": 1, "WIDE": on_rows.WIDE}
    yield compile(on_rows._mass, capability, e | f, sizes)
    types = e | f | {"out_ptr": "*fp32", "peaks_ptr": "*fp32", "finite_ptr": "*u8"}
    more = {"END": width - 9, "SPAN": on_rows.SPAN, "C": blocks, "C2": triton.next_power_of_2(blocks)}
    yield compile(on_rows._log_softmax, capability, types, sizes | more)
    yield compile(on_rows._peaks, capability, {"x_ptr": "*fp32", "peaks_ptr": "*fp32"}, sizes | {"SPAN": on_rows.SPAN})


def top_sums(capability, group, ranked=True):
    types = {f"{name}_ptr": "*fp32" for name in ("logp", "peaks", "sums")} | {"out_ptr": "*fp64"}
    types |= {f"{name}_ptr": "*i32" for name in ("table", "work", "count")}
    sizes = {"LOG_GROUP": group.bit_length() - 1, "LOG_SPAN": 7, "TILE": triton_sums.TILE, "RANKED": ranked}
    return compile(triton_sums._top_sums, capability, types, sizes, **triton_sums.OPTIONS)


def next_nodes(capability, sums):
    types = {"numbers_ptr": "*fp64", "sums_ptr": "*fp32"}
    types |= {f"{name}_ptr": "*i32" for name in ("table", "ancestry", "token", "inherited")}
    words = min(triton_next.MOST_WORDS, triton_next.WORDS_AT_ONCE // sums)
    return compile(triton_next._next_nodes, capability, types, {"LINE": triton_next.LINE, "K": sums, "WORDS": words})


def recurring(capability, kind, dtype=torch.bfloat16):
    """The kernels of a gated delta net or of a scan, and the one that walks along chains the last."""
    (H, K, V), G, C, delta = kind.state, kind.key_heads, kind.channels, type(kind) is DeltaKind
    channels = isinstance(kind, ChannelKind)
    floats = dict.fromkeys(("least", "most", "eps", "gate", "factor", "bound"), "fp32")
    K2, V2 = triton.next_power_of_2(K), triton.next_power_of_2(V)
    inputs = H * V if isinstance(kind, ScanKind) else 0
    sizes = {"INPUTS": inputs, "C": C, "ROW": kind.row, "REACH": kind.reach, "TAPS": kind.taps}

    def of(kernel, constants, **options):
        names = {name: constants[name] for name in kernel.arg_names if name in constants}
        types = dict.fromkeys((name for name in kernel.arg_names if name.endswith("_ptr")), "*fp32")
        types |= dict.fromkeys(("x_ptr", "out_ptr"), f"*{NAMES[dtype]}") | floats
        types |= {f"{name}_ptr": "*i64" for name in ("paths", "chains", "lengths", "bases", "folds", "rows_t")}
        types = {name: kind for name, kind in types.items() if name in kernel.arg_names}
        return compile(kernel, capability, types, names, **options)

    some = {"G": G, "H": H, "K": K, "K2": K2, "V": V, "V2": V2, "DELTA": delta, "KEYS": G * K, "VALUES": H * V}
    some |= {"CHANNELS": channels, "BY_KEY": kind.key_decays, "BOUNDED": kind.key_decays, "SIGMOID": kind.key_decays}
    if channels:
        own, block = on_channels, {"BLOCK": on_channels.BLOCK, "L": 160 + 2 * K, "NORMED": True}
        for kernel in (own._convolve, own._prepare, own._finish):
            yield of(kernel, sizes | some | block)
    else:
        own, E = on_deltas if delta else on_scans, H * V // G
        yield of(
            recurrent._prepare_keys,
            sizes | some | {"FIRST": 0, "SHIFTED": not delta, "M": max(1, recurrent.ELEMENTS // K2)},
        )
        heads = sizes | some | {"M": max(1, recurrent.ELEMENTS // V2)}
        yield of(own._prepare_values, heads)
        yield of(own._finish, heads if delta else {"G": G, "E": E, "E2": triton.next_power_of_2(E), "NORMED": True})
    yield of(recurrent._keep, sizes | some | {"BLOCK": recurrent.ROW_BLOCK})
    yield of(recurrent._walk, sizes | some | {"BLOCK": min(16, recurrent.WALKED // K2)}, num_warps=1)


def unspilled(compiled, most=0):
    registers, stack = usage(compiled)
    assert stack <= most, (compiled.metadata.name, registers, stack)
    return registers


def pinned(compiled, most, loads=0):
    """Check the loops that multiply matrices, but for those around others: each has at most so many instructions, and
    at most `loads` that a thread waits for; the rest of what it needs is copied to shared memory turns before."""
    found = [loop for loop in main_loops(compiled) if loop.total() <= 2 * max(most)]
    sizes = [loop.total() / (1.25 if OLD else 1) for loop in found]
    assert len(sizes) == len(most) and all(map(operator.le, sizes, most)), (sizes, most)
    assert all(loop["LDG"] <= loads and loop["LDGSTS"] + loop["UTMALDG"] for loop in found), found


HEAD = "| target | GPUs | rows of a tile | registers | spilled, bytes | shared memory, KiB | programs at once |"


def table():
    """Lines of Markdown."""
    yield from (HEAD, "|---|---|---|---|---|---|---|")
    for capability, rows in itertools.product(GPUS, (16, 32, 64, 2048)):
        compiled = attend(capability, rows, 128, torch.bfloat16, split=LAST if rows < 2048 else WHOLE)
        yield line(capability, min(rows, 128), compiled)


def table_of_latents():
    """The same of keys that are the values, in bfloat16 and int8."""
    yield from (HEAD, "|---|---|---|---|---|---|---|")
    for capability, (rows, cache) in itertools.product(GPUS, ((16, None), (32, None), (32, "int8"))):
        compiled = attend(capability, rows, 512, torch.bfloat16, rotated=64, cache=cache)
        yield line(capability, f"{rows}, int8" if cache else rows, compiled)


def line(capability, rows, compiled):
    """A line of a table."""
    (registers, stack), shared = usage(compiled), compiled.metadata.shared
    gpu = Properties(1, True, 65_536, (SHARED | OTHERS)[capability] + 1024, THREADS[capability])
    room = gpu.programs(registers, shared, compiled.metadata.num_warps)
    return f"| sm_{capability} | {GPUS[capability]} | {rows} | {registers} | {stack} | {shared / 1024:.0f} | {room} |"


def write(page):
    """Replace the tables of a page."""
    for name, rows in (("kernels", table), ("latents", table_of_latents)):
        begin, end = f"<!-- compiled {name} -->", f"<!-- end of {name} -->"
        before, rest = page.read_text(encoding="utf-8").split(begin)
        lines = "\n".join(rows())
        page.write_text(f"{before}{begin}\n{lines}\n{end}{rest.split(end)[1]}", encoding="utf-8")


if sys.argv[1:2] == ["--write"]:
    write(Path(sys.argv[2]))
    sys.exit()


for capability in SHARED:
    for rows, head in itertools.product((16, 64, 2048), (64, 128)):
        attend(capability, rows, head, torch.bfloat16, split=LAST if rows < 2048 else WHOLE)
for capability, split in itertools.product((90, 100), (LAST, LATER)):  # wide beams: a prompt's tiles, in shares
    unspilled(attend(capability, 2048, 128, torch.bfloat16, split=split))
attend(90, 16, 80, torch.float16, windowed=True)
attend(90, 16, 96, torch.bfloat16)
attend(90, 16, 256, torch.bfloat16, windowed=True, capped=True)
attend(90, 16, 33, torch.float16)
attend(90, 16, 64, torch.bfloat16, windowed=True, sinks=True)
unspilled(attend(90, 2048, 64, torch.bfloat16, split=WHOLE, sinks=True))
for capability, slopes in itertools.product((80, 90, 120), ("*fp32", "*bf16")):
    unspilled(attend(capability, 16, 64, torch.bfloat16, slopes=slopes), 8)
unspilled(attend(90, 16, 128, torch.bfloat16, slopes="*fp32", cache="int8"))
unspilled(attend(90, 2048, 128, torch.bfloat16, split=WHOLE, slopes="*fp32"), 8 if OLD else 0)
unspilled(attend(90, 2048, 64, torch.float32, split=WHOLE, slopes="*bf16"))
attend(90, 2048, 256, torch.bfloat16, split=WHOLE)
for capability, windowed in zip(SHARED, (True, False, False), strict=True):  # Gemma 4
    unspilled(attend(capability, 32, 512, torch.bfloat16, windowed=windowed))
unspilled(attend(120, 2048, 512, torch.float16, split=WHOLE), 8 if OLD else 0)
for cache in BYTES:
    unspilled(attend(90, 32, 512, torch.bfloat16, cache=cache), 40 if OLD else 24)
for capability, head in itertools.product((86, 90), (160, 256)):  # 4 warps would spill 232 bytes
    unspilled(attend(capability, 16, head, torch.float32), 96 if OLD else 80)
for rows in (16, 2048):
    unspilled(attend(90, rows, 128, torch.float32, split=LAST if rows < 2048 else WHOLE))
for capability, dtype in itertools.product(SHARED, NAMES):
    attend(capability, 16, 64, dtype, cache="int8")
unspilled(attend(90, 2048, 128, torch.bfloat16, split=WHOLE, cache="int8"))
for capability, cache in itertools.product(SHARED, BYTES):
    most = 32 if OLD else 24  # ptxas takes 168 registers: 3 programs fit
    unspilled(attend(capability, 16, 128, torch.bfloat16, cache=cache), most)
for dtype in (torch.float16, torch.float32):
    attend(90, 16, 64, dtype, cache="fp8")
for compiled in (*merges(90), *writes(90)):
    unspilled(compiled)
for capability, rows in ((80, 32), (86, 16), (90, 32), (120, 32)):
    unspilled(attend(capability, rows, 512, torch.bfloat16, rotated=64), 8 if OLD else 0)
for capability, cache in ((86, "int8"), (90, "fp8")):  # ptxas spills around the loops over keys
    unspilled(attend(capability, 32, 512, torch.bfloat16, rotated=64, cache=cache), 80)
unspilled(attend(90, 16, 128, torch.float32, rotated=64), 8 if OLD else 0)
for capability, heads, cache in ((80, 128, None), (90, 16, "int8"), (120, 16, "fp8")):
    unspilled(before_latents(capability, heads, cache))
for split, trees in itertools.product((WHOLE, LAST, LATER), (16, 128)):
    unspilled(tasks(90, split, trees))
for capability, head in itertools.product((80, 90, 100), (64, 128)):  # ptxas spills around the loop over keys
    unspilled(attend_fixed(capability, head, torch.bfloat16), 80)
unspilled(attend_fixed(90, 128, torch.bfloat16, cache="int8"))
unspilled(attend_fixed(90, 256, torch.bfloat16, windowed=True, capped=True), 8 if OLD else 0)
unspilled(attend_fixed(90, 64, torch.float16, windowed=True, sinks=True, cache="fp8"))
unspilled(attend_fixed(90, 128, torch.bfloat16, slopes="*fp32"), 8)
unspilled(attend_fixed(80, 64, torch.float16, slopes="*bf16", cache="int8"))
unspilled(attend_fixed(80, 128, torch.float32))
for compiled in around_fixed(90, 16):
    unspilled(compiled)
for capability, cache, norm in ((80, None, 0), (90, None, 1), (90, "int8", 2), (120, "int8", 0), (80, "fp8", 1)):
    unspilled(turn(capability, 128, norm, cache))
for capability, head, cache in ((80, 256, None), (90, 512, None), (120, 512, "fp8")):
    unspilled(turn(capability, head, 1, cache, values=True))
for capability in (80, 90, 120):
    unspilled(turn(capability, 128, 1, heads=40))
for capability, width in ((80, 4096), (90, 8192)):
    unspilled(add_norm(capability, width))
    unspilled(gate(capability, width))
for compiled in log_softmax(90, 128_256):
    unspilled(compiled)
for capability, group in zip(GPUS, itertools.cycle(triton_sums.GROUPS), strict=False):
    unspilled(top_sums(capability, group))
unspilled(top_sums(90, triton_sums.GROUPS[-1], ranked=False))
for sums in (32, 1024):
    unspilled(next_nodes(90, sums))
AROUND = 8  # bytes that ptxas spills around a loop with registers to spare
for capability, (kind, group, rows) in itertools.product((80, 90), ((4, 32, 16), (5, 4096, 64), (6, 128, 16))):
    unspilled(product(capability, kind, rows, group=group), AROUND)
unspilled(product(120, 4, 64, ZEROS=True))
unspilled(product(90, 5, 16, group=4096, ZEROS=True), AROUND)
unspilled(product(90, 4, 16, ORDERED=True), AROUND)
unspilled(product(90, 4, 16, group=32, LEAST=True), AROUND)
unspilled(product(86, 4, 16, torch.float32))
for capability, dtype, turns in itertools.product((80, 90), (torch.bfloat16, torch.float32), (1, 4)):
    unspilled(floats(capability, dtype, turns), AROUND)
unspilled(product(90, 4, 64, group=32, TURNS=4), AROUND)
for capability, chosen in itertools.product((80, 90), ((8, 2, 3), (128, 8, 0), (128, 4, 1), (512, 10, 2))):
    for compiled in around_experts(capability, *chosen):
        unspilled(compiled)
for compiled in around_experts(90, 256, 8, 2, groups=8):
    unspilled(compiled)
for capability, (kind, rows, function) in itertools.product(
    (80, 90), ((7, 16, 3), (7, 64, -1), (4, 16, 3), (4, 64, -1), (5, 64, 3))
):
    unspilled(of_experts(capability, kind, rows, function=function, group=32))
unspilled(of_experts(90, 7, 16, torch.float32))
of_experts(86, 7, 16, torch.float32)
unspilled(of_experts(90, 4, 16, group=32, LEAST=True, SPLIT=True))
unspilled(of_experts(120, 5, 16, function=6, BIAS=True, SPLIT=True))
unspilled(of_experts(90, 7, 16, function=6, GATED=False))
unspilled(of_experts(120, 4, 16, function=6, group=32, GATED=False))
RECURRENT = (  # Qwen3.5 9B, Kimi Linear 48B, Granite 4 Tiny, Mamba 2.8B
    *(DeltaKind(16, 32, 128, 128, 4), DeltaKind(32, 32, 128, 128, 4, True), ScanKind(1, 48, 128, 64, 4)),
    ChannelKind(1, 1, 16, 5120, 4),
)
for capability, kind in itertools.product((80, 90, 120), RECURRENT):
    for compiled in recurring(capability, kind):
        unspilled(compiled)
for compiled in recurring(90, DeltaKind(16, 16, 256, 256, 4), torch.float32):
    unspilled(compiled)

# A multiprocessor issues 4 instructions of 32 threads in a cycle: where memory is the limit, loops have to be short.
pinned(attend(90, 16, 128, torch.bfloat16), (385, 475, 310))  # a trunk's whole blocks, its last one, branch words
pinned(attend(90, 64, 128, torch.bfloat16), (375, 420, 480))
pinned(attend(90, 2048, 128, torch.bfloat16, split=WHOLE), (420, 465, 550, 445))  # consecutive pages, and the same
pinned(attend(90, 32, 512, torch.bfloat16, rotated=64), (660, 740, 690))
pinned(attend_fixed(90, 128, torch.bfloat16), (620,))
for capability in (80, 90):
    pinned(product(capability, 4, 16, group=32), (230,), loads=4)  # scales, a turn ahead
pinned(product(90, 4, 64, group=32), (370,), loads=16)
pinned(product(90, 5, 16, group=4096), (160,))
for capability in (80, 90):
    pinned(of_experts(capability, 7, 16), (70,))
    pinned(of_experts(capability, 4, 16, group=32), (240,), loads=8)  # scales of gates, and of what they let through

# Kernels that may be launched before the kernel before them has ended.
EARLY["EARLY"] = True
for capability in (90, 100):
    attend(capability, 16, 128, torch.bfloat16)
    attend(capability, 2048, 128, torch.bfloat16, split=WHOLE)
    attend(capability, 16, 512, torch.bfloat16, rotated=64)
    attend_fixed(capability, 128, torch.bfloat16)
    for kernels in (merges, writes, partial(around_fixed, trees=16), partial(around_experts, experts=128, chosen=8)):
        list(kernels(capability))
    before_latents(capability, 16)
    unspilled(before_latents(capability, 32, turned=False))
    turn(capability, 128, 1)
    product(capability, 4, 16, group=32)
    floats(capability, torch.bfloat16)
    of_experts(capability, 7, 16)
    add_norm(capability, 4096)
    gate(capability, 4096)
    let_through(capability, softplus=False)
    let_through(capability, softplus=True)
    xielu(capability)
for module in (tree_attention, triton_fixed, triton_shares, kv_write, on_latents, products, on_experts, on_rows):
    early = {x for x in vars(module).values() if isinstance(x, triton.JITFunction) and "EARLY" in x.arg_names}
    assert early - {after_the_last} <= WAITING, early - WAITING
