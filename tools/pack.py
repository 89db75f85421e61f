"""Packs a checkpoint's matrices in advance: `python -m tools.pack MODEL --output DIR`.

DIR is a model folder like MODEL, with the same files except the weights. Loading it, on any processor, only reads its
small tensors: the matrices are used where the file is mapped, so that processes share their memory and the system can
reclaim it under pressure. While a model of such a folder runs, replace its files instead of overwriting them.
"""

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

from engine.app.cli import called, ended, run
from engine.errors import CheckpointError, UsageError
from models.formats import NAMES
from models.later import later
from tools.convert import copy_others, new_folder

with later():
    import torch
    from torch import Tensor

    from engine.load.hub import local_path
    from engine.load.loading import check_quant
    from kernels.linear import Packed
    from models.checkpoint.headers import Checkpoint
    from models.checkpoint.listing import WEIGHTS
    from models.checkpoint.tensor_files import write_tensors
    from models.families import load_model, viewed
    from models.formats.floats import PackedLinear, has_kernels
    from models.formats.packed import PREFIXES, Packing, Size
    from tools import gguf


def pack(source: str | Path, folder: str | Path, *, quant: str = "none") -> dict[str, Any]:
    """Write the checkpoint in `source` into the new folder `folder`, its matrices packed.

    Args:
        quant: format of the matrices, a key of `models.formats.linear.FORMATS`; "none" keeps their dtype.

    Returns:
        {"path", "matrices", "bytes"} (bytes of the weights file).

    Raises:
        CheckpointError: `source` is no checkpoint, or one that is packed already.
        UsageError: `folder` is there already, or this machine has no C++ kernels.
    """
    cpu = torch.device("cpu")
    check_quant(quant, cpu)
    if not has_kernels(torch.float32, cpu):
        raise UsageError("packing needs the C++ kernels", remedy="install a C++ compiler: `python -m kernels.build`")
    checkpoint = Checkpoint.open(source)
    if checkpoint.packing:
        raise CheckpointError("the matrices are packed already", where=str(source))
    if checkpoint.quantization is not None:
        raise CheckpointError("the weights are quantised already: they are used as they are", where=str(source))
    if checkpoint.config.get("kv_b_split"):
        what = "keys and values of a latent have matrices of their own, which cannot be packed head by head"
        raise CheckpointError(what, where=str(source), remedy="Use the model as it is, or pack transformers' version.")
    config, checkpoint = checkpoint.config, viewed(checkpoint)
    with new_folder(Path(folder)) as partial:
        model = load_model(checkpoint, torch.float32, cpu, quant)
        layers = [
            layer for layer in model.modules() if isinstance(layer, PackedLinear) and layer.packed and layer.names
        ]
        tensors: dict[str, Tensor] = {}
        sizes: dict[str, Size] = {}
        names: set[str] = set()
        for layer in layers:
            key, packed = "+".join(layer.names), layer.packed
            assert isinstance(packed, Packed)  # parts are of formats that checkpoints have themselves
            values = packed.groups[2:] if packed.groups else (packed.scale_O, *(None,) * 4)
            sizes[key] = Size.of(packed)
            for prefix, x in zip(PREFIXES, (packed.panels, *values), strict=True):
                if x is not None:
                    tensors[prefix + key] = x
            names.update(layer.names)
        matrices = {name: (checkpoint.tensors[name].shape, checkpoint.tensors[name].dtype) for name in names}
        rest = [name for name in checkpoint.tensors if name not in names or name in _embeddings(model)]
        tensors |= checkpoint.read(rest)
        with (partial / WEIGHTS).open("wb") as file:
            write_tensors(file, tensors, Packing(quant, matrices, sizes).metadata())
        if checkpoint.gguf:
            gguf.write_files(checkpoint, config, partial)
        else:
            copy_others(checkpoint.folder, partial)
        Checkpoint.open(partial)  # it can be read
        size = (partial / WEIGHTS).stat().st_size
    return {"path": str(folder), "matrices": len(sizes), "bytes": size}


def _embeddings(model: Any) -> set[str]:
    """Names of matrices whose rows are looked up, which a head may share."""
    return {model.embedding.rows.name}


def main(argv: list[str] | None = None) -> int:
    """Returns the exit status."""
    parser = argparse.ArgumentParser(
        prog=called("python -m tools.pack"), description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", metavar="MODEL", help="model folder")
    parser.add_argument("--output", metavar="DIR", required=True, help="folder to make; must not exist")
    parser.add_argument("--quant", choices=NAMES, default="none", help="format of the matrices (default: their dtype)")
    parser.add_argument("-v", "--verbose", action="store_true", help="traceback of errors")
    args = parser.parse_args(argv)

    def work() -> int:
        began = time.perf_counter()
        report = pack(local_path(args.source), args.output, quant=args.quant)
        print(json.dumps({**report, "seconds": round(time.perf_counter() - began, 3)}))
        return 0

    return run(work, args.verbose)


if __name__ == "__main__":
    sys.exit(ended(main))
