"""Activations of 8 bits beside quantised weights: `--activations int8`."""

import io
from pathlib import Path

import pytest
import torch

from engine import Engine, UsageError, chat
from engine.demo import demo_folder
from engine.load import loading
from engine.load.options import LoadOptions
from kernels.linear.panels import LEVELS, ROUNDED
from kernels.linear.reference import rounded
from models.formats import grouped
from models.formats.floats import PackedLinear
from models.formats.grouped import GroupedLinear
from models.formats.linear import rounds_rows
from search import Greedy, Trie
from tests.marks import needs_cpp

GOLDEN = Path(__file__).parents[1] / "golden"
PROMPT = list(range(3, 30))
CODES = [
    *(f"quantized/{name}" for name in ("awq", "gptq_conv1d", "gptq_desc_act", "gptq_v2", "int8_token")),
    *(f"quantized/{name}" for name in ("pack4_g_idx", "pack4_zeros", "pack8_channel", "pack8_zeros", "mixed")),
    "gpt_oss/mxfp4",
]


def load(variant, activations="int8", **options):
    return Engine.load(GOLDEN / variant, dtype="float32", activations=activations, kv_memory="8M", **options)


@pytest.mark.parametrize("variant", CODES)
def test_models_multiply_rows_as_the_definition_rounds_them(variant, monkeypatch):
    """The same model by PyTorch: floats of weights, by rows that the definition rounds."""
    plain, ours = (load(variant, name).logits(PROMPT) for name in ("auto", "int8"))
    monkeypatch.setattr(grouped, "has_kernels", lambda *_: False)
    model = load(variant)
    assert any(isinstance(layer, GroupedLinear) and layer.weights for layer in model.runner.model.modules())
    theirs = model.logits(PROMPT)
    assert 0 < (theirs - plain).abs().mean() < 0.1 * plain.std()
    assert (theirs - ours).abs().mean() < 0.1 * (theirs - plain).abs().mean()  # steps on ties change what follows


@needs_cpp
def test_scores_of_experts_are_as_exact_as_before():
    model = load("gpt_oss/mxfp4").runner.model
    layers = [layer for layer in model.modules() if isinstance(layer, PackedLinear)]
    rounding = {name for layer in layers if layer.rounds for name in layer.names}
    assert any("experts" in name for name in rounding) and not any("router" in name for name in rounding)


@pytest.mark.parametrize("ordered", [False, True])
def test_rows_in_an_order_are_rounded_in_it(ordered):
    """By PyTorch: the groups of a row are those of the matrix."""
    random = torch.Generator().manual_seed(1)
    codes_OI = torch.randint(256, (5, 64), dtype=torch.uint8, generator=random)
    order_I = torch.randperm(64, generator=random) if ordered else None
    rows = grouped.GroupedRows(codes_OI, torch.full((5, 2), 0.5))
    weight = grouped.GroupedWeight("int8", (5, 64), 32, lambda first, last: rows, order_I, levels=LEVELS)
    x = torch.randn(3, 64, generator=random).cumsum(1)
    want = rounded(x if order_I is None else x[:, order_I], LEVELS, 32, ROUNDED) @ ((codes_OI.double() - 128) / 2).T
    assert torch.allclose(grouped._product(x, weight).double(), want, atol=1e-2, rtol=1e-5)


@needs_cpp
@pytest.mark.parametrize("format", ["Q4_1", "Q5_0", "Q6_K"])
def test_a_file_gives_the_same_bits_alone_and_in_a_batch(format, tmp_path):
    from tests.models.gguf.files import WIDE, File, gguf, random

    source = random(tmp_path / "source", "llama/gqa", **WIDE)
    path = File(source, gguf.GGMLQuantizationType[format]).write(tmp_path / "file.gguf")
    engines = [load(path, threads=threads) for threads in (1, 2)]
    prompts = [PROMPT[:count] for count in (1, 5, 17, 27)]
    for search in (Greedy(), Trie(beams=5)):
        options = {"max_new_tokens": 8, "ignore_eos": True, "logprobs": 2}
        together, again = (engine.generate(prompts, search, **options) for engine in engines)
        alone = [engines[0].generate([prompt], search, **options)[0] for prompt in prompts]
        for results in (again, alone):
            for one, other in zip(together, results, strict=True):
                assert one.outputs[0].token_ids == other.outputs[0].token_ids
                assert one.outputs[0].token_logprobs == other.outputs[0].token_logprobs
    assert not engines[0].logits(PROMPT).equal(load(path, "auto").logits(PROMPT))


@needs_cpp
def test_what_a_model_runs_on_names_them():
    auto, int8 = load("quantized/awq", "auto"), load("quantized/awq")
    assert "int8 activations" in int8.capabilities.precision and "activations" not in auto.capabilities.precision
    assert auto.model_key != int8.model_key  # cached prefixes in files are not those of the other


@needs_cpp
def test_quantising_rounds_them_anyway():
    engines = [Engine.load(demo_folder(), quant="int4", activations=name, kv_memory="8M") for name in ("auto", "int8")]
    assert engines[0].logits(PROMPT).equal(engines[1].logits(PROMPT))
    assert rounds_rows(engines[0].runner.model)


@pytest.mark.parametrize("variant", ["llama/gqa", "quantized/fp8_tensor"])
def test_models_without_codes_are_refused(variant):
    with pytest.raises(UsageError, match="activations: int8 applies to quantised matrices, and this model has none"):
        load(variant)


def test_refusals(capsys, monkeypatch):
    with monkeypatch.context() as on_gpu, pytest.raises(UsageError, match="activations: a GPU does not round them"):
        on_gpu.setattr(loading, "pick_device", lambda name: torch.device("cuda"))
        loading.device_of(LoadOptions("x", activations="int8"))
    for wrong in ("float", None, 8):
        with pytest.raises(UsageError, match="activations: expected auto or int8, got"):
            load("quantized/awq", wrong)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"Hello\n")))
    assert chat.main(["--activations", "int8", "--dtype", "float32", "--quant", "none"]) == 2
    assert "leave out --activations int8" in capsys.readouterr().err
