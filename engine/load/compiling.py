"""`--compile on`, for a GPU: torch.compile of the row-wise operators (`kernels.rows`), which run between matrix
multiplications and tree operators. They depend on activations alone, so passes of new shapes trigger no compilation."""

import os
import warnings
from collections.abc import Callable
from importlib import import_module

import torch

from engine.errors import UsageError
from engine.load.startup import METAS
from kernels import cpp, same_bits
from kernels.files import private


def check_compile(compile: str, device: torch.device) -> None:
    """Refuse `--compile on` on a CPU, and together with `COPPICE_SAME_BITS=on`. Raises UsageError."""
    if compile == "on" and device.type == "cpu":
        raise UsageError(
            "compile: on a CPU a compiled model is slower than one that is not, with the C++ kernels and without them",
            remedy="leave out --compile on: it is for a GPU",
        )
    if compile == "on" and same_bits.asked():
        raise UsageError(
            "compile: what torch.compile makes of operators may add up in an order that depends on the number of rows",
            remedy="leave out --compile on, or do not set COPPICE_SAME_BITS",
        )


def check_same_bits() -> None:
    """Refuse a setting of `COPPICE_SAME_BITS` that has no meaning, also on a CPU, where it changes nothing. Raises
    UsageError."""
    try:
        same_bits.check()
    except ValueError as error:
        raise UsageError(str(error), remedy=f"set {same_bits.NAME} to on or off, or do not set it") from None


def prepare() -> bool:
    """Get ready to compile.

    Compiled code is stored on disk (TORCHINDUCTOR_CACHE_DIR; by default in the user's cache folder) for later runs.
    Without a C++ compiler, or if other users may write to that folder, it warns.

    Returns:
        whether torch can compile.
    """
    if cpp.compiler() is None:
        warnings.warn("no C++ compiler was found: --compile on has no effect", stacklevel=2)
        return False
    if not os.environ.get("TORCHINDUCTOR_CACHE_DIR"):
        try:  # files of this folder are loaded as code
            folder = private(cpp.cache_folder() / "compiled", make=True)
        except (OSError, RuntimeError, cpp.BuildError) as error:
            warnings.warn(f"--compile on has no effect: {error}", stacklevel=2)
            return False
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(folder)
    import_module(METAS)
    # Inductor recommends TF32 for float32 products; here they are exact on purpose, and it sees no product.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    return True


def warm_up(run: Callable[[], object]) -> bool:
    """Run a model once, which compiles its operators; if that fails, it warns.

    Returns:
        whether they are compiled.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # here, because importing it takes a second

    try:
        run()
    except BackendCompilerFailed as error:  # a compiler that does not work, no place to write to
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"--compile on has no effect: {reason}", stacklevel=2)
        return False
    return True
