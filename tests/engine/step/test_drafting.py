"""Drafts ride along under every search: tokens and log-probabilities stay the same bits, and there are fewer passes."""

import functools
import itertools
import random
import warnings
from collections import defaultdict
from pathlib import Path

import pytest

from engine import Engine, KVMemoryError, Request, Text
from engine.contract.trace import Trace
from engine.demo import demo_folder
from engine.drafts import Draft
from engine.drafts.backoff import NGramDrafter
from engine.drafts.suffixes import SuffixDrafter, SuffixStore
from engine.step.drafting import EngineDrafts
from engine.step.driver import Driver
from search import ULTS, BeamSample, BoN, Diverse, Greedy, Sample, SBoN, Trie
from tests.eager import EagerDrafts
from tests.invariants import check_tree
from tests.marks import needs_cpp
from tools.random_checkpoint import make

pytestmark = needs_cpp

GOLDEN = Path(__file__).parents[2] / "golden"
VOCAB, NEW = 260, 20
SEARCHES = {
    "greedy": Greedy(),
    "sample": Sample(seed=5, temperature=0.9),
    "samples": Sample(seed=5, num_return_sequences=3, top_k=9),
    "bon": BoN(n=3, seed=2),
    "sbon": SBoN(n=6, seed=2),
    "trie": Trie(beams=3),
    "diverse": Diverse(beams=4, groups=2, num_return_sequences=4),
    "beam-sample": BeamSample(beams=3, seed=4),
    "ults": ULTS(),
}


def reward(prompt, texts):
    return [sum(text.encode()) % 101 / 101 for text in texts]


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    random_llama = tmp_path_factory.mktemp("llama")
    sizes = {"layers": 2, "width": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "vocab": VOCAB, "max_positions": 400}
    make(random_llama, **sizes, seed=1, scale=0.7)

    @functools.cache
    def load(golden="", **options):
        folder = GOLDEN / golden if golden else random_llama
        return Engine.load(folder, **{"kv_memory": 1 << 21, "threads": 1} | options)

    return load


@pytest.fixture(autouse=True)
def checked(monkeypatch):
    """Every tree is checked after every step; the prompts and paths that searches ask for are recorded."""
    step, ask, asked = Driver.step, Driver._ask, set()

    def checking(self):
        step(self)
        for tree in (tree for job in self.running for tree in job.trees if tree.page_count):
            check_tree(tree)

    def recording(self, job, request):
        tree = request.tree
        asked.update((*tree.trunk.tokens[: tree.prompt_length], *tree.path(node)) for node in request.nodes)
        return ask(self, job, request)

    monkeypatch.setattr(Driver, "step", checking)
    monkeypatch.setattr(Driver, "_ask", recording)
    return asked


class Drafts:
    """Makes a drafter of a function of (text, nodes, depth); keeps what it was told."""

    def __init__(self, draft):
        self._draft, self.closed, self.salts = draft, [], []

    def open(self, salt, prompt):
        self.salts.append(salt)
        return _Opened(self, prompt)


class _Opened:
    def __init__(self, outer, prompt):
        self.outer, self.text = outer, [*prompt]

    def learn(self, tokens):
        self.text += tokens

    def draft(self, ahead, nodes, depth):
        return self.outer._draft((*self.text, *ahead), nodes, depth)

    def close(self, tokens):
        self.outer.closed.append([*tokens])


def foresight(asked, noise=0):
    """A drafter of what searches asked for before, with `noise` wrong tokens beside each right one."""
    children = defaultdict(list)
    for path in sorted(asked):
        children[path[:-1]].append(path[-1])
    rng = random.Random(1)

    def draft(text, nodes, depth):
        found, queue = Draft(), [(-1, text, 1.0)]
        for at, context, score in queue:
            wrong = [rng.randrange(VOCAB) for _ in range(noise)]
            for token in children[context] + wrong:
                if len(found.tokens) < nodes and len(context) - len(text) < depth:
                    found.tokens.append(token)
                    found.parents.append(at)
                    found.scores.append(score * 0.9)
                    queue.append((len(found.tokens) - 1, (*context, token), score * 0.9))
        return found

    return Drafts(draft)


RNG = random.Random(3)
ODD = [-1, -(10**30), VOCAB, 10**30, 1.5, "7", None, True, 2, 3, 4]


def hostile(text, nodes, depth):
    """Drafts of odd tokens, parents and scores, too many, in any order."""
    n = RNG.randrange(3 * nodes + 2)
    tokens = [RNG.choice([*ODD, RNG.randrange(VOCAB)]) for _ in range(n)]
    parents = [RNG.choice([-1, RNG.randrange(-3, n + 1), RNG.randrange(n)]) for _ in range(n)]
    scores = [RNG.choice([0.5, 1.0, 0.0, -1.0, 7.0, float("nan"), float("inf"), 1e-300]) for _ in range(n)]
    return Draft(tokens, parents, scores)


DRAFTERS = {
    "right": lambda asked: foresight(asked),
    "half right": lambda asked: foresight(asked, noise=1),
    "n-grams": lambda asked: NGramDrafter(),
    "suffixes": lambda asked: SuffixDrafter(SuffixStore(VOCAB)),
    "hostile": lambda asked: Drafts(hostile),
    "empty": lambda asked: Drafts(lambda *_: Draft()),
}


def prompts(count, seed=0):
    rng = random.Random(seed)
    return [[1] + [rng.randrange(3, 100) for _ in range(rng.choice((0, 3, 9, 33)))] for _ in range(count)]


def requests(count, search, seed=0, **options):
    options = {"max_new_tokens": NEW, "logprobs": 2, "reward": reward} | options
    return [Request(prompt, search, **options) for prompt in prompts(count, seed)]


def answers(engine, asked):
    results = dict(engine.serve(asked))
    found = [results[i] for i in range(len(results))]
    for result in found:
        if isinstance(result, Exception):
            raise result
    return found


def facts(results):
    """All that an answer says but for statistics; floats compare bit by bit."""
    return [
        [(o.token_ids, o.logprob, o.score, o.finish_reason, o.token_logprobs, o.top_logprobs) for o in r.outputs]
        for r in results
    ]


def passes(results):
    return sum(result.stats["forward_passes"] for result in results)


def with_drafts(engine, drafter, asked, always=True):
    """Answers with drafts, which leave no page behind, nor do those of a draft model."""
    engine.drafts = (EagerDrafts if always else EngineDrafts)(drafter)
    try:
        return answers(engine, asked)
    finally:
        engine.drafts = None
        assert not any(each.pool.used_pages for each in (engine, *engine.companions.values()))


@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_answers_are_the_same_bits(name, drafter, loaded, checked):
    engine = loaded(parallel=3)
    same = functools.partial(requests, 4, SEARCHES[name])
    plain = answers(engine, same())
    got = with_drafts(engine, DRAFTERS[drafter](set(checked)), same())
    assert facts(got) == facts(plain)
    if name != "ults":  # whose batches follow measured times
        assert all(a.stats["forward_passes"] <= b.stats["forward_passes"] for a, b in zip(got, plain, strict=True))
    if drafter == "right":
        assert sum(result.stats["passes_saved"] for result in got) > 0
        assert passes(got) < passes(plain) * (0.9 if name == "ults" else 0.7)


@pytest.mark.parametrize("name", SEARCHES)
def test_a_cost_model_changes_no_answer(name, loaded, checked):
    engine = loaded()
    plain = answers(engine, requests(3, SEARCHES[name]))
    got = with_drafts(engine, foresight(set(checked), noise=1), requests(3, SEARCHES[name]), always=False)
    assert facts(got) == facts(plain)


@pytest.mark.parametrize(
    "options",
    [
        {"kv_dtype": "int8", "dtype": "bfloat16"},
        {"dtype": "bfloat16", "quant": "int8"},
        {"golden": "lfm2/plain"},
        {"golden": "mistral/window"},
        {"golden": "alibi/falcon"},
        {"prefix_cache": "on", "parallel": 2},
    ],
    ids=["int8 cache", "int8 weights", "short convolutions", "windows", "slopes", "prefix cache"],
)
@pytest.mark.parametrize("name", ["greedy", "samples", "trie", "beam-sample"])
def test_on_other_models_and_caches(name, options, loaded, checked):
    engine = loaded(**options)
    plain = answers(engine, requests(4, SEARCHES[name], ignore_eos=True))
    engine.drafts = EagerDrafts(foresight(set(checked), noise=1))
    try:
        got = answers(engine, requests(4, SEARCHES[name], ignore_eos=True))
    finally:
        engine.drafts = None
    assert facts(got) == facts(plain)
    assert passes(got) < passes(plain)


@pytest.mark.parametrize(
    "rules",
    [
        {"regex": "[a-z]{4,40}"},
        {"regex": "[a-z]{4,40}", "constraint_scores": "renormalised"},
        {"choices": ["abcdef", "abcxyz", "q"]},
        {"repetition_penalty": 1.3},
        {"logit_bias": {5: 3.0, 9: -2.0}, "frequency_penalty": 0.4},
    ],
    ids=["regex", "renormalised", "choices", "logits", "biases"],
)
@pytest.mark.parametrize("name", ["greedy", "samples", "trie"])
def test_drafts_obey_what_edits_rows(name, rules, checked):
    engine = demo()
    ask = lambda: [  # noqa: E731
        Request(text, SEARCHES[name], max_new_tokens=12, logprobs=1, **rules) for text in ("The ", "One two", "a")
    ]
    plain = answers(engine, ask())
    got = with_drafts(engine, foresight(set(checked), noise=1), ask())
    assert facts(got) == facts(plain)


@functools.cache
def demo():
    from engine.demo import demo_folder

    return Engine.load(demo_folder("target"), kv_memory=1 << 24, threads=1)


@pytest.mark.parametrize("name", ["samples", "trie", "sbon"])
def test_small_pools_drop_drafts_first(name, loaded, checked):
    engine = loaded(parallel=4)
    asked = requests(6, SEARCHES[name])
    plain, right = answers(engine, asked), foresight(set(checked), noise=2)
    unit = engine.pool.bytes_per_token
    for tokens in (90, 120, 200):
        small = loaded(parallel=4, kv_memory=tokens * unit)
        try:
            alone = answers(small, asked)
        except KVMemoryError:
            continue
        assert facts(alone) == facts(plain)
        assert facts(with_drafts(small, right, asked)) == facts(plain)


def test_a_drafter_that_raises_is_reported_once(loaded):
    def fail(text, nodes, depth):
        if len(text) % 7 == 0:
            raise RuntimeError("no idea")
        return Draft([5, 6], [-1, 0], [0.5, 0.4])

    engine = loaded()
    plain = answers(engine, requests(5, Greedy()))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        assert facts(with_drafts(engine, Drafts(fail), requests(5, Greedy()))) == facts(plain)
    assert [str(w.message) for w in seen] == [
        "a drafter failed, so its request continues without drafts: RuntimeError: no idea"
    ]


@pytest.mark.parametrize("method", ["open", "learn", "close"])
def test_other_methods_may_raise_too(method, loaded):
    class Faulty(Drafts):
        def open(self, salt, prompt):
            opened = super().open(salt, prompt)
            if method == "open":
                raise MemoryError("open")
            setattr(opened, method, lambda tokens: 1 / 0)
            return opened

    engine = loaded()
    plain = answers(engine, requests(2, Greedy()))
    with pytest.warns(RuntimeWarning, match="a drafter failed"):
        got = with_drafts(engine, Faulty(lambda *_: Draft([5], [-1], [0.5])), requests(2, Greedy()))
    assert facts(got) == facts(plain)


def test_text_that_repeats_itself_takes_half_the_passes(loaded):
    engine, copied = loaded(), [random.Random(i).randrange(3, VOCAB) for i in range(60)]
    pairs = dict.fromkeys(itertools.pairwise(copied), 40.0)  # the model would hardly copy its prompt by itself
    ask = [Request([1, *copied, copied[0]], Greedy(), 200, ignore_eos=True, sequence_bias=pairs)]
    plain = answers(engine, ask)[0]
    [got] = with_drafts(engine, NGramDrafter(), ask)
    assert got.outputs == plain.outputs
    assert got.stats["forward_passes"] * 2 <= plain.stats["forward_passes"] == 200
    assert got.stats["passes_saved"] + got.stats["forward_passes"] == 200


@pytest.mark.parametrize("search", [Sample(seed=5, num_return_sequences=3), BoN(n=3, seed=5, num_return_sequences=3)])
def test_sequences_do_not_wait_for_each_other(search, loaded):
    """Each is drafted one token ahead at other places, so that never all of them have what they ask for next."""
    engine = loaded()
    asked = lambda: [Request([1, 9, 8], search, NEW, ignore_eos=True, logprobs=0, reward=reward)]  # noqa: E731
    plain = answers(engine, asked())
    texts = [(1, 9, 8, *output.token_ids) for output in plain[0].outputs]

    def draft(text, nodes, depth):
        known = [each for i, each in enumerate(texts) if each[: len(text)] == text and (len(text) + i) % 3 and depth]
        return Draft([each[len(text)] for each in known[:1]], [-1][: len(known)], [0.9][: len(known)])

    got = with_drafts(engine, Drafts(draft), asked())
    assert facts(got) == facts(plain)
    assert got[0].stats["forward_passes"] <= plain[0].stats["forward_passes"] * 0.75
    assert got[0].stats["nodes_evaluated"] == plain[0].stats["nodes_evaluated"]  # no guess is wrong


def test_requests_may_turn_drafts_off(loaded):
    engine = loaded()
    drafter = Drafts(lambda *_: Draft([5], [-1], [0.5]))
    off, on = with_drafts(engine, drafter, [*requests(1, Greedy(), drafts=False), *requests(1, Greedy())])
    assert "drafted_nodes" not in off.stats and on.stats["drafted_nodes"] > 0
    assert len(drafter.closed) == 1 and drafter.closed == [on.outputs[0].token_ids]


def test_streams_and_cancelled_requests(loaded, checked):
    engine = loaded()
    prompt = prompts(3)[2]
    [plain] = answers(engine, [Request(prompt, Trie(beams=3), NEW)])
    engine.drafts = EagerDrafts(foresight(set(checked)))
    try:
        events = [*engine.stream(prompt, Trie(beams=3), max_new_tokens=NEW)]
        assert events[-1].result.outputs == plain.outputs
        for stop in range(1, 5):
            stream = engine.stream(prompt, Trie(beams=3), max_new_tokens=NEW)
            for _ in range(stop):
                next(stream)
            stream.close()
            assert engine.pool.used_pages == 0
    finally:
        engine.drafts = None


def test_traces_show_accepted_drafts_as_such(loaded, checked):
    engine = loaded()
    plain = answers(engine, requests(1, Greedy()))
    trace = Trace()
    got = with_drafts(engine, foresight(set(checked)), requests(1, Greedy(), trace=trace))
    assert facts(got) == facts(plain)
    tree = trace.record["trees"][0]
    assert len(tree["drafted"]) >= got[0].stats["drafted_accepted"] > 3
    assert all(tree["accepted"][node] is not None for node in tree["drafted"])
    top = [tree["top"][node][0][0] for node in range(len(tree["token"])) if node in tree["top"]]
    assert top[:NEW] == plain[0].outputs[0].token_ids[: len(top)]


def test_salts_reach_the_drafter(loaded):
    drafter = Drafts(lambda *_: Draft())
    with_drafts(loaded(), drafter, requests(1, Greedy(), cache_salt="a") + requests(1, Greedy(), cache_salt=None))
    assert drafter.salts == ["a", None]


@pytest.mark.parametrize("late", [0, 1])
@pytest.mark.parametrize(
    "search", [Trie(beams=4), BeamSample(beams=4), Sample(num_return_sequences=4, temperature=1.5)]
)
def test_a_search_that_was_preempted_is_interrupted(search, late, monkeypatch):
    """Its drafts fill the cache, so it starts again; it ends with what the caller was told, at least."""
    options = {"dtype": "float32", "threads": 1, "drafts": "ngrams"}
    unit = Engine.load(demo_folder(), kv_memory="4M", **options).pool.bytes_per_token
    preempted, preempt = [], Driver._preempt
    monkeypatch.setattr(Driver, "_preempt", lambda driver, job: (preempted.append(job), preempt(driver, job)))
    seen = 0
    for pages in range(26, 44, 3):
        engine, calls = Engine.load(demo_folder(), kv_memory=pages * unit, **options), itertools.count(1)
        engine.drafts = EagerDrafts(NGramDrafter())
        preempted.clear()
        stream = engine.stream(
            "Once upon a time there was", search, max_new_tokens=30, ignore_eos=True,
            interrupted=lambda calls=calls: bool(preempted) and next(calls) > late,
        )  # fmt: skip
        try:
            *events, done = stream
        except KVMemoryError:
            continue
        assert "".join(e.text for e in events if isinstance(e, Text)) == done.result.outputs[0].text
        seen += bool(preempted)
    assert seen
