"""Parts that tests of constraints share: an automaton as a constraint, golden cases, searches, one way to ask."""

import json
from pathlib import Path

import pytest
import torch

from engine import Choices, Constraint
from search import ADED, DSBD, ULTS, BeamSample, BoN, Diverse, Greedy, Sample, SBoN, Speculative, Trie

GOLDEN = Path(__file__).parents[2] / "golden"
CASES = json.loads((GOLDEN / "constraints.json").read_text())["cases"]
EOS = 2


class Automaton(Constraint):
    """States are numbers; `kind` chooses the form in which allowed tokens are returned."""

    def __init__(self, states, kind="list", vocab=104):
        self.next = [dict(map(tuple, state)) for state in states]
        self.kind, self.vocab = kind, vocab
        self.advanced = 0

    def start(self, prompt):
        return 0

    def advance(self, state, token):
        self.advanced += 1
        return self.next[state][token]

    def allowed(self, states):
        return [self.form(sorted(self.next[state])) for state in states]

    def form(self, ids):
        if self.kind == "list":
            return ids
        if self.kind == "tensor":
            return torch.tensor(ids, dtype=torch.int64)
        words = [0] * -(-self.vocab // 32)
        for token in ids:
            words[token // 32] |= 1 << token % 32
        return torch.tensor([word - (1 << 32) * (word >> 31) for word in words], dtype=torch.int32)


def constraint_of(case, number=0):
    if "catalogue" in case:
        return Choices(case["catalogue"], [EOS])
    return Automaton(case["automaton"], ("list", "tensor", "mask")[number % 3])


def ask(engine, search, prompt=(5, 6, 7), new=6, **options):
    options.setdefault("eos_token_ids", [EOS])
    [result] = engine.generate([list(prompt)], search, max_new_tokens=new, **options)
    return result


STATES = [[[10, 1], [11, 1], [12, 0]], [[10, 0], [20, 1], [EOS, 1]]]


def rows_of(engine, prompt, path):
    return engine.logits([*prompt, *path])[-1].double()


SEARCHES = [
    Greedy(), Sample(num_return_sequences=3), Trie(beams=3, num_return_sequences=3), BeamSample(beams=3), ADED(),
    ADED(temperature=0.8, seed=2), ULTS(prior="dirichlet"), BoN(n=4), SBoN(n=6, tau=2, alpha=0.5), DSBD(),
    DSBD(drafter="ngram"), Speculative(), Diverse(4, 2, num_return_sequences=2),
]  # fmt: skip


named = pytest.mark.parametrize("search", SEARCHES, ids=lambda search: type(search).__name__)


scored = pytest.mark.parametrize("scores", ["model", "renormalised"])
