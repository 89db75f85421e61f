"""A process of those that share models, for test_distributed.py: runs golden models and writes what it found.

    python shards.py FOLDER [VARIANT ...]

A variant that cannot be divided is written as its error. Each process writes FOLDER/RANK.json.
"""

import json
import sys
from pathlib import Path

import torch

from engine import Engine
from engine.errors import CoppiceError
from engine.load.distributed import together
from search import Greedy, Sample, Trie

GOLDEN = Path(__file__).parent.parent / "golden"


def chosen(golden):
    """The first greedy run and the first beam search of a variant."""
    greedy, beams = ([run for run in golden["runs"] if run["search"] == search] for search in ("greedy", "trie"))
    return [*greedy[:1], *beams[:1]]


def search_of(run):
    if run["search"] == "greedy":
        return Greedy()
    names = ("beams", "length_penalty", "early_stopping", "num_return_sequences")
    return Trie(**{name: run[name] for name in names})


def options_of(run):
    return {name: run[name] for name in ("max_new_tokens", "eos_token_ids", "ignore_eos")}


def answers(engine, golden):
    """Tokens and log-probabilities of the chosen runs, and of samples, whose rows are gathered."""
    found, prompts = [], [golden["logits"][0]["prompt_ids"]]
    for run in chosen(golden):
        found += engine.generate([run["prompt_ids"]], search_of(run), **options_of(run))
    found += engine.generate(prompts, Sample(num_return_sequences=2, seed=5), max_new_tokens=4)
    return [[(output.token_ids, output.logprob) for output in result.outputs] for result in found]


def one(variant, shard):
    """The answers of a variant, and the most numbers that a beam search gathered at once."""
    golden = json.loads((GOLDEN / variant / "golden.json").read_text())
    engine = Engine.load(GOLDEN / variant, dtype="float32", device="cpu", kv_memory="1M", shard=shard)
    if "scores" in golden:
        return {"scores": engine.scores([entry["prompt_ids"] for entry in golden["scores"]])}
    sizes, gather = [0], shard.gather
    shard.gather = lambda x: sizes.append(x.numel()) or gather(x)
    engine.generate([golden["logits"][0]["prompt_ids"]], Trie(beams=4), max_new_tokens=4, ignore_eos=True)
    shard.gather = gather
    logits = engine.logits(golden["logits"][0]["prompt_ids"])[-1].tolist()
    found = {"answers": answers(engine, golden), "logits": logits, "gathered": max(sizes)}
    return found | {"slot": engine.pool.bytes_per_token}


def main(folder, *variants):
    found = {}
    with together("cpu", timeout=300) as shard:
        for variant in variants:
            try:
                found[variant] = one(variant, shard)
            except CoppiceError as error:
                found[variant] = {"error": str(error)}
        Path(folder, f"{shard.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(*sys.argv[1:])
