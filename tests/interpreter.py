"""Triton's interpreter without work that it repeats at every call: more than half of the time of tests that use it.
Where tests compare bits, dot products whose bits do not depend on the number of rows. Where they compare errors, the
errors of a GPU's fast operations."""

import dataclasses
import functools
import math

import numpy as np
import triton.language as tl
from triton.runtime import interpreter


@functools.cache  # once per process
def quicken() -> None:
    """Have it patch the language once per launch, not (as Triton 3.7) at every call of a function by a kernel too; have
    it look dtypes, types of blocks and shapes up in tables that exist; and not compute whether integers overflow, of
    which it tells only in debugging."""
    patch, np_dtype = interpreter._patch_lang, interpreter._get_np_dtype
    of_scalar = functools.cache(np_dtype)

    def patch_once(fn):
        langs = [value for value in fn.__globals__.values() if value is tl or value is tl.core]
        patched = langs and not any(tl.core.is_builtin(lang.load) for lang in langs)
        return interpreter._LangPatchScope() if patched else patch(fn)

    def looked_up(kind):
        kind = kind.scalar
        return np_dtype(kind) if kind.is_ptr() else of_scalar(kind)  # types of pointers cannot be hashed

    interpreter._patch_lang, interpreter._get_np_dtype = patch_once, looked_up
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    @functools.cache
    def known(element, shape):
        return tl.block_type(element, [*shape])

    def block(element, shape):
        return known(element, (*shape,)) if type(element) is tl.dtype else tl.block_type(element, shape)

    builder.get_block_ty = block
    tl.block_type.with_element_ty = lambda self, element: block(element, self.shape)

    @functools.cache
    def sizes(shape):
        return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    def made(self, handle, kind):
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = sizes((*kind.shape,) if kind.is_block() else ())

    tl.tensor.__init__ = made


def dot_in_order(self, a, b, d, *options):
    """`tl.dot` that adds products in the order of the inner axis. Its own is NumPy's, which adds by OpenBLAS; there, on
    processors without AVX-512, the order depends on the number of rows."""
    products = a.data[..., None].astype(d.data.dtype) * b.data[..., None, :, :]
    return interpreter.TensorHandle(products.sum(-2) + d.data, d.dtype.scalar)


def err_as_gpus(monkeypatch):
    """Have quotients, roots and exponentials of float32 err by as much as a GPU's fast ones may (PTX ISA: div.full, by
    way of a reciprocal, sqrt.approx and ex2.approx), by noise that depends on the operand. The precise ones stay."""

    def erring(function, error):
        def run(x):
            if x.dtype != np.float32:
                return function(x)
            exact, bits = function(x.astype(np.float64)), np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
            noise = (bits * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) / 2**23 - 1  # from -1 to 1
            known = exact == exact.astype(np.float32)  # powers of two have exact reciprocals, integers exact powers
            return np.where(known, exact, exact * (1 + error * noise)).astype(np.float32)

        return run

    def named(name, run):
        monkeypatch.setattr(interpreter.InterpreterBuilder, f"create_{name}", run)

    inverse, exp2 = erring(np.reciprocal, 2**-24), erring(np.exp2, 2**-22)  # that of div.full is then rounded
    named(
        "fdiv",
        lambda self, x, y: self.binary_op(x, y, lambda x, y: (x * inverse(y).astype(np.float64)).astype(x.dtype)),
    )
    named("sqrt", lambda self, x: self.unary_op(x, erring(np.sqrt, 2**-23)))
    named("exp2", lambda self, x: self.unary_op(x, exp2))
    named("exp", lambda self, x: self.unary_op(x, lambda x: exp2(x * x.dtype.type(math.log2(math.e)))))
