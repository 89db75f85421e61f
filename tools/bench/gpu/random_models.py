"""Models of random weights, made on the device: floats, or small numbers that were never floats."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels.experts import Stacked
from kernels.linear.codes import Codes, row_bytes
from models.checkpoint.fields import Fields
from models.checkpoint.weights import Weights
from models.decoder import Decoder
from models.families.llama import Llama
from models.formats.coded import CodedLinear
from models.formats.linear import format_of
from models.names import HEAD
from tools.bench.measure import progress

GROUP = 32  # elements of an int4 matrix that share a scale


class Made(NamedTuple):
    """A model, and the bytes of its weights that a step reads."""

    model: Decoder
    bytes: int


class RandomCheckpoint:
    """The part of a checkpoint's interface that a model uses; weights are drawn on the device when read."""

    packing = quantization = None
    folder = "random weights"

    def __init__(self, config: Mapping[str, Any], device: torch.device):
        self.fields, self.device, self.bytes = Fields(config, "config.json"), device, 0
        self.shapes: dict[str, tuple[int, ...]] = {}

    def check(self, expected: Mapping[str, tuple[int, ...]], **_: Any) -> dict[str, str]:
        """Accept any shapes."""
        self.shapes = dict(expected)
        return {}

    def read(self, names: Sequence[str]) -> dict[str, Tensor]:
        """Small random numbers; ones for norms."""
        made = {}
        for name in names:
            shape = self.shapes[name]
            x = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
            made[name] = x.normal_(std=0.02) if len(shape) > 1 else x.fill_(1)
            self.bytes += 0 if name == f"{Llama.names.embedding}.weight" else 2 * x.numel()
        return made

    def rows(self, name: str, stored: str, shape: tuple[int, int]) -> Callable[[Sequence[int]], Tensor]:
        """Reads rows of the embedding, where it is not on a device."""
        table = self.read([name])[name]
        return lambda tokens: table[torch.tensor(tokens)]

    def packed(self, names: Sequence[str], outs: int, width: int) -> None:
        """Nothing is packed ahead."""

    def grouped(self, *_: Any, **__: Any) -> None:
        """Nothing is stored quantised."""


class CodedWeights(Weights):
    """Matrices in small numbers, drawn as they are: to quantise a large model takes minutes."""

    def linear(
        self,
        *names: str,
        bias: bool = False,
        transposed: bool = False,
        outs: Sequence[range] | None = None,
        ins: range | None = None,
    ) -> CodedLinear:
        """See `Weights`; without biases."""
        rows, width = sum(self.shapes[f"{name}.weight"][0] for name in names), self.shapes[f"{names[0]}.weight"][1]
        kind = format_of(self.quant, rows, head=names == (HEAD,))
        layer = random_codes(kind, rows, width, self.device, self.dtype)
        self.checkpoint.bytes += code_bytes(layer)  # type: ignore[attr-defined]
        return layer


def random_codes(
    kind: str, outs: int, width: int, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> CodedLinear:
    """A layer of random small numbers, as the format of this name keeps a matrix of these sizes."""
    group = width if kind == "int8" else GROUP
    codes = torch.randint(256, (outs, row_bytes(kind, width)), dtype=torch.uint8, device=device)  # type: ignore[arg-type]
    scale = torch.full((-(-width // group), outs), 1e-3, dtype=torch.float16, device=device)
    part = Codes(kind, group, outs, width, codes, scale)  # type: ignore[arg-type]
    return CodedLinear([part], None, dtype=dtype, device=device)


def random_experts(kind: str, count: int, outs: int, width: int, device: torch.device) -> Stacked:
    """Matrices of so many experts, bfloat16 ("none") or random small numbers."""
    if kind == "none":
        return Stacked(count, torch.randn(count * outs, width, dtype=torch.bfloat16, device=device) * 0.02)
    return Stacked(count, random_codes(kind, count * outs, width, device).parts[0])


def code_bytes(layer: CodedLinear) -> int:
    """Bytes of numbers and scales."""
    return sum(part.codes_OB.nbytes + part.scale_GO.nbytes for part in layer.parts)


def make(family: type[Decoder], config: Mapping[str, Any], device: torch.device, quant: str = "none") -> Made:
    """A model of random weights."""
    progress(f"making a {family.__name__}, weights {quant}")
    checkpoint = RandomCheckpoint(config, device)
    reader = Weights if quant == "none" else CodedWeights
    model = family(checkpoint, torch.bfloat16, device, quant, reader).eval()  # type: ignore[arg-type]
    return Made(model, checkpoint.bytes)
