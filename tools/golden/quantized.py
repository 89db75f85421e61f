"""Quantised checkpoints: compressed-tensors by the package itself, GPTQ and AWQ by the packing loops of GPTQModel 7.7
and AutoAWQ 0.2.9, which need a GPU to run, fp8 by its definition.

Each is a checkpoint of another family whose matrices were quantised. What transformers computes with is the float32
model that `floats` makes of the file again: by the package, or by arithmetic on single fields of the words.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from tools import random_checkpoint
from tools.golden import gpt2, opt, phi, phi3, qwen3
from tools.golden.base import Variant, edit

LLAMA = {"layers": 2, "width": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "vocab": 104, "dtype": "bfloat16",
         "max_positions": 128}  # fmt: skip
TABLES = re.compile(r".*(embed_tokens|embed_positions|wte|wpe|lm_head)\.weight")
GRID = [(1, 1.0, False, 1, "none", 16), (4, 1.0, False, 4, "own", 12)]
Parts = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """How one linear layer is stored.

    Args:
        store: a float32 weight [out, in] to the tensors that stand for it.
        restore: those tensors to float32 [out, in].
    """

    store: Callable[[torch.Tensor], Parts]
    restore: Callable[[Parts], torch.Tensor]


@dataclass(frozen=True)
class Recipe:
    """A checkpoint.

    Args:
        base: writes the float checkpoint.
        config: its `quantization_config`.
        methods: by expressions for the names of modules, the first that matches; others stay floats.
        head: the head is a matrix like others.
        embedding: the token embedding is, too.
        transposed: the base stores matrices [in, out].
        extra: tensors of every layer that change nothing, of its weight, by the ends of their names.
    """

    base: Callable[[Path, int], Any]
    config: Config
    methods: Sequence[tuple[str, Method | None]]
    head: bool = False
    embedding: bool = False
    transposed: bool = False
    extra: dict[str, Callable[[torch.Tensor], torch.Tensor]] = field(default_factory=dict)

    def method(self, name: str, tensor: torch.Tensor) -> Method | None:
        tables = self.head * ("lm_head.weight",) + self.embedding * ("model.embed_tokens.weight",)
        if tensor.dim() != 2 or (TABLES.fullmatch(name) and name not in tables):
            return None
        return next((method for rule, method in self.methods if re.match(rule, name)), None)


# Quantising.


def ranges(weight: torch.Tensor, group: int, symmetric: bool, bits: int) -> tuple[torch.Tensor, ...]:
    """q in 0 .. 2^bits - 1, zeros and float16 scales [out, groups] of groups of columns."""
    top, parts = 2**bits - 1, weight.split(group, 1)
    low = torch.stack([part.amin(1).clamp(max=0) for part in parts], 1)
    high = torch.stack([part.amax(1).clamp(min=0) for part in parts], 1)
    if symmetric:
        scale = (2 * torch.maximum(high, -low) / top).half()
        zero = torch.full_like(low, 2 ** (bits - 1))
    else:
        scale = ((high - low) / top).half()
        zero = (-low / scale.float()).round().clamp(0, top)
    columns = torch.arange(weight.shape[1]) // group
    q = (weight / scale.float()[:, columns] + zero[:, columns]).round().clamp(0, top)
    return q.long(), zero.long(), scale


def signed(words: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits in int64, to int32."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


# GPTQ: `pack_original` of GPTQModel's qlinear, `convert_gptq_v2_to_v1_format` of its utils.


def gptq(bits: int, group: int, symmetric: bool, first: bool, ordered: bool = False) -> Method:
    ones = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # writers have no common one of 3 bits

    def pack_rows(x: torch.Tensor) -> torch.Tensor:
        packed = torch.zeros(-(-x.shape[0] * bits // 32), x.shape[1], dtype=torch.int64)
        for row, values in enumerate(x):
            word, place = divmod(row * bits, 32)
            packed[word] |= values << place & 0xFFFFFFFF
            if place + bits > 32:  # of 3 bits: the rest goes on in the next word
                packed[word + 1] |= values >> 32 - place
        return signed(packed)

    def unpack_rows(words: torch.Tensor, count: int) -> torch.Tensor:
        words = torch.nn.functional.pad(words.long() & 0xFFFFFFFF, (0, 0, 0, 1))
        place = torch.arange(count) * bits
        return (words[place // 32] | words[place // 32 + 1] << 32) >> (place % 32)[:, None] & 2**bits - 1

    def store(weight: torch.Tensor) -> Parts:
        width = weight.shape[1]
        size = width if group == -1 else group
        order = torch.randperm(width, generator=torch.Generator().manual_seed(width)) if ordered else None
        columns = torch.arange(width) if order is None else order
        q, zero, scale = ranges(weight[:, columns], size, symmetric, bits)
        g_idx = torch.empty(width, dtype=torch.int64)
        g_idx[columns] = torch.arange(width) // size
        placed = torch.empty_like(q)
        placed[:, columns] = q
        qzeros = pack_rows(zero).T.contiguous()  # packed along the outputs
        if first:
            qzeros -= ones[bits]
        return {"qweight": pack_rows(placed.T), "qzeros": qzeros, "scales": scale.T.contiguous(),
                "g_idx": g_idx.to(torch.int32)}  # fmt: skip

    def restore(parts: Parts) -> torch.Tensor:
        g_idx, outs = parts["g_idx"].long(), parts["scales"].shape[1]
        zero_words = parts["qzeros"].long() + (ones[bits] if first else 0)
        q, zero = unpack_rows(parts["qweight"], len(g_idx)), unpack_rows(zero_words.T, outs).T
        return ((q - zero[g_idx]).float() * parts["scales"].float()[g_idx]).T

    return Method(store, restore)


# AWQ: `WQLinear_GEMM.from_linear` and `dequantize_gemm` of AutoAWQ.


def awq(group: int) -> Method:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(x: torch.Tensor) -> torch.Tensor:
        packed = torch.zeros(x.shape[0], x.shape[1] // 8, dtype=torch.int64)
        for column in range(packed.shape[1]):
            for j in range(8):
                packed[:, column] |= x[:, column * 8 + order[j]] << (4 * j)
        return signed(packed)

    def store(weight: torch.Tensor) -> Parts:
        q, zero, scale = ranges(weight, group, False, 4)
        return {"qweight": pack(q.T), "qzeros": pack(zero.T), "scales": scale.T.contiguous()}

    def restore(parts: Parts) -> torch.Tensor:
        o = torch.arange(parts["scales"].shape[1])
        shift = torch.tensor([order.index(j) * 4 for j in range(8)])[o % 8]
        q, zero = (((parts[name].long() & 0xFFFFFFFF)[:, o // 8] >> shift) & 15 for name in ("qweight", "qzeros"))
        size = q.shape[0] // zero.shape[0]
        zero, scale = (x.repeat_interleave(size, 0) for x in (zero, parts["scales"].float()))
        return ((q - zero).float() * scale).T

    return Method(store, restore)


# compressed-tensors.


def compressed(layout: str, weights: Config, g_idx: bool = False) -> Method:
    """By the package; `g_idx`: as versions up to 0.19 stored groups of columns in any order."""

    def scheme() -> Any:
        from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

        args = {key: value for key, value in weights.items() if key != "actorder"}
        return QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**args))

    def compressor() -> Any:
        from compressed_tensors.compressors import BaseCompressor

        return BaseCompressor.get_value_from_registry(layout)

    def store(weight: torch.Tensor) -> Parts:
        from compressed_tensors.quantization.utils import calculate_qparams

        own, order = scheme(), torch.arange(weight.shape[1])
        if g_idx:
            order = torch.randperm(weight.shape[1], generator=torch.Generator().manual_seed(weight.shape[1]))
        grid = {"group": (1, weights.get("group_size")), "block": weights.get("block_structure"),
                "channel": (1, weight.shape[1]), "tensor": weight.shape}[weights["strategy"]]  # fmt: skip
        blocks = [[block for block in row.split(grid[1], 1)] for row in weight[:, order].split(grid[0])]
        low, high = (
            torch.stack([torch.stack([f(block) for block in row]) for row in blocks]) for f in (torch.amin, torch.amax)
        )
        if weights["strategy"] == "tensor":
            low, high = low.reshape(1), high.reshape(1)
        scale, zero = calculate_qparams(low, high, own.weights)
        scale = scale.to(torch.bfloat16).float()
        state = {"weight": weight[:, order], "weight_scale": scale, "weight_zero_point": zero}
        parts = compressor().compress(state, own)
        parts["weight_scale"] = scale.to(torch.bfloat16)
        if g_idx:
            from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32, unpack_from_int32

            q, placed = unpack_from_int32(parts["weight_packed"], weights["num_bits"], weight.shape), None
            placed = torch.empty_like(q)
            placed[:, order] = q
            parts["weight_packed"] = pack_to_int32(placed, weights["num_bits"])
            groups = torch.empty(len(order), dtype=torch.int32)
            groups[order] = torch.arange(len(order), dtype=torch.int32) // weights["group_size"]
            parts["weight_g_idx"] = groups
        return {name: tensor.contiguous() for name, tensor in parts.items()}

    def restore(parts: Parts) -> torch.Tensor:
        parts = parts | {"weight_scale": parts["weight_scale"].float()}
        if not g_idx:
            return compressor().decompress(parts, scheme())["weight"].float()
        groups, bits = parts["weight_g_idx"].long(), weights["num_bits"]
        i = torch.arange(len(groups))
        words = (parts["weight_packed"].long() & 0xFFFFFFFF)[:, i * bits // 32]
        q = ((words >> (i * bits % 32)) & (2**bits - 1)) - 2 ** (bits - 1)
        return q.float() * parts["weight_scale"][:, groups]

    return Method(store, restore)


# fp8.


def float8(block: tuple[int, int] | None) -> Method:
    def spread(scale: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        if block is None:
            return scale
        rows, columns = (torch.arange(size) // length for size, length in zip(weight.shape, block, strict=True))
        return scale[rows][:, columns]

    def store(weight: torch.Tensor) -> Parts:
        high, low = block or weight.shape
        tops = torch.stack([torch.stack([b.abs().amax() for b in r.split(low, 1)]) for r in weight.split(high)])
        scale = (tops / 448).reshape(() if block is None else tops.shape)
        return {"weight": (weight / spread(scale, weight)).to(torch.float8_e4m3fn), "weight_scale_inv": scale}

    def restore(parts: Parts) -> torch.Tensor:
        return parts["weight"].float() * spread(parts["weight_scale_inv"].float(), parts["weight"])

    return Method(store, restore)


# MLX: the comments of `quantize` in mlx/ops.cpp and its documentation.


def mlx(bits: int, group: int, dtype: torch.dtype = torch.bfloat16) -> Method:
    """Mode affine. q is packed from a row's first bit on, without gaps at the ends of words."""
    top = 2**bits - 1

    def store(weight: torch.Tensor) -> Parts:
        parts = weight.unflatten(1, (-1, group))
        low, high = parts.amin(2, keepdim=True), parts.amax(2, keepdim=True)
        scale, negative = ((high - low) / top).clamp(min=1e-7), low.abs() > high.abs()
        scale, edge = torch.where(negative, scale, -scale), torch.where(negative, low, high)
        steps = (edge / scale).round()
        scale = torch.where(steps != 0, edge / steps, scale).to(dtype).float()
        bias = torch.where(steps == 0, 0, edge).to(dtype).float()
        q = ((parts - bias) / scale).round().clamp(0, top).flatten(1).long()
        bitwise = (q.unsqueeze(2) >> torch.arange(bits) & 1).flatten(1).unflatten(1, (-1, 32))
        words = signed((bitwise << torch.arange(32)).sum(2)).view(torch.uint32)
        return {"weight": words, "scales": scale.squeeze(2).to(dtype), "biases": bias.squeeze(2).to(dtype)}

    def restore(parts: Parts) -> torch.Tensor:
        words = parts["weight"].view(torch.int32).long()
        bitwise = (words.unsqueeze(2) >> torch.arange(32) & 1).flatten(1).unflatten(1, (-1, bits))
        q = (bitwise << torch.arange(bits)).sum(2).float()
        scale, bias = (parts[name].float().repeat_interleave(group, 1) for name in ("scales", "biases"))
        return q * scale + bias

    return Method(store, restore)


def mlx_floats(mode: str) -> Method:
    """Modes of e2m1 and e4m3 numbers: nearest numbers after a division by the scale."""
    group, e2m1 = 16 if mode == "nvfp4" else 32, torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])

    def values(scales: torch.Tensor) -> torch.Tensor:
        found = scales.view(torch.float8_e4m3fn).float() if mode == "nvfp4" else torch.exp2(scales.float() - 127)
        return found.repeat_interleave(group, 1)

    def store(weight: torch.Tensor) -> Parts:
        largest = weight.unflatten(1, (-1, group)).abs().amax(2)
        if mode == "nvfp4":
            scales = (largest / 6).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            scales = ((largest / (448 if mode == "mxfp8" else 6)).log2().ceil() + 127).to(torch.uint8)
        x = weight / values(scales)
        if mode == "mxfp8":
            octets = x.to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            codes = (x.abs().unsqueeze(2) - e2m1).abs().argmin(2) + 8 * (x < 0)
            octets = (codes[:, ::2] + 16 * codes[:, 1::2]).to(torch.uint8)
        return {"weight": octets.contiguous().view(torch.uint32), "scales": scales}

    def restore(parts: Parts) -> torch.Tensor:
        octets = parts["weight"].view(torch.uint8)
        if mode == "mxfp8":
            return octets.view(torch.float8_e4m3fn).float() * values(parts["scales"])
        codes = torch.stack((octets & 15, octets >> 4), 2).flatten(1).long()
        return torch.cat((e2m1, -e2m1))[codes] * values(parts["scales"])

    return Method(store, restore)


# BitNet, by the loops of transformers' `integrations/bitnet.py`.


def ternary(inverse: bool) -> Method:
    def store(weight: torch.Tensor) -> Parts:
        mean = weight.abs().mean().clamp(min=1e-5).to(torch.bfloat16).float()
        numbers = (weight / mean).round().clamp(-1, 1) + 1
        packed = torch.zeros(len(weight) // 4, weight.shape[1], dtype=torch.uint8)
        for i, quarter in enumerate(numbers.to(torch.uint8).chunk(4)):
            packed |= quarter << 2 * i
        return {"weight": packed, "weight_scale": (1 / mean if inverse else mean).view(1)}

    def restore(parts: Parts) -> torch.Tensor:
        numbers = torch.cat([((parts["weight"] >> 2 * i) & 3).float() - 1 for i in range(4)])
        return numbers / parts["weight_scale"] if inverse else numbers * parts["weight_scale"]

    return Method(store, restore)


# Files.


def files(folder: Path) -> dict[str, Parts]:
    return {path.name: load_file(path) for path in sorted(folder.glob("model*.safetensors"))}


def write(recipe: Recipe, folder: Path, seed: int) -> None:
    """Write the float checkpoint and quantise its files."""
    recipe.base(folder, seed)
    fields = ("quantization_config",) if "quant_method" in recipe.config else ("quantization_config", "quantization")
    edit(folder / "config.json", dict.fromkeys(fields, recipe.config))  # MLX writes both, alike
    weight_map: dict[str, str] = {}
    for file, tensors in files(folder).items():
        stored: Parts = {}
        for name, tensor in tensors.items():
            if (method := recipe.method(name, tensor)) is None:
                stored[name] = tensor.clone()
                continue
            weight = tensor.float()
            parts = method.store(weight.T.contiguous() if recipe.transposed else weight)
            stored |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in parts.items()}
            stored |= {
                f"{name.removesuffix('.weight')}.{suffix}": make(weight) for suffix, make in recipe.extra.items()
            }
        (folder / file).unlink()  # not written over: it may still be mapped
        save_file(stored, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(stored, file)
    if (folder / "model.safetensors.index.json").exists():
        edit(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def floats(recipe: Recipe, folder: Path, out: Path) -> None:
    """The float32 checkpoint of the quantised one in `folder`, in one file."""
    config = json.loads((folder / "config.json").read_text())
    config = {name: value for name, value in config.items() if name not in ("quantization_config", "quantization")}
    out.mkdir(parents=True)
    (out / "config.json").write_text(json.dumps(config | {"dtype": "float32"}))
    held: Parts = {}
    for tensors in files(folder).values():
        held |= tensors
    modules: dict[str, Parts] = {}
    for name, tensor in held.items():
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, {})[suffix] = tensor
    restored: Parts = {}
    for module, parts in modules.items():
        shape = torch.empty(1, 1, device="meta")
        method = recipe.method(f"{module}.weight", shape)
        if method is not None and ("weight" not in parts or len(parts) > 1 + ("bias" in parts)):
            given = {key: part for key, part in parts.items() if key not in ("bias", *recipe.extra)}
            weight = method.restore(given)
            restored[f"{module}.weight"] = weight.T if recipe.transposed else weight
            parts = {"bias": parts["bias"]} if "bias" in parts and "bias" not in recipe.extra else {}
        restored |= {f"{module}.{suffix}": part.float() for suffix, part in parts.items()}
    save_file({name: tensor.contiguous() for name, tensor in restored.items()}, out / "model.safetensors")


def llama(folder: Path, seed: int, **changes: Any) -> None:
    random_checkpoint.make(folder, **LLAMA, **changes, seed=seed)


def group(layout: str, weights: Config, **others: Any) -> Config:
    return {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None, **others}


def package(layout: str, groups: Sequence[Config], ignore: Sequence[str] = ("lm_head",)) -> Config:
    named = {f"group_{i}": entry for i, entry in enumerate(groups)}
    return {"quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
            "config_groups": named, "ignore": list(ignore), "kv_cache_scheme": None}  # fmt: skip


def weights(bits: int, strategy: str, symmetric: bool = True, kind: str = "int", **others: Any) -> Config:
    return {"num_bits": bits, "type": kind, "symmetric": symmetric, "strategy": strategy, "dynamic": False, **others}


def one(layout: str, own: Config, **others: Any) -> Recipe:
    """compressed-tensors with one scheme for all."""
    return Recipe(llama, package(layout, [group(layout, own, **others)]), [("", compressed(layout, own))])


def mlx_recipe(base: Callable[[Path, int], Any], common: Config, others: Config) -> Recipe:
    """MLX with settings of single modules, of which false is floats."""

    def method(own: Config) -> Method:
        if (mode := own.get("mode", "affine")) != "affine":
            return mlx_floats(mode)
        return mlx(own.get("bits", 4), own.get("group_size", 64))

    rules = [
        (re.escape(f"{name}.weight"), method(common if own is True else own) if own else None)
        for name, own in others.items()
    ]
    return Recipe(base, common | others, [*rules, ("", method(common))], head=True, embedding=True)


def gptq_config(bits: int, size: int, **others: Any) -> Config:
    return {"quant_method": "gptq", "bits": bits, "group_size": size, "desc_act": False, "sym": True,
            "lm_head": False, **others}  # fmt: skip


W4, W4Z = weights(4, "group", group_size=16), weights(4, "group", symmetric=False, group_size=32)
W4G = weights(4, "group", group_size=16, actorder="group")
W4P, W8P = weights(4, "group", symmetric=False, group_size=8), weights(8, "group", symmetric=False, group_size=8)
W8, W8Z = weights(8, "channel"), weights(8, "channel", symmetric=False)
F8C, F8T = weights(8, "channel", kind="float"), weights(8, "tensor", kind="float")
F8B = weights(8, "block", kind="float", block_structure=[32, 32])
TOKEN = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
TOKEN8 = TOKEN | {"type": "float"}
STATIC8 = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "tensor", "dynamic": False}
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
       "modules_to_not_convert": None}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
PHI3 = partial(phi3.write, "gqa")
RECIPES = {
    "pack4_group": one("pack-quantized", W4),
    "pack4_zeros": one("pack-quantized", W4Z),
    "pack4_g_idx": Recipe(
        llama, package("pack-quantized", [group("", W4G)]), [("", compressed("pack-quantized", W4G, g_idx=True))]
    ),
    # biases, that of the quantised head included; one matrix of queries, keys and values
    "pack4_biases": Recipe(
        partial(phi.write, "gqa"), package("pack-quantized", [group("", W4P)], []),
        [("", compressed("pack-quantized", W4P))], head=True,
    ),
    "pack8_fused": Recipe(
        PHI3, package("pack-quantized", [group("", W8P)]), [("", compressed("pack-quantized", W8P))]),
    "pack8_channel": one("pack-quantized", W8),
    "pack8_zeros": one("pack-quantized", W8Z),
    # two formats, expressions, and a head that is quantised as well
    "mixed": Recipe(
        partial(llama, shards=3),
        package("mixed-precision", [
            group("", F8C, targets=["re:.*self_attn[.].*"], format="float-quantized", input_activations=TOKEN8),
            group("", W4, format="pack-quantized"),
        ], ["re:.*layers[.]1[.]mlp[.](gate|up)_proj$", "model.layers.0.self_attn.k_proj"]),
        [(r".*layers\.1\.mlp\.(gate|up)", None), (r".*0\.self_attn\.k_proj", None),
         (r".*self_attn", compressed("float-quantized", F8C)), ("", compressed("pack-quantized", W4))],
        head=True,
    ),
    "int8_token": one("int-quantized", W8, input_activations=TOKEN),
    "float8_channel": one("float-quantized", F8C, input_activations=TOKEN8),
    "float8_tensor": Recipe(
        llama, package("float-quantized", [group("", F8T, input_activations=STATIC8)]),
        [("", compressed("float-quantized", F8T))], extra={"input_scale": lambda _: torch.tensor([0.02])},
    ),
    "float8_block": one("float-quantized", F8B, input_activations=TOKEN8),
    "gptq_v1": Recipe(
        llama, gptq_config(4, 16), [("", gptq(4, 16, True, True))],
        extra={"bias": lambda weight: torch.zeros(len(weight))},
    ),
    "gptq_v2": Recipe(
        PHI3, gptq_config(4, 8, sym=False, checkpoint_format="gptq_v2"),
        [("", gptq(4, 8, False, False))],
    ),
    "gptq_desc_act": Recipe(
        partial(opt.write, {}), gptq_config(4, 16, sym=False, desc_act=True, checkpoint_format="gptq"),
        [("", gptq(4, 16, False, True, ordered=True))],
    ),
    "gptq_conv1d": Recipe(
        partial(gpt2.write, {}), gptq_config(8, -1, checkpoint_format="gptq"), [("", gptq(8, -1, True, True))],
        transposed=True,
    ),
    "gptq_dynamic": Recipe(
        partial(qwen3.write, "tied"),
        gptq_config(4, 8, dynamic={
            r"-:.*\.q_proj": {}, r"+:.*\.layers\.1\.mlp.*": {"bits": 8, "group_size": -1},
            r".*v_proj": {"group_size": 24}}),
        [(r".*q_proj", None), (r".*layers\.1\.mlp", gptq(8, -1, True, True)), (r".*v_proj", gptq(4, 24, True, True)),
         ("", gptq(4, 8, True, True))],
    ),
    "gptq_few_bits": Recipe(
        llama, gptq_config(3, 16, sym=False, checkpoint_format="gptq_v2", dynamic={r".*mlp": {"bits": 2}}),
        [(r".*mlp", gptq(2, 16, False, False)), ("", gptq(3, 16, False, False))],
    ),
    "awq": Recipe(llama, AWQ, [("", awq(32))]),
    "awq_excluded": Recipe(
        partial(opt.write, {}), AWQ | {"group_size": 16, "modules_to_not_convert": ["layers.0.self_attn"]},
        [(r".*layers\.0\.self_attn", None), ("", awq(16))],
    ),
    # every width of bits, a module that stays floats, an embedding and a head of their own
    "mlx": mlx_recipe(llama, {"group_size": 32, "bits": 4}, {
        "model.embed_tokens": {"group_size": 32, "bits": 3}, "lm_head": {"group_size": 64, "bits": 6},
        "model.layers.0.self_attn.q_proj": {"group_size": 32, "bits": 2},
        "model.layers.0.self_attn.k_proj": {"group_size": 32, "bits": 3},
        "model.layers.0.self_attn.v_proj": {"group_size": 64, "bits": 5},
        "model.layers.0.mlp.gate_proj": {"group_size": 64, "bits": 8}, "model.layers.0.mlp.up_proj": {"bits": 8},
        "model.layers.1.mlp.down_proj": False, "model.layers.1.mlp.up_proj": True,
    }),
    # the head is the embedding
    "mlx_tied": mlx_recipe(
        partial(llama, tied=True, attention_bias=True), {"group_size": 32, "bits": 5, "mode": "affine"}, {}),
    "mlx_floats": mlx_recipe(llama, {"group_size": 32, "bits": 4, "mode": "mxfp4"}, {
        "model.embed_tokens": {"mode": "nvfp4"}, "lm_head": {"mode": "mxfp8", "bits": 8, "group_size": 32},
        "model.layers.0.self_attn.k_proj": {"group_size": 16, "bits": 4, "mode": "nvfp4"},
        "model.layers.1.mlp.gate_proj": {"group_size": 64, "bits": 4},
    }),
    "fp8_block": Recipe(llama, FP8 | {"modules_to_not_convert": ["lm_head", "model.layers.0.mlp.down_proj"]}, [
        (r".*0\.mlp\.down", None), ("", float8((32, 32)))]),
    "bitnet": Recipe(llama, {"quant_method": "bitnet", "modules_to_not_convert": None}, [("", ternary(True))]),
    "bitnet_auto": Recipe(
        llama, {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"},
        [("", ternary(False))],
    ),
    "fp8_tensor": Recipe(PHI3, FP8 | {"weight_block_size": None}, [("", float8(None))]),
}  # fmt: skip
VARIANTS = {
    name: Variant(partial(write, recipe), logits=((3, 3), (40, 4)), grid=GRID, floats=partial(floats, recipe))
    for name, recipe in RECIPES.items()
}
