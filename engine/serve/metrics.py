"""The server's metrics in Prometheus's text format."""

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Mapping

from engine.load.sizes import memory_of_process

BOUNDS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 25.0, 50.0, 100.0, 250.0)  # seconds
COUNTERS = {
    "requests_completed": "requests that were answered",
    "requests_failed": "requests that ended with an error of the engine",
    "requests_refused": "requests that found the queue full",
    "requests_cancelled": "requests whose client left, or whose time was up",
    "prompt_tokens": "tokens of the prompts of completed requests",
    "reused_tokens": "of these, tokens that were in the KV cache already",
    "drafted_nodes": "tokens that were drafted and evaluated",
    "drafted_accepted": "of these, tokens that a search asked for later",
    "passes_saved": "answers that needed no forward pass, because they were drafted",
    "new_tokens": "tokens of all outputs of completed requests",
    "forward_passes": "forward passes",
    "evaluated_tokens": "tokens that forward passes evaluated",
    "forward_seconds": "seconds of forward passes",
}
HISTOGRAMS = {
    "queue_seconds": "seconds until a request runs",
    "first_text_seconds": "seconds until the first settled text of a stream",
    "request_seconds": "seconds until a request is answered",
}
GAUGES = {
    "requests_running": "requests that run",
    "requests_waiting": "requests that wait",
    "cache_pages": "pages of the KV cache",
    "cache_pages_used": "pages of the KV cache that are in use",
    "resident_bytes": "resident memory of the process",
}


class Metrics:
    """Counters and histograms, by model; only the event loop changes them."""

    def __init__(self) -> None:
        self._counters: dict[tuple[str, str], float] = defaultdict(float)
        self._buckets: dict[tuple[str, str], list[int]] = {}
        self._sums: dict[tuple[str, str], float] = defaultdict(float)

    def add(self, name: str, model: str, amount: float = 1) -> None:
        """Add to a counter."""
        self._counters[name, model] += amount

    def observe(self, name: str, model: str, seconds: float) -> None:
        """Add a value to a histogram."""
        buckets = self._buckets.setdefault((name, model), [0] * (len(BOUNDS) + 1))
        buckets[bisect_left(BOUNDS, seconds)] += 1
        self._sums[name, model] += seconds

    def text(self, models: Mapping[str, Mapping[str, float]]) -> str:
        """All figures; `models` has the counters and gauges that the models themselves know, by model and name."""
        lines = ["# These figures count the requests of all keys together."]
        for name, what in COUNTERS.items():
            values = {model: known.get(name, self._counters[name, model]) for model, known in models.items()}
            lines += _family(f"{name}_total", "counter", what, values)
        for name, what in GAUGES.items():
            values = {model: known[name] for model, known in models.items() if name in known}
            lines += _family(name, "gauge", what, {"": memory_of_process()[1]} if name == "resident_bytes" else values)
        for name, what in HISTOGRAMS.items():
            lines += _head(name, "histogram", what)
            for model in models:
                lines += self._histogram(name, model)
        return "\n".join(lines) + "\n"

    def _histogram(self, name: str, model: str) -> list[str]:
        buckets, lines, total = self._buckets.get((name, model), [0] * (len(BOUNDS) + 1)), [], 0
        for bound, count in zip([*map(str, BOUNDS), "+Inf"], buckets, strict=True):
            total += count
            lines.append(f'coppice_{name}_bucket{{model="{_escaped(model)}",le="{bound}"}} {total}')
        label = f'{{model="{_escaped(model)}"}}'
        return [
            *lines,
            f"coppice_{name}_sum{label} {self._sums[name, model]:g}",
            f"coppice_{name}_count{label} {total}",
        ]


def _head(name: str, kind: str, what: str) -> list[str]:
    return [f"# HELP coppice_{name} {what}", f"# TYPE coppice_{name} {kind}"]


def _family(name: str, kind: str, what: str, values: Mapping[str, float]) -> list[str]:
    labels = {model: f'{{model="{_escaped(model)}"}}' if model else "" for model in values}
    rows = [f"coppice_{name}{labels[model]} {value:.12g}" for model, value in values.items()]
    return [*_head(name, kind, what), *rows]


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
