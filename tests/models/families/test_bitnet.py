"""BitNet: numbers -1, 0 and 1 in each form that transformers stores, what stays floats, norms, what is refused."""

import pytest
import torch
from safetensors.torch import load_file

from engine import Engine
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import measure
from models.errors import CheckpointError
from models.families import load_model
from models.families.bitnet import BitNet
from tests.engine.load.test_budget import CPU, tensors_in
from tests.marks import needs_cpp, needs_int8
from tests.models.copies import GOLDEN, changed

TEXT = [(7 * i * i + 3 * i) % 101 + 3 for i in range(40)]
AUTO = {"quant_method": "bitnet", "linear_class": "autobitlinear"}
OFFLINE, ONLINE = AUTO | {"quantization_mode": "offline"}, AUTO | {"quantization_mode": "online"}
DOWN = "model.layers.0.mlp.down_proj"


def load(folder, **options):
    return Engine.load(folder, dtype="float32", kv_memory="1M", **options)


def rounded(weight):
    """Numbers and their scale, by `WeightQuant` of transformers."""
    scale = 1 / weight.float().abs().mean().clamp(min=1e-5)
    return (weight.float() * scale).round().clamp(-1, 1), scale


def packed(numbers):
    quarters = (numbers + 1).to(torch.uint8).view(4, -1, numbers.shape[1])
    return quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6


def stored_as(form, kept=()):
    """Makes tensors of a checkpoint: the matrices of layers as a form has them, but for those of `kept` names."""

    def make(tensors):
        found = {}
        for name, x in tensors.items():
            if x.dim() != 2 or ".layers." not in name or any(part in name for part in kept):
                found[name] = x
                continue
            numbers, scale = rounded(x)
            found[name] = {"floats": numbers / scale, "numbers": numbers}.get(form, packed(numbers))
            if form != "floats":
                scale = scale if form == "bitlinear" else 1 / scale
                found[name.replace(".weight", ".weight_scale")] = scale.view(1)
        return found

    return make


FORMS = {
    "bitlinear": ({"quant_method": "bitnet"}, stored_as("bitlinear")),
    "autobitlinear": (OFFLINE, stored_as("packed")),
    "numbers as floats": (OFFLINE, stored_as("numbers")),
    "floats of training": (ONLINE, lambda tensors: tensors),
}


@pytest.mark.parametrize("form", FORMS)
def test_every_form_has_the_same_values(tmp_path, form):
    config, tensors = FORMS[form]
    one, its_tensors = FORMS["bitlinear"]
    exact = load(changed(tmp_path / "one", "bitnet/plain", {"quantization_config": one}, its_tensors)).logits(TEXT)
    found = load(changed(tmp_path / "form", "bitnet/plain", {"quantization_config": config}, tensors))
    assert (found.logits(TEXT) - exact).abs().max() < 2e-5 * exact.std()
    unrounded = load(changed(tmp_path / "floats", "bitnet/plain", {}, stored_as("floats"))).logits(TEXT)
    assert 1e-2 * exact.std() < (unrounded - exact).abs().max() < exact.std()
    assert "GroupedLinear" in {type(module).__name__ for module in found.runner.model.modules()}
    assert (load(GOLDEN / "bitnet/plain").logits(TEXT) - exact).abs().max() > 0.1 * exact.std()


@needs_cpp
@pytest.mark.parametrize("form", FORMS)
def test_bytes_are_counted_from_headers(tmp_path, form):
    config, tensors = FORMS[form]
    checkpoint = Checkpoint.open(changed(tmp_path, "bitnet/plain", {"quantization_config": config}, tensors))
    model = load_model(checkpoint, torch.float32, CPU)
    held = sum(x.nbytes for x in tensors_in(model.modules()))
    assert measure(checkpoint, torch.float32, CPU).matrices == held


@pytest.mark.parametrize(
    ("names", "kept"),
    [
        (["lm_head", "mlp.down_proj"], ["down_proj"]),  # an end of a name
        (["lm_head", "model.layers.0"], [".layers.0."]),  # a module in which others lie
        (["lm_head", "model.layers..*mlp"], [".mlp."]),  # an expression
    ],
)
def test_modules_that_stay_floats(tmp_path, names, kept):
    listed = {"modules_to_not_convert": names}
    config = {"quantization_config": FORMS["bitlinear"][0] | listed}
    exact = load(changed(tmp_path / "packed", "bitnet/plain", config, stored_as("bitlinear", kept))).logits(TEXT)
    found = load(changed(tmp_path / "online", "bitnet/plain", {"quantization_config": ONLINE | listed})).logits(TEXT)
    assert (found - exact).abs().max() < 2e-5 * exact.std()


@needs_int8
def test_activations_are_rounded_by_token_in_any_case(tmp_path):
    config, tensors = FORMS["autobitlinear"]
    folder = changed(tmp_path, "bitnet/plain", {"quantization_config": config}, tensors)
    assert load(folder, activations="int8").logits(TEXT).equal(load(folder).logits(TEXT))


def test_its_inputs_cannot_be_divided(tmp_path):
    """Several processes would each have a part of the rows that are rounded as a whole."""
    config, tensors = FORMS["bitlinear"]
    checkpoint = Checkpoint.open(changed(tmp_path, "bitnet/plain", {"quantization_config": config}, tensors))
    weight = checkpoint.grouped(f"{DOWN}.weight", f"{DOWN}.weight", (24, 32), "Linear", biased=False)
    with pytest.raises(ValueError, match="rounded as a whole"):
        weight.part(None, range(16))


def test_norms_lie_before_the_last_matrices(tmp_path):
    """A factor of what they read changes nothing; their epsilon is small beside it."""

    def scaled(tensors):
        return {
            name: x * 64 if name.endswith(("v_proj.weight", "up_proj.weight")) else x for name, x in tensors.items()
        }

    exact = load(changed(tmp_path / "plain", "bitnet/plain", {"rms_norm_eps": 0.0})).logits(TEXT)
    found = load(changed(tmp_path / "scaled", "bitnet/plain", {"rms_norm_eps": 0.0}, scaled)).logits(TEXT)
    assert (found - exact).abs().max() < 1e-4 * exact.std()


def test_defaults_are_those_of_transformers(tmp_path):
    names = ("rope_parameters", "hidden_act", "rms_norm_eps", "tie_word_embeddings", "num_key_value_heads")
    c = BitNet.read(Checkpoint.open(changed(tmp_path, "bitnet/plain", dict.fromkeys(names))).fields)
    assert (c.rope and c.rope.theta, c.activation, c.norm_eps, c.tied, c.kv_heads) == (
        5e5,
        "relu_squared",
        1e-5,
        False,
        4,
    )


@pytest.mark.parametrize(
    ("form", "spoil", "message"),
    [
        ("bitlinear", {"weight_scale": torch.zeros(1)}, f"{DOWN}: weight_scale is 0"),
        ("bitlinear", {"weight_scale": torch.tensor([torch.inf])}, f"{DOWN}: weight_scale has values that are not"),
        ("bitlinear", {"weight_scale": None}, f"missing {DOWN}.weight_scale"),
        ("bitlinear", {"weight": torch.zeros(24, 32, dtype=torch.uint8)}, rf"{DOWN}.weight in .*expected \[6, 32\]"),
        ("autobitlinear", {"weight": torch.zeros(24, 32, dtype=torch.uint8)}, f"{DOWN}: weight: expected a byte for"),
        ("numbers as floats", {"weight": torch.full((24, 32), 0.5)}, f"{DOWN}: weight has numbers other than -1, 0"),
        ("numbers as floats", {"weight": torch.full((24, 32), torch.nan)}, f"{DOWN}: weight has numbers other than"),
        ("floats of training", {"weight": torch.full((24, 32), torch.inf)}, f"{DOWN}: weight has values that are not"),
    ],
)
def test_faults_are_named(tmp_path, form, spoil, message):
    config, tensors = FORMS[form]

    def spoiled(found):
        found = tensors(found) | {f"{DOWN}.{name}": x for name, x in spoil.items()}
        return {name: x for name, x in found.items() if x is not None}

    with pytest.raises(CheckpointError, match=message):
        load(changed(tmp_path, "bitnet/plain", {"quantization_config": config}, spoiled))


def test_biases_that_a_scale_would_multiply_are_refused(tmp_path):
    """transformers does so in `autobitlinear`, not in `bitlinear`."""
    biased = load_file(GOLDEN / "bitnet/bias/model.safetensors")
    assert any(name.endswith(".bias") for name in biased)
    for form in ("autobitlinear", "bitlinear"):
        config, tensors = FORMS[form]
        folder = changed(tmp_path / form, "bitnet/bias", {"quantization_config": config}, tensors)
        if form == "bitlinear":
            load(folder)
            continue
        with pytest.raises(CheckpointError, match="a bias beside weights of autobitlinear"):
            load(folder)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"head_dim": 8}, "head_dim: expected hidden_size / num_attention_heads, or nothing"),
        ({"hidden_act": "mish"}, "hidden_act: expected one of"),
        ({"attention_bias": True}, "missing model.layers.0.self_attn.q_proj.bias"),
        ({"intermediate_size": 16}, r"mlp.ffn_sub_norm.weight in .*expected \[16\]"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, changes, message):
    with pytest.raises(CheckpointError, match=message):
        load(changed(tmp_path, "bitnet/plain", changes))
