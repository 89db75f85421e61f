"""Quantised checkpoints, in the forms of `tools.golden.storage`.

Each is a checkpoint of another family whose matrices were quantised. transformers computes with the float32 model that
`floats` restores from the file: by the format's package, or by arithmetic on single fields of the words.
"""

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
from tools.golden.storage import (
    Config,
    Method,
    Parts,
    awq,
    compressed,
    float8,
    gemma,
    gptq,
    hqq,
    mlx,
    mlx_floats,
    quark,
    quark_mxfp4,
    step,
    ternary,
    torchao,
)

LLAMA = {"layers": 2, "width": 64, "mlp": 96, "heads": 4, "kv_heads": 2, "vocab": 104, "dtype": "bfloat16",
         "max_positions": 128}  # fmt: skip
TABLES = re.compile(r".*(embed_tokens|embed_positions|wte|wpe|lm_head)\.weight")
GRID = [(1, 1.0, False, 1, "none", 16), (4, 1.0, False, 4, "own", 12)]


@dataclass(frozen=True)
class Recipe:
    """A checkpoint.

    Args:
        base: writes the float checkpoint.
        config: its `quantization_config`.
        methods: from regular expressions for names of modules to methods, of which the first that matches counts; other
            modules stay floats.
        head: the head is quantised, too.
        embedding: the token embedding is quantised, too.
        transposed: the base stores matrices [in, out].
        extra: from ends of names to functions of a layer's weight: tensors of every layer that change no result.
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
        told: dict[str, Config] = {}
        for name, tensor in tensors.items():
            if (method := recipe.method(name, tensor)) is None:
                stored[name] = tensor.clone()
                told[name] = {"_type": "Tensor"}
                continue
            weight = tensor.float()
            parts = method.store(weight.T.contiguous() if recipe.transposed else weight)
            if method.told:
                told[name] = method.told(weight)
            stored |= {f"{name.removesuffix('.weight')}.{suffix}": part for suffix, part in parts.items()}
            stored |= {
                f"{name.removesuffix('.weight')}.{suffix}": make(weight) for suffix, make in recipe.extra.items()
            }
        (folder / file).unlink()  # not written over: it may still be mapped
        metadata = {"format": "pt"}
        if recipe.config.get("quant_method") == "torchao":
            metadata |= {name: json.dumps(entry) for name, entry in told.items()}
            metadata["tensor_names"] = json.dumps([*tensors])
        save_file(stored, folder / file, metadata)
        sort_metadata(folder / file)
        weight_map |= dict.fromkeys(stored, file)
    if (folder / "model.safetensors.index.json").exists():
        edit(folder / "model.safetensors.index.json", {"weight_map": weight_map})


def sort_metadata(file: Path) -> None:
    """Sort the metadata of a file, whose order safetensors leaves to chance."""
    data = file.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    file.write_bytes(data[:8] + text.ljust(end - 8) + data[end:])


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


def stepped(layout: str, own: Config, *rounded: str) -> Method:
    """compressed-tensors with steps of inputs and outputs."""
    plain = compressed(layout, own)

    def store(weight: torch.Tensor) -> Parts:
        steps = {f"{name}_scale": step(weight, output=name == "output").view(1) for name in rounded}
        return plain.store(weight) | steps

    return Method(store, plain.restore)


def mlx_recipe(base: Callable[[Path, int], Any], common: Config, others: Config) -> Recipe:
    """MLX with settings of single modules; false stands for floats."""

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
STATIC = STATIC8 | {"type": "int"}
BITS = {"q_proj": 2, "k_proj": 3, "v_proj": 1, "o_proj": 5, "gate_proj": 6, "up_proj": 7}  # by ends of names
AWQ = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
       "modules_to_not_convert": None}  # fmt: skip
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [32, 32]}
PHI3 = phi3.VARIANTS["gqa"].write
QUARK = {"quant_method": "quark", "exclude": ["lm_head"], "export": {"pack_method": "reorder"}}


def own_quark(dtype: str, size: int = 0, **others: Any) -> Config:
    """Quark's config of a layer; `size` 0: a scale per output."""
    sharing = {"qscheme": "per_group", "ch_axis": -1, "group_size": size} if size else {}
    return {"weight": {"dtype": dtype, "qscheme": "per_channel", "ch_axis": 0, "is_dynamic": False} | sharing | others}


RECIPES = {
    "pack4_group": one("pack-quantized", W4),
    "pack4_zeros": one("pack-quantized", W4Z),
    "pack4_g_idx": Recipe(
        llama, package("pack-quantized", [group("", W4G)]), [("", compressed("pack-quantized", W4G, g_idx=True))]
    ),
    # biases, that of the quantised head included; one matrix of queries, keys and values
    "pack4_biases": Recipe(
        phi.VARIANTS["gqa"].write, package("pack-quantized", [group("", W4P)], []),
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
        opt.VARIANTS["plain"].write, gptq_config(4, 16, sym=False, desc_act=True, checkpoint_format="gptq"),
        [("", gptq(4, 16, False, True, ordered=True))],
    ),
    "gptq_conv1d": Recipe(
        gpt2.VARIANTS["plain"].write, gptq_config(8, -1, checkpoint_format="gptq"), [("", gptq(8, -1, True, True))],
        transposed=True,
    ),
    "gptq_dynamic": Recipe(
        qwen3.VARIANTS["tied"].write,
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
        opt.VARIANTS["plain"].write, AWQ | {"group_size": 16, "modules_to_not_convert": ["layers.0.self_attn"]},
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
    # every subclass that is read
    "torchao": Recipe(llama, {"quant_method": "torchao", "quant_type": {"default": {}}}, [
        (r".*0\.self_attn\.[qk]", torchao("Int8Tensor")), (r".*0\.self_attn", torchao("Int8Tensor", 8, 16)),
        (r".*0\.mlp\.gate", torchao("IntxUnpackedToInt8Tensor", 4, 32)),
        (r".*0\.mlp\.up", torchao("IntxUnpackedToInt8Tensor", 3)), (r".*1\.mlp", torchao("Int4Tensor", 4, 16)),
        (r".*1\.self_attn", torchao("Float8Tensor")), (r"(lm_head|model\.embed)", torchao("Int8Tensor")),
        ("", torchao("IntxUnpackedToInt8Tensor", 6, 8)),
    ], head=True, embedding=True),
    "quark": Recipe(PHI3, QUARK | {"global_quant_config": own_quark("int4", 8), "layer_quant_config": {
        "*.qkv_proj": own_quark("uint4", 8), "*1.mlp.gate_up_proj": own_quark("int8"),
        "*1.mlp.down_proj": own_quark("int8", 16)},
    }, [(".*qkv", quark("uint4", 8)), (r".*1\.mlp\.gate", quark("int8")), (r".*1\.mlp", quark("int8", 16)),
        ("", quark("int4", 8))]),
    "quark_order": Recipe(
        llama, QUARK | {
            "global_quant_config": own_quark("uint4"), "export": {"pack_method": "order"},
            "layer_quant_config": {"model.layers.1.mlp.*": own_quark("fp4", 32, scale_format="e8m0")},
        }, [(r".*1\.mlp", quark_mxfp4()), ("", quark("uint4", reorder=False))]),
    "hqq": Recipe(llama, {"quant_method": "hqq", "quant_config": {}, "skip_modules": ["lm_head"]}, [
        (r".*0\.self_attn\.[qk]", hqq(8, 32)), (r".*0\.self_attn", hqq(3, 16)), (r".*1\.mlp\.up", hqq(4, 16, 0)),
        (r".*1\.mlp\.down", hqq(3, 64, 0)), (r".*1\.mlp\.gate", hqq(2, 16)), ("", hqq(4, 32)),
    ]),
    "fp8_tensor": Recipe(PHI3, FP8 | {"weight_block_size": None}, [("", float8(None))]),
    # all bits, of which codes cross words; an embedding
    "pack_bits": Recipe(
        llama,
        package("pack-quantized", [
            *(group("", weights(bits, "channel"), targets=[f"re:.*{own}$"]) for own, bits in BITS.items()),
            group("", weights(6, "group", symmetric=False, group_size=32), targets=["re:.*down_proj$"]),
            group("", weights(4, "group", group_size=16), targets=["Embedding"]),
        ], ["lm_head"]),
        [*((rf".*{own}", compressed("pack-quantized", weights(bits, "channel"))) for own, bits in BITS.items()),
         (".*down_proj", compressed("pack-quantized", weights(6, "group", symmetric=False, group_size=32))),
         (".*embed", compressed("pack-quantized", weights(4, "group", group_size=16)))],
        embedding=True,
    ),
    # static steps of inputs and outputs, or of one of both
    "static": Recipe(
        llama,
        package("pack-quantized", [
            group("", own, targets=[f"re:.*({ends})"], format="pack-quantized", **rounded)
            for own, ends, rounded in (
                (W4, "self_attn|up_proj", {"input_activations": STATIC, "output_activations": STATIC}),
                (W8, "down_proj", {"input_activations": STATIC}),
                (weights(2, "channel"), "gate_proj", {"output_activations": STATIC}))
        ]),
        [(".*gate", stepped("pack-quantized", weights(2, "channel"), "output")),
         (".*down", stepped("pack-quantized", W8, "input")), ("", stepped("pack-quantized", W4, "input", "output"))],
    ),
    "gemma": Recipe(
        llama, {
            "quant_method": "gemma", "num_bits": 4, "quantize_embeddings": True,
            "modules_to_not_convert": ["model.layers.0.self_attn.o_proj"],
            "module_quant_configs": {
                r"layers\.1\.mlp\.": {"num_bits": 2}, r"self_attn\.[kv]_proj$": {"num_bits": 8},
                "embed_tokens$": {"num_bits": 2}, "lm_head": {"num_bits": 8}, "mlp": {}},
        },
        [(r".*0\.self_attn\.o_proj", None), (r".*1\.mlp", gemma(2)), (r".*[kv]_proj", gemma(8)),
         (r".*embed", gemma(2, rows=True)), ("lm_head", gemma(8, rounded=False)), ("", gemma(4))],
        head=True, embedding=True,
    ),
    "mlx_1bit": mlx_recipe(partial(llama, tied=True), {"group_size": 32, "bits": 1}, {
        "model.layers.0.self_attn.v_proj": {"group_size": 32, "bits": 2}}),
}  # fmt: skip
STEPPED = "static", "gemma"
# In longer texts it is likely that an element lies between two steps, up to rounding errors.
SHORT: Config = {"logits": ((3, 3), (12, 4)), "prompts": (5,),
                 "grid": [(1, 1.0, False, 1, "none", 8), (4, 1.0, False, 4, "own", 6)]}  # fmt: skip
# transformers computes with its own modules where they round activations.
ROUNDED = "bitnet", "bitnet_auto", *STEPPED
VARIANTS = {
    name: Variant(
        partial(write, recipe), floats=None if name in ROUNDED else partial(floats, recipe),
        **SHORT if name in STEPPED else {"logits": ((3, 3), (40, 4)), "grid": GRID})
    for name, recipe in RECIPES.items()
}  # fmt: skip
