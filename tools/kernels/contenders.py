"""The contenders: every implementation of an operator, or the reason for its absence; and a candidate from a file."""

import importlib.util
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple

from engine.errors import UsageError
from models.later import later

with later():
    import torch
    from torch import Tensor
    from torch.nn import functional as F

    from kernels.cpp import why_not as why_no_cpp
    from kernels.kv_write import kv_write
    from kernels.layout import NULL_SLOT, TreeLayout
    from kernels.tree_attention import tree_attention
    from tools.bench.device import flex_attention
    from tools.kernels.scenes import Scene

OPERATORS = ("tree_attention", "kv_write")
PACKED = ("sdpa", "flex", "flashinfer")  # these need keys in an order of their own and masks, both made in advance
PAGE, WORKSPACE = 16, 1 << 27  # tokens of a page of FlashInfer's; bytes that its documentation recommends
NAMES = ("reference", "torch", "cpp", "triton", *PACKED)


@dataclass
class Contender:
    """An implementation of an operator.

    Args:
        name: its name in tables and flags.
        run: the operator; of those in `PACKED`, makes a `Rival` of queries, scene and scale.
        timed: False for an interpreted kernel, which has no meaningful time.
        file: the file of a candidate.
    """

    name: str
    run: Callable
    timed: bool = True
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
        device: the device to run on.
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
    if name == "flashinfer":
        if device.type == "cpu":
            return "it runs on a GPU"
        if importlib.util.find_spec("flashinfer") is None:
            return "FlashInfer is not installed: pip install flashinfer-python"
        if not asked:
            return "FlashInfer is compiled at its first use, a minute and more: --impls flashinfer"
    return None


def contender(operator: str, name: str, device: torch.device) -> Contender:
    """An implementation by name."""
    if name == "triton":
        if device.type == "cpu":
            os.environ["TRITON_INTERPRET"] = "1"  # read when triton is first imported
        module = importlib.import_module(f"kernels.{operator}.triton")
        return Contender(name, getattr(module, operator), timed=device.type != "cpu")
    if name in PACKED:
        return Contender(name, {"sdpa": sdpa, "flex": flex, "flashinfer": flashinfer}[name])
    return Contender(name, partial(attend if operator == "tree_attention" else kv_write, impl=name))


def attend(
    q_THD: Tensor, k_GSD: Tensor, v_GSD: Tensor, layout: TreeLayout, scale: float, window: int | None, *, impl: str
) -> Tensor:
    """Tree attention with an implementation's arguments, all of them positional."""
    return tree_attention(q_THD, k_GSD, v_GSD, layout, scale=scale, window=window, impl=impl)


# --- others' ---


class Rival(NamedTuple):
    """An attention with an order of keys and values of its own.

    Attributes:
        pack: from keys and values of a layer [G, S, D] to tensors.
        attend: from these tensors to the output [T, H, D].
    """

    pack: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]
    attend: Callable[[Tensor, Tensor], Tensor]


def packed(s: Scene, k_GSD: Tensor, v_GSD: Tensor) -> tuple[Tensor, Tensor]:
    """The visible keys and values, [1, G, S, D] and contiguous."""
    return k_GSD[:, s.slots_S][None].contiguous(), v_GSD[:, s.slots_S][None].contiguous()


def sdpa(q_THD: Tensor, s: Scene, scale: float) -> Rival:
    """Masked scaled_dot_product_attention."""
    q_1HTD = q_THD.transpose(0, 1)[None].contiguous()

    def attend(k: Tensor, v: Tensor) -> Tensor:
        grouped = q_1HTD.shape[1] != k.shape[1]
        out = F.scaled_dot_product_attention(q_1HTD, k, v, attn_mask=s.visible_QS, scale=scale, enable_gqa=grouped)
        return out[0].transpose(0, 1)

    return Rival(partial(packed, s), attend)


def flex(q_THD: Tensor, s: Scene, scale: float) -> Rival:
    """FlexAttention, compiled; its own scale, D ** -0.5, is the lab's."""
    assert scale == q_THD.shape[-1] ** -0.5
    torch.compiler.reset()  # otherwise it stops compiling after a few shapes
    attend = flex_attention(q_THD.transpose(0, 1)[None].contiguous(), s.visible_QS)
    return Rival(partial(packed, s), lambda k, v: attend(k, v)[0].transpose(0, 1))


def flashinfer(q_THD: Tensor, s: Scene, scale: float) -> Rival:
    """FlashInfer's cascade of two levels: the trunk, shared by all queries, and a copy of its branch for each.

    The interface is `MultiLevelCascadeAttentionWrapper` of docs.flashinfer.ai/api/cascade.html: pages of both levels in
    one table, and the plan made beforehand, once for all layers.
    """
    from flashinfer import MultiLevelCascadeAttentionWrapper  # type: ignore[import-not-found]  # an optional package

    (T, H, D), device, G = q_THD.shape, q_THD.device, s.kv_heads
    trunk = len(s.slots_S) - int((s.layout.branch_slots_RW[0] > 0).sum())
    paths = [[s.slots_S[:trunk]], [s.slots_S[trunk:][visible_S] for visible_S in s.visible_QS[:, trunk:]]]
    pages = [[-(-len(path) // PAGE) for path in level] for level in paths]
    slots_PS = torch.cat([F.pad(path, (0, -len(path) % PAGE), value=NULL_SLOT) for level in paths for path in level])
    slots_PS = slots_PS.view(-1, PAGE)

    def ints(values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=device)

    wrapper = MultiLevelCascadeAttentionWrapper(2, torch.empty(WORKSPACE, dtype=torch.uint8, device=device), "NHD")
    wrapper.plan(
        [ints([0, T]), ints(range(T + 1))],
        [ints([0, *accumulate(level)]) for level in pages],
        [ints(range(pages[0][0])), ints(range(pages[0][0], len(slots_PS)))],
        [ints([len(path) - PAGE * (count - 1) for path, count in zip(*level, strict=True)])
         for level in zip(paths, pages, strict=True)],
        H, G, D, PAGE, sm_scale=scale, q_data_type=q_THD.dtype, kv_data_type=q_THD.dtype,
    )  # fmt: skip

    def pack(k_GSD: Tensor, v_GSD: Tensor) -> tuple[Tensor, Tensor]:
        k_PSGD, v_PSGD = (x[:, slots_PS].permute(1, 2, 0, 3).contiguous() for x in (k_GSD, v_GSD))
        return k_PSGD, v_PSGD

    return Rival(pack, lambda k, v: wrapper.run(q_THD, (k, v)))


# --- a candidate ---


def load_candidate(path: str, operators: Sequence[str]) -> dict[str, Contender]:
    """The operators that a Python file defines. Raises UsageError if the file is absent, fails or defines none."""
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
