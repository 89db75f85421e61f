"""The flags of `python -m engine.chat`. Imports no torch, so that `--help` and wrong flags are quick."""

from pathlib import Path

from engine.app import cli
from engine.words import OVERFLOW

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


def parser() -> cli.Parser:
    """Make the parser with all flags, in groups."""
    parser = cli.Parser("python -m engine.chat", DESCRIPTION, EPILOG, COMMON)
    add_chat_flags(parser)
    cli.add_load_flags(parser, "chat")
    cli.add_file_flags(parser)
    cli.add_template_flags(parser)
    cli.add_search_flags(parser)
    cli.add_limit_flags(parser)
    cli.add_generation_flag(parser)
    cli.add_rule_flags(parser)
    add_plan_flags(parser)
    cli.add_verbosity_flags(parser)
    return parser


def add_chat_flags(parser: cli.Parser) -> None:
    """Add the flags for what a chat reads, shows and saves."""
    group = parser.group("chat")
    prompts, add = group.add_mutually_exclusive_group(), group.add_argument
    prompts.add_argument("-p", "--prompt", metavar="TEXT", help="one reply to this and piped input; -: that alone")
    prompts.add_argument("--prompt-file", metavar="FILE", help="one reply to the text of a file; -: of piped input")
    add("--system", metavar="TEXT", help="system message, if the model has a chat template")
    text = "in a full context: drop the oldest turns, or refuse the new one (drop-turns)"
    add("--on-overflow", choices=OVERFLOW, default=OVERFLOW[0], help=text)
    add("--load", metavar="FILE", help="continue a saved conversation")
    add("--save", metavar="FILE", type=Path, help="save the conversation after each turn")
    text = "write for --load-prefix what all conversations with this --system begin with; without a chat template "
    add("--save-prefix", metavar="FILE", type=cli.output_file, help=f"{text}the one prompt")
    add("--show-beams", action="store_true", help="show live candidates under the text, on a terminal")
    add("--stats", action="store_true", help="print figures after each reply, on stderr")
    add("--json", action="store_true", help="print replies as JSON lines, as engine.batch does")
    cli.add_trace_flag(group)


def add_plan_flags(parser: cli.Parser) -> None:
    """Add --plan and --processes."""
    add = parser.group("machine").add_argument
    text = "print the memory that a model would take with --context tokens, --max-new-tokens of them the reply's"
    add("--plan", metavar="DIR", help=f"{text}, and exit")
    text = "processes that share the model; --plan counts the memory of one (1)"
    add("--processes", type=cli.positive, default=1, metavar="N", help=text)
