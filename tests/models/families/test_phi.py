"""Phi and Phi-3: large activations, configs refused, texts that cross longrope's border beside ones that do not."""

from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.errors import NumericsError
from models.errors import CheckpointError
from search import Greedy, Sample, Trie
from tests.models.copies import changed
from tools.golden.base import ABSENT

GOLDEN = Path(__file__).parents[2] / "golden"
TEXT = [(7 * i * i + 3 * i) % 101 + 3 for i in range(70)]


@pytest.mark.parametrize("variant", ["phi/plain", "phi3/plain"])
@pytest.mark.parametrize("factor", [30.0, 300.0])  # of queries and keys: scores past 65504 before, and after scaling
def test_large_scores_do_not_overflow_half_precision(tmp_path, variant, factor):
    def grown(name, tensor):
        grows = any(part in name for part in ("q_proj", "k_proj"))
        if "qkv_proj" in name:
            q_and_k = tensor.shape[0] // 3 * 2
            return torch.cat((tensor[:q_and_k] * factor, tensor[q_and_k:]))
        return tensor * factor if grows else tensor

    folder = changed(
        tmp_path, variant, tensors=lambda stored: {name: grown(name, tensor) for name, tensor in stored.items()}
    )
    expected = Engine.load(folder, dtype="float32").logits(TEXT[:17])
    for dtype in ("float16", "bfloat16"):
        logits = Engine.load(folder, dtype=dtype).logits(TEXT[:17])
        assert logits.isfinite().all()
        # A first token sees itself alone, so that scores do not matter: only the dtype's rounding does.
        assert (logits[0] - expected[0]).abs().max() < (0.01 if dtype == "float16" else 0.1) * expected[0].abs().max()


def test_what_float16_cannot_hold_is_an_error(tmp_path):
    folder = changed(tmp_path, "phi/plain", tensors=lambda s: {n: t * 1e5 if "fc2" in n else t for n, t in s.items()})
    assert Engine.load(folder, dtype="float32").logits(TEXT[:5]).isfinite().all()
    with pytest.raises(NumericsError):
        Engine.load(folder, dtype="float16").generate([TEXT[:5]], search=Greedy(), max_new_tokens=2)


@pytest.mark.parametrize(
    ("variant", "changes", "message"),
    [
        ("phi/plain", {"num_key_value_heads": 4}, "num_key_value_heads: expected a divisor"),
        ("phi/plain", {"hidden_size": 25}, "hidden_size: expected a multiple"),
        ("phi/plain", {"rope_parameters": {"partial_rotary_factor": 0.25}}, "3 of 12 dims cannot be rotated in pairs"),
        ("phi/plain", {"rope_parameters": {"partial_rotary_factor": 1.5}}, "partial_rotary_factor: expected"),
        ("phi/plain", {"rope_parameters": {"rope_type": "su"}}, "rope_type: expected one of"),
        ("phi/plain", {"hidden_act": "mish"}, "hidden_act: expected one of"),
        ("phi/plain", {"layer_norm_eps": float("nan")}, "layer_norm_eps: expected"),
        ("phi/plain", {"qk_layernorm": True}, "q_layernorm"),
        ("phi/qk_layernorm", {"qk_layernorm": ABSENT}, "q_layernorm"),
        ("phi/plain", {"num_hidden_layers": 10**18}, "num_hidden_layers: expected"),
        ("phi3/plain", {"rope_parameters": {"rope_type": "linear", "factor": 2.0}},
         "rope_type: expected one of default, longrope, su, yarn"),
        ("phi3/plain", {"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "short_factor: expected a list of 6"),
        ("phi3/longrope", {"original_max_position_embeddings": "32"}, "original_max_position_embeddings: expected"),
        ("phi3/plain", {"sliding_window": 0}, "sliding_window: expected"),
        ("phi3/plain", {"num_key_value_heads": 1}, "qkv_proj"),
        ("phi3/plain", {"tie_word_embeddings": "yes"}, "tie_word_embeddings: expected true or false"),
    ],
)  # fmt: skip
def test_refusals_name_what_is_wrong(tmp_path, variant, changes, message):
    with pytest.raises(CheckpointError, match=message):
        Engine.load(changed(tmp_path, variant, changes), dtype="float32")


def test_the_longest_text_and_the_border_are_the_configs():
    engine = Engine.load(GOLDEN / "phi3" / "longrope", dtype="float32")
    assert (engine.shape.max_positions, engine.shape.switch_length, engine.shape.steady_length) == (128, 32, None)
    engine = Engine.load(GOLDEN / "phi" / "dynamic", dtype="float32")
    assert (engine.shape.max_positions, engine.shape.switch_length, engine.shape.steady_length) == (128, None, 32)
    assert Engine.load(GOLDEN / "phi3" / "window", dtype="float32").shape.switch_length is None


@pytest.mark.parametrize("search", [Greedy(), Trie(beams=4, num_return_sequences=4), Sample(seed=3)])
@pytest.mark.parametrize("variant", ["longrope", "longrope_window", "mini"])
def test_logprobs_are_those_of_a_fresh_prefill_on_both_sides_of_the_border(variant, search):
    """Every prompt crosses at another step, and what the others do is not felt."""
    engine = Engine.load(GOLDEN / "phi3" / variant, dtype="float32")
    prompts = [TEXT[:length] for length in (33, 20, 31, 32, 5)]
    options = {"search": search, "max_new_tokens": 16, "ignore_eos": True}
    for prompt, result in zip(prompts, engine.generate(prompts, **options), strict=True):
        for output in result.outputs:
            total = 0.0
            for i, token in enumerate(output.token_ids):
                total += engine.logits(prompt + output.token_ids[:i])[-1].log_softmax(-1)[token].item()
            assert output.logprob == pytest.approx(total, abs=1e-4)
        [alone] = engine.generate([prompt], **options)
        assert [o.token_ids for o in alone.outputs] == [o.token_ids for o in result.outputs]


def test_a_window_forgets_what_is_before_it():
    """Both layers see 16 tokens: the last logits hang on the last 31, and on all of these."""
    engine = Engine.load(GOLDEN / "phi3" / "window", dtype="float32")
    logits = engine.logits(TEXT[:40])[-1]
    for i, same in ((8, True), (9, False)):
        other = list(TEXT[:40])
        other[i] += 1
        assert torch.equal(engine.logits(other)[-1], logits) is same


def test_adapters_beside_the_matrices_of_phi_4(tmp_path):
    """Encoders and adapters under the names of Microsoft's own files do not change the text model."""

    def beside(stored):
        found = {}
        for name, x in stored.items():
            if name.startswith("model.layers.") and "_proj" in name:
                module = name.removesuffix(".weight")
                found[f"{module}.base_layer.weight"] = x
                for part in ("vision", "speech"):
                    found[f"{module}.lora_A.{part}.weight"] = torch.ones(2, x.shape[1])
                    found[f"{module}.lora_B.{part}.weight"] = torch.ones(x.shape[0], 2)
            else:
                found[name] = x
        return found

    config = {"architectures": ["Phi4MMForCausalLM"], "model_type": "phi4mm"}
    folder = changed(tmp_path, "relatives/phi4", config, tensors=beside)
    expected, found = (
        Engine.load(path, dtype="float32", kv_memory=1 << 22).logits(TEXT[:17])
        for path in (GOLDEN / "relatives/phi4", folder)
    )
    assert found.equal(expected)
