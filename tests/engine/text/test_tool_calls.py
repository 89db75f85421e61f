"""Tool calls in the forms of the families: read alike whole and cut anywhere; nothing of a marker leaks."""

import itertools
import json
import math
import time
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers.decoders import ByteLevel

from engine.errors import UsageError
from engine.serve.answers import message_of
from engine.serve.calls import ToolUse
from engine.text.call_literals import read_calls
from engine.text.prompting import chat_prompt
from engine.text.template import ChatTemplate
from engine.text.thinking import Thoughts
from engine.text.tool_calls import (
    APERTUS,
    CHANNELS,
    COHERE,
    DEEPSEEK,
    DSML,
    GEMMA4,
    GRANITE,
    HERMES,
    HUNYUAN,
    JAMBA,
    KEYS,
    KIMI,
    LFM2,
    LLAMA3,
    MINIMAX,
    MISTRAL,
    MUSE,
    NEMOTRON,
    OLMO,
    PHI4,
    QWEN35,
    SEED,
    SOLAR,
    CallStream,
    ToolCall,
    described,
    format_of,
    functions_of,
)
from tests.engine.text.test_infill import tokenizer

NAMES = {"f", "g"}
TAGGED = [
    QWEN35,
    KEYS,
    SEED,
    MINIMAX,
    DSML,
    DEEPSEEK,
    KIMI,
    GRANITE,
    PHI4,
    NEMOTRON,
    COHERE,
    OLMO,
    JAMBA,
    HUNYUAN,
    APERTUS,
]
NESTED = {"k": None, "l": [True, False]}
F, G = ToolCall("f", '{"a": 1}'), ToolCall("g", "{}")
GEMMA = "<|tool_call>call:"
QUOTED = '{n:null,l:[-1.5e2,<|"|><|"|>,{it\'s:<|"|>it\'s {" } \\<|"|>}],yes:true ,<|"|>q<|"|>:"<|\\u00e9",3d:None}'
PLAIN = {"n": None, "l": [-150.0, "", {"it's": "it's {\" } \\"}], "yes": True, "q": "<|é", "3d": None}
ONE, TWO = '{"name": "f", "arguments": {"a": 1}}', '{"name": "g", "arguments": {}}'
FUNCTION = "<function=f>\n<parameter=a>\n1\n</parameter>\n</function>"
CODE = (
    "<function=f><parameter=a>\nx < 1\n\n  }\n</parameter><parameter=b>[1, {}]</parameter>"
    "<parameter=c>Ö</parameter></function>"
)
KEYED = "<arg_key>a</arg_key><arg_value>1</arg_value>"
INVOKE = '<invoke name="f">\n<parameter name="a">1</parameter>\n</invoke>'
ATEM = INVOKE.replace("<", "<atem:").replace("<atem:/", "</atem:")
TEXT = '<｜DSML｜invoke name="f"><｜DSML｜parameter name="a" string="true">1</｜DSML｜parameter></｜DSML｜invoke>'
FENCED = '<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{"a": 1}\n```<｜tool▁call▁end｜>'
SOLAR_F = '<|tool_call:begin|>x1<|tool_call:name|>f<|tool_call:args|>{"a": 1}<|tool_call:end|>'
KIMI_F = '<|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{"a": 1}<|tool_call_end|>'
SOLAR_TOKENS = ["<|tool_call:begin|>", "<|tool_call:name|>", "<|tool_call:args|>", "<|tool_call:end|>"]
HY3 = (
    "<tool_calls><tool_call>f<tool_sep>\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>\n"
    "<tool_call>g<tool_sep>\n</tool_call>\n</tool_calls>"
).replace(">", ":opensource>")
OLMO_TEXTS = ["f(a=1)", *(f"{body}</function_calls>" for body in ("", "f(1)", "f(a=1) x", "x"))]
CASES = [
    (HERMES, f"<tool_call>\n{ONE}\n</tool_call>", [F]),
    (HERMES, f"I look.\n\n<tool_call>\n{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>", ["I look.", F, G]),
    (HERMES, f"<tool_call>[{ONE}, {TWO}]</tool_call>", [F, G]),
    (HERMES, f"<tool_call>{ONE}</tool_call> Done.", [F, "Done."]),
    (HERMES, f"First <tool_call>{ONE}</tool_call> then", ["First", F, "\nthen"]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', [F]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": "</tool_call> } \\" é"}}', None),
    (HERMES, "a < b <tool <tool_call> or not", ["a < b <tool <tool_call> or not"]),
    (HERMES, f"<tool_call><tool_call>{ONE}</tool_call>", ["<tool_call>", F]),
    (HERMES, '<tool_call>{"nome": "f"}</tool_call>', ['<tool_call>{"nome": "f"}</tool_call>']),
    (HERMES, '<tool_call>{"name": "f", "arg', ['<tool_call>{"name": "f", "arg']),
    (HERMES, "<tool_call>" + "[" * 2_000 + "]" * 2_000, ["<tool_call>" + "[" * 2_000 + "]" * 2_000]),
    (HERMES, " \n text \n ", [" \n text \n "]),
    (HERMES, ONE, [F]),
    (HERMES, f"```json\n{ONE}\n```\nThen", [F, "Then"]),
    (HERMES, f"```\n{ONE}\n``` ```json {TWO}```", [F, G]),
    (HERMES, f"{ONE}\n{TWO}", [F, G]),
    (HERMES, f"{ONE} <tool_call>{TWO}</tool_call>", [F, G]),
    (HERMES, f"Text {ONE}", [f"Text {ONE}"]),
    (HERMES, '```json\n{"name": "Ann"}\n```', ['```json\n{"name": "Ann"}\n```']),
    (HERMES, '{"name": "Ann", "arguments": {}}', ['{"name": "Ann", "arguments": {}}']),
    (HERMES, '```python\n{"name": 1}\n```', ['```python\n{"name": 1}\n```']),
    (HERMES, f"`{ONE}`", [f"`{ONE}`"]),
    (HERMES, '```json\n{"nam', ['```json\n{"nam']),
    (HERMES, "<tool_call>" + " " * 100 + ONE, ["<tool_call>" + " " * 100 + ONE]),
    (HERMES, " " * 100 + ONE, [" " * 100 + ONE]),
    (HERMES, "{" + " " * 100 + ONE[1:], ["{" + " " * 100 + ONE[1:]]),
    (HERMES, "", []),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}', [F]),
    (LLAMA3, '\n<|python_tag|>{"name": "f", "parameters": {"a": 1}}', [F]),
    (LLAMA3, '{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}', [F, G]),
    (LLAMA3, '{"type": "function", "function": {"name": "g", "parameters": {}}}', [G]),
    (LLAMA3, '{"name": "other", "parameters": {}}', ['{"name": "other", "parameters": {}}']),
    (LLAMA3, '{"a": 1} is JSON', ['{"a": 1} is JSON']),
    (LLAMA3, 'Say {"name": "g", "parameters": {}}', ['Say {"name": "g", "parameters": {}}']),
    (MISTRAL, f"[TOOL_CALLS] [{ONE}, {TWO}]", [F, G]),
    (MISTRAL, f'Wait.[TOOL_CALLS][{ONE[:-1]}, "id": "abcdefghi"}}]', ["Wait.", F]),
    (MISTRAL, '[TOOL_CALLS]f[ARGS]{"a": 1}[TOOL_CALLS]g[ARGS]{}', [F, G]),
    (MISTRAL, '[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS]{"a": 1}', [F]),
    (MISTRAL, '[TOOL_CALLS]f {"a": 1}', [F]),
    (MISTRAL, '[TOOL_CALLS]mcp:a/f[ARGS]{"a": 1}', [ToolCall("mcp:a/f", F.arguments)]),
    (GEMMA4, f"{GEMMA}{'f' * 100}{{a:1}}<tool_call|>", [ToolCall("f" * 100, F.arguments)]),
    (CHANNELS, '<|call|>mcp:a/f{"a": 1}', [ToolCall("mcp:a/f", F.arguments)]),
    (MISTRAL, "[TOOL_CALLS]no call at all", ["[TOOL_CALLS]no call at all"]),
    (LFM2, "<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>Looking.", [F, G, "Looking."]),
    (LFM2, f"<|tool_call_start|>[{ONE}]<|tool_call_end|>", [F]),
    (GEMMA4, f"{GEMMA}f{{a:1}}<tool_call|>", [F]),
    (GEMMA4, f"I look.{GEMMA}f{{a:1}}<tool_call|>{GEMMA}g{{}}<tool_call|>", ["I look.", F, G]),
    (GEMMA4, f"{GEMMA}f{QUOTED}<tool_call|> then", [ToolCall("f", json.dumps(PLAIN, ensure_ascii=False)), "then"]),
    (GEMMA4, f'{GEMMA}f{{"a": 1}}<tool_call|>', [F]),
    (GEMMA4, f'{GEMMA}f{{"x": "</tool_call> }} \\" é"}}', None),
    (GEMMA4, f"{GEMMA}f{{a:b}}<tool_call|>", [f"{GEMMA}f{{a:b}}<tool_call|>"]),
    (GEMMA4, f"{GEMMA}f{{a:[1}}]}}", [f"{GEMMA}f{{a:[1}}]}}"]),
    (GEMMA4, f'{GEMMA}f{{a:<|"|>cut }}', [f'{GEMMA}f{{a:<|"|>cut }}']),
    (GEMMA4, "<|tool_call>no call", ["<|tool_call>no call"]),
    (GEMMA4, ONE, [F]),
    (QWEN35, f"<tool_call>\n{FUNCTION}\n</tool_call>", [F]),
    (
        QWEN35,
        f"See.\n\n<tool_call>\n{FUNCTION}\n</tool_call>\n<tool_call>{ONE}</tool_call> .",
        ["See.", F, F, "\n."],
    ),
    (QWEN35, f"<tool_call>{FUNCTION}<function=g></function>", [F, G]),
    (QWEN35, f"<tool_call>{FUNCTION[:-3]}</tool_call>", [f"<tool_call>{FUNCTION[:-3]}</tool_call>"]),
    (QWEN35, f"<tool_call>{FUNCTION} x</tool_call>", [f"<tool_call>{FUNCTION} x</tool_call>"]),
    (QWEN35, f"<tool_call>{FUNCTION[:-20]}", [f"<tool_call>{FUNCTION[:-20]}"]),
    (QWEN35, f"<tool_call>{CODE}</tool_call>", [ToolCall("f", '{"a": "x < 1\\n\\n  }", "b": [1, {}], "c": "Ö"}')]),
    (QWEN35, f"<tool_call> {FUNCTION[:7]}<tool_call>{FUNCTION}</tool_call>", [f"<tool_call> {FUNCTION[:7]}", F]),
    (QWEN35, "<tool_call>\n<func", ["<tool_call>\n<func"]),
    (SEED, f"<seed:tool_call>\n{FUNCTION}\n</seed:tool_call>", [F]),
    (KEYS, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n</tool_call>", [F]),
    (KEYS, "<tool_call>f<arg_key>a</arg_key><arg_value>1</arg_value></tool_call><tool_call>g</tool_call>", [F, G]),
    (KEYS, "<tool_call>not a call</tool_call>", ["<tool_call>not a call</tool_call>"]),
    (KEYS, "<tool_call>f<arg_key>a</arg_key></tool_call>", ["<tool_call>f<arg_key>a</arg_key></tool_call>"]),
    (KEYS, "<tool_call>get_wea", ["<tool_call>get_wea"]),
    (KEYS, f"<tool_call>f{KEYED}", [f"<tool_call>f{KEYED}"]),
    (HUNYUAN, f"I look.{HY3.format(1)}Then", ["I look.", F, G, "\nThen"]),
    (HUNYUAN, HY3.format(1)[:-25], [F, G]),
    (HUNYUAN, HY3.format(1)[:25], [HY3.format(1)[:25]]),
    (MINIMAX, f'<minimax:tool_call>\n{INVOKE}\n<invoke name="g">\n</invoke>\n</minimax:tool_call>', [F, G]),
    (MUSE, f"Hm.<atem:function_calls>{ATEM}\n{ATEM}</atem:function_calls>", ["Hm.", F, F]),
    (MUSE, f"<atem:function_calls>{ATEM}", [F]),
    (SOLAR, f"Hm.<|tool_calls|>{SOLAR_F}{SOLAR_F.replace('x1', '')}<|calls|>", ["Hm.", F, F]),
    (SOLAR, f"<|tool_calls|>{SOLAR_F}", [F]),
    (SOLAR, "<|tool_calls|>x<|calls|>", ["<|tool_calls|>x<|calls|>"]),
    (DSML, "<｜DSML｜function_calls>\n" + INVOKE.replace("<", "<｜DSML｜").replace("<｜DSML｜/", "</｜DSML｜"), [F]),
    (DSML, f"<｜DSML｜function_calls>{TEXT}</｜DSML｜function_calls>", [ToolCall("f", '{"a": "1"}')]),
    (
        DEEPSEEK,
        '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{"a": 1}<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
        [F],
    ),
    (DEEPSEEK, f"<｜tool▁calls▁begin｜>{FENCED}\n{FENCED}<｜tool▁calls▁end｜>", [F, F]),
    (DEEPSEEK, "<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>", ["<｜tool▁calls▁begin｜>x<｜tool▁calls▁end｜>"]),
    (QWEN35, f"<tool_call>{' ' * 65}{FUNCTION}</tool_call>", [f"<tool_call>{' ' * 65}{FUNCTION}</tool_call>"]),
    (KIMI, f"Hi.<|tool_calls_section_begin|>{KIMI_F}<|tool_calls_section_end|>", ["Hi.", F]),
    (KIMI, f"<|tool_calls_section_begin|>{KIMI_F.replace(':0', '')}<|tool_calls_section_end|>", [F]),
    (OLMO, "I look.\n<function_calls>f(a=1)\ng()</function_calls> Then", ["I look.", F, G, "\nThen"]),
    (OLMO, "<function_calls>\nf(a=1)\n</function_calls>\n<function_calls>[g()]</function_calls>", [F, G]),
    (OLMO, '<function_calls>f(x="</tool_call> } \\" é")</function_calls>', None),
    *((OLMO, f"<function_calls>{text}", [f"<function_calls>{text}"]) for text in OLMO_TEXTS),
    (GRANITE, f"<|tool_call|>[{ONE}, {TWO}]", [F, G]),
    (PHI4, f"<|tool_call|>[{ONE}]<|/tool_call|>", [F]),
    (NEMOTRON, f"<TOOLCALL>[{ONE}]</TOOLCALL>", [F]),
    (
        APERTUS,
        'I look.<|tools_prefix|>[{"f": {"a": 1}}, {"g": {}}]<|tools_suffix|>Then',
        ["I look.", F, G, "\nThen"],
    ),
    (APERTUS, '<|tools_prefix|>[{"name": {"a": 1}}]<|tools_suffix|>', [ToolCall("name", F.arguments)]),
    (APERTUS, '<|tools_prefix|>[{"function": {}}]<|tools_suffix|>', [ToolCall("function", "{}")]),
    (APERTUS, f"<|tools_prefix|>[{ONE}]", [F]),
    (APERTUS, '<|tools_prefix|>[{"f": [1]}]', ['<|tools_prefix|>[{"f": [1]}]']),
    (APERTUS, '<|tools_prefix|>[{"f": {}, "g": {}}]', ['<|tools_prefix|>[{"f": {}, "g": {}}]']),
    (JAMBA, f"I look.\n<tool_calls>[\n  {ONE},\n  {TWO}\n]</tool_calls> Then", ["I look.", F, G, "\nThen"]),
    (
        COHERE,
        '<|START_ACTION|>[\n{"tool_call_id": "0", "tool_name": "f", "parameters": {"a": 1}}\n]<|END_ACTION|>',
        [F],
    ),
    (LFM2, "<|tool_call_start|>[f(1)]<|tool_call_end|>", ["<|tool_call_start|>[f(1)]<|tool_call_end|>"]),
]


def read(format, pieces, **options):
    """The parts that a stream gives for a text in pieces, neighbouring texts joined."""
    stream, found = CallStream(format, NAMES, **options), []
    for part in [part for piece in pieces for part in stream.push(piece)] + stream.finish():
        if isinstance(part, str) and found and isinstance(found[-1], str):
            found[-1] += part
        else:
            found.append(part)
    return found


@pytest.mark.parametrize(("format", "text", "expected"), CASES, ids=lambda value: str(value)[:40])
def test_whole_and_cut_at_every_character(format, text, expected):
    whole = read(format, [text])
    if expected is None:
        [call] = whole
        assert json.loads(call.arguments) == {"x": '</tool_call> } " é'}
    else:
        assert whole == expected
    assert read(format, text) == whole
    for i in range(min(len(text), 200)):
        assert read(format, [text[:i], text[i:]]) == whole


@given(
    st.sampled_from([HERMES, LLAMA3, MISTRAL, LFM2, GEMMA4, QWEN35, KEYS]),
    st.lists(
        st.sampled_from(
            [
                *("<tool_call>", "</tool_call>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "<|tool_call_start|>"),
                *(
                    f"{GEMMA}f{{",
                    f"{GEMMA}g",
                    '<|"|>',
                    "a:1",
                    FUNCTION,
                    "<arg_key>a</arg_key>",
                    "<arg_value>1</arg_value>",
                    "<tool_call|>",
                    "<|tool_call_end|>",
                    ONE,
                    TWO,
                    "f",
                    *"{[]}()\"'\\ \n;<é`",
                    "a=1",
                    "```json\n",
                    "```",
                    " " * 70,
                ),
            ]
        ),
        max_size=12,
    ),
    st.lists(st.integers(0, 200), max_size=4),
    st.booleans(),
)
def test_anything_cut_anywhere(format, parts, cuts, several):
    text = "".join(parts)
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in itertools.pairwise(places)]
    assert (
        read(format, pieces, several=several)
        == read(format, [text], several=several)
        == read(format, text, several=several)
    )


@pytest.mark.parametrize("format", [HERMES, MISTRAL, LFM2, GEMMA4, QWEN35, DEEPSEEK, GRANITE])
def test_text_comes_at_once_and_no_part_of_a_marker_does(format):
    stream = CallStream(format, NAMES)
    assert stream.push("Hello there, ") == ["Hello there,"] and stream.push("you") == [" you"]
    for n in range(1, len(format.opening)):
        stream = CallStream(format, NAMES)
        assert stream.push("Hello " + format.opening[:n]) == ["Hello"]
        assert "".join(map(str, stream.push("!"))) == f" {format.opening[:n]}!"


def test_other_objects_come_at_once():
    """With tools, a reply that is JSON but no call waits for its first key only."""
    for lead in ("", "```json\n"):
        stream = CallStream(HERMES, NAMES)
        assert stream.push(lead + '{"') == [] and stream.push("b") == [lead + '{"b']
        assert stream.push('": 1, ') == ['": 1,'] and stream.push("x") == [" x"]


def test_a_call_comes_before_its_closing():
    stream = CallStream(HERMES, NAMES)
    assert stream.push(f"<tool_call>\n{ONE[:-1]}") == [] and stream.push("}") == [F]


def test_only_the_first_call_where_more_are_not_wanted():
    text = f"Hm. <tool_call>{ONE}</tool_call>\n<tool_call>{TWO}</tool_call> rest"
    assert read(HERMES, [text], several=False) == ["Hm.", F]
    assert read(LFM2, ["<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>"], several=False) == [F]


def test_a_reply_after_the_lead():
    assert read(HERMES, f"{ONE}\n</tool_call>\n<tool_call>\n{TWO}\n</tool_call>", led=True) == [F, G]
    assert read(HERMES, ONE[:9], led=True) == [ONE[:9]], "cut short"
    assert read(GEMMA4, 'f{"a": 1}', led=True) == [F]


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[f(a='it\\'s', b=\"\\u00e9\\n\\x41\")]", {"a": "it's", "b": "é\nA"}),
        ("[f(a=-1.5e2, b=[1, 2,], c={'k': None, \"l\": [True, false]})]", {"a": -150.0, "b": [1, 2], "c": NESTED}),
        ("[f()]", {}),
        ("[a.b(x=3)]", {"x": 3}),
        ('f(a="x\n(\\"y", b=null,\n c={"k": None, "l": [true, false]})\n', {"a": 'x\n("y', "b": None, "c": NESTED}),
    ],
)  # fmt: skip
def test_calls_as_python_writes_them(text, value):
    [(_, arguments)] = read_calls(text)
    assert json.loads(arguments) == value


@pytest.mark.parametrize(
    "text",
    [
        "[f(__import__('os'))]",
        "[f(a=g())]",
        "[f(a=1) g()]",
        "[f(a=1), g(]",
        "[f(a=1)] x",
        "[f(a=1e999)]",
        "[f(a=" + "[" * 100 + "]" * 100 + ")]",
        "[f(a=" + "9" * 5000 + ")]",
        "[lambda: 0]",
        '{"name": "f", "arguments": {"a": NaN}}',
        '{"name": "", "arguments": {}}',
        '{"name": "f", "arguments": [1]}',
        "[]",
        "3",
    ],
)
def test_what_is_no_call(text):
    assert read_calls(text) == []


LONG_TEXTS = {
    "starts": lambda n: "<tool_call>" * (2 * n),
    "quotes": lambda n: "<tool_call>{" + '"a' * (10 * n),
    "spaces": lambda n: " " * (20 * n),
    "names": lambda n: "[TOOL_CALLS]f" * (2 * n),
    "starts and names": lambda n: "<tool_call>f" * (4 * n),
    "spaces in a fence": lambda n: (
        "<｜tool▁calls▁begin｜>" + FENCED.replace("json\n", " " * (3 * n)).replace("\n```<", "<")
    ),
}


@pytest.mark.parametrize("text", LONG_TEXTS.values(), ids=LONG_TEXTS)
def test_the_work_grows_with_the_text_and_no_faster(text):
    """Four times the text takes four times as long; with work by the square of its length it would take 16 times."""
    best = {250: math.inf, 1000: math.inf}
    for _ in range(3):  # the shortest of several times: other programs share the processor's caches and cores
        for size in best:
            start = time.process_time()
            for format in (HERMES, LLAMA3, MISTRAL, GEMMA4, QWEN35, KEYS, DEEPSEEK):
                assert read(format, text(size), several=True) == [text(size)]
            best[size] = min(best[size], time.process_time() - start)
        if best[1000] < 9 * best[250]:
            break
    assert best[1000] < 9 * best[250], best


@pytest.mark.parametrize(
    ("template", "added", "format"),
    [
        ("{{ '<tool_call>' }}", (), HERMES),
        ("nothing", (), HERMES),
        ("{{ '[AVAILABLE_TOOLS]' }}", (), MISTRAL),
        ("<|tool_list_start|>", (), LFM2),
        ("nothing", ("<|tool_call_start|>",), LFM2),
        ("<|python_tag|> ipython", (), LLAMA3),
        ("{{ '<|tool_call>call:' }}", (), GEMMA4),
        ("nothing", ("<|tool_call>",), GEMMA4),
        ("nothing", ("<|channel|>", "<|message|>"), CHANNELS),
        ("<tool_call>\\n<function=example", ("<tool_call>",), QWEN35),
        ("<tool_call>{{ f }}\\n<arg_key>", (), KEYS),
        ("<tool_call>", ("<|tool_call|>", "<|/tool_call|>"), HERMES),
        ("nothing", ("<|tool_call|>", "<|/tool_call|>"), PHI4),
        ("write <|tool_call|> and a list", ("<|tool_call|>",), GRANITE),
        *((f"{{{{ '{form.opening}' }}}} <function= <tool_call>", (), form) for form in TAGGED[2:7]),
        *((f"{{{{ '{form.opening}' }}}}", (), form) for form in (NEMOTRON, COHERE, JAMBA, APERTUS, MUSE, SOLAR)),
        ("{{ '<functions>' ~ tools }}", (), OLMO),
        ("{{ '<tool_calls{}>'.format(x) }}", (), HUNYUAN),
        ("<functions> and <tool_call>", (), HERMES),
    ],
)
def test_the_format_of_a_template(template, added, format):
    assert format_of(template, added) is format


@pytest.mark.parametrize("text", ["x\n", "\n x ", "\n", " "])
@pytest.mark.parametrize(
    ("format", "call"),
    [
        (QWEN35, "<tool_call>\n<function=f>\n<parameter=a>\n{}\n</parameter>\n</function>\n</tool_call>"),
        (SEED, "<seed:tool_call><function=f><parameter=a>{}</parameter></function></seed:tool_call>"),
        (KEYS, "<tool_call>f\n<arg_key>a</arg_key>\n<arg_value>{}</arg_value>\n</tool_call>"),
        (HUNYUAN, HY3[: HY3.index("\n<tool_call:")] + "</tool_calls:opensource>"),
        (MINIMAX, f"<minimax:tool_call>{INVOKE.replace('1', '{}')}</minimax:tool_call>"),
        (MUSE, f"<atem:function_calls>{ATEM.replace('1', '{}')}</atem:function_calls>"),
        (DSML, f"<｜DSML｜function_calls>{TEXT.replace('1', '{}')}</｜DSML｜function_calls>"),
    ],
    ids=lambda value: str(value)[:10],
)
def test_texts_keep_their_spaces_and_line_breaks(format, call, text):
    """Families' templates write them so: a file's last line break, for example, belongs to it."""
    stream = CallStream(format, {"f": {"properties": {"a": {"type": "string"}}}})
    [found] = [*stream.push(call.format(text)), *stream.finish()]
    assert isinstance(found, ToolCall) and json.loads(found.arguments) == {"a": text}


OPTIONAL = {"anyOf": [{"type": "string"}, {"type": "null"}]}


@pytest.mark.parametrize(
    ("schema", "text", "value"),
    [
        ({"type": "string"}, "1", "1"),
        ({"type": "string"}, "null", "null"),
        ({"enum": ["1", "2"]}, "1", "1"),
        ({"enum": ["1", 2]}, "2", 2),
        ({"type": ["string", "null"]}, "1", "1"),
        (OPTIONAL, "[1]", "[1]"),
        (OPTIONAL, '"a"', '"a"'),
        (OPTIONAL, "null", None),
        (OPTIONAL, "None", None),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "1", 1),
        ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, "1.5", "1.5"),
        ({"anyOf": [OPTIONAL]}, "1", 1),
        ({"anyOf": [{"$ref": "#/x"}, {"type": "string"}]}, "1", 1),
        ({"anyOf": 5, "type": [5]}, "1", 1),
        ({}, "1", 1),
        ({}, "True", True),
        ({}, "[-1e999]", ["-1e999"]),
        ({"type": "object"}, "{'a': [None, True, \"it's\"]}", {"a": [None, True, "it's"]}),
        ({"type": "array"}, "['a', 1]", ["a", 1]),
        ({}, "['a', 1e999]", "['a', 1e999]"),
        ({}, "[f(1)]", "[f(1)]"),
        ({}, "'a'", "'a'"),
        ({"type": "string"}, "['a']", "['a']"),
        ({}, "one", "one"),
    ],
)
def test_schemas_tell_texts_from_other_values(schema, text, value):
    stream = CallStream(QWEN35, {"f": {"properties": {"a": schema}}})
    block = f"<function=f><parameter=a>{text}</parameter></function>"
    [call] = stream.push(f"<tool_call>{block}</tool_call>")
    assert isinstance(call, ToolCall) and json.loads(call.arguments) == {"a": value}
    assert type(json.loads(call.arguments)["a"]) is type(value)


@pytest.mark.parametrize("format", [HERMES, LLAMA3, MISTRAL, LFM2, GEMMA4, *TAGGED])
def test_what_is_written_is_read(format):
    assert read(format, format.written([F, G])) == [F, G]


def test_functions_and_their_schemas():
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}},
        {"name": "g"},
    ]
    assert functions_of(tools) == {
        "f": {"type": "object", "properties": {"a": {}}, "additionalProperties": False},
        "g": {"type": "object", "properties": {}, "additionalProperties": False},
    }
    assert '"name": "g"' in described(tools)
    for wrong in ({}, [1], [{"function": {}}], [{"name": "f"}, {"name": "f"}], [{"name": "f", "parameters": 3}]):
        with pytest.raises(UsageError, match="tools"):
            functions_of(wrong)


def test_marks_that_are_special_tokens_are_text_of_replies_alone(tmp_path):
    """They stay in decoded text; a user cannot write them, the model's own turns can, and a grammar never does."""
    special = ["[TOOL_CALLS]", "<|tool_call_start|>", "</s>"]
    made = tokenizer(tmp_path, special, ByteLevel())
    mark, start, end = (made.encode_rendered([(text, True)])[0] for text in special)
    ids = [mark, *made.encode("[]"), end, start]
    assert made.decode(ids) == "[TOOL_CALLS][]<|tool_call_start|>"
    assert made.special_ids == {mark, start, end} and [made.data()[i] for i in (mark, start, end)] == [b""] * 3
    source = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
    template = ChatTemplate(source, special=made.special_spellings, added=made.added_spellings)
    for role, expected in (("user", False), ("tool", False), ("assistant", True)):
        spans = template.render([{"role": role, "content": "[TOOL_CALLS]x</s>"}])
        found = made.encode_rendered(spans)
        assert (mark in found) == expected and end not in found


def test_the_end_of_a_call_ends_a_reply(tmp_path):
    """Apertus writes no other token there: its template puts a function's result directly behind the call."""
    made = tokenizer(tmp_path, special := ["<|tools_prefix|>", "<|tools_suffix|>"])
    template = ChatTemplate(f"{{{{ messages[0].content }}}}{{# {special} #}}", special=made.special_spellings)
    engine: Any = SimpleNamespace(tokenizer=made, template=template, eos_token_ids=frozenset())
    assert chat_prompt(engine, [{"role": "user", "content": "a"}]).eos_token_ids == {
        *made.encode_rendered([("<|tools_suffix|>", True)])
    }


def test_a_reply_of_solar(tmp_path):
    """Decoding skips the tokens of its headers, except those of thoughts and calls."""
    marks = ["<|begin|>", "<|end|>", "<|think|>", "<|content|>", "<|tool_calls|>", "<|calls|>", *SOLAR_TOKENS]
    made = tokenizer(tmp_path, marks, ByteLevel())
    thought, header = "<|think|>Hm.<|end|>", "<|begin|>assistant"
    for reply, content, calls in (
        (f"{thought}{header}<|content|>Four.", "Four.", 0),
        (f"{thought}{header}<|tool_calls|>{SOLAR_F}<|calls|>", None, 1),
    ):
        text = made.decode(made.encode_rendered([(reply, True)]))
        message = message_of(text, Thoughts.find(marks, ""), ToolUse(SOLAR, {"f": {}}))
        assert message["reasoning_content"] == "Hm." and message["content"] == content
        assert len(message.get("tool_calls", ())) == calls
    text = made.decode(made.encode_rendered([("<|content|>Four.", True)]))
    assert message_of(text, Thoughts.find(marks, ""), None)["content"] == "Four."
    assert made.thought_ids[1] == made.encode_rendered([(f"<|end|>{header}", True)])  # a constraint waits for them
