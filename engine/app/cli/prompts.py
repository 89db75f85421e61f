"""The flags of prompts: template variables, and how text is tokenised."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from engine.app.cli.parser import Parser
from engine.app.cli.values import parse_json, plain_text, read_text
from engine.errors import UsageError
from engine.words import THINK

if TYPE_CHECKING:
    from engine.text.template import TemplateOptions


def add_template_flags(parser: Parser) -> None:
    """Add --think, --tools and --template-var, which are refused if the chat template has no such variable."""
    add = parser.group("prompts").add_argument
    add("--think", choices=THINK, default="auto", help="think before the answer (as the template does)")
    add("--tools", metavar="FILE", help="JSON list of functions (schemas) that the model may call")
    options: dict[str, Any] = {"type": template_variable, "action": "append", "default": [], "metavar": "NAME=JSON"}
    add("--template-var", **options, help="a variable of the chat template; repeatable")


def add_prompt_flags(parser: Parser) -> None:
    """Add --parse-special."""
    text = "in text that is no message, spellings of control tokens are these tokens"
    parser.group("prompts").add_argument("--parse-special", action="store_true", help=text)


def template_options(args: argparse.Namespace) -> TemplateOptions:
    """The options of the chat template that the flags give. Raises UsageError."""
    from engine.text.template import TemplateOptions  # here, because flags alone do not need it

    tools = None if args.tools is None else read_tools(args.tools)
    return TemplateOptions(tools, dict(args.template_var), args.think)


def read_tools(path: str) -> list[dict[str, Any]]:
    """The tools (functions) that a file describes. Raises UsageError."""
    text = read_text(path, "the tools")
    try:
        tools = parse_json(text.encode())
        if not isinstance(tools, list) or not all(isinstance(tool, dict) for tool in tools):
            raise ValueError("expected a JSON list of objects, a function's schema each")
    except ValueError as error:
        raise UsageError(f"cannot read the tools: {error}", where=path) from None
    return tools


def template_variable(text: str) -> tuple[str, Any]:
    """A name and a JSON value; a value that is no JSON is a string. An argparse type."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise argparse.ArgumentTypeError(f"expected NAME=JSON, got {text!r}")
    try:
        return name, parse_json(value.encode())
    except ValueError:
        return name, plain_text(value)
