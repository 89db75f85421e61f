"""A long chat: how much of each prompt the cache answers once the context is full, and what stays in memory."""

import argparse
import os
import random
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

from engine.demo import demo_folder
from models.later import later
from tools.bench import measure
from tools.bench.flags import add_numbers, add_run_flags
from tools.bench.report import finish, rows_table, stamp

with later():
    from engine import Engine
    from engine.conversation import Conversation, Dropped
    from engine.engine import Done
    from search import Greedy

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
    add_numbers(parser, turns=1000, max_new_tokens=(256, "of each reply"))
    add_run_flags(parser, "benchmarks", None, run)


def run(args: argparse.Namespace, argv: Sequence[str]) -> dict[str, Any]:
    """Measure and report."""
    made = stamp(argv)
    rows = talk(args.turns, args.max_new_tokens, args.threads)
    prompt, reused = sum(r["prompt_tokens"] for r in rows), sum(r["reused_tokens"] for r in rows)
    for row in rows:
        row |= {"prompt_mean": row["prompt_tokens"] / row["count"], "cpu_mean": row["cpu_seconds"] / row["count"]}
        row["reused"] = row["reused_tokens"] / row["prompt_tokens"]
    body = "\n\n".join([
        f"The bundled model, greedy search, context of 512 tokens; of all prompt tokens {reused / prompt:.1%} reused.",
        rows_table(rows, {
            "turns": "to {turns}", "prompt tokens, mean": "{prompt_mean:.0f}", "reused": "{reused:.1%}",
            "dropped": "{dropped}", "CPU ms per turn": "{cpu_mean:ms.0f}", "RSS MB": "{rss:MB}"}),
        LEGEND,
    ])  # fmt: skip
    result = {"turns": args.turns, "reused": reused / prompt, "results": rows}
    finish("chat", made, body, result, args.save)
    return result


def talk(turns: int, new_tokens: int, threads: int | None = None) -> list[dict[str, Any]]:
    """Run the chat; returns the figures of each tenth."""
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
    """An endless random sequence of questions for the bundled model."""
    draw = random.Random(0)
    while True:
        yield draw.choice(QUESTIONS).format(draw.randrange(10), draw.randrange(10))
