"""Parts that the families share: variants and checkpoint folders."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from tools.random_checkpoint import BOS, tokenizer_json, write_safetensors

VOCAB = 104
FEW = (  # searches of variants that change nothing about searches, see `make_golden.Run`
    (1, 1.0, False, 1, "own", 24),
    (4, 0.6, "never", 4, "several", 24),
    (15, 1.0, False, 15, "own", 24),
)
BORDER = {"logits": [(15, 4), (16, 4), (17, 4), (40, 4)], "prompts": (15, 16, 17, 5)}  # of windows of 16
BLOCKS: dict[str, Any] = {"logits": [(3, 3), (31, 2), (33, 4), (100, 40)], "prompts": (17, 40, 70)}  # of 32 tokens
ABSENT: Any = object()  # as the value of a config field: leave it out


@dataclass(frozen=True)
class Variant:
    """One golden checkpoint.

    Args:
        write: called with an empty folder and a seed, puts a checkpoint there (its EOS ids are set afterwards). One
            whose architecture ends in `ForSequenceClassification` gets scores, any other logits and searches.
        logits: (length, rows) of each text whose last rows of logits are kept; for scalar heads the texts' lengths.
        prompts: lengths of the searches' prompts, which the searches take in turn.
        full: the full grid of searches, not the short one.
        own_eos: ranks of the likely tokens that are the checkpoint's EOS ids.
        eos_files: the JSON files with these ids; without generation_config.json among them that file is removed.
        grid: the searches, if neither the full nor the short grid; see `make_golden.Run`.
        floats: called with the folder and an empty one, writes into the latter the float32 checkpoint that transformers
            reads instead.
        twin: a variant of the same weights spelled differently: same seed and (asserted) same results. A name that
            ends in `_v4` is its namesake's twin. If its weights are the same to the byte, only its config is kept.
    """

    write: Callable[[Path, int], None]
    logits: Sequence[tuple[int, int]] = ((3, 3), (17, 17), (60, 8))
    prompts: Sequence[int] = (17, 40, 5)
    full: bool = False
    own_eos: Sequence[int] = (0,)
    eos_files: Sequence[str] = ("config.json", "generation_config.json")
    grid: Sequence[Any] = ()
    floats: Callable[[Path, Path], None] | None = None
    twin: str = ""


def edit(path: Path, changes: Mapping[str, Any]) -> None:
    """Change fields of a JSON file; ABSENT removes one."""
    write_json(path, present(json.loads(path.read_text()), changes))


def present(config: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a config with changes, without those that are ABSENT."""
    return {key: value for key, value in {**config, **changes}.items() if value is not ABSENT}


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def write_tensors(path: Path, stored: Mapping[str, torch.Tensor], dtype: str) -> None:
    """A safetensors file; on rewriting one, `stored` must not be mapped from it."""
    shapes = {name: tuple(tensor.shape) for name, tensor in stored.items()}
    write_safetensors(path, shapes, dtype, iter(stored.values()))


def variants(
    config: Mapping[str, Any],
    changes: Mapping[str, Mapping[str, Any]],
    others: Mapping[str, Mapping[str, Any]],
    outputs: Sequence[str] = ("o_proj.weight", "down_proj.weight"),
    transposed: Sequence[str] = (),
    alter: Callable[[str, dict[str, torch.Tensor]], dict[str, torch.Tensor]] = lambda _, drawn: drawn,
) -> dict[str, Variant]:
    """The variants of a family whose weights have the names and shapes of transformers; all but `plain` have few
    searches.

    Args:
        config: fields of all variants; changes: fields of each variant, by its name.
        others: arguments of `Variant`, by the variant's name.
        outputs, transposed: see `random_tensors.draw_all`.
        alter: called with a variant's name and its drawn tensors, returns those of its file.
    """

    def write(name: str, folder: Path, seed: int) -> None:
        from tools.make_golden_weights import draw  # here, because it needs transformers

        write_checkpoint(folder, present(config, changes[name]), {})
        drawn = draw(folder, seed, outputs, transposed)
        write_tensors(folder / "model.safetensors", alter(name, drawn), "bfloat16")

    return {
        name: Variant(partial(write, name), **{"grid": () if name.startswith("plain") else FEW, **others.get(name, {})})
        for name in changes
    }


def write_checkpoint(
    folder: Path, config: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], dtype: str = "bfloat16"
) -> None:
    """A folder with config.json (`dtype` as transformers 5 spells it, unless given as `torch_dtype`), one file of
    weights, and the tokenizer of `tools/random_checkpoint.py`."""
    folder.mkdir(parents=True, exist_ok=True)
    spelled = {} if "torch_dtype" in config else {"dtype": dtype}
    write_json(folder / "config.json", {**config, **spelled, "bos_token_id": BOS})
    write_json(folder / "generation_config.json", {"bos_token_id": BOS})
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer_json(config["vocab_size"])) + "\n", encoding="utf-8")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>",
            "unk_token": "<unk>", "add_bos_token": True, "clean_up_tokenization_spaces": False,
        },
    )  # fmt: skip
    write_tensors(folder / "model.safetensors", tensors, dtype)
