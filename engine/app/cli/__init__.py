"""Shared by the command lines: the parser, flags in groups with their help, exit codes."""

# ruff: noqa: F401  (the names are for importers)
from typing import TYPE_CHECKING

from engine.app.cli.exits import INTERRUPTED, run, start
from engine.app.cli.loading import add_file_flags, add_load_flag, add_load_flags, load_options
from engine.app.cli.parser import Parser, add_search_flags, add_trace_flag, add_verbosity_flags, called
from engine.app.cli.prompts import add_prompt_flags, add_template_flags, template_options
from engine.app.cli.requests import add_generation_flag, add_limit_flags, add_rule_flags, limits, rules
from engine.app.cli.searches import search_params
from engine.app.cli.values import argument, output_file, parse_object, positive
from kernels.ending import CLOSED_PIPE, ended
from models.lazy import exports

if TYPE_CHECKING:
    from engine.app.cli.engines import fetch_models, kept_texts, load_engine

__getattr__ = exports(__name__, {"engine.app.cli.engines": "fetch_models kept_texts load_engine"})
