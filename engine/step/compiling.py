"""Compilation by torch.compile: on a CPU of layers, to which the operators over trees are opaque; on a GPU of the
operators on rows, which stand between products and the operators over trees (`kernels.rows`): these depend on
activations alone, so that no pass of a new shape makes anybody compile."""

import os
import warnings
from collections.abc import Callable
from importlib import import_module

import torch
from torch import nn

from engine.load.startup import METAS
from kernels import cpp
from kernels.files import private

CPU = torch.device("cpu")
LEAST_SIZES = (2,)  # tokens of a pass, and words of ancestry: torch would make graphs of their own for sizes 0 and 1


def compile_model(model: nn.Module, device: torch.device = CPU) -> bool:
    """Compile a model when it is first called: on a CPU every layer in place, one graph for all, sizes dynamic.

    On a GPU the runner chooses compiled operators on rows, see `make_runner`.

    Compiled code is stored on disk (TORCHINDUCTOR_CACHE_DIR; by default in the user's cache folder) for later runs.
    Without a C++ compiler, or if other users may write to that folder, it warns and leaves the model eager.

    Returns:
        whether it is compiled.
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
    # On a GPU inductor recommends TF32 for float32 products; here they are exact on purpose, and it sees no product.
    warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
    if device.type != "cpu":
        return True
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(dynamic=True)  # type: ignore[operator]
    if stack := getattr(model, "stack", None):
        stack.idle = True
    return True


def warm_up(model: nn.Module, run: Callable[[], object]) -> bool:
    """Run a compiled model once, which compiles it; where that fails it warns and leaves the model eager.

    Returns:
        whether it is compiled.
    """
    from torch._dynamo.exc import BackendCompilerFailed  # here, as it takes a second to import

    try:
        run()
    except BackendCompilerFailed as error:  # a compiler that does not work, no place to write to
        reason = str(error).strip().partition("\n")[0]
        warnings.warn(f"--compile on has no effect: {reason}", stacklevel=2)
        for layer in model.layers:  # type: ignore[union-attr]
            layer._compiled_call_impl = None  # type: ignore[assignment]
        if stack := getattr(model, "stack", None):
            stack.idle = False
        return False
    return True
