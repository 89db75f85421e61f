"""Stages of generative recommendation: wide beams for three tokens, beside what others have published.

- SGLang, github.com/sgl-project/sglang/pull/31626: Qwen3-0.6B-Base in bfloat16 on an H200, 5000 beams and as many
  outputs of 3 tokens, without a catalogue: 158 ms is the median of concurrent requests without overlapped scheduling,
  245 the mean. The length of the prompts is not given; the server's context was 4096.
- NVIDIA's SID-GR and SGLang's pull request 15645, as measured by NVIDIA, github.com/NVIDIA/recsys-examples, folder
  examples/sid-gr-inference: Qwen3-1.7B on an H100 80GB, 256 beams, 3 tokens, without cached prefixes.
"""

import statistics
import tempfile
import time
from collections import defaultdict
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine import Engine
from engine.request import Request
from engine.rules.catalogue import Catalogue
from models.families.qwen3 import Qwen3
from search import Trie
from tools.bench.gpu.random_models import make
from tools.bench.gpu.setting import Found, Setting
from tools.bench.gpu.whole_steps import busy, kernels_of, tokens_of
from tools.bench.report import comparison
from tools.catalogue import build, write_catalogue
from tools.profile.clock import Watch, watched

RUNS = 3  # after one that compiles and records
PLACES = 3  # tokens of an item
ITEMS, BOOK = 500_000, 8192  # of a random catalogue; tokens that can stand at a place, others at each
SGLANG_WIDE = 0.158  # seconds
WIDTHS = (10, 50, 100, 200)  # beams of requests whose rate is measured
READ = 1000  # tokens of their prompts
PUBLISHED = {  # (beams, tokens of the prompt, requests at once): seconds by SGLang and by SID-GR, on an H100
    (256, 1000, 1): (33.515e-3, 17.611e-3),
    (256, 1000, 8): (199.28e-3, 93.23e-3),
    (256, 5000, 1): (94.554e-3, 42.255e-3),
    (256, 5000, 8): (685.354e-3, 307.917e-3),
}
WHOLE = """*ms* is the time of a request from its tokens to its outputs, the median of runs after a warm-up. *steps*
lists the time of each step of the driver; the first step reads the prompt. *GPU ms* is the time during which any kernel
ran, and *host* lists the largest parts of the host's time, each from a separate run. SGLang's time is the median of
concurrent requests on an H200, after prompts of unknown length; ours is that of a single request."""
RATES = """*ms* is the time of all requests at once, the median of runs after a warm-up. *SGLang* and *SID-GR* are the
times that NVIDIA has published for the same shape, beams, tokens and requests on an H100."""


def catalogue(s: Setting) -> Found:
    """A request of thousands of beams, any tokens and items of a catalogue."""
    beams, prompt = s.args.catalogue_beams, s.args.prompt
    made = make(Qwen3, s.small, s.device)
    engine = s.engine(made, tokens_of(prompt, beams, PLACES))
    with tempfile.TemporaryDirectory(prefix="bench-") as scratch:

        def case(outputs: str) -> dict[str, Any]:
            items = random_catalogue(Path(scratch) / "items", made.model.shape.vocab_size)
            options = {"catalogue": items} if outputs == "items" else {}
            return {"outputs": outputs, **dissected(s, engine, prompt, beams, options)}

        rows = s.rows((f"{beams} beams, {kind}", partial(case, kind)) for kind in ("any tokens", "items"))
    found = {row["outputs"]: row["seconds"] for row in rows}
    name = f"{beams} beams x {PLACES} tokens of Qwen3-0.6B's shape, SGLang's seconds (H200) / ours"
    targets = [comparison(f"{name}, {kind}", SGLANG_WIDE / found[kind] if kind in found else None, 1.0)
               for kind in ("any tokens", "items")]  # fmt: skip
    text = f"Qwen3-0.6B's shape, bfloat16, random weights; prompt {prompt}, {ITEMS:,} items of {PLACES} tokens."
    return Found(text, rows, {
        "beams": "{beams}", "outputs": "{outputs}", "ms": "{seconds:ms.1f}", "steps, ms": "{steps}",
        "GPU ms": "{device:ms.1f}", "host, ms": "{host}", "growth MB": "{growth:M.0f}",
    }, WHOLE, targets)  # fmt: skip


def random_catalogue(path: Path, vocab: int) -> Catalogue:
    """Random items, whose places have tokens of their own."""
    if not path.exists():
        draw = torch.Generator().manual_seed(0)
        token_IP = torch.randint(BOOK, (ITEMS, PLACES), generator=draw) + torch.arange(PLACES) * BOOK
        built = build(token_IP.int().flatten(), torch.full((ITEMS,), PLACES))
        write_catalogue(path, built, range(ITEMS), vocab, "")
    return Catalogue(path)


def asked(engine: Engine, prompt: int, beams: int, searches: int, options: dict[str, Any], seed: int) -> list[Request]:
    """Requests for all outputs of wide beams."""
    draw = torch.Generator().manual_seed(seed)
    ids = torch.randint(5, engine.shape.vocab_size, (searches, prompt), generator=draw).tolist()
    search = Trie(beams=beams, num_return_sequences=beams)
    return [Request(one, search, max_new_tokens=PLACES, ignore_eos=True, **options) for one in ids]


def answered(engine: Engine, requests: list[Request]) -> float:
    """Seconds until all requests are answered. Raises CoppiceError."""
    began = time.perf_counter()
    for _, outcome in engine.serve(requests):
        if isinstance(outcome, BaseException):
            raise outcome
    return time.perf_counter() - began


def dissected(s: Setting, engine: Engine, prompt: int, beams: int, options: dict[str, Any]) -> dict[str, Any]:
    """The time of a request, and where it goes."""
    torch.cuda.reset_peak_memory_stats()
    before, times = torch.cuda.memory_allocated(), []
    for run in range(RUNS + 1):
        times.append(answered(engine, asked(engine, prompt, beams, 1, options, run)))
    growth = torch.cuda.max_memory_allocated() - before
    requests = asked(engine, prompt, beams, 1, options, RUNS + 1)
    watch = Watch(engine)
    with watched(watch, deep=False):
        answered(engine, requests)
    parts: dict[str, float] = defaultdict(float)
    for step in watch.steps:
        for part, seconds in step.parts.items():
            parts[part] += seconds
    ran = s.attempt("kernels", lambda: kernels_of(lambda: answered(engine, requests))) or []
    most = sorted(parts.items(), key=lambda part: -part[1])[:5]
    return {
        "beams": beams, "seconds": statistics.median(times[1:]), "first_time": times[0], "growth": growth,
        "steps": " + ".join(f"{1e3 * step.seconds:.1f}" for step in watch.steps[:-1]),
        "device": busy(ran) * 1e-6 if ran else None,
        "host": ", ".join(f"{part} {1e3 * seconds:.1f}" for part, seconds in most),
    }  # fmt: skip


def widths(s: Setting) -> Found:
    """Requests per second by beams, and those that NVIDIA measured."""
    made, many = make(Qwen3, s.middle, s.device), s.args.searches
    cases = [*PUBLISHED, *((beams, READ, many) for beams in WIDTHS)]
    pool = max(count * tokens_of(prompt, beams, PLACES) for beams, prompt, count in cases)
    engine = s.engine(made, pool)
    rows = s.rows((f"{b} beams, prompt {n}, {count} requests", partial(rate, engine, b, n, count))
                  for b, n, count in cases)  # fmt: skip
    targets = []
    for row in rows:
        if row["sglang"]:
            name = f"{row['beams']} beams, prompt {row['prompt']}, {row['searches']} at once"
            targets += [comparison(f"{name}, {peer}'s seconds / ours", row[key] / row["seconds"], 1.0)
                        for peer, key in (("SGLang", "sglang"), ("SID-GR", "sid_gr"))]  # fmt: skip
    return Found("Qwen3-1.7B's shape, bfloat16, random weights; 3 tokens.", rows, {
        "beams": "{beams}", "prompt": "{prompt}", "at once": "{searches}", "ms": "{seconds:ms.1f}",
        "requests/s": "{rate:.1f}", "SGLang ms": "{sglang:ms.1f}", "SID-GR ms": "{sid_gr:ms.1f}",
    }, RATES, targets)  # fmt: skip


def rate(engine: Engine, beams: int, prompt: int, searches: int) -> dict[str, Any]:
    """Requests that come together, over and over."""
    times = [answered(engine, asked(engine, prompt, beams, searches, {}, run)) for run in range(RUNS + 1)]
    seconds = statistics.median(times[1:])
    sglang, sid_gr = PUBLISHED.get((beams, prompt, searches), (None, None))
    return {
        "beams": beams, "prompt": prompt, "searches": searches, "seconds": seconds, "rate": searches / seconds,
        "sglang": sglang, "sid_gr": sid_gr,
    }  # fmt: skip
