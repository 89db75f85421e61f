"""The dtype of a model, the reason for it, and the processor's fast paths: for the banner, `--stats` and embedding
programs."""

import platform
from dataclasses import dataclass, replace
from typing import Any

import torch

from engine.load.fastest import FormatChoice, fastest_dtype, pretended
from kernels import cpp, same_bits
from models.formats.floats import can_pack, has_kernels, has_products
from models.formats.linear import FORMATS


@dataclass(frozen=True)
class Precision:
    """The dtype of a model's weights and cache.

    Args:
        dtype: the dtype.
        reason: why it is not the checkpoint's own, or why it is slow; "" if there is nothing to say.
        slow: the processor has no products of this dtype, so that a step takes several times as long as in float32.
    """

    dtype: torch.dtype
    reason: str = ""
    slow: bool = False

    def __str__(self) -> str:
        return dtype_name(self.dtype) + (f" ({self.reason})" if self.reason else "")


@dataclass(frozen=True)
class Capabilities:
    """The dtype of a loaded model and the fast paths that it runs on.

    Args:
        precision: the dtype and its reason, "float32 (the checkpoint is bfloat16; ...)"; with ", int8 weights",
            ", int8 activations" and ", int8 cache" or ", fp8 cache".
        paths: the processor, its fast paths and those it lacks, "AVX2 processor: C++ kernels; not here: int8 weights".
        warning: a slow dtype that was chosen nevertheless, parts of the checkpoint that are not loaded; "" otherwise.
    """

    precision: str = ""
    paths: str = ""
    warning: str = ""

    @staticmethod
    def of(
        model: Any,
        precision: Precision,
        quant: str | FormatChoice,
        device: torch.device,
        impl: str,
        kv_dtype: str = "auto",
        graphs: bool = True,
        activations: str = "auto",
    ) -> "Capabilities":
        """Describe a model on a device.

        Args:
            model: the model, with a `stack` if all of its layers can run as one call.
            precision: the model's.
            quant: format of its matrices, a key of `FORMATS`, or how it was chosen.
            device: the model's.
            impl: implementation of the operators, see `kernels.tree_attention`.
            kv_dtype: dtype of its cache; "auto": the model's.
            graphs: on a GPU, whether small passes are CUDA graphs.
            activations: see `LoadOptions`.
        """
        name = dtype_name(precision.dtype)
        warning = f"{name} is slow: {precision.reason}" if precision.slow else ""
        chosen = quant if isinstance(quant, FormatChoice) else FormatChoice(quant)
        weights = "" if chosen.name == "none" else f", {chosen.name} weights"
        if str(chosen):
            weights = f"{weights or ', weights as they are'} ({chosen})"
        if activations != "auto":
            weights += f", {activations} activations"
        if kv_dtype != "auto":
            weights += f", {kv_dtype} cache"
        if device.type != "cpu":
            where, paths = "GPU", {"Triton kernels": True} | ({"CUDA graphs": True} if graphs else {})
            paths |= {"the same bits in any batch": True} if same_bits.asked() else {}
        else:
            which = cpp.built_ahead() if impl == "cpp" else cpp.why_not()
            where = f"{processor()} processor"
            paths = {
                f"C++ kernels ({which})" if which else "C++ kernels": impl == "cpp",
                "packed weights": has_kernels(precision.dtype, device) or can_pack(precision.dtype, device),
                "all layers in one call": getattr(model, "stack", None) is not None,
            }
        paths |= weight_formats(device)
        here, absent = ([path for path in paths if paths[path] is there] for there in (True, False))
        parts = [", ".join(here) or "PyTorch only"] + ([f"not here: {', '.join(absent)}"] if absent else [])
        return Capabilities(f"{precision}{weights}", f"{where}: {'; '.join(parts)}", warning)

    def noting(self, *notes: str) -> "Capabilities":
        """The same capabilities with further lines in the warning; "" adds none."""
        return replace(self, warning="\n".join(filter(None, [self.warning, *notes])))


def weight_formats(device: torch.device) -> dict[str, bool]:
    """Whether the device runs quantised weights, by the formats' names: {"int8 and int4 weights": True}."""
    kinds = {name.partition("-")[0]: FORMATS[name].why_not(device) is None for name in FORMATS if name != "none"}
    names = {here: " and ".join(kind for kind in kinds if kinds[kind] is here) for here in (True, False)}
    return {f"{which} weights": here for here, which in names.items() if which}


def pick_precision(own: torch.dtype, device: torch.device, float32_bytes: int, memory: int) -> Precision:
    """The dtype that "auto" stands for: the checkpoint's own unless float32 is faster and fits.

    If the C++ kernels have dot products of the checkpoint's dtype, they can also multiply its weights by float32 rows:
    the faster way is found by measuring both.

    Args:
        own: the checkpoint's dtype.
        device: where the model will run.
        float32_bytes: size of the weights in float32.
        memory: bytes of the machine's memory; not used for a GPU, which has products of half precision.
    """
    name, full = dtype_name(own), torch.float32
    if own == torch.float64:
        return Precision(full, "the checkpoint is float64")
    pretence = pretended(device) if own == torch.bfloat16 else None
    if pretence:
        return Precision(own)
    if pretence is None and has_products(own, device):
        chosen = fastest_dtype(own, device)
        return Precision(getattr(torch, chosen.name), str(chosen))
    reason = f"this {'GPU' if device.type == 'cuda' else 'processor'} has no {name} products"
    if has_kernels(own, device):
        return Precision(full, f"{reason}; the {name} weights stay as they are")
    if device.type == "cpu" and float32_bytes > 0.8 * memory:
        sizes = f"{float32_bytes / 2**30:.1f} of {memory / 2**30:.1f} GiB"
        return Precision(own, f"{reason}, but float32 weights would take {sizes} of memory", slow=True)
    return Precision(full, f"the checkpoint is {name}; {reason}")


def explicit_precision(dtype: torch.dtype, device: torch.device) -> Precision:
    """A dtype that the caller asked for."""
    if has_products(dtype, device) or has_kernels(dtype, device):
        return Precision(dtype)
    reason = f"this processor has no {dtype_name(dtype)} products; float32 is several times as fast"
    return Precision(dtype, reason, slow=True)


def processor() -> str:
    """The vector instructions that PyTorch uses, such as "AVX2"; the machine's name if it reports none."""
    level = torch.backends.cpu.get_cpu_capability()
    return platform.machine() if level in ("DEFAULT", "NO AVX") else level


def dtype_name(dtype: torch.dtype) -> str:
    """torch.float32 -> "float32"."""
    return str(dtype).removeprefix("torch.")
