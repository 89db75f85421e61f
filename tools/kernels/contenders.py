"""The contenders: every implementation of an operator, or the reason for its absence; and a candidate from a file."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

from engine.errors import UsageError
from models.later import later

with later():
    import torch
    from torch import Tensor
    from torch.nn import functional as F

    from kernels.cpp import why_not as why_no_cpp
    from kernels.kv_write import kv_write
    from kernels.layout import TreeLayout
    from kernels.tree_attention import tree_attention
    from tools.bench.device import flex_attention
    from tools.kernels.scenes import Scene

OPERATORS = ("tree_attention", "kv_write")
PACKED = ("sdpa", "flex")  # these take contiguous keys and a mask, made beforehand
NAMES = ("reference", "torch", "cpp", "triton", *PACKED)


@dataclass
class Contender:
    """An implementation of an operator.

    Args:
        name: how it is called.
        run: the operator; of those in `PACKED`, see `packed`.
        timed: False for an interpreted kernel, which has no meaningful time.
        compiles: whether it is compiled for each shape.
        file: the candidate's.
    """

    name: str
    run: Callable
    timed: bool = True
    compiles: bool = False
    file: Path | None = None

    def __call__(self, *args: Any) -> Any:
        """The operator. Raises NotImplementedError for unsupported arguments, UsageError for a candidate's errors."""
        if self.file is None:
            try:
                return self.run(*args)
            except ValueError as error:  # raised by an implementation for unsupported arguments
                raise NotImplementedError(str(error)) from error
        try:
            return self.run(*args)
        except NotImplementedError:
            raise
        except Exception as error:
            raise fault(self.file, error, f"{self.name} failed") from error


def contenders(operator: str, device: torch.device, wanted: Sequence[str]) -> tuple[list[Contender], dict[str, str]]:
    """The contenders that can run here, and the reasons why the others cannot.

    Args:
        operator: one of `OPERATORS`.
        device: where.
        wanted: names; empty for the default ones.
    """
    able, absent = [], {}
    for name in NAMES:
        if name in PACKED and operator == "kv_write":
            continue
        reason = why_not(name, device, name in wanted)
        if reason is None and wanted and name not in wanted:
            reason = "not asked for"
        if reason is not None:
            absent[name] = reason
        else:
            able.append(contender(operator, name, device))
    return able, absent


def why_not(name: str, device: torch.device, asked: bool) -> str | None:
    """The reason why an implementation cannot run here; None if it can."""
    if name == "triton":
        if importlib.util.find_spec("triton") is None:
            return "triton is not installed"
        if device.type == "cpu" and not asked:
            return "no GPU; --impls triton checks it in Triton's interpreter, untimed"
    if name == "cpp":
        return why_no_cpp() if device.type == "cpu" else "it runs on a CPU"
    if name == "flex" and device.type == "cpu" and not asked:
        return "FlexAttention is compiled for each shape, 10 s and more on a CPU: --impls flex"
    return None


def contender(operator: str, name: str, device: torch.device) -> Contender:
    """An implementation by name."""
    if name == "triton":
        if device.type == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
        module = importlib.import_module(f"kernels.{operator}.triton")
        return Contender(name, getattr(module, operator), timed=device.type != "cpu")
    if name in PACKED:
        return Contender(name, flex if name == "flex" else sdpa, compiles=name == "flex")
    return Contender(name, partial(attend if operator == "tree_attention" else kv_write, impl=name))


def attend(
    q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor, layout: TreeLayout, scale: float, window: int | None, *, impl: str
) -> Tensor:
    """Tree attention with an implementation's arguments, all of them positional."""
    return tree_attention(q_THD, k_GSD, v_GSD, layout, scale=scale, window=window, impl=impl)


# --- torch's own ---


def packed(s: Scene, k_GSD: Tensor, v_GSD: Tensor) -> tuple[Tensor, Tensor]:
    """The visible keys and values, [1, G, S, D] and contiguous."""
    return k_GSD[:, s.slots_S][None].contiguous(), v_GSD[:, s.slots_S][None].contiguous()


def sdpa(q_THD: Tensor, s: Scene, scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    """Masked scaled_dot_product_attention: packed keys and values to [1, H, T, D]."""
    q_1HTD = q_THD.transpose(0, 1)[None].contiguous()
    return lambda k, v: F.scaled_dot_product_attention(
        q_1HTD, k, v, attn_mask=s.visible_QS, scale=scale, enable_gqa=q_1HTD.shape[1] != k.shape[1]
    )


def flex(q_THD: Tensor, s: Scene, scale: float) -> Callable[[Tensor, Tensor], Tensor]:
    """FlexAttention, compiled; its own scale, D ** -0.5, is the lab's."""
    assert scale == q_THD.shape[-1] ** -0.5
    torch.compiler.reset()  # or it gives up compiling after a few shapes
    return flex_attention(q_THD.transpose(0, 1)[None].contiguous(), s.visible_QS)


# --- a candidate ---


def load_candidate(path: str, operators: Sequence[str]) -> dict[str, Contender]:
    """The operators that a Python file defines. Raises UsageError: no such file, it fails, it defines none of them."""
    file = Path(path).resolve()
    if not file.is_file():
        raise UsageError(f"--candidate: there is no file {path}", remedy="--print-template prints one to begin with")
    spec = importlib.util.spec_from_file_location(f"candidate_{file.stem}", file)
    if spec is None or spec.loader is None:
        raise UsageError(f"--candidate: {path} is no Python file")
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # where torch.compile and Triton look
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise fault(file, error, "the candidate cannot be loaded") from error
    found = {name: getattr(module, name) for name in operators if callable(getattr(module, name, None))}
    if not found:
        raise UsageError(
            f"the candidate defines no {' or '.join(operators)}",
            where=f"{file.name} defines {', '.join(own_functions(module)) or 'no function'}",
            remedy="--print-template prints one that does",
        )
    return {name: Contender(file.stem, run, file=file) for name, run in found.items()}


def own_functions(module: ModuleType) -> list[str]:
    """Functions that a module itself defines."""
    return [name for name, x in vars(module).items() if callable(x) and getattr(x, "__module__", "") == module.__name__]


def fault(file: Path, error: Exception, what: str) -> UsageError:
    """A candidate's exception: its message, and the last line of the file that it came through."""
    message = (str(error).strip() or "no message").splitlines()[0]
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename) == file]
    line = frames[-1].lineno if frames else getattr(error, "lineno", None)
    where = f"{file.name}:{line}" if line else file.name
    if frames:
        where += f": {frames[-1].line}"
    return UsageError(f"{what}: {type(error).__name__}: {message}", where=where)


def check_result(contender: Contender, out: Any, like: Tensor) -> Tensor:
    """The output of an attention. Raises UsageError if it is no tensor of q's shape, dtype and device."""
    want = f"a tensor {list(like.shape)} of {like.dtype} on {like.device}"
    if not isinstance(out, Tensor):
        got = type(out).__name__
    elif (out.shape, out.dtype, out.device) != (like.shape, like.dtype, like.device):
        got = f"{list(out.shape)} of {out.dtype} on {out.device}"
    else:
        return out
    raise UsageError(f"{contender.name}: tree_attention must return {want}, got {got}")
