"""Marks of tests that need a GPU, Triton, C++ kernels, a compiler or figures; what can run here."""

import importlib.util
import os

import pytest
import torch

from kernels import cpp
from models.formats.int8 import Int8Linear

NO_INT8 = Int8Linear.why_not(torch.device("cpu"))
HAS_FIGURES = importlib.util.find_spec("matplotlib") is not None
HAS_TRITON = importlib.util.find_spec("triton") is not None
INTERPRETED = HAS_TRITON and os.environ.get("TRITON_INTERPRET") == "1"  # set where there is no GPU

needs_figures = pytest.mark.skipif(not HAS_FIGURES, reason="matplotlib is not installed (extra viz)")
needs_cpp = pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")
needs_int8 = pytest.mark.skipif(bool(NO_INT8), reason=f"no int8 weights: {NO_INT8}")
needs_compiler = pytest.mark.skipif(cpp.compiler() is None, reason="no C++ compiler")
needs_triton = pytest.mark.skipif(not HAS_TRITON, reason="triton is not installed")
needs_interpreter = pytest.mark.skipif(not INTERPRETED, reason="needs triton, and no GPU")
interpreted = pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") != "1", reason="compiled on this machine's GPU")
on_gpu = (pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"))

TRITON = [pytest.param("cpu", marks=(needs_triton, interpreted), id="interpreted"), pytest.param("cuda", marks=on_gpu)]
DEVICES = pytest.mark.parametrize("device", TRITON)
IMPLS = ["reference", "torch", *([] if cpp.why_not() else ["cpp"])]
