"""The program that renders chat templates and tries grammars; `engine.text.sandbox_process` runs it and exchanges JSON
lines with it.

A template is an untrusted program. Jinja's sandbox prevents it from running code, but not from filling memory or
looping forever, and one filter (`center(10**9)`) can do either in a single C call that no Python-level deadline
interrupts. The operating system can limit a separate process: its CPU time by a timer whose signal kills it, its memory
by RLIMIT_AS. macOS does not enforce that limit: there only the CPU time bounds the memory. The process is a new
interpreter, not a fork: a fork of a process with torch's threads may inherit a held lock, and would copy the page
tables of mapped weights.

Patterns of a tokenizer are untrusted as well: those that are not known to take linear time are tried here (see
`engine.text.tokenizer_limits`). So are grammars: llguidance recurses over rules and references, and the C stack of a
long chain of them ends the process. They are compiled here first, on a stack that is smaller than any other thread's.

This file runs as a script and imports nothing from the project, so that it starts without importing torch.
"""

import ctypes
import importlib
import itertools
import json
import re
import sys
import threading

if __name__ == "__main__":  # started with -I -S: no site, no environment; the folders of packages come as arguments
    sys.path += sys.argv[1:]
    try:
        import jinja2
    except ImportError:  # the parent's copy cannot be imported, as from an archive: use the interpreter's own
        import site

        site.main()

import resource
import signal
from datetime import datetime
from typing import Any

try:
    import jinja2
    import jinja2.ext
    import jinja2.meta
    from jinja2 import nodes
    from jinja2.sandbox import ImmutableSandboxedEnvironment
except ImportError as error:
    if __name__ == "__main__":
        print(json.dumps({"failed": str(error)}), flush=True)
    raise

CPU_SECONDS = 0.8  # for one render or one compilation; CPU time, so that a busy machine refuses no good template
MEMORY_BYTES = 512 << 20  # address space of the process
MAX_REPEATED = 1 << 12  # characters or elements of a string or a list that is multiplied
MAX_LOOP_DEPTH = 4  # templates in use nest at most three: tools, parameters, enumerations
OUTPUT_SLACK = 1 << 20  # characters a render may have beyond OUTPUT_FACTOR times the length of its input
OUTPUT_FACTOR = 4
COMPILED = 16  # templates kept
GRAMMAR_SECONDS = 3.0  # CPU time for one grammar
GRAMMAR_BYTES = 16 << 20  # most memory of a compiled grammar
STACK_BYTES = 1 << 20  # stack of the thread that compiles grammars: half of the smallest stack of a thread outside
SPACES = r"\x20|\n[\x20\t]{0,16}"  # between parts of JSON: without a limit a model may write spaces for ever
GRAMMAR_LIMITS = {  # llguidance's own limits, for a grammar and for a mask
    "initial_lexer_fuel": 1_000_000,
    "step_lexer_fuel": 100_000,
    "step_max_items": 50_000,
    "max_lexer_states": 50_000,
    "max_grammar_size": 200_000,
    "verbose_errors": False,
}
# Lark's strings, comments, regular expressions and special tokens; the last are the group
_LARK = re.compile(r'"(?:\\.|[^"\\\n])*"|(?:#|//)[^\n]*|/(?:\\.|[^/\\])+/|(<[^<>\s]+>)', re.DOTALL)


class Refused(Exception):
    """The template breaks a limit."""


class Raised(jinja2.TemplateError):
    """The template called `raise_exception`: it objects to the messages."""


class _Generation(jinja2.ext.Extension):
    """`{% generation %}...{% endgeneration %}` marks text for training masks; here it only has to render."""

    tags = {"generation"}  # noqa: RUF012 (jinja's own declaration)

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

    def _render(self, caller) -> str:
        return caller()


class _Dict:
    """`dict` without the class behind it."""

    def __call__(self, *args, **kwargs):
        return dict(*args, **kwargs)

    def fromkeys(self, *args, **kwargs):
        return dict.fromkeys(*args, **kwargs)


class _Namespace(jinja2.utils.Namespace):
    """`namespace` that keeps no underscored names."""

    def __init__(*args, **kwargs):  # jinja's own signature: `self` may be a keyword of the template
        self, values = args[0], dict(*args[1:], **kwargs)
        for name in values:
            _Namespace._check(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name, value):
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name):
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"underscored attribute {name!r} on a namespace")


class _Environment(ImmutableSandboxedEnvironment):
    """A sandbox that repeats strings and lists only a few times: templates indent by `"  " * depth`."""

    intercepted_binops = frozenset({"*"})

    def call_binop(self, context, operator, left, right):
        for value, times in ((left, right), (right, left)):
            if isinstance(value, str | list | tuple) and isinstance(times, int) and len(value) * times > MAX_REPEATED:
                raise Refused(f"strings and lists may be repeated to {MAX_REPEATED} elements, not to more")
        return super().call_binop(context, operator, left, right)


def environment() -> ImmutableSandboxedEnvironment:
    """The environment in which transformers renders chat templates, except for the clock, which each render sets."""

    def raise_exception(message):
        raise Raised(str(message))

    def tojson(x, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    env = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, jinja2.ext.loopcontrols])
    env.filters["tojson"] = tojson
    env.globals.update(raise_exception=raise_exception, dict=_Dict(), namespace=_Namespace)
    return env


def check(tree: nodes.Template) -> None:
    """Refuse constructs that no chat template needs and that the limits would only catch late.

    Raises:
        Refused: other templates, powers, nested ranges, deep loops.
    """
    for node in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
        raise Refused(f"line {node.lineno}: a chat template is one file, it includes no others")
    for node in tree.find_all(nodes.Pow):
        raise Refused(f"line {node.lineno}: powers are not allowed")

    def walk(node: nodes.Node, depth: int, ranges: int) -> None:
        if isinstance(node, nodes.For):
            depth += 1
            ranges += any(isinstance(call.node, nodes.Name) and call.node.name == "range" for call in _calls(node.iter))
            if depth > MAX_LOOP_DEPTH or ranges > 1:
                raise Refused(f"line {node.lineno}: loops nested too deep")
        for child in node.iter_child_nodes():
            walk(child, depth, ranges)

    walk(tree, 0, 0)


def _calls(node: nodes.Node):
    if isinstance(node, nodes.Call):
        yield node
    yield from node.find_all(nodes.Call)


class Renderer:
    """A checked and compiled template; `names` are the variables that it reads."""

    def __init__(self, source: str):
        self.env = environment()
        tree = self.env.parse(source)
        check(tree)
        self.names = sorted(jinja2.meta.find_undeclared_variables(tree) - {"strftime_now"})
        self.template = self.env.from_string(source)

    def render(self, variables: dict[str, Any], now: str, limit: int) -> str:
        """Render with the clock standing at `now` (ISO 8601); more than `limit` characters are refused."""
        self.env.globals["strftime_now"] = self.template.globals["strftime_now"] = datetime.fromisoformat(now).strftime
        parts, length = [], 0
        for part in self.template.generate(**variables):
            parts.append(part)
            length += len(part)
            if length > limit:
                raise Refused(f"the output is longer than {limit} characters")
        return "".join(parts)


def split(request: dict[str, Any], known: dict[str, Any]) -> dict[str, str]:
    """Split texts like a tokenizer, to see whether that takes long.

    Args:
        request: "parts", JSON of a tokenizer's normalizer, pre-tokenizer and added tokens (see
            `engine.text.tokenizer_limits.EncodingGuard`); "texts"; "seconds" of CPU time; "growth", how many times
            longer the normalizer may make a text.
        known: tokenizers by parts, the latest last; this one is added.

    Returns:
        {}; or {"refused"}, why the tokenizer cannot be used.
    """
    start_clock(request["seconds"])
    try:
        from tokenizers import AddedToken, Tokenizer

        if (parts := request["parts"]) not in known:
            spec, tokens = json.loads(parts)
            model = {"type": "WordLevel", "vocab": {"?": 0}, "unk_token": "?"}
            whole = {"version": "1.0", "added_tokens": [], **spec, "model": model}
            library = Tokenizer.from_str(json.dumps(whole))
            flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
            for special, run in itertools.groupby(tokens, lambda token: token[-1]):
                add = library.add_special_tokens if special else library.add_tokens
                add([AddedToken(content, **dict(zip(flags, values, strict=True))) for content, *values in run])
            library.encode_special_tokens = True
            known[parts] = library
            if len(known) > COMPILED:
                del known[next(iter(known))]
        library = known[parts]
        for text in request["texts"]:
            library.encode(text, add_special_tokens=False)
            grown = len(library.normalizer.normalize_str(text)) if library.normalizer else 0
            if grown > request["growth"] * (len(text) + 10):
                return {"refused": f"it makes {grown} characters of a text of {len(text)}"}
        return {}
    except BaseException as error:  # the library's panics derive from BaseException
        return {"refused": str(error)[:300]}


def answer(request: dict[str, Any], compiled: dict[str, Renderer], size: int) -> dict[str, Any]:
    """Compile a template, and render it.

    Args:
        request: "source", the template; and, to render it, "variables" and "now" (see `Renderer.render`).
        compiled: templates by source, the latest last; this one is added.
        size: bytes of the request.

    Returns:
        {"text"}, rendered; or {"names"}, the variables of a template, if there are none to render it with; or
        {"raised"}, the template's objection; or {"refused"}, why it cannot be used.
    """
    try:
        source = request["source"]
        renderer = compiled.pop(source, None)
        if renderer is None:
            renderer = Renderer(source)
            start_clock()  # compiling and rendering have a limit each
        compiled[source] = renderer
        if len(compiled) > COMPILED:
            del compiled[next(iter(compiled))]
        if "variables" not in request:
            return {"names": renderer.names}
        size -= len(json.dumps(source))
        return {"text": renderer.render(request["variables"], request["now"], OUTPUT_SLACK + OUTPUT_FACTOR * size)}
    except Raised as error:
        return {"raised": str(error)}
    except jinja2.TemplateSyntaxError as error:
        return {"refused": f"line {error.lineno}: {error.message}"}
    except Exception as error:
        return {"refused": _limit_of(error) or f"{type(error).__name__}: {error}"[:500]}


def _limit_of(error: BaseException) -> str:
    """The limit that a template or a grammar breaks; "" for another error."""
    limits = {MemoryError: "it needs too much memory", RecursionError: "it is nested too deep", Refused: str(error)}
    return limits.get(type(error), "")


def alone(source: str, lead: str = "") -> str:
    """Return a grammar whose forced bytes llguidance does not follow, because their number has no limit.

    Args:
        source: the grammar in llguidance's form.
        lead: the text that may precede its texts, in Lark's form.
    """
    whole = json.loads(source)
    whole["grammars"][0]["name"] = "value"
    first = f'%llguidance {{"no_forcing": true}}\nstart: {lead} @value'
    return json.dumps(whole | {"grammars": [{"lark_grammar": first}, *whole["grammars"]]})


class _Bytes:
    """A vocabulary of the 256 bytes and the end, in the form that llguidance needs."""

    is_tokenizer_wrapper = True
    tokens = (*(bytes([byte]) for byte in range(256)), b"")
    bos_token_id, eos_token_id, special_token_ids = None, 256, (256,)

    def __call__(self, text: str) -> list[int]:
        return []


def _grammar_source(guidance: Any, kind: str, value: str) -> str:
    """A grammar in llguidance's form. Raises exceptions of any class."""
    if kind == "json_schema":
        if value.strip() == "false":
            return ""
        schema = guidance.LLMatcher.grammar_from_json_schema(value, defaults={"whitespace_pattern": SPACES})
        return json.dumps(json.loads(schema))
    if kind == "regex":
        return guidance.grammar_from("regex", value)
    lark = importlib.import_module("llguidance.gbnf_to_lark").any_to_lark(value)
    source = json.dumps({"grammars": [{"lark_grammar": lark}]})
    if fault := guidance.LLMatcher.validate_grammar(source):
        raise Refused(fault)
    if token := next((found[1] for found in _LARK.finditer(lark) if found[1]), None):
        raise Refused(f"it names {token}, but control tokens are never part of an output")
    return source


def _held() -> int:
    """Bytes that the C library's allocator has given out; if it cannot tell, bytes of all memory."""
    try:
        fields = "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost"
        info = type("Info", (ctypes.Structure,), {"_fields_": [(name, ctypes.c_size_t) for name in fields.split()]})
        library = ctypes.CDLL(None)
        library.mallinfo2.restype = info
        found = library.mallinfo2()
        return found.uordblks + found.hblkhd
    except (OSError, AttributeError):
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def _compile(guidance: Any, kind: str, value: str, found: dict[str, Any]) -> None:
    """Compile a grammar and ask for its first tokens. `found` is the answer, see `compile_grammar`."""
    try:
        source = _grammar_source(guidance, kind, value)
        if not source:
            found["nothing"] = True
            return
        limits = guidance.LLParserLimits(**GRAMMAR_LIMITS)
        tokens, before = guidance.LLTokenizer(_Bytes()), _held()
        matcher = guidance.LLMatcher(tokens, alone(source), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        size = len(source) + max(0, _held() - before)
        if fault := matcher.get_error():
            found["refused"] = fault
        elif size > GRAMMAR_BYTES:
            found["refused"] = f"it takes {size >> 20} MB when it is compiled, more than {GRAMMAR_BYTES >> 20} MB"
        else:
            found.update(source=source, size=size)
    except BaseException as error:  # the library's panics derive from BaseException
        found["refused"] = _limit_of(error) or str(error) or type(error).__name__


def compile_grammar(request: dict[str, Any]) -> dict[str, Any]:
    """Compile a grammar, to see whether that stays within the limits.

    Args:
        request: "grammar", its kind; "value", its text.

    Returns:
        {"source", "size"}, the grammar in llguidance's form and the bytes that it takes when it is compiled; or
        {"nothing"}, if it allows no text; or {"refused"}, why it cannot be used.
    """
    guidance = importlib.import_module("llguidance")
    start_clock(GRAMMAR_SECONDS)
    found: dict[str, Any] = {}
    threading.stack_size(STACK_BYTES)
    thread = threading.Thread(target=_compile, args=(guidance, request["grammar"], request["value"], found))
    thread.start()
    thread.join()
    if len(reason := found.get("refused", "")) > 2000:
        found["refused"] = reason[:2000]
    return found


def limit_memory() -> None:
    """Limit this process's address space, if the system supports it; forbid core dumps."""
    try:
        hard = resource.getrlimit(resource.RLIMIT_AS)[1]
        limit = MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MEMORY_BYTES, hard)
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    except (AttributeError, OSError, ValueError):  # macOS: the limit is absent or refused
        pass
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def spent() -> bool:
    """Whether templates have left so much behind, in constants or in pieces, that the next one could lack memory."""
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[0]) * resource.getpagesize() > MEMORY_BYTES // 2
    except OSError:  # not Linux
        return False


def start_clock(seconds: float = CPU_SECONDS) -> None:
    """Let the kernel end this process after `seconds` of CPU time from now on."""
    signal.setitimer(signal.ITIMER_PROF, seconds)


def serve() -> None:
    """Answer JSON lines from stdin on stdout until stdin ends, which it does with the parent.

    An answer with "spent": true asks for another process for the next request.
    """
    limit_memory()
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # the default action is the point: the kernel ends the process
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGPROF])  # the parent's mask was inherited
    compiled: dict[str, Renderer] = {}
    split_by: dict[str, Any] = {}
    sys.stdout.write('{"ready": true}\n')
    sys.stdout.flush()
    for line in sys.stdin.buffer:
        start_clock()
        request = json.loads(line)
        if "grammar" in request:
            reply = compile_grammar(request)
        else:
            reply = split(request, split_by) if "parts" in request else answer(request, compiled, len(line))
        text = json.dumps({**reply, "spent": spent()})
        del reply
        signal.setitimer(signal.ITIMER_PROF, 0)
        sys.stdout.write(text + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    serve()
