"""The flags of requests: their limits and their constraints, as options of `engine.Request`."""

import argparse
from typing import Any

from engine.app.cli.parser import Parser
from engine.app.cli.values import bias, json_file, plain_text, positive, text_file, token_ids
from engine.words import DISTINCT, SCORES

REPLIES = "replies"  # limits, and which tokens may come next: docs/constraints.md


def add_limit_flags(parser: Parser) -> None:
    """Add the flags of limits, which `limits` reads."""
    add = parser.group(REPLIES).add_argument
    add("--max-new-tokens", type=positive, default=256, metavar="N", help="limit of each output (256)")
    add("--stop", type=plain_text, action="append", default=[], metavar="TEXT", help="end before it; repeatable")
    add("--ignore-eos", action="store_true", help="no token ends an output")
    text = "log-probabilities of tokens, and the K likeliest at each place"
    add("--logprobs", type=int, metavar="K", help=text)
    text = "of outputs of one text return the best; text-sum: it stands for all of them, which are added"
    add("--distinct", choices=DISTINCT, help=text)


def add_generation_flag(parser: Parser) -> None:
    """Add --generation-config, which `load_engine` reads."""
    text = "where no flag gives a value, take the checkpoint's default for generation, as transformers does"
    parser.group(REPLIES).add_argument("--generation-config", action="store_true", help=text)


def add_rule_flags(parser: Parser) -> None:
    """Add the flags of `engine.Rules`, except those for functions (Python only) and for sequences of several tokens."""
    texts: dict[str, Any] = {"type": plain_text, "action": "append", "metavar": "TEXT"}
    add = parser.group(REPLIES).add_argument
    add("--begin", type=plain_text, metavar="TEXT", help="a text that begins with this")
    add("--choice", **texts, dest="choices", help="one of these texts; repeatable")
    add("--catalogue", metavar="FILE", help="an item of a catalogue that tools.catalogue made")
    add("--json-schema", type=json_file, metavar="FILE", help="JSON of this schema")
    add("--regex", type=plain_text, metavar="PATTERN", help="what this pattern matches")
    add("--grammar", type=text_file, metavar="FILE", help="a text of this grammar (Lark or GBNF)")
    text = "scores of the tokens that are left: the model's, or made to add up to 1 (model)"
    add("--constraint-scores", choices=SCORES, help=text)
    add("--logit-bias", type=bias, action="append", metavar="ID=X", help="add X to a token's score; repeatable")
    add("--bad-word", **texts, dest="bad_words", help="a text that never occurs; repeatable")
    text = "divide the scores of tokens that occurred; above 1 discourages them (1)"
    add("--repetition-penalty", type=float, metavar="X", help=text)
    text = "subtract X from a token's score for each time that it occurred in the reply (0)"
    add("--frequency-penalty", type=float, metavar="X", help=text)
    add("--presence-penalty", type=float, metavar="X", help="subtract X once if it occurred (0)")
    text = "subtract X * base ** (n - length) from a token that would make a repetition longer than n tokens (0)"
    add("--dry-multiplier", type=float, metavar="X", help=text)
    add("--dry-base", type=float, metavar="X", help="the base of that (1.75)")
    add("--dry-allowed-length", type=int, metavar="N", help="repetitions of fewer tokens are free (2)")
    text = "look for them among the last N tokens; -1: among all (-1)"
    add("--dry-penalty-last-n", type=int, metavar="N", help=text)
    text = 'a text that no repetition reaches over; repeatable (end of line, :, ", *)'
    add("--dry-sequence-breaker", **texts, dest="dry_sequence_breakers", help=text)
    text = "no N tokens in a row occur twice; 0: they may (0)"
    add("--no-repeat-ngram-size", type=int, metavar="N", help=text)
    add("--min-new-tokens", type=int, metavar="N", help="least tokens of a reply (0)")
    add("--min-length", type=int, metavar="N", help="least tokens of prompt and reply together (0)")
    add("--suppress-tokens", type=token_ids, metavar="ID,...", help="tokens that never occur")
    add("--begin-suppress-tokens", type=token_ids, metavar="ID,...", help="tokens that do not come first")


def limits(args: argparse.Namespace) -> dict[str, Any]:
    """The limits as options of `engine.Request`. Raises UsageError."""
    from engine.rules.logprobs import check_logprobs  # here, because it needs torch

    found = {"max_new_tokens": args.max_new_tokens, "stop": tuple(args.stop), "ignore_eos": args.ignore_eos}
    optional = {name: getattr(args, name, None) for name in ("logprobs", "distinct")}  # not all commands have them
    check_logprobs(optional["logprobs"])
    return found | {name: value for name, value in optional.items() if value is not None}


def rules(args: argparse.Namespace) -> dict[str, Any]:
    """The given constraints as options of `engine.Request`. Raises UsageError."""
    from engine.rules import RULES, Rules  # here, because it needs torch

    given = {name: value for name in RULES if (value := getattr(args, name, None)) is not None}
    if "logit_bias" in given:
        given["logit_bias"] = dict(given["logit_bias"])
    Rules(**given).check()
    return given
