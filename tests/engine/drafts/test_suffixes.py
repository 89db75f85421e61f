"""Suffix drafts: of a request's own text, of ended requests by salt, in bounded memory, and across a restart."""

import os
import random
import struct
import zlib

import pytest

from engine import Engine
from engine.contract import Search
from engine.demo import demo_folder
from engine.drafts import Drafter
from engine.drafts.suffixes import (
    FIRST_CAPACITY,
    LEAST_REPEATED,
    PIECE,
    SUFFIX_FILE,
    SuffixDrafter,
    SuffixStore,
    full_store_bytes,
)
from engine.errors import UsageError
from engine.load.budget import plan
from engine.load.options import LoadOptions
from engine.load.sizes import Workload
from kernels.suffixes import BOUNDARY
from search import Greedy, Sample, Trie
from tests.eager import EagerDrafts
from tests.marks import needs_cpp

HEADER, VOCAB = SUFFIX_FILE.header, 1000
TEXT = [17 * i % 900 for i in range(1, 40)]


def store(capacity: int = 5000, vocab: int = VOCAB, fingerprint: str = "") -> SuffixStore:
    return SuffixStore(vocab, fingerprint, capacity)


def drafted(kept: SuffixStore, salt: str | None, prompt: list[int], ahead: list[int] | None = None) -> list[int]:
    return SuffixDrafter(kept).open(salt, prompt).draft(ahead or [], 8, 8).tokens


def end(kept: SuffixStore, salt: str | None, prompt: list[int], tokens: list[int]) -> None:
    SuffixDrafter(kept).open(salt, prompt).close(tokens)


def test_a_request_repeats_its_own_text():
    drafter: Drafter = SuffixDrafter(store())
    request = drafter.open(None, TEXT)
    assert request.draft([], 4, 4).tokens == []
    request.learn(TEXT[:5])
    draft = request.draft([], 4, 4)
    assert (draft.tokens, draft.parents) == (TEXT[5:9], [-1, 0, 1, 2])
    assert request.draft(TEXT[5:8], 2, 4).tokens == TEXT[8:10]  # below a node that is no part of the text


def test_ended_requests_of_the_same_salt_are_used():
    kept = store()
    end(kept, "one", TEXT[:20], TEXT[20:])
    assert drafted(kept, "one", TEXT[:10]) == TEXT[10:18]
    assert drafted(kept, "two", TEXT[:10]) == drafted(kept, None, TEXT[:10]) == []
    end(kept, "two", [*TEXT[:10], 950], [951, 952])
    assert drafted(kept, "two", TEXT[:10]) == [950, 951, 952]
    assert set(drafted(kept, "one", TEXT[:10])) <= set(TEXT)


def test_a_request_without_a_salt_leaves_nothing():
    kept = store()
    end(kept, None, TEXT, TEXT)
    assert len(kept) == 0 and len(kept._owners) == 0


def test_own_text_comes_before_that_of_others():
    kept = store()
    end(kept, "", TEXT[:10], [990] * 3)
    request = SuffixDrafter(kept).open("", TEXT[:20])
    assert request.draft(TEXT[:10], 1, 1).tokens == TEXT[10:11]


def test_long_branches_become_text_in_pieces():
    kept, branch = store(), [*range(100, 100 + 4 * PIECE)]
    request = SuffixDrafter(kept).open(None, TEXT)
    for length in range(1, len(branch)):
        request.draft(branch[:length], 1, 1)
    assert request.draft(branch[10:20], 2, 4).tokens == branch[20:22]  # another branch of the same text
    before = len(request._text)
    request.draft(branch[:-1], 1, 1)
    assert len(request._text) == before
    request.learn([901, 902, 903])
    request.learn(TEXT[:6])
    assert request.draft([], 2, 4).tokens == TEXT[6:8]


def test_a_text_grows():
    request = SuffixDrafter(store()).open(None, TEXT[:1])
    for i in range(1500):
        request.learn([i % 997])
    request.learn([3, 4, 5, 6])
    assert request.draft([], 3, 3).tokens == [7, 8, 9]


def test_a_repeated_beginning_is_stored_once():
    kept, long = store(), [i * i % 997 for i in range(5 * LEAST_REPEATED)]
    end(kept, "", long, [1, 2, 3])
    before = len(kept)
    end(kept, "", long, [1, 2, 3])
    assert len(kept) == before
    end(kept, "", long, [4, 5, 6])
    assert before < len(kept) < before + LEAST_REPEATED
    assert set(drafted(kept, "", long)) >= {1, 4}


def test_memory_is_bounded_and_the_oldest_leaves():
    kept = store(200)
    for i in range(50):
        end(kept, "", [i * 10 + j for j in range(10)], [999])
    assert len(kept) == 200
    assert drafted(kept, "", [490 + j for j in range(5)]) == [495, 496, 497, 498, 499, 999]
    assert drafted(kept, "", [0, 1, 2, 3, 4]) == []


def test_a_store_grows(tmp_path):
    kept = store(FIRST_CAPACITY + 2000)
    end(kept, "one", TEXT, [])
    kept.save(tmp_path / "texts")
    for i in range(0, FIRST_CAPACITY, 1000):
        end(kept, "two", [(i + 7 * j * j) % 997 for j in range(1000)], [])
    assert len(kept) > FIRST_CAPACITY == kept.text.fields.capacity - 2000
    assert drafted(kept, "one", TEXT[:10]) == TEXT[10:18]
    kept.save(tmp_path / "more")
    again = store(FIRST_CAPACITY + 2000)
    again.load(tmp_path / "more")
    assert drafted(again, "one", TEXT[:10]) == TEXT[10:18] and len(again._owners) == 2
    draw = random.Random(0)
    for _ in range(3):
        end(kept, "two", [draw.randrange(997) for _ in range(1000)], [])
    assert drafted(kept, "one", TEXT[:10]) == []


def test_more_salts_than_numbers():
    """The salt that had no text for the longest time gives its number away, and its text goes."""
    vocab = (1 << 30) - 5
    kept = store(vocab=vocab)
    for salt in ("a", "b", "c"):
        end(kept, salt, TEXT, [])
    end(kept, "a", [*reversed(TEXT)], [])
    end(kept, "d", TEXT[:6], [])  # takes the number of b
    assert drafted(kept, "b", TEXT[:5]) == [] and drafted(kept, "d", TEXT[:5]) == TEXT[5:6]
    assert drafted(kept, "c", TEXT[:5]) == TEXT[5:13]
    assert drafted(kept, "a", TEXT[5:0:-1]) == TEXT[:1]
    end(kept, "b", [7], [])  # takes the number of c
    assert drafted(kept, "c", TEXT[:5]) == [] and drafted(kept, "b", TEXT[:5]) == []


def test_a_store_survives_a_restart(tmp_path):
    kept, path = store(fingerprint="ab" * 32), tmp_path / "texts"
    end(kept, "one", TEXT[:20], TEXT[20:])
    end(kept, "two", TEXT[:10], [950, 951])
    kept.save(path)
    assert path.stat().st_mode & 0o077 == 0
    again = store(9000, fingerprint="ab" * 32)
    again.load(path)
    assert len(again) == len(kept) and len(again._owners) == 2
    assert drafted(again, "one", TEXT[:10]) == drafted(kept, "one", TEXT[:10]) == TEXT[10:18]
    assert drafted(again, "two", TEXT[:10]) == [950, 951]
    assert drafted(again, "three", TEXT[:10]) == []
    end(again, "three", TEXT[:9], [960])
    assert drafted(again, "three", TEXT[:9]) == [960] and drafted(again, "two", TEXT[:10]) == [950, 951]
    assert b"one" not in path.read_bytes()


def test_a_smaller_store_takes_the_newest_texts(tmp_path):
    kept, path = store(), tmp_path / "texts"
    end(kept, "old", TEXT, [])
    end(kept, "new", [500 + i for i in range(100)], [])
    kept.save(path)
    again = store(80)
    again.load(path)
    assert len(again) == 80 and len(again._owners) == 1
    assert drafted(again, "new", [590, 591, 592]) == [*range(593, 600)]
    end(again, "other", [1, 2, 3], [])
    assert drafted(again, "old", TEXT[:5]) == [] and drafted(again, "new", [1, 2]) == []


def test_a_full_ring_is_saved_in_order(tmp_path):
    kept, path = store(100), tmp_path / "texts"
    for i in range(7):
        end(kept, "", [i * 100 + j for j in range(30)], [])
    kept.save(path)
    again = store(100)
    again.load(path)
    assert [s for part in again.text.parts() for s in part] == [s for part in kept.text.parts() for s in part]
    assert drafted(again, "", [600, 601, 602]) == [*range(603, 611)]


def test_an_empty_store_is_saved(tmp_path):
    store().save(tmp_path / "texts")
    again = store()
    again.load(tmp_path / "texts")
    assert len(again) == 0


@pytest.mark.parametrize("vocab, fingerprint", [(VOCAB, "cd" * 32), (VOCAB, ""), (2000, "ab" * 32), (950, "ab" * 32)])
def test_texts_of_another_tokenizer_are_refused(tmp_path, vocab: int, fingerprint: str):
    kept = store(fingerprint="ab" * 32)
    end(kept, "", TEXT, [999])
    kept.save(tmp_path / "texts")
    with pytest.raises(UsageError, match=r"another model's tokenizer|expected token ids from 0 to 949"):
        store(vocab=vocab, fingerprint=fingerprint).load(tmp_path / "texts")


def saved(tmp_path) -> bytes:
    kept = store()
    end(kept, "one", TEXT, [])
    end(kept, "two", TEXT, [])
    kept.save(tmp_path / "texts")
    return (tmp_path / "texts").read_bytes()


def refused(tmp_path, content: bytes) -> str:
    path = tmp_path / "damaged"
    path.write_bytes(content)
    kept = store()
    with pytest.raises(UsageError) as error:
        kept.load(path)
    assert len(kept) == 0 and str(path) in str(error.value) and "remove the file" in str(error.value)
    return str(error.value)


def test_damaged_files_are_refused(tmp_path):
    good = saved(tmp_path)
    for at in range(8, len(good), 13):
        changed = bytearray(good)
        changed[at] ^= 0x40
        assert "damaged" in (said := refused(tmp_path, bytes(changed))) or "another version" in said
    for size in (HEADER.size, HEADER.size + 5, len(good) - 1):
        assert "damaged" in refused(tmp_path, good[:size])
    assert "damaged" in refused(tmp_path, good + b"\0")
    for content in (b"", good[:20], b"x" * 500):
        assert "no suffix store" in refused(tmp_path, content)


def sealed(content: bytearray) -> bytes:
    """A file with the checksums of its content."""
    content[HEADER.size - 8 : HEADER.size - 4] = struct.pack("=I", zlib.crc32(content[HEADER.size :]))
    content[HEADER.size - 4 : HEADER.size] = struct.pack("=I", zlib.crc32(content[: HEADER.size - 4]))
    return bytes(content)


@pytest.mark.parametrize(
    "at, number, message",
    [
        (HEADER.size + 4, 1020, "token ids from 0 to 999"),
        (HEADER.size + 4, 7 << 10 | 5, "of the salts that it lists"),
        (-24, 0, "a number of its own"),  # the second salt's
        (-24, BOUNDARY, "a number of its own"),
        (-20, 500, "a newest token"),
    ],
)
def test_impossible_contents_are_refused(tmp_path, at: int, number: int, message: str):
    content = bytearray(saved(tmp_path))
    at %= len(content)
    content[at : at + 4] = struct.pack("=I", number)
    assert message in refused(tmp_path, sealed(content))


def test_files_that_cannot_be_read_or_written(tmp_path):
    for path in (tmp_path / "absent", tmp_path):
        with pytest.raises(UsageError, match="cannot be read"):
            store().load(path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(UsageError, match="cannot be read"):
        store().load(tmp_path / "pipe")
    with pytest.raises(UsageError, match="cannot be written"):
        store().save(tmp_path / "absent" / "texts")


@needs_cpp
@pytest.mark.parametrize(
    "search", [Greedy(), Trie(3), Sample(num_return_sequences=3)], ids=["greedy", "trie", "sample"]
)
def test_an_engine_answers_again_in_fewer_passes(search: Search):
    engine = Engine.load(demo_folder(), drafts="suffix", kv_memory=1 << 24, threads=1)
    plain = Engine.load(demo_folder(), kv_memory=1 << 24, threads=1)
    assert engine.drafts is not None
    drafter = engine.drafts.drafter
    assert isinstance(drafter, SuffixDrafter)
    assert drafter.store.fingerprint == engine.tokenizer.fingerprint
    engine.drafts = EagerDrafts(drafter)  # whatever it costs
    first, again, wanted = (
        one.generate(["Tell me a story about a dog."], search, max_new_tokens=24, ignore_eos=True)[0]
        for one in (engine, engine, plain)
    )
    assert first.outputs == again.outputs == wanted.outputs
    passes = [result.stats["forward_passes"] for result in (again, first, wanted)]
    assert passes == sorted(passes) and (passes[0] < passes[2] / 2 or not isinstance(search, Greedy))


def test_a_plan_counts_the_full_store():
    plans = [plan(LoadOptions(demo_folder(), drafts=name), Workload(), runtime=0) for name in ("ngrams", "suffix")]
    assert plans[1].fixed - plans[0].fixed == full_store_bytes() <= 200e6


def test_a_capacity_out_of_range():
    with pytest.raises(UsageError, match="capacity: expected 64"):
        store(3)
