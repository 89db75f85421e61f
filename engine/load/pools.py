"""The contexts of models, the pools that a memory budget allows, and whether they can hold a request."""

import errno
import math
import os
import re
import resource
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import torch

from engine.cache.pool import PagePool
from engine.contract import Search
from engine.contract.checks import rows_of, slots_of
from engine.errors import KVMemoryError, UsageError
from engine.load.distributed import least
from engine.load.sizes import cgroup_limits, mapped_files, memory_of_process, size_text
from models.shape import ModelShape
from models.shard import Shard

ROWS, STATES = 4096, 256  # most rows and states of recurrent layers in an automatic pool
STATES_LEAST = 3  # a trunk's state, the previous one while a pass runs, and one of a branch
PAGE_SIZE = {"cpu": 1, "cuda": 16}  # tokens; single ones waste nothing, larger ones suit a GPU's memory
ROWS_PART = 8  # with `--memory`, 1 / ROWS_PART of what is left is for more rows of log-probabilities
MAX_TOKENS = 1 << 18  # automatic pools stop here; --kv-memory may ask for more


def in_context(model: Any, context: int | None, name: str) -> ModelShape:
    """The shape of a model with a context of `context` tokens; None: its own. Raises UsageError."""
    shape = model.shape
    if context is None:
        return shape
    if (selected := model.config.selected) and context > selected:
        raise UsageError(
            f"context: texts of more than {selected} tokens need this model's indexer, which is not supported, "
            f"got {context}",
            where=name,
        )
    if getattr(model, "positions_PE", None) is not None and context > shape.max_positions:
        raise UsageError(
            f"context: this model has learned its {shape.max_positions} positions and has no others, got {context}",
            where=name,
            remedy="only models that rotate positions can exceed their context",
        )
    return replace(shape, max_positions=context)


def make_pools(
    models: Sequence[tuple[ModelShape, torch.dtype]],
    device: torch.device,
    kv_memory: int | None,
    shard: Shard | None = None,
) -> list[PagePool]:
    """Make a pool for each model; all hold the same number of tokens. Processes that share the models get equal pools.

    Args:
        models: the shape of each model, and the dtype of its keys and values.
        kv_memory: bytes of all pools together; None: up to half of the free memory.

    Raises:
        KVMemoryError: the bytes do not hold a page for each model, or the machine does not have them.
    """
    size, shard = PAGE_SIZE[device.type], shard or Shard()
    page_bytes = size * sum(shape.kv_bytes_per_token(dtype) for shape, dtype in models)
    shares = shares_of([shape for shape, _ in models])
    if kv_memory is not None:
        pages, stored = kv_memory // shares // page_bytes, kv_memory // shares
        if pages < 1:
            raise KVMemoryError(
                f"--kv-memory {size_text(kv_memory)} is less than a page of the cache ({size_text(page_bytes)})",
                remedy=f"give at least {size_text(page_bytes)}",
            )
    else:
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory() // shard.local
        stored = free // 2 // shares
        pages = max(1, min(stored // page_bytes, MAX_TOKENS // size))
    stores = stores_of([shape for shape, _ in models], stored, bounded=kv_memory is None)
    pages = least(shard, pages)
    try:
        pools = [PagePool(shape, pages, size, dtype, device, **stores) for shape, dtype in models]
    except (RuntimeError, MemoryError, OSError, OverflowError) as error:
        raise KVMemoryError(
            f"the machine cannot give {size_text(pages * page_bytes)} to the KV cache", remedy="lower --kv-memory"
        ) from error
    for pool in pools:
        pool.budget_page_bytes = shares * page_bytes
    return pools


def shares_of(shapes: Sequence[ModelShape]) -> int:
    """The number of equal parts of a cache: one for keys and values, two more for recurrent rows and states."""
    return 3 if any(shape.delta is not None for shape in shapes) else 1


def least_stores(shapes: Sequence[ModelShape]) -> int:
    """Bytes of the smallest cache that holds the rows and states of a sequence; 0 without recurrent layers."""
    row, state = _store_bytes(shapes)
    return shares_of(shapes) * max(_least_rows(shapes) * row, STATES_LEAST * state) if state else 0


def _store_bytes(shapes: Sequence[ModelShape]) -> tuple[int, int]:
    """Bytes of a row and of a state, all models together."""
    return sum(shape.row_bytes for shape in shapes), sum(shape.state_bytes for shape in shapes)


def _least_rows(shapes: Sequence[ModelShape]) -> int:
    return 2 * max(shape.delta.reach for shape in shapes if shape.delta is not None)


def stores_of(shapes: Sequence[ModelShape], memory: int, bounded: bool) -> dict[str, int]:
    """How many rows and states each pool of some models has, by the arguments of `PagePool`.

    Args:
        memory: bytes of all rows together, and of all states.
        bounded: return no more than an automatic pool has.

    Raises:
        KVMemoryError: a sequence has no room.
    """
    row, state = _store_bytes(shapes)
    if not state:
        return {}
    rows, states, least = memory // row, memory // state, _least_rows(shapes)
    if rows < least or states < STATES_LEAST:
        raise KVMemoryError(
            "the memory of the KV cache does not hold the states of the recurrent layers for one sequence",
            where=f"a third is for {least} rows of {size_text(row)}, a third for {STATES_LEAST} states of "
            f"{size_text(state)}",
            remedy=f"give --kv-memory at least {size_text(least_stores(shapes), math.ceil)}",
        )
    return {"rows": min(rows, ROWS), "states": min(states, STATES)} if bounded else {"rows": rows, "states": states}


def total_memory() -> int:
    """Bytes of the machine's memory; 8 GiB if the system does not report it."""
    return _pages("SC_PHYS_PAGES") or 8 << 30


def free_memory(root: Path = Path("/")) -> int:
    """Bytes that this process can still take; half of all memory if the system does not report it, as on macOS.

    Copies of files that the system would give up are free, except matrices of this process, which it would read again.
    The limits of control groups and of the address space count.

    Args:
        root: the root of the file system.
    """
    space, resident = memory_of_process()
    limits = (limit - resident for limit in cgroup_limits(root))
    free = min([_available(root) or _pages("SC_AVPHYS_PAGES") or total_memory() // 2, *limits])
    free = max(free - mapped_files(root), free // 4)  # matrices that do not fit are read again in any case
    if (limit := resource.getrlimit(resource.RLIMIT_AS)[0]) != resource.RLIM_INFINITY:
        free = min(free, limit - space)
    return max(0, free)


def _available(root: Path) -> int:
    """Bytes that Linux can give to programs without swapping; 0 if it does not say."""
    try:
        found = re.search(r"^MemAvailable:\s+(\d{1,15}) kB$", (root / "proc/meminfo").read_text("ascii"), re.MULTILINE)
    except (OSError, ValueError):
        return 0
    return int(found[1]) * 1024 if found else 0


def _pages(name: str) -> int:
    """Bytes of the number of pages that the system reports under a name; 0 if it reports none."""
    try:
        return max(0, os.sysconf(name)) * max(0, os.sysconf("SC_PAGE_SIZE"))
    except (ValueError, OSError, AttributeError):
        return 0


def check_memory(pool: PagePool, search: Search, prompt: int, new: int, share: float = 1.0) -> None:
    """Check, before anything is evaluated, that the pool holds the least number of slots that a search needs.

    Args:
        pool: the target model's.
        search: its `slots` returns the least and the most that it may need.
        prompt, new: numbers of tokens.
        share: the part of the pool that the search may have.

    Raises:
        KVMemoryError: it does not; the error has the numbers, and the largest limits of this search that would fit.
        SearchError: `slots` failed.
    """
    room, unit = int(share * pool.pages) * pool.page_size, pool.bytes_per_token
    least, most = slots_of(search, prompt, new)
    if least <= room:
        return
    pages = -(-least // pool.page_size) + (least > prompt)  # trunk and branches may each leave a page half empty
    remedies = [f"give {pool.flag} at least {_budget(pool, pages, share)}"]
    if most > least:
        pages = math.ceil((most + 2 * (pool.page_size - 1)) / pool.page_size)
        remedies[0] += f" (it may need {_budget(pool, pages, share)})"
    sure = _most_beams(search, prompt, new, 1, room - 2 * (pool.page_size - 1))
    perhaps = _most_beams(search, prompt, new, 0, room - (pool.page_size - 1))
    if sure:
        remedy = f"--beams at most {sure}, the largest beam count that is sure to fit"
        remedies.append(remedy + (f" ({perhaps} fit if they differ only at the end)" if perhaps > sure else ""))
    elif perhaps:
        remedies.append(f"--beams at most {perhaps}, the largest beam count that fits, if they differ only at the end")
    elif fewer := bisect_right(range(1, new), room, key=lambda n: slots_of(search, prompt, n)[0]):
        remedies.append(f"--max-new-tokens at most {fewer}")
    elif prompt >= room:
        remedies.append("shorten the prompt")
    elif hasattr(search, "beams"):
        remedies.append("fewer --max-new-tokens: no beam count fits")
    branches = least - (prompt + new - 1)
    formula = f"(prompt {prompt} + new tokens {new} - 1" + (f" + branches {branches})" if branches > 0 else ")")
    holder = "the KV cache holds" if share == 1 else "of the KV cache, one client may have"
    raise KVMemoryError(
        f"{holder} {room} tokens ({size_text(room * unit)}), {type(search).__name__} needs at least {least}",
        where=f"{formula if branches >= 0 else f'{least} slots'} x {unit} bytes per token = {size_text(least * unit)}",
        remedy=", or ".join(remedies),
    )


def check_rows(most: int | None, search: Search) -> None:
    """Check that a pass has room for the rows that a search requests at once.

    Args:
        most: rows for which `--memory` leaves room; None: no limit.

    Raises:
        UsageError: it has not.
        SearchError: `most_rows` failed.
    """
    if most is not None and (rows := rows_of(search)) > most:
        raise UsageError(
            f"the search requests {rows} rows of log-probabilities at once, --memory leaves room for {most}",
            remedy="give a smaller search, or load the model with more --memory, or for such a search",
        )


def _budget(pool: PagePool, pages: int, share: float) -> str:
    """The `kv_memory`, or the `memory` if that left the pool its bytes, of which a share holds some pages."""
    wanted = math.ceil(pages / share)
    if pool.limit is None:
        return size_text(wanted * pool.budget_page_bytes, math.ceil)
    missing = (wanted - pool.pages) * pool.limit_page_bytes
    return size_text(pool.limit + math.ceil(missing * ROWS_PART / (ROWS_PART - 1)), math.ceil)


def _most_beams(search: Search, prompt: int, new: int, case: int, room: int) -> int:
    """The largest count of beams below the search's own whose slots (0: at the least, 1: at the most) fit.

    Returns:
        0 if no count fits, or if the search has no beams.
    """
    beams = getattr(search, "beams", None)
    names = {field.name for field in fields(search) if field.init} if is_dataclass(search) else set()
    if "beams" not in names or type(beams) is not int:
        return 0
    try:
        return bisect_right(range(1, beams), room, key=lambda n: slots_of(with_beams(search, n), prompt, new)[case])
    except Exception:  # the search refuses some of these counts: no advice
        return 0


def with_beams(search: Any, beams: int) -> Any:
    """A search with fewer beams, which returns no more than that."""
    fewer, names = {"beams": beams}, {field.name for field in fields(search) if field.init}
    if "num_return_sequences" in names and type(returned := search.num_return_sequences) is int:
        fewer["num_return_sequences"] = min(returned, beams)
    return replace(search, **fewer)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error of torch, C++ or Python means that the machine is out of memory."""
    if isinstance(error, RuntimeError) and not isinstance(error, torch.OutOfMemoryError):
        text = str(error)
        return ("alloc" in text and "memory" in text) or "bad_alloc" in text
    return isinstance(error, MemoryError | torch.OutOfMemoryError) or getattr(error, "errno", None) == errno.ENOMEM


def out_of_memory() -> KVMemoryError:
    """The error to report when the machine is out of memory."""
    return KVMemoryError("the machine ran out of memory", remedy="use fewer beams or a shorter prompt")
