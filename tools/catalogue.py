"""Make a catalogue for `--catalogue`: `python -m tools.catalogue --model DIR --input items.jsonl --output FILE`.

A line of the input is an item: {"text": TEXT} or {"token_ids": [...]}, and "id", a string or an integer (the item's
number, from 0). Each text is tokenised without the prompt; if prompts end without a space, it should begin with one.
"""

import argparse
import json
import sys
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from engine.app import cli
from engine.demo import demo_folder
from engine.errors import CoppiceError, UsageError, shortened
from models.later import later

with later():
    import torch
    from torch import Tensor

    from engine.load.hub import local_path
    from engine.rules.catalogue import CATALOGUE_FILE
    from engine.text.tokenizer import Tokenizer
    from models.checkpoint.files import replacing
    from models.checkpoint.headers import Checkpoint
    from models.checkpoint.tensor_files import buffer_of
    from models.checkpoint.token_files import TokenFileWriter

KEYS = {"id", "text", "token_ids"}
SHOWN = 5  # repeated items that are named


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit code."""
    summary, _, epilog = (__doc__ or "").partition("\n\n")
    parser = cli.Parser("python -m tools.catalogue", summary, epilog)
    parser.add_argument("--model", metavar="DIR", help="checkpoint folder, whose tokens items are (the bundled demo)")
    parser.add_argument("--input", required=True, metavar="FILE", help="items as JSON Lines; -: stdin")
    text = "the catalogue; replaced if it is there"
    parser.add_argument("--output", required=True, type=cli.output_file, metavar="FILE", help=text)
    parser.add_argument("-q", "--quiet", action="store_true", help="nothing on stderr but errors")
    parser.add_argument("-v", "--verbose", action="store_true", help="tracebacks")
    args = parser.parse_args(argv)
    return cli.run(lambda: make(args), args.verbose)


def make(args: argparse.Namespace) -> int:
    """Read, build, write."""
    began = time.monotonic()
    checkpoint = Checkpoint.open(local_path(args.model or demo_folder()))
    tokenizer = Tokenizer.of(checkpoint)
    eos = set(checkpoint.eos_token_ids)
    if not eos and tokenizer is not None and tokenizer.eos_token_id is not None:
        eos = {tokenizer.eos_token_id}
    vocab = tokenizer.size if tokenizer is not None else checkpoint.fields.int("vocab_size")
    items = Items(tokenizer, vocab, eos)
    items.read(args.input)
    built = items.build()
    fingerprint = tokenizer.fingerprint if tokenizer is not None else ""
    write_catalogue(args.output, built, items.ids, vocab, fingerprint)
    if not args.quiet:
        items.report(built)
        size, seconds = args.output.stat().st_size, time.monotonic() - began
        print(
            f"{args.output.name}: {len(built.ends):,} items of up to {max(items.lengths)} tokens, "
            f"{len(built.tokens):,} edges, {size / 1e6:.1f} MB, {seconds:.1f} s",
            file=sys.stderr,
        )
    return 0


# --- the file ---


class Built(NamedTuple):
    """The trie of items, without their ids.

    Attributes:
        tokens, first_edges, ends: int32, see `engine.rules.catalogue`.
        order: int64 [items], for each end the item, by its place in the input.
        repeats: (item, earlier item of the same tokens), by their places in the input; these items are left out.
    """

    tokens: Tensor
    first_edges: Tensor
    ends: Tensor
    order: Tensor
    repeats: list[tuple[int, int]]


def build(tokens_T: Tensor, lengths_I: Tensor) -> Built:
    """Make the trie of items, level by level.

    Args:
        tokens_T: int32, the tokens of all items, one item after the other.
        lengths_I: int64, the number of tokens of each item; at least 1.
    """
    starts_I, end_I = lengths_I.cumsum(0) - lengths_I, torch.zeros_like(lengths_I)
    going, parent = torch.arange(len(lengths_I)), torch.zeros_like(lengths_I)
    nodes, depth = 1, 0
    tokens, parents = [tokens_T[:0]], [parent[:0]]
    while len(going):
        edges, which = torch.unique(parent << 32 | tokens_T[starts_I[going] + depth], return_inverse=True)
        tokens.append((edges & (1 << 32) - 1).int())
        parents.append(edges >> 32)
        node, depth = which + nodes, depth + 1
        nodes += len(edges)
        end_I[going] = node  # overwritten until the item's last node
        more = lengths_I[going] > depth
        going, parent = going[more], node[more]
    children_N = torch.bincount(torch.cat(parents), minlength=nodes)
    first_edges = torch.cat([children_N[:1] * 0, children_N.cumsum(0)]).int()
    ends, order = end_I.sort(stable=True)
    new = torch.ones_like(ends, dtype=torch.bool)
    new[1:] = ends[1:] != ends[:-1]
    first = order[new][new.cumsum(0) - 1]
    repeats = sorted(zip(order[~new].tolist(), first[~new].tolist(), strict=True))
    return Built(torch.cat(tokens), first_edges, ends[new].int(), order[new], repeats)


def write_catalogue(
    path: str | Path, built: Built, ids: Sequence[str | int], vocab_size: int, fingerprint: str
) -> None:
    """Write a catalogue; a write that fails leaves no file, or the old one.

    Args:
        path: the file.
        built: the trie.
        ids: the ids of all items of the input.
        vocab_size: tokens are less than this.
        fingerprint: the tokenizer's; empty for none.

    Raises:
        UsageError: the file cannot be written, or there are 2^31 edges or more.
    """
    if len(built.tokens) >= 1 << 31:
        raise UsageError(f"catalogues hold less than {1 << 31} edges, this has {len(built.tokens)}", where=str(path))
    texts = [json.dumps(ids[i]).encode() for i in built.order.tolist()]
    id_starts = torch.tensor([0, *map(len, texts)], dtype=torch.int64).cumsum(0)
    arrays = id_starts, built.tokens, built.first_edges, built.ends
    ids_of_items = b"".join(texts)
    try:
        with replacing(Path(path), 0o666) as file:
            writer = TokenFileWriter(CATALOGUE_FILE, file)
            for part in (*map(buffer_of, arrays), ids_of_items):
                writer.add(part)
            writer.finish(vocab_size, fingerprint, len(built.tokens), len(built.ends), len(ids_of_items))
    except OSError as error:
        raise UsageError(f"the catalogue cannot be written: {error.strerror}", where=str(path)) from error


# --- the input ---


class Items:
    """The items of an input.

    Args:
        tokenizer: of the model, if it has one.
        vocab: size of the vocabulary; tokens must be less.
        eos: tokens that end an output; no item may contain them.

    Attributes:
        ids, lines, lengths: for each item its id, its line, counted from 1, and its number of tokens.
    """

    def __init__(self, tokenizer: Tokenizer | None, vocab: int, eos: set[int]):
        self.tokenizer, self.vocab, self.eos = tokenizer, vocab, eos
        self.ids: list[str | int] = []
        self.lines, self.lengths, self._tokens = array("q"), array("q"), array("i")

    def read(self, name: str) -> None:
        """Read a file of items; - is stdin. Raises UsageError, which names the line."""
        try:
            with open(0 if name == "-" else name, "rb", closefd=name != "-") as file:
                for number, line in enumerate(file, 1):
                    if line.strip():
                        try:
                            self._add(line, number)
                        except (CoppiceError, ValueError) as error:
                            what = error.what if isinstance(error, CoppiceError) else str(error)
                            raise UsageError(what, where=f"{name}, line {number}") from None
        except OSError as error:
            raise UsageError(f"--input: {error.strerror}", where=name) from error
        if not self.ids:
            raise UsageError("--input: there are no items", where=name)

    def _add(self, line: bytes, number: int) -> None:
        """Add a line's item. Raises ValueError or UsageError."""
        record = cli.parse_object(line)
        if not record.keys() <= KEYS or ("text" in record) is ("token_ids" in record):
            raise ValueError(f'expected "text" or "token_ids", and "id", got {", ".join(record) or "none"}')
        identity = record.get("id", len(self.ids))
        if type(identity) not in (str, int):
            raise ValueError(f"id: expected a string or an integer, got {shortened(repr(identity))}")
        tokens = self._of_text(record["text"]) if "text" in record else record["token_ids"]
        if type(tokens) is not list or {*map(type, tokens)} != {int}:
            raise ValueError(f"token_ids: expected a list of at least one integer, got {shortened(repr(tokens))}")
        if min(tokens) < 0 or max(tokens) >= self.vocab:
            raise ValueError(f"token_ids: expected ids from 0 to {self.vocab - 1}, got {shortened(repr(tokens))}")
        if not self.eos.isdisjoint(tokens):
            end = min(self.eos.intersection(tokens))
            raise ValueError(f"the item has the token {end}, which ends an output; leave it out")
        self.ids.append(identity)
        self.lines.append(number)
        self.lengths.append(len(tokens))
        self._tokens.extend(tokens)

    def _of_text(self, text: Any) -> list[int]:
        if self.tokenizer is None:
            raise ValueError("text: this checkpoint has no tokenizer; give token_ids")
        if not isinstance(text, str) or not text:
            raise ValueError(f"text: expected a text, got {shortened(repr(text))}")
        return self.tokenizer.encode(text, add_special=False)

    def build(self) -> Built:
        """The trie of all items."""
        return build(
            torch.frombuffer(self._tokens, dtype=torch.int32), torch.frombuffer(self.lengths, dtype=torch.int64)
        )

    def report(self, built: Built) -> None:
        """Print the items that are left out because earlier ones have the same tokens."""
        if built.repeats:
            named = [f"line {self.lines[i]} (as line {self.lines[first]})" for i, first in built.repeats[:SHOWN]]
            if (more := len(built.repeats) - SHOWN) > 0:
                named.append(f"{more:,} more")
            print(f"left out, as they repeat earlier items: {', '.join(named)}", file=sys.stderr)


if __name__ == "__main__":
    sys.exit(cli.ended(main))
