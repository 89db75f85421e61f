"""The flags of `python -m engine.serve`. Imports no torch, so that `--help` and wrong flags are quick."""

import argparse
import os
from pathlib import Path

from engine.app import cli
from engine.demo import is_demo
from engine.load.sizes import read_size
from engine.words import POOLINGS
from models.folders import HubName, name_of

DESCRIPTION = "Serve models by OpenAI's HTTP interface: searches of all kinds and widths share each pass."
EPILOG = """\
GET /v1/models, POST /v1/completions, /v1/chat/completions, /v1/responses, /v1/embeddings: as OpenAI's clients speak
  them, with "search" and the parameters of every search besides (flags in snake_case); POST /v1/rerank as Cohere's and
  Jina's do; GET / chats in a browser, GET /trace/ID shows the tree of a request with "trace": true, GET /metrics is
  for Prometheus, GET /health for monitoring. docs/serving.md explains.

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
KEY = "COPPICE_API_KEY"  # environment variable


def make_parser() -> cli.Parser:
    """Make the parser with its flags."""
    parser = cli.Parser("python -m engine.serve", DESCRIPTION, EPILOG, COMMON)
    add_server_flags(parser)
    text = "folder, GGUF file or name on the hub; repeatable, companions are the first one's (the demo)"
    cli.add_load_flags(parser, "serve", folder={"action": "append", "metavar": "[NAME=]DIR", "help": text})
    cli.add_file_flags(parser)
    cli.add_template_flags(parser)
    cli.add_prompt_flags(parser)
    cli.add_search_flags(parser, "sample")
    cli.add_limit_flags(parser)
    cli.add_generation_flag(parser)
    cli.add_verbosity_flags(parser)
    return parser


def add_server_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags for where the server listens, who may use it, and how much they may ask for."""
    add = parser.add_argument_group("server").add_argument
    add("--host", default="127.0.0.1", metavar="ADDRESS", help="address to listen on (%(default)s)")
    add("--port", type=int, default=8000, metavar="N", help="port to listen on; 0: any free one (%(default)s)")
    add("--api-key-file", metavar="FILE", help=f"bearer keys, one per line (the variable {KEY})")
    add("--open", action="store_true", help="serve other machines without a key")
    text, many = 'catalogue that requests name by "catalogue"; repeatable', {"action": "append", "default": []}
    add("--catalogue", dest="catalogues", **many, metavar="NAME=FILE", help=text)
    text = "of embeddings; auto: as the checkpoint says, else mean (%(default)s)"
    add("--pooling", choices=("auto", *POOLINGS), default="auto", help=text)
    text = "text that reranking reads for a pair, with {query} and {document} (the chat template's)"
    add("--rerank-template", metavar="FILE", help=text)
    add("--strict", action="store_true", help="refuse unknown fields, which are ignored otherwise")
    add("--traces", type=int, default=32, metavar="N", help="traces to keep (%(default)s)")
    add = parser.add_argument_group("limits of the server").add_argument
    add("--queue", type=int, default=64, metavar="N", help="requests that may wait; others get 429 (%(default)s)")
    add("--timeout", type=float, default=600, metavar="S", help="seconds that a request may take (%(default)s)")
    size = cli.argument(read_size)
    add("--max-body", type=size, default=4 << 20, metavar="SIZE", help="limit of the size of a request (4M)")
    add("--max-prompt", type=cli.positive, metavar="N", help="limit of the tokens of a prompt (the context)")
    add("--max-tokens", type=cli.positive, default=4096, metavar="N", help="limit of new tokens (%(default)s)")
    add("--max-width", type=cli.positive, default=64, metavar="N", help="limit of sequences of a search (%(default)s)")
    add("--drain", type=float, default=60, metavar="S", help="seconds to answer what runs at the end (%(default)s)")


def named(word: str | None) -> tuple[str, str | None]:
    """The name and the folder of a --model."""
    if word is None:
        return "demo", None
    name, equals, folder = word.partition("=")
    if equals and name and not os.path.exists(word):
        return name, folder
    hub = not os.path.lexists(word) and HubName.parse(word)
    return "demo" if is_demo(word) else str(hub) if hub else name_of(Path(word)), word
