"""A CUDA device that is pretended: its tensors lie in the host's memory, Triton's interpreter runs its kernels.

It shows what code that only a GPU runs does in Python: which tensors lie where, what waits for the device, what is
captured in a CUDA graph. A graph repeats what was captured, in the same memory, and all that it does not write anew is
garbage, as are new tensors and what a copy to the host has not brought yet. It refuses what CUDA refuses: operators on
tensors of two devices, and within a capture waits and copies from the host.
"""

import contextlib
import functools
import importlib
import inspect
import itertools
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_flatten, tree_map

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
FRESH = (aten.empty.memory_format, aten.empty_strided.default, aten.new_empty.default, aten.new_empty_strided.default)
FRESH += (aten.empty_like.default,)
WAITING = {aten._local_scalar_dense.default, aten.equal.default, aten.nonzero.default, aten._unique2.default}
WAITING |= {
    aten.masked_select.default,
    aten.unique_dim.default,
    aten.is_nonzero.default,
    aten.unique_consecutive.default,
}
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default}
COPIES = {aten.copy_.default, aten._to_copy.default}


class OnCuda(torch.Tensor):
    """A tensor of the device; `there` has its numbers."""

    there: torch.Tensor

    @staticmethod
    def __new__(cls, there: torch.Tensor) -> "OnCuda":
        sizes = {"strides": there.stride(), "storage_offset": there.storage_offset(), "dtype": there.dtype}
        with torch.inference_mode(False):
            made = torch.Tensor._make_wrapper_subclass(cls, there.shape, device=CUDA, **sizes)  # type: ignore
        made.there = there
        return made

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return DEVICE.dispatch(func, args, kwargs or {})

    def data_ptr(self) -> int:
        return self.there.data_ptr()

    def untyped_storage(self) -> Any:
        return self.there.untyped_storage()

    def __getitem__(self, index):
        plain, chosen = _parted(index)
        x = OnCuda(self.there[plain])
        return aten.index.Tensor(x, chosen) if chosen else x

    def __setitem__(self, index, value):
        plain, chosen = _parted(index)
        x = OnCuda(self.there[plain])
        if not isinstance(value, torch.Tensor):
            value = torch.tensor(value, dtype=self.dtype)
        if chosen:
            aten.index_put_.default(x, chosen, value if value.dim() else value.to(CUDA))
        else:
            x.copy_(value)

    def tolist(self) -> Any:
        return self.cpu().tolist()

    item = tolist

    def __bool__(self) -> bool:
        return bool(self.tolist())

    def __int__(self) -> int:
        return int(self.tolist())

    def __float__(self) -> float:
        return float(self.tolist())

    def nonzero(self) -> torch.Tensor:
        return aten.nonzero.default(self)

    def contiguous(self, memory_format=torch.contiguous_format) -> torch.Tensor:
        return self if self.is_contiguous() else self.clone(memory_format=memory_format)

    def is_pinned(self, device=None) -> bool:
        return False

    def __repr__(self, *, tensor_contents=None) -> str:
        return f"OnCuda({self.there!r})"


def _parted(index: Any) -> tuple[Any, list[torch.Tensor | None]]:
    """An index of views, and for each dimension after that a tensor of chosen places, or None."""
    index = index if isinstance(index, tuple) else (index,)
    is_plain = [x is None or x is Ellipsis or isinstance(x, int | slice) for x in index]
    if all(is_plain):
        return index, []
    assert not any(x is Ellipsis for x in index), index
    plain = tuple(x if ok else slice(None) for x, ok in zip(index, is_plain, strict=True))
    left = [(x, ok) for x, ok in zip(index, is_plain, strict=True) if not isinstance(x, int)]
    return plain, [None if ok else x if isinstance(x, torch.Tensor) else torch.tensor(x) for x, ok in left]


def spoil(x: torch.Tensor) -> None:
    """Fill memory with what nobody may read."""
    if x.dtype.is_floating_point:
        x.fill_(float("nan"))
    elif x.dtype != torch.bool:
        x.fill_(torch.iinfo(x.dtype).max - 5)


class Graph:
    """Stands in for `torch.cuda.CUDAGraph`."""

    def __init__(self, keep_graph: bool = False):
        self.work: list[Callable[[], None]] = []
        self.owned: list[torch.Tensor] = []

    def capture_begin(self, pool=None, capture_error_mode="global", check_input_liveness=False) -> None:
        assert DEVICE.capture is None
        pool = pool or (0, next(HANDLES))  # of its own
        DEVICE.capture = self
        DEVICE.pools.setdefault(pool, []).append(self)
        self.pool = pool

    def capture_end(self) -> None:
        DEVICE.capture = None
        for x in self.owned:
            spoil(x)

    def replay(self) -> None:
        DEVICE.replays += 1
        assert DEVICE.capture is None
        with _disable_current_modes():
            for graph in DEVICE.pools[self.pool]:
                for x in graph.owned:
                    spoil(x)
            for each in self.work:
                each()

    def reset(self) -> None:
        self.work = []


class Event:
    """Stands in for `torch.cuda.Event`."""

    def __init__(self, enable_timing=False, blocking=False, interprocess=False, external=False):
        self.timing, self.at = enable_timing, -1

    def record(self, stream=None) -> None:
        assert DEVICE.capture is None, "an event within a capture"
        DEVICE.clock += 1
        self.at = DEVICE.clock

    def synchronize(self) -> None:
        assert DEVICE.capture is None, "an event within a capture"
        DEVICE.arrive(self.at)

    def query(self) -> bool:
        return True

    def wait(self, stream=None) -> None:
        pass

    def elapsed_time(self, end: "Event") -> float:
        assert self.timing and end.timing, "events without times"
        assert 0 < self.at <= end.at <= DEVICE.arrived, "an event that is not recorded, or not reached"
        return 1.0 * (end.at - self.at)


class Stream:
    """Stands in for `torch.cuda.Stream`."""

    def __init__(self, device=None, priority=0, **_):
        self.device = CUDA
        self.cuda_stream = id(self)

    def synchronize(self) -> None:
        DEVICE.wait("a stream")

    def wait_stream(self, other) -> None:
        pass


class Device(TorchDispatchMode):
    """The device. Attributes count what it does."""

    def __init__(self):
        super().__init__()
        self.capture: Graph | None = None
        self.pools: dict[Any, list[Graph]] = {}
        self.clock = self.arrived = self.replays = self.waits = 0  # arrived: until when the host has waited
        self.flying: list[tuple[int, torch.Tensor, torch.Tensor | None]] = []  # copies: when, host memory, its numbers
        self.pinned: set[int] = set()
        self.debug = "default"
        self.stream = Stream()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return self.dispatch(func, args, kwargs or {})

    def wait(self, what: str) -> None:
        """The host waits for all that the device has to do."""
        if self.capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: the host waits for {what}")
        if self.debug == "warn":
            warnings.warn(f"called a synchronizing CUDA operation: {what}", stacklevel=3)
        self.waits += 1
        self.arrive(self.clock)

    def arrive(self, at: int) -> None:
        """Bring to the host what was copied until then."""
        self.arrived = max(self.arrived, at)
        for when, host, numbers in self.flying:
            if when <= at and numbers is not None:
                with _disable_current_modes():
                    host.copy_(numbers)
        self.flying = [each for each in self.flying if each[0] > at]

    def dispatch(self, func, args, kwargs):
        if torch._C._dispatch_has_kernel_for_dispatch_key(func.name(), "CompositeImplicitAutograd"):
            with self:  # in inference mode they come as they are
                if (made := func.decompose(*args, **kwargs)) is not NotImplemented:
                    return made
        with _disable_current_modes():
            return self._dispatch(func, args, kwargs)

    def _dispatch(self, func, args, kwargs):
        flat, _ = tree_flatten((args, kwargs))
        mine = [x for x in flat if isinstance(x, OnCuda)]
        others = [x for x in flat if isinstance(x, torch.Tensor) and not isinstance(x, OnCuda)]
        given = kwargs.get("device")
        target = None if given is None else torch.device(given).type
        there = {id(x.there): x for x in mine}
        pinned = kwargs.pop("pin_memory", None)
        if not mine and target != "cuda":
            self._check_host(func, args)
            made = func(*args, **kwargs)
            if pinned:
                self.pinned.add(made.untyped_storage().data_ptr())
            return made
        bare = tree_map(lambda x: x.there if isinstance(x, OnCuda) else x, (args, kwargs))
        kwargs = dict(bare[1])
        if given is not None:
            kwargs["device"] = CPU
        args = bare[0]
        if func in COPIES:
            return self._copy(func, args, kwargs, mine, others, target, there)
        if func not in INDEXING and any(x.dim() for x in others):
            self.refuse(f"Expected all tensors to be on the same device: {func}")
        if func in INDEXING and others and self.capture is not None:
            raise RuntimeError(f"operation not permitted when stream is capturing: {func} with an index of the host")
        if func in INDEXING and others:
            self.wait(f"{func} with an index of the host")
        if func in WAITING or (func in INDEXING and any(x.dtype == torch.bool for x in self._indices(args))):
            self.wait(str(func))
        if func is aten.lift_fresh.default:
            return next(iter(there.values()))
        made = self._run(func, args, kwargs)

        def wrapped(x):
            if not isinstance(x, torch.Tensor):
                return x
            return there[id(x)] if id(x) in there else OnCuda(x)

        return tree_map(wrapped, made)

    @staticmethod
    def _indices(args):
        return [x for x in (args[1] or []) if x is not None]

    @staticmethod
    def refuse(what: str):
        raise RuntimeError(what)

    def _check_host(self, func, args):
        """Memory of the host that a copy still reads, or has not written yet, is left alone."""
        for each, x in zip(func._schema.arguments, args, strict=False):
            if not isinstance(x, torch.Tensor):
                continue
            writes = each.alias_info is not None and each.alias_info.is_write
            first, last = x.data_ptr(), x.data_ptr() + x.nbytes
            for _, host, numbers in self.flying:
                touched = host.data_ptr() < last and first < host.data_ptr() + host.nbytes
                if touched and (writes or (numbers is not None and not _is_view(func))):
                    self.refuse(f"{func} {'writes' if writes else 'reads'} memory of a copy that is under way")

    def _copy(self, func, args, kwargs, mine, others, target, there):
        if func is aten.copy_.default:
            dst, src = args[0], args[1]
            to_host, from_host = id(dst) not in there, id(src) not in there
            quick = bool(args[2]) if len(args) > 2 else bool(kwargs.get("non_blocking"))
        else:
            to_host, from_host = target == "cpu", not mine
            quick = bool(kwargs.get("non_blocking"))
            src = args[0]
        kwargs = {k: v for k, v in kwargs.items() if k != "non_blocking"}
        if from_host and src.dim() == 0 and func is aten.copy_.default:
            from_host = False  # a number
        if from_host:
            is_pinned = src.untyped_storage().data_ptr() in self.pinned
            if self.capture is not None:
                raise RuntimeError("operation not permitted when stream is capturing: a copy from the host")
            if is_pinned and quick:
                self.clock += 1
                self.flying.append((self.clock, src, None))
            if not quick:
                self.wait("a copy from the host")
        if to_host:
            if func is aten.copy_.default and quick and dst.untyped_storage().data_ptr() in self.pinned:
                if self.capture is not None:
                    raise RuntimeError("a copy to the host within a capture")
                self.clock += 1
                self.flying.append((self.clock, dst, src.clone()))
                spoil(dst)
                return dst
            if quick:
                self.refuse("a copy to the host that nobody waits for")
            self.wait("a copy to the host")
            made = func(*args[:2], **kwargs)
            return made
        made = self._run(func, args[:2], kwargs)
        return there[id(made)] if id(made) in there else OnCuda(made)

    def _run(self, func, args, kwargs):
        schema = func._schema
        if self.capture is None or _is_view(func):
            made = func(*args, **kwargs)
            if func in FRESH:
                spoil(made)
            return made
        graph = self.capture
        written = [
            kwargs.get(a.name, args[i] if i < len(args) else None)
            for i, a in enumerate(schema.arguments)
            if a.alias_info is not None and a.alias_info.is_write
        ]
        if written:
            graph.work.append(lambda: func(*args, **kwargs))
            return written[0] if len(written) == 1 else tuple(written)
        made = func(*args, **kwargs)
        outs = [x for x in tree_flatten(made)[0] if isinstance(x, torch.Tensor)]
        if func in FRESH:
            for x in outs:
                x.zero_()
        graph.owned += outs
        if func not in FRESH:

            def again():
                for out, x in zip(outs, tree_flatten(func(*args, **kwargs))[0], strict=True):
                    out.copy_(x)

            graph.work.append(again)
        return made

    def launcher(self, kernel, grid):
        """Runs a kernel in the interpreter, or has a graph do it."""

        def launch(*args, **options):
            def bare(x):
                if isinstance(x, OnCuda):
                    return x.there
                if type(x).__name__ == "TensorDescriptor":
                    return type(x)(x.base.there, x.shape, x.strides, x.block_shape)
                if isinstance(x, torch.Tensor):
                    raise ValueError(f"Pointer argument cannot be accessed from Triton (cpu tensor?): {kernel.fn}")
                return x

            args = tuple(map(bare, args))

            def run():
                with _disable_current_modes():
                    kernel[grid](*args, **options)

            assert all(0 < n <= (2**31 - 1, 65_535, 65_535)[i] for i, n in enumerate(grid)), (kernel.fn, grid)
            if self.capture is not None:
                self.capture.work.append(run)
            else:
                run()

        return launch


class Numbered(TorchFunctionMode):
    """Does without what a build of torch without CUDA refuses to do: to look the device's number up, for one."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.Tensor.copy_ and any(isinstance(x, OnCuda) for x in args):
            return DEVICE.dispatch(aten.copy_.default, (*args, *kwargs.values()), {})
        if func is torch.Tensor.__invert__ and isinstance(args[0], OnCuda):
            return torch.bitwise_not(args[0])
        if func is torch.Tensor.cuda:
            return args[0].to(CUDA)
        if func is torch.tensor and _is_cuda(kwargs.get("device")):
            return torch.tensor(*args, **kwargs | {"device": CPU}).to(CUDA)
        args = [CUDA if _is_cuda(x) else x for x in args]
        return func(*args, **{name: CUDA if _is_cuda(x) else x for name, x in kwargs.items()})


def _is_cuda(x: Any) -> bool:
    return x == "cuda" if isinstance(x, str) else isinstance(x, torch.device) and x.type == "cuda"


def _is_view(func) -> bool:
    schema = func._schema
    return any(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


DEVICE, HANDLES = Device(), itertools.count()


@contextlib.contextmanager
def _on(stream) -> Iterator[None]:
    before, DEVICE.stream = DEVICE.stream, stream or DEVICE.stream
    try:
        yield
    finally:
        DEVICE.stream = before


def pretend(processors: int = 2, patch=setattr) -> Device:
    """Have torch find the device, and launches of Triton's kernels go there."""
    properties = SimpleNamespace(
        multi_processor_count=processors, shared_memory_per_block_optin=232_448, regs_per_multiprocessor=65_536,
        shared_memory_per_multiprocessor=233_472, max_threads_per_multi_processor=2048, major=9, minor=0,
        total_memory=80 << 30, name="H100",
    )  # fmt: skip
    DEVICE.pools.clear()
    stand_ins = {
        "_lazy_init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "set_device": lambda device: None,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "H100",
        "get_device_properties": lambda device=None: properties,
        "is_bf16_supported": lambda including_emulation=True: True,
        "mem_get_info": lambda device=None: (1 << 26, 80 << 30),
        "memory_reserved": lambda device=None: 0,
        "synchronize": lambda device=None: DEVICE.wait("the device"),
        "empty_cache": lambda: None,
        "current_stream": lambda device=None: DEVICE.stream,
        "graph_pool_handle": lambda: (0, next(HANDLES)),
        "set_sync_debug_mode": lambda debug_mode: setattr(DEVICE, "debug", debug_mode),
        "is_current_stream_capturing": lambda: DEVICE.capture is not None,
    }
    for name, stand_in in stand_ins.items():
        real = inspect.signature(getattr(torch.cuda, name)).parameters
        assert [*inspect.signature(stand_in).parameters] == [*real][: len(inspect.signature(stand_in).parameters)], name
        patch(torch.cuda, name, stand_in)
    for name, stand_in in {"Event": Event, "Stream": Stream, "CUDAGraph": Graph, "stream": _on}.items():
        patch(torch.cuda, name, stand_in)
    patch(torch._C, "_host_emptyCache", lambda: None)

    from kernels import gpu

    for file in Path(gpu.__file__).parent.glob("*/triton*.py"):  # those imported later would keep the stand-ins
        importlib.import_module(f"kernels.{file.parent.name}.{file.stem}")
    for module in [gpu, *(sys.modules[name] for name in [*sys.modules] if name.startswith("kernels."))]:
        if "check_device" in vars(module):
            patch(module, "check_device", _check_device)
    patch(gpu, "build_launcher", lambda: None)
    patch(gpu, "_launcher", DEVICE.launcher)
    return DEVICE


def _check_device(*tensors: torch.Tensor) -> None:
    """Refuse what `kernels.gpu.check_device` refuses on a GPU."""
    if any(not isinstance(x, OnCuda) for x in tensors):
        raise ValueError(f"impl 'triton': expected CUDA tensors, got {[x.device for x in tensors]}")


@contextlib.contextmanager
def pretending(monkeypatch: Any) -> Iterator[Device]:
    """Within it there is the device."""
    with pretend(patch=functools.partial(monkeypatch.setattr, raising=False)) as device, Numbered():
        yield device
