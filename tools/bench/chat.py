"""A long chat: how much of each prompt the cache answers once the context is full, and what stays in memory."""

import argparse
import os
import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from engine import Engine
from engine.conversation import Conversation, Dropped
from engine.demo import demo_folder
from engine.engine import Done
from search import Greedy
from tools.bench import measure
from tools.bench.report import add_save_flag, finish, megabytes, stamp, table

LEGEND = """A row counts the turns since the row before it. *reused*: tokens of all prompts together that were in the
cache, over all tokens of the prompts. *dropped*: how often the context was full, so that old turns were left out.
*RSS*: resident memory of the process after the last of the turns."""
QUESTIONS = (
    "What is {} + {}?",
    "What is the opposite of hot?",
    "What color is grass?",
    "What day comes after Monday?",
    "What is the capital of France?",
    "My name is Ann {}.",
    "What is my name?",
    "Tell me a story about a cat and {} mice.",
)


def add_parser(commands: Any) -> None:
    parser = commands.add_parser("chat", help="a long chat on the bundled model", description=__doc__)
    parser.add_argument("--turns", type=int, default=1000, help="(%(default)s)")
    parser.add_argument("--max-new-tokens", type=int, default=256, help="of each reply (%(default)s)")
    parser.add_argument("--threads", type=int)
    add_save_flag(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made = stamp(argv)
    rows = talk(args.turns, args.max_new_tokens, args.threads)
    prompt, reused = sum(r["prompt_tokens"] for r in rows), sum(r["reused_tokens"] for r in rows)
    body = "\n\n".join([
        f"The bundled model, greedy search, context of 512 tokens; of all prompt tokens {reused / prompt:.1%} reused.",
        table(
            ["turns", "prompt tokens, mean", "reused", "dropped", "CPU ms per turn", "RSS MB"],
            [[f"to {r['turns']}", f"{r['prompt_tokens'] / r['count']:.0f}",
              f"{r['reused_tokens'] / r['prompt_tokens']:.1%}", r["dropped"],
              f"{1000 * r['cpu_seconds'] / r['count']:.0f}", megabytes(r["rss"])] for r in rows],
        ),
        LEGEND,
    ])  # fmt: skip
    result = {"turns": args.turns, "reused": reused / prompt, "results": rows}
    finish("chat", made, body, result, args.save)
    return result


def talk(turns: int, new_tokens: int, threads: int | None = None) -> list[dict[str, Any]]:
    """Hold the chat; figures of ten parts of it."""
    engine = Engine.load(demo_folder(), threads=threads, kv_memory=64 << 20)
    conversation, rows = Conversation(engine), []
    part, seconds = dict.fromkeys(("count", "prompt_tokens", "reused_tokens", "dropped"), 0), time.process_time()
    for turn, user in enumerate(islice(questions(), turns), 1):
        for event in conversation.stream(user, Greedy(), max_new_tokens=new_tokens):
            if isinstance(event, Dropped):
                part["dropped"] += 1
            elif isinstance(event, Done):
                part["count"] += 1
                for key in ("prompt_tokens", "reused_tokens"):
                    part[key] += event.result.stats[key]
        if turn % max(1, turns // 10) == 0 or turn == turns:
            now, rss = time.process_time(), measure.memory(os.getpid(), "VmRSS")
            rows.append({"turns": turn, **part, "cpu_seconds": now - seconds, "rss": rss})
            part, seconds = dict.fromkeys(part, 0), now
            measure.progress(f"{turn} of {turns} turns")
    conversation.reset()
    return rows


def questions() -> Iterator[str]:
    """What somebody might ask the bundled model, for ever, in no order that repeats."""
    draw = random.Random(0)
    while True:
        yield draw.choice(QUESTIONS).format(draw.randrange(10), draw.randrange(10))
