"""Golden answers of the demo by every search: `python -m tools.demo.golden` writes tests/golden/demo.json.

Computed in float32. A case is kept only if its tokens are the same in float64 and with noise on all logits and scores
that is a thousand times the differences between machines and thread counts, so that it holds on all of them.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from engine.app.cli import ended, output_file
from engine.demo import demo_folder
from models.later import import_now, later

with later():
    import torch

    import search  # noqa: F401 - fills the registry
    from engine import Engine, UsageError
    from engine.contract import SearchResult
    from engine.engine import Request
    from search.base import REGISTRY, make_search, parameters

GOLDEN = Path("tests/golden/demo.json")
PARAMS: dict[str, dict[str, Any]] = {  # small, so that runs are quick, and with different outputs
    "sample": {"temperature": 0.8, "seed": 7, "num_return_sequences": 2},
    "beam-sample": {"seed": 7},
    "speculative": {"seed": 7, "temperature": 0.8},
    "dsbd": {"seed": 7},
    "trie": {"beams": 4, "num_return_sequences": 2},
    "diverse": {"beams": 4, "diverse_groups": 2, "num_return_sequences": 4},
    "bon": {"bon_n": 6, "seed": 7},
    "sbon": {"sbon_n": 6, "sbon_tau": 4, "seed": 7},
    "ults": {"ults_budget": 60, "ults_samples": 100},
}
TALKS = (
    ["What is the opposite of hot?"],
    ["My name is Anna and I live in Rome.", "Nice to meet you, Anna!", "What is my name?"],
    ["Tell me a story about a fox."],
    ["What is 2 + 3?"],
    ["Name three fruits as a list."],
    ["Hello!"],
    ["What sound does a cow make?"],
    ["Who are you?"],
)
CASES, MAX_NEW_TOKENS, SHAKE = 3, 24, 1e-3


def load(dtype: str) -> Engine:
    """The bundled target with its draft and reward model."""
    draft, reward = demo_folder("draft"), demo_folder("reward")
    return Engine.load(demo_folder(), dtype=dtype, kv_memory=64 << 20, draft=draft, reward=reward)


def shake(engine: Engine) -> Engine:
    """Multiply each final hidden value by a random number close to one."""
    generator = torch.Generator().manual_seed(0)
    for part in (engine, *engine.companions.values()):
        weight = part.runner.model.norm.weight
        with torch.no_grad():
            weight.mul_(1 + SHAKE * torch.randn(weight.shape, generator=generator))
    return engine


def own_params(name: str) -> dict[str, Any]:
    """The parameters of golden cases that this search has."""
    return {key: value for key, value in PARAMS.get(name, {}).items() if key in parameters(name)}


def answer(engine: Engine, name: str, params: dict[str, Any], texts: list[str]) -> SearchResult:
    """The answer of a search to a conversation."""
    assert engine.template is not None
    messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(texts)]
    ids = engine.tokenizer.encode_rendered(engine.template.render(messages))
    request = Request(ids, make_search(name, params), max_new_tokens=MAX_NEW_TOKENS, messages=messages)
    [(_, result)] = engine.serve([request])
    if isinstance(result, Exception):
        raise result
    return result


def tokens(result: SearchResult) -> list[list[int]]:
    """Tokens of all outputs."""
    return [output.token_ids for output in result.outputs]


def cases(name: str, engines: list[Engine]) -> list[dict[str, Any]]:
    """The first conversations to which all engines give the same answer."""
    params, found = own_params(name), []
    for texts in TALKS:
        results = [answer(engine, name, params, texts) for engine in engines]
        if len(found) < CASES and all(tokens(result) == tokens(results[0]) for result in results):
            outputs = [
                {
                    "text": o.text,
                    "token_ids": o.token_ids,
                    "logprob": o.logprob,
                    "score": o.score,
                    "end": o.finish_reason,
                }
                for o in results[0].outputs
            ]
            found.append({"texts": texts, "params": params, "outputs": outputs})
    if not found:
        raise UsageError(f"{name}: no conversation has an answer that is the same on every machine")
    return found


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo.golden", description=__doc__)
    parser.add_argument("--output", type=output_file, default=GOLDEN, help=f"({GOLDEN})")
    args = parser.parse_args(argv)
    import_now()
    engines = [load("float32"), load("float64"), shake(load("float32"))]
    golden = {}
    for name in sorted(REGISTRY):
        golden[name] = cases(name, engines)
        print(f"{name}: {len(golden[name])} cases", file=sys.stderr)
    text = json.dumps(golden, indent=1, ensure_ascii=False)
    args.output.write_text(text + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
