"""Count the tri-grams of texts into a store for `--search aded`: `python -m tools.ngrams --model DIR --input FILES...`.

Texts are read in pieces, which are tokenised separately; counts that do not fit into memory are kept in files.
An input can also be a store of the same tokenizer, whose counts are added.
"""

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from engine.app import cli
from engine.errors import UsageError
from models.later import later

with later():
    from engine.load.hub import local_path
    from engine.text.tokenizer import Tokenizer
    from models.checkpoint.headers import Checkpoint
    from search.aded.ngrams import NGRAM_FILE, REST, SUCCESSORS, Run, count, merge, open_store, write_store

PIECE = 1 << 18  # characters tokenised at once
HELD = 1 << 22  # approximate number of tri-grams in memory; 16 bytes each, and as much again while they are merged


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    parser = cli.Parser("python -m tools.ngrams", __doc__ or "")
    parser.add_argument("--model", required=True, metavar="DIR", help="checkpoint folder; its tokenizer is what counts")
    parser.add_argument("--input", required=True, nargs="+", metavar="FILE", help="UTF-8 texts or stores; -: stdin")
    text = "the store; replaced if it is there"
    parser.add_argument("--output", required=True, type=cli.output_file, metavar="FILE", help=text)
    text = "likeliest successors kept per pair of tokens, at least 4; 0: all (as many as the search itself keeps)"
    parser.add_argument("--successors", type=int, metavar="N", help=text)
    parser.add_argument("-q", "--quiet", action="store_true", help="nothing on stderr but errors")
    parser.add_argument("-v", "--verbose", action="store_true", help="tracebacks")
    args = parser.parse_args(argv)
    return cli.run(lambda: build(args), args.verbose)


def build(args: argparse.Namespace) -> int:
    """Count, merge, write."""
    args.successors = SUCCESSORS if args.successors is None else args.successors
    if args.successors and not 4 <= args.successors < REST:
        raise UsageError(f"--successors: expected 0 or an integer >= 4, got {args.successors}")
    checkpoint = Checkpoint.open(local_path(args.model))
    tokenizer = Tokenizer.of(checkpoint) or Tokenizer.load(checkpoint.folder)  # which says what is missing
    began, tokens = time.monotonic(), 0

    def progress(text: str, end: str = "\r") -> None:
        """One line that is drawn over on a terminal, the last line elsewhere."""
        terminal = sys.stderr.isatty()
        if not args.quiet and (terminal or end == "\n"):
            line = f"{text}, {tokens:,} tokens, {time.monotonic() - began:.0f} s"
            print(f"{line}\x1b[K" if terminal else line, file=sys.stderr, end=end)

    try:
        spill = tempfile.TemporaryDirectory(prefix="ngrams-", dir=args.output.parent)
    except OSError as error:
        raise UsageError(f"--output: {error.strerror}", where=str(args.output)) from error
    with spill as folder:
        done: list[Run] = []  # in files of `folder`
        held: list[Run] = []

        def settle() -> None:
            """Merge the counts in memory, and write them to a file if there are many."""
            runs = list(merge(held, successors=0)) if held else []
            held.clear()
            if sum(len(keys) for keys, _ in runs) > HELD // 2:
                path = Path(folder) / str(len(done))
                write_store(path, runs, tokenizer.size, tokenizer.fingerprint)
                done.append(open_store(path).run())
            else:
                held.extend(runs)

        for name in args.input:
            if name != "-" and is_store(name):
                store = open_store(name)
                store.check(tokenizer.size, tokenizer.fingerprint)
                done.append(store.run())
                continue
            for text in pieces(name):
                ids = tokenizer.encode(text, add_special=False)
                tokens += len(ids)
                held.append(count(ids))
                if sum(len(keys) for keys, _ in held) > HELD:
                    settle()
                progress(f"counting {Path(name).name}")
        settle()
        if not done + held:
            raise UsageError("--input: a store counts three tokens in a row, and no text has that many")
        progress("merging")
        entries = write_store(args.output, merge(done + held, args.successors), tokenizer.size, tokenizer.fingerprint)
    progress(f"{args.output.name}: {entries:,} entries, {args.output.stat().st_size / 1e6:.1f} MB", "\n")
    return 0


def is_store(name: str) -> bool:
    """Whether a file begins as a store does. A pipe counts as a text: reading from it here would lose its beginning."""
    if not Path(name).is_file():
        return False
    try:
        with open(name, "rb") as file:
            return file.read(len(NGRAM_FILE.magic)) == NGRAM_FILE.magic
    except OSError as error:
        raise UsageError(f"--input: {error.strerror}", where=name) from error


def pieces(name: str) -> Iterator[str]:
    """A text in pieces that end with a line, if its lines are not too long for that."""
    try:
        with open(0 if name == "-" else name, encoding="utf-8", closefd=name != "-") as file:
            while text := file.read(PIECE):
                yield text + file.readline(PIECE)
    except UnicodeDecodeError as error:
        raise UsageError(f"--input: not valid UTF-8: {error.reason}", where=name) from error
    except OSError as error:
        raise UsageError(f"--input: {error.strerror}", where=name) from error


if __name__ == "__main__":
    sys.exit(cli.ended(main))
