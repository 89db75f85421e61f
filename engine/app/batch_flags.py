"""The flags of `python -m engine.batch`, and those of every command that answers lines. Imports no torch, so that
`--help` and wrong flags are quick."""

import argparse
from collections.abc import Mapping
from typing import Any

from engine.app import cli
from engine.load.flags import without_effect
from engine.load.options import LoadOptions

DESCRIPTION = "Answer prompts: JSON Lines in, JSON Lines out, in input order, each line as soon as it is ready."
COMMON = """
--help --quiet --verbose --version
--input --output
--model --draft --reward --dtype --quant --device --threads --kv-memory --memory --parallel
--think --search --beams --length-penalty --num-return-sequences --temperature --top-k --top-p --seed
--max-new-tokens --stop --choice --json-schema --regex
"""  # flags of the short help of every command that answers lines
# Flags that decide no answer.
WITHOUT_EFFECT = without_effect(LoadOptions) | {"help", "quiet", "verbose", "version", "input", "output", "resume"}
WITHOUT_EFFECT |= {"trace", "shard", "load_prefix", "draft_store"}
EPILOG = """\
input, an object per line (blank lines are skipped):
  {"prompt": TEXT} or {"messages": [{"role", "content"}, ...]} or {"prompt_ids": [...]}, and if you like
  "id": a string or an integer, repeated in the answer (the record's number, from 0)
  "tools": with messages, a list of functions (JSON schemas) that the model may call
  "template": with messages, an object of variables for the chat template; "think": on, off or auto
  "response_format": as OpenAI has it: {"type": "json_schema", "json_schema": {"schema": ...}}, "json_object" or "text"
  "params": an object that overrides the command line for this line. Keys are the flags in snake_case (search, beams,
    max_new_tokens, stop, choices, parse_special, ...), eos_token_ids, a list, and sequence_bias, a list of
    [[id, ...], number]; json_schema and grammar are the schema, an object, and the grammar, a text. Other flags that
    name files are for the command line alone. A line that changes the search does not inherit the parameters of the
    command line that its search lacks.

  or {"prompt" or "prompt_ids": ..., "score": [TEXT or [id, ...], ...]}: continuations to score; nothing is generated
  or {"embed": TEXT or [id, ...]}: a text whose vector is wanted; params: pooling (mean, last), normalize, dimensions

output, an object per line:
  {"id", "outputs": [{"text", "token_ids", "logprob", "score", "finish_reason"}, ...], "stats": {...}}, best first, or
  with "reasoning" beside "text" where the model wrote a thought before the answer to messages, with "item", the item's
  id, where there is a --catalogue, with "token_logprobs" ([logprob, ...]) and "top_logprobs" ([[[id, logprob], ...],
  ...]) where there is --logprobs, or
  {"id", "scores": [{"logprob", "is_greedy", "token_ids", "token_logprobs"}, ...], "stats"} for "score", or
  {"id", "embedding": [number, ...], "stats"} for "embed", or
  {"id", "error": {"code", "message"}}; the run continues after it.

--resume keeps what FILE has, errors included, cuts off a torn last line, and continues with the next record. Give it
the same input and the same flags. In FILE an answer has also "record", a digest of its input line, and "flags", one of
the flags that decide answers (of model, prompts, search and replies, as they are written), by which --resume refuses
an input whose answered lines have changed, and other flags.

A fault of a search of your own is the error of its line, with the code "search"; -v shows its traceback. A line can
choose every search that the command line names (--search may be repeated), and loads none.

torchrun --nproc-per-node N -m engine.batch ... shares the models among N processes, one per GPU where there are any:
the first one reads the input, and writes; sizes of memory are those of each process.

exit codes: 0 every line was answered; 2 some line has an error for an answer, or wrong usage; 3 checkpoint; 4 memory;
  5 numerics; 6 another process has ended; 1 our bug; 130 interrupted; 141 closed pipe. Codes 3 to 6 are about the whole
  run, not about a line. torchrun itself returns 1 for each of them.
"""


def make_parser() -> cli.Parser:
    """Make the parser with its flags."""
    parser = cli.Parser("python -m engine.batch", DESCRIPTION, EPILOG, f"{COMMON} --resume --trace")
    group = parser.group("batch")
    group.add_argument("--input", default="-", metavar="FILE", help="JSON Lines to read; -: stdin (-)")
    group.add_argument("--output", default="-", metavar="FILE", help="new or empty file to write; -: stdout (-)")
    group.add_argument("--resume", action="store_true", help="continue where the output ends")
    cli.add_trace_flag(group)
    add_request_flags(parser, "batch")
    cli.add_file_flags(parser)
    cli.add_verbosity_flags(parser)
    return parser


def deciding(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that decide answers and differ from their defaults."""
    parser = make_parser()
    rest = {name: value for name, value in vars(args).items() if name not in WITHOUT_EFFECT}
    return {name: value for name, value in rest.items() if value != parser.get_default(name)}


def add_request_flags(parser: cli.Parser, command: str, **others: Mapping[str, Any]) -> None:
    """Add the flags of every command that answers lines; for the arguments see `add_load_flags`."""
    cli.add_load_flags(parser, command, **others)
    cli.add_template_flags(parser)
    cli.add_prompt_flags(parser)
    cli.add_search_flags(parser)
    cli.add_limit_flags(parser)
    cli.add_generation_flag(parser)
    cli.add_rule_flags(parser)
