"""Golden file of `patience`: beam search of CTranslate2 on the bundled model, whose weights are converted here.

Run from the repository's root in an environment that has ctranslate2 as well:

    python -m tools.make_golden_patience

Writes `tests/golden/patience.json`: prompts, the arguments of searches, and their outputs. A case is kept only if noise
of 1e-4 in the last layer changes no token. Two settings are left out: one beam, for which CTranslate2 runs another
algorithm, and the length penalty 0, with which it stops as soon as the best candidate has ended, whatever the patience.
"""

import argparse
import json
import random
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ctranslate2  # type: ignore[import-not-found]
import torch
from ctranslate2.converters import utils  # type: ignore[import-not-found]
from ctranslate2.specs import common_spec, transformer_spec  # type: ignore[import-not-found]
from torch import Tensor

from models.checkpoint.headers import Checkpoint
from models.names import HEAD

ROOT = Path(__file__).resolve().parent.parent
MODEL = "models/demo/target"
CASES, NOISE, TRIALS = 120, 1e-4, 2
BEAMS = (2, 3, 4, 5, 8, 15)
PATIENCE = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0, 2.3)
PENALTIES = (0.3, 0.6, 1.0, 2.0, -1.0)


def convert(weights: Mapping[str, Tensor], config: Mapping[str, Any], folder: Path, noise: float, seed: int) -> Any:
    """Write a Llama in CTranslate2's format, and open it."""
    heads = config["num_attention_heads"]
    spec = transformer_spec.TransformerDecoderModelSpec.from_config(
        config["num_hidden_layers"], heads, activation=common_spec.Activation.SWISH, pre_norm=True, ffn_glu=True,
        rms_norm=True, rotary_dim=0, rotary_interleave=False, rotary_base=config["rope_theta"],
        num_heads_kv=config["num_key_value_heads"],
    )  # fmt: skip

    def linear(name: str) -> common_spec.LinearSpec:
        found = common_spec.LinearSpec()
        found.weight = weights[f"{name}.weight"].float().numpy()
        return found

    decoder = spec.decoder
    decoder.scale_embeddings = False
    decoder.embeddings.weight = weights["model.embed_tokens.weight"].float().numpy()
    decoder.layer_norm.gamma = weights["model.norm.weight"].float().numpy()
    head = weights[f"{HEAD}.weight" if f"{HEAD}.weight" in weights else "model.embed_tokens.weight"].float()
    noises = torch.rand(head.shape, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    decoder.projection.weight = (head * (1 + noise * noises)).numpy()
    for i, layer in enumerate(decoder.layer):
        name = f"model.layers.{i}"
        attention, mlp = layer.self_attention, layer.ffn
        attention.layer_norm.gamma = weights[f"{name}.input_layernorm.weight"].float().numpy()
        mlp.layer_norm.gamma = weights[f"{name}.post_attention_layernorm.weight"].float().numpy()
        utils.fuse_linear(attention.linear[0], [linear(f"{name}.self_attn.{part}_proj") for part in "qkv"])
        attention.linear[1].weight = linear(f"{name}.self_attn.o_proj").weight
        for part, theirs in (("gate", mlp.linear_0), ("up", mlp.linear_0_noact), ("down", mlp.linear_1)):
            theirs.weight = linear(f"{name}.mlp.{part}_proj").weight
    spec.register_vocabulary([str(token) for token in range(config["vocab_size"])])
    spec.config.bos_token, spec.config.eos_token, spec.config.unk_token = "1", "2", "0"
    spec.config.layer_norm_epsilon = config["rms_norm_eps"]
    spec.validate()
    spec.optimize("float32")
    folder.mkdir()
    spec.save(str(folder))
    return ctranslate2.Generator(str(folder), compute_type="float32", intra_threads=1)


def generate(model: Any, case: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The outputs of a case, best first; those that ended have their end token."""
    [result] = model.generate_batch(
        [[str(token) for token in case["prompt_ids"]]], beam_size=case["beams"], patience=case["patience"],
        length_penalty=case["length_penalty"], num_hypotheses=case["num_return_sequences"],
        max_length=case["max_new_tokens"], end_token=[case["eos_token_id"]], return_end_token=True,
        include_prompt_in_result=False, return_scores=True, sampling_topk=1,
    )  # fmt: skip
    return [
        {"token_ids": list(ids), "score": round(score, 6)}
        for ids, score in zip(result.sequences_ids, result.scores, strict=True)
    ]


def make_case(rng: random.Random, vocab: int) -> dict[str, Any]:
    """Random arguments. The end token is the model's, or one that is frequent in its texts."""
    beams, patience, penalty = rng.choice(BEAMS), rng.choice(PATIENCE), rng.choice(PENALTIES)
    most = max(1, int(beams * patience))
    return {
        "prompt_ids": [1, *(rng.randrange(3, vocab) for _ in range(rng.randint(2, 12)))],
        "beams": beams, "patience": patience, "length_penalty": penalty,
        "num_return_sequences": rng.randint(1, most), "max_new_tokens": rng.choice((6, 20, 40)),
        "eos_token_id": rng.choice((2, 17, 18, 266, 268)),
    }  # fmt: skip


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    config = json.loads((ROOT / MODEL / "config.json").read_text())
    checkpoint = Checkpoint.open(ROOT / MODEL)
    weights, rng = checkpoint.read(checkpoint.tensors), random.Random(0)
    with tempfile.TemporaryDirectory() as folder:
        noises = [0.0, *[NOISE] * TRIALS]
        models = [convert(weights, config, Path(folder) / str(i), noise, i) for i, noise in enumerate(noises)]
        cases: list[dict[str, Any]] = []
        while len(cases) < CASES:
            case = make_case(rng, config["vocab_size"])
            if case["beams"] * case["patience"] < 0.5:
                continue
            first, *others = (generate(model, case) for model in models)
            tokens = [output["token_ids"] for output in first]
            if all([output["token_ids"] for output in other] == tokens for other in others):
                cases.append(case | {"outputs": first})
    head = {"model": MODEL, "versions": {"ctranslate2": ctranslate2.__version__}}
    lines = ",\n".join("  " + json.dumps(case, separators=(",", ":")) for case in cases)
    text = json.dumps(head)[:-1] + ', "cases": [\n' + lines + "\n]}\n"
    (ROOT / "tests" / "golden" / "patience.json").write_text(text)


if __name__ == "__main__":
    main()
