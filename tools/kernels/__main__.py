"""Is my kernel right, and is it fast? Every implementation of an operator over a grid of tree shapes.

Right: its error against the definition in float64 is at most twice that of plain PyTorch in the same dtype (of small
shapes: of several draws), on every shape and on a set of traps (prompts, several trees, holes, windows, padding; NaN in
every slot that must not be read).
Fast: microseconds of one layer, on caches that rotate through more memory than the last level of cache holds, against
the floor: every byte moved once at the bandwidth measured first, or the operations at the rate of a large product.

    python -m tools.kernels                                  all operators and implementations
    python -m tools.kernels --print-template > my_kernel.py  the contract, and a candidate to begin with
    python -m tools.kernels --candidate my_kernel.py         compared with all the others

exit codes: 0 all are right; 2 the candidate is wrong or broken, or wrong usage; 1 one of ours is wrong
"""

import argparse
import sys
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from engine.app import cli
from engine.errors import UsageError
from models.later import later
from tools.bench.figures import draw, need_figures
from tools.bench.measure import progress
from tools.bench.report import add_save_flag, finish, stamp
from tools.kernels.contenders import NAMES, OPERATORS, PACKED, contenders, load_candidate

with later():
    import torch

    from engine.load.loading import pick_device
    from tools.bench import limits
    from tools.kernels.lab import Lab, Shape, verdicts
    from tools.kernels.report import paint, report
    from tools.kernels.scenes import level_sizes

TEMPLATE = Path(__file__).with_name("template.py")
GRIDS: dict[str, dict[str, list[Any]]] = {  # defaults of flags, by device
    "cpu": {"prefix": [512, 2048], "heads": [(12, 12), (12, 4)], "head_dim": [64], "dtypes": ["float32", "bfloat16"]},
    "cuda": {"prefix": [4096, 8192], "heads": [(32, 32), (32, 8)], "head_dim": [128], "dtypes": ["bfloat16"]},
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    parser = cli.Parser("python -m tools.kernels", __doc__ or "", epilog=TEMPLATE.read_text("utf-8").split('"""')[1])
    parser.add_argument("--candidate", metavar="FILE", help="a Python file that defines an operator, see below")
    parser.add_argument("--print-template", action="store_true", help="print a candidate to begin with, and end")
    parser.add_argument("--ops", nargs="+", choices=OPERATORS, metavar="OP", help="(what FILE defines; else all)")
    text = f"{' '.join(NAMES)} (default: all that run without much preparation)"
    parser.add_argument("--impls", nargs="+", choices=NAMES, default=[], metavar="NAME", help=text)
    group = parser.add_argument_group("grid")
    text = "tokens of the trunk (512 2048; on a GPU 4096 8192)"
    group.add_argument("--prefix", type=int, nargs="+", metavar="N", help=text)
    group.add_argument("--queries", type=int, nargs="+", default=[1, 15, 64], metavar="N")
    group.add_argument("--branching", type=int, nargs="+", default=[1, 4], metavar="N", help="children of a node")
    group.add_argument("--depth", type=int, default=4, metavar="N", help="levels below the prefix (%(default)s)")
    text = "query and key/value heads (12:12 12:4; on a GPU 32:32 32:8)"
    group.add_argument("--heads", nargs="+", type=heads_of, metavar="H:G", help=text)
    group.add_argument("--head-dim", type=int, nargs="+", metavar="N", help="(64; on a GPU 128)")
    kinds = ("float32", "bfloat16", "float16")
    group.add_argument("--dtypes", nargs="+", choices=kinds, metavar="NAME", help=" ".join(kinds))
    group = parser.add_argument_group("measuring")
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads (torch's choice)")
    group.add_argument("--seconds", type=float, default=0.1, help="of each measurement, at least (%(default)s)")
    group.add_argument(
        "--picture", type=cli.output_file, metavar="FILE", help="draw it, as .svg or .png (needs the extra viz)"
    )
    add_save_flag(group, "kernels")
    group.add_argument("-v", "--verbose", action="store_true", help="tracebacks")
    args = parser.parse_args(words)

    def work() -> int:
        if args.print_template:
            print(TEMPLATE.read_text("utf-8"), end="")
            return 0
        with torch.inference_mode():
            result = run(args, words)
        wrong = {name for found in result["right"].values() for name, right in found.items() if not right}
        return UsageError.exit_code if result["candidate"] in wrong else int(not wrong <= {*PACKED})

    return cli.run(work, args.verbose)


def heads_of(text: str) -> tuple[int, int]:
    """H:G, G dividing H; H alone means H:H. An argparse type."""
    heads, _, kv_heads = text.partition(":")
    if not (heads.isdigit() and (kv_heads or heads).isdigit()):
        raise argparse.ArgumentTypeError(f"expected query heads:key/value heads such as 12:4, got {text!r}")
    found = int(heads), int(kv_heads or heads)
    if not min(found) or found[0] % found[1]:
        raise argparse.ArgumentTypeError(f"expected key/value heads that divide the query heads, got {text!r}")
    return found


def run(args: argparse.Namespace, words: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    if args.picture or args.save is not None:
        need_figures()
    device = pick_device(args.device)
    vars(args).update({name: grid for name, grid in GRIDS[device.type].items() if getattr(args, name) is None})
    if min([*args.prefix, *args.queries, *args.branching, args.depth, *args.head_dim, args.threads or 1]) < 1:
        raise UsageError("the grid's numbers and --threads: expected at least 1")
    candidates = load_candidate(args.candidate, args.ops or OPERATORS) if args.candidate else {}
    made = stamp(words, "tools.kernels")
    if args.threads:
        torch.set_num_threads(args.threads)
    progress("measuring the machine")
    lab = Lab(device, args.seconds, *limits.measure(device, args.dtypes))
    absent: dict[str, dict[str, str]] = {}
    for operator in args.ops or list(candidates or OPERATORS):
        able, absent[operator] = contenders(operator, device, args.impls)
        able += [candidates[operator]] if operator in candidates else []
        for dtype in args.dtypes:
            progress(f"{operator}, {dtype}: traps")
            lab.trap(operator, able, dtype)
        grid = list(shapes(args, operator))
        for i, shape in enumerate(grid):
            progress(f"{operator} {i + 1} of {len(grid)}: {shape}")
            lab.measure(operator, able, shape)
    figure = f"kernels-{device.type}.svg"
    pictures = [args.picture] if args.picture else []
    for path in [*pictures, *([args.save.with_name(figure)] if args.save else [])]:
        draw(path, (11, 7), lambda figure: paint(figure, lab.rows))
    name = next((c.name for c in candidates.values()), None)
    body = report(lab, absent, name) + (f"\n\n![]({figure})" if args.save else "")
    result = {
        "device": device.type,
        "candidate": name,
        "bandwidth": lab.bandwidth,
        "rates": lab.rates,
        "absent": absent,
        "rows": [row.record() for row in lab.rows],
        "traps": [trap._asdict() for trap in lab.traps],
        "right": verdicts(lab),
    }
    finish(f"kernels-{device.type}", made, body, result, args.save)
    return result


def shapes(args: argparse.Namespace, operator: str) -> Iterator[Shape]:
    """The grid, each tree once; writes do not depend on the prefix or the tree."""
    seen = set()
    for dtype, (heads, kv_heads), head, prefix, queries, branching in product(
        args.dtypes, args.heads, args.head_dim, args.prefix, args.queries, args.branching
    ):
        tree = (prefix, *level_sizes(queries, branching, args.depth)) if operator == "tree_attention" else queries
        if (key := (dtype, heads, kv_heads, head, tree)) not in seen:
            seen.add(key)
            yield Shape(dtype, heads, kv_heads, head, prefix, queries, branching, args.depth)


if __name__ == "__main__":
    sys.exit(cli.ended(main))
