"""Triton's interpreter without work that it repeats at every call: half of the time of tests that run kernels in it."""

import functools

import triton.language as tl
from triton.runtime import interpreter


@functools.cache  # once per process
def quicken() -> None:
    """Have it patch the language once per launch, not (as Triton 3.7) at every call of a function by a kernel too; have
    it look dtypes up in a table that exists."""
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
