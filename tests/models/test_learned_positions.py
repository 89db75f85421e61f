"""OPT and GPT-2: names under which the same weights are saved, what is refused, the end of the table of positions."""

import json
import math
from pathlib import Path

import pytest
import torch

from engine import Engine
from engine.errors import UsageError
from kernels.rows import activation
from models.checkpoint.headers import Checkpoint
from models.errors import CheckpointError
from models.formats.floats import FloatLinear
from models.reading import ACTIVATIONS
from search import Greedy, Trie
from tests.models.copies import changed

GOLDEN = Path(__file__).parents[1] / "golden"
TEXT = [(7 * i * i + 3 * i) % 101 + 3 for i in range(64)]
EMBEDDING = {"opt": "model.decoder.embed_tokens.weight", "gpt2": "transformer.wte.weight"}
BASE = {"opt": "model.", "gpt2": "transformer."}


def bare(family):
    return lambda stored: {name.removeprefix(BASE[family]): tensor for name, tensor in stored.items()}


def head_beside(family):
    return lambda stored: stored | {"lm_head.weight": stored[EMBEDDING[family]].clone()}


def head_alone(family):
    return lambda stored: {
        "lm_head.weight" if name == EMBEDDING[family] else name: tensor for name, tensor in stored.items()
    }


def buffers(stored):
    mask = {f"transformer.h.{i}.attn.bias": torch.ones(1, 1, 64, 64).tril().to(torch.uint8) for i in range(2)}
    return stored | mask | {f"transformer.h.{i}.attn.masked_bias": torch.tensor(-1e4) for i in range(2)}


def version(stored):
    return stored | {"model.decoder.version": torch.tensor([3.0])}


@pytest.mark.parametrize(
    ("family", "ways"),
    [
        *((family, ways) for family in EMBEDDING for ways in ([bare], [head_beside], [head_alone])),
        *((family, ways) for family in EMBEDDING for ways in ([head_beside, bare], [head_alone, bare])),
        ("gpt2", [buffers]),
        ("gpt2", [buffers, bare]),
        ("opt", [version]),
        ("opt", [version, bare]),
    ],
)
def test_other_names_give_the_same_bits(tmp_path, family, ways):
    def tensors(stored):
        for way in ways:
            stored = (way if way in (buffers, version) else way(family))(stored)
        return stored

    expected = Engine.load(GOLDEN / family / "plain", dtype="float32").logits(TEXT)
    assert (
        Engine.load(changed(tmp_path, f"{family}/plain", tensors=tensors), dtype="float32").logits(TEXT).equal(expected)
    )


def test_a_stored_head_that_differs_is_the_head(tmp_path):
    """Whatever the flag says, as in transformers: it describes the saved model less truly than the saved model does."""
    for family in EMBEDDING:
        expected = Engine.load(GOLDEN / family / "untied", dtype="float32").logits(TEXT[:9])
        folder = changed(tmp_path / family, f"{family}/untied", {"tie_word_embeddings": True})
        assert Engine.load(folder, dtype="float32").logits(TEXT[:9]).equal(expected)


def without(*names):
    return lambda stored: {name: tensor for name, tensor in stored.items() if name not in names}


def renamed(old, new):
    return lambda stored: {name.replace(old, new): tensor for name, tensor in stored.items()}


def flipped(part):
    return lambda stored: {name: (t.T.contiguous() if part in name else t) for name, t in stored.items()}


def longer(part):
    return lambda stored: {n: (torch.cat([t, t[:2]]) if part in n else t) for n, t in stored.items()}


def mixed(stored):
    return {(name.removeprefix("transformer.") if "h.1." in name else name): t for name, t in stored.items()}


@pytest.mark.parametrize(
    ("variant", "changes", "tensors", "message"),
    [
        ("opt/plain", {"activation_function": "mish"}, None, "activation_function: expected one of"),
        ("opt/plain", {"hidden_size": 33}, None, "hidden_size: expected a multiple of num_attention_heads 4"),
        ("opt/plain", {"ffn_dim": 0}, None, "ffn_dim: expected"),
        ("opt/plain", {"max_position_embeddings": 10**18}, None, "max_position_embeddings: expected"),
        ("opt/plain", {"word_embed_proj_dim": 16}, None, "project_in"),
        ("opt/plain", {"do_layer_norm_before": "no"}, None, "do_layer_norm_before: expected true or false"),
        ("opt/plain", {"do_layer_norm_before": False}, None, "unknown model.decoder.final_layer_norm.bias"),
        ("opt/plain", {"enable_bias": False}, None, "12 tensors at fault"),
        ("opt/plain", {"layer_norm_elementwise_affine": False}, None, "10 tensors at fault"),
        ("opt/plain", {"tie_word_embeddings": False}, None, "missing lm_head.weight"),
        ("opt/plain", {"max_position_embeddings": 66}, None, r"embed_positions.weight in .*expected \[68, 32\]"),
        ("opt/plain", None, longer("embed_positions"), r"embed_positions.weight in .*expected \[66, 32\]"),
        ("opt/plain", None, without("model.decoder.layers.1.fc2.bias"), "missing model.decoder.layers.1.fc2.bias"),
        ("opt/base_prefix", None, without("decoder.layers.1.fc2.bias"), "missing decoder.layers.1.fc2.bias"),
        ("opt/plain", None, without(EMBEDDING["opt"]), "missing model.decoder.embed_tokens.weight"),
        ("opt/classifier", {"num_labels": 2}, lambda s: s | {"score.weight": torch.ones(2, 16)}, r"score.*\[1, 16\]"),
        ("opt/classifier", None, without("score.weight"), "missing score.weight"),
        ("gpt2/plain", {"activation_function": "mish"}, None, "activation_function: expected one of"),
        ("gpt2/plain", {"n_embd": 33}, None, "n_embd: expected a multiple of n_head 4"),
        ("gpt2/plain", {"n_layer": None}, None, "n_layer: expected a value, got nothing"),
        ("gpt2/plain", {"add_cross_attention": True}, None, "add_cross_attention: expected false"),
        ("gpt2/plain", {"layer_norm_epsilon": float("nan")}, None, "layer_norm_epsilon: expected"),
        ("gpt2/plain", {"n_inner": None}, None, r"c_fc.weight in .*expected \[32, 128\]"),
        ("gpt2/plain", {"n_positions": 128}, None, r"wpe.weight in .*expected \[128, 32\]"),
        ("gpt2/plain", None, flipped("c_attn.weight"), r"c_attn.weight in .*expected \[32, 96\] .*got \[96, 32\]"),
        ("gpt2/plain", None, renamed("h.0.attn.c_proj.b", "h.0.attn.masked_b"), "missing .*attn.c_proj.bias"),
        ("gpt2/plain", None, lambda s: s | {"h.0.attn.biases": torch.ones(1)}, "unknown h.0.attn.biases"),
        ("gpt2/plain", None, lambda s: s | {"h.0.crossattention.bias": torch.ones(1)}, "unknown h.0.crossattention"),
        ("gpt2/plain", None, mixed, "missing transformer.h.1.ln_1.weight .nearest: h.1.ln_1.weight"),
        ("gpt2/classifier", None, without("score.weight"), "missing score.weight"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, variant, changes, tensors, message):
    with pytest.raises(CheckpointError, match=message):
        Engine.load(changed(tmp_path, variant, changes, tensors), dtype="float32")


@pytest.mark.parametrize("family", EMBEDDING)
def test_no_token_stands_past_the_table(family):
    engine = Engine.load(GOLDEN / family / "plain", dtype="float32")
    assert engine.shape.max_positions == 64
    for search in (Greedy(), Trie(beams=4)):
        for length in (60, 64):
            [result] = engine.generate([TEXT[:length]], search=search, max_new_tokens=50, ignore_eos=True)
            assert {len(output.token_ids) for output in result.outputs} == {65 - length}
        with pytest.raises(UsageError, match="65 tokens, this model's maximum context length is 64"):
            engine.generate([[*TEXT, 5]], search=search)
    classifier = Engine.load(GOLDEN / family / "classifier", dtype="float32")
    for texts, message in [([[*TEXT, 5]], "length is 64"), ([[5], [104]], "from 0 to 103, got 104"), ([[]], "empty")]:
        with pytest.raises(UsageError, match=message):
            classifier.scores(texts)
    assert len(classifier.scores([TEXT])) == 1


@pytest.mark.parametrize("family", EMBEDDING)
def test_a_context_lies_within_the_table(family):
    with pytest.raises(UsageError, match="context: this model has learned its 64 positions and has no others, got 65"):
        Engine.load(GOLDEN / family / "plain", dtype="float32", context=65)
    engine = Engine.load(GOLDEN / family / "plain", dtype="float32", context=20)
    [result] = engine.generate([TEXT[:18]], search=Greedy(), ignore_eos=True)
    assert len(result.outputs[0].token_ids) == 3 and not engine.capabilities.warning
    with pytest.raises(UsageError, match="21 tokens, this model's maximum context length is 20"):
        engine.generate([TEXT[:21]], search=Greedy())


@pytest.mark.parametrize(("family", "eos"), [("opt", 2), ("gpt2", 50256)])
def test_default_eos_and_spellings_of_dtype(tmp_path, family, eos):
    folder = changed(tmp_path, f"{family}/plain")
    (folder / "generation_config.json").unlink()
    for file in folder.glob("tokenizer*"):
        file.unlink()
    config = json.loads((folder / "config.json").read_text())
    del config["eos_token_id"], config["dtype"]
    for spelling in ("dtype", "torch_dtype"):
        (folder / "config.json").write_text(json.dumps({**config, spelling: "bfloat16"}))
        assert Engine.load(folder).eos_token_ids == {eos}
        assert Checkpoint.open(folder).torch_dtype == torch.bfloat16


def test_only_generated_ids_stop():
    """OPT's `</s>` begins every text, and ends it."""
    engine = Engine.load(GOLDEN / "opt" / "plain", dtype="float32")
    [eos] = engine.eos_token_ids
    for search in (Greedy(), Trie(beams=4)):
        [result] = engine.generate([[eos, *TEXT[:5], eos]], search=search, max_new_tokens=6)
        free = engine.generate([[eos, *TEXT[:5], eos]], search=search, max_new_tokens=6, ignore_eos=True)[0]
        assert result.outputs[0].token_ids and free.outputs[0].finish_reason == "length"
        assert all(eos not in output.token_ids[:-1] for output in result.outputs)


@pytest.mark.parametrize(
    ("name", "formula"),
    [
        ("gelu", lambda x: x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))),
        ("gelu_new", lambda x: 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))),
        ("gelu_fast", lambda x: 0.5 * x * (1 + torch.tanh(x * 0.7978845608 * (1 + 0.044715 * x * x)))),
        ("quick_gelu", lambda x: x / (1 + torch.exp(-1.702 * x))),
        ("relu", lambda x: x.clamp_min(0)),
        ("silu", lambda x: x / (1 + torch.exp(-x))),
    ],
)
def test_activations(name, formula):
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64)
    torch.testing.assert_close(activation(x, ACTIVATIONS[name], impl="torch"), formula(x), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("shape", [(24, 40), (32, 32), (7, 5)])
def test_a_matrix_stored_transposed(dtype, shape):
    stored, x = torch.randn(shape, dtype=torch.float32), torch.randn(3, shape[0])
    device = torch.device("cpu")
    straight = FloatLinear([stored.T.contiguous()], [torch.ones(shape[1])], dtype=dtype, device=device)
    turned = FloatLinear([stored.T], [torch.ones(shape[1])], dtype=dtype, device=device)
    torch.testing.assert_close(turned(x.to(dtype)), straight(x.to(dtype)))
