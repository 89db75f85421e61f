"""A device that is not there: tensors whose numbers lie on the CPU, and which refuse to meet a CPU's.

Every copy to the CPU counts as a wait, which it is on a GPU, as do operations whose result has a size that only the
device knows. `torch.device("meta")` stands for the device, as it takes part in dispatch wherever torch was built.
"""

from collections import Counter
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

DEVICE = torch.device("meta")
aten = torch.ops.aten
WAITS = (aten.nonzero.default, aten.masked_select.default, aten._unique2.default, aten._local_scalar_dense.default)
INDEXED = (aten.index.Tensor, aten.index_put_.default, aten.index_put.default, aten._index_put_impl_.default)


class OnDevice(Tensor):
    """A tensor on the device."""

    inner: Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor):
        options = {"strides": inner.stride(), "storage_offset": inner.storage_offset(), "dtype": inner.dtype}
        made = torch.Tensor._make_wrapper_subclass(cls, inner.shape, device=DEVICE, **options)  # type: ignore[attr-defined]
        made.inner = inner
        return made

    def __getitem__(self, key):
        keys = key if isinstance(key, tuple) else (key,)
        if any(isinstance(k, list) for k in keys):
            raise RuntimeError("indexed by a list, which is copied to a GPU while the host waits")
        return torch._C.TensorBase.__getitem__(self, key)

    def tolist(self):
        Device.waits["tolist"] += 1
        return self.inner.tolist()

    def __int__(self):
        return int(self.item())

    def __float__(self):
        return float(self.item())

    def item(self):
        Device.waits["item"] += 1
        return self.inner.item()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


class Device(TorchDispatchMode):
    """Within it the device exists.

    Attributes:
        waits: by cause.
    """

    waits: ClassVar[Counter] = Counter()

    def __enter__(self):
        Device.waits.clear()
        return super().__enter__()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return dispatch(func, args, kwargs or {})


def bare(x: Any) -> Any:
    return x.inner if isinstance(x, OnDevice) else x


def there(x: Any) -> Any:
    return OnDevice(x) if isinstance(x, Tensor) and not isinstance(x, OnDevice) else x


def converted(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """`Tensor.to`."""
    names = [argument.name for argument in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    x, other = given.pop("self"), given.pop("other", None)
    device, dtype = (getattr(x if other is None else other, name) for name in ("device", "dtype"))
    device, dtype = torch.device(given.get("device") or device), given.get("dtype") or dtype
    if device.type == x.device.type and dtype == x.dtype and not given.get("copy"):
        return x
    return dispatch(aten._to_copy.default, (x,), {"device": device, "dtype": dtype})


def dispatch(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """An operation, where its arguments are."""
    if func.name().startswith("aten::to."):  # in inference mode it comes undivided
        return converted(func, args, kwargs)
    leaves = tree_leaves((args, kwargs))
    ours, asked = any(isinstance(x, OnDevice) for x in leaves), kwargs.pop("device", None)
    kwargs.pop("pin_memory", None)
    if func is aten._to_copy.default:
        kwargs.pop("non_blocking", None)
        out = func(bare(args[0]), **kwargs)
        target = torch.device(asked) if asked is not None else args[0].device
        if ours and target.type == "cpu":
            Device.waits["copy"] += 1
        return out if target.type == "cpu" else OnDevice(out)
    if not ours:
        out = func(*args, **kwargs)
        return tree_map(there, out) if asked is not None and torch.device(asked).type == DEVICE.type else out
    if func in WAITS:
        Device.waits[func.name()] += 1
    if func in INDEXED and any(isinstance(x, Tensor) and x.dtype == torch.bool for x in tree_leaves(args[1])):
        Device.waits["index by truth"] += 1
    strangers = [x for x in leaves if isinstance(x, Tensor) and not isinstance(x, OnDevice) and x.dim()]
    if strangers:
        raise RuntimeError(f"{func.name()}: one tensor on the device, another on the CPU")
    out = func(*tree_map(bare, args), **tree_map(bare, kwargs))
    return args[0] if func._schema.is_mutable else tree_map(there, out)
