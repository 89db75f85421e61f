"""View a search: `python -m tools.tree -p TEXT --search NAME` answers a prompt and writes a page to look at.

`python -m tools.tree FILE.json ...` makes such a page from recorded traces (`--trace FILE.json`).
"""

import argparse
import json
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from engine.app import cli
from engine.errors import UsageError, reason_of
from models.later import later

with later():
    from engine.app.trace_page import FORMAT, check_target, saving, write
    from engine.contract.trace import Traces
    from engine.conversation import Conversation
    from engine.engine import Done, Prefill, Progress
    from models.checkpoint.files import read_regular
    from search.base import make_search

MAX_BYTES = 1 << 28  # of a file that is read
KEYS = {  # that every record has
    **{"search": str, "name": str | int, "params": dict, "models": dict, "steps": list, "trees": list},
    **{"outputs": list, "texts": dict, "stats": dict | None},
}
PROMPT = "Tell me a story about a fox."
EPILOG = """\
The page needs nothing but a browser, and no network. The last line on stdout is JSON: file, requests, steps, nodes.
Example: python -m tools.tree --search trie --beams 15 --max-new-tokens 48 -o tree.html"""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = cli.Parser("python -m tools.tree", __doc__ or "", EPILOG)
    parser.add_argument("traces", nargs="*", metavar="FILE.json", help="traces to show, instead of a new search")
    parser.add_argument("-p", "--prompt", metavar="TEXT", help=f"what to answer ({PROMPT})")
    parser.add_argument("--system", metavar="TEXT", help="system message, for models with a chat template")
    text = "the page, or FILE.json for the data alone (tree.html)"
    parser.add_argument("-o", "--output", default="tree.html", metavar="FILE", help=text)
    cli.add_load_flags(parser, "tree")
    cli.add_search_flags(parser)
    cli.add_limit_flags(parser)
    cli.add_verbosity_flags(parser)
    args = parser.parse_args(argv)
    return cli.run(lambda: show(args) if args.traces else answer(args), args.verbose)


def answer(args: argparse.Namespace) -> int:
    """Run a search on a prompt, with its page."""
    search = make_search(args.search, cli.search_params(args))
    check_target(args.output)
    conversation, traces = Conversation(cli.load_engine(args), args.system), Traces()
    user, steps, text = args.prompt or PROMPT, 0, ""
    lively = not args.quiet and sys.stderr.isatty()
    events: Any = conversation.stream(user, search, trace=traces.new(user), **cli.limits(args))
    with saving(traces, args.output), closing(conversation.session), closing(events):
        for event in events:
            at = ""
            if isinstance(event, Prefill):
                at = f"reading the prompt: {event.done} of {event.total} tokens"
            elif isinstance(event, Progress):
                steps += 1
                at = f"{steps} steps"
            elif isinstance(event, Done):
                text = event.result.outputs[0].text
            if lively and at:
                print(f"\r{at}\x1b[K", file=sys.stderr, end="", flush=True)
    print("\r\x1b[K" * lively, file=sys.stderr, end="", flush=True)
    print(text)
    return finish(args, traces.records())


def show(args: argparse.Namespace) -> int:
    """Write a page of recorded traces."""
    if args.prompt is not None:
        raise UsageError("--prompt: there is nothing to answer where traces are given")
    check_target(args.output, *args.traces)
    wholes = [load(path) for path in args.traces]
    records = [record for whole in wholes for record in whole["requests"]]
    write(args.output, records, sum(whole["left_out"] for whole in wholes))
    return finish(args, records)


def load(path: str | Path) -> dict[str, Any]:
    """A trace written as JSON: {"requests": [...], "left_out": N, ...}. Raises UsageError."""
    try:
        data = read_regular(path, MAX_BYTES)
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read the trace: {reason_of(error)}", where=str(path)) from None
    try:
        whole = json.loads(data)
        sound = type(whole["left_out"]) is int and whole["left_out"] >= 0 and all(map(_is_record, whole["requests"]))
        if len(data) > MAX_BYTES or whole["format"] != FORMAT or not sound:
            raise ValueError
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        remedy = "--trace FILE.json of engine.chat, engine.batch or tools.tree writes one"
        raise UsageError(f"this is no trace of the format {FORMAT!r}", where=str(path), remedy=remedy) from None
    return whole


def _is_record(record: dict[str, Any]) -> bool:
    """Whether the value has the parts of a record. Raises AttributeError, KeyError or TypeError for other values."""
    sound = all(isinstance(record[key], kind) for key, kind in KEYS.items())
    return sound and all(isinstance(tree["token"], list) for tree in record["trees"])


def finish(args: argparse.Namespace, records: list[dict[str, Any]]) -> int:
    """Report the written file."""
    steps = sum(len(record["steps"]) for record in records)
    nodes = sum(len(tree["token"]) for record in records for tree in record["trees"])
    if not args.quiet:
        print(f"written: {args.output}; open it in a browser", file=sys.stderr)
    print(json.dumps({"file": args.output, "requests": len(records), "steps": steps, "nodes": nodes}), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(cli.ended(main))
