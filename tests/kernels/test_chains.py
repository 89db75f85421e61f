"""Chains of a pass: walked level by level, each token gets the state of its own path, whatever the order within one."""

import random

import pytest
import torch

from kernels.delta_net.chains import chains_of, with_chains
from kernels.layout import BLOCK, NULL_STATE, DeltaKind, DeltaPaths
from tests.kernels.test_delta_net import SMALL, Growing, sequence


def lists(paths):
    return [x.tolist() for x in (paths.paths_TN, paths.lengths_T, paths.bases_T, paths.folds_T)]


class Texts:
    """States and rows as the tokens that they are of, walked as the kernels do."""

    def __init__(self, path_of):
        self.path_of, self.states, self.rows = path_of, {NULL_STATE: ()}, {}

    def walk(self, paths, first, rng):
        every, lengths, bases, folds = lists(paths)
        chains, levels = chains_of([path[0] for path in every], lengths, bases, folds)
        assert sorted(t for chain in chains for t in range(*chain)) == list(range(len(every)))
        begin, rows = 0, paths.rows_T.tolist()
        for count in levels:
            level, begin = chains[begin : begin + count], begin + count
            before, written = dict(self.states), set()
            for start, end in rng.sample(level, count):
                state = before[bases[start]]
                for at in every[start][: lengths[start]][::-1]:
                    state += (first - 1 - at if at < 0 else self.rows[at],)
                for t in range(start, end):
                    state += (first + t,)
                    assert state == tuple(self.path_of(first + t))
                    if folds[t] != NULL_STATE:
                        self.states[folds[t]] = state
                        written.add((start, folds[t]))
            for start, place in written:  # no other chain of the level touches what one leaves
                others = [s for s, _ in level if s != start]
                assert place not in [bases[s] for s in others] and all((s, place) not in written for s in others)
        for t, row in enumerate(rows):
            self.rows[row] = first + t
        return levels


@pytest.mark.parametrize("taps", [1, 4])
@pytest.mark.parametrize("seed", range(3))
def test_every_token_gets_the_state_of_its_path(seed, taps):
    rng, forest = random.Random(seed), Growing(DeltaKind(1, 1, 1, 1, taps), seed, roots=2)
    texts, levels = Texts(forest.path), []
    for tokens, chains in ((70, 60), (9, 1), (90, 40), (1, 1), (90, 60)):
        first = len(forest.parents)
        _, paths = forest.grow(tokens, chains)
        levels.append(texts.walk(paths, first, rng))
    assert max(map(len, levels)) > 1


@pytest.mark.parametrize("first", [0, 5, 31])
def test_a_prompt_is_one_chain_though_its_states_share_a_place(first):
    rows = {p: 2 + p for p in range(first)}
    every, lengths, bases, folds = lists(sequence(100, first, SMALL, 1, rows))
    assert chains_of([path[0] for path in every], lengths, bases, folds) == ([(0, 100)], (1,))


def test_who_reads_what_another_chain_leaves_comes_later():
    """A block's last token, two tokens after it, and one that reads what was there before."""
    last, lone = BLOCK - 1, -1
    found = chains_of([2, lone, 0, 7], [last, 0, 0, 4], [1, 2, 2, 2], [2, 0, 0, 0])
    assert found == ([(0, 2), (2, 3), (3, 4)], (1, 2))
    assert chains_of([7, 2, 0], [4, last, 0], [2, 1, 2], [0, 2, 0]) == ([(0, 1), (1, 3)], (1, 1))
    assert chains_of([], [], [], []) == ([], ())


def test_paths_without_a_plan_get_one_once():
    paths = DeltaPaths(*(torch.tensor(x) for x in ([2, 3], [[0], [-1]], [0, 1], [0, 0], [0, 0])))
    planned = with_chains(paths)
    assert planned.chains_N2.tolist() == [[0, 2]] and planned.levels == (1,)
    assert with_chains(paths) is planned and with_chains(planned) is planned
