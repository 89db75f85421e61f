"""Catalogues: the file, the tool that makes it, and searches whose outputs are items."""

import io
import json
import math
import random
from pathlib import Path

import pytest
import torch

from engine import Catalogue, Engine, UsageError
from engine.app import batch
from engine.catalogue import build, open_catalogue, write_catalogue
from engine.text.tokenizer import Tokenizer
from search import ADED, DSBD, Greedy, Sample, Trie
from tools import catalogue as tool

GOLDEN = Path(__file__).parent.parent / "golden"
MODEL = GOLDEN / "llama/plain"
CASES = [c for c in json.loads((GOLDEN / "constraints.json").read_text())["cases"] if "catalogue" in c]
EOS = 2


def trie(items):
    tokens = torch.tensor([token for item in items for token in item], dtype=torch.int32)
    return build(tokens, torch.tensor([*map(len, items)], dtype=torch.int64))


def written(path, items, ids=None):
    """A catalogue of the golden model, from token sequences."""
    tokenizer = Tokenizer.load(MODEL)
    write_catalogue(path, trie(items), ids or [*range(len(items))], tokenizer.size, tokenizer.fingerprint)
    return Catalogue(path)


@pytest.fixture(scope="module")
def engine():
    return Engine.load(MODEL, dtype="float32", kv_memory="8M", threads=1)


def ask(engine, search, new=6, prompt=(5, 6, 7), **options):
    options.setdefault("eos_token_ids", [EOS])
    [result] = engine.generate([list(prompt)], search, max_new_tokens=new, **options)
    assert engine.pool.free_pages == engine.pool.pages
    return result


# --- the file ---


def test_every_prefix_has_its_tokens_and_every_item_its_id(tmp_path):
    """Against sets of tuples, for items that others begin with, repeated ones, and nodes of few and many tokens."""
    for seed in range(20):
        rng = random.Random(seed)
        wide = rng.choice((3, 10, 97))
        items = [
            [rng.randrange(3, 3 + wide) for _ in range(rng.randint(1, 5))] for _ in range(rng.choice((1, 40, 400)))
        ]
        ids = [rng.choice((f"ü{i}", i)) for i in range(len(items))]
        made, first = written(tmp_path / "c", items, ids), {}
        for identity, item in zip(ids, items, strict=True):
            first.setdefault(tuple(item), identity)
        nexts = {}
        for item in first:
            for i, token in enumerate(item):
                nexts.setdefault(item[:i], set()).add(token)
        assert (made.items, made.edges) == (len(first), sum(map(len, nexts.values())))
        assert trie(items).repeats == [(i, items.index(x)) for i, x in enumerate(items) if items.index(x) < i]
        nodes = {(): 0}
        for path in sorted(nexts, key=len):
            after = made.after(nodes[path])
            assert list(after) == sorted(nexts[path])
            nodes |= {(*path, token): made.child(nodes[path], token) for token in nexts[path]}
            assert made.child(nodes[path], 2) is None and made.child(nodes[path], 104) is None
        assert sorted(nodes.values()) == [*range(made.edges + 1)]  # breadth first, none twice
        assert {path: made.item(path) for path in nodes} == {path: first.get(path) for path in nodes}
        assert made.item([*items[0], 1]) is None
        size = (tmp_path / "c").stat().st_size - sum(len(json.dumps(identity)) for identity in first.values())
        assert size <= 8 * made.edges + 12 * made.items + 100


def test_a_file_that_is_no_catalogue_or_another_models_is_refused(tmp_path, engine):
    path = tmp_path / "c"
    written(path, [[5, 6], [7]])
    whole = path.read_bytes()
    for data, words in (
        (b"", "this is no catalogue"),
        (b"x" * 200, "this is no catalogue"),
        (whole[:-1], "damaged"),
        (whole + b"1", "damaged"),
        (whole[:100] + b"\7" + whole[101:], "damaged"),
        (whole[:10] + b"\2" + whole[11:], "another version"),
    ):
        (tmp_path / "bad").write_bytes(data)
        with pytest.raises(UsageError, match=words) as error:
            ask(engine, Greedy(), catalogue=tmp_path / "bad")
        assert "tools.catalogue" in error.value.remedy
    with pytest.raises(UsageError, match="cannot be read"):
        ask(engine, Greedy(), catalogue=str(tmp_path / "absent"))
    write_catalogue(path, trie([[5]]), ["a"], 9, "ab" * 32)
    assert open_catalogue(path).items == 1
    with pytest.raises(UsageError, match="another tokenizer than the model's"):
        ask(engine, Greedy(), catalogue=path)
    for wrong in ({"catalogue": 5}, {"catalogue": path, "choices": ["a"]}):
        with pytest.raises(UsageError, match="catalogue"):
            ask(engine, Greedy(), **wrong)


# --- searches ---


def test_beam_search_over_a_catalogue_is_that_of_transformers(engine, tmp_path):
    for number, case in enumerate(CASES):
        made = written(tmp_path / str(number), case["catalogue"])
        names = ("length_penalty", "early_stopping")
        search = Trie(
            beams=(n := case["beams"]), num_return_sequences=min(n, 8), **{name: case[name] for name in names}
        )
        search = search if n > 1 else Greedy()  # transformers takes one beam for it
        result = ask(engine, search, case["max_new_tokens"], case["prompt_ids"], catalogue=made)
        assert [o.token_ids for o in result.outputs] == [o["token_ids"] for o in case["outputs"]], number
        scores = [o.score for o in result.outputs]
        assert scores == pytest.approx([o["score"] for o in case["outputs"]], abs=1e-3, rel=0), number
        for output in result.outputs:
            item = output.token_ids[: -1 if output.finish_reason == "eos" else None]
            assert output.item == (case["catalogue"].index(item) if item in case["catalogue"] else None)
            assert output.item is not None or output.finish_reason == "length"


@pytest.mark.parametrize("scores", ["model", "renormalised"])
def test_every_search_gives_items(engine, tmp_path, scores):
    rng = random.Random(1)
    items = [[rng.randrange(3, 30) for _ in range(rng.randint(1, 4))] for _ in range(200)]
    made = written(tmp_path / "c", items)
    engine.companions["draft"] = engine
    try:
        for search in (Greedy(), Trie(beams=40, num_return_sequences=40), Sample(seed=3), ADED(), DSBD(seed=5)):
            for ends in ({}, {"ignore_eos": True}):
                result = ask(engine, search, catalogue=made, constraint_scores=scores, **ends)
                for output in result.outputs:
                    tokens = output.token_ids[: -1 if output.finish_reason == "eos" else None]
                    assert items[output.item] == tokens, (search, output)
                    assert output.finish_reason == ("constraint" if ends else "eos") and math.isfinite(output.logprob)
    finally:
        del engine.companions["draft"]


# --- the tool ---


def run(folder, lines, *flags):
    text = lines if isinstance(lines, str) else "".join(json.dumps(line) + "\n" for line in lines)
    (folder / "items.jsonl").write_text(text)
    where = ["--input", str(folder / "items.jsonl"), "--output", str(folder / "c")]
    return tool.main(["--model", str(MODEL), *where, *flags])


def test_the_tool_and_batch(tmp_path, capsys):
    """From lines of both kinds to records with their items; a repeated item is reported."""
    texts = ["one", "two cats", "the cat"]
    tokens = Tokenizer.load(MODEL).encode("the cat", add_special=False)
    lines = [{"id": f"i{n}", "text": text} for n, text in enumerate(texts)]
    assert run(tmp_path, [*lines, {"token_ids": [9, 8]}, {"token_ids": tokens}]) == 0
    told = capsys.readouterr().err
    assert "left out, as they repeat earlier items: line 5 (as line 3)\n" in told
    assert "4 items of up to" in told
    out, asked = io.BytesIO(), {"prompt": "a", "params": {"search": "trie", "beams": 4, "num_return_sequences": 4}}
    flags = ["--model", str(MODEL), "--threads", "1", "--kv-memory", "4M", "-q", "--catalogue", str(tmp_path / "c")]
    data = (json.dumps(asked) + '\n{"prompt": "a", "params": {"catalogue": "c"}}\n').encode()
    assert batch.main(flags, io.BytesIO(data), out) == 2
    record, refused = map(json.loads, out.getvalue().splitlines())
    found = {output["item"]: output["text"] for output in record["outputs"]}
    assert set(found) == {"i0", "i1", "i2", 3} and found["i1"].strip().startswith("two cats")
    assert "no such key" in refused["error"]["message"]
    write_catalogue(tmp_path / "c", trie([[5]]), ["a"], 9, "ab" * 32)
    assert batch.main(flags, io.BytesIO(data), out) == 2
    assert "another tokenizer" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("{", "malformed JSON"),
        ("[1]", "expected a JSON object"),
        ('{"id": 1}', 'expected "text" or "token_ids", and "id", got id'),
        ('{"text": "a", "token_ids": [5]}', 'expected "text" or "token_ids"'),
        ('{"text": "a", "name": 5}', "got text, name"),
        ('{"text": ""}', "text: expected a text"),
        ('{"token_ids": []}', "at least one integer"),
        ('{"token_ids": [5, true]}', "at least one integer"),
        ('{"token_ids": [5, 99999]}', "expected ids from 0 to"),
        ('{"token_ids": [-1]}', "expected ids from 0 to"),
        ('{"text": "a", "id": 1.5}', "id: expected a string or an integer"),
        ('{"token_ids": [5, 47]}', "which ends an output"),
    ],
)
def test_bad_lines_are_named(tmp_path, capsys, line, words):
    assert run(tmp_path, '{"token_ids": [5]}\n\n' + line + "\n") == 2
    told = capsys.readouterr().err
    assert words in told and "items.jsonl, line 3" in told
    assert not (tmp_path / "c").exists()


def test_no_items(tmp_path, capsys):
    assert run(tmp_path, "\n") == 2
    assert "there are no items" in capsys.readouterr().err
