"""Drafts under greedy decoding, beams and samples: passes and time without drafts, with n-grams, with suffixes, and
with a draft model (--draft).

Requests copy, edit code or write freely. Every search answers all of them, one at a time, without drafts and with each
drafter, in interleaved rounds. A drafter starts empty for each kind of text and may use the ended requests of this
kind. Times exclude prompts.

With --llama-lookup, llama.cpp's lookup decoding answers the same prompts from the same GGUF file, with drafts and
without (`cmake --build build --target llama-lookup`; for the sources see `python -m tools.bench peers --help`).

Finally the suffix store is measured alone: its memory, and the times to add, propose, save and load.
"""

import argparse
import os
import re
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

from engine.app.cli import add_load_flag
from engine.demo import demo_folder, is_demo
from engine.drafts import Drafter
from engine.drafts.backoff import NGramDrafter
from engine.drafts.choice import drafter_of
from engine.errors import UsageError
from models.later import later
from tools.bench.checkpoints import CODE, MODEL_HELP, find, is_gguf, located
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.measure import MB, cores, in_turn, memory, progress, ratio
from tools.bench.report import comparison, comparison_table, finish, rows_table, stamp

with later():
    from engine import Engine
    from engine.contract import Search
    from engine.drafts.suffixes import CAPACITY, SuffixDrafter, SuffixStore
    from engine.step.drafting import EngineDrafts
    from search import Greedy, Sample, Trie
    from tools.bench.searches import after_prompt
    from tools.bench.texts import Asked, ask, chats, edits, passages

SEARCHES: dict[str, Callable[[], Search]] = {
    "greedy": lambda: Greedy(),
    "5 beams": lambda: Trie(5),
    "sample x 4": lambda: Sample(num_return_sequences=4),
    "15 beams": lambda: Trie(15),
}
DRAFTERS = ("off", "ngrams", "suffix")  # and "model", where there is a draft model
KINDS = ("code edits", "copying", "open prose")  # of requests
COPYING = ("code edits", "copying")
WANTED = {"greedy": 2.0, "5 beams": 1.5, "sample x 4": 1.4, "15 beams": 0.98}  # x where text repeats
NEVER_BELOW = 0.98  # x elsewhere
STORE_MB, PROPOSAL_US, ADD_US = 200, 50.0, 1.0  # wanted of the store, at its full size
COPIED = 600  # characters of a text that is to be copied
NODES, DEPTH = (16, 32), 16  # of a proposal
TEXT_TOKENS = 1000  # of a text that is added to the store
DECODED = re.compile(r"decoded +(\d+) tokens in +([\d.]+) seconds")
LEGEND = """*passes* counts the passes of all requests, without those of prompts. *tokens a pass* divides the passes
without drafts by these. *nodes* is the number of drafted nodes that were evaluated per pass. *x by CPU time* and *x by
the clock* divide the time without drafts by the time with them (the median over rounds). *same* says whether tokens and
log-probabilities equal those without drafts."""


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("drafts", help="drafts under every search, and the suffix store", description=__doc__)
    parser.add_argument("--model", metavar="MODEL", help=MODEL_HELP.replace("smollm2-135m-instruct", CODE) % "the demo")
    parser.add_argument("--draft", metavar="MODEL", help="also measure drafts by this draft model or draft head")
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=[*KINDS], help="kinds of text (all)")
    parser.add_argument("--searches", nargs="+", choices=SEARCHES, default=[*SEARCHES], help="searches (all)")
    text = "llama.cpp's llama-lookup, measured as well; --model must be a GGUF file"
    parser.add_argument("--llama-lookup", type=Path, metavar="PATH", help=text)
    add_load_flag(parser, "quant")
    add_load_flag(parser, "activations")
    add_numbers(
        parser,
        prompts=(3, "requests of each kind"),
        new_tokens=(128, "tokens of an answer, at most"),
        runs=(3, "runs of each request; the figures are medians"),
        store_tokens=(
            None,
            "tokens in the suffix store that is measured alone, 0 to leave it out (as many as it holds)",
        ),
    )
    add_run_flags(parser, "drafts", "auto", run)


def copies(engine: Engine, number: int) -> list[Asked]:
    """Requests to repeat a passage."""
    texts = [passage[: passage.rindex(" ", 0, COPIED)].strip() for passage in passages()[:number]]
    return [ask(engine, f"Repeat this text word for word, and nothing else.\n\n{text}") for text in texts]


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made, make = stamp(argv), dict(zip(KINDS, (edits, copies, chats), strict=True))
    tokens = CAPACITY if args.store_tokens is None else args.store_tokens
    store = measure_store(tokens) if tokens else None
    path = located(args.model) if args.model else find(CODE) or demo_folder()
    if args.llama_lookup is not None and not is_gguf(path):
        raise UsageError("--llama-lookup: llama.cpp reads GGUF files", remedy="give one as --model")
    draft = None if args.draft is None else located(args.draft)
    formats = {"dtype": args.dtype, "quant": args.quant, "activations": args.activations}
    engine = Engine.load(path, draft=draft, threads=args.threads, **formats)
    name, rows, peers = "demo" if is_demo(path) else path.name, list[dict[str, Any]](), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:
        for kind in args.kinds:
            asked = make[kind](engine, args.prompts)
            for search in args.searches:
                progress(f"{kind}, {search}")
                rows += compare(engine, kind, search, asked, args)
            if args.llama_lookup is not None:
                peers.append({"kind": kind, **compare_lookup(engine, asked, args, path, Path(scratch))})
    compared = [
        comparison(f"{row['search']} with {row['drafter']}, {row['kind']}", row["cpu_ratio"], wanted(row))
        for row in rows
        if row["drafter"] != "off"
    ]
    if store is not None:
        compared += [
            comparison("store, MB", store["bytes"] / MB, STORE_MB, at_most=True),
            comparison("proposal of 32 nodes, us", store["proposal_us"][1], PROPOSAL_US, at_most=True),
            comparison("adding a token, us", store["add_us"], ADD_US, at_most=True),
        ]
    threads = args.threads or cores()
    parts = [
        f"{name}, dtype {args.dtype}, quant {args.quant}, {threads} threads; {args.prompts} requests of each kind, at "
        f"most {args.new_tokens} tokens.",
        rows_table(rows, {
            "text": "{kind}", "search": "{search}", "drafts": "{drafter}", "passes": "{passes}",
            "tokens a pass": "{gain:.2f}", "nodes": "{nodes:.1f}", "CPU s": "{cpu:.2f}", "s": "{seconds:.2f}",
            "x by CPU time": "{cpu_ratio:.2f}", "x by the clock": "{ratio:.2f}", "same": "{same:yes}"}),
        LEGEND,
    ]  # fmt: skip
    if peers:
        parts.append(rows_table(peers, {
            "llama.cpp, greedy": "{kind}", "tokens/s": "{plain:.1f}", "tokens/s, lookup": "{lookup:.1f}",
            "x by the clock": "{ratio:.2f}"}))  # fmt: skip
    if store is not None:
        parts.append(store_text(store))
    parts.append(comparison_table(compared))
    result = {"model": name, "results": rows, "llama_lookup": peers, "store": store, "compared": compared}
    finish("drafts", made, "\n\n".join(parts), result, args.save)
    return result


def wanted(row: dict[str, Any]) -> float:
    """The target for the speed relative to no drafts."""
    return WANTED[row["search"]] if row["kind"] in COPYING else NEVER_BELOW


# --- drafts under searches ---


def make_drafter(name: str, engine: Engine) -> Drafter | None:
    """A new drafter; None for "off"."""
    if name == "suffix":
        return SuffixDrafter(SuffixStore(engine.runner.vocab_size, engine.tokenizer.fingerprint))
    if name == "model":
        return drafter_of("model", engine.companions["draft"].runner)
    return NGramDrafter() if name == "ngrams" else None


def compare(engine: Engine, kind: str, search: str, asked: Sequence[Asked], args: argparse.Namespace) -> list[dict]:
    """Measure a search without drafts and with each drafter, interleaved; a row for each."""

    def answer_all(name: str, _: int) -> dict[str, Any]:
        drafter = make_drafter(name, engine)
        engine.drafts = None if drafter is None else EngineDrafts(drafter)
        options = [{"max_new_tokens": args.new_tokens, "eos_token_ids": one.ends} for one in asked]
        found = [after_prompt(engine, one.ids, SEARCHES[search](), **o) for one, o in zip(asked, options, strict=True)]
        used, results = map(list, zip(*found, strict=True))
        stats = [result.stats for result in results]
        return {
            "seconds": sum(one["decode_seconds"] for one in stats),
            "cpu": sum(used),
            "passes": sum(one["forward_passes"] for one in stats) - len(stats),
            "drafted": sum(one.get("drafted_nodes", 0) for one in stats),
            "outputs": [[(o.token_ids, o.logprob) for o in result.outputs] for result in results],
        }

    names = [*DRAFTERS, *(["model"] if "draft" in engine.companions else [])]
    found = in_turn({name: partial(answer_all, name) for name in names}, args.runs)
    engine.drafts = None
    plain, rows = found["off"], []
    for name, rounds in found.items():
        seconds, used = ([one[key] for one in rounds] for key in ("seconds", "cpu"))
        passes = statistics.median(one["passes"] for one in rounds)
        rows.append({
            "kind": kind, "search": search, "drafter": name, "passes": passes,
            "gain": plain[0]["passes"] / passes,
            "nodes": statistics.median(one["drafted"] for one in rounds) / passes,
            "seconds": statistics.median(seconds), "cpu": statistics.median(used),
            "ratio": ratio([one["seconds"] for one in plain], seconds),
            "cpu_ratio": ratio([one["cpu"] for one in plain], used),
            "same": all(one["outputs"] == plain[0]["outputs"] for one in rounds),
        })  # fmt: skip
    return rows


# --- llama.cpp ---


def compare_lookup(
    engine: Engine, asked: Sequence[Asked], args: argparse.Namespace, model: Path, scratch: Path
) -> dict[str, Any]:
    """Tokens per second of llama.cpp's lookup decoding without drafts and with up to 16 nodes, interleaved."""
    prompts = []
    for i, one in enumerate(asked):
        prompts.append(scratch / f"prompt-{i}")
        prompts[-1].write_text(engine.tokenizer.decode(one.ids), encoding="utf-8")
    threads = str(args.threads or cores())

    def speed(drafted: int, _: int) -> float:
        tokens, seconds = 0, 0.0
        for prompt in prompts:
            flags = ["-f", prompt, "-n", str(args.new_tokens), "-t", threads, "-c", "4096", "--temp", "0"]
            command = [args.llama_lookup, "-m", model, *flags, "--spec-draft-n-max", str(drafted)]
            done = subprocess.run(command, capture_output=True, text=True, errors="replace", stdin=subprocess.DEVNULL)
            told = DECODED.search(done.stdout + done.stderr)
            if done.returncode or told is None:
                last = (done.stderr.strip().splitlines() or ["nothing"])[-1]
                raise UsageError(f"--llama-lookup: the program failed: {last}", where=str(args.llama_lookup))
            tokens, seconds = tokens + int(told[1]), seconds + float(told[2])
        return tokens / seconds

    found = in_turn({n: partial(speed, n) for n in (0, 16)}, args.runs)
    plain, lookup = found[0], found[16]
    return {"plain": statistics.median(plain), "lookup": statistics.median(lookup), "ratio": ratio(lookup, plain)}


# --- the store ---


def words(vocab: int) -> Any:
    """Endless words of 1 to 5 random tokens, some of which are frequent and most are rare, as in a language."""
    draw = Random(0)
    known = [[draw.randrange(vocab) for _ in range(draw.randrange(1, 6))] for _ in range(60_000)]
    total, sums = 0.0, []
    for rank in range(len(known)):
        total += 1 / (rank + 2)
        sums.append(total)
    while True:
        yield from draw.choices(known, cum_weights=sums, k=1000)


def measure_store(tokens: int, vocab: int = 49152) -> dict[str, Any]:
    """Memory and times of a store that is full of texts of random words."""
    progress(f"a store of {tokens} tokens")
    source, texts = words(vocab), list[list[int]]()
    before, store, used, drawn = memory(os.getpid(), "VmRSS") or 0, SuffixStore(vocab, capacity=tokens), 0.0, Random(1)
    drafter = SuffixDrafter(store)
    while len(store) < tokens:
        text: list[int] = []
        while len(text) < TEXT_TOKENS:
            text += next(source)
        began = time.process_time()
        store.add("", text)
        used += time.process_time() - began
        if drawn.random() < 200 * TEXT_TOKENS / tokens or not texts:
            texts.append(text)
    grown = (memory(os.getpid(), "VmRSS") or 0) - before
    medians, slow = [], []
    for nodes in NODES:
        seconds = []
        for text in texts:
            cut = drawn.randrange(TEXT_TOKENS // 2, TEXT_TOKENS - DEPTH)
            request = drafter.open("", text[: cut // 2])
            for ahead in range(0, cut - cut // 2, TEXT_TOKENS // 50):
                path = text[cut // 2 : cut // 2 + ahead][-DEPTH:]
                began = time.perf_counter()
                request.draft(path, nodes, DEPTH)
                seconds.append(time.perf_counter() - began)
        seconds.sort()
        medians.append(statistics.median(seconds) * 1e6)
        slow.append(seconds[len(seconds) * 99 // 100] * 1e6)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / "texts"
        began = time.perf_counter()
        store.save(path)
        saved, size = time.perf_counter() - began, path.stat().st_size
        del store, drafter, request
        again, began = SuffixStore(vocab, capacity=tokens), time.perf_counter()
        again.load(path)
        loaded = time.perf_counter() - began
    return {
        "tokens": tokens, "bytes": grown, "add_us": used / tokens * 1e6, "nodes": NODES, "proposal_us": medians,
        "proposal_us_p99": slow, "save_seconds": saved, "load_seconds": loaded, "file_bytes": size,
    }  # fmt: skip


def store_text(store: dict[str, Any]) -> str:
    """The figures of the store, as a table with an explanation."""
    rows = [
        {"what": f"proposal of {nodes} nodes, median and 99th percentile", "figure": f"{median:.0f} and {slow:.0f} us"}
        for nodes, median, slow in zip(store["nodes"], store["proposal_us"], store["proposal_us_p99"], strict=True)
    ]
    rows = [
        {"what": "memory", "figure": f"{store['bytes'] / MB:.0f} MB"},
        {"what": "adding a token", "figure": f"{store['add_us']:.2f} us"},
        *rows,
        {"what": "save", "figure": f"{store['save_seconds']:.2f} s, {store['file_bytes'] / MB:.0f} MB"},
        {"what": "load", "figure": f"{store['load_seconds']:.2f} s"},
    ]
    head = f"suffix store of {store['tokens']:,} tokens"
    return rows_table(rows, {head: "{what}", "": "{figure}"}) + (
        f"\n\nThe store holds texts of {TEXT_TOKENS} tokens, random words of a vocabulary of 49,152. A proposal, "
        "called from Python, searches the request's own text and the store."
    )
