"""Models in GGUF files: the numbers of their checkpoints, and what the `gguf` package dequantises, in every format."""

import json

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import CheckpointError, Engine
from kernels import cpp
from kernels.linear.blocks import BLOCKS
from models.checkpoint.headers import Checkpoint
from models.formats.grouped import GroupedLinear
from models.gguf import rotary
from models.gguf.names import NAMES, checkpoint_name
from models.gguf.reader import GGUF
from models.rope import RopeConfig, RotaryEmbedding
from search import Greedy, Trie
from tests.models.gguf.files import GOLDEN, LIKE, WIDE, File, gguf, random
from tools import convert

TYPES = gguf.GGMLQuantizationType
FLOATS = [
    *(f"llama/{name}" for name in ("plain", "gqa", "mqa", "tied", "llama3", "linear", "yarn", "head_dim", "mistral")),
    *("llama/both_biases", "phi/plain", "phi/partial", "phi3/plain", "phi3/longrope", "phi3/window", "phi3/gqa"),
    *("gpt2/plain", "gpt2/untied", "qwen2/tied", "qwen3/plain", "qwen3/tied", "qwen3/bias", "qwen3/yarn"),
    *(
        "gemma/one",
        "olmo/plain",
        "olmo/olmo3",
        "hunyuan/plain",
        "stablelm/plain",
        "stablelm/parallel",
        "stablelm/qk_layernorm",
        "mistral/ministral3",
        "mistral/mistral4",
    ),
    *(f"experts/{name}" for name in ("qwen2", "qwen3", "olmoe", "mixtral", "mixtral_window", "granite", "lfm2")),
    *("gpt_oss/plain", "gpt_oss/full"),
    *("qwen3_5/plain", "qwen3_5/bias", "qwen3_5/yarn", "experts/qwen3_5", "experts/qwen3_next"),
    *("experts/qwen3_next_steps", "qwen3_5/recurrent", "qwen3_5/recurrent_taps"),
    *("deepseek/plain", "deepseek/dense", "deepseek/three", "deepseek/glm"),
    *("glm/plain", "glm/four", "glm/moe", "glm/moe_defaults", "glm/solar", "experts/dots", "experts/minimax"),
    *("experts/afmoe", "experts/ernie", "experts/ernie_some", "cohere/plain", "cohere/two"),
    *(f"gpt_neox/{name}" for name in ("plain", "starcoder", "falcon", "falcon_groups")),
    *(
        f"llamas/{name}"
        for name in ("exaone", "exaone_windows", "seed", "seed_defaults", "nemotron", "nemotron_biases")
    ),
    *(f"llamas/{name}" for name in ("arcee", "ernie", "starcoder2", "starcoder2_plain")),
    *("apertus/plain", "apertus/bias", "llamas/internlm3", "nemotron_h/plain", "nemotron_h/bias", "nemotron_h/experts"),
    *(f"alibi/{name}" for name in ("bloom", "bloom_old", "mpt")),
    *(f"relatives/{name}" for name in ("olmo", "jais2", "youtu", "exaone_moe", "hunyuan_moe")),
    *("experts/granite_shared", "granite/scans", "granite/scans_experts", "granite/scans_groups"),
    *("falcon_h1/plain", "falcon_h1/norm", "llama4/dense", "relatives/dbrx", "relatives/olmo_clipped"),
    *("mamba/plain", "mamba/bias", "mamba/defaults", "mamba/falcon_bias", "mamba2/plain", "mamba2/bias"),
    *("jamba/plain", "jamba/experts", "jamba/bias", "jamba/defaults"),
    *(f"published/{name}" for name in ("minicpm", "minicpm_long", "exaone", "exaone_tied", "internlm2", "ling")),
    *("laguna/plain", "laguna/defaults", "laguna/bias", "laguna/elements"),
    *("muse/plain", "relatives/hy3", "relatives/hy3_kinds"),
    *(f"relatives/{name}" for name in ("cohere_moe", "granite_swa", "granite_moe_swa")),
    *(f"wrapped/{name}" for name in ("glm4v", "glm4v_moe", "paddleocr_vl")),
]
PROMPT = list(range(3, 30))


def same(folder, other, relative):
    """Whether two checkpoints have the same logits, greedy tokens and beams."""
    ours, theirs = (Engine.load(path, dtype="float32", kv_memory=1 << 24) for path in (folder, other))
    expected = theirs.logits(PROMPT)
    assert (ours.logits(PROMPT) - expected).abs().max() <= relative * expected.std()
    for search in (Greedy(), Trie(beams=4)):
        answers = [engine.generate([PROMPT], search, max_new_tokens=12, ignore_eos=True) for engine in (ours, theirs)]
        assert len({tuple(answer[0].outputs[0].token_ids) for answer in answers}) == 1


@pytest.mark.parametrize("variant", FLOATS)
def test_floats_are_those_of_the_checkpoint(variant, tmp_path):
    same(File(GOLDEN / variant).write(tmp_path / "file.gguf"), GOLDEN / variant, 1e-5)


@pytest.mark.parametrize("name", ["llama_all", "gpt2_all", "phi3_fused"])
def test_adapters_of_peft_fit_files(name, tmp_path):
    """Also where a file has queries and keys in another order."""
    adapters = GOLDEN / "adapters"
    asked, want = json.loads((adapters / "golden.json").read_text())[name], load_file(adapters / "golden.safetensors")
    path = File(GOLDEN / asked["model"]).write(tmp_path / "file.gguf")
    engine = Engine.load(path, adapters=[adapters / name], dtype="float32", kv_memory=1 << 22)
    rows = want[f"logits.{name}"]
    assert (engine.logits(asked["ids"], name)[-len(rows) :] - rows).abs().max() <= 2e-5 * rows.abs().max()


def test_adapters_do_not_fit_files_of_falcon_h1(tmp_path):
    """Their outputs would lack the factors of the matrices."""
    path, folder = File(GOLDEN / "falcon_h1/plain").write(tmp_path / "file.gguf"), tmp_path / "adapter"
    folder.mkdir()
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["k_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    shapes, name = {"A": (2, 24), "B": (20, 2)}, "base_model.model.model.layers.0.self_attn.k_proj.lora_{}.weight"
    save_file({name.format(x): torch.ones(shape) for x, shape in shapes.items()}, folder / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match="adapters of Falcon-H1 do not fit files of GGUF"):
        Engine.load(path, adapters=[folder], dtype="float32", kv_memory=1 << 22)


@pytest.mark.parametrize("format", ["Q8_0", "Q4_1"])
def test_adapters_beside_blocks(format, tmp_path):
    """An adapter is rounded to 11 bits there, and nothing else differs from the dequantised weights."""
    adapters, source = GOLDEN / "adapters", GOLDEN / "llama/gqa"
    some = {f"blk.{i}.ffn_down.weight": TYPES.F32 for i in range(9)}  # rows that no block divides
    file = File(source, TYPES[format], some)
    paths = file.write(tmp_path / "file.gguf"), as_floats(file).write(tmp_path / "floats.gguf")
    options = {"adapters": [adapters / "llama_all"], "dtype": "float32", "kv_memory": 1 << 22}
    blocks, floats = (Engine.load(path, **options) for path in paths)
    plain, want = floats.logits(PROMPT, "none"), floats.logits(PROMPT)
    assert (want - plain).norm() > 0.1 * plain.norm()
    assert (blocks.logits(PROMPT) - want).norm() <= 2**-10 * want.norm()


def test_norms_of_the_heads_of_command_r(tmp_path):
    source = random(tmp_path / "source", "cohere/norms", tie_word_embeddings=True, attention_bias=False)
    same(File(source).write(tmp_path / "file.gguf"), source, 1e-5)


def test_the_multipliers_of_minicpm3_are_not_in_files(tmp_path):
    published = {"scale_emb": 12, "dim_model_base": 256}
    source = random(tmp_path / "source", "relatives/minicpm3", **published)
    same(File(source).write(tmp_path / "file.gguf"), source, 1e-5)


def test_older_files_of_minicpm_have_no_multipliers(tmp_path):
    published = {"scale_emb": 12, "scale_depth": 1.4, "dim_model_base": 256, "tie_word_embeddings": True}
    file = File(random(tmp_path / "source", "published/minicpm", **published))
    file.keys = {key: value for key, value in file.keys.items() if not key.endswith("_scale")}
    same(file.write(tmp_path / "file.gguf"), tmp_path / "source", 1e-5)


def test_mellum_and_cohere_with_experts_as_llama_cpp_has_them(tmp_path):
    """Experts in all layers; the sum of experts and the shared one is halved."""
    for variant, changes in (
        ("relatives/mellum", {"mlp_layer_types": ["sparse", "sparse"]}),
        ("relatives/cohere_moe", {"attention_bias": False}),
        ("relatives/cohere_moe_sigmoid", {"shared_expert_combination_strategy": "average"}),
    ):
        name = variant.partition("/")[2]
        source = random(tmp_path / name, variant, **changes)
        same(File(source).write(tmp_path / f"{name}.gguf"), source, 1e-5)


@pytest.mark.parametrize("variant", ["laguna/plain", "relatives/cohere_moe_sigmoid"])
def test_the_first_layer_of_four_has_no_window(variant, tmp_path):
    layers = ["full_attention", "sliding_attention", "sliding_attention"]
    changes = {"layer_types": layers, "num_attention_heads_per_layer": [4, 6, 6], "sliding_window_pattern": 4}
    changes |= {"shared_expert_combination_strategy": "average"}
    source = random(tmp_path / "source", variant, **changes)
    file = File(source)
    del file.keys[f"{file.arch}.attention.sliding_window_pattern"]
    same(file.write(tmp_path / "file.gguf"), source, 1e-5)


@pytest.mark.parametrize("variant", ["relatives/mellum", "experts/qwen3", "relatives/hy3"])
def test_gates_and_ups_of_experts_in_one_tensor(variant, tmp_path):
    """convert_hf_to_gguf.py --fuse-gate-up-exps writes them so; also in blocks."""
    changes = {"mlp_layer_types": ["sparse", "sparse"]} if variant == "relatives/mellum" else {}
    source = random(tmp_path / "source", variant, **changes, **WIDE)
    for format in (TYPES.F32, TYPES.Q8_0):
        apart, whole = File(source, format), File(source, format)
        for name in [name for name in whole.tensors if "ffn_gate_exps" in name]:
            both = [name, name.replace("gate", "up")]
            whole.tensors[name.replace("gate", "gate_up")] = np.concatenate([whole.tensors.pop(x) for x in both], 1)
            whole.types[name.replace("gate", "gate_up")] = apart.types[name]
        paths = [file.write(tmp_path / f"{i}.gguf") for i, file in enumerate((apart, whole))]
        ours, theirs = (Engine.load(path, dtype="float32", kv_memory=1 << 24) for path in paths)
        assert ours.logits(PROMPT).equal(theirs.logits(PROMPT))


def test_layers_with_a_window_rotate_as_much_of_a_head_unless_a_key_says_otherwise(tmp_path):
    file, name = File(GOLDEN / "laguna/plain"), "laguna.rope.dimension_count"
    found = []
    for value in (8, 4, None):
        file.keys |= {f"{name}_swa": value}
        file.keys = {key: value for key, value in file.keys.items() if value is not None}
        ropes = Checkpoint.open(file.write(tmp_path / "file.gguf")).config["rope_parameters"]
        found.append([ropes[f"{kind}_attention"]["partial_rotary_factor"] for kind in ("full", "sliding")])
    assert found == [[0.5, 1.0], [0.5, 0.5], [0.5, 0.5]]


@pytest.mark.parametrize("part, value", [("q", [2.0] * 7 + [1.5]), ("k", [2.0] * 8)])
def test_norms_of_muse_are_one_factor(part, value, tmp_path):
    file = File(GOLDEN / "muse/plain")
    file.add(f"blk.1.attn_{part}_norm.weight", np.array(value, np.float32))
    with pytest.raises(CheckpointError, match="expected one factor of all queries, and 1 of keys"):
        Engine.load(file.write(tmp_path / "file.gguf"), kv_memory=1 << 22)


@pytest.mark.parametrize("count", [4, 128])
def test_llama_4_of_128_experts_has_no_norms_of_heads(count, tmp_path):
    fixed = {"attention_chunk_size": 8192, "floor_scale": 8192, "attn_scale": 0.1, "attn_temperature_tuning": True}
    layers = {"no_rope_layers": [1, 1, 1, 0], "num_local_experts": count, "use_qk_norm": count != 128}
    source = random(tmp_path / "source", "llama4/steps", **fixed, **layers)
    same(File(source).write(tmp_path / "file.gguf"), source, 1e-5)


def test_other_chunks_of_llama_4_are_refused(tmp_path):
    file = File(GOLDEN / "llama4/dense")
    file.keys["llama4.attention.sliding_window"] = 512
    with pytest.raises(CheckpointError, match="sliding_window: expected 0 or 8192, got 512"):
        Engine.load(file.write(tmp_path / "file.gguf"), kv_memory=1 << 22)


def test_draft_layers_of_glm_are_left_out(tmp_path):
    file = File(GOLDEN / "glm/moe")
    layers = {name.replace("blk.2.", "blk.3."): x for name, x in file.tensors.items() if name.startswith("blk.2.")}
    for name, x in (layers | {"blk.3.nextn.eh_proj.weight": np.ones((24, 48), np.float32)}).items():
        file.add(name, x)
    file.keys |= {"glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    same(file.write(tmp_path / "file.gguf"), GOLDEN / "glm/moe", 1e-5)


FACTORS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")


@pytest.mark.parametrize("architecture, kind, more", [
    ("GraniteForCausalLM", "granite", dict(zip(FACTORS, (0.25, 3.0, 2.0, 0.5), strict=True))),
    ("SmolLM3ForCausalLM", "smollm3", {"no_rope_layers": [1, 1, 1, 0, 1]}),
])  # fmt: skip
def test_llamas_with_more(architecture, kind, more, tmp_path):
    source = random(tmp_path / "source", "llama/gqa", num_hidden_layers=5)
    config = json.loads((source / "config.json").read_text()) | {"architectures": [architecture], "model_type": kind}
    (source / "config.json").write_text(json.dumps(config | more))
    same(File(source).write(tmp_path / "file.gguf"), source, 1e-5)


@pytest.mark.parametrize("variant", ["gemma/two", "gemma/three", "gemma/three_v4"])
def test_gemmas_take_the_scale_of_scores_from_the_size_of_heads(variant, tmp_path):
    source = random(tmp_path / "source", variant, query_pre_attn_scalar=10)
    same(File(source).write(tmp_path / "file.gguf"), source, 1e-5)


@pytest.mark.parametrize("variant, layers", [("gemma/two", 46), ("gemma/three_v4", 62)])
def test_the_largest_gemmas_take_it_from_the_width(variant, layers, tmp_path):
    source = random(tmp_path / "source", variant, num_hidden_layers=layers)
    config = Checkpoint.open(File(source).write(tmp_path / "file.gguf")).config
    assert (config["query_pre_attn_scalar"], config["head_dim"]) == (6, 10)


def test_layers_with_a_window_as_files_name_them(tmp_path):
    def types(**keys):
        file = File(GOLDEN / "gemma/three_defaults")
        name = "gemma3.attention.sliding_window"
        file.keys |= {f"{name}{key}": value for key, value in keys.items()}
        config = Checkpoint.open(file.write(tmp_path / "file.gguf")).config
        return [kind[0] for kind in config["layer_types"]]

    assert types() == list("sssssf")
    assert types(_pattern=3) == list("ssfssf")
    assert types(_pattern=0) == list("ssssss")
    assert types(_pattern=[True, False, False, True, True, True]) == list("sffsss")
    for window in ({"": 0}, {"_pattern": 1}):
        assert types(**window) == list("ffffff")
    with pytest.raises(CheckpointError, match="sliding_window_pattern: expected a number, or 6 flags"):
        types(_pattern=[True])


@pytest.mark.parametrize("variant", ["gemma/two", "gpt_oss/plain"])
def test_some_have_one_base_for_all_layers(variant, tmp_path):
    file = File(GOLDEN / variant)
    file.keys[f"{file.arch}.rope.freq_base_swa"] = 77.0
    with pytest.raises(CheckpointError, match=r"freq_base_swa: expected the rope.freq_base, got 77"):
        Checkpoint.open(file.write(tmp_path / "file.gguf"))


@pytest.mark.parametrize("variant", ["llama/gqa", "gpt2/plain", "gemma/two", "gemma/three"])
def test_what_llama_cpp_saves_of_any_architecture_changes_nothing(variant, tmp_path):
    """`llama_model_save_to_file` writes its defaults of fields that the architecture does not have."""
    file = File(GOLDEN / variant)
    expected = Checkpoint.open(file.write(tmp_path / "file.gguf")).config
    saved = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0, "rope.freq_base_swa": 10000.0}
    saved |= {"rope.scaling.yarn_ext_factor": -1.0, "logit_scale": 0.0, "rope.scaling.alpha": 0.0}
    own = {}
    if "query_pre_attn_scalar" in expected:
        own["final_logit_softcapping"] = expected["final_logit_softcapping"] or 0.0
        own["attention.scale"] = expected["query_pre_attn_scalar"] ** -0.5
        own["attention.sliding_window_pattern"] = [int(kind != "full_attention") for kind in expected["layer_types"]]
    prefix = lambda keys: {f"{file.arch}.{key}": value for key, value in keys.items()}  # noqa: E731
    file.keys = prefix(saved) | file.keys | prefix(own)
    assert Checkpoint.open(file.write(tmp_path / "saved.gguf")).config == expected


def as_floats(file):
    """The same file with the values that the package dequantises."""
    floats = File(file.folder, split=file.split)
    floats.tensors = {name: file.floats(name).numpy() for name in file.tensors}
    return floats


@pytest.mark.parametrize("format", ["F16", "BF16", *BLOCKS])
@pytest.mark.parametrize("variant", ["llama/gqa", "llama/tied"])
def test_formats_are_what_the_package_dequantises(variant, format, tmp_path):
    file = File(random(tmp_path / "source", variant, **WIDE), TYPES[format])
    same(file.write(tmp_path / "file.gguf"), as_floats(file).write(tmp_path / "floats.gguf"), 1e-4)
    checkpoint = Checkpoint.open(tmp_path / "file.gguf")
    assert (checkpoint.quantization is not None) == (format in BLOCKS)
    wanted = sum(Checkpoint.open(tmp_path / "floats.gguf").tensors[name].elements for name in checkpoint.tensors)
    assert sum(info.elements for info in checkpoint.tensors.values()) == wanted


def test_draft_layers_of_files_are_left_out(tmp_path):
    file = File(GOLDEN / "qwen3_5/plain")
    layers = {name.replace("blk.1.", "blk.2."): x for name, x in file.tensors.items() if name.startswith("blk.1.")}
    for name, x in (layers | {"blk.2.nextn.eh_proj.weight": np.ones((24, 48), np.float32)}).items():
        file.add(name, x)
    file.keys |= {"qwen35.block_count": 3, "qwen35.nextn_predict_layers": 1}
    same(file.write(tmp_path / "file.gguf"), GOLDEN / "qwen3_5/plain", 1e-5)


WRONG_KEYS = {
    "relatives/olmo": [
        ({"attention.clamp_kqv": -8.0}, "attention.clamp_kqv: expected a number from 0"),
        ({"attention.layer_norm_epsilon": 1e-6}, "attention.layer_norm_epsilon: expected 1e-5"),
    ],
    "granite/plain": [({"rope.scaling.finetuned": False}, "rope.scaling.finetuned: expected true")],
    "experts/granite": [({"rope.scaling.finetuned": False}, "rope.scaling.finetuned: expected true")],
    "hunyuan/plain": [({"rope.scaling.alpha": 50.0}, "rope.scaling.alpha: expected nothing: it is not supported")],
    "relatives/hunyuan_moe": [({"expert_shared_feed_forward_length": 8}, "expected the width of the experts, 24")],
    "relatives/exaone_moe": [
        ({"expert_gating_func": 1}, "expert_gating_func: expected 2"),
        ({"attention.sliding_window": None}, "attention.sliding_window: expected a value"),
    ],
    "nemotron_h/experts": [({"moe_latent_size": 8}, "moe_latent_size: expected nothing")],
    "mamba2/plain": [
        ({"ssm.inner_size": 50}, "ssm.inner_size: expected a multiple of ssm.time_step_rank, 8"),
        ({"ssm.inner_size": 56}, "num_heads: expected expand"),
        ({"ssm.group_count": 3}, "n_groups: expected a divisor of num_heads 8"),
        ({"ssm.state_size": None}, "ssm.state_size: expected a value"),
    ],
    "nemotron_h/plain": [
        ({"attention.head_count_kv": 2}, "head_count_kv: expected a number for each layer"),
        ({"ssm.inner_size": 31}, "ssm.inner_size: expected a multiple of ssm.time_step_rank, 6"),
    ],
    "alibi/mpt": [
        ({"attention.max_alibi_bias": 0.0}, "max_alibi_bias: expected a whole number from 1 on"),
        ({"attention.max_alibi_bias": None}, "max_alibi_bias: expected a value"),
    ],
    "apertus/plain": [
        ({"attention.clamp_kqv": 8.0}, "attention.clamp_kqv: expected nothing: it is not supported"),
        ({"xielu.beta": [0.5]}, "xielu.beta: expected a number, or 2 of them"),
        ({"xielu.eps": "0"}, "xielu.eps: expected a number"),
    ],
    "gpt_neox/starcoder": [({"attention.head_count_kv": 4}, "head_count_kv: expected a whole number from 1 to 1")],
    "glm/four": [({"rope.dimension_sections": [2, -1]}, "dimension_sections: expected a list of sizes")],
    "relatives/granite_swa": [
        ({"attention.rope_pattern": [True]}, "attention.rope_pattern: expected 2 flags"),
        ({"attention.rope_pattern": [1, 0]}, "attention.rope_pattern: expected 2 flags"),
        ({"attention.sliding_window": None}, "attention.sliding_window: expected a value"),
    ],
    "experts/afmoe": [({"expert_weights_norm": False}, "expert_weights_norm: expected true")],
    "experts/dots": [({"expert_weights_norm": False, "expert_gating_func": 1}, "expert_gating_func: expected 2")],
    "glm/moe": [({"expert_weights_norm": False, "expert_gating_func": 1}, "expert_gating_func: expected 2")],
    "published/ling": [
        ({"expert_weights_norm": False}, "expert_weights_norm: expected true"),
        ({"expert_weights_norm": False, "expert_gating_func": 1}, "expert_gating_func: expected 2"),
    ],
    "muse/plain": [({"logit_scale": None}, "logit_scale: expected a")],
    "laguna/plain": [({"expert_weights_norm": False}, "expert_weights_norm: expected true")],
    "relatives/hy3": [({"expert_weights_norm": False}, "expert_weights_norm: expected true")],
    "relatives/cohere_moe": [
        ({"expert_weights_norm": False}, "expert_weights_norm: expected true, as weights are parts"),
        ({"expert_gating_func": 2, "expert_weights_scale": 2.0}, "expert_weights_scale: expected 1"),
        ({"expert_gating_func": 4}, "expert_gating_func: expected 1 or 2"),
    ],
    "experts/minimax": [({"expert_weights_scale": 2.0}, "expert_weights_scale: expected 1")],
    "gemma4/plain": [
        ({"attention.value_length": 8}, "value_length: expected the attention.key_length, 20"),
        ({"rope.dimension_count_swa": 4}, "dimension_count_swa: expected the attention.key_length_swa, 8"),
        ({"attention.head_count_kv": [2, 1]}, "head_count_kv: expected a number, or 3 of them"),
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type: expected none"),
        ({"attention.shared_kv_layers": 3}, "shared_kv_layers: expected a whole number from 0 to 2"),
    ],
    "qwen3_5/recurrent": [
        ({"attention.recurrent_layers": [False]}, "attention.recurrent_layers: expected 2 flags"),
        ({"attention.recurrent_layers": [1, 0]}, "attention.recurrent_layers: expected 2 flags"),
        ({"ssm.inner_size": 23}, "ssm.inner_size: expected a multiple of ssm.time_step_rank, 4"),
        ({"ssm.time_step_rank": None}, "ssm.time_step_rank: expected a value"),
        ({"ssm.time_step_rank": 3}, "linear_num_value_heads: expected a multiple of linear_num_key_heads, 2"),
        ({"ssm.group_count": 1}, r"in_proj_qkv.weight in .*expected \[40, 24\]"),
    ],
    "deepseek/plain": [
        ({"expert_weights_norm": True}, "expert_weights_norm: expected false"),
        ({"expert_gating_func": 3}, "expert_gating_func: expected 1 or 2"),
        ({"expert_group_count": 4}, "n_group: expected a divisor of n_routed_experts, 6"),
        ({"rope.dimension_count": 18}, "rope.dimension_count: expected less than .*key_length_mla, which is 18"),
        ({"attention.kv_lora_rank": None}, "attention.kv_lora_rank: expected a value"),
        ({"attention.temperature_scale": 0.1}, "attention.temperature_scale: expected nothing: it is not supported"),
        ({"attention.key_length_mla": None}, r"unknown .*self_attn.k_b_proj.weight"),
    ],
    "mistral/mistral4": [
        ({"expert_gating_func": 2}, "expert_gating_func: expected 1"),
        ({"expert_group_count": 2}, "n_group: expected 1"),
        ({"rope.scaling.type": "linear"}, "original_max_position_embeddings: expected a value"),
    ],
    "granite/scans": [
        ({"attention.head_count_kv": 2}, "attention.head_count_kv: expected a number for each layer"),
        ({"attention.head_count_kv": [0, 2, 0]}, "attention.head_count_kv: expected a number for each layer"),
        ({"attention.head_count_kv": [0, 0]}, "attention.head_count_kv: expected one number for all layers"),
        ({"ssm.inner_size": 40}, "ssm.inner_size: expected a multiple of embedding_length, 24"),
        ({"ssm.time_step_rank": None}, "ssm.time_step_rank: expected a value"),
        ({"ssm.group_count": 3}, "mamba_n_groups: expected a divisor of mamba_n_heads 8"),
        ({"ssm.state_size": 8}, r"in_proj.weight in .*expected \[120, 24\]"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("variant", "keys", "message"), [(variant, *row) for variant, rows in WRONG_KEYS.items() for row in rows]
)
def test_keys_are_checked(variant, keys, message, tmp_path):
    file = File(GOLDEN / variant)
    file.keys |= {key if key.startswith("xielu.") else f"{file.arch}.{key}": value for key, value in keys.items()}
    file.keys = {key: value for key, value in file.keys.items() if value is not None}
    with pytest.raises(CheckpointError, match=message):
        Engine.load(file.write(tmp_path / "file.gguf"), kv_memory=1 << 24)


def test_an_interval_names_the_layers_with_attention(tmp_path):
    file = File(GOLDEN / "qwen3_5/recurrent_interval")
    same(file.write(tmp_path / "file.gguf"), GOLDEN / "qwen3_5/recurrent_interval", 1e-5)
    del file.keys["qwen35.full_attention_interval"]
    config = Checkpoint.open(file.write(tmp_path / "file.gguf")).config
    assert config["layer_types"] == ["linear_attention"] * 3 + ["full_attention"]


@pytest.mark.parametrize("format", ["F32", "F16", "Q8_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("variant", ["qwen3_5/recurrent", "experts/qwen3_next_recurrent"])
def test_gated_delta_nets_in_blocks(variant, format, tmp_path):
    """Heads of 64 values in blocks of 32 or 256: those of a row may change places inside of a block."""
    sizes = WIDE | {"linear_value_head_dim": 64, "linear_key_head_dim": 32, "mlp_only_layers": []}
    source = random(tmp_path / "source", variant, **sizes)
    file = File(source, TYPES[format])
    if format == "F32":
        same(file.write(tmp_path / "file.gguf"), source, 1e-4)
    same(file.write(tmp_path / "file.gguf"), as_floats(file).write(tmp_path / "floats.gguf"), 1e-4)


LATENT = {
    "kv_lora_rank": 256,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "q_lora_rank": 256,
    "moe_intermediate_size": 256,
}


@pytest.mark.parametrize("split", [True, False], ids=["split", "as one"])
@pytest.mark.parametrize("format", ["F32", "F16", "Q8_0", "Q4_1", "Q6_K"])
def test_latents_in_blocks(format, split, tmp_path, monkeypatch):
    """Matrices of heads lie transposed in files, where rows of 64 elements are no Q6_K; or in one matrix. A GPU has
    them as floats."""
    source = random(tmp_path / "source", "deepseek/three", **WIDE | LATENT)
    file = File(source, TYPES[format], split=split)
    files = file.write(tmp_path / "file.gguf"), as_floats(file).write(tmp_path / "floats.gguf")
    same(*files, 1e-4)
    monkeypatch.setattr("models.latent.stacks", lambda device: True)
    same(*files, 1e-4)
    config = Checkpoint.open(tmp_path / "file.gguf").config
    assert (config["kv_b_split"], config["architectures"]) == (split, ["DeepseekV3ForCausalLM"])


def test_queries_grow_in_files_that_do_not_say_so(tmp_path):
    file = File(GOLDEN / "mistral/mistral4")
    del file.keys["mistral4.attention.temperature_scale"]
    assert Checkpoint.open(file.write(tmp_path / "file.gguf")).config["rope_scaling"]["llama_4_scaling_beta"] == 0.1


def test_layers_without_experts_between_others_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="leading_dense_block_count: expected experts in all layers from 0 on"):
        Engine.load(File(GOLDEN / "deepseek/glm_kinds").write(tmp_path / "file.gguf"))


def test_halves_of_a_matrix_that_differ_are_refused(tmp_path):
    file = File(GOLDEN / "granite/scans", formats={"blk.1.ffn_up.weight": TYPES.F16})
    with pytest.raises(CheckpointError, match=r"shared_mlp.gate_proj.weight is F32, and the matrix beside it F16"):
        Checkpoint.open(file.write(tmp_path / "file.gguf"))
    del file.tensors["blk.1.ffn_up.weight"]
    with pytest.raises(CheckpointError, match=r"shared_mlp.gate_proj.weight: there is no other half"):
        Checkpoint.open(file.write(tmp_path / "file.gguf"))


def test_layers_without_experts_beside_gated_delta_nets_are_refused(tmp_path):
    with pytest.raises(CheckpointError, match="experts in all layers, as there are gated delta nets"):
        Engine.load(File(GOLDEN / "experts/qwen3_next_recurrent").write(tmp_path / "file.gguf"))


@pytest.mark.parametrize("format", ["F16", "Q4_1", "Q5_0", "Q6_K"])
@pytest.mark.parametrize("variant", [
    "phi/plain", "phi3/plain", "gpt2/plain", "qwen2/tied", "qwen3/bias", "gemma/one", "gemma/two", "gemma/three",
    "olmo/plain", "hunyuan/plain", "stablelm/plain", "stablelm/qk_layernorm", "lfm2/plain", "experts/qwen2",
    "glm/four", "gpt_neox/plain", "cohere/plain", "llamas/nemotron",
    "experts/lfm2", "gpt_oss/plain", "qwen3_5/bias", "experts/qwen3_5", "experts/qwen3_next", "granite/scans_groups",
    "apertus/plain", "nemotron_h/plain", "nemotron_h/experts", "gemma3n/plain", "falcon_h1/norm",
    "laguna/plain",
])  # fmt: skip
def test_formats_of_families(variant, format, tmp_path):
    file = File(random(tmp_path / "source", variant, **WIDE), TYPES[format])
    same(file.write(tmp_path / "file.gguf"), as_floats(file).write(tmp_path / "floats.gguf"), 1e-4)


@pytest.mark.parametrize("variant", ["llama/tied", "phi3/plain", "experts/qwen3", "qwen3_5/bias"])
def test_nvfp4_with_scales_of_matrices(variant, tmp_path):
    """Some matrices have a number each that multiplies all of it, of experts one for each; those of activations are not
    used."""
    file = File(random(tmp_path / "source", variant, **WIDE), TYPES.NVFP4)
    floats, draw = as_floats(file), np.random.default_rng(3)
    matrices = [name for name, kind in file.types.items() if kind == TYPES.NVFP4 and name.startswith("blk.")]
    for name in matrices[::2]:
        own = name.removesuffix("weight")
        scales = draw.uniform(0.5, 2, floats.tensors[name].shape[:-2] or 1).astype(np.float32)
        file.add(f"{own}scale", scales)
        file.add(f"{own}input_scale", np.ones(1, np.float32))
        floats.tensors[name] = floats.tensors[name] * scales.reshape(-1, *([1] * (floats.tensors[name].ndim - 1)))
    same(file.write(tmp_path / "file.gguf"), floats.write(tmp_path / "floats.gguf"), 1e-4)
    convert.convert(tmp_path / "file.gguf", tmp_path / "folder")
    ours, theirs = (Engine.load(tmp_path / name, kv_memory=1 << 22).logits(PROMPT) for name in ("folder", "file.gguf"))
    assert (ours - theirs).abs().max() <= 1e-5 * theirs.std()


def test_experts_in_mxfp4_as_files_have_them(tmp_path):
    """Attention in Q8_0 beside them; the matrices are those of the file, exactly."""
    source = random(tmp_path / "source", "gpt_oss/plain", **WIDE)
    file = File(source, TYPES.MXFP4, {f"blk.{i}.attn_{part}.weight": TYPES.Q8_0 for i in range(3) for part in "qkv"})
    same(file.write(tmp_path / "file.gguf"), as_floats(file).write(tmp_path / "floats.gguf"), 1e-4)
    checkpoint = Checkpoint.open(tmp_path / "file.gguf")
    assert checkpoint.config["rope_scaling"]["truncate"] is False
    assert [kind[0] for kind in checkpoint.config["layer_types"]] == list("sfs")
    for part in ("gate", "up", "down"):
        name = f"model.layers.1.mlp.experts.4.{part}_proj.weight"
        exact = file.floats(f"blk.1.ffn_{part}_exps.weight")[4]
        weight = checkpoint.grouped(name, name, tuple(exact.shape), "Linear", biased=True)
        assert weight and weight.floats().equal(exact)
    engine = Engine.load(tmp_path / "file.gguf", kv_memory=1 << 22)
    assert (engine.runner.model.stack is not None) == (not cpp.why_not())


def test_mixed_formats_as_files_have_them(tmp_path):
    some = {"blk.0.attn_v.weight": TYPES.Q6_K, "blk.1.ffn_down.weight": TYPES.F16, "output.weight": TYPES.Q6_K}
    some |= {"blk.1.attn_q.weight": TYPES.Q5_0, "blk.1.attn_k.weight": TYPES.F32, "blk.1.ffn_up.weight": TYPES.IQ4_NL}
    source = random(tmp_path / "source", "llama/gqa", **WIDE)
    file = File(source, TYPES.Q4_K, some | {"token_embd.weight": TYPES.Q4_0})
    same(file.write(tmp_path / "file.gguf"), as_floats(file).write(tmp_path / "floats.gguf"), 1e-4)
    engine = Engine.load(tmp_path / "file.gguf", kv_memory=1 << 22)
    assert (engine.runner.model.stack is not None) == (not cpp.why_not())  # all layers in one call


@pytest.mark.parametrize("format", BLOCKS)
def test_rows_of_the_embedding_are_read_from_the_file(format, tmp_path):
    file = File(random(tmp_path / "source", "llama/tied", **WIDE), TYPES[format])
    checkpoint, name = Checkpoint.open(file.write(tmp_path / "file.gguf")), "model.embed_tokens.weight"
    rows, exact = checkpoint.rows(name, name, (104, 256)), file.floats("token_embd.weight")
    assert rows(list(range(104))).equal(exact) and rows([7, 3, 7]).equal(exact[[7, 3, 7]])
    grouped = checkpoint.grouped("lm_head.weight", name, (104, 256), "Linear", biased=False)
    assert grouped and grouped.floats().equal(exact) and grouped.floats(5, 9).equal(exact[5:9])


def test_names_are_those_of_the_package():
    """The other way round: every name of a checkpoint has the name in files that the package gives it."""
    kinds = {text: kind for kind, text in gguf.MODEL_ARCH_NAMES.items()}
    for arch, names in NAMES.items():
        theirs = gguf.get_tensor_name_map(kinds[LIKE.get(arch, arch)], 4)
        more = {"cls.output", *(["output_norm"] if arch.startswith("lfm2") else [])}  # which the package does not know
        more |= set() if arch in ("gpt2", "phi3") else {"blk.attn_qkv"}
        for own in names:
            if own in more:
                continue
            stored = own.replace("blk.", "blk.3.")
            found = checkpoint_name(arch, f"{stored}.weight").removesuffix(".weight")
            assert theirs.get_name(found) in (stored, None), (arch, own)
    assert checkpoint_name("llama", "blk.03.attn_q.weight") is None
    assert checkpoint_name("llama", "attn_q.weight") is None and checkpoint_name("llama", "blk.1.output.weight") is None


def test_a_reward_model(tmp_path):
    source = GOLDEN / "qwen3/classifier"
    file = File(source)
    ours = Engine.load(file.write(tmp_path / "file.gguf"), dtype="float32", kv_memory=1 << 22)
    theirs = Engine.load(source, dtype="float32", kv_memory=1 << 22)
    assert ours.shape.scores and torch.allclose(ours.logits(PROMPT), theirs.logits(PROMPT), atol=1e-5)


@pytest.mark.parametrize(
    "variant, arch", [("qwen2/plain", "qwen2vl"), ("qwen3/plain", "qwen3vl"), ("experts/qwen3", "qwen3vlmoe")]
)
def test_text_models_of_several_modalities(variant, arch, tmp_path):
    """Whose files hold the text model, with rotary axes that are alike for text."""
    file = File(GOLDEN / variant)
    file.keys = {key.replace(f"{file.arch}.", f"{arch}."): value for key, value in file.keys.items()}
    file.keys[f"{arch}.rope.dimension_sections"] = [2, 1, 1, 0]
    file.arch = arch
    same(file.write(tmp_path / "file.gguf"), GOLDEN / variant, 1e-5)


@pytest.mark.parametrize("format", ["Q4_1", "Q6_K"])
def test_parts_of_a_matrix(format, tmp_path):
    """Processes that share a matrix take some outputs or inputs each, packed as blocks where these are whole."""
    file = File(random(tmp_path / "source", "llama/gqa", **WIDE | {"intermediate_size": 1024}), TYPES[format])
    checkpoint, name = Checkpoint.open(file.write(tmp_path / "file.gguf")), "model.layers.0.mlp.down_proj.weight"
    weight = checkpoint.grouped(name, name, (256, 1024), "Linear", biased=False)
    x = torch.randn(3, 1024, generator=torch.Generator().manual_seed(0))
    for outs, ins in (
        (range(30, 70), None),
        (None, range(256, 768)),
        (range(1, 9), range(0, 512)),
        (None, range(32, 96)),
    ):
        part = weight.part(outs, ins)
        floats = weight.floats()[outs or slice(None)][:, ins or slice(None)]
        assert part.floats().equal(floats)
        layer = GroupedLinear([part], dtype=torch.float32, device=torch.device("cpu"))
        mine = x[:, ins or slice(None)]
        assert torch.allclose(layer(mine), mine @ floats.T, atol=1e-4)


@pytest.mark.parametrize("variant", [
    *("phi/gqa", "llama/gqa", "llama/both_biases", "qwen3_5/bias", "qwen3_5/recurrent", "gemma4/plain", "laguna/bias"),
    *("glm/four", "nemotron_h/plain", "experts/ernie"),
])  # fmt: skip
def test_one_matrix_for_queries_keys_and_values(variant, tmp_path):
    """A fused projection, which llama.cpp's converter writes on request where a layer has all three."""
    file = File(GOLDEN / variant)
    for name in [name for name in file.tensors if ".attn_v." in name]:
        parts = [name.replace("attn_v", f"attn_{part}") for part in "qkv"]
        joined = torch.cat([torch.from_numpy(file.tensors.pop(part)) for part in parts])
        file.add(name.replace("attn_v", "attn_qkv"), joined.numpy())
    same(file.write(tmp_path / "file.gguf"), GOLDEN / variant, 1e-5)


@pytest.mark.parametrize("format", ["Q8_0", "Q4_K"])
def test_one_matrix_of_blocks(format, tmp_path):
    file = File(random(tmp_path / "source", "llama/gqa", **WIDE), TYPES[format])
    apart = Engine.load(file.write(tmp_path / "apart.gguf"), dtype="float32", kv_memory=1 << 24).logits(PROMPT)
    for layer in range(file.config["num_hidden_layers"]):
        parts = [file.tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
        name = f"blk.{layer}.attn_qkv.weight"
        file.tensors[name], file.types[name] = np.concatenate(parts), TYPES[format]
    joined = Engine.load(file.write(tmp_path / "joined.gguf"), dtype="float32", kv_memory=1 << 24).logits(PROMPT)
    assert joined.equal(apart)


@pytest.mark.parametrize("change", [
    *({"attention.head_count": 0}, {"attention.key_length": 64}, {"attention.value_length": "a"}),
    {"attention.head_count_kv": [1]},
])  # fmt: skip
def test_one_matrix_that_does_not_fit(change, tmp_path):
    file = File(GOLDEN / "llama/gqa")
    for layer in range(file.config["num_hidden_layers"]):
        parts = [file.tensors.pop(f"blk.{layer}.attn_{part}.weight") for part in "qkv"]
        file.add(f"blk.{layer}.attn_qkv.weight", np.concatenate(parts))
    file.keys |= {f"llama.{key}": value for key, value in change.items()}
    with pytest.raises(CheckpointError):
        Engine.load(file.write(tmp_path / "file.gguf"), kv_memory=1 << 24)


@pytest.mark.parametrize("variant", ["experts/ernie", "experts/qwen2"])
def test_rows_of_one_that_older_converters_wrote_as_vectors(variant, tmp_path):
    file = File(GOLDEN / variant)
    rows = [name for name, x in file.tensors.items() if x.ndim == 2 and len(x) == 1]
    assert rows
    for name in rows:
        file.tensors[name] = file.tensors[name][0]
    same(file.write(tmp_path / "file.gguf"), GOLDEN / variant, 1e-5)


# --- rotary embeddings ---


@pytest.mark.parametrize("dims, length, factor, low, high", [
    *((dims, length, factor, 1, 4) for dims in (16, 64, 128) for length, factor in ((8192, 32), (64, 8))),
    *((dims, 700, 6.5, 1.25, 9.0) for dims in (64, 128)),  # from two frequencies between those kept and those slowed
])  # fmt: skip
def test_parameters_of_llama_3_are_recovered(dims, length, factor, low, high, tmp_path):
    made = RopeConfig(dims, "llama3", 500000.0, length, factor, low, high)
    inv_freq, plain = RotaryEmbedding(made).inv_freq, RotaryEmbedding(RopeConfig(dims, theta=500000.0)).inv_freq
    found = rotary._llama3(GGUF(tmp_path, {}, {}), 500000.0, dims, (plain / inv_freq).double())
    rope = {"head_dim": dims, "rope_theta": 500000.0, "rope_scaling": found}
    again = RotaryEmbedding(RopeConfig.from_hf(rope, dims, 4096)).inv_freq
    assert torch.allclose(again, inv_freq, rtol=1e-5, atol=0)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"rope.scaling.type": "linear", "rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.factor": 4.0}, 4.0),
        ({"rope.scaling.type": "none", "rope.scaling.factor": 4.0}, None),
        ({"rope.scale_linear": 4.0}, 4.0),
        ({"rope.scaling.factor": 0.0, "rope.scale_linear": 4.0}, None),
    ],
)
def test_scaling_without_a_type_is_linear(keys, factor, tmp_path):
    """llama.cpp does the same. The newer key of the factor counts more."""
    file = File(GOLDEN / "llama/plain")
    file.keys |= {f"llama.{key}": value for key, value in keys.items()}
    found = Checkpoint.open(file.write(tmp_path / "file.gguf")).config["rope_scaling"]
    assert (found and found["factor"]) == factor


def test_other_factors_are_refused(tmp_path):
    file = File(GOLDEN / "llama/llama3")
    file.tensors["rope_freqs.weight"][:] = [1, 1.5, 1, 2, 1, 3, 1, 1]
    with pytest.raises(CheckpointError, match="not those of Llama 3"):
        Checkpoint.open(file.write(tmp_path / "file.gguf"))
    file.tensors["rope_freqs.weight"][:] = 1
    assert Checkpoint.open(file.write(tmp_path / "file.gguf")).config["rope_scaling"] is None
