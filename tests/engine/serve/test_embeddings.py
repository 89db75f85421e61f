"""`/v1/embeddings` by OpenAI's client, `/v1/rerank`: what they answer is what the engine computes; limits."""

import json
import re
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.demo import demo_folder
from engine.serve import http, texts
from tests.engine.test_rewards import SHAPE, TEMPLATE, scored
from tools.random_checkpoint import make

pytest.importorskip("starlette", reason="needs the extra serve")
openai = pytest.importorskip("openai", reason="needs the extra test")

from tests.engine.serve.test_limits import raw, until  # noqa: E402

GOLDEN = Path(__file__).parents[2] / "golden"
TEXTS = ["Once upon a time there was a little dog.", "The cat sat.", "A", "One day the fox wanted to bake a cake."]
QUERY, DOCUMENTS = "What is the opposite of hot?", ["I like cats.", "Cold is the opposite of hot.", "Hot."]


@pytest.fixture(scope="module")
def alone() -> Engine:
    return Engine.load(demo_folder(), dtype="float32", threads=1, reward=demo_folder("reward"))


def embed(server, given=TEXTS, **fields):
    extra = {key: fields.pop(key) for key in [*fields] if key in ("pooling", "normalize", "other")}
    reply = server.client.embeddings.create(model="demo", input=given, extra_body=extra, **fields)
    assert [one.index for one in reply.data] == [*range(len(reply.data))]
    return torch.tensor([one.embedding for one in reply.data]), reply


def post(server, path, **body):
    request = urllib.request.Request(server.url + path, json.dumps(body).encode(), {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request) as reply:
            return reply.status, json.load(reply), reply.headers
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error), error.headers


def test_the_client_by_default_and_by_floats(server, alone):
    expected_NE = alone.embed(TEXTS)
    for options in ({}, {"encoding_format": "float"}, {"user": "me"}):
        found, reply = embed(server, **options)
        torch.testing.assert_close(found, expected_NE, atol=1e-5, rtol=0)
        count = sum(len(alone.encode(text)) for text in TEXTS)
        assert reply.usage.prompt_tokens == reply.usage.total_tokens == count
        assert (reply.object, reply.model, reply.data[0].object) == ("list", "demo", "embedding")


def test_base64_holds_the_same_bits_as_digits(server):
    given = {"model": "demo", "input": TEXTS}
    _, plain, _ = post(server, "/v1/embeddings", **given)
    _, coded, _ = post(server, "/v1/embeddings", **given, encoding_format="base64")
    for one, other in zip(plain["data"], coded["data"], strict=True):
        digits = torch.tensor(one["embedding"], dtype=torch.float32)
        assert texts.based(digits) == other["embedding"]


@pytest.mark.parametrize("form", ["text", "texts", "ids", "lists of ids", "mixed"])
def test_forms_of_the_input(server, alone, form):
    ids = [alone.encode(text) for text in TEXTS]
    given = {"text": TEXTS[0], "texts": TEXTS, "ids": ids[0], "lists of ids": ids, "mixed": [TEXTS[0], ids[1]]}[form]
    many = {"text": 1, "ids": 1, "mixed": 2}.get(form, 4)
    torch.testing.assert_close(embed(server, given)[0], alone.embed(TEXTS[:many]), atol=1e-5, rtol=0)


def test_options(server, alone):
    for ours in ({"pooling": "last"}, {"pooling": "last", "normalize": False}, {"dimensions": 7}):
        torch.testing.assert_close(embed(server, **ours)[0], alone.embed(TEXTS, **ours), atol=1e-4, rtol=1e-4)
    reply = server.client.embeddings.with_raw_response.create(model="demo", input="A", extra_body={"other": 1})
    assert reply.headers["x-coppice-ignored"] == "other"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"input": []}, "input: expected 1 to 2048 texts, got 0$"),
        ({"input": ["a"] * 2049}, "input: expected 1 to 2048 texts, got 2049; ask several times"),
        ({"input": None}, "input: expected a text"),
        ({"input": [1.5]}, "input: expected a text or token ids"),
        ({"input": ["a", 3]}, r"input\[1\]: expected a text or token ids"),
        ({"input": ["a", [1, -1]]}, r"input\[1\]: expected token ids from 0"),
        ({"input": ["a", []]}, r"input\[1\]: the text is empty"),
        ({"input": "dog " * 600}, "input: the text has 603 tokens, this model's maximum context length is 512"),
        ({"input": [1] * 513}, "input: the text has 513 tokens"),
        ({"input": "x" * 7000}, "input: the text has 7000 characters"),
        ({"input": "a", "dimensions": 193}, "dimensions: expected an integer from 1 to 192"),
        ({"input": "a", "encoding_format": "int8"}, "encoding_format: expected float or base64"),
        ({"input": "a", "pooling": "cls"}, "pooling: expected mean or last"),
        ({"input": "a", "poolin": "mean"}, "did you mean pooling"),
        ({"input": "a", "model": "other"}, "model: expected demo"),
    ],
)
def test_refusals(server, fields, message):
    status, reply, _ = post(server, "/v1/embeddings", **{"model": "demo"} | fields)
    assert status == (404 if "model:" in message else 400)
    assert re.search(message, reply["error"]["message"])


def test_many_texts_are_few_requests_at_a_time(start, alone, monkeypatch):
    """More texts than places; a client that asks meanwhile is answered before the last of them."""
    server = start("--parallel", "2", "--queue", "6")
    lane, seen = server.app.served["demo"].lane, []
    submit = lane.submit
    monkeypatch.setattr(lane, "submit", lambda *args: seen.append(len(lane.open)) or submit(*args))
    given = [TEXTS[i % 4] * (1 + i % 5) for i in range(60)]
    done = []

    def story():
        until(lambda: lane.open)
        server.client.completions.create(model="demo", prompt="Once", max_tokens=2)
        done.append("story")

    thread = threading.Thread(target=story)
    thread.start()
    found, _ = embed(server, given)
    done.append("texts")
    thread.join()
    torch.testing.assert_close(found, alone.embed(given), atol=1e-5, rtol=0)
    assert max(seen) <= 2 * texts.AHEAD + 1 and len(seen) == 61
    until(lambda: not lane.open and not lane.held)


def test_a_full_queue_refuses(start, monkeypatch):
    server = start("--parallel", "1", "--queue", "1")
    monkeypatch.setattr(server.app.served["demo"].lane, "room", lambda client: 0)
    monkeypatch.setattr(server.app.served["demo"].lane, "wait", lambda client, count: 7)
    status, _, headers = post(server, "/v1/embeddings", model="demo", input=TEXTS)
    assert status == 429 and headers["retry-after"] == "7"


def test_an_error_of_one_text_ends_the_others(start, monkeypatch):
    server = start("--parallel", "2")
    model = server.engine.runner.model
    bad, outputs = len(server.engine.encode(TEXTS[1])), model.outputs
    spoil = lambda rows_TE: outputs(rows_TE) * (float("nan") if len(rows_TE) == bad else 1)  # noqa: E731
    monkeypatch.setattr(model, "outputs", spoil)
    status, reply, _ = post(server, "/v1/embeddings", model="demo", input=TEXTS * 10)
    assert status == 500 and reply["error"]["code"] == "numerics"
    lane = server.app.served["demo"].lane
    until(lambda: not lane.open)
    assert post(server, "/v1/embeddings", model="demo", input=[TEXTS[0]])[0] == 200


def test_large_replies_come_in_parts_and_are_counted(start, alone, monkeypatch):
    server = start("--max-body", "40K")
    given = [TEXTS[i % 4] for i in range(150)]
    expected_NE = alone.embed(given)
    assert expected_NE.numel() * 4 > http.LARGE_REPLY
    torch.testing.assert_close(embed(server, given)[0], expected_NE, atol=1e-5, rtol=0)
    monkeypatch.setattr(http, "LARGE", 1 << 10)
    torch.testing.assert_close(embed(server, given, encoding_format="float")[0], expected_NE, atol=1e-5, rtol=0)
    until(lambda: not server.app._bytes)
    monkeypatch.setattr(http, "BODIES", 1)
    assert post(server, "/v1/embeddings", model="demo", input=given)[0] == 503
    status, reply, _ = post(server, "/v1/embeddings", model="demo", input=[[1]] * 230)
    assert status == 400 and "230 vectors of 192 numbers" in reply["error"]["message"]


def test_a_limit_of_all_tokens(server, monkeypatch):
    monkeypatch.setattr(texts, "MOST_TOKENS", 10)
    status, reply, _ = post(server, "/v1/embeddings", model="demo", input=TEXTS)
    assert status == 400 and "more than 10 tokens together" in reply["error"]["message"]


def test_a_client_that_leaves_ends_its_texts(start, slow):
    slow(server := start("--parallel", "1"))
    lane = server.app.served["demo"].lane
    peer = raw(server.port, {"model": "demo", "input": [TEXTS[0] * 20] * 400}, "/v1/embeddings")
    until(lambda: lane.open)
    peer.close()
    until(lambda: not lane.open)
    assert server.app.stepper.metrics._counters["requests_cancelled", "demo"]


# --- reranking ---


def test_ranks_by_the_reward_model(server, alone):
    expected = alone.rerank(QUERY, DOCUMENTS)
    for path in ("/v1/rerank", "/v2/rerank"):
        documents = [DOCUMENTS[0], {"text": DOCUMENTS[1]}, DOCUMENTS[2]]
        status, reply, _ = post(server, path, model="demo", query=QUERY, documents=documents)
        assert status == 200 and reply["model"] == "demo" and reply["usage"]["total_tokens"] > 0
        assert [one["index"] for one in reply["results"]] == [one.index for one in expected]
        found = [one["relevance_score"] for one in reply["results"]]
        assert found == pytest.approx([torch.tensor(one.score).sigmoid().item() for one in expected], abs=1e-5)
        assert all(one.keys() == {"index", "relevance_score"} for one in reply["results"])
    _, reply, _ = post(
        server, "/v1/rerank", model="demo", query=QUERY, documents=DOCUMENTS, top_n=1, return_documents=True
    )
    [one] = reply["results"]
    assert one["document"] == {"text": DOCUMENTS[expected[0].index]}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"documents": []}, "documents: expected 1 to 2048 texts"),
        ({"documents": "a"}, "documents: expected a list"),
        ({"documents": [3]}, r"documents\[0\]: expected a text or"),
        ({"documents": ["a", {"texts": "b"}]}, r"documents\[1\]: expected a text or"),
        ({"query": None}, "query: expected a text"),
        ({"top_n": 0}, "top_n: expected an integer >= 1"),
        ({"return_documents": 1}, "return_documents: expected true or false"),
        ({"template": "{query}"}, "template: expected"),
        ({"documents": ["a", "dog " * 600]}, r"documents\[1\]: what the model reads of it has"),
        ({"documents": ["x" * 9000]}, r"documents\[0\]: the text has 9000 characters"),
    ],
)
def test_refusals_of_reranking(server, fields, message):
    body = {"model": "demo", "query": QUERY, "documents": DOCUMENTS} | fields
    status, reply, _ = post(server, "/v1/rerank", **body)
    assert status == 400 and re.search(message, reply["error"]["message"])


def test_a_reward_model_alone_and_models_without_a_head(start, tmp_path):
    make(tmp_path / "target", vocab=400, max_positions=300, seed=1, **SHAPE)
    scored(tmp_path / "ranks", tmp_path / "target", TEMPLATE)
    (tmp_path / "pairs").write_text("<s>{query} | {document}</s>")
    flags = ["--model", f"a={tmp_path / 'ranks'}", "--model", f"b={tmp_path / 'target'}"]
    server = start(*flags, "--rerank-template", str(tmp_path / "pairs"))
    engine = server.engine
    documents = ["one", "two words", "three words more"]
    own = post(server, "/v1/rerank", model="a", query="hello", documents=documents)[1]["results"]
    given = post(server, "/v1/rerank", model="a", query="hello", documents=documents, template="{document}{query}")[1]
    for found, template in ((own, "<s>{query} | {document}</s>"), (given["results"], "{document}{query}")):
        expected = Engine(engine.model).rerank("hello", documents, template=template, cache_salt=None)
        assert [one["index"] for one in found] == [one.index for one in expected]
    status, reply, _ = post(server, "/v1/rerank", model="b", query="hello", documents=documents)
    assert status == 400 and "--reward" in reply["error"]["message"]
    for path, body in (("completions", {"prompt": "a"}), ("embeddings", {"input": "a"})):
        status, reply, _ = post(server, f"/v1/{path}", model="a", **body)
        assert status == 400 and "reward model" in reply["error"]["message"]


def test_ranks_of_the_adapter_that_the_model_names(start, tmp_path):
    make(tmp_path / "target", vocab=400, max_positions=300, seed=1, **SHAPE)
    folder = scored(tmp_path / "ranks", tmp_path / "target")
    adapters = [GOLDEN / "adapters" / name for name in ("llama_all", "llama_some")]
    server = start("--model", f"a={folder}", "--dtype", "float32", *(f"--adapter={each}" for each in adapters))
    engine = Engine.load(folder, dtype="float32", threads=1, adapters=adapters)
    found = {}
    for model, adapter in (("a", "none"), ("a:llama_all", "llama_all"), ("a:llama_some", "llama_some")):
        status, reply, _ = post(server, "/v1/rerank", model=model, query=QUERY, documents=DOCUMENTS)
        assert status == 200 and reply["model"] == model
        found[model] = [one["relevance_score"] for one in reply["results"]]
        wanted = [torch.tensor(score).sigmoid().item() for _, score in engine.rerank(QUERY, DOCUMENTS, adapter=adapter)]
        assert found[model] == pytest.approx(wanted, abs=1e-5)
    assert len({*map(tuple, found.values())}) == len(found)
