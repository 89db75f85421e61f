"""Reranking: which texts a scalar head reads, beside the scores of these texts; caches, memory, refusals."""

import pytest

from engine import Engine, UsageError
from engine.errors import KVMemoryError
from engine.ranking import Ranked, check_text, pairs
from engine.service import Entry
from search import BoN
from tests.engine.test_rewards import SHAPE, TEMPLATE, scored
from tools.random_checkpoint import make

QUERY = "hello there"
DOCUMENTS = ["one", "two words", "a longer text of words", "</s>", "one"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    make(root / "target", vocab=400, max_positions=300, seed=1, **SHAPE)
    make(root / "other", vocab=300, max_positions=120, seed=2, **SHAPE)
    scored(root / "plain", root / "other")
    scored(root / "template", root / "other", TEMPLATE)
    return root


def load(folder, **options):
    return Engine.load(folder, dtype="float32", **{"kv_memory": 1 << 21, "prefix_cache": "on"} | options)


@pytest.fixture(scope="module")
def heads(folders):
    return {name: load(folders / name) for name in ("plain", "template")}


@pytest.fixture(scope="module")
def beside(folders):
    return {name: load(folders / "target", reward=folders / name) for name in ("plain", "template")}


def expected(head, texts):
    """Ranks by the scores of texts, evaluated without a cache."""
    scores = head.scores([*texts])
    return sorted((Ranked(i, score) for i, score in enumerate(scores)), key=lambda one: -one.score)


def same(found, wanted):
    assert [one.index for one in found] == [one.index for one in wanted]
    assert [one.score for one in found] == pytest.approx([one.score for one in wanted], abs=1e-5)


def test_without_a_template_a_line_break_parts_them(heads, beside):
    texts = [heads["plain"].tokenizer.encode(f"{QUERY}\n{document}") for document in DOCUMENTS]
    for engine in (heads["plain"], beside["plain"]):
        same(engine.rerank(QUERY, DOCUMENTS), expected(heads["plain"], texts))


def test_the_chat_template_has_the_document_as_the_reply(heads, beside):
    read = heads["template"].tokenizer.encode_rendered
    texts = [
        read([("[user] ", True), (QUERY, False), ("</s>\n[assistant] ", True), (document, False), ("</s>\n", True)])
        for document in DOCUMENTS
    ]
    for engine in (heads["template"], beside["template"]):
        same(engine.rerank(QUERY, DOCUMENTS), expected(heads["template"], texts))


def test_a_template_of_pairs_writes_control_tokens_and_texts_do_not(heads, beside):
    template = "<s>{document} answers {query}</s>"
    read = heads["plain"].tokenizer.encode_rendered
    texts = [
        read([("<s>", True), (document, False), (" answers ", True), (QUERY, False), ("</s>", True)])
        for document in DOCUMENTS
    ]
    [bare] = pairs(heads["plain"].model, QUERY, ["</s>"], template)
    assert bare.count(texts[0][-1]) == 1
    for engine in (heads["plain"], heads["template"], beside["template"]):
        same(engine.rerank(QUERY, DOCUMENTS, template=template), expected(heads["plain"], texts))


def test_equal_scores_keep_their_order(heads):
    found = heads["plain"].rerank(QUERY, ["one"] * 5)
    assert [one.index for one in found] == [0, 1, 2, 3, 4]
    assert heads["plain"].rerank(QUERY, []) == []


def test_what_pairs_begin_with_is_read_once(beside):
    engine = beside["plain"]
    service, head, long = engine.service(), engine.companions["reward"], "many words of a query"
    head.pool.prefixes.clear()
    first, last = pairs(head.model, long, DOCUMENTS[1:3])
    told = []
    for ids in (first, last, last):
        service.submit(Entry(check_text(service.models, ids), lambda news: told.append(news.outcome)))
        while service.busy:
            service.step()
    cold, warm, again = (outcome.stats["reused_tokens"] for outcome in told if outcome is not None)
    assert (cold, again) == (0, len(last) - 1) and 0 < warm < again
    same(engine.rerank(long, DOCUMENTS), engine.rerank(long, DOCUMENTS, cache_salt=None))


def test_pages_return_and_searches_by_rewards_go_on(beside):
    engine = beside["plain"]
    [alone] = engine.generate([QUERY], BoN(3, seed=1), max_new_tokens=5)
    engine.rerank(QUERY, DOCUMENTS * 5)
    [after] = engine.generate([QUERY], BoN(3, seed=1), max_new_tokens=5)
    assert [o.token_ids for o in after.outputs] == [o.token_ids for o in alone.outputs]
    for each in (engine, engine.companions["reward"]):
        each.pool.prefixes.clear()
        assert each.pool.used_pages == 0


def test_any_number_fits_a_small_cache(folders, heads):
    engine = load(folders / "target", reward=folders / "plain", kv_memory=1 << 17, prefix_cache="off")
    pool = engine.companions["reward"].pool
    documents = ["words " * 15, "others " * 4] * 6
    texts = [heads["plain"].encode(f"{QUERY}\n{document}") for document in documents]
    assert sum(map(len, texts)) > 2 * pool.pages * pool.page_size
    same(engine.rerank(QUERY, documents), expected(heads["plain"], texts))
    assert pool.used_pages == 0


@pytest.mark.parametrize(
    ("query", "documents", "options", "message"),
    [
        (3, ["a"], {}, "query: expected a text"),
        ("q", "a", {}, "documents: expected a list"),
        ("q", ["a", 3], {}, r"documents\[1\]: expected a text"),
        ("q", ["a"], {"template": "{query}"}, "{document} is missing"),
        ("q", ["a"], {"template": 3}, "template: expected a text"),
        (
            "q",
            ["a", "words " * 200],
            {},
            r"documents\[1\]: .* has 1004 tokens, this model's maximum context length is 120",
        ),
    ],
)
def test_refusals(heads, query, documents, options, message):
    with pytest.raises(UsageError, match=message):
        heads["plain"].rerank(query, documents, **options)


def test_a_model_that_generates_has_no_head(folders):
    with pytest.raises(UsageError, match="scalar head") as caught:
        load(folders / "target").rerank("q", ["a"])
    assert "--reward" in caught.value.remedy


def test_a_text_that_fits_no_cache(folders):
    engine = load(folders / "plain", kv_memory=1 << 13)
    assert engine.pool.pages * engine.pool.page_size < 100
    with pytest.raises(KVMemoryError):
        engine.rerank("q", ["words " * 20])
    assert engine.pool.used_pages == 0
