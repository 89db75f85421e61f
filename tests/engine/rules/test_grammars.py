"""Grammars as constraints: every kind of tokenizer, every search, errors. llguidance itself is not tested here."""

import functools
import json
import random
import re
import shutil
import sys
import weakref
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from engine import ConstraintError, Request, UsageError
from engine.rules import Rules, grammars, response_format, with_changes
from engine.rules.begin import Spellings
from engine.rules.constraint import AfterSpelledThought, AfterThought, Choices, packed
from engine.rules.grammars import Vocabulary, compile_grammar, library, source_of
from engine.text import sandbox_process
from engine.text.thinking import Thoughts
from engine.text.tokenizer import Tokenizer
from search import ADED, DSBD, ULTS, BeamSample, BoN, Greedy, Sample, SBoN, Speculative, Trie

GOLDEN = Path(__file__).parents[2] / "golden"
EOS = 2
BOOK = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 6},
        "pages": {"type": "integer", "minimum": 1, "maximum": 999},
        "tags": {"type": "array", "items": {"enum": ["new", "naïve", "a\nb"]}, "minItems": 1, "maxItems": 2},
    },
    "required": ["title", "pages", "tags"],
    "additionalProperties": False,
}
LARK = 'start: "[" WORD ("," WORD){0,3} "]"\nWORD: /[a-c]{1,3}/'
GBNF = 'root ::= "[" word ("," word)? "]"\nword ::= [a-c] [a-c]'
pytestmark = pytest.mark.skipif(find_spec("llguidance") is None, reason="llguidance is not installed (extra grammar)")


def is_book(text):
    book = json.loads(text)
    return (
        [*book] == ["title", "pages", "tags"]
        and len(book["title"]) <= 6
        and 1 <= book["pages"] <= 999
        and 1 <= len(book["tags"]) <= 2
        and {*book["tags"]} <= {"new", "naïve", "a\nb"}
    )


GRAMMARS = {
    "json_schema": (BOOK, is_book),
    "regex": (r"(ab|[d-f]é?) [0-9]{2}🙂?\n?", lambda text: re.fullmatch(r"(ab|[d-f]é?) [0-9]{2}🙂?\n?", text)),
    "lark": (LARK, lambda text: re.fullmatch(r"\[[a-c]{1,3}(,[a-c]{1,3}){0,3}\]", text)),
    "gbnf": (GBNF, lambda text: re.fullmatch(r"\[[a-c]{2}(,[a-c]{2})?\]", text)),
}
kinds = pytest.mark.parametrize("name", GRAMMARS)


def kind_of(name):
    return name if name in ("json_schema", "regex") else "grammar"


def ask(engine, search, new=120, **options):
    options.setdefault("eos_token_ids", [EOS])
    [result] = engine.generate([[5, 6, 7]], search, max_new_tokens=new, **options)
    return result


# --- tokenizers ---

TOKENIZERS = ["bytelevel", "gemma", "gpt2", "metaspace", "opt", "prepend", "qwen", "sp_bpe", "sp_legacy", "tekken"]


def ids_of(allowed, size):
    if allowed is None or isinstance(allowed, list):
        return allowed if allowed is not None else [*range(size)]
    return (allowed.unsqueeze(1) >> torch.arange(32) & 1).view(-1)[:size].nonzero().view(-1).tolist()


@pytest.mark.parametrize("folder", TOKENIZERS)
@kinds
def test_walks_through_allowed_tokens_end_in_texts_of_the_grammar(folder, name):
    """Whatever is drawn from the allowed tokens, `decode` of it is a text of the grammar, without special tokens."""
    tokenizer, (value, holds), rng = Tokenizer.load(GOLDEN / "text" / folder), GRAMMARS[name], random.Random(5)
    eos = max(tokenizer.special_ids)
    grammar = compile_grammar(kind_of(name), value, tokenizer, tokenizer.size, [eos])
    seen = set()
    for _ in range(6):
        state, path = grammar.start([]), []
        for _ in range(150):
            [allowed] = grammar.allowed([state])
            ids = ids_of(allowed, tokenizer.size)
            assert ids and not tokenizer.special_ids & {*ids} - {eos}
            token = eos if eos in ids else rng.choice(ids)
            if token == eos:
                break
            path.append(token)
            state = grammar.advance(state, token)
        text = tokenizer.decode(path)
        assert token == eos and holds(text), text
        seen.add(text)
    assert len(seen) > 3


@pytest.mark.parametrize("folder", TOKENIZERS)
def test_every_way_to_write_a_text_is_known(folder):
    """The tokens of a text, as the tokenizer encodes it, are allowed one after the other, and then the end is."""
    tokenizer = Tokenizer.load(GOLDEN / "text" / folder)
    eos = max(tokenizer.special_ids)
    text = '{"title": "a é🙂b", "pages": 12, "tags": ["naïve"]}'
    schema = {**BOOK, "properties": {**BOOK["properties"], "title": {"type": "string"}}}
    grammar = compile_grammar("json_schema", schema, tokenizer, tokenizer.size, [eos])
    state, ids = grammar.start([]), tokenizer.encode(text, add_special=False)
    for token in ids if tokenizer.decode(ids) == text else ids[1:]:  # a space that encoding adds, and decoding keeps
        assert token in ids_of(*grammar.allowed([state]), tokenizer.size), tokenizer.decode([token])
        state = grammar.advance(state, token)
    assert ids_of(*grammar.allowed([state]), tokenizer.size) == [eos]


def test_texts_that_a_tokenizer_cannot_spell(engine):
    """Such a grammar is refused; where some texts can be spelled, the others are dead ends."""
    with pytest.raises(UsageError, match="it allows no text that the model's tokens can spell"):
        ask(engine, Greedy(), regex="é+")
    result = ask(engine, Trie(beams=4, num_return_sequences=4), regex="(aé|b|c)d")
    assert {(o.text, o.finish_reason) for o in result.outputs} == {("bd", "eos"), ("cd", "eos"), ("a", "constraint")}


# --- schemas ---

WORDS = ["red", "grün", 'q"uote', "a\nb", 17, None, True, 2.5, "🙂", "\\", ""]
KEYS = ["a", "tag list", "ключ", 'q"k', "x/y", "n1"]
PATTERNS = [r"^[a-c]{2,4}$", r"^\d{3}-\d{2}$", r"^(foo|bar)+z?$", r"x{2}$", r"^[^\x00-\x60]{1,3}$"]
MORE = {"anyOf": [{"$ref": "#/$defs/t"}, {"type": "null"}]}
TREE = {"type": "object", "properties": {"v": {"type": "boolean"}, "next": MORE}, "required": ["v", "next"]}


def nasty(rng, depth):
    """A random schema of parts inside of each other."""
    low, leaf = rng.randint(0, 2), functools.partial(nasty, rng, 0)
    if not depth:
        return rng.choice([
            {"type": ["null", "boolean"]}, {"type": "integer", "minimum": -low, "maximum": 4000 + low},
            {"type": "string", "maxLength": 1 + low}, {"enum": rng.sample(WORDS, 3)}, {"const": {"a": [low, None]}},
            {"type": "string", "pattern": rng.choice(PATTERNS), "maxLength": 12},
            {"type": "number", "minimum": 0, "exclusiveMaximum": 2.5},
            {"type": "string", "format": rng.choice(["date", "time", "date-time", "uuid", "ipv4"])},
            {"type": "integer", "multipleOf": 7, "minimum": 0, "maximum": 1000}, {"$ref": "#/$defs/t"},
        ])  # fmt: skip
    keys, inner = rng.sample(KEYS, 3), functools.partial(nasty, rng, depth - 1)
    return rng.choice([
        {"type": "object", "properties": {key: inner() for key in keys}, "required": keys[:low],
         "additionalProperties": rng.choice([False, leaf()])},
        {"type": "array", "items": inner(), "minItems": low, "maxItems": low + 1},
        {"anyOf": [inner(), leaf()]},
        {"type": "array", "prefixItems": [leaf(), inner()], "items": False, "minItems": 2},
        {"allOf": [{"type": "object", "properties": {"a": inner()}, "required": ["a"]},
                   {"properties": {"b": leaf()}, "required": ["b"]}], "type": "object"},
    ])  # fmt: skip


@pytest.mark.parametrize("depth", range(4))
def test_values_validate(depth):
    """Whole texts are valid by another implementation of JSON schemas."""
    jsonschema, rng = pytest.importorskip("jsonschema"), random.Random(depth)
    tokenizer, whole = Tokenizer.load(GOLDEN / "text" / "bytelevel"), 0
    eos = max(tokenizer.special_ids)
    for _ in range(15):
        schema = {"$defs": {"t": TREE}, **nasty(rng, depth)}
        grammar = compile_grammar("json_schema", schema, tokenizer, tokenizer.size, [eos])
        state, path, token = grammar.start([]), [], None
        while token != eos and len(path) < 200:
            ids = ids_of(*grammar.allowed([state]), tokenizer.size)
            token = eos if eos in ids else rng.choice(ids)
            path.append(token)
            state = state if token == eos else grammar.advance(state, token)
        if token == eos:
            jsonschema.validate(json.loads(tokenizer.decode(path)), schema)
            whole += 1
    assert whole > 8


# --- searches ---

SEARCHES = [
    Greedy(), Sample(num_return_sequences=3), Trie(beams=15, num_return_sequences=15), BeamSample(beams=3), ADED(),
    ADED(temperature=0.8, seed=2), ULTS(prior="dirichlet"), BoN(n=4), SBoN(n=6, tau=2, alpha=0.5), DSBD(),
    DSBD(drafter="ngram"), Speculative(),
]  # fmt: skip


@pytest.mark.parametrize("search", SEARCHES, ids=lambda search: type(search).__name__)
def test_finished_outputs_are_texts_of_the_grammar(engine, search):
    for name, scores in (("json_schema", "renormalised"), ("gbnf", "model")):
        value, holds = GRAMMARS[name]
        result = ask(engine, search, **{kind_of(name): value}, constraint_scores=scores)
        assert result.outputs
        for output in result.outputs:
            assert output.finish_reason == "eos" and holds(output.text), output.text


@pytest.mark.parametrize("scores", ["model", "renormalised"])
def test_beams_fork_matchers(engine, scores):
    """All texts of a finite language, with the scores that they have as choices."""
    texts = [a + b + c for a in ("x", "yz") for b in ("1", "2", "") for c in ("!", "?")]
    search, options = Trie(beams=30, num_return_sequences=30), {"constraint_scores": scores}
    expected = ask(engine, search, choices=texts, **options)
    result = ask(engine, search, regex="(x|yz)[12]?[!?]", **options)
    assert {o.text for o in result.outputs} == {*texts}
    assert [o.token_ids for o in result.outputs] == [o.token_ids for o in expected.outputs]
    assert [o.score for o in result.outputs] == pytest.approx([o.score for o in expected.outputs], abs=1e-4)


def test_forced_tokens_cost_no_pass(engine):
    options = {"regex": "the one and only text", "constraint_scores": "renormalised"}
    result = ask(engine, Greedy(), **options)
    assert result.outputs[0].text == "the one and only text" and result.stats["forward_passes"] == 0


def test_requests_of_one_grammar_do_not_disturb_each_other(engine):
    requests = [
        Request([5, 6, 7, i], search, max_new_tokens=40, eos_token_ids=[EOS], json_schema=BOOK)
        for i, search in enumerate([Trie(beams=2), Sample(seed=1), ADED(), Greedy()], 10)
    ]
    together = dict(engine.serve(requests))
    for i, request in enumerate(requests):
        [(_, alone)] = engine.serve([request])
        assert [o.token_ids for o in together[i].outputs] == [o.token_ids for o in alone.outputs]


def test_the_end_of_an_output(engine):
    """A limit that cuts a value is "length"; where no token ends outputs, a whole value is "constraint"."""
    [output] = ask(engine, Greedy(), new=5, json_schema=BOOK).outputs
    assert output.finish_reason == "length" and len(output.token_ids) == 5
    [output] = ask(engine, Greedy(), json_schema=BOOK, ignore_eos=True).outputs
    assert output.finish_reason == "constraint" and is_book(output.text)
    [output] = ask(engine, Greedy(), regex="x*", ignore_eos=True, new=9).outputs
    assert output.finish_reason == "length" and output.text == "x" * 9
    [output] = ask(engine, Greedy(), regex="").outputs
    assert (output.token_ids, output.finish_reason) == ([EOS], "eos")


@pytest.mark.parametrize("scores", ["model", "renormalised"])
def test_ends_that_have_a_text(engine, scores):
    """A token that ends outputs is no part of the text: it neither continues it nor stands inside it."""
    text, decode, whole = "the one and only text", engine.tokenizer.decode, 0
    for end in range(3, engine.tokenizer.size):
        for ends in ([end], [end, EOS], [end, 3]):
            options = {"regex": text, "eos_token_ids": ends, "constraint_scores": scores}
            for search in (Greedy(), Trie(beams=2)):
                [output] = ask(engine, search, **options).outputs
                if output.finish_reason == "eos":
                    assert decode(output.token_ids[:-1]) == text
                    whole += 1
                else:
                    assert output.finish_reason == "constraint" and text.startswith(output.text)
    assert whole > 100


def test_json_has_no_endless_white_space():
    tokenizer = Tokenizer.load(GOLDEN / "text" / "gpt2")
    grammar = compile_grammar("json_schema", BOOK, tokenizer, tokenizer.size, [0])
    state, [space] = grammar.start([]), tokenizer.encode(" ")
    for token in tokenizer.encode("{ "):
        state = grammar.advance(state, token)
    assert space not in ids_of(*grammar.allowed([state]), tokenizer.size)
    with pytest.raises(ConstraintError, match="does not allow token"):
        grammar.advance(state, space)


# --- thoughts ---


def test_a_constraint_begins_after_the_thought(engine):
    free_V = torch.ones(104, dtype=torch.int64)
    free_V[EOS] = 0
    constraint = AfterThought(Choices([[10, 11]], [EOS]), [40], packed(free_V))
    for search in (Greedy(), Trie(beams=3), ADED()):
        options = {"constraint": constraint, "logit_bias": {40: 20.0}, "new": 60}
        for output in ask(engine, search, **options).outputs:
            assert output.token_ids[-4:] == [40, 10, 11, EOS], search


@pytest.mark.parametrize(
    ("prompt", "thinks"), [("a<think>\n", True), ("a<think>\n\n</think>\n\n", False), ("a", False)]
)
def test_a_prompt_that_opens_a_thought(prompt, thinks):
    tokenizer = Tokenizer.load(GOLDEN / "text" / "qwen")
    ids = tokenizer.encode_rendered([(prompt, True)])
    constrained = Rules(regex="ab").at_work(ids, 9, tokenizer.size, frozenset([422]), tokenizer)
    assert isinstance(constrained.states.mask.constraint, AfterThought) is thinks
    state = constrained.states.mask.start(ids)
    a, close = tokenizer.encode("a")[0], tokenizer.encode_rendered([("</think>", True)])[0]
    assert constrained.states.mask.allowed([state]).has([a, close, 422]) == [True, thinks, False]
    if thinks:
        for token in (300, close):
            [state] = constrained.states.mask.advance_all([state], [token])
        assert constrained.states.mask.allowed([state]).has([a, 300]) == [True, False]


def test_tags_of_thoughts_that_are_text():
    """OLMo 3's are; their tokens depend on the text around them, and none may extend into the constrained text."""
    tokenizer = Tokenizer.load(GOLDEN / "text" / "gpt2")
    data, vocab, [eos] = tokenizer.data(), tokenizer.size, tokenizer.encode_rendered([("<|endoftext|>", True)])
    assert not tokenizer.thought_ids

    def masked(prompt, thoughts):
        given = tokenizer.encode(prompt), 9, vocab + 8, frozenset([eos]), tokenizer, thoughts
        return Rules(regex="ab").at_work(*given).states.mask.constraint

    tags = Thoughts("<think>", "</think>")
    for prompt, thinks in (("a<think>", True), ("a<think>\n", True), ("<think> a", False), ("a</think>", False)):
        assert isinstance(masked(prompt, tags), AfterSpelledThought) is thinks, prompt
        assert not isinstance(masked(prompt, None), AfterSpelledThought), prompt
    assert not isinstance(masked("a [thinking]", tags), AfterSpelledThought)
    one, other = (masked("a<think>", tags)._longer for _ in range(2))
    assert one is other, "the vocabulary is read once"
    grammar, rng = masked("a<think>\n", tags), random.Random(3)
    for text in ("Hm <b></b></thin</think>", "</think>", "<</think>", "</</think>", "é </th</think>"):
        for _ in range(20):
            state, left, path = grammar.start([]), text.encode(), []
            while left:  # any tokens of the text
                ids = {*ids_of(*grammar.allowed([state]), vocab)}
                assert not {eos, *range(vocab, vocab + 8)} & ids
                path.append(rng.choice([i for i in ids if data[i] and left.startswith(data[i])]))
                left = left.removeprefix(data[path[-1]])
                state = grammar.advance(state, path[-1])
            assert {data[i][:1] for i in ids_of(*grammar.allowed([state]), vocab)} == {b"a"}


def test_no_token_extends_beyond_a_tag_that_is_text():
    data = [b"", b"a", b"<", b"/", b"think", b"</think", b">", b">a", b"</think>", b"</think>a", b"/think>a", b"x>y<"]
    longer, free_V = Spellings(data).beyond(b">"), torch.ones(14, dtype=torch.int64)
    assert longer == [7, 9, 10, 11]
    constraint = AfterSpelledThought(Choices([[1]], [0]), "</think>", data, longer, free_V)
    everything = {*range(12)}

    def after(*path):
        state = constraint.start([])
        for token in path:
            state = constraint.advance(state, token)
        [allowed] = constraint.allowed([state])
        return allowed.tolist() if allowed.dtype == torch.int64 else {*ids_of(allowed, 14)}

    assert after() == after(1) == after(2, 1) == after(5, 5, 1) == everything - {9}
    assert after(2) == after(1, 2) == after(11) == everything - {9, 10}
    assert after(5) == after(2, 3, 4) == after(2, 2, 3, 4) == everything - {7, 9}
    assert after(8) == after(5, 6) == after(2, 3, 4, 6) == after(7, 11, 3, 4, 6) == [1]


def test_tags_of_thoughts_that_are_matched_in_normalised_text(tmp_path):
    """`<think>` may be an added token that is neither special nor matched before normalisation."""
    shutil.copytree(GOLDEN / "text" / "qwen", tmp_path / "x")
    path = tmp_path / "x" / "tokenizer.json"
    spec = json.loads(path.read_text("utf-8"))
    for token in spec["added_tokens"]:
        if "think" in token["content"]:
            token |= {"special": False, "normalized": True}
    path.write_text(json.dumps(spec))
    config = tmp_path / "x" / "tokenizer_config.json"
    named = json.loads(config.read_text("utf-8")) if config.exists() else {}
    config.write_text(json.dumps({key: value for key, value in named.items() if key != "added_tokens_decoder"}))
    tokenizer, usual = (Tokenizer.load(folder) for folder in (tmp_path / "x", GOLDEN / "text" / "qwen"))
    assert tokenizer.thought_ids == usual.thought_ids and len(tokenizer.thought_ids) == 2
    ids = tokenizer.encode_rendered([("a<think>\n", True)])
    constrained = Rules(regex="ab").at_work(ids, 9, tokenizer.size, frozenset([422]), tokenizer)
    assert isinstance(constrained.states.mask.constraint, AfterThought)


# --- errors ---

CHAIN = "start: r0\n" + "\n".join(f"r{i}: r{i + 1}" for i in range(3000)) + '\nr3000: "x"'
REFERENCES = {
    "$ref": "#/$defs/d0",
    "$defs": {f"d{i}": {"type": "array", "items": {"$ref": f"#/$defs/d{i + 1}"}} for i in range(1000)} | {"d1000": {}},
}

WRONG = [
    ({"json_schema": {"type": "integer", "minimum": 5, "maximum": 3}}, "Unsatisfiable schema"),
    ({"json_schema": {"not": {"type": "string"}}}, 'Unimplemented keys: ["not"]'),
    ({"json_schema": {"type": "strin"}}, "Invalid type: strin"),
    ({"json_schema": '{"type"'}, "json_schema: EOF"),
    ({"json_schema": {"pattern": 5}}, "json_schema: "),
    ({"json_schema": False}, "json_schema: it allows no text"),
    ({"json_schema": 5}, "json_schema: expected a JSON schema, got 5"),
    ({"json_schema": {"a": {5}}}, "json_schema: expected a JSON schema: "),
    ({"regex": "("}, "unclosed group"),
    ({"regex": "(?=a)"}, "look-around"),
    ({"regex": 5}, "regex: expected a text, got 5"),
    ({"regex": "[^\\x00-\\x{10ffff}]"}, "regex: it allows no text"),
    ({"grammar": 'start: "a" b'}, "unknown name"),
    ({"grammar": 'start: a\na: a "x"'}, "grammar: it allows no text"),
    ({"grammar": "root ::= ("}, "grammar: "),
    ({"grammar": "start: <s>"}, "it names <s>, but control tokens are never part of an output"),
    ({"regex": "a", "choices": ["a"]}, "choices and regex: expected at most one"),
    ({"choices": []}, "choices: expected at least one"),
    ({"grammar": 'start: "a" <[5]>'}, "it names <[5]>, but control tokens"),
    ({"grammar": 'root ::= "a" bar'}, "grammar: Rule 'bar' not found"),
    ({"grammar": ""}, "grammar: No 'root' rule found"),
    ({"grammar": "# nothing"}, "grammar: No 'root' rule found"),
    ({"grammar": "x" * (1 << 20)}, "grammar: expected at most 524288 characters"),
    ({"grammar": CHAIN}, "grammar: it takes more than 3 s or too much memory to compile, or is nested too deep"),
    ({"json_schema": REFERENCES}, "json_schema: it takes more than 3 s or too much memory"),
]


@pytest.mark.parametrize(("options", "words"), WRONG, ids=[f"{words}-{i}" for i, (_, words) in enumerate(WRONG)])
def test_wrong_grammars_are_refused(engine, options, words):
    with pytest.raises(UsageError) as caught:
        ask(engine, Greedy(), **options)
    assert words in str(caught.value) and "<state>" not in str(caught.value)


def test_the_package_is_named_where_it_is_absent(monkeypatch):
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(UsageError, match="need the package llguidance") as caught:
        Rules(regex="a").check()
    assert "pip install llguidance" in str(caught.value)


# --- limits ---


def test_forced_texts_are_read_in_parts(engine):
    """A grammar of some lines whose text is 40 MB long: it goes on token by token."""
    literal = "".join(chr(97 + (7 * i + i // 26) % 26) for i in range(10_000))
    rules = "\n".join(f"r{i}: r{i + 1} r{i + 1}" for i in range(12))
    grammar = f'start: ("x"|"y") r0\n{rules}\nr12: "{literal}"'
    [output] = ask(engine, Greedy(), new=30, grammar=grammar).outputs
    assert output.finish_reason == "length" and literal.startswith(output.text[1:]) and len(output.text) > 20
    [output] = ask(engine, Greedy(), new=30, regex="(a{1000}){1000}").outputs
    assert output.finish_reason == "length" and set(output.text) == {"a"}


def test_forced_tokens_are_those_of_the_tokenizer():
    tokenizer = Tokenizer.load(GOLDEN / "text" / "gpt2")
    text = "the one and only text, which is longer than what is read of it at once: it has one hundred characters"
    grammar = compile_grammar("regex", text + "( or more)?", tokenizer, tokenizer.size, [0])
    state, path = grammar.start([]), []
    while len(allowed := ids_of(*grammar.allowed([state]), tokenizer.size)) == 1:
        path += allowed
        state = grammar.advance(state, allowed[0])
    ids = tokenizer.encode(text)
    assert len(path) > len(ids) - 4 and path == ids[: len(path)]


@pytest.mark.parametrize("kind", ["before", "after"])
def test_schemas_that_a_model_cannot_spell(kind):
    """Without braces in its vocabulary, whatever comes first."""
    tokenizer = Tokenizer.load(GOLDEN / "text" / "sp_legacy")
    vocabulary = Vocabulary(tokenizer)
    spelled = [i for i, data in enumerate(vocabulary.tokens[: vocabulary.size]) if not {*b"{}"} & {*data}]
    vocabulary.tokens = [data if i in spelled else b"" for i, data in enumerate(vocabulary.tokens[: vocabulary.size])]
    vocabulary.tokens += [b"<end>", *(bytes([byte]) for byte in range(256))]
    vocabulary.special_token_ids = [i for i, data in enumerate(vocabulary.tokens) if not data] + [vocabulary.size]
    vocabulary._ours = library().LLTokenizer(library().TokenizerWrapper(vocabulary))
    schema = {"type": "object"} if kind == "before" else {"anyOf": [{"type": "object"}, {"enum": ["a{"]}]}
    with pytest.raises(UsageError, match="it allows no text that the model's tokens can spell"):
        vocabulary.compiled("json_schema", schema)


def test_what_is_kept(engine, monkeypatch):
    """The sandbox sees a grammar once; the oldest compiled ones go; nothing is kept of one that failed."""
    asked, sandbox = [], sandbox_process.GRAMMARS
    monkeypatch.setattr(sandbox, "ask", lambda *args, ask=sandbox.ask: asked.append(args) or ask(*args))
    tokenizer = engine.model.tokenizer
    make = lambda pattern: compile_grammar("regex", pattern, tokenizer, tokenizer.size, [EOS])  # noqa: E731
    first = make("kept[0-9]")._compiled
    assert make("kept[0-9]")._compiled is first and len(asked) == 1
    monkeypatch.setattr(grammars, "KEPT_BYTES", 4 * first.size)
    running = [make(f"other{i}[0-9]") for i in range(9)]
    assert sum(one.size for one in grammars._ALIVE) > grammars.KEPT_BYTES and not grammars._KEPT
    assert make("other3[0-9]")._compiled is running[3]._compiled  # what runs is shared all the same
    running.clear()
    held = weakref.ref(first)
    del first
    for i in range(9):
        make(f"more{i}[0-9]")
    assert held() is None and 0 < sum(one.size for one in grammars._ALIVE) <= grammars.KEPT_BYTES
    last = make("more8[0-9]")
    last._compiled.fail()
    assert last._compiled not in grammars._KEPT and make("more8[0-9]")._compiled is not last._compiled


def test_a_mask_that_takes_too_much_work_ends_its_request(engine, monkeypatch):
    monkeypatch.setattr(grammars, "GRAMMAR_LIMITS", {**grammars.GRAMMAR_LIMITS, "max_lexer_states": 40})
    hard = Request([5, 6, 7], Greedy(), max_new_tokens=60, eos_token_ids=[EOS], regex="([ab]*a[ab]{12}c){3}")
    easy = Request([5, 6, 7], Greedy(), max_new_tokens=60, eos_token_ids=[EOS], regex="ab")
    results = dict(engine.serve([hard, easy]))
    assert isinstance(results[0], ConstraintError) and "too many states" in str(results[0])
    assert results[1].outputs[0].text == "ab" and engine.pool.used_pages == 0


def test_outputs_that_a_constraint_ended_come_last(engine):
    for penalty in (-3.0, 0.0, 1.0, 20.0):
        search = Trie(beams=4, num_return_sequences=4, length_penalty=penalty)
        outputs = ask(engine, search, regex="(a{9}é|b|c)d").outputs
        reasons = [output.finish_reason for output in outputs]
        assert "constraint" in reasons and reasons == sorted(reasons, reverse=True), penalty


def test_fixed_lengths_end_where_nothing_is_allowed(engine):
    [output] = ask(engine, ULTS(prior="dirichlet", fixed_length=True), choices=["abc"]).outputs
    assert (output.text, output.finish_reason, output.score) == ("abc", "constraint", None)


# --- files of requests ---


def test_response_formats():
    assert response_format({"type": "text"}) == {"json_schema": None}
    assert response_format({"type": "json_object"}) == {"json_schema": {"type": "object"}}
    schema = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": {"type": "null"}}}
    assert response_format(schema) == {"json_schema": {"type": "null"}}
    for wrong in (5, "text", {}, {"type": "xml"}, {"type": "json_schema"}, {"type": "json_schema", "json_schema": {}}):
        with pytest.raises(UsageError, match="response_format: expected type text, json_object or json_schema"):
            response_format(wrong)
    given = {"regex": "a", "min_new_tokens": 3}
    assert with_changes(given, {"json_schema": None}) == {"min_new_tokens": 3, "json_schema": None}
    assert with_changes(given, {"bad_words": ["b"]}) == {**given, "bad_words": ["b"]}


def test_sources_are_checked_without_a_tokenizer():
    for name, (value, _) in GRAMMARS.items():
        assert json.loads(source_of(kind_of(name), value).text)["grammars"]
