"""A GGUF file with its matrices in other blocks: `python -m tools.requantise SRC.gguf DST.gguf --type Q8_0`.

For benchmarks that compare formats of one model: the floats that SRC's blocks stand for are rounded once more, so DST
is never better than SRC. Norms and other floats stay as they are, and so does all metadata. Needs the package `gguf`
(extra dev).
"""

import argparse
import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from engine.app.cli import called, ended, run
from engine.errors import UsageError, reason_of

KEPT = ("F32", "F16", "BF16", "F64", "I8", "I16", "I32", "I64")
WRITTEN = (  # by the writer itself
    *("GGUF.version", "GGUF.tensor_count", "GGUF.kv_count"),
    *("general.architecture", "general.alignment", "general.file_type"),
)


def requantise(source: Path, made: Path, kind: str) -> int:
    """Write the file; returns its bytes. Raises UsageError if the package is absent, the type unknown, the file there
    already, or impossible to write."""
    try:
        gguf: Any = importlib.import_module("gguf")
    except ModuleNotFoundError as error:
        raise UsageError("gguf is not installed", remedy="pip install gguf") from error
    if made.exists():
        raise UsageError(f"{made} is there already", remedy="remove it, or give another name")
    if kind not in gguf.GGMLQuantizationType.__members__:
        raise UsageError(f"--type: expected a type of ggml, as Q8_0, got {kind!r}")
    try:
        read = gguf.GGUFReader(source)
    except (OSError, ValueError) as error:
        raise UsageError(f"{source}: {error}", remedy="give a GGUF file") from error
    wanted, named = gguf.GGMLQuantizationType[kind], gguf.LlamaFileType.__members__
    mix = next((named[name] for name in (f"MOSTLY_{kind}", f"ALL_{kind}", f"MOSTLY_{kind}_MOE") if name in named), None)
    partial = made.with_name(f".{made.name}.{os.getpid()}.partial")
    try:
        _write(gguf, read, partial, wanted, mix)
        partial.replace(made)
    except OSError as error:
        raise UsageError(f"{made}: cannot be written: {reason_of(error)}") from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
    return made.stat().st_size


def _write(gguf: Any, read: Any, made: Path, wanted: Any, mix: int | None) -> None:
    """Write the file.

    Args:
        gguf: the package.
        read: its reader of the source.
        wanted: the type of blocks.
        mix: the package's number of files with such blocks, if it has one.

    Raises:
        UsageError: the package cannot read or write such blocks.
    """
    writer = gguf.GGUFWriter(made, read.fields["general.architecture"].contents())
    if read.alignment != writer.data_alignment:
        writer.add_custom_alignment(read.alignment)
    if mix is not None:
        writer.add_file_type(mix)
    for name, field in read.fields.items():
        if name not in WRITTEN:
            of_items = field.types[-1] if len(field.types) > 1 else None
            writer.add_key_value(name, field.contents(), field.types[0], of_items)
    for tensor in read.tensors:
        if tensor.tensor_type.name in KEPT:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        try:
            values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, wanted), raw_dtype=wanted)
        except (NotImplementedError, gguf.QuantError) as error:
            what = str(error) or "the package writes no such blocks"
            raise UsageError(f"--type {wanted.name}: {tensor.name}: {what}") from error
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(prog=called("python -m tools.requantise"), description=__doc__)
    parser.add_argument("source", type=Path, metavar="SRC")
    parser.add_argument("made", type=Path, metavar="DST")
    parser.add_argument("--type", default="Q8_0", help="of blocks (%(default)s)")
    args = parser.parse_args(argv)

    def work() -> int:
        print(f"{args.made.name}: {requantise(args.source, args.made, args.type) / 1e6:.1f} MB")
        return 0

    return run(work)


if __name__ == "__main__":
    sys.exit(ended(main))
