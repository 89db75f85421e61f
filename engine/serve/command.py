"""`python -m engine.serve`: loads models, starts and ends the server. Its flags are in `engine.serve.flags`."""

import argparse
import asyncio
import contextlib
import copy
import importlib
import itertools
import os
import socket
import sys
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from engine.app.cli import run, search_params
from engine.app.cli.engines import kept_texts, load_engine
from engine.app.cli.values import read_text
from engine.errors import UsageError, reason_of
from engine.load.distributed import check_alone
from engine.ranking import check_template
from engine.rules.catalogue import open_catalogue
from engine.serve.flags import KEY, make_parser, named
from engine.serve.limits import Limits, check_width, width_of
from engine.serve.metrics import Metrics
from engine.serve.served import Served
from engine.serve.stepper import Stepper
from models.trim import share_heap
from search.base import make_search

if TYPE_CHECKING:
    from engine.serve.http import Application

LEAST_KEY = 16  # characters of the shortest key
CONNECTIONS = 1024  # most connections at once, if there are enough file descriptors
IDLE_SECONDS = 15  # seconds that a connection stays open without a request


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    args = make_parser().parse_args(argv)
    return run(lambda: command(args), args.verbose, args.quiet)


def command(args: argparse.Namespace) -> int:
    """Load the models, and serve until a signal ends it. Returns the exit code; raises CoppiceError."""
    share_heap()
    check_alone("engine.serve")
    library("starlette")
    library("uvicorn")
    # The command line is checked before anything is loaded.
    check_width(width_of(make_search(args.search, search_params(args))), args.max_width)
    check(args)
    keys = read_keys(args.api_key_file)
    if not keys and not args.open and not is_local(args.host):
        remedy = f"--api-key-file FILE or the variable {KEY}; --open serves whoever reaches it"
        raise UsageError(f"--host {args.host}: other machines need a key", remedy=remedy)
    listener = listen(args.host, args.port)
    with contextlib.closing(listener), application(args, keys) as app:
        if not args.quiet:
            print(*start_lines(app, listener), sep="\n", file=sys.stderr, flush=True)
        asyncio.run(http_server(app, args.drain, args.verbose).serve([listener]))
    return 0


@contextlib.contextmanager
def application(args: argparse.Namespace, keys: Sequence[str] = ()) -> Iterator["Application"]:
    """Load the models of the flags as an ASGI application; its threads end with the block."""
    from engine.serve.http import LOCAL, Application, salt_of

    stepper = Stepper(Metrics())
    served = [load(name, each, stepper) for name, each in each_model(args).items()]
    if args.load_prefix is not None:
        for one, key in itertools.product(served, keys):
            one.engine.load_prefix(args.load_prefix, salt_of(key.encode()))
    limits = Limits(
        args.max_prompt, args.max_tokens, args.max_width, args.max_body, args.timeout, args.traces > 0, args.strict
    )
    hosts = [*LOCAL, args.host] if is_local(args.host) else []
    with kept_texts(args, served[0].engine):
        stepper.start()
        try:
            yield Application(served, stepper, limits, keys=keys, hosts=hosts, traces=args.traces, verbose=args.verbose)
        finally:
            stepper.stop()


def load(name: str, args: argparse.Namespace, stepper: Stepper) -> Served:
    """Load a model and the catalogues that the flags name. Raises CoppiceError."""
    engine = load_engine(args)
    if engine.capabilities.warning and not args.quiet:
        print(engine.capabilities.warning, file=sys.stderr)
    catalogues = {}
    for word in args.catalogues:
        key, equals, file = word.partition("=")
        if not equals or not key:
            raise UsageError(f"--catalogue: expected NAME=FILE, got {word!r}")
        catalogues[key] = open_catalogue(file)
        catalogues[key].check(engine.model.tokenizer, engine.runner.vocab_size)
    return Served(name, engine, stepper.add(name, engine.service(), args.queue), args, catalogues)


def each_model(args: argparse.Namespace) -> dict[str, argparse.Namespace]:
    """The command line of each model by its name. Raises UsageError."""
    words = args.model or [None]
    if len(words) > 1 and args.memory is not None:
        raise UsageError("--memory is for one model", remedy="--kv-memory is shared by several")
    if len(words) > 1 and args.draft_store is not None:
        raise UsageError("--draft-store is for one model", remedy="leave it out, or serve one model")
    found: dict[str, argparse.Namespace] = {}
    template = None
    if args.rerank_template is not None:
        template = read_text(args.rerank_template, "the template")
        check_template(template)
    for word in words:
        name, folder = named(word)
        if name in found:
            raise UsageError(f"--model: two models have the name {name!r}", remedy="write NAME=DIR")
        each = copy.copy(args)
        each.model, each.rerank_template = folder, template
        each.max_new_tokens = min(args.max_new_tokens, args.max_tokens)
        if found:  # companions and adapters are the first one's
            each.draft = each.reward = None
            each.drafts = "off" if each.drafts == "model" else each.drafts
            each.adapter = []
        if args.kv_memory is not None:
            each.kv_memory = max(1, args.kv_memory // len(words))
        found[name] = each
    return found


def check(args: argparse.Namespace) -> None:
    """Check the ranges of flags. Raises UsageError."""
    for name, least, most in (("port", 0, 65535), ("queue", 0, 100_000), ("traces", 0, 10_000)):
        if not least <= (value := getattr(args, name)) <= most:
            raise UsageError(f"--{name}: expected an integer from {least} to {most}, got {value}")
    for name in ("timeout", "drain"):
        if not 0 < (value := getattr(args, name)) <= 1e6:
            raise UsageError(f"--{name}: expected seconds above 0, got {value:g}")


def read_keys(file: str | None) -> list[str]:
    """The keys of a file, or of the environment. Raises UsageError."""
    text = os.environ.get(KEY, "") if file is None else read_text(file, "the keys")
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if any(len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() for key in keys):
        remedy = "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"
        raise UsageError(f"a key has at least {LEAST_KEY} characters, all ASCII", where=file or KEY, remedy=remedy)
    if file is not None and not keys:
        raise UsageError("the file has no keys", where=file)
    return keys


def is_local(host: str) -> bool:
    """Whether an address can only be reached from this machine."""
    return host in ("localhost", "::1") or host.startswith("127.")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UsageError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason, *_ = reason_of(error).split(" (while")  # the address is named already
        raise UsageError(f"cannot listen on {host}, port {port}: {reason}", remedy="--port 0 takes any") from None


def address(listener: socket.socket) -> str:
    """The URL of a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def start_lines(app: "Application", listener: socket.socket) -> Iterator[str]:
    """The lines that the start prints."""
    for one in app.served.values():
        machine = one.engine.capabilities
        yield f"{one.name} loaded in {one.engine.load_seconds:.1f} s; {machine.precision}"
    yield f"serving on {address(listener)}"


def library(name: str) -> Any:
    """A package of the extra `serve`. Raises UsageError."""
    try:
        return importlib.import_module(name)
    except ImportError:
        raise UsageError(f"the server needs the package {name}", remedy="pip install starlette uvicorn") from None


def http_server(app: "Application", drain: float, verbose: bool = False) -> Any:
    """A `uvicorn.Server` for an application."""
    uvicorn = library("uvicorn")
    from engine.serve.connections import HttpServer, most_connections

    places = sum(one.lane.places for one in app.served.values())
    return HttpServer(
        uvicorn.Config(
            app,
            http="h11",
            ws="none",
            loop="asyncio",
            lifespan="off",
            log_level="info" if verbose else "critical",
            access_log=verbose,
            server_header=False,
            proxy_headers=False,
            timeout_keep_alive=IDLE_SECONDS,
            timeout_graceful_shutdown=max(1, round(drain)),
        ),
        most_connections(max(CONNECTIONS, 4 * places)),
        verbose,
    )
