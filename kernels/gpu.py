"""Shared by the Triton kernels: whether they are interpreted, and the properties of the GPU."""

import contextlib
import ctypes
import functools
import importlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import knobs, runtime
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

MOST_COUNTERS = 1 << 16
FIRST_IN_GRAPHS = 12_030  # CUDA 12.3
MOST_THREADS = 16  # that compile
SECONDS_BETWEEN = 0.25  # of news
FUSED = {"enable_fp_fusion": True}
INTERPRETED = tl.constexpr(knobs.runtime.interpret)  # as it stands when kernels are defined


def mend(interpreter: Any) -> None:
    """Mend two faults of Triton's interpreter. Before 3.7 it makes a number of an array, which NumPy 2.4 refuses. In
    3.9 masks must be booleans, but it spreads the result of comparing two numbers as integers."""
    patch, full = interpreter._patch_lang_tensor, interpreter.np.full

    def patched(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    def spread(builder: Any, kind: Any, x: Any) -> Any:
        return interpreter.TensorHandle(full(kind.shape, x.data, x.data.dtype), x.dtype.scalar)

    interpreter._patch_lang_tensor, interpreter.InterpreterBuilder.create_splat = patched, spread


if INTERPRETED.value:
    mend(importlib.import_module("triton.runtime.interpreter"))


def build_launcher() -> None:
    """Make Triton build the module that launches kernels, with a C compiler; later starts find it on disk.

    Raises whatever Triton raises if it cannot.
    """
    runtime.driver.active.get_current_target()


_launcher: Callable[..., Any] | None = None  # instead of a launch: gets the kernel and its grid


def launch(kernel: Any, *grid: int) -> Callable[..., Any]:
    """A function that launches a kernel with a grid of programs; within `compiling` it compiles the kernel instead."""
    run = kernel[grid] if _launcher is None else _launcher(kernel, grid)
    return functools.partial(run, **options(kernel))


def options(kernel: Any) -> dict[str, bool]:
    """Options of all launches of a kernel.

    A product and a sum are fused into one operation: Triton 3.9 warns that this will no longer be its default. Kernels
    that wait with `after_the_last` may begin before the previous kernel has ended (programmatic dependent launch, CUDA
    C++ Programming Guide) if `COPPICE_PDL=on` is set and GPU and driver support it: not measured yet, off by default.
    """
    return FUSED | ({"EARLY": True, "launch_pdl": True} if early_launches() and "EARLY" in kernel.arg_names else {})


@functools.cache
def early_launches() -> bool:
    """Whether kernels are launched early: from sm_90 on; CUDA graphs record such launches from CUDA 12.3 on."""
    if INTERPRETED or os.environ.get("COPPICE_PDL") != "on":
        return False
    return torch.cuda.get_device_capability() >= (9, 0) and driver_version() >= FIRST_IN_GRAPHS


def driver_version(library: str = "libcuda.so.1") -> int:
    """The CUDA version that the driver supports, as 1000 major + 10 minor: asked of the driver itself, because torch
    2.11 and later do not pass it on.

    Raises OSError without a driver.
    """
    version = ctypes.c_int()
    if code := ctypes.CDLL(library).cuDriverGetVersion(ctypes.byref(version)):
        raise OSError(f"{library}: cuDriverGetVersion failed with error {code}")
    return version.value


@triton.jit
def after_the_last(EARLY: tl.constexpr):
    """Wait for the end of the previous kernel, if this one may have begun earlier, and let the next one begin. It must
    come first: everything after it reads what the previous kernel wrote, or writes what it read."""
    if EARLY:
        gdc_wait()
        gdc_launch_dependents()


@contextlib.contextmanager
def launching_by(launcher: Callable[..., Any]) -> Iterator[None]:
    """Context in which `launcher(kernel, grid)` returns the function that is called with a launch's arguments."""
    global _launcher
    before, _launcher = _launcher, launcher
    try:
        yield
    finally:
        _launcher = before


@contextlib.contextmanager
def compiling(tell: Callable[[int, int], None]) -> Iterator[None]:
    """Context in which kernels are compiled, in threads, instead of launched; at its end all are compiled.

    A kernel that cannot be compiled raises its error when it is launched. Other threads must not launch kernels
    meanwhile.

    Args:
        tell: called a few times a second with the number of compiled kernels, and of all kernels.
    """

    def warm(kernel: Any, grid: tuple[int, ...]) -> Callable[..., Any]:
        return functools.partial(kernel.warmup, grid=grid)

    with _Threads() as threads, triton.AsyncCompileMode(threads, ignore_errors=True):  # type: ignore[arg-type]
        with launching_by(warm):
            yield
        while wait(threads.made, timeout=SECONDS_BETWEEN).not_done:
            tell(sum(future.done() for future in threads.made), len(threads.made))


class _Threads(ThreadPoolExecutor):
    """Threads that compile: Triton's compiler and ptxas release the GIL most of the time."""

    def __init__(self):
        super().__init__(min(MOST_THREADS, len(os.sched_getaffinity(0))))
        self.made: list[Future] = []

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future:  # pyright: ignore
        self.made.append(future := super().submit(self._built, fn, *args, **kwargs))
        return future

    @staticmethod
    def _built(fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """A compiled kernel. Triton before 3.7 also has a C compiler build a launcher for each, which it keeps."""
        kernel = fn(*args, **kwargs)
        with contextlib.suppress(Exception):  # it will be raised again by the first launch
            runtime.driver.active.launcher_cls(kernel.src, kernel.metadata)  # pyright: ignore
        return kernel


def ready(kernel: Any) -> Any:
    """Returns the compiled kernel of what `kernel.warmup` has returned; None as long as a thread compiles it.

    Triton before 3.7 does not pass on what is asked of the thread's result; since 3.9 a result that was fetched has no
    future any more. Raises what the compiler raised.
    """
    if not isinstance(kernel, triton.FutureKernel):
        return kernel
    return kernel.result() if kernel.future is None or kernel.future.done() else None


def check_device(*tensors: Tensor) -> None:
    """Raises ValueError for tensors that kernels cannot reach."""
    kinds = {x.device.type for x in tensors}
    if kinds != {"cpu" if INTERPRETED else "cuda"}:
        wanted = "CPU tensors (TRITON_INTERPRET is set)" if INTERPRETED else "CUDA tensors"
        raise ValueError(f"impl 'triton': expected {wanted}, got {', '.join(sorted(kinds))}")


@dataclass(frozen=True)
class Properties:
    """The properties of a GPU from which kernels choose their sizes.

    Args:
        processors: streaming multiprocessors.
        roomy: whether they have the shared memory of a data-centre card.
        registers, shared, threads: of a multiprocessor; shared memory in bytes.
        bulk: whether a block of a tensor can be copied to shared memory at once (from sm_90 on), if there is room.
    """

    processors: int
    roomy: bool
    registers: int = 65_536
    shared: int = 102_400
    threads: int = 1_536
    bulk: bool = False

    def programs(self, registers: int, shared: int, warps: int) -> int:
        """How many programs a multiprocessor runs at once: registers go to warps by 256, and a program has 1 KiB of
        shared memory besides its own (CUDA C++ Programming Guide, compute capabilities).

        Args:
            registers: of a thread.
            shared: bytes of a program.
            warps: of a program.
        """
        by_registers = self.registers // (-(-registers * 32 // 256) * 256 * warps)
        return max(1, min(by_registers, self.shared // (shared + 1024), self.threads // (32 * warps)))


@functools.cache
def properties(device: torch.device) -> Properties:
    """The properties of the device; the interpreter gets a few multiprocessors, so that it meets splits as well."""
    if device.type == "cpu":
        return Properties(2, False, bulk=True)
    gpu = torch.cuda.get_device_properties(device)
    roomy = gpu.shared_memory_per_block_optin >= 160_000
    return Properties(
        gpu.multi_processor_count,
        roomy,
        gpu.regs_per_multiprocessor,
        gpu.shared_memory_per_multiprocessor,
        gpu.max_threads_per_multi_processor,
        roomy and gpu.major >= 9,
    )


def raw(cache: Tensor) -> Tensor:
    """A KV cache as kernels take it: FP8 as bytes, since Triton has no such type before sm_89."""
    return cache.view(torch.uint8) if cache.dtype == torch.float8_e4m3fn else cache


@triton.jit
def dot(a, b):
    """a b in float32. Of float32 itself both are sums of two TF32 numbers, 22 bits, and only the product of the smaller
    parts is left out (tf32x3): matrix units take these, and the registers of ordinary products would be spilled. The
    interpreter does so by hand, and multiplies bfloat16 wrongly unless it is float32."""
    if INTERPRETED:
        if a.dtype == tl.float32:
            high_a, high_b = _tf32(a), _tf32(b)
            low_a, low_b = _tf32(_rest(a, high_a)), _tf32(_rest(b, high_b))
            return tl.dot(high_a, high_b) + (tl.dot(low_a, high_b) + tl.dot(high_a, low_b))
        return tl.dot(a.to(tl.float32), b.to(tl.float32))
    return tl.dot(a, b, input_precision="tf32x3")


@triton.jit
def _tf32(x):
    """The nearest number of 11 bits, for the interpreter; what is not finite stays."""
    bits = x.to(tl.int32, bitcast=True)
    nearest = ((bits + 0x1000) & -0x2000).to(tl.float32, bitcast=True)
    return tl.where((bits & 0x7F800000) == 0x7F800000, x, nearest)


@triton.jit
def _rest(x, high):
    """The part of x that TF32 leaves over; 0 where x is not finite."""
    finite = (x.to(tl.int32, bitcast=True) & 0x7F800000) != 0x7F800000
    return tl.where(finite, tl.where(finite, x, 0.0) - tl.where(finite, high, 0.0), 0.0)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """x in a dtype, rounded to nearest. The interpreter would truncate to bfloat16."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        nearest = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
        x = tl.where(x == x, nearest, x)
    return x.to(dtype)


@triton.jit
def e4m3(byte):
    """e4m3 as float32, by way of float16, whose exponents begin 8 lower: processors before sm_89 have no conversion."""
    bits = byte.to(tl.int32)
    half = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.int16).to(tl.float16, bitcast=True)
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


PAIRS = """{
            .reg .b32 a, b, s, t;
            prmt.b32 a, $2, 0, 0x4140;
            prmt.b32 b, $2, 0, 0x4342;
            shl.b32 t, a, %(shift)s;
            and.b32 s, a, 0x00800080;
            mad.lo.u32 a, s, %(sign)s, t;
            shl.b32 t, b, %(shift)s;
            and.b32 s, b, 0x00800080;
            mad.lo.u32 b, s, %(sign)s, t;
            mov.b32 s, %(bias)s;
            mov.b32 t, 0x80008000;
            fma.rn.%(dtype)s $0, a, s, t;
            fma.rn.%(dtype)s $1, b, s, t;
            }"""
BFLOAT16_OF_E4M3: Any = tl.constexpr(PAIRS % {"shift": "4", "sign": "0xf0", "bias": "0x7b807b80", "dtype": "bf16x2"})
FLOAT16_OF_E4M3: Any = tl.constexpr(PAIRS % {"shift": "7", "sign": "0x80", "bias": "0x5c005c00", "dtype": "f16x2"})


@triton.jit
def finite_e4m3(byte, dtype: tl.constexpr):
    """Convert e4m3, none of it NaN, to a dtype; nothing is lost.

    Bytes become bfloat16 or float16 in pairs. A shift aligns the exponents, a product moves the sign up, and another
    product makes up for the different biases of the exponents.
    """
    if INTERPRETED or dtype == tl.float32:
        x = e4m3(byte).to(dtype)
    elif dtype == tl.bfloat16:
        x = tl.inline_asm_elementwise(BFLOAT16_OF_E4M3, "=r,=r,r", [byte], tl.bfloat16, is_pure=True, pack=4)
    else:
        x = tl.inline_asm_elementwise(FLOAT16_OF_E4M3, "=r,=r,r", [byte], tl.float16, is_pure=True, pack=4)
    return x


@triton.jit
def tanh(x):
    """The hyperbolic tangent, by a polynomial below 1, where the error of an exponential would show: a GPU's is off by
    two units in the last place. Its quotient is as inexact, so it is only what lacks to 1."""
    square = x * x
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    far = 1 - 2 * e / (1 + e)
    y = 9.957981592e-04 * square - 6.063485566e-03
    y = y * square + 2.012737144e-02
    y = y * square - 5.337026604e-02
    y = y * square + 1.332317794e-01
    y = y * square - 3.333270180e-01
    return tl.where(square < 1, x + x * square * y, tl.where(x < 0, -far, far))


@triton.jit
def inverse_root(x):
    """1 / sqrt(x), both steps rounded to nearest: by a GPU's fast ones, off by a few units in the last place, all
    elements of a row would be wrong alike."""
    return tl.div_rn(1.0, tl.sqrt_rn(x))


@functools.cache
def counters(device: torch.device) -> Tensor:
    """Zeros for `last_of`: kernels of a device run one after the other, and leave them as they were."""
    return torch.zeros(MOST_COUNTERS, dtype=torch.int32, device=device)


@triton.jit
def last_of(count_ptr, programs):
    """Whether this is the last of so many programs that count by one number; the number is 0 again then.

    It sees what the others stored before, if it reads past the first level of cache (cache_modifier=".cg"). Barriers
    order the stores and loads of all threads by the one that counts, as in CUDA's sample threadFenceReduction.
    """
    tl.debug_barrier()
    last = tl.atomic_add(count_ptr, 1, sem="acq_rel", scope="gpu") == programs - 1
    if last:
        tl.store(count_ptr, 0)
    tl.debug_barrier()
    return last
