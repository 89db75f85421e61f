"""HQQ's settings of each module, which are small tensors of its files, and matrices that become floats when they are
read: those whose groups lie across rows (`axis` 0), or whose rows are not whole groups.

Their elements [in groups, groups] are the flattened matrix; `models.quantized.hqq` has the packing. As in
`HQQLinear.dequantize`, (q - zero) * scale is computed in `compute_dtype`.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor

from models.checkpoint.fields import Fields
from models.checkpoint.tensor_files import FETCH_AGAIN, FLOATS, LastFile, tensor_of
from models.checkpoint.tensors import TensorInfo
from models.errors import CheckpointError, show
from models.quantized.hqq import CODES, HQQ, LONGEST, NUMBERS, PACKINGS, TEXTS, HQQScheme, fields_of
from models.quantized.parts import unsupported

MEASURED = ("packing", "group_size", "axis", "shape")  # settings that every file has
SETTINGS = (*NUMBERS, *TEXTS, "shape")


@dataclass(frozen=True)
class Across(TensorInfo):
    """A matrix as it is after dequantisation: `shape` and `dtype` are those of floats.

    Args:
        own: the file's name of the module.
        parts: the tensors of codes, scales and zeros.
        packing, group, axis: settings, see `models.quantized.hqq`.
    """

    own: str = ""
    parts: Mapping[str, TensorInfo] = field(default_factory=dict)
    packing: str = ""
    group: int = 0
    axis: int = 0

    @property
    def layout(self) -> dict[str, tuple[int, int]]:
        """The shapes of the parts, codes as integers."""
        groups, fields = self.elements // self.group, PACKINGS[self.packing][1]
        rows, columns = (self.group, groups) if self.axis == 0 else (groups, self.group)
        across = (1, groups) if self.axis == 0 else (groups, 1)
        return {CODES: (-(-rows // fields), columns), "scale": across, "zero": across}

    def check(self) -> None:
        """Raise CheckpointError if a header does not fit the settings."""
        codes = torch.int32 if self.packing == "3bit_32" else torch.uint8
        for name, shape in self.layout.items():
            info = self.parts[name]
            floats, itemsize = info.dtype in FLOATS.values(), codes.itemsize if name == CODES else info.dtype.itemsize
            fits = info.shape[:1] == shape[:1] and info.nbytes == math.prod(shape) * itemsize
            if len(info.shape) != 2 or not fits or not (floats or (name == CODES and info.dtype == codes)):
                what = f"{name}: expected {list(shape)} of {str(codes)[6:] if name == CODES else 'floats'}"
                raise self._error(f"{what}, got {list(info.shape)} of {str(info.dtype)[6:]}")

    def read(self) -> Tensor:
        """Return the matrix. Raises CheckpointError if scales are not finite or the file changed."""
        last, part = LastFile(), dict[str, Tensor]()
        for name, info in self.parts.items():
            part[name] = tensor_of(info, f"{self.own}.{name}", last)
            if tuple(part[name].shape) != info.shape or part[name].dtype != info.dtype:
                raise self._error("it changed while the model was loaded")
        scale, zero = part["scale"].to(self.dtype), part["zero"].to(self.dtype)
        if not (scale.isfinite().all() and zero.isfinite().all()):
            raise self._error("scale or zero has values that are not finite")
        bits, fields = PACKINGS[self.packing]
        stored = part[CODES].view(torch.int32 if self.packing == "3bit_32" else torch.uint8)
        rows = self.group if self.axis == 0 else self.elements // self.group
        numbers = fields_of(stored, torch.arange(rows), bits, fields).to(self.dtype)
        return ((numbers - zero) * scale).view(self.shape)

    def _error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{show(self.own)}: {what}", where=show(self.file), remedy=FETCH_AGAIN)


def with_hqq(tensors: Mapping[str, TensorInfo]) -> tuple[dict[str, TensorInfo], HQQ | None]:
    """Return the tensors, and the schemes of modules that HQQ quantised; None: there are none.

    Matrices whose groups are not parts of rows are replaced by floats, and those modules have no scheme.

    Raises:
        CheckpointError: settings are missing or not supported.
    """
    found, schemes, last = dict(tensors), dict[str, HQQScheme](), LastFile()
    modules = [name.removesuffix(f".{CODES}") for name in tensors if name.endswith(f".{CODES}")]
    for module in modules:
        whole = _matrix(module, tensors, last)
        if whole.axis == 1 and whole.shape[1] % whole.group == 0:
            schemes[module] = HQQScheme(whole.packing, whole.group)
            continue
        whole.check()
        for name in (*whole.parts, *SETTINGS):
            found.pop(f"{module}.{name}", None)
        found[f"{module}.weight"] = whole
    return found, HQQ(schemes) if modules else None


def _matrix(module: str, tensors: Mapping[str, TensorInfo], last: LastFile) -> Across:
    """Return a module's matrix with its settings. Raises CheckpointError."""
    where = show(tensors[f"{module}.{CODES}"].file)

    def read(setting: str) -> Tensor | None:
        info = tensors.get(name := f"{module}.{setting}")
        if info is None and setting in MEASURED:
            remedy = "Save the model again with hqq 0.2 or transformers 4, as safetensors."
            raise CheckpointError(f"missing {show(name)}, a setting of HQQ", where=where, remedy=remedy)
        if info is not None and info.elements > LONGEST:
            what = f"{show(name)}: expected a setting of HQQ, got {info.elements} elements"
            raise CheckpointError(what, where=where, remedy=FETCH_AGAIN)
        return None if info is None else tensor_of(info, name, last).flatten()

    def number(setting: str) -> int:
        found = read(setting)
        if found is not None and found.is_floating_point():
            what = f"{show(module)}.{setting}: expected a whole number, got {found.dtype}"
            raise CheckpointError(what, where=where, remedy=FETCH_AGAIN)
        return 0 if found is None else int(found[0])

    def text(setting: str) -> str:
        found = read(setting)
        return "" if found is None else bytes(found.to(torch.uint8).tolist()).decode("latin1")

    given, packing, axis, group = Fields({}, where), text("packing"), number("axis"), number("group_size")
    if packing not in PACKINGS:
        raise unsupported(given, f"hqq: {show(module)}.packing {packing!r} (read: {', '.join(PACKINGS)})")
    if axis not in (0, 1):
        raise unsupported(given, f"hqq: {show(module)}.axis {axis} (read: 0, 1)")
    for name in ("quant_scale", "quant_zero"):
        if number(name):
            raise unsupported(given, f"hqq: {show(module)}.{name}, quantized scales or zeros")
    sizes = read("shape")
    shape = [] if sizes is None else sizes.tolist()
    if len(shape) != 2 or any(not 0 < n < 1 << 24 for n in shape) or group < 1 or math.prod(shape) % group:
        raise unsupported(given, f"hqq: {show(module)}.shape {shape} with {show(module)}.group_size {group}")
    dtypes = {str(dtype): dtype for dtype in FLOATS.values()}
    dtype = dtypes.get(text("compute_dtype"), torch.float16)
    parts = {name: f"{module}.{name}" for name in (CODES, "scale", "zero")}
    for name in parts.values():
        if name not in tensors:
            raise CheckpointError(f"missing {show(name)}", where=where, remedy=FETCH_AGAIN)
    return Across(
        tensors[f"{module}.{CODES}"].file, (int(shape[0]), int(shape[1])), dtype, own=module,
        parts={name: tensors[part] for name, part in parts.items()}, packing=packing, group=group, axis=axis,
    )  # fmt: skip
