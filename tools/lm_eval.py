"""`python -m tools.lm_eval`: lm-evaluation-harness on this engine; needs lm-eval. See docs/scoring.md.

Requests that share a context form one tree: the question of a multiple choice is evaluated once.
"""

import argparse
import functools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from engine.app import cli
from engine.errors import UsageError
from models.later import later

with later():
    from engine import CoppiceError, Engine, Request
    from engine.request import score_request
    from search import Greedy, Sample

Ids = Sequence[int]
NEW_TOKENS = 256  # default length of a generated answer


def loglikelihoods(engine: Engine, pairs: Sequence[tuple[Ids, Ids]]) -> list[tuple[float, bool]]:
    """For each context and continuation the log-probability of the continuation, and whether it is greedy.

    Texts longer than the model's context are cut off on the left, as the harness does. Raises CoppiceError.
    """
    reach, groups = engine.shape.max_positions, dict[tuple[int, ...], dict[tuple[int, ...], list[int]]]()
    for i, (context, continuation) in enumerate(pairs):
        whole = [*context, *continuation]
        whole = whole if reach is None else whole[-(reach + 1) :]
        border = max(1, len(whole) - len(continuation))
        groups.setdefault(tuple(whole[:border]), {}).setdefault(tuple(whole[border:]), []).append(i)
    found: list[tuple[float, bool]] = [(0.0, True)] * len(pairs)
    members = [*groups.items()]
    for g, outcome in engine.serve(score_request(engine.model, prompt, [*each]) for prompt, each in members):
        if isinstance(outcome, CoppiceError):
            raise outcome
        for places, score in zip(members[g][1].values(), outcome.scores or [], strict=True):
            for i in places:
                found[i] = score.logprob, score.is_greedy
    return found


def answers(engine: Engine, prompts: Sequence[tuple[Ids, Mapping[str, Any]]]) -> list[str]:
    """Generated texts for prompts with the harness's arguments, each without the stop text that ended it.

    Raises CoppiceError.
    """

    def requests() -> Iterator[Request]:
        for ids, arguments in prompts:
            until = arguments.get("until") or []
            new = int(arguments.get("max_gen_toks", NEW_TOKENS))
            kept = ids if engine.shape.max_positions is None else ids[-max(1, engine.shape.max_positions - new) :]
            temperature = float(arguments.get("temperature", 0.0)) if arguments.get("do_sample") else 0.0
            search = Sample(temperature=temperature) if temperature else Greedy()
            yield Request(list(kept), search, new, stop=[until] if isinstance(until, str) else list(until))

    texts = [""] * len(prompts)
    for i, outcome in engine.serve(requests()):
        if isinstance(outcome, CoppiceError):
            raise outcome
        texts[i] = outcome.outputs[0].text
    return texts


@functools.cache
def model_class() -> Any:
    """The harness's class of models. Raises UsageError if the harness is not installed."""
    try:
        from lm_eval import utils  # type: ignore[import-not-found]
        from lm_eval.api.model import TemplateLM  # type: ignore[import-not-found]
    except ImportError as error:
        raise UsageError(f"lm-evaluation-harness cannot be loaded: {error}", remedy="pip install lm-eval") from error

    class HarnessModel(TemplateLM):
        """A model of lm-evaluation-harness that an engine evaluates."""

        def __init__(self, engine: Engine):
            super().__init__()
            self.engine = engine

        @property
        def eot_token_id(self) -> int:
            return min(self.engine.eos_token_ids)

        @property
        def prefix_token_id(self) -> int:
            return self.engine.start_token

        @property
        def max_length(self) -> int:
            return self.engine.shape.max_positions or 1 << 20

        @property
        def tokenizer_name(self) -> str:
            return self.engine.name

        def tok_encode(self, string: str, add_special_tokens: bool | None = None, **options: Any) -> list[int]:
            encode = functools.partial(self.engine.tokenizer.encode, string, parse_special=True)
            bare = encode(add_special=False)
            begun = add_special_tokens is None and bare[:1] == [self.prefix_token_id]
            return bare if begun or add_special_tokens is False else encode(add_special=True)

        def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
            template = self.engine.template
            if template is None:
                raise UsageError("this model has no chat template", where=self.engine.name)
            spans = template.render(chat_history, add_generation_prompt=add_generation_prompt)
            return "".join(text for text, _ in spans)

        def chat_template(self, chat_template: bool | str = False) -> str | None:
            return self.engine.template.source if chat_template and self.engine.template is not None else ""

        def _loglikelihood_tokens(self, requests: Any, **options: Any) -> list[tuple[float, bool]]:
            return loglikelihoods(self.engine, [(context, continuation) for _, context, continuation in requests])

        def loglikelihood_rolling(self, requests: Any, disable_tqdm: bool = False) -> list[float]:
            windows, owners = [], []
            for i, request in enumerate(requests):
                tokens = self.tok_encode(request.args[0])
                for window in utils.get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, 1):
                    windows.append(utils.make_disjoint_window(window))
                    owners.append(i)
            sums = [0.0] * len(requests)
            for i, (logprob, _) in zip(owners, loglikelihoods(self.engine, windows), strict=True):
                sums[i] += logprob
            return sums

        def generate_until(self, requests: Any, disable_tqdm: bool = False) -> list[str]:
            return answers(self.engine, [(self.tok_encode(text), given) for text, given in (r.args for r in requests)])

    return HarnessModel


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    parser = argparse.ArgumentParser(prog=cli.called("python -m tools.lm_eval"), description=__doc__)
    parser.add_argument("--model", required=True, metavar="DIR", help="a checkpoint's folder")
    parser.add_argument("--tasks", required=True, metavar="NAME,...", help="tasks of the harness, or of --include-path")
    parser.add_argument("--include-path", metavar="DIR", help="folder of further tasks")
    parser.add_argument("--num-fewshot", type=int, metavar="N", help="examples before each question (the task's)")
    parser.add_argument("--limit", type=float, metavar="N", help="questions of each task, or their part below 1")
    parser.add_argument("--apply-chat-template", action="store_true", help="ask in the model's chat template")
    parser.add_argument("--dtype", default="auto", help="(auto)")
    parser.add_argument("--quant", default="none", help="(none)")
    parser.add_argument("--activations", default="auto", help="auto or int8 (auto)")
    parser.add_argument("--threads", type=int, metavar="N")
    parser.add_argument("--output", type=cli.output_file, metavar="FILE", help="all results, as JSON")
    parser.add_argument("-v", "--verbose", action="store_true", help="show where an error comes from")
    args = parser.parse_args(argv)

    def work() -> int:
        kind = model_class()
        from lm_eval import evaluator, tasks, utils  # type: ignore[import-not-found]

        formats = {"dtype": args.dtype, "quant": args.quant, "activations": args.activations}
        engine = Engine.load(args.model, threads=args.threads, **formats)
        manager = tasks.TaskManager(include_path=args.include_path)
        results = evaluator.simple_evaluate(
            kind(engine), tasks=args.tasks.split(","), num_fewshot=args.num_fewshot, limit=args.limit,
            task_manager=manager, apply_chat_template=args.apply_chat_template,
        )  # fmt: skip
        print(utils.make_table(results))
        if args.output is not None:
            Path(args.output).write_text(json.dumps(results, default=str, indent=2) + "\n", encoding="utf-8")
        return 0

    return cli.run(work, args.verbose)


if __name__ == "__main__":
    sys.exit(cli.ended(main))
