"""The stage of real models: of files that are there, the speed on a GPU, and tokens there and on the CPU."""

import gc
import statistics
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from engine import Engine
from search import Greedy, Trie
from search.base import Search
from tools.bench.gpu.setting import Found, Setting
from tools.bench.report import comparison

KV_MEMORY = "2G"
FAST, SURE = "bfloat16", "float32"  # dtypes: of times, and of tokens
SHORT = 16  # new tokens that are compared
PROMPTS = (
    "The capital of France is", "Why is the sky blue? The short answer is that", "def fibonacci(n):\n",
    "Three tips for learning a new language:\n1.", "A hash table is", "To make a cup of tea, first", "The moon is",
    "import json\n\ndef read_config(path):\n", "Dear friend,\n\nI have moved to", "SELECT name, price FROM",
    "The advantages of riding a bicycle are", "Water boils at 100 degrees Celsius because",
)  # fmt: skip
MODELS = f"""Times are in {FAST}. *first s* is the time to the first token of a loaded model's first request, *later ms*
the median of later requests; *greedy* and *beams* are steps per second after the first. *same* counts, of
{len(PROMPTS)} prompts, those whose {SHORT} new tokens equal the CPU's, both in {SURE}; rounding may decide between two
equally good tokens."""


def models(s: Setting) -> Found:
    """Models of files: times, and tokens beside the CPU's. A later command can name others, or bring what is absent."""
    there = [path for path in s.args.model if Path(path).exists()]
    if absent := [path for path in s.args.model if path not in there] or ([] if there else ["no file is named"]):
        s.left += len(absent)
        s.note("models", f"--model FILE: {', '.join(absent)}")
    rows = s.rows((Path(path).name, partial(measured, s, path)) for path in there)
    targets = [comparison(f"{row['model']}, greedy answers like the CPU's", row["same_greedy"], len(PROMPTS))
               for row in rows]  # fmt: skip
    return Found("Models of files.", rows, {
        "model": "{model}", "load s": "{load:.1f}", "first s": "{first:.2f}", "later ms": "{later:ms.1f}",
        "greedy": "{greedy:.0f}", "beams": "{beams_rate:.0f}", "same, greedy": "{same_greedy}",
        "same, beams": "{same_beams}",
    }, MODELS, targets)  # fmt: skip


def measured(s: Setting, path: str) -> dict[str, Any]:
    """One model."""
    beams = Trie(beams=s.args.beams)
    engine = loaded(path, s.device.type, FAST)
    first, *later = [seconds_of(engine, prompt, Greedy(), 1) for prompt in PROMPTS]
    row = {"model": Path(path).name, "load": engine.load_seconds, "first": first, "later": statistics.median(later)}
    row |= {"greedy": steps_per_second(s, engine, Greedy()), "beams_rate": steps_per_second(s, engine, beams)}
    del engine
    gc.collect()
    answers = []
    for device in (s.device.type, "cpu"):
        engine = loaded(path, device, SURE)
        answers.append([tokens_of(engine, search) for search in (Greedy(), beams)])
        del engine
        gc.collect()
    for name, ours, cpus in zip(("same_greedy", "same_beams"), *answers, strict=True):
        row[name] = sum(mine == theirs for mine, theirs in zip(ours, cpus, strict=True))
    return row


def loaded(path: str, device: str, dtype: str) -> Engine:
    """A model on a device."""
    return Engine.load(path, device=device, dtype=dtype, kv_memory=KV_MEMORY)


def tokens_of(engine: Engine, search: Search) -> list[Sequence[int]]:
    """The best answer to each prompt."""
    results = engine.generate(PROMPTS, search, max_new_tokens=SHORT, ignore_eos=True, cache_salt=None)
    return [result.outputs[0].token_ids for result in results]


def seconds_of(engine: Engine, prompt: str, search: Search, new_tokens: int) -> float:
    """The time of a request that finds nothing cached."""
    began = time.perf_counter()
    engine.generate([prompt], search, max_new_tokens=new_tokens, ignore_eos=True, cache_salt=None)
    return time.perf_counter() - began


def steps_per_second(s: Setting, engine: Engine, search: Search) -> float:
    """Steps after the first, the median of the prompts but the first, which records graphs."""
    new, rates = s.args.new_tokens, []
    for prompt in PROMPTS[:4]:
        short, long = (seconds_of(engine, prompt, search, count) for count in (1, new))
        rates.append((new - 1) / max(long - short, 1e-9))
    return statistics.median(rates[1:])
