"""Gemma's mobile checkpoints: every code by the definition, rules of modules, static steps, and what is refused.

The golden model `quantized/gemma` compares logits and searches with transformers.
"""

import json
import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from engine import Engine
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.errors import CheckpointError
from models.quantized import quantization
from models.quantized.gemma import STEPS, GemmaScheme
from models.quantized.parts import EMBEDDING, LINEAR, TRANSPOSED, Source
from tests.models.test_quantized import GOLDEN, Q_PROJ, copied, refused
from tools.golden import storage


def config_of(**fields):
    return quantization(Fields({"quantization_config": {"quant_method": "gemma", **fields}}, "config.json"))


@given(st.sampled_from([2, 4, 8]), st.integers(1, 5), st.sampled_from([8, 20, 64]), st.booleans())
def test_values_are_those_of_the_definition(bits, outs, width, rows):
    """Field by field, of bytes that a row may not fill."""
    generator = torch.Generator().manual_seed(outs * width + bits)
    fields, most = 8 // bits, 2 ** (bits - 1)
    q = torch.randint(-most, most, (outs, -(-width // fields) * fields), generator=generator)
    octets = torch.zeros(outs, q.shape[1] // fields, dtype=torch.int64)
    for i in range(q.shape[1]):
        octets[:, i // fields] |= (q[:, i] + most if bits < 8 else q[:, i] & 255) << bits * (i % fields)
    codes = octets.to(torch.uint8) if bits < 8 else octets.to(torch.uint8).view(torch.int8)
    scale, scheme = torch.rand(outs, 1, generator=generator), GemmaScheme(bits, rows)
    parts = dict(zip(scheme.names, (codes, scale), strict=True))
    for suffix, part in scheme.parts(outs, width).items():
        assert part.optional or (tuple(parts[suffix].shape) in part.shapes and parts[suffix].dtype in part.dtypes)
    weight = scheme.weight(outs, width, Source(parts.get, AssertionError))
    assert weight.floats().equal(q[:, :width] * scale) and weight.steps == (0, 0)
    assert weight.floats(outs - 1, outs).equal((q[:, :width] * scale)[-1:])


def test_modules_have_the_bits_of_the_expression_that_matches_first():
    """First in the name of a module, wherever it stands in the config."""
    config = config_of(
        num_bits=8, module_quant_configs={"up": {"num_bits": 4}, "mlp": {}, r"layers\.1\.": {"num_bits": 2}}
    )
    names = "layers.1.mlp.up", "layers.11.mlp.up", "layers.0.up", "lm_head"
    assert [config.scheme(name, LINEAR).bits for name in names] == [2, 8, 4, 8]
    same = config_of(module_quant_configs={"layers": {"num_bits": 2}, "layer": {"num_bits": 8}})
    assert same.scheme("layers.0.up", LINEAR).bits == 2
    assert config.scheme("embed_tokens", EMBEDDING) is None and config.scheme("lm_head", TRANSPOSED) is None
    assert config_of(quantize_embeddings=True).scheme("embed_tokens", EMBEDDING) == GemmaScheme(4, rows=True)


def test_steps_that_are_zero_or_absent_round_nothing(tmp_path):
    """transformers calls layers with zeros uncalibrated."""
    ids, plain = [3, 5, 7], copied(tmp_path, "gemma")
    names = [name for name in Checkpoint.open(plain).tensors if name.endswith(STEPS)]
    found = []
    for i, step in enumerate((None, torch.tensor(0.0), torch.tensor([1e-6]))):
        folder = copied(tmp_path / str(i), "gemma", **{name: step if step is None else step.clone() for name in names})
        found.append(Engine.load(folder, dtype="float32", device="cpu", kv_memory="1M").logits(ids))
    rounded = Engine.load(plain, dtype="float32", device="cpu", kv_memory="1M").logits(ids)
    assert found[0].equal(found[1]) and not found[0].equal(rounded) and not found[2].equal(found[0])


def test_scales_of_caches_are_not_used(tmp_path):
    scales = {f"model.layers.1.self_attn.{name}_cache_scale": torch.ones(1) for name in "kv"}
    assert Engine.load(copied(tmp_path, "gemma", **scales), device="cpu", kv_memory="1M").logits([3]).isfinite().all()


@pytest.mark.parametrize("step", [-1.0, float("inf"), float("nan")])
def test_steps_that_are_none(tmp_path, step):
    folder = copied(tmp_path, "gemma", **{f"{Q_PROJ}.input_activation_scale": torch.tensor(step)})
    refused(folder, r"q_proj: input_activation_scale is .*, expected a positive number, or 0")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_bits": 3}, "gemma with quantization_config.num_bits 3 .read: 2, 4, 8"),
        ({"module_quant_configs": {"mlp": {"num_bits": 16}}}, "module_quant_configs.mlp.num_bits 16"),
        ({"module_quant_configs": {"(a+)+": {}}}, "the regular expression '(a+)+' is not supported"),
        ({"module_quant_configs": {"mlp": 4}}, "module_quant_configs.mlp: expected an object"),
        ({"quantize_embeddings": 1}, "quantize_embeddings: expected true or false"),
    ],
)
def test_what_is_refused(fields, message):
    with pytest.raises(CheckpointError, match=re.escape(message).replace(r"\.read", ".read")):
        config_of(**fields)


def test_an_embedding_needs_a_head_of_its_own(tmp_path):
    """A tied head has no weights in the file, as transformers does not find them either."""
    tensors = dict.fromkeys(n for n in Checkpoint.open(GOLDEN / "gemma").tensors if n.startswith("lm_head"))
    folder = copied(tmp_path, "gemma", **tensors)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    refused(folder, "missing")


def test_the_writer_of_golden_files_has_the_same_form():
    weight = torch.randn(6, 16, generator=torch.Generator().manual_seed(0))
    for bits in (2, 4, 8):
        found = GemmaScheme(bits, rows=False).weight(
            6, 16, Source(storage.gemma(bits).store(weight).get, AssertionError)
        )
        assert (found.floats() - weight).abs().max() < weight.abs().max() / 2 ** (bits - 1) and min(found.steps) > 0
