"""Defaults of generation_config.json for searches and requests."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.app import batch
from engine.load.generation import INSTEAD, OF_ROWS, OTHERS, PARAMS, RULES, TOP_K, Generation
from engine.request import RequestOptions
from engine.rules import Rules, with_changes
from engine.text.thinking import Thoughts
from search import Diverse
from search.base import REGISTRY, make_search, parameters
from tests.engine.app.typist import SHAPE
from tools.random_checkpoint import make


def generation(**fields):
    return Generation.of(SimpleNamespace(generation_config=fields, config={}))


def test_names_are_those_of_searches_and_requests():
    assert {to for to, _ in PARAMS.values()} <= {key for name in REGISTRY for key in parameters(name)}
    assert {to for to, _ in RULES.values()} <= RequestOptions.__annotations__.keys()
    assert {*OF_ROWS} <= REGISTRY.keys() and not OTHERS.keys() & (PARAMS | RULES).keys()


def test_fields_that_change_nothing_are_left_out():
    plain = {name: same for name, (_, same) in (PARAMS | RULES).items()}
    plain |= OTHERS | {"top_k": None, "eos_token_id": [1, 2], "do_sample": True, "max_length": 9}
    found = generation(**plain)
    assert found == Generation(params={"top_k": TOP_K}, rules={"min_new_tokens": 0})
    assert found.note(["temperature"], [], False) == ""
    assert generation(top_k=0).params == {"top_k": 0}
    assert Generation().params_of(["top_k"]) == {}


def test_fields_of_searches_and_requests():
    found = generation(temperature=0.6, num_beams=3, repetition_penalty=1.1, bad_words_ids=[[5]])
    assert found.params == {"temperature": 0.6, "beams": 3, "top_k": 50}
    assert found.params_of(["beams", "length_penalty"]) == {"beams": 3}
    rules = {"repetition_penalty": 1.1, "bad_words": [[5]]}
    assert found.rules_of("trie") == rules
    assert found.rules_of("sample") == rules | {"constraint_scores": "renormalised"}
    assert generation(bad_words_ids=[[5]]).rules_of("sample") == {"bad_words": [[5]]}
    assert generation(min_length=30, min_new_tokens=None).rules == {"min_length": 30}


def test_the_shortest_output_of_the_file_and_a_request():
    """transformers 5.24 gives these for a prompt of 3 tokens: any min_new_tokens, even 0, replaces any min_length."""
    table = [  # the file's min_new_tokens and min_length, the request's, fewest new tokens
        (0, None, None, 6, 0), (0, 6, None, 4, 0), (2, None, None, 6, 2), (2, 6, 0, None, 0), (2, None, 0, 6, 0),
        (None, 6, None, None, 3), (None, 6, None, 4, 1), (None, 6, 0, None, 0), (None, 6, 2, None, 2), (5, 4, 2, 6, 2),
        (None, 4, None, 6, 3), (None, None, None, 6, 3), (0, None, 2, 6, 2), (None, None, 0, 6, 0),
    ]  # fmt: skip
    for *lengths, expected in table:
        file, request = (
            {name: n for name, n in zip(("min_new_tokens", "min_length"), pair, strict=True) if n is not None}
            for pair in (lengths[:2], lengths[2:])
        )
        rules = Rules(**with_changes(generation(**file).rules_of("greedy"), request))
        made = rules._processors([5, 6, 7], 32, [1], None, Thoughts())
        assert [processor.until for processor in made] == [expected] * bool(expected), lengths


def test_renormalised_logits():
    """Beams of transformers give a repetition penalty log-probabilities first: there is nothing like it here."""
    scores, penalty = {"constraint_scores": "renormalised"}, {"repetition_penalty": 1.1}
    alone, both = generation(renormalize_logits=True), generation(renormalize_logits=True, **penalty)
    assert alone.rules_of("trie") == alone.rules_of("greedy") == scores
    assert both.rules_of("greedy") == penalty | scores and both.rules_of("trie") == penalty
    notes = [found.note(parameters(name), [], True) for found in (alone, both) for name in ("greedy", "trie")]
    assert [bool(note) for note in notes] == [False, False, False, True] and "renormalize_logits True" in notes[-1]
    assert "renormalize_logits" in alone.note(parameters("trie"), [], False)
    assert alone.note(parameters("trie"), ["constraint_scores"], False) == ""


@pytest.mark.parametrize(
    ("search", "given", "named"),
    [
        ("sample", [], "repetition_penalty 1.1, temperature 0.6, forced_eos_token_id 2"),
        ("sample", ["temperature"], "repetition_penalty 1.1, forced_eos_token_id 2"),
        ("greedy", ["repetition_penalty"], "forced_eos_token_id 2"),
        ("trie", [], "num_beams 3, repetition_penalty 1.1, forced_eos_token_id 2"),
    ],
)
def test_what_is_not_applied_is_named(search, given, named):
    found = generation(forced_eos_token_id=2, temperature=0.6, repetition_penalty=1.1, num_beams=3)
    note = found.note(parameters(search), given, False)
    assert note.startswith("generation_config.json has ") and note.endswith("--generation-config applies what it can")
    assert {*note[len("generation_config.json has ") :].split(", not applied")[0].split(", ")} == {*named.split(", ")}
    assert "has forced_eos_token_id 2, not applied here: there is" in found.note(parameters(search), given, True)


def test_without_the_file_the_config_has_them():
    """transformers makes its generation config of config.json then."""
    config = {"repetition_penalty": 1.5, "num_beams": 1, "vocab_size": 9, "top_k": 50, "forced_eos_token_id": 2}
    found = Generation.of(SimpleNamespace(generation_config=None, config=config))
    assert found.rules == {"repetition_penalty": 1.5} and found.params == {"top_k": 50}
    note = "config.json has forced_eos_token_id 2, not applied here: there is nothing like it here"
    assert found.note(parameters("greedy"), [], True) == note
    both = Generation.of(SimpleNamespace(generation_config={"eos_token_id": 2}, config=config))
    assert both.rules == {} and both.note(parameters("greedy"), [], True) == ""
    empty = Generation.of(SimpleNamespace(generation_config={}, config=config | {"top_k": 7}))
    assert empty == Generation(params={"top_k": TOP_K}), "a file without fields is one, as in transformers"


@pytest.mark.parametrize("name", sorted(OTHERS.keys() - {"renormalize_logits"}))
def test_every_field_without_a_counterpart_is_named(name):
    """Among them are the fields for encoders, which transformers applies to the prompt of a decoder."""
    found = generation(**{name: 0.5})
    for applied in (False, True):
        assert f"{name} 0.5" in found.note(parameters("trie"), [], applied)
    assert ("there is nothing like it here" in found.note([], [], True)) == (name not in INSTEAD)


def test_a_field_that_has_something_like_it_is_named_with_it():
    note = generation(stop_strings=["x"], max_time=3.0).note([], [], True)
    assert "stop_strings: --stop ends" in note and note.endswith("; there is nothing like the others here")


def test_groups_of_beams():
    found = generation(num_beams=4, num_beam_groups=2, diversity_penalty=0.7)
    params = found.params_of(parameters("diverse"))
    assert make_search("diverse", params) == Diverse(beams=4, groups=2, penalty=0.7)
    assert "num_beam_groups 2" in found.note(parameters("diverse"), [], False)
    assert "num_beam_groups" not in found.note(parameters("trie"), [], False)


def test_a_batch_applies_them_if_asked_to(tmp_path, capsys):
    folder = Path(make(tmp_path / "model", **SHAPE)["path"])
    path = folder / "generation_config.json"
    ends = json.loads(path.read_text())
    path.write_text(json.dumps(ends | {"no_repeat_ngram_size": 1, "temperature": 0.2, "top_k": 2, "top_h": 0.5}))
    lines = "".join(json.dumps({"prompt_ids": [5, 6], "params": more}) + "\n" for more in ({}, {"top_k": 1}))

    def run(*flags):
        out = io.BytesIO()
        options = ["--model", folder, "--search", "sample", "--kv-memory", "1M", "--max-new-tokens", 12, *flags]
        assert batch.main([str(option) for option in options], io.BytesIO(lines.encode()), out) == 0
        answers = [json.loads(line) for line in out.getvalue().splitlines()]
        return [answer["outputs"][0]["token_ids"] for answer in answers], capsys.readouterr().err

    plain, told = run()
    assert "has temperature 0.2, top_k 2, no_repeat_ngram_size 1, top_h 0.5, not applied here: --generation" in told
    applied, told = run("--generation-config")
    assert "has top_h 0.5, not applied here: there is nothing like it here" in told
    same = ("--no-repeat-ngram-size", 1, "--temperature", 0.2, "--top-k", 2)
    assert applied == run(*same)[0] == run("--generation-config", *same)[0] and applied[0] != plain[0]
    path.write_text(json.dumps(ends | {"top_k": "two"}))
    with pytest.raises(AssertionError):
        run("--generation-config")
    assert "top_k" in (err := capsys.readouterr().err) and "generation_config.json" in err
