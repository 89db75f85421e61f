"""Triton's interpreter without work that it repeats at every call: more than half of the time of tests that use it.
Where tests compare bits, dot products whose bits do not depend on the number of rows. Where they compare errors, the
errors of a GPU's fast operations."""

import dataclasses
import functools
import math

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

from tests.gpu_errors import FAST


@functools.cache  # once per process
def quicken() -> None:
    """Have it patch the language once per launch, not (as Triton 3.7) at every call of a function by a kernel too; have
    it look dtypes, types of blocks and shapes up in tables that exist; not compute whether integers overflow, of
    which it tells only in debugging; and see at once that operands are alike, or values no constants to unwrap."""
    np_dtype = interpreter._get_np_dtype
    of_scalar = functools.cache(np_dtype)

    def looked_up(kind):
        kind = kind.scalar
        return np_dtype(kind) if kind.is_ptr() else of_scalar(kind)  # types of pointers cannot be hashed

    interpreter._get_np_dtype = looked_up
    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    builder.options = dataclasses.replace(builder.options, sanitize_overflow=False)

    @functools.cache
    def known(element, shape):
        return tl.block_type(element, [*shape])

    @functools.cache
    def known_pointers(element, space, const, shape):
        return tl.block_type(tl.pointer_type(element, space, const), [*shape])

    def block(element, shape):
        if type(element) is tl.dtype:
            return known(element, (*shape,))
        if type(element) is tl.pointer_type and type(element.element_ty) is tl.dtype:
            return known_pointers(element.element_ty, element.address_space, element.const, (*shape,))
        return tl.block_type(element, shape)

    builder.get_block_ty = block
    tl.block_type.with_element_ty = lambda self, element: block(element, self.shape)

    @functools.cache
    def sizes(shape):
        return tl.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))

    def made(self, handle, kind):
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = sizes((*kind.shape.values,) if kind.is_block() else ())

    tl.tensor.__init__ = made
    unwrap, as_they_are = tl.core._unwrap_if_constexpr, {int, float, bool, str, type(None), tl.tensor, tl.dtype}
    tl.core._unwrap_if_constexpr = lambda value: value if type(value) in as_they_are else unwrap(value)
    quicken_patches()
    quicken_operands(block)


def quicken_patches():
    """Have the language be patched once per launch; its functions get what they need without a copy of arguments."""
    patch = interpreter._patch_lang

    @functools.cache
    def langs_of(fn):
        return [value for value in fn.__globals__.values() if value is tl or value is tl.core]

    def patch_once(fn):
        langs = langs_of(fn)
        patched = langs and not any(tl.core.is_builtin(lang.load) for lang in langs)
        return interpreter._LangPatchScope() if patched else patch(fn)

    def patch_attribute(obj, name, member, builder, scope):
        def called(*args, **kwargs):
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, called)

    interpreter._patch_lang, interpreter._patch_attr = patch_once, patch_attribute


def quicken_operands(block):
    """Have operators take a common dtype and shape as they are, and others from tables; `block` returns a type."""
    semantic = type(interpreter.interpreter_semantic)
    check, broadcast = semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value
    floats, numbers, bound = {"fp16", "bf16", "fp32", "fp64"}, {"fp16", "bf16", "fp32", "fp64", "int32", "int64"}, 2**31

    @functools.cache
    def common(left, right):
        """The shape of two blocks together; None: they have none, or not as many axes."""
        fit = len(left) == len(right) and all(a == b or 1 in (a, b) for a, b in zip(left, right, strict=True))
        return tuple(b if a == 1 else a for a, b in zip(left, right, strict=True)) if fit else None

    def widened(self, x, own, shape):
        if own == shape:
            return x
        return self.tensor(self.builder.create_broadcast(x.handle, [*shape]), block(x.type.scalar, [*shape]))

    def together(self, lhs, rhs):
        blocks = lhs.type.is_block() + rhs.type.is_block()
        if blocks == 0:
            return lhs, rhs
        if blocks == 2:
            left, right = (*lhs.type.shape.values,), (*rhs.type.shape.values,)
            if (shape := common(left, right)) is not None:
                return widened(self, lhs, left, shape), widened(self, rhs, right, shape)
        return broadcast(self, lhs, rhs)

    def joins(number, x):
        """Whether an operator makes a number one of the dtype of a tensor, whatever it is."""
        if type(x) is not tl.tensor or type(x.dtype) is not tl.dtype:
            return False
        if type(number) is float:
            return x.dtype.name in floats
        return type(number) is int and -bound <= number < bound and x.dtype.name in numbers

    def checked(self, lhs, rhs, *flags, **named):
        if not named and len(flags) < 4:  # the fourth: a division, whose dtype may be another
            if type(lhs) is type(rhs) is tl.tensor:
                if lhs.dtype is rhs.dtype and type(lhs.dtype) is tl.dtype:
                    return self.broadcast_impl_value(lhs, rhs)
            elif joins(rhs, lhs):
                return self.broadcast_impl_value(lhs, self.scalar_constant(rhs, dtype=lhs.dtype))
            elif joins(lhs, rhs):
                return self.broadcast_impl_value(self.scalar_constant(lhs, dtype=rhs.dtype), rhs)
        return check(self, lhs, rhs, *flags, **named)

    semantic.binary_op_type_checking_impl, semantic.broadcast_impl_value = checked, together


def dot_in_order(self, a, b, d, *options):
    """`tl.dot` that adds products in the order of the inner axis. Its own is NumPy's, which adds by OpenBLAS; there, on
    processors without AVX-512, the order depends on the number of rows."""
    products = a.data[..., None].astype(d.data.dtype) * b.data[..., None, :, :]
    return interpreter.TensorHandle(products.sum(-2) + d.data, d.dtype.scalar)


def err_as_gpus(monkeypatch, alike=None):
    """Have quotients, roots and exponentials of float32 err by as much as a GPU's fast ones may (PTX ISA: div.full, by
    way of a reciprocal, sqrt.approx and ex2.approx), by noise that depends on the operand. The precise ones stay.

    Args:
        alike: from -1 to 1: the same error for all operands instead of noise.
    """

    def erring(function, error):
        def run(x):
            if x.dtype != np.float32:
                return function(x)
            exact, bits = function(x.astype(np.float64)), np.ascontiguousarray(x).view(np.uint32).astype(np.uint64)
            noise = (bits * np.uint64(0x9E3779B97F4A7C15) >> np.uint64(40)) / 2**23 - 1 if alike is None else alike
            known = exact == exact.astype(np.float32)  # powers of two have exact reciprocals, integers exact powers
            return np.where(known, exact, exact * (1 + error * noise)).astype(np.float32)

        return run

    def named(name, run):
        monkeypatch.setattr(interpreter.InterpreterBuilder, f"create_{name}", run)

    inverse, exp2 = erring(np.reciprocal, 2**-24), erring(np.exp2, FAST)  # that of div.full is then rounded
    named(
        "fdiv",
        lambda self, x, y: self.binary_op(x, y, lambda x, y: (x * inverse(y).astype(np.float64)).astype(x.dtype)),
    )
    named("sqrt", lambda self, x: self.unary_op(x, erring(np.sqrt, 2**-23)))
    named("exp2", lambda self, x: self.unary_op(x, exp2))
    named("exp", lambda self, x: self.unary_op(x, lambda x: exp2(x * x.dtype.type(math.log2(math.e)))))
