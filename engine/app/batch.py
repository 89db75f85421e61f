"""Batch: reads prompts and writes answers as JSON Lines, in the same order; forward passes serve many lines."""

import argparse
import io
import sys
import traceback
from collections.abc import Sequence
from contextlib import closing, nullcontext
from typing import IO

from engine.app.cli import (
    Parser,
    add_prefix_flags,
    add_trace_flag,
    add_verbosity_flags,
    load_engine,
    rules,
    run,
    search_params,
)
from engine.app.meter import Meter
from engine.app.records import COMMON, DESCRIPTION, Records, add_request_flags, answer
from engine.app.sink import open_sink
from engine.app.trace_page import check_target, saving
from engine.contract.trace import Traces
from engine.errors import CoppiceError, UsageError
from engine.load.distributed import together
from models.sharding import Shard
from search.base import make_search

EPILOG = """\
input, an object per line (blank lines are skipped):
  {"prompt": TEXT} or {"messages": [{"role", "content"}, ...]} or {"prompt_ids": [...]}, and if you like
  "id": a string or an integer, repeated in the answer (the record's number, from 0)
  "tools": with messages, a list of functions (JSON schemas) that the model may call
  "template": with messages, an object of variables for the chat template; "think": on, off or auto
  "response_format": as OpenAI has it: {"type": "json_schema", "json_schema": {"schema": ...}}, "json_object" or "text"
  "params": an object that overrides the command line for this line. Keys are the flags in snake_case (search, beams,
    max_new_tokens, stop, choices, parse_special, ...), eos_token_ids, a list, and sequence_bias, a list of
    [[id, ...], number]; json_schema and grammar are the schema, an object, and the grammar, a text. Other flags that
    name files are for the command line alone. A line that changes the search does not inherit the parameters of the
    command line that its search lacks.

  or {"prompt" or "prompt_ids": ..., "score": [TEXT or [id, ...], ...]}: continuations, of which nothing is generated
  or {"embed": TEXT or [id, ...]}: a text whose vector is wanted; params: pooling (mean, last), normalize, dimensions

output, an object per line:
  {"id", "outputs": [{"text", "token_ids", "logprob", "score", "finish_reason"}, ...], "stats": {...}}, best first, or
  with "reasoning" beside "text" where the model wrote a thought before the answer to messages, with "item", the item's
  id, where there is a --catalogue, with "token_logprobs" ([logprob, ...]) and "top_logprobs" ([[[id, logprob], ...],
  ...]) where there is --logprobs, or
  {"id", "scores": [{"logprob", "is_greedy", "token_ids", "token_logprobs"}, ...], "stats"} for "score", or
  {"id", "embedding": [number, ...], "stats"} for "embed", or
  {"id", "error": {"code", "message"}}; the run goes on after it.

--resume keeps what FILE has, errors included, cuts off a torn last line, and goes on with the next record. Give it
the same input and the same flags.

A fault of a search of your own is the error of its line, with the code "search"; -v shows its traceback. A line can
choose every search that the command line names (--search may be repeated), and loads none.

torchrun --nproc-per-node N -m engine.batch ... shares the models among N processes, one per GPU where there are any:
the first one reads the input, and writes; sizes of memory are those of each process.

exit codes: 0 every line was answered; 2 some line has an error for an answer, or wrong usage; 3 checkpoint; 4 memory;
  5 numerics; 6 another process has ended; 1 our bug; 130 interrupted; 141 closed pipe. Codes 3 to 6 are about the whole
  run, not about a line. torchrun itself returns 1 for each of them.
"""


def main(argv: Sequence[str] | None = None, stdin: IO[bytes] | None = None, stdout: IO[bytes] | None = None) -> int:
    """Run the command line, with `stdin` and `stdout` instead of the process's if given. Returns the exit code."""
    args = make_parser().parse_args(argv)

    def whole() -> int:
        with together(args.device) as shard:
            return batch(args, stdin, stdout, shard)

    return run(whole, args.verbose, args.quiet)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("python -m engine.batch", DESCRIPTION, EPILOG, f"{COMMON} --resume --trace")
    group = parser.group("batch")
    group.add_argument("--input", default="-", metavar="FILE", help="JSON Lines to read; -: stdin (-)")
    group.add_argument("--output", default="-", metavar="FILE", help="new or empty file to write; -: stdout (-)")
    group.add_argument("--resume", action="store_true", help="go on where the output ends")
    add_trace_flag(group)
    add_request_flags(parser, "batch")
    add_prefix_flags(parser)
    add_verbosity_flags(parser)
    return parser


def batch(args: argparse.Namespace, stdin: IO[bytes] | None, stdout: IO[bytes] | None, shard: Shard) -> int:
    """Serve the input to its end. Raises CoppiceError for errors of the whole run.

    Of processes that share the models the first one reads and writes; all others get what it read.
    """
    make_search(args.search, search_params(args))  # checks the command line before anything is loaded
    rules(args)
    traces = None
    if args.trace is not None:
        check_target(args.trace, args.input, args.output)
        traces = Traces()
    args = argparse.Namespace(**{**vars(args), "shard": shard})
    if shard.rank > 0:
        args.quiet, args.trace = True, None
    source = _open_input(args, stdin) if shard.rank == 0 else io.BytesIO()
    # A pipe stays open until the process ends: closing it would wait for the thread that reads it.
    with source if source.seekable() else nullcontext(), closing(open_sink(args, source, stdout, shard)) as sink:
        engine = load_engine(args)
        meter = Meter(engine, args, source)
        records = Records(source, engine, args, sink.kept, traces)
        try:
            with saving(traces, args.trace), closing(engine.serve(records, on_step=meter.step)) as outcomes:
                for i, outcome in outcomes:
                    meter.count(outcome)
                    if args.verbose and isinstance(outcome, CoppiceError) and outcome.__cause__ is not None:
                        traceback.print_exception(outcome)
                    sink.put(i, answer(records.finish(i), outcome))
        except KeyboardInterrupt:
            if sink.file is None:
                raise
            raise KeyboardInterrupt(f"{args.output} has the answers so far; the same with --resume goes on") from None
        finally:
            meter.clear()
        if records.index < len(sink.kept):
            raise UsageError(
                f"{args.output} has {len(sink.kept)} answers, the input only {records.index} records",
                remedy="--resume needs the input that the answers are for",
            )
        meter.summary(len(sink.kept))
        if sink.errors:
            if not args.quiet:
                print(f"{sink.errors} of {sink.lines} answers are errors", file=sys.stderr)
            return UsageError.exit_code
        return 0


def _open_input(args: argparse.Namespace, stdin: IO[bytes] | None) -> IO[bytes]:
    if args.input != "-":
        try:
            return open(args.input, "rb")
        except OSError as error:
            raise UsageError(f"cannot read the input: {error.strerror}", where=args.input) from None
    if stdin is not None:
        return stdin
    if sys.stdin is None:
        raise UsageError("standard input is closed", remedy="give --input FILE")
    if sys.stdin.isatty() and not args.quiet:
        print("JSON Lines are read from the terminal; Ctrl-D ends them", file=sys.stderr)
    # Not sys.stdin: a thread that waits there holds a lock that the interpreter takes when it ends.
    return open(sys.stdin.fileno(), "rb", closefd=False)
