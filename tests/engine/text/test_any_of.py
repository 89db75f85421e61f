"""The pattern of added tokens finds the spellings that a list of alternatives finds."""

import random
import re

import pytest

from engine.text.tokenizer_files import any_of

OTHERS = [
    "<u>",
    "<u",
    "<u1",
    "<u12>x",
    "<u12>",
    "<u007>",
    "u1>",
    "<u5>6",
    "<u55>>",
    "<",
    "<uu1>",
    ">",
    "12",
    "<u3>1>",
    "é",
]


def listed(spellings: list[str], words: list[str]) -> re.Pattern[str]:
    longest_first = sorted({*spellings}, key=lambda spelling: (-len(spelling), spelling))
    bounded = (rf"(?<!\w){re.escape(s)}(?!\w)" if s in words else re.escape(s) for s in longest_first)
    return re.compile("|".join(bounded))


@pytest.mark.parametrize("seed", range(40))
def test_it_matches_what_a_list_matches(seed: int):
    draw = random.Random(seed)
    numbers = draw.sample(range(draw.choice([30, 300, 3000])), draw.randint(16, 25))
    spellings = [*(f"<u{number}>" for number in numbers), *draw.sample(OTHERS, draw.randint(0, 9))]
    words = draw.sample(spellings, draw.choice([0, 0, 2]))
    short, long = any_of(spellings, words), listed(spellings, words)
    for _ in range(30):
        text = "".join(draw.choices([*spellings, "x", "1", "<u", ">", "é", " ", "_"], k=20))
        assert [found.span() for found in short.finditer(text)] == [found.span() for found in long.finditer(text)]


def test_thousands_are_a_short_pattern():
    spellings = [f"<unused{i}>" for i in range(6242)]
    found = any_of([*spellings, "<pad>"])
    assert len(found.pattern) < 1000
    assert found.findall("".join([*spellings, "<unused6242>", "<pad>"])) == [*spellings, "<pad>"]
    assert any_of([]).search("") is None


def test_a_long_chain_of_beginnings():
    found = any_of(["a" * i for i in range(1, 1500)], ["aa"])
    assert found.findall("a" * 1600) == ["a" * 1499, "a" * 101]
