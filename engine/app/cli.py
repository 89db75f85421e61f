"""Shared by the command lines: flags in groups, loading, errors and exit codes."""

import argparse
import difflib
import errno
import inspect
import json
import os
import re
import sys
import traceback
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from engine.contract.checks import is_ours
from engine.demo import with_defaults
from engine.engine import Engine
from engine.errors import CoppiceError, UsageError, shortened
from engine.load.options import DTYPES, FORMATS_SHOWN, KV_DTYPES
from engine.load.pools import Workload, is_out_of_memory, out_of_memory, read_size
from engine.load.startup import started
from engine.rules import RULES, SCORES, Rules
from engine.rules.catalogue import open_catalogue
from engine.rules.logprobs import check_logprobs
from engine.text.prompting import TemplateOptions
from engine.text.template import THINK
from engine.text.tokenizer import check_utf8
from engine.version import __version__
from models.checkpoint.files import obstacle, open_regular, read_regular
from search.base import ALIASES, REGISTRY, SHARED_PARAMS, chosen, make_search, parameters
from search.outside import find_search, load_entry_points
from search.values import Kind, default_of, kinds, written

INTERRUPTED, CLOSED_PIPE = 130, 141
PARALLEL = 16  # searches at once, as `Engine.load` has it
MAX_TOOLS = MAX_GRAMMAR = 16 << 20


class Parser(argparse.ArgumentParser):
    """argparse without abbreviations, and with short errors that suggest a flag."""

    def __init__(self, prog: str, description: str, epilog: str | None = None):
        super().__init__(
            prog=prog,
            description=description,
            epilog=epilog,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )

        self._flagged: set[str] | None = None  # searches whose flags are there; None: the command has no --search

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """As argparse's, after it has loaded the searches that the arguments name and added their flags; without a
        name the parameters choose, see `search.base.chosen`."""
        given = [*(sys.argv[1:] if args is None else args)]
        named = False
        if self._flagged is not None:
            try:
                for word, value in zip(given, [*given[1:], ""], strict=False):
                    text = value if word == "--search" else word.removeprefix("--search=")
                    if text != word and text != "list":
                        named = True
                        find_search(text)
                self._flag_others()
            except CoppiceError as error:
                if not {"-v", "--verbose"}.isdisjoint(given):
                    traceback.print_exc()
                self.exit(error.exit_code, f"error: {error}\n")
        found, rest = super().parse_known_args(given, namespace)
        if self._flagged is not None and not named:
            found.search = chosen(search_params(found), found.search)
        return found, rest

    def format_help(self) -> str:
        """As argparse's, with the flags of all searches."""
        if self._flagged is not None:
            self._flag_others()
        return super().format_help()

    def _flag_others(self) -> None:
        """Add the flags of searches from outside of this project, after all others. Raises UsageError."""
        assert self._flagged is not None
        for name, cls in REGISTRY.items():
            if name not in self._flagged:
                self._flagged.add(name)
                shared = [
                    f"--{key.replace('_', '-')} ({written(default_of(cls, key)).lower()})"
                    for key in parameters(name)
                    if key in SHARED_PARAMS
                ]
                also = f" It also takes {', '.join(shared)}." if shared else ""
                group = self.add_argument_group(f"search {name}", _summary(cls) + also)
                try:
                    _add_own_flags(group, name)
                except argparse.ArgumentError as error:
                    option = str(error).rpartition(" ")[2]
                    raise UsageError(
                        f"the search {name!r} has a parameter whose flag would be {option}, which exists already",
                        where=f"{cls.__module__}:{cls.__qualname__}",
                        remedy="rename the field or the search",
                    ) from None

    def error(self, message: str) -> NoReturn:
        for option in re.findall(r"--[\w-]+", message) if message.startswith("unrecognized") else []:
            if near := difflib.get_close_matches(option, self._option_string_actions, 1):
                message += f" (did you mean {near[0]}?)"
        self.exit(2, f"error: {message}\n{self.prog} --help lists the options\n")


# --- flags ---


def add_model_flags(parser: argparse.ArgumentParser, several: bool = False) -> None:
    """--model, --draft, --reward, --dtype, --quant, --kv-dtype, --device, --compile, --graphs, --threads,
    --chat-template, --kv-memory, --memory; `several`: --model is repeatable."""
    group = parser.add_argument_group("model")
    help = "folder: config.json, safetensors, tokenizer (the bundled demo)"
    if several:
        help += "; repeatable, and --draft and --reward are for the first"
        group.add_argument("--model", metavar="[NAME=]DIR", action="append", help=help)
    else:
        group.add_argument("--model", metavar="DIR", help=help)
    group.add_argument("--draft", metavar="DIR", help="a smaller one of the same tokenizer, to draft (the demo's)")
    group.add_argument("--reward", metavar="DIR", help="one with a scalar head, to rank (the demo's)")
    dtypes = ["auto", *(name for name in DTYPES if name != "float64")]
    group.add_argument(
        "--dtype", choices=dtypes, default="auto", help="of weights and cache (auto: the checkpoint's, or float32)"
    )
    formats = [*FORMATS_SHOWN, "auto"]
    group.add_argument("--quant", choices=formats, default="none", help="weights in 8 or 4 bits (none)")
    group.add_argument(
        "--kv-dtype",
        choices=KV_DTYPES,
        default="auto",
        help="keys and values in 8 bits; fp8 on a GPU (auto: as --dtype)",
    )
    group.add_argument("--device", choices=["auto", "cpu", "cuda"], default="auto", help="(auto: cuda if there is one)")
    group.add_argument(
        "--compile",
        choices=["off", "on"],
        default="off",
        help="torch.compile of layers, or on a GPU of what is between products (off)",
    )
    group.add_argument("--graphs", choices=["on", "off"], default="on", help="small passes as CUDA graphs (on)")
    group.add_argument("--threads", type=int, metavar="N", help="CPU threads, at most (torch's choice)")
    group.add_argument(
        "--chat-template", metavar="FILE|none", help="a Jinja file; none: plain completion (the checkpoint's own)"
    )
    group.add_argument(
        "--kv-memory",
        type=parse_size,
        metavar="SIZE",
        help="of all KV caches, as 512M or 2G (half of what is free)",
    )
    group.add_argument(
        "--memory",
        type=_memory,
        metavar="SIZE|auto",
        help="of the whole process: what the weights and the rest leave goes to the KV caches; auto: the least of the "
        "limits that it runs under (no limit)",
    )


def add_prefix_flags(parser: argparse.ArgumentParser) -> None:
    """--prefix-cache, --load-prefix."""
    group = parser.add_argument_group("cached prefixes", "Prompts that begin alike are read once.")
    group.add_argument(
        "--prefix-cache",
        choices=["on", "off"],
        default="on",
        help="keep what was read in pages of the KV cache that nothing else needs (on)",
    )
    group.add_argument("--load-prefix", metavar="FILE", help="the beginning of prompts, which --save-prefix wrote")


def add_template_flags(parser: argparse.ArgumentParser) -> None:
    """--think, --tools, --template-var."""
    group = parser.add_argument_group("chat template", "Refused where the template has no such variable.")
    group.add_argument("--think", choices=THINK, default="auto", help="thoughts before the answer (the template's)")
    group.add_argument("--tools", metavar="FILE", help="functions that the model may call: a JSON list of schemas")
    group.add_argument(
        "--template-var",
        metavar="NAME=JSON",
        type=_template_variable,
        action="append",
        default=[],
        help="a variable of the template; repeatable",
    )


def add_prompt_flags(parser: argparse.ArgumentParser) -> None:
    """--parse-special."""
    group = parser.add_argument_group("prompts")
    group.add_argument(
        "--parse-special",
        action="store_true",
        help="in prompts that are text, spellings of control tokens are these tokens; never in messages",
    )


def template_options(args: argparse.Namespace) -> TemplateOptions:
    """What the flags say of the chat template. Raises UsageError."""
    tools = None
    if args.tools is not None:
        try:
            with open_regular(args.tools) as file:
                tools = parse_tools(file.read(MAX_TOOLS + 1))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(f"cannot read the tools: {reason}", where=args.tools) from None
    return TemplateOptions(tools, dict(args.template_var), args.think)


def parse_tools(data: bytes) -> list[dict[str, Any]]:
    """The functions of a file. Raises ValueError."""
    if len(data) > MAX_TOOLS:
        raise ValueError(f"the file is larger than {MAX_TOOLS >> 20} MB")
    tools = parse_object(b'{"tools": ' + data + b"}").get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("expected a JSON list of objects, a function's schema each")
    return tools


def _template_variable(text: str) -> tuple[str, Any]:
    """A name and a JSON value; a value that is no JSON is a string. An argparse type."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=JSON, got {text!r}")
    try:
        return name, parse_object(b'{"value": ' + value.encode() + b"}")["value"]
    except (ValueError, KeyError):
        return name, _text(value)


def _memory(text: str) -> int | str:
    """A budget: auto, or bytes. An argparse type."""
    return text if text == "auto" else parse_size(text)


def add_search_flags(parser: Parser, default: str = "greedy") -> None:
    """--search and every parameter of every search; a parameter that is not given is None, see `search_params`.

    The parser adds the flags of searches from outside of this project when it parses their names.
    """
    group = parser.add_argument_group("search")
    group.add_argument(
        "--search",
        action=_SearchName,
        default=default,
        metavar="NAME",
        help="the algorithm; list shows all; module:Class loads one of your own, its parameters become flags; "
        f"given several times: the last one runs, all can be chosen later ({default}; with --beams: trie)",
    )
    defaults: dict[str, dict[str, list[str]]] = {}  # parameter -> default -> searches
    for name, cls in REGISTRY.items():
        for key, f in parameters(name).items():
            defaults.setdefault(key, {}).setdefault(written(default_of(cls, f)).lower(), []).append(name)

    def add(group: argparse._ArgumentGroup, key: str, help: str, **options: Any) -> None:
        default, *others = sorted(defaults[key], key="none".__eq__)  # the default of most searches first
        default += "".join(f"; {', '.join(defaults[key][other])}: {other}" for other in others)
        group.add_argument("--" + key.replace("_", "-"), help=f"{help} ({default})", **options)

    add(group, "beams", "live hypotheses; without --search: of beam search, trie", type=int, metavar="N")
    add(group, "length_penalty", "a score is logprob / length ** this", type=float, metavar="X")
    modes = {"choices": ["false", "true", "never", "best"]}
    ends = "true: when as many outputs have finished as there are beams; best: when no live one is better as it is"
    add(group, "early_stopping", ends, **modes)
    patience = "stop when as many outputs have finished as beams times this, in place of --early-stopping"
    add(group, "patience", patience, type=float, metavar="X")
    add(group, "num_return_sequences", "outputs to return", type=int, metavar="N")
    ours = [name for name, cls in REGISTRY.items() if is_ours(cls)]
    for name in ours:
        _add_own_flags(group, name)
    group = parser.add_argument_group(
        "sampling", "An error for a search that does not draw, unless the temperature is 0."
    )
    add(group, "temperature", "divides the log-probabilities; 0 takes the best token", type=float, metavar="X")
    add(group, "top_k", "draw from the K most probable tokens; 0: from all", type=int, metavar="K")
    add(group, "top_p", "draw from the most probable tokens that add up to P", type=float, metavar="P")
    add(group, "min_p", "draw no token of less than P times the best one's probability", type=float, metavar="P")
    add(group, "seed", "of the draws: same seed, same output", type=int, metavar="N")
    parser._flagged = {*ours}


def _add_own_flags(group: argparse._ArgumentGroup, name: str) -> None:
    """The flags of the parameters that a search shares with no other, by their annotations."""
    cls = REGISTRY[name]
    accepted = kinds(cls)
    for key, field in parameters(name).items():
        if key not in SHARED_PARAMS and accepted[field].is_flag:
            default = written(default_of(cls, field)).lower().replace("%", "%%")
            group.add_argument(
                "--" + key.replace("_", "-"),
                type=_value(accepted[field]),
                metavar=accepted[field].metavar,
                help=f"{name}: {_argument_doc(cls, field)} ({default})",
            )


def _value(kind: Kind) -> Callable[[str], Any]:
    """An argparse type."""

    def parse(text: str) -> Any:
        try:
            return kind.parse(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    return parse


def add_limit_flags(parser: argparse.ArgumentParser) -> None:
    """--max-new-tokens, --stop, --ignore-eos, --logprobs."""
    group = parser.add_argument_group("limits")
    group.add_argument("--max-new-tokens", type=positive, default=256, metavar="N", help="of each output (256)")
    group.add_argument(
        "--stop", type=_text, action="append", default=[], metavar="STR", help="end before this text; repeatable"
    )
    group.add_argument("--ignore-eos", action="store_true", help="no token ends an output")
    group.add_argument(
        "--logprobs", type=int, metavar="K", help="give each token's log-probability, and the K most probable tokens"
    )


def add_rule_flags(parser: argparse.ArgumentParser) -> None:
    """The flags of `engine.Rules`, but for functions, which only Python can give, and for those of several tokens."""
    group = parser.add_argument_group(
        "constraints", "Which tokens may come next, for every search; docs/constraints.md explains them."
    )
    group.add_argument(
        "--choice", type=_text, action="append", dest="choices", metavar="TEXT", help="a whole reply; repeat for others"
    )
    group.add_argument(
        "--catalogue", metavar="FILE", help="a reply is an item of this catalogue, which tools.catalogue made"
    )
    group.add_argument(
        "--json-schema", type=_json_file, metavar="FILE", help="replies are JSON that the schema allows; extra grammar"
    )
    group.add_argument("--regex", type=_text, metavar="PATTERN", help="a whole reply matches it; extra grammar")
    group.add_argument(
        "--grammar", type=_text_file, metavar="FILE", help="Lark or GBNF, of a whole reply; extra grammar"
    )
    group.add_argument(
        "--constraint-scores", choices=SCORES, help="of what is left: the model's, or made to add up to 1 (model)"
    )
    group.add_argument(
        "--logit-bias", type=_bias, action="append", metavar="ID=X", help="add X to a token's score; repeatable"
    )
    group.add_argument(
        "--bad-word", type=_text, action="append", dest="bad_words", metavar="TEXT", help="never this text; repeatable"
    )
    group.add_argument("--repetition-penalty", type=float, metavar="X", help="of tokens that occurred, above 1 (1)")
    group.add_argument("--no-repeat-ngram-size", type=int, metavar="N", help="no N tokens twice; 0: any (0)")
    group.add_argument("--min-new-tokens", type=int, metavar="N", help="no end before there are as many (0)")
    group.add_argument("--min-length", type=int, metavar="N", help="likewise, counted with the prompt (0)")
    group.add_argument("--suppress-tokens", type=_ids, metavar="ID,...", help="never these tokens")
    group.add_argument("--begin-suppress-tokens", type=_ids, metavar="ID,...", help="not first")


def _text_file(path: str) -> str:
    """The text of a file. An argparse type."""
    try:
        data = read_regular(path, MAX_GRAMMAR)
        if len(data) > MAX_GRAMMAR:
            raise ValueError(f"it is larger than {MAX_GRAMMAR >> 20} MB")
        return data.decode()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error.strerror}") from None
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"cannot read {path}: {error}") from None


def _json_file(path: str) -> Any:
    """The value of a JSON file. An argparse type."""
    try:
        return json.loads(_text_file(path))
    except (ValueError, RecursionError) as error:
        raise argparse.ArgumentTypeError(f"{path} is not valid JSON: {error}") from None


def _ids(text: str) -> list[int]:
    """Token ids with commas between them. An argparse type."""
    if not re.fullmatch(r"[0-9]{1,17}(,[0-9]{1,17})*", text):
        raise argparse.ArgumentTypeError(f"expected token ids such as 5,17, got {text!r}")
    return [int(part) for part in text.split(",")]


def _bias(text: str) -> tuple[str, float]:
    """ID=X. An argparse type."""
    token, _, number = text.partition("=")
    try:
        return str(int(token)), float(number)
    except ValueError:
        raise argparse.ArgumentTypeError(f"expected a token id and a number such as 17=-2.5, got {text!r}") from None


def add_verbosity_flags(parser: argparse.ArgumentParser) -> None:
    """-q, -v, --version."""
    parser.add_argument("-q", "--quiet", action="store_true", help="nothing on stderr but errors")
    parser.add_argument("-v", "--verbose", action="store_true", help="more on stderr; tracebacks")
    parser.add_argument("--version", action="version", version=f"coppice {__version__}")


def add_trace_flag(group: argparse._ArgumentGroup, what: str) -> None:
    """--trace."""
    text = f"write what the search did as a page for a browser: {what}; FILE.json: as data for tools.tree"
    group.add_argument("--trace", metavar="FILE", help=text)


def search_params(args: argparse.Namespace) -> dict[str, Any]:
    """The given search parameters, for `search.make_search`."""
    keys = {key for name in REGISTRY for key in parameters(name)}
    return {key: value for key, value in vars(args).items() if key in keys and value is not None}


def limits(args: argparse.Namespace) -> dict[str, Any]:
    """The limits as options of `engine.Request`. Raises UsageError."""
    check_logprobs(args.logprobs)
    found = {"max_new_tokens": args.max_new_tokens, "stop": tuple(args.stop), "ignore_eos": args.ignore_eos}
    return found if args.logprobs is None else found | {"logprobs": args.logprobs}


def rules(args: argparse.Namespace) -> dict[str, Any]:
    """The given constraints as options of `engine.Request`. Raises UsageError."""
    given = {name: value for name in RULES if (value := getattr(args, name, None)) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    Rules(**given).check()
    return given


def load_engine(args: argparse.Namespace) -> Engine:
    """The engine that the model flags ask for; with `args.shard`, in one of several processes. Raises CoppiceError."""
    model, draft, reward = with_defaults(args.model, args.draft, args.reward)
    engine = Engine.load(
        model,
        dtype=args.dtype,
        device=args.device,
        threads=args.threads,
        kv_memory=args.kv_memory,
        memory=args.memory,
        workload=_workload(args) if args.memory is not None else None,
        compile=args.compile,
        graphs=args.graphs,
        prefix_cache=getattr(args, "prefix_cache", "off"),
        quant=args.quant,
        kv_dtype=args.kv_dtype,
        chat_template=args.chat_template,
        parallel=getattr(args, "parallel", PARALLEL),
        draft=draft,
        reward=reward,
        shard=getattr(args, "shard", None),
    )
    if (catalogue := getattr(args, "catalogue", None)) is not None:  # an error of the run, not of each of its lines
        open_catalogue(catalogue).check(engine.model.tokenizer, engine.runner.vocab_size)
    if (prefix := getattr(args, "load_prefix", None)) is not None:
        engine.load_prefix(prefix)
    return engine


def _workload(args: argparse.Namespace) -> Workload:
    """What `--memory` has to hold: the search of a command that has one, and as many at once as it runs."""
    parallel = getattr(args, "parallel", 1)
    if not hasattr(args, "search"):
        return Workload(parallel=parallel)
    return Workload(make_search(args.search, search_params(args)), 1, getattr(args, "max_new_tokens", 1), parallel)


# --- values ---


def parse_object(data: bytes, **hooks: Any) -> dict[str, Any]:
    """A JSON object from bytes; `hooks` are options of `json.loads`. Raises ValueError with the fault."""
    try:
        value = json.loads(data.decode(), **hooks)
    except UnicodeDecodeError as error:
        raise ValueError(f"not valid UTF-8: byte 0x{data[error.start]:02X} at {error.start}") from None
    except RecursionError:
        raise ValueError("malformed JSON: nested too deep") from None
    except json.JSONDecodeError as error:
        raise ValueError(f"malformed JSON: {error}") from None
    except ValueError:  # Python limits the digits of an integer
        raise ValueError("a number is out of range") from None
    if not isinstance(value, dict):
        raise ValueError(f"expected a JSON object, got {shortened(json.dumps(value))}")
    return value


def parse_size(text: str) -> int:
    """Bytes: a number with K, M, G or T (powers of 1024; KB and KiB mean the same). An argparse type."""
    try:
        return read_size(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def output_file(path: str) -> Path:
    """A file that is written at the end of some work, checked before it begins. An argparse type."""
    if found := obstacle(path):
        raise argparse.ArgumentTypeError(f"cannot be written: {found[0]}: {found[1]}")
    return Path(path)


def positive(text: str) -> int:
    if not re.fullmatch(r"[0-9]{1,18}", text) or not int(text):
        raise argparse.ArgumentTypeError(f"expected an integer >= 1, got {text!r}")
    return int(text)


def _text(text: str) -> str:
    """An argument with something in it, in valid UTF-8."""
    if not text:
        raise argparse.ArgumentTypeError("expected a text, got none")
    try:
        return check_utf8(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(error.what) from None


def _argument_doc(cls: type, field: str) -> str:
    """The description of a field in its configuration's docstring, on one line."""
    found = re.search(rf"^ +{field}: (.+(?:\n {{8,}}.+)*)", inspect.getdoc(cls) or "", re.MULTILINE)
    return re.sub(r"\s+", " ", found[1]).rstrip(".").replace("%", "%%") if found else field


def _summary(cls: type) -> str:
    """The first line of a class's docstring; "" for a dataclass whose docstring is generated."""
    own = cls.__doc__ or ""
    return "" if own.startswith(f"{cls.__name__}(") else inspect.cleandoc(own).partition("\n")[0]


class _SearchName(argparse.Action):
    """`--search list` prints all searches and exits; `Parser` has loaded all other names."""

    def __call__(self, parser, namespace, values, option_string=None):
        if values == "list":
            errors = load_entry_points()
            width = max(map(len, REGISTRY))
            for name, cls in REGISTRY.items():
                also = "".join(f" (also: {alias})" for alias, real in ALIASES.items() if real == name)
                print(f"{name:{width}}  {_summary(cls)}{also}".rstrip())
            for error in errors:
                print(f"error: {error}", file=sys.stderr)
            parser.exit()
        name = find_search(str(values))
        if name is None:
            near = difflib.get_close_matches(str(values), [*REGISTRY, *ALIASES], 1)
            hint = f"did you mean {near[0]}?" if near else "--search list describes them"
            raise argparse.ArgumentError(self, f"expected one of {', '.join(REGISTRY)}, got {values!r}; {hint}")
        setattr(namespace, self.dest, name)


# --- exit codes ---


def run(main: Callable[[], int], verbose: bool = False, quiet: bool = False) -> int:
    """Run a command line and return its exit code; errors go to stderr, with a traceback if `verbose`, and warnings,
    unless `quiet`.

    A KeyboardInterrupt may have a message: how to continue.
    """
    shown = warnings.showwarning
    warnings.showwarning = (lambda *_, **__: None) if quiet else _show_warning
    try:
        return _run(main, verbose)
    finally:
        warnings.showwarning = shown


def _show_warning(message: Warning | str, *place: object, **_: object) -> None:
    """A warning as one line on stderr, without the line of code that it comes from; see `warnings.showwarning`."""
    if sys.stderr is not None:
        clear = "\r\x1b[K" if sys.stderr.isatty() else ""  # a status may stand there
        print(f"{clear}warning: {message}", file=sys.stderr, flush=True)


def _run(main: Callable[[], int], verbose: bool) -> int:
    if hasattr(sys.stdout, "reconfigure"):
        sys.stdout.reconfigure(encoding="utf-8")  # type: ignore[union-attr]  # whatever the locale
    try:
        started()
        code = main()
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except BrokenPipeError:
        _discard_stdout()
        return CLOSED_PIPE
    except KeyboardInterrupt as stop:
        return _fail(INTERRUPTED, f"interrupted: {stop}" if str(stop) else "interrupted", verbose)
    except CoppiceError as error:
        return _fail(error.exit_code, f"error: {error}", verbose)
    except Exception as error:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
            _discard_stdout()
            return _fail(2, f"error: the output cannot be written: {error.strerror}", verbose)
        if is_out_of_memory(error):
            memory = out_of_memory()
            return _fail(memory.exit_code, f"error: {memory}", verbose)
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        remedy = "" if verbose else "\n-v shows where"
        return _fail(1, f"error: {what}\nthis is a bug of ours, please report it{remedy}", verbose)


def _fail(code: int, message: str, verbose: bool) -> int:
    try:
        if verbose:
            traceback.print_exc()
        print(message, file=sys.stderr, flush=True)
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError:
        _discard_stdout()  # the streams are closed: the exit code alone reports the error
    return code


def _discard_stdout() -> None:
    """Redirect stdout to the null device, so that writing its buffer at exit raises no error."""
    try:
        number = sys.stdout.fileno()
    except (AttributeError, OSError, ValueError):
        return
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, number)
    os.close(nothing)
