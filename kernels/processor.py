"""The processor of this machine, and the targets that C++ kernels can be built for."""

import platform
import sys
from dataclasses import dataclass
from functools import lru_cache
from itertools import takewhile
from pathlib import Path

CPUINFO = Path("/proc/cpuinfo")
# Lines of /proc/cpuinfo that identify the instructions of a processor. Its model is among them, because an old kernel
# does not list every instruction set of a new processor, and compilers ask the processor itself.
IDENTITY = {"vendor_id", "cpu family", "model", "flags", "Features", "isa", "uarch", "cpu"} | {
    f"CPU {part}" for part in ("implementer", "architecture", "variant", "part")
}


@dataclass(frozen=True)
class Target:
    """A set of instructions.

    Attributes:
        name: as the command line and the files have it.
        flags: of the compiler.
        machine: kind of processor, as `machine()` returns it; empty: any.
        needs: features of the processor, as Linux names them.
        meaning: one line for people.
    """

    name: str
    flags: tuple[str, ...]
    machine: str
    needs: frozenset[str]
    meaning: str

    def why_not(self) -> str | None:
        """Returns why this machine cannot run the target, or None if it can."""
        if self.machine and self.machine != machine():
            return f"it is for {self.machine}, and this machine is {machine()}"
        lacking = sorted(self.needs - features())
        return f"this processor lacks {', '.join(lacking)}" if lacking else None


_V2 = {"cx16", "lahf_lm", "pni", "popcnt", "sse4_1", "sse4_2", "ssse3"}
_V3 = _V2 | {"abm", "avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe", "xsave"}
_V4 = _V3 | {"avx512bw", "avx512cd", "avx512dq", "avx512f", "avx512vl"}
_BF16 = _V4 | {"avx512_bf16", "avx512_vnni"}
_TILES = _BF16 | {"amx_bf16", "amx_int8", "amx_tile"}
_DOTPROD = {"asimd", "asimddp", "asimdhp", "asimdrdm", "atomics", "crc32", "fphp"}
_I8MM = _DOTPROD | {"bf16", "i8mm"}


def machine(name: str | None = None) -> str:
    """The kind of processor by one name everywhere; of this machine, or of another by any of its names."""
    name = (platform.machine() if name is None else name).lower()
    return {"amd64": "x86_64", "arm64": "aarch64"}.get(name, name)


NATIVE = Target(
    "native",
    ("-mcpu=native" if machine() == "aarch64" else "-march=native",),  # Clang has no -march=native for ARM
    *("", frozenset(), "all that the processor of the building machine has"),
)
TARGETS = {  # the best first
    target.name: target
    for target in (
        NATIVE,
        Target(
            "x86-64-v4-amx",
            ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16", "-mamx-tile", "-mamx-bf16", "-mamx-int8"),
            *("x86_64", frozenset(_TILES)),
            "AVX-512 and AMX (Sapphire Rapids and later)",
        ),
        Target(
            *("x86-64-v4-bf16", ("-march=x86-64-v4", "-mavx512vnni", "-mavx512bf16"), "x86_64", frozenset(_BF16)),
            "AVX-512 with VNNI and BF16 (Zen 4 and later)",
        ),
        Target(
            *("x86-64-v4-vnni", ("-march=x86-64-v4", "-mavx512vnni"), "x86_64", frozenset(_V4 | {"avx512_vnni"})),
            "AVX-512 with VNNI (Cascade Lake, Ice Lake and later)",
        ),
        Target("x86-64-v4", ("-march=x86-64-v4",), "x86_64", frozenset(_V4), "AVX-512"),
        Target(
            *("x86-64-v3-vnni", ("-march=x86-64-v3", "-mavxvnni"), "x86_64", frozenset(_V3 | {"avx_vnni"})),
            "AVX2 and AVX-VNNI (Alder Lake, Lunar Lake and later)",
        ),
        Target("x86-64-v3", ("-march=x86-64-v3",), "x86_64", frozenset(_V3), "AVX2 and FMA"),
        Target(
            *("aarch64-i8mm", ("-march=armv8.2-a+dotprod+fp16+i8mm+bf16",), "aarch64", frozenset(_I8MM)),
            "ARMv8.2 with dot products, I8MM and BF16 (Neoverse V1 and N2, Cortex-A510 and later)",
        ),
        Target(
            *("aarch64-dotprod", ("-march=armv8.2-a+dotprod+fp16",), "aarch64", frozenset(_DOTPROD)),
            "ARMv8.2 with dot products (Neoverse N1, Cortex-A76, Raspberry Pi 5 and later)",
        ),
        Target("aarch64", ("-march=armv8-a",), "aarch64", frozenset(), "any 64-bit ARM, as in a Raspberry Pi 4"),
    )
}


@lru_cache(maxsize=1)
def identity() -> tuple[str, ...]:
    """Facts in which processors with different instructions differ, in a fixed order."""
    try:
        with CPUINFO.open(encoding="utf-8", errors="replace") as lines:
            first = takewhile(str.strip, lines)  # the lines of the first processor; Linux lists what all of them have
            said = [(key.strip(), value.split()) for key, _, value in (line.partition(":") for line in first)]
        found = [(key, " ".join(sorted(values))) for key, values in said if key in IDENTITY]
    except OSError:
        found = []
    if not found:
        found = [("processor", platform.processor()), ("features", " ".join(sorted(_features_of_torch())))]
    return (sys.platform, machine(), *(f"{key}: {value}" for key, value in sorted(found)))


@lru_cache(maxsize=1)
def features() -> frozenset[str]:
    """Features of this processor, as Linux names them."""
    listed = (line.partition(": ") for line in identity())
    found = {word for key, _, value in listed if key in ("flags", "Features") for word in value.split()}
    return frozenset(found or _features_of_torch())


def _features_of_torch() -> set[str]:
    """Features that torch reports, for operating systems without /proc/cpuinfo."""
    import torch  # here: nothing else needs it

    if machine() != "x86_64":
        return set()
    found: set[str] = set()
    for ask, features in (
        ("_is_avx2_supported", _V3),
        ("_is_avx512_supported", _V4),
        ("_is_avx512_bf16_supported", _BF16),
    ):
        if getattr(torch.cpu, ask, bool)():
            found |= features
    return found
