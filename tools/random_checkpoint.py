"""Random Llama or Qwen3 checkpoints of any shape, in Hugging Face layout.

    python -m tools.random_checkpoint --out DIR

The default is the 134M-parameter model of the benchmarks (12 layers, width 768, untied: 134,105,856 parameters, 536 MB
in float32). Activations have unit scale and the logits a chosen one, so a random model's distributions are as peaked
as a trained model's, whatever its shape. Tensors are drawn, written and dropped one by one; each has a seed of its own
(model seed and tensor name), so its values depend on neither layers nor shards around it.
"""

import argparse
import ctypes
import hashlib
import itertools
import json
import math
import string
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from models.later import import_now, later

with later():
    import torch

DTYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
BOS, EOS = 1, 2
HEAD_NORMS = {"llama": (), "qwen3": ("self_attn.q_norm", "self_attn.k_norm")}  # by family


def tensor_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name -> shape of every tensor that a `config.json` (either spelling) requires, in file order."""
    width, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    head_dim = config.get("head_dim") or width // config["num_attention_heads"]
    q, kv = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    linears = {"self_attn.q_proj": (q, width), "self_attn.k_proj": (kv, width), "self_attn.v_proj": (kv, width),
               "self_attn.o_proj": (width, q), "mlp.gate_proj": (mlp, width), "mlp.up_proj": (mlp, width),
               "mlp.down_proj": (width, mlp)}  # fmt: skip
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocab, width)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}."
        shapes[prefix + "input_layernorm.weight"] = shapes[prefix + "post_attention_layernorm.weight"] = (width,)
        for name in HEAD_NORMS[config.get("model_type", "llama")]:
            shapes[f"{prefix}{name}.weight"] = (head_dim,)
        for name, shape in linears.items():
            shapes[f"{prefix}{name}.weight"] = shape
            if config["attention_bias" if name.startswith("self_attn") else "mlp_bias"]:
                shapes[f"{prefix}{name}.bias"] = shape[:1]
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, width)
    return shapes


def draw(name: str, shape: tuple[int, ...], *, seed: int, scale: float, tied: bool) -> torch.Tensor:
    """The float32 tensor called `name`: uniform, so that its bits do not depend on the processor's vector units.

    Standard deviations: embeddings 1, linear layers 1/sqrt(fan-in) (twice that for the two that write to the
    residual stream), biases 0.2, norms uniform in [0.5, 1.5]; the head gives logits a deviation of `scale` *
    sqrt(2 ln V), at which (scale 1) the most likely token of a random model has a probability of about a third.
    """
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "little", signed=True))
    unit = torch.rand(shape, generator=generator).sub_(0.5)
    if "norm" in name:
        return unit.add_(1.0)
    if name == "lm_head.weight" or (tied and name == "model.embed_tokens.weight"):
        std = scale * math.sqrt(2 * math.log(shape[0]) / shape[1])
    elif name == "model.embed_tokens.weight":
        std = 1.0
    elif name.endswith(".bias"):
        std = 0.2
    else:
        std = (2 if "o_proj" in name or "down_proj" in name else 1) / math.sqrt(shape[1])
    return unit.mul_(std * math.sqrt(12))


def write_safetensors(
    path: Path, shapes: dict[str, tuple[int, ...]], dtype: str, tensors: Iterator[torch.Tensor]
) -> int:
    """Write `tensors`, in the order of `shapes`, holding one at a time; returns their bytes."""
    torch_dtype, code = getattr(torch, dtype), DTYPES[dtype]
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + math.prod(shape) * torch_dtype.itemsize
        header[name] = {"dtype": code, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            kept = tensor.to(torch_dtype).contiguous()  # a name, so that the buffer outlives the write
            file.write((ctypes.c_char * kept.nbytes).from_address(kept.data_ptr()))  # no copy, and no numpy
    return end


def byte_symbols() -> dict[int, str]:
    """Byte -> the character that stands for it in byte-level BPE files (GPT-2's table)."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = (byte for byte in range(256) if byte not in plain)
    return {byte: chr(byte) for byte in plain} | {byte: chr(256 + i) for i, byte in enumerate(others)}


def tokenizer_json(vocab: int) -> dict[str, Any]:
    """A byte-level BPE `tokenizer.json` of exactly `vocab` ids.

    Ids: `<unk>`, `<s>`, `</s>`, space, ASCII letters, digits, punctuation, newline and tab, the other bytes of UTF-8,
    then merges (" a", "ab", " ab", "abc", "abcd", ... over the lower-case alphabet). Control bytes are left out and
    become `<unk>`, as do symbols that a small vocabulary has no room for; so every id except the specials is printable.
    """
    text = " " + string.ascii_letters + string.digits + string.punctuation + "\n\t"
    symbol = byte_symbols()
    plain = [*text.encode(), *range(0x80, 0xC0), *range(0xC2, 0xF5)]
    tokens = ["<unk>", "<s>", "</s>", *(symbol[byte] for byte in plain)]
    letters, space = string.ascii_lowercase, symbol[32]
    pairs = ["".join(pair) for pair in itertools.product(letters, repeat=2)]
    possible = itertools.chain(
        itertools.product([space], letters),
        itertools.product(letters, repeat=2),
        itertools.product([space], pairs),
        itertools.product(pairs, letters),
        itertools.product(pairs, pairs),
    )
    merges = [list(merge) for merge in itertools.islice(possible, max(0, vocab - len(tokens)))]
    tokens = [*tokens, *("".join(merge) for merge in merges)][:vocab]
    if len(tokens) < vocab or vocab < 4:
        raise ValueError(f"--vocab: expected 4 to {len(tokens)}, got {vocab}")
    special = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    bos = {"SpecialToken": {"id": "<s>", "type_id": 0}}
    sequences = [{"Sequence": {"id": key, "type_id": i}} for i, key in enumerate("AB")]
    return {
        "version": "1.0", "truncation": None, "padding": None,
        "added_tokens": [{"id": i, "content": tokens[i], **special} for i in range(3)],
        "normalizer": None, "pre_tokenizer": byte_level,
        "post_processor": {"type": "TemplateProcessing", "single": [bos, sequences[0]], "pair": [bos, *sequences],
                           "special_tokens": {"<s>": {"id": "<s>", "ids": [BOS], "tokens": ["<s>"]}}},
        "decoder": byte_level,
        "model": {"type": "BPE", "dropout": None, "unk_token": "<unk>", "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)}, "merges": merges},
    }  # fmt: skip


@dataclass(frozen=True)
class Shape:
    """The shape and options of a checkpoint. Raises ValueError for impossible shapes.

    Args:
        rope: scaling parameters, written as they are: into `rope_parameters` (config_style "v5", as transformers 5
            writes it) or as `rope_scaling` ("v4"). None is plain RoPE.
        scale: how peaked the distributions are (see `draw`).
        shards: weight files; more than one get an index.
    """

    family: str = "llama"
    layers: int = 12
    width: int = 768
    mlp: int = 2048
    heads: int = 12
    kv_heads: int | None = None
    head_dim: int | None = None
    vocab: int = 32000
    dtype: str = "float32"
    seed: int = 0
    tied: bool = False
    rope_theta: float = 10000.0
    rope: dict[str, Any] | None = None
    max_positions: int = 4096
    rms_eps: float = 1e-5
    shards: int = 1
    config_style: str = "v5"
    scale: float = 1.0
    attention_bias: bool = False
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        width, heads, kv_heads = self.width, self.heads, self.kv_heads or self.heads
        if min(self.layers, width, self.mlp, heads, kv_heads, self.shards) < 1 or heads % kv_heads or width % heads:
            what = f"expected width {width} divisible by heads {heads}, these by kv-heads {kv_heads}, all > 0"
            raise ValueError(what)
        if (self.head_dim or width // heads) % 2:
            raise ValueError(f"expected an even head dim (rotary), got {self.head_dim or width // heads}")
        if self.dtype not in DTYPES or self.config_style not in ("v4", "v5"):
            got = f"{self.dtype}, {self.config_style}"
            raise ValueError(f"expected a dtype of {list(DTYPES)} and config style v4 or v5, got {got}")
        if self.family not in HEAD_NORMS or (self.family == "qwen3" and self.mlp_bias):
            what = f"expected a family of {list(HEAD_NORMS)}, the second without --mlp-bias, got {self.family}"
            raise ValueError(what)

    def config(self) -> dict[str, Any]:
        """config.json."""
        head_dim = self.head_dim
        if self.family == "qwen3":  # its default is 128
            head_dim = head_dim or self.width // self.heads
        config = {
            "architectures": [f"{self.family.capitalize()}ForCausalLM"], "model_type": self.family,
            "vocab_size": self.vocab, "hidden_size": self.width, "intermediate_size": self.mlp,
            "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads or self.heads, **({"head_dim": head_dim} if head_dim else {}),
            "hidden_act": "silu", "max_position_embeddings": self.max_positions, "rms_norm_eps": self.rms_eps,
            "attention_bias": self.attention_bias, "attention_dropout": 0.0, "mlp_bias": self.mlp_bias,
            "tie_word_embeddings": self.tied, "initializer_range": 0.02, "use_cache": True, "bos_token_id": BOS,
            "eos_token_id": EOS,
        }  # fmt: skip
        if self.config_style == "v5":
            rope = {"rope_theta": self.rope_theta, **(self.rope or {"rope_type": "default"})}
            return config | {"dtype": self.dtype, "rope_parameters": rope}
        return config | {"torch_dtype": self.dtype, "rope_theta": self.rope_theta, "rope_scaling": self.rope}


def make(out: str | Path, *, progress: bool = False, **options: Any) -> dict[str, Any]:
    """Write a random checkpoint with its tokenizer into the folder `out`; equal arguments give equal bytes.

    options: the fields of `Shape`. Returns {"path", "parameters", "bytes"} (bytes of all tensors).
    """
    shape = Shape(**options)
    tokenizer, config, folder = tokenizer_json(shape.vocab), shape.config(), Path(out)
    folder.mkdir(parents=True, exist_ok=True)
    stale = "model.safetensors" if shape.shards > 1 else "model.safetensors.index.json"
    (folder / stale).unlink(missing_ok=True)  # readers would take it, or find it beside what is written now
    tokenizer_config = {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
        "add_bos_token": True, "clean_up_tokenization_spaces": False, "model_max_length": shape.max_positions,
    }  # fmt: skip
    files = {"config": config, "generation_config": {"bos_token_id": BOS, "eos_token_id": EOS},
             "tokenizer": tokenizer, "tokenizer_config": tokenizer_config}  # fmt: skip
    for name, content in files.items():
        indent = None if name == "tokenizer" else 2
        (folder / f"{name}.json").write_text(json.dumps(content, indent=indent) + "\n", encoding="utf-8")
    shapes = tensor_shapes(config)
    written = write_weights(folder, shapes, shape, progress)
    return {"path": str(folder), "parameters": sum(map(math.prod, shapes.values())), "bytes": written}


def write_weights(folder: Path, shapes: dict[str, tuple[int, ...]], shape: Shape, progress: bool) -> int:
    """Draw and write all tensors; returns their bytes."""
    names = list(shapes)
    shards = min(shape.shards, len(names))
    cuts = [round(i * len(names) / shards) for i in range(shards + 1)]
    weight_map: dict[str, str] = {}
    written = 0
    for i, (low, high) in enumerate(itertools.pairwise(cuts), 1):
        file = "model.safetensors" if shards == 1 else f"model-{i:05}-of-{shards:05}.safetensors"
        part = {name: shapes[name] for name in names[low:high]}
        if progress:
            print(f"{file}: {len(part)} tensors", file=sys.stderr)
        drawn = (draw(name, size, seed=shape.seed, scale=shape.scale, tied=shape.tied) for name, size in part.items())
        written += write_safetensors(folder / file, part, shape.dtype, drawn)
        weight_map |= dict.fromkeys(part, file)
    if shards > 1:
        index = {"metadata": {"total_size": written}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    return written


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m tools.random_checkpoint",
        description="Make a random checkpoint (the default has 134M parameters).",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter)  # fmt: skip
    parser.add_argument("--out", required=True, metavar="DIR", help="folder to write")
    parser.add_argument("--family", choices=[*HEAD_NORMS], default="llama")
    numbers = ("layers", "width", "mlp", "heads", "vocab", "seed", "shards", "max_positions", "rope_theta", "rms_eps")
    for name in numbers:
        default = getattr(Shape, name)
        parser.add_argument(f"--{name.replace('_', '-')}", type=type(default), default=default)
    parser.add_argument("--kv-heads", type=int, help="default: heads")
    parser.add_argument("--head-dim", type=int, help="default: width / heads")
    parser.add_argument("--dtype", choices=list(DTYPES), default="float32")
    parser.add_argument("--tied", action=argparse.BooleanOptionalAction, default=False, help="no lm_head of its own")
    parser.add_argument("--untied", dest="tied", action="store_false", default=argparse.SUPPRESS, help="--no-tied")
    parser.add_argument("--rope", type=json.loads, metavar="JSON", help='such as {"rope_type": "linear", "factor": 4}')
    parser.add_argument("--config-style", choices=["v5", "v4"], default="v5", help="spelling of config.json")
    parser.add_argument("--scale", type=float, default=1.0, help="how peaked: 1 gives a top probability of about 1/3")
    parser.add_argument("--attention-bias", action="store_true")
    parser.add_argument("--mlp-bias", action="store_true")
    shape = vars(parser.parse_args(argv))
    import_now()
    start = time.perf_counter()
    try:
        made = make(shape.pop("out"), progress=True, **shape)
    except ValueError as error:
        parser.error(str(error))
    except OSError as error:
        raise SystemExit(f"cannot write the checkpoint: {error}") from None
    print(json.dumps(made | {"seconds": round(time.perf_counter() - start, 2)}))


if __name__ == "__main__":
    from engine.app.cli import ended  # here, because makers of golden files import this module without the engine

    sys.exit(ended(main))
