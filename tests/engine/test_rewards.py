"""Rewards: what a reward model reads of a response, what it keeps, how it makes do; functions in its place."""

import json
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine, KVMemoryError, UsageError
from engine.app.batch import main as batch
from engine.app.chat import main as chat
from engine.contract import Output, Search, SearchResult
from engine.conversation import Conversation, figures
from engine.engine import Done, Progress, Request
from search import BoN, SBoN
from tests.invariants import check_pool
from tools.random_checkpoint import EOS, make

GOLDEN = Path(__file__).parents[1] / "golden"
SHAPE = dict(layers=2, width=32, mlp=48, heads=4, kv_heads=2, scale=0.5)
TEMPLATE = (
    "{% for m in messages %}[{{ m.role }}] {{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}[assistant] {% endif %}"
)
MESSAGES = [{"role": "system", "content": "be good"}, {"role": "user", "content": "hello there"}]


def scored(folder, source, template=None):
    """A reward model of random weights, made of a language model's folder."""
    shutil.copytree(source, folder, dirs_exist_ok=True)
    config = json.loads((folder / "config.json").read_text())
    config |= {"architectures": ["LlamaForSequenceClassification"], "num_labels": 1, "pad_token_id": 0}
    (folder / "config.json").write_text(json.dumps(config))
    tensors = load_file(folder / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    generator = torch.Generator().manual_seed(3)
    tensors["score.weight"] = torch.randn(1, config["hidden_size"], generator=generator)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    if template:
        with_template(folder, template)
    return folder


def with_template(folder, template):
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(config | {"chat_template": template}))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """A target, and reward models: of its tokens, likewise with a template, of other tokens with one and without."""
    root = tmp_path_factory.mktemp("models")
    make(root / "target", vocab=400, max_positions=300, seed=1, **SHAPE)
    make(root / "other", vocab=300, max_positions=300, seed=2, **SHAPE)
    scored(root / "same", root / "target")
    scored(root / "same_template", root / "target", TEMPLATE)
    scored(root / "other_template", root / "other", TEMPLATE)
    scored(root / "other_plain", root / "other")
    return root


@pytest.fixture(scope="module")
def target(folders):
    return Engine.load(folders / "target", dtype="float32", kv_memory=1 << 22)


@pytest.fixture(scope="module")
def rewards(folders):
    names = ("same", "same_template", "other_template", "other_plain")
    models = {name: Engine.load(folders / name, dtype="float32", kv_memory=1 << 22) for name in names}
    return models | {"golden": Engine.load(GOLDEN / "llama" / "classifier", dtype="float32", kv_memory=1 << 20)}


@pytest.fixture(autouse=True)
def pools_are_empty_again(target, rewards):
    yield
    for engine in (target, *rewards.values()):
        check_pool(engine.pool, [])


@dataclass(frozen=True)
class Ask(Search):
    """Asks for rewards, round by round: (responses, those kept after it)."""

    rounds: list
    told: list = field(default_factory=list)
    models = ("reward",)

    def run(self, task):
        for responses, kept in self.rounds:
            self.told.append((yield from task.judge.rewards(responses)))
            task.judge.keep(kept)
        return SearchResult([Output([9], 0.0, 0.0, "length")])


def ask(target, reward, rounds, prompt="hello there", **options):
    target.add("reward", reward)
    search = Ask(rounds)
    [result] = target.generate([prompt], search, **options)
    return search.told, result.stats


def read(target, reward, name, tokens, prompt, messages):
    """The text that the model should read, straight from the tokenizers and the template."""
    body = tokens[:-1] if tokens and tokens[-1] == EOS else tokens
    text = target.tokenizer.decode(body)
    if reward.template:
        chat = messages or [{"role": "user", "content": prompt}]
        rendered = reward.template.render([*chat, {"role": "assistant", "content": text}], add_generation_prompt=False)
        if name == "same_template":  # the very tokens of the response, between those of the template
            start, closing = rendered[0][0].rsplit(text, 1) if text else ("", "")
            encode = reward.tokenizer.encode_rendered
            return encode([(start, True)]) + body + encode([(closing, True)])
        return reward.tokenizer.encode_rendered(rendered)
    if name == "same":
        return target.tokenizer.encode(prompt) + body
    return reward.tokenizer.encode(prompt + text)


@pytest.mark.parametrize("template", [None, TEMPLATE, "{% for m in messages %}{{ m.content }}{% endfor %}</s></s>"])
def test_padding_at_the_end_is_not_scored(folders, target, rewards, tmp_path, template):
    """The end of a turn is padding as well: as in transformers, the token before it is scored."""
    plain = Engine.load(scored(tmp_path, folders / "target", template), dtype="float32", kv_memory=1 << 20)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pad_token_id": EOS}))
    padded = Engine.load(tmp_path, dtype="float32", kv_memory=1 << 20)

    texts = [[50, 60, EOS], [50, EOS, 60], [50, 60, EOS, EOS], [EOS], [EOS, EOS]]
    parts = [[50, 60], [50, EOS, 60], [50, 60], [EOS], [EOS]]
    assert padded.scores(texts) == pytest.approx(plain.scores(parts), abs=1e-5)
    assert plain.scores(texts)[0] != pytest.approx(plain.scores(parts)[0], abs=1e-3)

    [[found]], _ = ask(target, padded, [([[50, 60, 20]], [])])
    whole = read(target, plain, "same_template" if template else "same", [50, 60, 20], "hello there", None)
    while whole[-1] == EOS:
        whole.pop()
    assert found == pytest.approx(plain.scores([whole])[0], abs=1e-5)


@pytest.mark.parametrize(("fields", "expected"), [({}, 1), ({"pad_token_id": None}, None), ({"pad_token_id": 7}, 7)])
def test_an_absent_padding_is_that_of_the_family(tmp_path, fields, expected):
    for path in (Path(__file__).parents[1] / "golden" / "opt" / "classifier").iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    path = tmp_path / "config.json"
    config = {name: value for name, value in json.loads(path.read_text()).items() if name != "pad_token_id"}
    path.write_text(json.dumps(config | fields))
    engine = Engine.load(tmp_path, dtype="float32", kv_memory=1 << 20)
    pad = 1 if expected is None else expected
    alone, padded = engine.scores([[50, 60], [50, 60, pad]])
    assert (alone == pytest.approx(padded, abs=1e-6)) == (expected is not None)


ENDINGS = [[50, 60, 20], [50, 60, 61, 30], [50, 44, 399, 350], [50, 60, EOS], [70, 80, 90, 250, 260, 270]]


# Models of other tokens without a template read the texts of a conversation line by line: not here.
READINGS = [(name, None) for name in ("same", "same_template", "other_template", "other_plain", "golden")]
READINGS += [(name, MESSAGES) for name in ("same", "same_template", "other_template")]


@pytest.mark.parametrize(("name", "messages"), READINGS, ids=[f"{'chat' if m else 'plain'}-{n}" for n, m in READINGS])
def test_what_is_read(target, rewards, name, messages):
    reward = rewards[name]
    longer = [[*ENDINGS[0], 60, 71], [*ENDINGS[2], 90], ENDINGS[3]]
    rounds = [(ENDINGS, [ENDINGS[0], ENDINGS[2], ENDINGS[3]]), (longer, longer[:1]), ([[*longer[0], 5]], [])]
    told, stats = ask(target, reward, rounds, messages=messages)
    for (responses, _), scores in zip(rounds, told, strict=True):
        whole = [read(target, reward, name, tokens, "hello there", messages) for tokens in responses]
        assert scores == pytest.approx(reward.scores(whole), abs=1e-5)
    assert stats["reward_forward_passes"] == 3


def test_nothing_is_read_twice(target, rewards):
    """Same tokens, no closing: each distinct prefix once. With a closing: that again for every reading."""
    longer = [[*ENDINGS[0], 60, 71], [*ENDINGS[2], 90]]
    rounds = [(ENDINGS, [ENDINGS[0], ENDINGS[2]]), (longer, longer), (longer, longer)]
    prompt = len(target.tokenizer.encode("hello there"))
    bodies = [t[:-1] if t[-1] == EOS else t for t in ENDINGS + longer]
    distinct = {tuple(b[:i]) for b in bodies for i in range(1, len(b) + 1)}
    _, stats = ask(target, rewards["same"], rounds)
    assert stats["reward_nodes_evaluated"] == prompt + len(distinct) and stats["reward_forward_passes"] == 2
    template = rewards["same_template"]
    before, closing = (
        template.tokenizer.encode_rendered([(t, True)]) for t in ("[user] hello there</s>\n[assistant] ", "</s>\n")
    )
    _, stats = ask(target, template, rounds)
    readings = len({tuple(b) for b in bodies[:5]}) + 2 + 2
    assert stats["reward_nodes_evaluated"] == len(before) + len(distinct) + readings * len(closing)


def test_a_small_cache_is_made_do_with(folders, target):
    """The reward model's pool holds the prompt and one text: they are read one after the other, to the same rewards."""
    roomy = Engine.load(folders / "same_template", dtype="float32", kv_memory=1 << 22)
    rounds = [(ENDINGS, ENDINGS), ([[*e[:3], 77] for e in ENDINGS], ENDINGS[:1])]
    expected, plenty = ask(target, roomy, rounds)
    longest = len(read(target, roomy, "same_template", ENDINGS[4], "hello there", None))
    for tokens in (longest, longest + 3, longest + 12):
        tight = Engine.load(folders / "same_template", dtype="float32", kv_memory=tokens * roomy.pool.bytes_per_token)
        told, stats = ask(target, tight, rounds)
        assert [s for scores in told for s in scores] == pytest.approx([s for r in expected for s in r], abs=1e-5)
        again = stats["reward_nodes_evaluated"] - plenty["reward_nodes_evaluated"]
        assert again >= 0 and (again > 0 or tokens > longest)
        check_pool(tight.pool, [])
    tiny = Engine.load(folders / "same_template", dtype="float32", kv_memory=8 * roomy.pool.bytes_per_token)
    with pytest.raises(UsageError, match="tokens for the reward model, its context and cache hold 8"):
        ask(target, tiny, rounds)


def test_a_cache_that_is_a_little_too_small_keeps_what_it_can(folders, target):
    """It holds all texts, but not all their closings with them: nothing is read again."""
    roomy = Engine.load(folders / "same_template", dtype="float32", kv_memory=1 << 22)
    texts = [[20 + i, *(100 + (7 * i + k) % 50 for k in range(19))] for i in range(8)]
    rounds = [([t[:10] for t in texts], [t[:10] for t in texts]), (texts, texts)]
    expected, plenty = ask(target, roomy, rounds)
    bodies = len(read(target, roomy, "same_template", texts[0], "hello there", None)) + 7 * 20
    tight = Engine.load(folders / "same_template", dtype="float32", kv_memory=bodies * roomy.pool.bytes_per_token)
    told, stats = ask(target, tight, rounds)
    assert [s for scores in told for s in scores] == pytest.approx([s for r in expected for s in r], abs=1e-5)
    assert stats["reward_nodes_evaluated"] == plenty["reward_nodes_evaluated"]
    assert stats["reward_live_nodes_peak"] <= bodies


def test_a_text_past_the_context_is_judged_by_its_beginning(target, rewards):
    reward = rewards["same"]
    prompt = target.tokenizer.encode("hello there")
    long = [5 + i % 300 for i in range(400)]
    told, _ = ask(target, reward, [([long], [])], max_new_tokens=5)
    assert told[0] == pytest.approx(reward.scores([[*prompt, *long][:300]]), abs=1e-5)


def test_tokens_that_change_where_texts_meet(target, rewards):
    """Other tokens, no template: what follows changes the prompt's last token, and later the text's."""
    reward, encode = rewards["other_plain"], target.tokenizer.encode
    prompt = "xa"  # in the other vocabulary "ab" and "ac" are one token
    [b], [c], space = encode("b", add_special=False), encode("c", add_special=False), encode(" ", add_special=False)
    other = reward.tokenizer.encode
    assert other("xab")[: len(other("xa"))] != other("xa")
    rounds = [([[c], [b]], [[b]]), ([[b, *space]], [[b, *space]]), ([[b, *space, b], [b, *space, c]], [])]
    told, _ = ask(target, reward, rounds, prompt=prompt)
    texts = [["xac", "xab"], ["xab "], ["xab b", "xab c"]]
    for scores, wanted in zip(told, texts, strict=True):
        assert scores == pytest.approx(reward.scores([other(text) for text in wanted]), abs=1e-5)


def test_stop_strings_are_not_read(target, rewards):
    encode = target.tokenizer.encode
    tokens = encode("one two STOP three", add_special=False)
    for name in ("same", "other_plain"):
        told, _ = ask(target, rewards[name], [([tokens], [])], stop=["STOP"])
        whole = rewards[name].tokenizer.encode("hello thereone two ")
        if name == "same":  # the very tokens
            whole = encode("hello there") + encode("one two ", add_special=False)
        assert told[0] == pytest.approx(rewards[name].scores([whole]), abs=1e-5)


def test_a_special_token_that_stops_is_not_read(target, rewards):
    tokens, mark = target.tokenizer.encode("one two", add_special=False), target.tokenizer.special_tokens["bos_token"]
    stopped = [*tokens, *target.tokenizer.encode(mark, add_special=False, parse_special=True)]
    for name in ("same", "other_plain"):
        [[found, wanted]], _ = ask(target, rewards[name], [([stopped, tokens], [])], stop=[mark])
        assert found == wanted


# --- searches ---


def test_best_of_n_end_to_end(target, rewards):
    """Alone, in a batch with others, and streamed: the same; partial and final rewards are those of the model."""
    reward = rewards["same"]
    target.add("reward", reward)
    prompts = [[1, 30, 40], [1, 50, 60, 70, 80], [1, 9]]
    search = SBoN(n=12, tau=4, alpha=0.5, seed=3)
    options = {"max_new_tokens": 14}
    alone = [target.generate([p], search, **options)[0] for p in prompts]
    for prompt, result in zip(prompts, alone, strict=True):
        best, whole = result.outputs[0], target.generate([prompt], BoN(n=12, seed=3), **options)[0]
        assert best.score <= whole.outputs[0].score + 1e-5
        body = [t for t in best.token_ids if t != EOS]
        assert best.score == pytest.approx(reward.scores([prompt + body])[0], abs=1e-5)
        unhurried = target.generate([prompt], SBoN(n=12, seed=3, alpha=0), **options)[0]
        assert [o.token_ids for o in unhurried.outputs] == [o.token_ids for o in whole.outputs]
        assert [o.score for o in unhurried.outputs] == pytest.approx([o.score for o in whole.outputs], abs=1e-5)
        [decision] = result.stats["decisions"]
        assert decision["tokens"] == 4 and len(decision["rewards"]) == 12
        assert "decisions" not in figures(result) and "token_rate" in figures(result)
        assert not re.search(r"\d\.\d{4}", figures(result)), "figures for people"
    together = target.generate(prompts, search, **options)
    for a, b in zip(alone, together, strict=True):
        assert [o.token_ids for o in a.outputs] == [o.token_ids for o in b.outputs]
        assert a.stats["tokens_drawn"] == b.stats["tokens_drawn"]
    events = list(target.stream(prompts[1], search, **options))
    assert events[-1].result.outputs[0].token_ids == alone[1].outputs[0].token_ids


def test_interrupted_with_the_best_so_far(target, rewards):
    target.add("reward", rewards["same"])
    steps = 0

    def interrupted():
        nonlocal steps
        steps += 1
        return steps > 9

    events = list(target.stream([1, 30, 40], SBoN(n=10, tau=4, alpha=0.5), interrupted=interrupted))
    report = [e for e in events if isinstance(e, Progress)][-1].report
    [output] = events[-1].result.outputs
    assert isinstance(events[-1], Done) and output.finish_reason == "interrupted" and output.token_ids
    assert report.info["live"] <= 5


def test_one_budget_and_the_memory_schedule(folders):
    """Generator and reward model within one budget that is much too small for all utterances."""
    probe = Engine.load(folders / "target", reward=folders / "same", dtype="float32", kv_memory=1 << 20)
    unit = probe.pool.bytes_per_token + probe.companions["reward"].pool.bytes_per_token
    engine = Engine.load(folders / "target", reward=folders / "same", dtype="float32", kv_memory=90 * unit)
    search = SBoN(n=50, tau=4, schedule="memory", seed=1)
    prompts = [[1, 30, 40], [1, 50, 60]]
    results = engine.generate(prompts, search, max_new_tokens=40, ignore_eos=True)
    for prompt, result in zip(prompts, results, strict=True):
        stats = result.stats
        assert stats["utterances"] == (90 - len(prompt)) // 4 and stats["decisions"]
        assert stats["kv_bytes_peak"] <= 90 * unit
        alone = engine.generate([prompt], search, max_new_tokens=40, ignore_eos=True)[0]
        assert alone.outputs[0].token_ids == result.outputs[0].token_ids
        whole = probe.generate([prompt], BoN(n=stats["utterances"], seed=1, num_return_sequences=stats["utterances"]),
                               max_new_tokens=40, ignore_eos=True)[0]  # fmt: skip
        assert result.outputs[0].token_ids in [o.token_ids for o in whole.outputs]
    with pytest.raises(KVMemoryError, match="--sbon-schedule memory"):
        engine.generate(prompts[:1], SBoN(n=50, tau=30), max_new_tokens=40, ignore_eos=True)
    for e in (engine, engine.companions["reward"], probe, probe.companions["reward"]):
        check_pool(e.pool, [])


def test_a_conversation_is_read_as_messages(folders, tmp_path):
    shutil.copytree(folders / "target", tmp_path / "chat")
    with_template(tmp_path / "chat", TEMPLATE)
    engine = Engine.load(tmp_path / "chat", dtype="float32", kv_memory=1 << 22)
    seen = []

    def judge(prompt, texts):
        seen.append((prompt, texts))
        return [float(len(t)) for t in texts]

    engine.add("reward", judge)
    conversation = Conversation(engine, "be good")
    for text in ("hello", "and now"):
        list(conversation.stream(text, BoN(n=3), max_new_tokens=5))
    first = conversation.turns[0]
    assert [prompt for prompt, _ in seen] == [
        [{"role": "system", "content": "be good"}, {"role": "user", "content": "hello"}],
        [
            {"role": "system", "content": "be good"},
            {"role": "user", "content": "hello"},
            {"role": "assistant", "content": first.reply},
            {"role": "user", "content": "and now"},
        ],
    ]
    assert max(seen[0][1], key=len) == first.reply
    conversation.session.close()


# --- functions ---


def test_functions(folders, target):
    longest = lambda prompt, texts: torch.tensor([len(t) for t in texts])  # noqa: E731
    options = {"max_new_tokens": 8, "ignore_eos": True}
    plain = Engine.load(folders / "target", dtype="float32", kv_memory=1 << 22)
    [result] = plain.generate(["hello"], BoN(n=9, num_return_sequences=9), reward=longest, **options)
    assert [o.score for o in result.outputs] == [len(o.text) for o in result.outputs]
    assert [o.score for o in result.outputs] == sorted((len(o.text) for o in result.outputs), reverse=True)
    assert "reward_forward_passes" not in result.stats
    plain.add("reward", longest)
    assert plain.generate(["hello"], BoN(n=9), **options)[0].outputs == result.outputs[:1]
    loaded = Engine.load(folders / "target", dtype="float32", kv_memory=1 << 22, reward=longest)
    assert loaded.generate(["hello"], BoN(n=9), **options)[0].outputs == result.outputs[:1]
    seen = []
    for prompt in ["  hello ", target.tokenizer.encode("hello")]:  # as given; of ids, what they say
        plain.generate([prompt], BoN(n=2), reward=lambda p, texts: seen.append(p) or [0, 1], **options)
    assert seen == ["  hello ", "hello"]
    shortest = plain.generate(["hello"], BoN(n=9), reward=lambda p, texts: [-len(t) for t in texts], **options)[0]
    assert -shortest.outputs[0].score == min(len(o.text) for o in result.outputs)


@pytest.mark.parametrize(
    ("reward", "message"),
    [
        (lambda p, texts: [1.0], "was given 3 texts: expected as many finite numbers, got 1"),
        (lambda p, texts: [float("nan")] * 3, "expected as many finite numbers"),
        (lambda p, texts: None, "the reward function failed: TypeError"),
        (lambda p, texts: 1 / 0, "the reward function failed: ZeroDivisionError"),
    ],
)
def test_functions_that_fail_are_told(target, reward, message):
    with pytest.raises(UsageError, match=message):
        target.generate([[1, 5]], BoN(n=3), reward=reward, max_new_tokens=3)


def test_what_cannot_judge_is_refused(folders, target):
    plain = Engine.load(folders / "target", dtype="float32", kv_memory=1 << 20)
    with pytest.raises(UsageError, match="needs a reward model\ngive --reward DIR"):
        plain.generate(["hello"], BoN(n=3))
    with pytest.raises(UsageError, match="expected a function"):
        plain.generate(["hello"], BoN(n=3), reward=3)
    with pytest.raises(UsageError, match="expected an Engine or a function, got 'x'"):
        plain.add("reward", "x")
    with pytest.raises(UsageError, match="expected an Engine, got"):
        plain.add("draft", len)
    assert Request("hello", BoN()).reward is None


# --- command lines ---


def test_chat_and_batch(folders, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    target, reward = ["--model", str(folders / "target")], ["--reward", str(folders / "same")]
    flags = ["--search", "sbon", "--sbon-n", "6", "--sbon-schedule", "3:0.5,6:0.5", "--sbon-keep-finished", "false"]
    limits = ["--max-new-tokens", "9", "--ignore-eos", "--kv-memory", "1M"]
    assert chat([*target, *reward, *flags, *limits, "-p", "hello", "--stats"]) == 0
    told = capsys.readouterr().err
    assert "token_rate" in told and "reward_forward_passes 3" in told and "decisions" not in told
    assert chat([*target, *flags, *limits, "-p", "hello"]) == 2
    assert "this search needs a reward model\ngive --reward DIR" in capsys.readouterr().err
    assert chat([*target, *reward, *flags, "--sbon-schedule", "64", "-p", "hello"]) == 2
    assert "schedule: expected tokens:rate" in capsys.readouterr().err
    source, sink = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text('{"prompt": "hello", "params": {"search": "bon", "bon_n": 4}}\n{"prompt": "hello"}\n')
    assert batch([*target, *reward, *flags, *limits, "--input", str(source), "--output", str(sink)]) == 0
    plain, speculative = (json.loads(line) for line in sink.read_text().splitlines())
    assert plain["stats"]["utterances"] == 4 and speculative["stats"]["utterances"] == 6
    assert [d["went_on"] for d in speculative["stats"]["decisions"]] == [3, 2]
