"""Reads and checks the header of a safetensors file, diagnoses a damaged one, and writes one."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from models.checkpoint.files import open_regular
from models.checkpoint.tensors import TensorInfo
from models.errors import CheckpointError, show
from models.formats.packed import KEY

FLOATS = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
INTEGERS = {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
OTHERS = {"U32": torch.uint32, "U8": torch.uint8, "BOOL": torch.bool}
BYTES = {"F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu}
DTYPES = FLOATS | INTEGERS | OTHERS | BYTES
FETCH_AGAIN = "Download the file again."
PACK_AGAIN = "Pack the checkpoint again: `python -m tools.pack`."
LINE = 64  # bytes of a line of processors' caches


def read_header(file: Path) -> dict[str, TensorInfo]:
    """Read the header of a file. Raises CheckpointError.

    safetensors itself refuses overlaps, holes, overflows, and headers over 100 MB.
    """
    tensors = {}
    try:
        with safe_open(file, framework="pt") as mapped:
            for name in mapped.keys():  # noqa: SIM118 (it is no dict)
                entry = mapped.get_slice(name)
                shape, dtype = tuple(entry.get_shape()), entry.get_dtype()
                if dtype not in DTYPES:
                    raise CheckpointError(f"tensor {show(name)}: dtype {dtype} is not supported", where=show(file))
                if 0 in shape or len(shape) > 8 or math.prod(shape) >= 2**48:
                    what = f"tensor {show(name)}: unusable shape {show(list(shape))}"
                    raise CheckpointError(what, where=show(file), remedy=FETCH_AGAIN)
                tensors[name] = TensorInfo(file, shape, DTYPES[dtype])
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error
    if not tensors:
        raise CheckpointError("the file holds no tensors", where=show(file), remedy=FETCH_AGAIN)
    return tensors


def widened(tensors: Mapping[str, TensorInfo]) -> dict[str, TensorInfo]:
    """Return the tensors of a checkpoint that is not quantised. Floats of 8 bits have no scales there, so they are
    their values; they are read as bfloat16, which has all of them."""
    small = torch.float8_e4m3fn, torch.float8_e5m2
    return {
        name: replace(info, dtype=torch.bfloat16, stored=info.dtype) if info.dtype in small else info
        for name, info in tensors.items()
    }


def read_metadata(file: Path) -> dict[str, str]:
    """Read the metadata of a file's header. Raises CheckpointError."""
    try:
        with safe_open(file, framework="pt") as mapped:
            return mapped.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise damaged(file, error) from error


class LastFile:
    """Keeps the file that was read last open: with thousands of tensors, reading its header takes longer than a matrix.

    It is reopened from time to time, because small tensors that were read stay in memory as long as it is open.
    """

    BYTES = 64 << 20  # bytes that are read before it is reopened

    def __init__(self) -> None:
        self.file: Path | None = None
        self.handle: Any = None
        self.left = 0

    def get(self, file: Path, wanted: int) -> Any:
        """Return the open file, from which `wanted` bytes will be read. Raises as `safe_open` does."""
        if file != self.file or self.left < wanted:
            self.close()
            self.handle = safe_open(file, framework="pt")
            self.file, self.left = file, self.BYTES
        self.left -= wanted
        return self.handle

    def close(self) -> None:
        """Close the file; views of it stay valid."""
        self.file = self.handle = None


def tensor_of(info: TensorInfo, name: str, last: LastFile) -> torch.Tensor:
    """A tensor by its name in its file. Raises CheckpointError."""
    try:
        return last.get(info.file, info.nbytes).get_tensor(name)
    except (SafetensorError, OSError) as error:
        raise damaged(info.file, error) from error


def damaged(file: Path, error: Exception) -> CheckpointError | MemoryError:
    """Return the error for a file that safetensors refuses, after examining what it is instead."""
    if "(os error 12)" in str(error):  # no address space to map it: the file is intact
        return MemoryError(str(error))
    if str(file).encode(errors="replace").decode() != str(file):  # the library opens no such path
        return CheckpointError("the path is not valid UTF-8", where=show(file), remedy="Give the folder another name.")
    try:
        with open_regular(file) as stream:
            start = stream.read(128)
    except OSError as unreadable:
        return CheckpointError(f"the file cannot be read: {unreadable.strerror}", where=show(file))
    if start.startswith(b"version https://git-lfs"):
        return CheckpointError(
            "a git-LFS pointer lies where the weights should be",
            where=show(file),
            remedy="Fetch the file itself: `git lfs pull` in the model folder.",
        )
    if start.startswith((b"PK\x03\x04", b"\x80\x02", b"\x80\x03", b"\x80\x04")):
        return CheckpointError(
            "a pickle lies where safetensors should be; pickles can run code and are never loaded",
            where=show(file),
            remedy="If you trust its source: `python -m tools.convert`.",
        )
    remedy = PACK_AGAIN if f'"{KEY}"'.encode() in start else FETCH_AGAIN
    return CheckpointError(f"not a valid safetensors file: {show(error)}", where=show(file), remedy=remedy)


def write_tensors(
    file: IO[bytes],
    tensors: Mapping[str, Tensor],
    metadata: Mapping[str, str] | None = None,
    read: Callable[[str], Tensor] | None = None,
) -> None:
    """Write a safetensors file. The library's own `save` needs NumPy.

    Args:
        file: receives the bytes.
        tensors: tensors by name, of any dtype in `DTYPES`, on a CPU. With `read` they may be on the device "meta".
        metadata: the header's `__metadata__`.
        read: makes a tensor when it is written, so that only one exists at a time.
    """
    names = {dtype: name for name, dtype in DTYPES.items()}
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    # This order aligns all tensors, and those that fill whole cache lines to cache lines.
    end, order = 0, sorted(tensors, key=lambda name: (tensors[name].nbytes % LINE > 0, -tensors[name].itemsize, name))
    for name in order:
        start, end = end, end + tensors[name].nbytes
        header[name] = {
            "dtype": names[tensors[name].dtype],
            "shape": list(tensors[name].shape),
            "data_offsets": [start, end],
        }
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % LINE)
    file.write(len(text).to_bytes(8, "little") + text)
    for name in order:
        kept = (read(name) if read else tensors[name]).contiguous()  # a name, so that the buffer outlives the write
        file.write(buffer_of(kept))


def buffer_of(tensor: Tensor) -> memoryview:
    """View the memory of a contiguous CPU tensor, to write it without a copy; valid as long as the tensor exists."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))
