"""Sampling: any number of sequences drawn token by token, as one tree.

Sequence i's token at position p is argmax(warped log-probabilities + Gumbel(seed, i, p)): it depends on nothing else,
so a sequence is the same however many are drawn beside it. Sequences share nodes as long as they agree.
"""

from dataclasses import dataclass

from engine.errors import UsageError
from engine.sampling import Warp, draw
from search.base import Evaluate, Output, Report, SearchGenerator, SearchResult, Task, register


@register("sample")
@dataclass(frozen=True)
class Sample:
    """Draws from the model's distribution (temperature, top-k, top-p), reproducible by seed.

    Args:
        temperature, top_k, top_p: see `engine.sampling.Warp`.
        seed: of the keyed draws.
        num_return_sequences: sequences to draw; returned most probable first.
    """

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0
    num_return_sequences: int = 1

    def __post_init__(self):
        Warp(self.temperature, self.top_k, self.top_p)
        for name, low, high in (("seed", 0, 2**63), ("num_return_sequences", 1, 4096)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
                raise UsageError(f"{name}: expected an integer from {low} to {high}, got {value!r}")

    def run(self, task: Task) -> SearchGenerator:
        warp = Warp(self.temperature, self.top_k, self.top_p)
        tree = task.tree
        sequences: list[list[int]] = [[] for _ in range(self.num_return_sequences)]
        logprobs = [0.0] * len(sequences)
        reasons: list[str | None] = [None] * len(sequences)
        node = [tree.root] * len(sequences)  # the last node of each sequence
        settled = 0
        while alive := [i for i, reason in enumerate(reasons) if reason is None]:
            frontier = list(dict.fromkeys(node[i] for i in alive))
            logp_NV = yield Evaluate(tree, frontier)
            row = [frontier.index(node[i]) for i in alive]
            position = tree.position(frontier[0]) + 1
            drawn = draw(warp(logp_NV)[row], self.seed, alive, [position] * len(alive))
            told = logp_NV[row, drawn].tolist()
            for i, token, logp in zip(alive, drawn, told, strict=True):
                sequences[i].append(token)
                logprobs[i] += logp
                reasons[i] = task.finish_reason(sequences[i])
            going = [i for i in alive if reasons[i] is None]
            if going:
                children = tree.grow([node[i] for i in going], [sequences[i][-1] for i in going])
                for i, child in zip(going, children, strict=True):
                    node[i] = child
                tree.keep(children)
            shared = _shared_length(sequences, settled)
            yield Report(
                sequences[0][settled:shared],
                lambda: sequences[0],
                beams=lambda: sorted(zip(logprobs, sequences, strict=True), key=lambda candidate: -candidate[0]),
            )
            settled = shared
        order = sorted(range(len(sequences)), key=lambda i: -logprobs[i])
        yield Report(sequences[order[0]][settled:])
        return SearchResult([Output(sequences[i], logprobs[i], logprobs[i], reasons[i] or "") for i in order])

    def slots(self, prompt_tokens: int, new_tokens: int) -> tuple[int, int]:
        return prompt_tokens + new_tokens - 1, prompt_tokens + self.num_return_sequences * (new_tokens - 1)

    def check(self, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        pass


def _shared_length(sequences: list[list[int]], start: int) -> int:
    """How many tokens all sequences begin with, at least `start` of them known to be shared."""
    length = start
    while all(len(s) > length and s[length] == sequences[0][length] for s in sequences):
        length += 1
    return length
