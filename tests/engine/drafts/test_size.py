"""The size of drafts of several live nodes: what is evaluated pays, and drafts that lose time end."""

import pytest

from engine.drafts import Draft
from engine.drafts.size import MAX_NODES, DraftSize


def chain(*chances):
    """A draft of one token after the other, with these probabilities given the one before."""
    scores, score = [], 1.0
    for chance in chances:
        scores.append(score := score * chance)
    return Draft([*range(len(scores))], [*range(-1, len(scores) - 1)], scores)


def free(tokens):
    return 1.0 + tokens / 1000


def dear(tokens):
    return float(tokens)


def test_one_live_node_has_the_first_nodes_of_its_draft():
    size, draft = DraftSize(free), chain(0.9, 0.9, 0.9)
    assert [*size.choose_together([draft], 1)[0]] == [*range(DraftSize(free).choose(draft))] == [0, 1, 2]


def test_several_have_whole_levels_where_rows_are_free():
    drafts = [chain(0.9, 0.9), chain(0.95, 0.9), chain(0.9)]
    chosen = DraftSize(free).choose_together(drafts, 3)
    assert [[*nodes] for nodes in chosen] == [[0], [0], [0]]  # the third has nothing two levels ahead


def test_of_live_nodes_apart_the_likeliest_guesses_of_all_are_taken():
    drafts = [chain(0.9, 0.9), chain(0.1), Draft(), chain(0.95)]
    assert DraftSize(free).choose_apart(drafts, 4, [9] * 4) == [[0, 1], [], [], [0]]
    assert DraftSize(dear).choose_apart(drafts, 4, [9] * 4) == [[], [], [], []]
    assert DraftSize(None).choose_apart(drafts, 4, [9] * 4) == [[0, 1], [0], [], [0]]
    assert DraftSize(free).choose_apart(drafts, 4, [99, 9, 9, 9]) == [[], [0], [], [0]]  # one that is far ahead waits


def test_levels_are_taken_as_far_as_they_came_true_before():
    drafts = [chain(0.9, 0.9, 0.9), chain(0.5), Draft()]
    size = DraftSize(lambda tokens: 1 + tokens / 20)
    assert DraftSize(None).choose_levels(drafts, 3) == [[0, 1, 2], [0], []]
    for _ in range(30):
        chosen = size.choose_levels(drafts, 3)
        size.note_together(1)  # the second level never has all that is asked for
    assert chosen == [[0], [0], []] and size.odds(1) > 0.9 and size.odds(2) < 0.2
    for _ in range(200):
        size.choose_levels(drafts, 3)
        size.note_together(0)
    assert size.choose_levels(drafts, 3) == [[], [], []]
    other = DraftSize(free)
    other.inherit(size)
    assert other.odds(1) == pytest.approx(size.odds(1))


def test_nothing_pays_where_one_live_node_has_no_draft_or_rows_are_dear():
    drafts = [chain(0.95, 0.9), chain(0.95, 0.9)]
    assert [*map(list, DraftSize(free).choose_together([*drafts, Draft()], 3))] == [[], [], []]
    assert [*map(list, DraftSize(dear).choose_together(drafts, 2))] == [[], []]


def test_without_a_time_nothing_is_chosen_and_without_a_clock_everything():
    drafts = [chain(0.5, 0.5), chain(0.1)]
    assert [*map(list, DraftSize(lambda n: 0.0).choose_together(drafts, 2))] == [[], []]
    assert [*map(list, DraftSize(None).choose_together(drafts, 2))] == [[0, 1], [0]]


def test_passes_have_at_most_so_many_drafted_nodes():
    drafts = [chain(*[0.999] * 12) for _ in range(10)]
    assert 10 <= sum(map(len, DraftSize(free).choose_together(drafts, 10))) <= MAX_NODES


def test_sets_that_never_come_true_are_no_longer_drafted():
    size, drafts, made = DraftSize(free), [chain(0.9), chain(0.9)], 0
    for _ in range(1000):
        if size.wanted():
            nodes = sum(map(len, size.choose_together(drafts, 2)))
            made += nodes > 0
            for _ in drafts:
                size.note(0.9, False)
            size.note_together(0)
            size.settle(0.0, nodes, 1, 2)
        else:
            size.plain(0.0)
    assert made < 40


def test_a_step_costs_at_most_a_hundredth_where_guessing_is_slow():
    size, spent = DraftSize(free), 0.0
    for _ in range(2000):
        if size.wanted():
            spent += 0.5
            size.settle(0.5, 0, 1, 2)
        else:
            size.plain(0.0)
    assert spent < (0.011 * 2000 + DraftSize.FIRST) * free(2)


def test_tokens_that_are_known_are_saved_although_the_pass_is_not():
    size = DraftSize(dear)
    before = size.credit
    size.settle(0.0, 0, 1, rows=2, known=2)  # two tokens instead of four
    assert size.credit == pytest.approx(before + 0.5 + size.LOSS)


def test_the_next_request_begins_with_what_was_learnt():
    first, second = DraftSize(free), DraftSize(free)
    for _ in range(50):
        first.note(0.95, False)
        first.settle(5.0, 3, 1)
    second.inherit(first)
    assert second.credit == DraftSize.LEAST_FIRST and second.true[-1] / second.tried[-1] < 0.1
    assert second.tried[-1] <= DraftSize.INHERITED + 1e-9
