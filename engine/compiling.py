"""The one place that compiles: layers through torch.compile, operators over trees opaque to it."""

import shutil
import warnings

import torch
from torch import nn


def compile_model(model: nn.Module) -> None:
    """Compile every layer of a model in place, one graph for all, sizes dynamic.

    Without a C++ compiler on a CPU it warns and leaves the model eager.
    """
    if not any(shutil.which(name) for name in ("c++", "g++", "clang++")):
        warnings.warn("no C++ compiler was found: --compile on has no effect", stacklevel=2)
        return
    torch._dynamo.config.allow_unspec_int_on_nn_module = True
    for layer in model.layers:  # type: ignore[union-attr]
        layer.compile(dynamic=True)  # type: ignore[operator]
