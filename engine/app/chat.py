"""The chat: a conversation on a terminal, a single reply to piped input. Its flags are in `engine.app.chat_flags`."""

import argparse
import contextlib
import io
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch

from engine.app import cli, transcript
from engine.app.chat_flags import parser
from engine.app.commands import ALIASES, COMMANDS, decode_prompt, literal, read_prompt, tell_loaded
from engine.app.dialog import Dialog, plural
from engine.app.settings import Settings
from engine.app.terminal import Interrupt, Label, Quit, Screen
from engine.app.trace_page import check_target
from engine.cache.prefixes import shared_length
from engine.contract.trace import Traces
from engine.conversation import Conversation
from engine.demo import BANNER, demo_folder, is_demo
from engine.engine import Engine
from engine.errors import UsageError
from engine.load.budget import table
from engine.load.capabilities import dtype_name
from engine.load.distributed import check_alone
from engine.load.hub import outlined
from engine.load.options import NO_ADAPTER
from engine.load.sizes import size_text
from engine.version import __version__
from models.shard import Shard
from search.base import make_search
from search.trie import Trie

# --- the banner ---


def banner(engine: Engine, settings: Settings, folder: str | Path) -> str:
    """The lines before the first prompt."""
    keys, machine = engine.pool.cache.k_LGSD, engine.capabilities
    name = "demo" if is_demo(folder) else engine.name
    dtype, device = machine.precision or dtype_name(keys.dtype), keys.device
    where = plural(torch.get_num_threads(), "thread") if device.type == "cpu" else str(device)
    params = ", ".join(f"{key} {literal(value)}" for key, value in settings.params.items())
    context = f"context {engine.shape.max_positions} tokens" if engine.shape.max_positions else "context without limit"
    lines = [
        f"coppice {__version__} · {name}: {_count(engine.model.parameters)} parameters, {dtype}, {where}, "
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
        lines.append("no chat template (--chat-template FILE gives one): plain completion.")
        lines.append("Each prompt is continued, the text so far is its context.")
    if is_demo(folder):
        lines.append(BANNER)
    return "\n".join([*lines, "/help lists the commands; Ctrl-C stops a reply, Ctrl-D leaves"])


def _count(number: int) -> str:
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if number >= size:
            return f"{number / size:.3g}{letter}"
    return str(number)


# --- the command line ---


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
    if args.generation_config:
        settings = settings.over(engine.generation)
    conversation = Conversation(engine, args.system, args.on_overflow, options)
    if args.save_prefix is not None:
        engine.save_prefix(args.save_prefix, common_prefix(conversation, prompt))
    with cli.kept_texts(args, engine), Interrupt() as interrupt, contextlib.closing(conversation.session):
        dialog = Dialog(
            conversation,
            settings,
            screen,
            interrupt,
            args,
            commands=COMMANDS,
            aliases=ALIASES,
            traces=Traces() if args.trace is not None else Traces(0) if prompt is None else None,  # 0: the last
            file_state=file_state,
        )
        if saved is not None:
            conversation.restore(saved.turns, saved.system if args.system is None else args.system)
            dialog.mark_saved()
        if prompt is not None:
            return cli.INTERRUPTED if dialog.reply(prompt).finish_reason == "interrupted" else 0
        screen.hint(banner(engine, settings, args.model or demo_folder()), fold=True)
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
    alone = {"draft": None, "reward": None, "workload": None}
    options = replace(cli.load_options(args), shard=Shard(0, args.processes), **alone)
    with outlined(args.plan, not args.quiet) as (folder, missing):
        found = replace(options, folder=folder)
        shown = table(found, lambda beams: Trie(beams=beams), args.max_new_tokens)
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
    """Check that a conversation can be saved to a file that has no other conversation. Raises UsageError."""
    transcript.check_target(file)
    if transcript.state(file) and (loaded is None or transcript.state(file) != transcript.state(loaded)):
        raise UsageError(
            "the file holds a saved conversation, which the first turn would replace",
            where=str(file),
            remedy=f"--load {file} continues it; or give another name, or delete it",
        )


def command(args: argparse.Namespace) -> int:
    """Run the command line that the flags give. Returns the exit code; raises CoppiceError."""
    try:
        return chat(args)
    except Quit as quit:
        if quit.exit_code == cli.INTERRUPTED:
            raise
        return quit.exit_code


def main(argv: list[str] | None = None) -> int:
    """Run a command line. Returns the exit code."""
    args = parser().parse_args(argv)
    return cli.run(lambda: command(args), args.verbose, args.quiet)
