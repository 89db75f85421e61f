"""GGUF files to folders: the numbers that the `gguf` package gives, the same tokens, and nothing half done."""

import json
import struct
import sys
from pathlib import Path

import pytest
import torch
from sentencepiece import SentencePieceProcessor

from engine import CheckpointError, Engine, UsageError
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from models import FAMILIES
from models.checkpoint.fields import Fields
from models.checkpoint.headers import WEIGHTS, Checkpoint, write_tensors
from models.quantized.own import GroupedReader
from models.rope import RopeConfig, RotaryEmbedding
from search import Greedy, Trie
from tests.tools.gguf_files import File, gguf
from tools import convert
from tools import gguf as converter
from tools.gguf import families, vocabulary

GOLDEN = Path(__file__).parents[1] / "golden"
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
    ),
]
WIDE = {"vocab_size": 104, "hidden_size": 256, "intermediate_size": 512, "head_dim": 64}
WIDE |= {"n_embd": 256, "n_inner": 512}
PROMPT = list(range(3, 30))


def random(folder, variant, **changes):
    """A checkpoint of random weights, of a golden one's configuration with `changes`. Returns the folder."""
    folder.mkdir()
    for path in (GOLDEN / variant).glob("*token*.json"):
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((GOLDEN / variant / "config.json").read_text())
    config |= {key: value for key, value in changes.items() if key in config}
    (folder / "config.json").write_text(json.dumps(config))
    family, draw, tensors = FAMILIES[config["architectures"][0]], torch.Generator().manual_seed(5), {}
    c = family.read(Fields(config, "config.json"))
    for name, shape in family.names.tensors(c).items():
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        tensors[name] = torch.randn(shape, generator=draw) * scale + ("norm" in name or ".ln_" in name)
    if c.tied:
        del tensors["lm_head.weight"]
    with (folder / WEIGHTS).open("wb") as file:
        write_tensors(file, tensors)
    return folder


def converted(file, folder):
    """Write a file and convert it. Returns the folder."""
    convert.convert(file.write(folder.with_suffix(".gguf")), folder)
    return folder


def same(folder, other, relative):
    """Whether two checkpoints have the same logits, greedy tokens and beams."""
    ours, theirs = (Engine.load(path, dtype="float32", kv_memory=1 << 22) for path in (folder, other))
    expected = theirs.logits(PROMPT)
    assert (ours.logits(PROMPT) - expected).abs().max() <= relative * expected.std()
    for search in (Greedy(), Trie(beams=4)):
        answers = [engine.generate([PROMPT], search, max_new_tokens=12, ignore_eos=True) for engine in (ours, theirs)]
        assert len({tuple(answer[0].outputs[0].token_ids) for answer in answers}) == 1


@pytest.mark.parametrize("variant", FLOATS)
def test_floats_are_those_of_the_checkpoint(variant, tmp_path):
    same(converted(File(GOLDEN / variant), tmp_path / "out"), GOLDEN / variant, 1e-5)


FACTORS = ("attention_multiplier", "embedding_multiplier", "logits_scaling", "residual_multiplier")


@pytest.mark.parametrize("architecture, kind, more", [
    ("GraniteForCausalLM", "granite", dict(zip(FACTORS, (0.25, 3.0, 2.0, 0.5), strict=True))),
    ("SmolLM3ForCausalLM", "smollm3", {"no_rope_layers": [1, 1, 1, 0, 1]}),
])  # fmt: skip
def test_llamas_with_more(architecture, kind, more, tmp_path):
    source = random(tmp_path / "source", "llama/gqa", num_hidden_layers=5)
    config = json.loads((source / "config.json").read_text()) | {"architectures": [architecture], "model_type": kind}
    (source / "config.json").write_text(json.dumps(config | more))
    same(converted(File(source), tmp_path / "out"), source, 1e-5)


@pytest.mark.parametrize("variant", ["gemma/two", "gemma/three", "gemma/three_v4"])
def test_gemmas_take_the_scale_of_scores_from_the_size_of_heads(variant, tmp_path):
    source = random(tmp_path / "source", variant, query_pre_attn_scalar=10)
    same(converted(File(source), tmp_path / "out"), source, 1e-5)


@pytest.mark.parametrize("variant, layers", [("gemma/two", 46), ("gemma/three_v4", 62)])
def test_the_largest_gemmas_take_it_from_the_width(variant, layers, tmp_path):
    source = random(tmp_path / "source", variant, num_hidden_layers=layers)
    config = json.loads((converted(File(source), tmp_path / "out") / "config.json").read_text())
    assert (config["query_pre_attn_scalar"], config["head_dim"]) == (6, 10)


def test_layers_with_a_window_as_files_name_them(tmp_path):
    def types(**keys):
        file = File(GOLDEN / "gemma/three_defaults")
        name = "gemma3.attention.sliding_window"
        file.keys |= {f"{name}{key}": value for key, value in keys.items()}
        out = converted(file, tmp_path / f"out{len(list(tmp_path.iterdir()))}")
        return [kind[0] for kind in json.loads((out / "config.json").read_text())["layer_types"]]

    assert types() == list("sssssf")
    assert types(_pattern=3) == list("ssfssf")
    assert types(_pattern=0) == list("ssssss")
    assert types(_pattern=[True, False, False, True, True, True]) == list("sffsss")
    for window in ({"": 0}, {"_pattern": 1}):
        assert types(**window) == list("ffffff")
    with pytest.raises(CheckpointError, match="sliding_window_pattern: expected a number, or 6 flags"):
        types(_pattern=[True])


def test_gemma_2_has_one_base_for_all_layers(tmp_path):
    file = File(GOLDEN / "gemma/two")
    file.keys["gemma2.rope.freq_base_swa"] = 77.0
    with pytest.raises(CheckpointError, match=r"freq_base_swa: expected the rope.freq_base, got 77"):
        converted(file, tmp_path / "out")


@pytest.mark.parametrize("format", ["F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K"])
@pytest.mark.parametrize("variant", ["llama/gqa", "llama/tied", "phi/plain", "phi3/plain", "gpt2/plain", "qwen3/bias"])
def test_formats_are_what_the_package_dequantises(variant, format, tmp_path):
    source = random(tmp_path / "source", variant, **WIDE)
    file, floats = File(source, TYPES[format]), File(source)
    floats.tensors = {name: file.floats(name).numpy() for name in file.tensors}
    same(converted(file, tmp_path / "out"), converted(floats, tmp_path / "floats"), 1e-3)
    dtypes = {info.dtype for info in Checkpoint.open(tmp_path / "out").tensors.values()}
    assert (torch.uint8 in dtypes) == format.startswith("Q")  # it is not turned into floats


def test_mixed_formats_as_files_have_them(tmp_path, monkeypatch):
    monkeypatch.setattr(converter.blocks, "PIECE", 1000)  # rows are converted some at a time
    source = random(tmp_path / "source", "llama/gqa", **WIDE)
    some = {"blk.0.attn_v.weight": TYPES.Q6_K, "blk.1.ffn_down.weight": TYPES.F16, "output.weight": TYPES.Q6_K}
    file, floats = File(source, TYPES.Q4_K, some | {"token_embd.weight": TYPES.Q4_0}), File(source)
    floats.tensors = {name: file.floats(name).numpy() for name in file.tensors}
    same(converted(file, tmp_path / "out"), converted(floats, tmp_path / "floats"), 1e-3)


@pytest.mark.parametrize("format", ["Q8_0", "Q4_0", "Q4_K", "Q6_K"])
def test_values_of_blocks(format, tmp_path):
    file = File(random(tmp_path / "source", "llama/tied", **WIDE), TYPES[format])
    data = file.tensors["token_embd.weight"]
    if format == "Q4_K":
        data[0, 0:2] = 0  # no scales: minima alone
        data[1, 2:4] = 0  # no minima
        data[2, 4:16] = 0  # scales and minima of 0
        data[3, 4:8] &= 0xC0  # some of each
        data[4, 1] |= 0x80  # a negative scale
    folder = converted(file, tmp_path / "out")
    checkpoint, shape = Checkpoint.open(folder), (104, 256)
    rows = checkpoint.rows("model.embed_tokens.weight", "model.embed_tokens.weight", shape)
    assert isinstance(rows, GroupedReader)
    exact, found = file.floats("token_embd.weight"), rows(list(range(104)))
    assert found.isfinite().all()
    # Of Q4_K, scale * code - minimum is rounded otherwise than (code - zero) * scale.
    assert (found - exact).abs().max() <= (1e-6 * exact.abs().max() if format == "Q4_K" else 0.0)
    grouped = checkpoint.grouped("lm_head.weight", "model.embed_tokens.weight", shape, "Linear", biased=False)
    assert grouped and grouped.floats().equal(found) and grouped.floats(5, 9).equal(found[5:9])
    assert rows([7, 3, 7]).equal(found[[7, 3, 7]])


def test_one_matrix_for_queries_keys_and_values(tmp_path):
    file = File(GOLDEN / "phi/gqa")
    for layer in range(2):
        for kind in ("weight", "bias"):
            parts = [f"blk.{layer}.attn_{part}.{kind}" for part in "qkv"]
            joined = torch.cat([torch.from_numpy(file.tensors.pop(part)) for part in parts])
            file.add(f"blk.{layer}.attn_qkv.{kind}", joined.numpy())
    same(converted(file, tmp_path / "out"), GOLDEN / "phi/gqa", 1e-5)


# --- rotary embeddings ---


@pytest.mark.parametrize("dims, length, factor, low, high", [
    *((dims, length, factor, 1, 4) for dims in (16, 64, 128) for length, factor in ((8192, 32), (64, 8))),
    *((dims, 700, 6.5, 1.25, 9.0) for dims in (64, 128)),  # from two frequencies between those kept and those slowed
])  # fmt: skip
def test_parameters_of_llama_3_are_recovered(dims, length, factor, low, high, tmp_path):
    made = RopeConfig(dims, "llama3", 500000.0, length, factor, low, high)
    inv_freq, plain = RotaryEmbedding(made).inv_freq, RotaryEmbedding(RopeConfig(dims, theta=500000.0)).inv_freq
    found = families._llama3(converter.GGUF(tmp_path, {}, {}), 500000.0, dims, (plain / inv_freq).double())
    rope = {"head_dim": dims, "rope_theta": 500000.0, "rope_scaling": found}
    again = RotaryEmbedding(RopeConfig.from_hf(rope, dims, 4096)).inv_freq
    assert torch.allclose(again, inv_freq, rtol=1e-5, atol=0)


def test_other_factors_are_refused(tmp_path):
    file = File(GOLDEN / "llama/llama3")
    file.tensors["rope_freqs.weight"][:] = [1, 1.5, 1, 2, 1, 3, 1, 1]
    with pytest.raises(CheckpointError, match="not those of Llama 3"):
        converted(file, tmp_path / "out")
    file.tensors["rope_freqs.weight"][:] = 1
    folder = converted(file, tmp_path / "out")
    assert json.loads((folder / "config.json").read_text())["rope_scaling"] is None


# --- tokenizers ---


def texts(name):
    """Texts of a golden file, and words of them put together in many ways."""
    golden = json.loads((GOLDEN / f"text/{name}.json").read_text(encoding="utf-8"))
    found = [text["text"] for text in golden["texts"]]
    words = [word for text in found for word in text.split(" ")]
    step = [" ".join(words[i % 7 :: i]) for i in range(3, 150)]
    return [*found, *step, *("  ".join(words[i : i + 9]) + "\n" * (i % 3) for i in range(0, len(words), 5))]


def vocabulary_of(file, folder):
    """The files of the tokenizer alone."""
    file.tensors.clear()
    read = vocabulary.read(converter.GGUF.open(file.write(folder.with_suffix(".gguf"))))
    folder.mkdir()
    for name, content in read.files(64).items():
        (folder / name).write_text(json.dumps(content))
    return read


@pytest.mark.parametrize("name, pre", [("bytelevel", "llama-bpe"), ("prepend", None)])
def test_tokenizers_give_the_ids_of_their_own_files(name, pre, tmp_path):
    file = File(GOLDEN / "llama/plain")
    file.folder = GOLDEN / "text" / name
    # The key of the first vocabulary for unknown tokens stays, and is an ordinary token of the second.
    file.keys |= file.vocabulary() | ({"tokenizer.ggml.pre": pre} if pre else {})
    vocabulary_of(file, tmp_path / "out")
    ours, theirs = Tokenizer.load(tmp_path / "out"), Tokenizer.load(file.folder)
    for text in texts(name):
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(theirs.encode(text)) == theirs.decode(theirs.encode(text))
    assert ours.special_tokens.items() >= theirs.special_tokens.items() - {("pad_token", "<unk>")}
    chats = json.loads((GOLDEN / f"text/{name}.json").read_text(encoding="utf-8"))["chats"]
    template = ChatTemplate.load(tmp_path / "out", ours)
    for chat in chats:
        spans = template.render(chat["messages"], add_generation_prompt=chat["add_generation_prompt"])
        assert spans == [(chat["text"], True)]


def test_scores_of_a_sentencepiece_model(tmp_path):
    folder = GOLDEN / "text/sp_bpe"
    model = SentencePieceProcessor(str(folder / "tokenizer.model"))
    ids = range(model.get_piece_size())
    kinds = {1: None, 2: model.is_unknown, 3: model.is_control, 5: model.is_unused, 6: model.is_byte}
    file = File(GOLDEN / "llama/plain")
    file.keys |= {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [model.id_to_piece(i) for i in ids],
        "tokenizer.ggml.scores": [model.get_score(i) for i in ids],
        "tokenizer.ggml.token_type": [next((k for k, test in kinds.items() if test and test(i)), 1) for i in ids],
        **{f"tokenizer.ggml.{name}_token_id": i for name, i in (("bos", model.bos_id()), ("eos", model.eos_id()))},
    }
    vocabulary_of(file, tmp_path / "out")
    ours = Tokenizer.load(tmp_path / "out")
    for text in texts("sp_bpe"):
        assert ours.encode(text, add_special=False) == model.encode(text)
        assert ours.encode(text)[0] == model.bos_id()
        assert ours.decode(model.encode(text)) == model.decode(model.encode(text))


def test_what_ends_a_text(tmp_path):
    file = File(GOLDEN / "llama/plain")
    tokens = ["<unk>", "<s>", "</s>", "<|eot_id|>", "<|im_end|>", "[PAD5]"]
    file.keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [2, 3, 3, 3, 1, 5]}
    file.keys |= {
        "tokenizer.ggml.eom_token_id": 0,
        "tokenizer.chat_template.tools": "T",
        "tokenizer.chat_template": "D",
    }
    file.keys["tokenizer.chat_templates"] = ["tools"]
    read = vocabulary_of(file, tmp_path / "out")
    assert read.ends() == [2, 0, 3]  # <|im_end|> is an ordinary token here
    assert Tokenizer.load(tmp_path / "out").size == 5  # padding is no token
    templates = json.loads((tmp_path / "out/tokenizer_config.json").read_text())["chat_template"]
    assert templates == [{"name": "default", "template": "D"}, {"name": "tools", "template": "T"}]


@pytest.mark.parametrize("key, value, what", [
    ("tokenizer.ggml.pre", "deepseek-llm", "'deepseek-llm' is a pre-tokenizer that is not supported"),
    ("tokenizer.ggml.model", "t5", "tokenizers of the kind 't5'"),
    ("tokenizer.ggml.merges", ["a q̃"], "merges: 'a q̃' does not fit the vocabulary"),
    ("tokenizer.ggml.token_type", [1, 2, 3], "token_type: expected 104 entries, got 3"),
    ("general.architecture", "opt", "'opt' is not supported"),
    ("llama.logit_scale", 0.5, "llama.logit_scale: expected nothing"),
    ("llama.expert_count", 8, "llama.expert_count: expected nothing"),
    ("llama.attention.head_count_kv", [1, 2], "one number for all layers"),
    ("llama.rope.dimension_count", 4, "rope.dimension_count: expected the size of a head, 8, got 4"),
    ("llama.rope.scaling.type", "longrope", "rope.scaling.type"),
    ("llama.attention.head_count_kv", 2, r"'blk.0.attn_k.weight': expected the shape \[16, 32\], got \[32, 32\]"),
    ("llama.block_count", 3, "'blk.2.attn_norm.weight' is missing"),
    ("llama.block_count", 1, "9 tensors have no place in this architecture, 'blk.1.attn_k.weight' for one"),
    ("split.count", 2, "one of several"),
    ("general.type", "adapter", "an adapter"),
])  # fmt: skip
def test_what_is_not_supported_is_named(key, value, what, tmp_path):
    file = File(GOLDEN / "llama/plain")
    file.keys[key] = value
    if key == "general.architecture":
        file.arch = file.keys.pop(key)
    with pytest.raises(CheckpointError, match=what):
        converted(file, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["out.gguf"]


# --- files ---


def test_a_format_that_is_not_read_is_named_with_its_tensor(tmp_path):
    source = random(tmp_path / "source", "llama/gqa", **WIDE)
    with pytest.raises(CheckpointError, match=r"'blk.0.ffn_up.weight' has the block format Q5_0.*\n.*\nsupported: F32"):
        converted(File(source, formats={"blk.0.ffn_up.weight": TYPES.Q5_0}), tmp_path / "out")


def test_scales_that_are_no_numbers(tmp_path):
    file = File(random(tmp_path / "source", "llama/gqa", **WIDE), TYPES.Q8_0)
    file.tensors["blk.1.ffn_up.weight"][3, 1] = 0x7C  # infinity
    with pytest.raises(CheckpointError, match=r"the scales of 'model.layers.1.mlp.up_proj.scale' are not finite"):
        converted(file, tmp_path / "out")


def test_damaged_files(tmp_path):
    path = File(GOLDEN / "llama/plain").write(tmp_path / "good.gguf")
    good = path.read_bytes()
    start = good.index(b"token_embd") - 8
    damaged = {
        "no GGUF file": b"GGML" + good[4:],
        "git-LFS": b"version https://git-lfs.github.com/spec/v1\n",
        "begins with b''": b"",
        "version 1 is not": good[:4] + struct.pack("<I", 1) + good[8:],
        "big-endian": good[:4] + struct.pack(">I", 3) + good[8:],
        "counts 4294967295 tensors": good[:8] + struct.pack("<Q", 2**32 - 1) + good[16:],
        "in the middle|UTF-8|a text of|twice|unknown type": good[:16] + struct.pack("<Q", 2**40) + good[24:],
        "a text of": good[:24] + struct.pack("<Q", 2**50) + good[32:],
        "unusable shape": good[: start + 8 + 17 + 4] + struct.pack("<Q", 2**60) + good[start + 8 + 17 + 12 :],
        "cut short": good[:-64],
    }
    with pytest.raises(CheckpointError, match="No such file"):
        convert.convert(tmp_path / "absent.gguf", tmp_path / "out")
    for what, data in damaged.items():
        (tmp_path / "bad.gguf").write_bytes(data)
        with pytest.raises(CheckpointError, match=what):
            convert.convert(tmp_path / "bad.gguf", tmp_path / "out")
    lengths = [*range(0, 400, 7), *range(400, len(good), 997), len(good) - 1]
    for length in lengths:
        (tmp_path / "bad.gguf").write_bytes(good[:length])
        with pytest.raises(CheckpointError):
            convert.convert(tmp_path / "bad.gguf", tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"good.gguf", "bad.gguf"}


def test_a_count_larger_than_the_file(tmp_path):
    file = File(GOLDEN / "llama/plain")
    file.keys["tokenizer.ggml.token_type"] = [7] * 104
    good = file.write(tmp_path / "file.gguf").read_bytes()
    at = good.index(b"tokenizer.ggml.token_type") + len(b"tokenizer.ggml.token_type") + 8
    assert good[at : at + 8] == struct.pack("<Q", 104)
    (tmp_path / "file.gguf").write_bytes(good[:at] + struct.pack("<Q", 2**60) + good[at + 8 :])
    with pytest.raises(CheckpointError, match="the header ends in the middle"):
        convert.convert(tmp_path / "file.gguf", tmp_path / "out")


def test_the_command(tmp_path, capsys):
    file = File(random(tmp_path / "source", "llama/tied", **WIDE), TYPES.Q4_K)
    path = file.write(tmp_path / "file.gguf")
    assert convert.main([str(path), "--output", str(tmp_path / "out")]) == 0
    out, err = capsys.readouterr()
    report = json.loads(out)
    assert report["architecture"] == "LlamaForCausalLM" and report["tokenizer"] == "gpt2"
    assert report["bytes"] == (tmp_path / "out" / WEIGHTS).stat().st_size and report["formats"]["Q4_K"] == 15
    assert "model.embed_tokens.codes: Q4_K [104, 256]" in err
    assert convert.main([str(path), "--output", str(tmp_path / "out")]) == 2
    assert "there already" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        convert.main([str(path)])


def test_an_engine_says_how_to_convert(tmp_path):
    path = File(GOLDEN / "llama/plain").write(tmp_path / "file.gguf")
    for folder in (path, tmp_path):
        with pytest.raises(CheckpointError, match=r"Convert it: `python -m tools.convert file.gguf --output DIR`"):
            Engine.load(folder)


def test_without_the_package(tmp_path, monkeypatch):
    path = File(GOLDEN / "llama/plain").write(tmp_path / "file.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(UsageError, match=r"pip install 'coppice\[gguf\]'"):
        convert.convert(path, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["file.gguf"]


@pytest.mark.parametrize("change, what", [
    (lambda c: c.update(version=2), "version 2 of the layout"),
    (lambda c: c["weights"]["lm_head"].update(kind="int3"), "lm_head.kind: expected one of int4, int8"),
    (lambda c: c["weights"]["lm_head"].update(group=64), r"lm_head.scale.*expected \[104, 4\]"),
    (lambda c: c["weights"].pop("model.layers.0.mlp.up_proj"), "missing model.layers.0.mlp.up_proj.weight"),
])  # fmt: skip
def test_damaged_folders(change, what, tmp_path):
    folder = converted(File(random(tmp_path / "source", "llama/gqa", **WIDE), TYPES.Q8_0), tmp_path / "out")
    config = json.loads((folder / "config.json").read_text())
    change(config["quantization_config"])
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=what):
        Engine.load(folder, kv_memory=1 << 22)
