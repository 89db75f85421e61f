"""Stores: counts exact, 16 bytes per tri-gram at most, nothing damaged or foreign is taken."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.errors import UsageError
from search.aded import ngrams
from search.aded.ngrams import NGRAM_FILE, REST, NGramStore, add_to_store, count, merge, open_store, write_store

MARK = "ab" * 32


def texts(seed=0, n=4, length=3000, vocabulary=30):
    generator = torch.Generator().manual_seed(seed)
    return [(torch.rand(length, generator=generator) ** 3 * vocabulary).long() for _ in range(n)]


def triples(parts):
    found = Counter()
    for part in parts:
        t = part.tolist()
        found.update(zip(t, t[1:], t[2:], strict=False))
    return found


@pytest.mark.parametrize("few", [ngrams.MAX_LOOPED, -1], ids=["few", "many"])
@pytest.mark.parametrize("successors", [0, 4, 12])
@pytest.mark.parametrize("block", [64, 1 << 20])
def test_counts_are_exact(tmp_path, monkeypatch, successors, block, few):
    monkeypatch.setattr(ngrams, "MAX_LOOPED", few)
    parts = texts()
    entries = write_store(tmp_path / "s", merge([count(p) for p in parts], successors, block=block), 100, MARK)
    store, found = open_store(tmp_path / "s"), triples(parts)
    assert len(store) == entries
    kept = 0
    for a in range(31):
        for b in range(31):
            expected = sorted((-n, c) for (x, y, c), n in found.items() if (x, y) == (a, b))
            after = store.after_pair(a, b)
            assert after.total == -sum(n for n, _ in expected)
            best = expected[: successors or None]
            assert list(zip(after.counts, after.tokens, strict=True)) == [(-n, c) for n, c in best]
            kept += len(best)
        second = Counter()
        for (x, b, _), n in found.items():
            if x == a:
                second[b] += n
        after = store.after(a)
        best = sorted((-n, b) for b, n in second.items())[:12]
        assert list(zip(after.counts, after.tokens, strict=True)) == [(-n, b) for n, b in best]
        assert after.total == sum(second.values())
    size = (tmp_path / "s").stat().st_size
    assert size == NGRAM_FILE.header.size + 12 * entries <= NGRAM_FILE.header.size + 16 * kept
    assert successors == 0 or kept < len(found)


@settings(max_examples=30)
@given(
    st.lists(st.lists(st.integers(0, 5), max_size=40), min_size=1, max_size=5),
    st.sampled_from([0, 4]),
    st.integers(1, 200),
)
def test_merging_in_any_portions_gives_the_same(parts, successors, block):
    def merged(runs, block):
        found = list(merge(runs, successors, block=block))
        return [torch.cat(column).tolist() for column in zip(*found, strict=True)] if found else [[], []]

    runs = [count(part) for part in parts]
    keys, counts = merged(runs, 1 << 20)
    assert merged(runs, block) == [keys, counts] and keys == sorted(set(keys))
    assert sum(counts) == sum(max(0, len(part) - 2) for part in parts)


def test_largest_ids(tmp_path):
    top = REST - 2
    write_store(tmp_path / "s", merge([count([top, top, top, 0, top])]), top + 1, MARK)
    store = open_store(tmp_path / "s")
    assert store.after_pair(top, top) == ([0, top], [1, 1], 2) and store.after(top).total == 3
    with pytest.raises(UsageError, match="vocabularies of less than"):
        write_store(tmp_path / "s", [], REST, MARK)


def test_an_empty_store(tmp_path):
    assert write_store(tmp_path / "s", merge([count([1, 2])]), 10, "") == 0
    store = open_store(tmp_path / "s")
    assert store.after_pair(1, 2).total == store.after(1).total == len(store) == 0
    store.check(10, "")


def test_adding(tmp_path):
    one, two = texts(1, 2)
    add_to_store(tmp_path / "s", count(one), 30, MARK)
    add_to_store(tmp_path / "s", count(two), 30, MARK)
    store = open_store(tmp_path / "s")
    assert store.after_pair(0, 0).total == sum(n for t, n in triples([one, two]).items() if t[:2] == (0, 0))
    assert [path.name for path in tmp_path.iterdir()] == ["s"]
    with pytest.raises(UsageError, match="another model's tokenizer"):
        add_to_store(tmp_path / "s", count(one), 30, "cd" * 32)
    with pytest.raises(UsageError, match="cannot be written"):
        add_to_store(tmp_path / "no" / "s", count(one), 30, MARK)


def test_foreign_stores_are_refused(tmp_path):
    write_store(tmp_path / "s", [count(texts()[0])], 30, MARK)
    store = open_store(tmp_path / "s")
    store.check(30, MARK)
    for vocabulary, mark in ((30, "cd" * 32), (30, ""), (29, MARK)):
        with pytest.raises(UsageError, match="another model's tokenizer"):
            store.check(vocabulary, mark)


@pytest.mark.parametrize(
    ("keys", "counts", "words"),
    [
        ([(1, 2, 3), (1, 2, 30)], [1, 1], "token ids from 0 to 29"),
        ([(1, 31, 3)], [1], "token ids from 0 to 29"),
        ([(30, 2, 3)], [1], "token ids from 0 to 29"),
        ([(-1, 2, 3)], [1], "token ids from 0 to 29"),
        ([(1, 2, 3), (1, 2, 3)], [1, 1], "ascending order"),
        ([(2, 2, 3), (1, 2, 3)], [1, 1], "ascending order"),
        ([(1, 2, 3)], [0], "counts from 1"),
        ([(1, 2, 3)], [-1], "counts from 1"),
    ],
    ids=str,
)
@pytest.mark.parametrize("piece", [1, 1 << 20])
def test_crafted_stores_are_refused(tmp_path, monkeypatch, piece, keys, counts, words):
    """Their checksums are right."""
    monkeypatch.setattr(ngrams, "PIECE", piece)
    whole = torch.tensor([a * 2**42 + b * 2**21 + c for a, b, c in keys]), torch.tensor(counts)
    write_store(tmp_path / "s", [whole], 30, MARK)
    with pytest.raises(UsageError, match=f"not valid: .*{words}") as error:
        NGramStore(tmp_path / "s")
    assert str(tmp_path / "s") in error.value.where and "tools.ngrams" in error.value.remedy


def test_damaged_stores_are_refused(tmp_path):
    path = tmp_path / "s"
    write_store(path, [count(texts()[0][:40])], 30, MARK)
    whole = path.read_bytes()
    for i in range(len(whole)):
        path.write_bytes(whole[:i] + bytes([whole[i] ^ 0x10]) + whole[i + 1 :])
        with pytest.raises(UsageError, match=r"damaged|no n-gram store|another version"):
            NGramStore(path)
    for content in (b"", b"COPPICE3", whole[:60], whole[:-1], whole + b"\0", b"PK\x03\x04" + whole):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="n-gram store"):
            NGramStore(path)
    for absent in (tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            open_store(absent)
    path.write_bytes(whole)
    assert len(NGramStore(path))
