"""Text models inside checkpoints of several modalities; their numbers are in tests/test_golden.py."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import measure
from models.checkpoint.tensor_files import write_tensors
from models.checkpoint.wrapped import is_wrapped, parts, text_config, text_names
from models.errors import CheckpointError
from models.families.ernie import PaddleOCR
from models.families.glm import Glm4, Glm4Moe
from models.families.granite import Granite, HyperCLOVAX
from models.families.hunyuan import HunYuan
from models.families.llama import Llama
from models.families.qwen_moe import Qwen3Moe
from models.formats.floats import has_kernels
from tools.pack import pack

GOLDEN = Path(__file__).parents[2] / "golden/wrapped"
TEXT = {"model_type": "llama"}
LLAVA = {"architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "text_config": TEXT}


def changed(tmp_path, variant, change):
    folder = tmp_path / "checkpoint"
    shutil.copytree(GOLDEN / variant, folder)
    config = json.loads((folder / "config.json").read_text())
    change(config)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_the_note_names_what_is_left_out_with_its_bytes():
    for variant, part in {
        "llava": "multi_modal_projector",
        "qwen3_vl": "visual",
        "qwen3_5": "visual",
        "idefics3": "connector",
    }.items():
        engine = Engine.load(GOLDEN / variant)
        assert f"only the text model is loaded, without {part} (0.0 MiB)" in engine.capabilities.warning
        checkpoint = Checkpoint.open(GOLDEN / variant)
        assert [*checkpoint.left_out] == [part] and checkpoint.left_out[part] in (16, 512, 2048)


@pytest.mark.parametrize(
    ("stored", "text"),
    [
        ("language_model.model.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
        ("model.language_model.layers.0.mlp.up_proj.qweight", "model.layers.0.mlp.up_proj.qweight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("language_model.model.decoder.layers.0.fc1.bias", "model.decoder.layers.0.fc1.bias"),
        ("language_model.model.blocks.0.self_attn.o_proj.weight", "model.layers.0.self_attn.o_proj.weight"),
        ("language_model.model.encoder.layers.0.mlp.up_proj.weight", "model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_names(stored, text):
    assert text_names([stored, "vision_tower.layers.0.weight", "lm_head.bias"]) == {
        text: stored,
        "lm_head.bias": "lm_head.bias",
    }


def test_a_head_with_the_prefix_of_the_model(tmp_path):
    """transformers takes it for the head, which then is not the embedding."""
    found = []
    for name in ("lm_head.weight", "model.lm_head.weight"):
        folder = changed(tmp_path / name, "gemma3", lambda config: None)
        tensors = load_file(folder / "model.safetensors")
        table = next(tensor for name, tensor in tensors.items() if name.endswith("embed_tokens.weight"))
        save_file({**tensors, name: table.flip(0)}, folder / "model.safetensors")
        found.append(Engine.load(folder, dtype="float32").logits([5, 6, 7]))
    assert found[0].equal(found[1])
    assert not found[0].equal(Engine.load(GOLDEN / "gemma3", dtype="float32").logits([5, 6, 7]))


def test_names_without_a_prefix():
    names = ["model.layers.0.x", "model.embed_tokens.weight", "lm_head.weight", "visual.blocks.0.x", "model.visual.y"]
    assert text_names(names) == {name: name for name in names[:3]}
    assert parts({"visual.blocks.0.x": 3, "model.visual.y": 4, "model.projector.z": 1}) == {"visual": 7, "projector": 1}


def test_fields_come_from_where_transformers_finds_them():
    outer = LLAVA | {"eos_token_id": [1, 106], "torch_dtype": "bfloat16", "tie_word_embeddings": False, "vocab_size": 9}
    inner = TEXT | {"eos_token_id": 2, "bos_token_id": 3, "dtype": "float32", "hidden_size": 64, "vocab_size": None}
    config = text_config(outer | {"text_config": inner}, "config.json")
    assert config["architectures"] == ["LlamaForCausalLM"]
    assert config["eos_token_id"] == [1, 106] and config["bos_token_id"] == 3
    assert config["torch_dtype"] == "bfloat16" and "dtype" not in config
    assert config["tie_word_embeddings"] is False and config["hidden_size"] == 64
    assert config["vocab_size"] == 32000 and config["num_hidden_layers"] == 32  # Llama's own
    assert text_config(LLAVA | {"tie_word_embeddings": False, "text_config": TEXT | {"tie_word_embeddings": True}}, "")[
        "tie_word_embeddings"
    ]


def test_a_whole_gemma_3_caps_no_logits(tmp_path):
    """In transformers too: the text model alone reads the field."""
    folder = changed(tmp_path, "gemma3", lambda config: config["text_config"].update(final_logit_softcapping=0.1))
    found = [Engine.load(path, dtype="float32").logits([5, 6, 7]) for path in (folder, GOLDEN / "gemma3")]
    assert found[0].equal(found[1])


@pytest.mark.parametrize(
    ("kind", "fields"),
    [
        ("gemma2", {"final_logit_softcapping": 30.0}),
        ("granite", {"logits_scaling": 8.0}),
        ("qwen3_vl_text", {"use_sliding_window": True, "layer_types": ["sliding_attention"] * 36}),
    ],
)
def test_a_whole_does_not_read_fields_of_the_text_model_alone(kind, fields):
    config = text_config(LLAVA | {"text_config": {"model_type": kind, **fields}}, "config.json")
    assert {name: config[name] for name in fields} == dict.fromkeys(fields)


@pytest.mark.parametrize("kind", ["internvl", "aya_vision", "gemma4_unified", "glmasr", "got_ocr2", "lfm3_vl"])
def test_wholes_that_tie_their_head_whatever_the_text_says(kind, tmp_path):
    untied = TEXT | {"tie_word_embeddings": False}
    whole = {"architectures": ["WholeForConditionalGeneration"], "model_type": kind, "text_config": untied}
    assert text_config(whole, "")["tie_word_embeddings"]
    assert not text_config(whole | {"tie_word_embeddings": False}, "")["tie_word_embeddings"]
    assert not text_config(LLAVA | {"text_config": untied}, "")["tie_word_embeddings"]
    folder = changed(tmp_path, "gemma3", lambda config: config["text_config"].update(tie_word_embeddings=False))
    found = [Engine.load(path, dtype="float32").logits([5, 6, 7]) for path in (folder, GOLDEN / "gemma3")]
    assert found[0].equal(found[1])


@pytest.mark.parametrize("variant", ["hunyuan_vl", "paddleocr_vl"])
def test_flat_configs_whose_own_field_is_that_of_the_text(variant, tmp_path):
    """In transformers the head is the embedding if the file has none, whatever a flat config of these says."""
    found = []
    for value in (True, False):
        folder = changed(
            tmp_path / str(value), variant, lambda config, value=value: config.update(tie_word_embeddings=value)
        )
        tensors = load_file(folder / "model.safetensors")
        tensors.pop("lm_head.weight", None)
        save_file(tensors, folder / "model.safetensors")
        found.append(Engine.load(folder, dtype="float32").logits([5, 6, 7]))
    assert found[0].equal(found[1])


@pytest.mark.parametrize(
    ("kind", "theta", "expected"), [("glmasr", 5e3, 1e4), ("voxtral", 5e3, 5e3), ("voxtral", None, 1e8)]
)
def test_a_whole_may_have_defaults_of_its_own(kind, theta, expected):
    """Checked against transformers: the text models of GLM-ASR and Voxtral omit what equals these."""
    text = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 8, "rope_theta": theta}
    config = {"model_type": kind, "architectures": ["WholeForConditionalGeneration"], "text_config": text}
    found = Llama.read(Fields(text_config(config, "config.json"), "config.json"))
    heads, size = {"glmasr": (4, 8), "voxtral": (8, 128)}[kind]
    assert (found.norm_eps, found.width, found.kv_heads, found.head_dim) == (1e-5, 64, heads, size)
    assert found.rope is not None and found.rope.theta == expected


def test_text_models_of_glm():
    """Heads of GLM-4.1V are rotated as a whole if no share is given; biases do not depend on a field."""

    def read(kind, family, **given):
        text = {"model_type": kind, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, **given}
        return family.read(Fields(text_config(LLAVA | {"text_config": text}, "config.json"), "config.json"))

    dense, moe = read("glm4v_text", Glm4, attention_bias=False), read("glm4v_moe_text", Glm4Moe, use_qk_norm=True)
    assert (dense.head_dim, dense.rope.head_dim, dense.attention_bias, dense.norm_eps) == (8, 8, True, 1e-5)
    assert read("glm4v_text", Glm4, rope_scaling={"partial_rotary_factor": 0.5}).rope.head_dim == 4
    assert (moe.head_dim, moe.rope.head_dim, moe.attention_bias, moe.head_norms) == (8, 4, True, "")
    assert (dense.max_positions, moe.max_positions, moe.experts.count) == (32768, 65536, 128)


def test_text_models_that_read_documents():
    """Their defaults in transformers; a head is tied unless the outer config says otherwise."""

    def read(family, whole, kind, inside=True, **given):
        text = {"model_type": kind, **given}
        outer = {"architectures": [whole], "model_type": kind.removesuffix("_text"), "vision_config": {}}
        config = outer | {"text_config": text} if inside else outer | text
        assert is_wrapped(config)
        return family.read(Fields(text_config(config, "config.json"), "config.json"))

    ocr = read(Glm4, "GlmOcrForConditionalGeneration", "glm_ocr_text", attention_bias=True)
    assert (ocr.width, ocr.head_dim, ocr.rope.head_dim, ocr.attention_bias) == (1024, 64, 64, False)
    for inside in (True, False):
        paddle = read(PaddleOCR, "PaddleOCRVLForConditionalGeneration", "paddleocr_vl_text", inside)
        assert (paddle.width, paddle.kv_heads, paddle.head_dim, paddle.rope.theta) == (1024, 2, 128, 5e5)
        assert (paddle.tied, paddle.interleaved, paddle.max_positions) == (True, False, 131072)
    docling = read(Granite, "GraniteDoclingForConditionalGeneration", "granite_docling_text", tie_word_embeddings=False)
    assert (docling.embedding_scale, docling.residual_scale, docling.logit_divisor) == (12.0, 0.263, 4.0)
    assert (docling.scale(0), docling.norm_eps, docling.kv_heads, docling.tied) == (1 / 64, 1e-5, 4, True)
    stretched = {"alpha": 1000.0, "factor": 1.0, "type": "xdrope", "xdrope_section": [16, 16, 16, 16]}
    hunyuan = read(
        HunYuan, "HunYuanVLForConditionalGeneration", "hunyuan_vl", False, head_dim=128, rope_scaling=stretched
    )
    assert (hunyuan.rope.kind, hunyuan.tied) == ("default", True) and hunyuan.rope.theta > 1e7
    clova = read(HyperCLOVAX, "HCXVisionV2ForCausalLM", "hyperclovax", logits_scaling=0.5)
    assert clova.logit_divisor == 2.0 and clova.norms == ("input", "output")


@pytest.mark.parametrize(
    ("variant", "architecture"),
    [("qwen2_5_omni", "Qwen2_5OmniModel"), ("qwen3_omni", "Qwen3OmniMoeForConditionalGeneration")],
)
def test_a_model_that_speaks_has_one_that_writes(tmp_path, variant, architecture):
    """Published files have both, and older names inside each."""

    def whole(config):
        inner = {name: config.pop(name) for name in [*config] if name not in ("dtype", "eos_token_id", "bos_token_id")}
        config |= {"architectures": [architecture], "thinker_config": inner, "talker_config": {"text_config": {}}}

    folder = changed(tmp_path, variant, whole)
    found = load_file(GOLDEN / variant / "model.safetensors").items()
    tensors = {f"thinker.{name.replace('model.language_model.', 'model.')}": x for name, x in found}
    tensors = {name.replace("thinker.model.visual.", "thinker.visual."): x for name, x in tensors.items()}
    others = {"talker.model.layers.0.x.weight": torch.ones(3), "token2wav.x.weight": torch.ones(1)}
    save_file(tensors | others, folder / "model.safetensors")
    engine = Engine.load(folder, dtype="float32")
    assert {*Checkpoint.open(folder).left_out} == {"talker", "token2wav", "visual"}
    assert engine.logits([5, 6, 7]).equal(Engine.load(GOLDEN / variant, dtype="float32").logits([5, 6, 7]))
    assert engine.eos_token_ids == Engine.load(GOLDEN / variant).eos_token_ids


@pytest.mark.parametrize(("given", "count"), [({"num_experts": 6}, 6), ({"num_local_experts": 6}, 6), ({}, 60)])
def test_the_number_of_experts_has_two_names(given, count):
    """Published files have the first, those that transformers 5.23 saves the second."""
    whole = LLAVA | {"text_config": {"model_type": "qwen3_vl_moe_text"} | given}
    experts = Qwen3Moe.read(Fields(text_config(whole, "config.json"), "config.json")).experts
    assert experts is not None and experts.count == count


def test_an_older_qwen_has_the_fields_of_its_text_at_the_top():
    rope = {"type": "mrope", "mrope_section": [16, 24, 24]}
    outer = {"architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", "vision_config": {}}
    config = text_config(outer | {"hidden_size": 1536, "rope_scaling": rope}, "config.json")
    assert config["architectures"] == ["Qwen2ForCausalLM"] and config["hidden_size"] == 1536
    assert config["rope_scaling"]["type"] == "default" and config["rope_theta"] == 1e6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "paligemma"}, "is not loaded as a text model: it attends to a prompt in both directions"),
        ({"text_config": {"model_type": "kosmos_2_text_model"}}, "text_config.model_type 'kosmos_2_text_model' is not"),
        ({"text_config": {}, "model_type": "musicgen"}, "model_type 'musicgen' is not supported"),
        ({"text_config": "no"}, "text_config: expected an object"),
        ({"text_config": {"model_type": 3}}, "text_config.model_type: expected a string"),
    ],
)
def test_refusals(tmp_path, changes, message):
    folder = changed(tmp_path, "llava", lambda config: config.update(changes))
    with pytest.raises(CheckpointError, match=message):
        Engine.load(folder)


def test_a_wrong_field_and_an_unknown_tensor_are_named(tmp_path):
    folder = changed(tmp_path, "llava", lambda config: config["text_config"].update(num_key_value_heads=3))
    with pytest.raises(CheckpointError, match="num_key_value_heads: expected a divisor"):
        Engine.load(folder)
    shutil.rmtree(folder)
    folder = changed(tmp_path, "llava", lambda config: config["text_config"].update(num_hidden_layers=1))
    with pytest.raises(CheckpointError, match=r"unknown model.layers.1.input_layernorm.weight in model.safetensors"):
        Engine.load(folder)


def test_a_plan_counts_the_text_model_alone():
    one, other = (Checkpoint.open(GOLDEN / variant) for variant in ("llava", "llava_outer"))
    assert not any("projector" in name for name in one.tensors)
    sizes = [measure(checkpoint, torch.float32, torch.device("cpu")).weights for checkpoint in (one, other)]
    assert sizes[0] == sizes[1] > 0


@pytest.mark.parametrize("variant", ["pack8_channel", "awq", "fp8_tensor"])
def test_a_quantised_text_model(tmp_path, variant):
    plain, folder = GOLDEN.parent / "quantized" / variant, tmp_path / "checkpoint"
    shutil.copytree(plain, folder)
    config = json.loads((plain / "config.json").read_text())
    outer = LLAVA | {"quantization_config": config.pop("quantization_config"), "text_config": config}
    (folder / "config.json").write_text(json.dumps(outer))
    checkpoint = Checkpoint.open(plain)
    tensors = {f"language_model.{name}": x.clone() for name, x in checkpoint.read(checkpoint.tensors).items()}
    with (folder / "model.safetensors").open("wb") as file:
        write_tensors(file, tensors | {"vision_tower.x.weight": torch.ones(2, 2)})
    ids = [3, 5, 7, 11, 13]
    expected, found = (Engine.load(where, dtype="float32").logits(ids) for where in (plain, folder))
    assert found.equal(expected)


def test_a_packed_text_model(tmp_path):
    if not has_kernels(torch.float32, torch.device("cpu")):
        pytest.skip("needs the C++ kernels")
    pack(GOLDEN / "llava", tmp_path / "packed")
    ids = [3, 5, 7, 11, 13]
    expected, found = (
        Engine.load(where, dtype="float32").logits(ids) for where in (GOLDEN / "llava", tmp_path / "packed")
    )
    assert torch.allclose(found, expected, atol=1e-5)
