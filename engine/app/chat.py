"""The chat: `python -m engine.chat`. On a terminal a conversation, with piped input one reply."""

import argparse
import contextlib
import io
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from engine.app import cli, transcript
from engine.app.commands import ALIASES, COMMANDS, decode_prompt, literal, read_prompt, tell_loaded
from engine.app.dialog import Dialog
from engine.app.settings import Settings
from engine.app.terminal import Interrupt, Label, Quit, Screen
from engine.app.trace_page import check_target
from engine.cache.tree import shared_length
from engine.contract.trace import Traces
from engine.conversation import OVERFLOW, Conversation
from engine.demo import BANNER, demo_folder, is_demo
from engine.engine import Engine
from engine.errors import UsageError
from engine.load.budget import table
from engine.load.capabilities import dtype_name
from engine.load.distributed import check_alone
from engine.load.hub import outlined
from engine.load.options import NO_ADAPTER
from engine.load.pools import size_text
from engine.version import __version__
from models.sharding import Shard
from search.base import make_search
from search.trie import Trie

DESCRIPTION = "Talk to a model. On a terminal: a conversation. With -p or piped input: one reply on stdout."
EPILOG = """\
exit codes: 0 fine, 1 our bug, 2 usage, input or a fault of a search of your own, 3 checkpoint, 4 memory,
5 numerics, 130 interrupted, 141 closed pipe"""
COMMON = """
--help --quiet --verbose --version
--prompt --system --load --save --show-beams --stats --json --trace
--model --draft --reward --dtype --quant --device --threads --kv-memory --memory
--think --search --beams --length-penalty --num-return-sequences --temperature --top-k --top-p --seed
--max-new-tokens --stop --choice --json-schema --regex --plan
"""  # flags of the short help

# --- the banner ---


def banner(engine: Engine, settings: Settings, folder: str | Path) -> str:
    """The lines before the first prompt."""
    keys, machine = engine.pool.cache.k_LGSD, engine.capabilities
    dtype, device = machine.precision or dtype_name(keys.dtype), keys.device
    where = f"{torch.get_num_threads()} threads" if device.type == "cpu" else str(device)
    params = ", ".join(f"{key} {literal(value)}" for key, value in settings.params.items())
    context = f"context {engine.shape.max_positions} tokens" if engine.shape.max_positions else "context without limit"
    lines = [
        f"coppice {__version__} · {engine.name}: {_count(engine.model.parameters)} parameters, {dtype}, {where}, "
        f"loaded in {engine.load_seconds:.1f} s",
        f"search {settings.search}{f' ({params})' if params else ''} · {context}, "
        f"cache for {engine.pool.pages * engine.pool.page_size}",
    ]
    if names := [*engine.model.adapters]:
        others = f"; /set adapter changes it: {', '.join([*names[1:], NO_ADAPTER])}"
        lines.append(f"adapter {settings.adapter or names[0]}{others}")
    if machine.paths:
        lines.append(machine.paths)
    if engine.template is None:
        lines.append("no chat template: plain completion. Each prompt is continued, the text so far is its context.")
    if is_demo(folder):
        lines.append(BANNER)
    return "\n".join([*lines, "/help lists the commands; Ctrl-C stops a reply, Ctrl-D leaves"])


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


# --- the command line ---


def parser() -> cli.Parser:
    """All flags, in groups."""
    parser = cli.Parser("python -m engine.chat", DESCRIPTION, EPILOG, COMMON)
    add_chat_flags(parser)
    cli.add_load_flags(parser, "chat")
    cli.add_prefix_flags(parser)
    cli.add_template_flags(parser)
    cli.add_search_flags(parser)
    cli.add_limit_flags(parser)
    cli.add_rule_flags(parser)
    add_plan_flags(parser)
    cli.add_verbosity_flags(parser)
    return parser


def add_chat_flags(parser: cli.Parser) -> None:
    """Flags of what a chat reads, shows and saves."""
    group = parser.group("chat")
    prompts = group.add_mutually_exclusive_group()
    prompts.add_argument("-p", "--prompt", metavar="TEXT", help="one reply to this and piped input; -: that alone")
    prompts.add_argument("--prompt-file", metavar="FILE", help="one reply to the text of a file; -: of piped input")
    group.add_argument("--system", metavar="TEXT", help="system message, if the model has a chat template")
    group.add_argument(
        "--on-overflow",
        choices=OVERFLOW,
        default=OVERFLOW[0],
        help="in a full context: drop the oldest turns, or refuse the new one (drop-turns)",
    )
    group.add_argument("--load", metavar="FILE", help="continue a saved conversation")
    group.add_argument("--save", metavar="FILE", type=Path, help="save the conversation after each turn")
    group.add_argument(
        "--save-prefix",
        metavar="FILE",
        type=cli.output_file,
        help="write for --load-prefix what all conversations with this --system begin with; without a chat template "
        "the one prompt",
    )
    group.add_argument("--show-beams", action="store_true", help="show live candidates under the text, on a terminal")
    group.add_argument("--stats", action="store_true", help="print figures after each reply, on stderr")
    group.add_argument("--json", action="store_true", help="print replies as JSON lines, as engine.batch does")
    cli.add_trace_flag(group)


def add_plan_flags(parser: cli.Parser) -> None:
    """--plan, --context, --processes."""
    group = parser.group("machine")
    group.add_argument("--plan", metavar="DIR", help="print the memory that a model would take, and exit")
    text = "tokens that --plan counts, --max-new-tokens of them the reply's (the model's context)"
    group.add_argument("--context", type=cli.positive, metavar="N", help=text)
    text = "processes that share the model, of which --plan counts one (1)"
    group.add_argument("--processes", type=cli.positive, default=1, metavar="N", help=text)


def one_shot(args: argparse.Namespace) -> str | None:
    """The only prompt, from the flags and from piped input; None on a terminal. Raises UsageError."""
    given, piped_alone = args.prompt, "-" in (args.prompt, args.prompt_file)
    if piped_alone:
        given = None
    elif args.prompt_file is not None:
        given = read_prompt(args.prompt_file, pipes=True)  # --prompt-file <(command)
    if not piped_alone and sys.stdin is not None and sys.stdin.isatty():
        return given
    piped = decode_prompt(sys.stdin.buffer.read() if sys.stdin is not None else b"", "stdin")
    if given is not None:
        return f"{given}\n{piped}" if piped else given
    if not piped.strip():
        raise UsageError("the input is empty", where="stdin", remedy="pipe a prompt in, or give -p TEXT")
    return piped


def chat(args: argparse.Namespace) -> int:
    """Run the command line. Returns the exit code; raises CoppiceError."""
    if args.plan is not None:
        print(plan(args))
        return 0
    check_alone("engine.chat")
    make_search(args.search, cli.search_params(args))
    settings = Settings(args.search, cli.search_params(args), **cli.limits(args), rules=cli.rules(args))
    if sys.stdout is None:
        raise BrokenPipeError("stdout is closed")
    file_state = transcript.state(args.save) if args.save is not None else None
    saved = transcript.load(args.load) if args.load is not None else None
    if args.save is not None:
        check_save(args.save, args.load)
    if args.trace is not None:
        check_target(args.trace, args.save, args.load, args.prompt_file)
    options = cli.template_options(args)
    prompt = one_shot(args)
    screen = make_screen(args)
    engine = load(args, screen)
    conversation = Conversation(engine, args.system, args.on_overflow, options)
    if args.save_prefix is not None:
        engine.save_prefix(args.save_prefix, common_prefix(conversation, prompt))
    with Interrupt() as interrupt, contextlib.closing(conversation.session):
        dialog = Dialog(
            conversation,
            settings,
            screen,
            interrupt,
            commands=COMMANDS,
            aliases=ALIASES,
            as_json=args.json,
            stats=args.stats,
            show_beams=args.show_beams,
            file=args.save,
            file_state=file_state,
            traces=Traces() if args.trace is not None else Traces(0) if prompt is None else None,  # 0: the last
            trace_file=args.trace,
            verbose=args.verbose,
        )
        if saved is not None:
            conversation.restore(saved.turns, saved.system if args.system is None else args.system)
            dialog.mark_saved()
        if prompt is not None:
            return cli.INTERRUPTED if dialog.reply(prompt).finish_reason == "interrupted" else 0
        screen.hint(banner(engine, settings, args.model or demo_folder()))
        if saved is not None:
            tell_loaded(dialog, saved)
        return dialog.converse()


def common_prefix(conversation: Conversation, prompt: str | None) -> list[int]:
    """The tokens that every conversation begins with; without a chat template those of the one prompt.

    Raises UsageError.
    """
    if conversation.engine.template is None:
        if prompt is None:
            raise UsageError("--save-prefix: without a chat template it needs -p or --prompt-file")
        return conversation.prompt_ids(prompt)
    one, other = (conversation.prompt_ids(text) for text in ("a", "1"))
    if not (shared := shared_length(one, other)):
        raise UsageError("--save-prefix: conversations with this template have no common beginning")
    return one[:shared]


def plan(args: argparse.Namespace) -> str:
    """The table of `--plan`. Raises CoppiceError."""
    alone = {"draft": None, "reward": None, "memory": None, "workload": None}
    options = replace(cli.load_options(args), shard=Shard(0, args.processes), **alone)
    with outlined(args.plan, not args.quiet) as (folder, missing):
        found = replace(options, folder=folder)
        shown = table(found, lambda beams: Trie(beams=beams), args.context, args.max_new_tokens)
    return f"{shown}\nOnly headers were fetched; loading it fetches {size_text(missing)}." if missing else shown


def make_screen(args: argparse.Namespace) -> Screen:
    """Make the screen; input and output are UTF-8 in every locale."""
    # Bytes that are not UTF-8 come in as surrogates, which are refused when the text is encoded.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stderr, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(encoding="utf-8", errors=errors)
    screen = Screen(quiet=args.quiet)
    if args.show_beams and not screen.lively and not args.quiet:
        screen.note("--show-beams is for terminals: ignored here")
    return screen


def load(args: argparse.Namespace, screen: Screen) -> Engine:
    """Load the model; a status shows the time."""
    options, began = cli.fetch_models(args), time.monotonic()  # not below the status: fetching has progress bars
    with screen.status(lambda: Label("", f"[loading the model: {time.monotonic() - began:.1f} s]")):
        engine = cli.load_engine(args, options)
    if engine.capabilities.warning and not args.quiet:
        screen.note(engine.capabilities.warning)
    return engine


def check_save(file: Path, loaded: str | None) -> None:
    """Check that a conversation can be saved to a file, and that the file has no other one. Raises UsageError."""
    transcript.check_target(file)
    with contextlib.suppress(OSError):
        if file.expanduser().stat().st_size and (
            loaded is None or not file.expanduser().samefile(Path(loaded).expanduser())
        ):
            raise UsageError(
                "the file holds a saved conversation, which the first turn would replace",
                where=str(file),
                remedy=f"--load {file} goes on with it; or give another name, or delete it",
            )


def main(argv: list[str] | None = None) -> int:
    """The command line's entry; returns the exit code."""
    args = parser().parse_args(argv)

    def run() -> int:
        try:
            return chat(args)
        except Quit as quit:
            if quit.exit_code == cli.INTERRUPTED:
                raise
            return quit.exit_code

    return cli.run(run, args.verbose, args.quiet)
