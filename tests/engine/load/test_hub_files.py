"""Which files of a repository are needed, by what was asked for."""

from pathlib import Path

import pytest

from engine.errors import CheckpointError
from engine.load.hub_files import gguf_models, needed

SAFETENSORS = ["config.json", "model.safetensors", "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "x.py"]
QUANTS = ["m-Q4_0.gguf", "m-Q4_K_M.gguf", "m-Q4_K_S.gguf", "m-IQ4_NL.gguf", "UD/m-UD-Q8_0.gguf"]
SPLIT = [f"Q8_0/m-Q8_0-0000{i}-of-00002.gguf" for i in (1, 2)]


def unread(name: str) -> Path:
    raise AssertionError(name)


def choose(files: list[str], file: str = "") -> list[str]:
    found = needed(files, file, "hub/org/name", unread)
    assert found.gguf in ("", found.files[0])
    return [*found.files]


@pytest.mark.parametrize(
    ("files", "file", "wanted"),
    [
        ([*SAFETENSORS, *QUANTS], "", ["config.json", "tokenizer_config.json", "tokenizer.json", "model.safetensors"]),
        (["config.json", "model.safetensors", "vocab.json", "merges.txt", "tokenizer.bin"], "",
         ["config.json", "vocab.json", "merges.txt", "model.safetensors"]),
        (["config.json", "model.safetensors", "merges.txt", "tokenizer.json"], "",
         ["config.json", "tokenizer.json", "model.safetensors"]),
        (["config.json", "model.safetensors", "consolidated.safetensors", "params.json", "tekken.json"], "",
         ["config.json", "tekken.json", "model.safetensors"]),
        (["config.json", "model.safetensors", "tokenization_kimi.py", "tiktoken.model", "tokenizer_config.json"], "",
         ["config.json", "tokenizer_config.json", "tiktoken.model", "model.safetensors"]),
        (["config.json", "model.safetensors", "tokenizer.json", "tekken.json"], "",
         ["config.json", "tokenizer.json", "model.safetensors"]),
        ([*SAFETENSORS, *QUANTS], "Q4_K_M", ["m-Q4_K_M.gguf"]),
        (QUANTS, "", ["m-Q4_K_M.gguf"]),
        (["config.json", "m-Q2_K.gguf", "mmproj-m-f16.gguf", "m-imatrix.gguf"], "", ["m-Q2_K.gguf"]),
        (QUANTS, "q4_0", ["m-Q4_0.gguf"]),
        (QUANTS, "iq4_nl", ["m-IQ4_NL.gguf"]),
        (QUANTS, "UD-Q8_0", ["UD/m-UD-Q8_0.gguf"]),
        (QUANTS, "UD/m-UD-Q8_0.gguf", ["UD/m-UD-Q8_0.gguf"]),
        (["model_Q8_0.gguf", "model.Q4_0.gguf"], "Q8_0", ["model_Q8_0.gguf"]),
        (["model_Q8_0.gguf", "model.Q4_0.gguf"], "Q4_0", ["model.Q4_0.gguf"]),
        ([*QUANTS[:4], *SPLIT], "Q8_0", SPLIT),
        ([*QUANTS[:4], *SPLIT], SPLIT[1], SPLIT),
        (SPLIT, "", SPLIT),
    ],
)  # fmt: skip
def test_chosen(files: list[str], file: str, wanted: list[str]):
    assert choose(files, file) == wanted


@pytest.mark.parametrize(
    ("files", "file", "words"),
    [
        ([*QUANTS, *SPLIT], "Q8_0", "2 GGUF files suit: Q8_0/m-Q8_0-00001-of-00002.gguf, UD/m-UD-Q8_0.gguf"),
        (QUANTS[:1] + QUANTS[2:], "", "4 GGUF files suit"),
        (["a-Q4_K_M.gguf", "b-Q4_K_M.gguf"], "", "2 GGUF files suit"),
        (QUANTS, "Q4_K", "no GGUF file has the name or the quantisation Q4_K"),  # Q4_K_M and Q4_K_S are others
        (QUANTS, "4_0", "no GGUF file"),
        (QUANTS, "Q4.0", "no GGUF file"),
        (SAFETENSORS, "Q4_0", "no GGUF file"),
        (SAFETENSORS, "x.py", "x.py is no GGUF file of a model"),
        ([*SAFETENSORS, "pytorch_model.bin"], "pytorch_model.bin", "is no GGUF file"),
        (["config.json", "pytorch_model.bin"], "", r"pickles \(pytorch_model.bin\), .* are never fetched"),
        (["unet/model.safetensors", "model_index.json"], "", "neither safetensors of a language model nor GGUF files"),
        (["model.safetensors"], "", "neither safetensors of a language model"),
        (SPLIT[1:], "", "neither"),
        ([], "", "but: none"),
    ],
)
def test_refused(files: list[str], file: str, words: str):
    with pytest.raises(CheckpointError, match=words) as caught:
        choose(files, file)
    assert caught.value.where == "hub/org/name" and caught.value.exit_code == 3


def test_the_files_there_are_listed_but_not_endlessly():
    many = [f"m{i:03}-Q8_0.gguf" for i in range(300)]
    with pytest.raises(CheckpointError) as caught:
        choose(many, "Q4_0")
    assert "m000-Q8_0.gguf, " in caught.value.remedy and caught.value.remedy.endswith("and 280 more")


def test_an_adapter_names_its_model(tmp_path: Path):
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "org/base"}')
    files = ["adapter_config.json", "adapter_model.safetensors"]
    with pytest.raises(CheckpointError, match=r"an adapter \(LoRA\) for org/base, not a model"):
        needed(files, "", "hub/org/name", lambda name: tmp_path / name)


def test_parts_of_a_model_are_one():
    assert gguf_models([*SPLIT, "other.gguf", "mmproj.gguf"]) == {SPLIT[0]: SPLIT, "other.gguf": ["other.gguf"]}
