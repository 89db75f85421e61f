"""`python -m engine.serve`: flags, loading, the start and the end of the server."""

import argparse
import asyncio
import contextlib
import copy
import importlib
import itertools
import os
import socket
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from engine.app.cli import (
    Parser,
    add_limit_flags,
    add_load_flags,
    add_prefix_flags,
    add_prompt_flags,
    add_search_flags,
    add_template_flags,
    add_verbosity_flags,
    load_engine,
    parse_size,
    positive,
    run,
    search_params,
)
from engine.contract.embedding import POOLINGS
from engine.demo import is_demo
from engine.errors import UsageError
from engine.load.distributed import check_alone
from engine.load.hub import HubName
from engine.ranking import check_template
from engine.rules.catalogue import open_catalogue
from engine.serve.limits import Limits
from engine.serve.metrics import Metrics
from engine.serve.served import Served
from engine.serve.stepper import Stepper
from models.checkpoint.files import read_regular
from models.folders import name_of
from models.trim import share_heap
from search.base import make_search

if TYPE_CHECKING:
    from engine.serve.http import Application

DESCRIPTION = "Serve models by OpenAI's HTTP interface: searches of all kinds and widths share each pass."
EPILOG = """\
GET /v1/models, POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/embeddings: as OpenAI's clients speak
  them, with "search" and the parameters of every search besides (flags in snake_case); POST /v1/rerank as Cohere's and
  Jina's do; GET / chats in a browser, GET /trace/ID shows the tree of a request with "trace": true, GET /metrics is
  for Prometheus, GET /health for whoever watches. docs/serving.md explains.

A key is read from --api-key-file, a key per line, or from the environment variable COPPICE_API_KEY. Without one only
this machine is served.

SIGTERM and Ctrl-C end the server when its requests are answered, or after --drain seconds.

exit codes: 0 it was ended; 2 wrong usage, or the port is taken; 3 checkpoint; 4 memory; 1 our bug.
"""
COMMON = """
--help --quiet --verbose --version
--host --port --api-key-file --open --catalogue --queue --timeout --max-tokens --max-width --drain
--model --draft --reward --dtype --quant --device --threads --kv-memory --memory --parallel
--think --search --beams --temperature --top-k --top-p --max-new-tokens
"""  # flags of the short help
KEY = "COPPICE_API_KEY"
LEAST_KEY = 16  # characters
MAX_KEYS = 1 << 20  # bytes of a file of keys, or of a template
CONNECTIONS = 1024  # at once, where there are so many file descriptors
IDLE_SECONDS = 15  # that a connection stays open without a request


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Returns the exit code."""
    args = make_parser().parse_args(argv)
    share_heap()
    return run(lambda: serve(args), args.verbose, args.quiet)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("python -m engine.serve", DESCRIPTION, EPILOG, COMMON)
    add_server_flags(parser)
    text = "folder, GGUF file or name on the hub; repeatable, companions are the first one's (the demo)"
    add_load_flags(parser, "serve", folder={"action": "append", "metavar": "[NAME=]DIR", "help": text})
    add_prefix_flags(parser)
    add_template_flags(parser)
    add_prompt_flags(parser)
    add_search_flags(parser, "sample")
    add_limit_flags(parser)
    add_verbosity_flags(parser)
    return parser


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Flags of where the server listens, who may ask, and for how much."""
    group = parser.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (%(default)s)")
    group.add_argument(
        "--port", type=int, default=8000, metavar="N", help="port to listen on; 0: any free one (%(default)s)"
    )
    group.add_argument("--api-key-file", metavar="FILE", help=f"bearer keys, one per line (the variable {KEY})")
    group.add_argument("--open", action="store_true", help="serve other machines without a key")
    group.add_argument(
        "--catalogue",
        dest="catalogues",
        action="append",
        default=[],
        metavar="NAME=FILE",
        help='catalogue that requests name by "catalogue"; repeatable',
    )
    group.add_argument(
        "--pooling",
        choices=("auto", *POOLINGS),
        default="auto",
        help="of embeddings; auto: as the checkpoint says, else mean (%(default)s)",
    )
    group.add_argument(
        "--rerank-template",
        metavar="FILE",
        help="what a query and a document are read in by reranking: a text with {query} and {document}",
    )
    group.add_argument("--strict", action="store_true", help="refuse unknown fields, which are ignored otherwise")
    group.add_argument("--traces", type=int, default=32, metavar="N", help="traces to keep (%(default)s)")
    group = parser.add_argument_group("limits of the server")
    group.add_argument(
        "--queue", type=int, default=64, metavar="N", help="requests that may wait; others get 429 (%(default)s)"
    )
    group.add_argument(
        "--timeout", type=float, default=600, metavar="S", help="seconds that a request may take (%(default)s)"
    )
    group.add_argument(
        "--max-body", type=parse_size, default=4 << 20, metavar="SIZE", help="limit of the size of a request (4M)"
    )
    group.add_argument("--max-prompt", type=positive, metavar="N", help="limit of the tokens of a prompt (the context)")
    group.add_argument(
        "--max-tokens", type=positive, default=4096, metavar="N", help="limit of new tokens (%(default)s)"
    )
    group.add_argument(
        "--max-width", type=positive, default=64, metavar="N", help="limit of sequences of a search (%(default)s)"
    )
    group.add_argument(
        "--drain", type=float, default=60, metavar="S", help="seconds to answer what runs at the end (%(default)s)"
    )


def serve(args: argparse.Namespace) -> int:
    """Load the models, and serve until a signal ends it. Raises CoppiceError."""
    check_alone("engine.serve")
    library("starlette")
    library("uvicorn")
    make_search(args.search, search_params(args))  # checks the command line before anything is loaded
    check(args)
    keys = read_keys(args.api_key_file)
    if not keys and not args.open and not is_local(args.host):
        remedy = f"--api-key-file FILE or the variable {KEY}; --open serves whoever reaches it"
        raise UsageError(f"--host {args.host}: other machines need a key", remedy=remedy)
    listener = listen(args.host, args.port)
    with contextlib.closing(listener), application(args, keys) as app:
        if not args.quiet:
            print(*started(app, listener), sep="\n", file=sys.stderr, flush=True)
        asyncio.run(http_server(app, args.drain, args.verbose).serve([listener]))
    return 0


@contextlib.contextmanager
def application(args: argparse.Namespace, keys: Sequence[str] = ()) -> Iterator["Application"]:
    """The models of the flags, loaded, as an ASGI application; at the end of the block its threads end."""
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
    stepper.start()
    try:
        yield Application(served, stepper, limits, keys=keys, hosts=hosts, traces=args.traces, verbose=args.verbose)
    finally:
        stepper.stop()


def load(name: str, args: argparse.Namespace, stepper: Stepper) -> Served:
    """A model, and the catalogues of the flags. Raises CoppiceError."""
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
    found: dict[str, argparse.Namespace] = {}
    template = None if args.rerank_template is None else read_template(args.rerank_template)
    for word in words:
        name, folder = named(word)
        if name in found:
            raise UsageError(f"--model: two models have the name {name!r}", remedy="write NAME=DIR")
        each = copy.copy(args)
        each.model, each.rerank_template = folder, template
        if found:  # companions and adapters are the first one's
            each.draft = each.reward = None
            each.adapter = []
        if args.kv_memory is not None:
            each.kv_memory = max(1, args.kv_memory // len(words))
        found[name] = each
    return found


def named(word: str | None) -> tuple[str, str | None]:
    """The name and the folder of a --model."""
    if word is None:
        return "demo", None
    name, equals, folder = word.partition("=")
    if equals and name and not os.path.exists(word):
        return name, folder
    hub = not os.path.lexists(word) and HubName.parse(word)
    return "demo" if is_demo(word) else str(hub) if hub else name_of(Path(word)), word


def check(args: argparse.Namespace) -> None:
    """Check the ranges of flags. Raises UsageError."""
    for name, least, most in (("port", 0, 65535), ("queue", 0, 100_000), ("traces", 0, 10_000)):
        if not least <= (value := getattr(args, name)) <= most:
            raise UsageError(f"--{name}: expected an integer from {least} to {most}, got {value}")
    for name in ("timeout", "drain"):
        if not 0 < (value := getattr(args, name)) <= 1e6:
            raise UsageError(f"--{name}: expected seconds above 0, got {value:g}")


def read_template(file: str) -> str:
    """The template of pairs in a file. Raises UsageError."""
    try:
        text = read_regular(file, MAX_KEYS).decode()
    except OSError as error:
        raise UsageError(f"cannot read the template: {error.strerror}", where=file) from None
    except ValueError:
        raise UsageError("the template is no UTF-8", where=file) from None
    check_template(text)
    return text


def read_keys(file: str | None) -> list[str]:
    """The keys of a file, or of the environment. Raises UsageError."""
    where = KEY
    if file is None:
        text = os.environ.get(KEY, "")
    else:
        where = file
        try:
            text = read_regular(file, MAX_KEYS).decode("ascii")
        except OSError as error:
            raise UsageError(f"cannot read the keys: {error.strerror}", where=file) from None
        except ValueError:
            raise UsageError("keys are ASCII", where=file) from None
    keys = [line.strip() for line in text.splitlines() if line.strip()]
    if any(len(key) < LEAST_KEY or not key.isascii() or not key.isprintable() for key in keys):
        remedy = "python -c 'import secrets; print(secrets.token_urlsafe(32))' makes one"
        raise UsageError(f"a key has at least {LEAST_KEY} characters, all ASCII", where=where, remedy=remedy)
    if file is not None and not keys:
        raise UsageError("the file has no keys", where=file)
    return keys


def is_local(host: str) -> bool:
    """Whether an address is reached from this machine alone."""
    return host in ("localhost", "::1") or host.startswith("127.")


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens. Raises UsageError."""
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=1024)
    except (OSError, OverflowError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"cannot listen on {host}, port {port}: {reason}", remedy="--port 0 takes any") from None


def address(listener: socket.socket) -> str:
    """The URL of a socket."""
    host, port = listener.getsockname()[:2]
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def started(app: "Application", listener: socket.socket) -> Iterator[str]:
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
        raise UsageError(f"the server needs the package {name}", remedy="pip install 'coppice[serve]'") from None


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


@contextlib.contextmanager
def background(app: "Application", host: str = "127.0.0.1", port: int = 0, drain: float = 10.0) -> Iterator[str]:
    """Serve an application in a thread for the time of the block, and give its URL."""
    listener = listen(host, port)
    server = http_server(app, drain)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve([listener])), name="serve", daemon=True)
    thread.start()
    try:
        yield address(listener)
    finally:
        server.should_exit = True
        thread.join()
        listener.close()
