"""Catalogues: the file, the tool that makes it, and searches whose outputs are items."""

import io
import json
import math
import random
import struct
import zlib
from array import array
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
import torch

from engine import Catalogue, Constraint, Engine, Request, UsageError
from engine.app import batch
from engine.rules import catalogue as catalogues
from engine.rules.catalogue import CATALOGUE_FILE, ENDED, layout, open_catalogue
from engine.rules.constraint import Allowed, ConstraintError, listed
from engine.text.tokenizer import Tokenizer
from search import ADED, DSBD, Greedy, Sample, Trie
from tools import catalogue as tool
from tools.catalogue import build, write_catalogue

GOLDEN = Path(__file__).parents[2] / "golden"
HEADER = CATALOGUE_FILE.header
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
            assert made.after(torch.tensor([nodes[path]]))[0].tolist() == sorted(nexts[path])
            tokens = [*nexts[path]]
            found = made.children([nodes[path]] * (len(tokens) + 2), [*tokens, 2, 104])
            assert found[-2:] == [ENDED, ENDED]
            nodes |= {(*path, token): node for token, node in zip(tokens, found, strict=False)}
        assert sorted(nodes.values()) == [*range(made.edges + 1)]  # breadth first, none twice
        steps = [(nodes[path], token) for path in nodes for token in (2, *nexts.get(path, ()), 104)] + [(ENDED, 5)] * 99
        together = made.children(*zip(*steps, strict=True))
        assert together == [made.children([node], [token])[0] for node, token in steps]
        token_M, count_N = made.after(torch.tensor([ENDED, *nodes.values()]))
        lists = [part.tolist() for part in token_M.split(count_N.tolist())]
        assert lists == [[], *(sorted(nexts.get(path, ())) for path in nodes)]
        assert made.ids([*nodes, [*items[0], 1]]) == [*map(first.get, nodes), None]
        assert [made.ids([path])[0] for path in nodes] == [first.get(path) for path in nodes]
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


def crafted(path, change):
    """A catalogue of five items with other entries in its arrays, and right checksums."""
    written(path, [[5, 6], [5, 7], [5, 7, 9], [8], [8, 5]], ["a", "b", "c", 4, 5])
    raw = bytearray(path.read_bytes())
    _, _, _, _, edges, items, *_ = HEADER.unpack(raw[: HEADER.size])
    starts = [HEADER.size + start for start in layout(edges, items)]
    kinds = {"id starts": "q", "tokens": "i", "first edges": "i", "ends": "i"}
    arrays = {
        name: array(kind, bytes(raw[start:end]))
        for (name, kind), (start, end) in zip(kinds.items(), pairwise(starts), strict=True)
    }
    ids = raw[starts[-1] :]
    change(arrays, ids)
    body = b"".join(map(bytes, arrays.values())) + ids
    head = HEADER.pack(*HEADER.unpack(raw[: HEADER.size])[:-2], zlib.crc32(body), 0)[:-4]
    path.write_bytes(head + struct.pack("=I", zlib.crc32(head)) + body)


def put(name, place, value):
    def change(arrays, ids):
        arrays[name][place] = value

    return change


CRAFTED = {
    "a token outside": (put("tokens", 1, 10**6), "tokens: expected ids from 0 to"),
    "a negative token": (put("tokens", 0, -1), "tokens: expected ids from 0 to"),
    "tokens that fall": (put("tokens", 2, 9), "tokens: expected to rise"),
    "a token twice": (put("tokens", 3, 6), "tokens: expected to rise"),
    "edges that begin elsewhere": (put("first edges", 0, 1), "first edges: expected to rise"),
    "edges past the end": (put("first edges", -1, 7), "first edges: expected to rise"),
    "edges that fall": (put("first edges", 2, 0), "first edges: expected to rise"),
    "a cycle": (lambda arrays, _: arrays.update({"first edges": array("i", [0, 2, 2, 2, 2, 2, 6, 6])}), "later nodes"),
    "an end past the nodes": (put("ends", -1, 7), "ends: expected to rise"),
    "ends whose differences wrap around": (
        lambda arrays, _: arrays.update(ends=array("i", [1, 2**31 - 1, -(2**31), 5, 6])),
        "ends: expected to rise",
    ),
    "an end at the root": (put("ends", 0, 0), "ends: expected to rise"),
    "an end twice": (put("ends", 1, 2), "ends: expected to rise"),
    "a node without end": (put("ends", 3, 1), "ends: expected"),
    "an id past the end": (put("id starts", -1, 90), "id starts: expected to rise"),
    "an id before the beginning": (put("id starts", 0, -8), "id starts: expected to rise"),
    "ids that overlap": (put("id starts", 2, 0), "id starts: expected to rise"),
}  # fmt: skip


@pytest.mark.parametrize("case", CRAFTED)
@pytest.mark.parametrize("piece", [2, 1 << 20])
def test_crafted_catalogues_are_refused_when_they_are_opened(case, piece, tmp_path, monkeypatch):
    monkeypatch.setattr(catalogues, "PIECE", piece)
    change, words = CRAFTED[case]
    crafted(tmp_path / "c", lambda *_: None)
    assert Catalogue(tmp_path / "c").ids([[8, 5]]) == [5]
    crafted(tmp_path / "c", change)
    with pytest.raises(UsageError, match=f"not valid: .*{words}") as error:
        Catalogue(tmp_path / "c")
    assert error.value.where == str(tmp_path / "c") and "tools.catalogue" in error.value.remedy


def test_ids_that_are_none_end_the_request_that_gets_one(tmp_path, engine):
    def change(arrays, ids):
        ids[4:7] = b"[1]"  # of the item [5, 7]

    crafted(tmp_path / "c", change)
    made = Catalogue(tmp_path / "c")
    assert made.ids([[5, 6], [8], [9]]) == ["a", 4, None]
    for outputs in ([[5, 7]], [[5, 6], [5, 7], [8]]):
        with pytest.raises(UsageError, match=r"item 2: expected a string or an integer, got .*\[1\]"):
            made.ids(outputs)


def test_a_token_outside_of_the_vocabulary_ends_its_own_request(engine):
    """A broken catalogue could allow one: the other requests of the pass are answered."""

    class Outside(Constraint):
        def start(self, prompt):
            return 0

        def advance(self, state, token):
            return state

        def allowed(self, states):
            return Allowed(*listed([[5, 10**6] for _ in states]))

    requests = [Request([5, 6], Greedy(), max_new_tokens=3, constraint=c) for c in (None, Outside(), None)]
    outcomes = dict(engine.serve(requests))
    assert isinstance(outcomes[1], ConstraintError) and "got 5 to 1000000" in str(outcomes[1])
    assert outcomes[0].outputs == outcomes[2].outputs
    assert engine.pool.free_pages == engine.pool.pages


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


@pytest.mark.parametrize("scores", ["model", "renormalised"])
@pytest.mark.parametrize("ends", [{}, {"ignore_eos": True}], ids=["eos", "ignore_eos"])
def test_wide_searches_are_those_over_choices(engine, tmp_path, scores, ends):
    """More beams than are looked up one by one, and some that end in every step."""
    rng, search = random.Random(2), Trie(beams=90, num_return_sequences=90)
    items = [list(item) for item in {tuple(rng.randrange(3, 20) for _ in range(rng.randint(1, 4))) for _ in range(400)}]
    made, options = written(tmp_path / "c", items), {"constraint_scores": scores, "new": 5, **ends}
    found, expected = ask(engine, search, catalogue=made, **options), ask(engine, search, choices=items, **options)
    assert [replace(output, item=None) for output in found.outputs] == expected.outputs
    assert [items[output.item] for output in found.outputs] == [
        output.token_ids[: -1 if output.finish_reason == "eos" else None] for output in found.outputs
    ]


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
