"""The flags of prompts: template variables, and how text is tokenised."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from engine.app.cli.parser import Parser
from engine.app.cli.values import parse_object, plain_text
from engine.errors import UsageError
from engine.words import THINK
from models.checkpoint.files import open_regular

if TYPE_CHECKING:
    from engine.text.prompting import TemplateOptions

MAX_TOOLS = 16 << 20


def add_template_flags(parser: Parser) -> None:
    """Add --think, --tools and --template-var, which are refused if the chat template has no such variable."""
    group = parser.group("prompts")
    group.add_argument("--think", choices=THINK, default="auto", help="think before the answer (as the template does)")
    group.add_argument("--tools", metavar="FILE", help="JSON list of functions (schemas) that the model may call")
    group.add_argument(
        "--template-var",
        metavar="NAME=JSON",
        type=template_variable,
        action="append",
        default=[],
        help="a variable of the chat template; repeatable",
    )


def add_prompt_flags(parser: Parser) -> None:
    """Add --parse-special."""
    group = parser.group("prompts")
    group.add_argument(
        "--parse-special",
        action="store_true",
        help="in text that is no message, spellings of control tokens are these tokens",
    )


def template_options(args: argparse.Namespace) -> TemplateOptions:
    """The options of the chat template that the flags give. Raises UsageError."""
    from engine.text.prompting import TemplateOptions  # here, because flags alone do not need it

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
    """The tools (functions) that a file describes. Raises ValueError."""
    if len(data) > MAX_TOOLS:
        raise ValueError(f"the file is larger than {MAX_TOOLS >> 20} MB")
    tools = parse_object(b'{"tools": ' + data + b"}").get("tools")
    if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
        raise ValueError("expected a JSON list of objects, a function's schema each")
    return tools


def template_variable(text: str) -> tuple[str, Any]:
    """A name and a JSON value; a value that is no JSON is a string. An argparse type."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=JSON, got {text!r}")
    try:
        return name, parse_object(b'{"value": ' + value.encode() + b"}")["value"]
    except (ValueError, KeyError):
        return name, plain_text(value)
