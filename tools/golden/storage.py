"""Forms in which golden checkpoints store quantised matrices: GPTQ and AWQ by the packing loops of GPTQModel 7.7 and
AutoAWQ 0.2.9, which need a GPU to run, compressed-tensors by the package itself, the others by their definitions.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

Parts = dict[str, torch.Tensor]
Config = dict[str, Any]


@dataclass(frozen=True)
class Method:
    """How one linear layer is stored.

    Args:
        store: from a float32 weight [out, in] to the tensors that stand for it.
        restore: from these tensors to float32 [out, in].
        told: from a weight to what the header's metadata say of it; None: nothing.
    """

    store: Callable[[torch.Tensor], Parts]
    restore: Callable[[Parts], torch.Tensor]
    told: Callable[[torch.Tensor], Config] | None = None


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


def to_int32(words: torch.Tensor) -> torch.Tensor:
    """Words of 32 bits in int64, to int32."""
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


# GPTQ: `pack_original` of GPTQModel's qlinear, `convert_gptq_v2_to_v1_format` of its utils.


def gptq(bits: int, group: int, symmetric: bool, first: bool, ordered: bool = False) -> Method:
    ones = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}  # writers of 3 bits share no convention

    def pack_rows(x: torch.Tensor) -> torch.Tensor:
        packed = torch.zeros(-(-x.shape[0] * bits // 32), x.shape[1], dtype=torch.int64)
        for row, values in enumerate(x):
            word, place = divmod(row * bits, 32)
            packed[word] |= values << place & 0xFFFFFFFF
            if place + bits > 32:  # a code of 3 bits can continue in the next word
                packed[word + 1] |= values >> 32 - place
        return to_int32(packed)

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


# Gemma's mobile checkpoints, by the definitions in transformers' integrations/gemma_quant.py.


def step(weight: torch.Tensor, *, output: bool) -> torch.Tensor:
    """Steps of activations, another one for each layer.

    They are so large that hardly an element lies between two steps, up to rounding errors. Small ratios of a layer's
    steps would place many products there.
    """
    return (math.sqrt(2) if output else 1.0) * (0.2 + weight.abs().mean())


def gemma(bits: int, *, rows: bool = False, rounded: bool = True) -> Method:
    def store(weight: torch.Tensor) -> Parts:
        most, fields = 2 ** (bits - 1), 8 // bits
        scale = weight.abs().amax(1, keepdim=True) / (most - 0.5)
        q = (weight / scale).round().clamp(-most, most - 1).to(torch.int8)
        if bits < 8:
            octets = (q + most).to(torch.uint8).unflatten(1, (-1, fields))
            q = (octets << bits * torch.arange(fields, dtype=torch.uint8)).sum(2, dtype=torch.uint8)
        if rows:
            return {"embedding_quantized": q, "embedding_scale": scale}
        steps = {f"{end}put_activation_scale": rounded * step(weight, output=end == "out") for end in ("in", "out")}
        return {"weight": q, "weight_scale": scale} | steps

    def restore(parts: Parts) -> torch.Tensor:
        raise NotImplementedError("transformers computes with its own modules, which round activations")

    return Method(store, restore)


# AWQ: `WQLinear_GEMM.from_linear` and `dequantize_gemm` of AutoAWQ.


def awq(group: int) -> Method:
    order = [0, 2, 4, 6, 1, 3, 5, 7]

    def pack(x: torch.Tensor) -> torch.Tensor:
        packed = torch.zeros(x.shape[0], x.shape[1] // 8, dtype=torch.int64)
        for column in range(packed.shape[1]):
            for j in range(8):
                packed[:, column] |= x[:, column * 8 + order[j]] << (4 * j)
        return to_int32(packed)

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
    """Pack by the package; `g_idx`: with groups of columns in any order, as versions up to 0.19 stored them."""

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
        words = to_int32((bitwise << torch.arange(32)).sum(2)).view(torch.uint32)
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


# torchao: the docstrings and `dequantize` of its tensor subclasses; Int4Tensor: `int4_row_quantize_zp` and `pack_int4`
# of FBGEMM.


def torchao(subclass: str, bits: int = 8, group: int = 0) -> Method:
    """`group` 0: a scale per output."""

    def size_of(weight: torch.Tensor) -> int:
        return group or weight.shape[1]

    def told(weight: torch.Tensor) -> Config:
        data: Config = {"block_size": [1, size_of(weight)], "dtype": {"_type": "torch.dtype", "_data": "float32"}}
        if subclass == "IntxUnpackedToInt8Tensor":
            data["target_dtype"] = {"_type": "torch.dtype", "_data": f"int{bits}"}
            data["activation_quantization"] = "int8_asym_per_token" if bits == 4 else None
        if subclass == "Int4Tensor":
            data = {"block_size": data["block_size"], "shape": [*weight.shape]}
        names = ["qdata", "scale"] + ["zero_point"] * (subclass != "Float8Tensor")
        return {"_type": subclass, "_data": data, "_tensor_data_names": names}

    def store(weight: torch.Tensor) -> Parts:
        size = size_of(weight)
        columns = torch.arange(weight.shape[1]) // size
        if subclass == "Float8Tensor":
            scale = torch.stack([part.abs().amax(1) / 448 for part in weight.split(size, 1)], 1)
            return {"_weight_qdata": (weight / scale[:, columns]).to(torch.float8_e4m3fn), "_weight_scale": scale}
        if subclass == "Int4Tensor":
            parts = weight.unflatten(1, (-1, size))
            low, high = parts.amin(2), parts.amax(2)
            scale = ((high - low) / 15).bfloat16()
            q = ((weight - low[:, columns]) / scale.float()[:, columns]).round().clamp(0, 15).to(torch.int8) - 8
            zero = (low + scale.float() * 8).bfloat16()
            octets = q[:, ::2] & 15 | q[:, 1::2] << 4
            return {"_weight_qdata": octets, "_weight_scale": scale.T.contiguous(),
                    "_weight_zero_point": zero.T.contiguous()}  # fmt: skip
        q, zero, scale = ranges(weight, size, False, bits)
        half = 2 ** (bits - 1)
        return {"_weight_qdata": (q - half).to(torch.int8), "_weight_scale": scale.float(),
                "_weight_zero_point": (zero - half).to(torch.int8)}  # fmt: skip

    def restore(parts: Parts) -> torch.Tensor:
        q, scale = parts["_weight_qdata"], parts["_weight_scale"]
        if subclass == "Int4Tensor":
            octets = q.view(torch.uint8)
            q = torch.stack((octets & 15, octets >> 4), 2).flatten(1).int()
            columns = torch.arange(q.shape[1]) // (q.shape[1] // len(scale))
            zero = parts["_weight_zero_point"].T.float()
            return torch.where(q > 7, q - 16, q).float() * scale.T.float()[:, columns] + zero[:, columns]
        columns = torch.arange(q.shape[1]) // (q.shape[1] // scale.shape[1])
        if subclass == "Float8Tensor":
            return q.float() * scale[:, columns]
        return (q.int() - parts["_weight_zero_point"].int()[:, columns]).float() * scale[:, columns]

    return Method(store, restore, told)


# Quark: `Pack_4_bits`, `Pack_8_bits`, `Pack_fp4` and `dequantize` of amd-quark.


def quark(dtype: str, group: int = 0, reorder: bool = True) -> Method:
    """`group` 0: a scale per output."""
    bits, signed = int(dtype[-1]), not dtype.startswith("u")
    order = [0, 2, 4, 6, 1, 3, 5, 7] if reorder else [*range(8)]

    def pack(x: torch.Tensor) -> torch.Tensor:
        if bits == 8:
            return x.to(torch.int8 if signed else torch.uint8)
        fields = torch.nn.functional.pad(x & 15, (0, -x.shape[-1] % 8)).unflatten(-1, (-1, 8))[..., order]
        return to_int32((fields.long() << 4 * torch.arange(8)).sum(-1))

    def unpack(x: torch.Tensor, count: int) -> torch.Tensor:
        if bits == 8:
            return x.int()
        place = torch.tensor([order.index(j) * 4 for j in range(8)])
        fields = ((x.long() & 0xFFFFFFFF).unsqueeze(-1) >> place & 15).flatten(-2)[..., :count].int()
        return torch.where(fields > 7, fields - 16, fields) if signed else fields

    def store(weight: torch.Tensor) -> Parts:
        q, zero, scale = ranges(weight, group or weight.shape[1], signed, bits)
        q, zero, scale = (q - signed * 2 ** (bits - 1), zero - signed * 2 ** (bits - 1), scale.float())
        if group:
            return {"weight": pack(q.T).contiguous(), "weight_scale": scale.T.contiguous(),
                    "weight_zero_point": pack(zero.T).contiguous()}  # fmt: skip
        return {"weight": pack(q), "weight_scale": scale[:, 0], "weight_zero_point": pack(zero[:, 0])}

    def restore(parts: Parts) -> torch.Tensor:
        scale = parts["weight_scale"]
        outs = scale.shape[-1]
        if group:
            q, zero = unpack(parts["weight"], outs).T, unpack(parts["weight_zero_point"], outs).T
            columns = torch.arange(q.shape[1]) // group
            return (q - zero[:, columns]).float() * scale.T[:, columns]
        q = unpack(parts["weight"], parts["weight"].shape[1] * (32 // bits if bits == 4 else 1))
        return (q - unpack(parts["weight_zero_point"], outs)[:, None]).float() * scale[:, None]

    return Method(store, restore)


def quark_mxfp4() -> Method:
    def store(weight: torch.Tensor) -> Parts:
        parts = mlx_floats("mxfp4").store(weight)
        return {"weight": parts["weight"].view(torch.uint8), "weight_scale": parts["scales"]}

    def restore(parts: Parts) -> torch.Tensor:
        return mlx_floats("mxfp4").restore({"weight": parts["weight"], "scales": parts["weight_scale"]})

    return Method(store, restore)


# HQQ: `Quantizer.dequantize`, `BitPack` and `HQQLinear.state_dict` of hqq.


def hqq(bits: int, group: int, axis: int = 1) -> Method:
    fields = {8: 1, 4: 2, 3: 10, 2: 4}[bits]
    packing = "3bit_32" if bits == 3 else f"{bits}bit_u8"

    def store(weight: torch.Tensor) -> Parts:
        w = weight.reshape(-1, group) if axis == 1 else weight.reshape(group, -1)
        low, high = w.amin(axis, keepdim=True), w.amax(axis, keepdim=True)
        scale = (high - low) / (2**bits - 1)
        zero = -low / scale
        q = (w / scale + zero).round().clamp(0, 2**bits - 1).long()
        step = -(-len(q) // fields)
        q = torch.nn.functional.pad(q, (0, 0, 0, step * fields - len(q)))
        parts = [q[i * step : (i + 1) * step] << bits * (fields - 1 - i) for i in range(fields)]
        packed = torch.stack(parts).sum(0)
        texts = {"packing": packing, "compute_dtype": "torch.float32"}
        numbers = {"nbits": bits, "group_size": group, "axis": axis, "quant_scale": 0, "quant_zero": 0}
        return {
            "W_q": packed.to(torch.int32 if bits == 3 else torch.uint8), "scale": scale, "zero": zero,
            "shape": torch.tensor(weight.shape),
            **{name: torch.tensor([*text.encode()], dtype=torch.uint8) for name, text in texts.items()},
            **{name: torch.tensor(number, dtype=torch.int32) for name, number in numbers.items()},
        }  # fmt: skip

    def restore(parts: Parts) -> torch.Tensor:
        packed, scale = parts["W_q"].int(), parts["scale"]
        q = torch.cat([packed >> bits * (fields - 1 - i) & 2**bits - 1 for i in range(fields)])
        q = q[: len(scale)] if axis == 1 else q[:group]
        return ((q.float() - parts["zero"]) * scale).reshape(*parts["shape"].tolist())

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
