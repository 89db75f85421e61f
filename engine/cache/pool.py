"""PagePool: the KV cache of one model, divided into pages that trees take and return."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from engine.cache.kept_states import KeptStates
from engine.cache.prefixes import PrefixCache
from engine.cache.states import Stores
from engine.errors import KVMemoryError
from kernels.kv_write import kv_copier
from kernels.layout import NULL_SLOT, TRASH_SLOT, CacheKind, DeltaKind, KVCache
from models.shape import ModelShape
from models.trim import own_pages

FREE, CLAIMED, USED, IDLE = 0, 1, 2, 3


class PagePool:
    """Pages of `page_size` slots; a slot holds what every layer keeps of one token, usually keys and values.

    A tree claims room for its trunk to grow contiguously, so that attention over it is one matrix multiplication.
    A claim is a preference and reserves nothing: when free pages run short, any tree may take them.

    Args:
        shape: the model's dimensions.
        pages: how many pages trees may take.
        page_size: slots per page.
        dtype, device: of keys and values; for dtypes of 8 bits see `kernels.kv_kinds`.
        rows, states: how many rows and states trees may take, if the model has recurrent layers.

    Several trees may hold the same page; then none of them writes to it. A page of `prefixes` that no tree holds is
    idle: it counts as free, and is dropped when a page is needed and no other is left.

    Attributes:
        prefixes: cached prefixes; None: none are kept.
        kept_states: the recurrent layers' part of cached prefixes; None: no prefixes, or no such layers.
        kept: pages of cached prefixes, held by trees or idle.
        ancestors, delta: see `ModelShape`.
        stores: the rows and states of recurrent layers; None: the model has no such layers.
        row_bytes, state_bytes: bytes of one row and of one state, in all layers.
        budget_page_bytes: bytes of `kv_memory` per page: of this model's, and of all else that shares `kv_memory`.
        limit_page_bytes: the same of `limit`.
        limit: the `memory` of the process that left this pool its bytes, see `bound`; None: `kv_memory` or the machine
            did.
        device: the device of the cache and of log-probabilities. A search that reads rows after the answer makes the
            host wait for a GPU; use `Evaluate.read` there instead.
    """

    def __init__(
        self,
        shape: ModelShape,
        pages: int,
        page_size: int = 16,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        rows: int = 1024,
        states: int = 64,
    ):
        if pages < 1 or page_size < 1:
            raise ValueError(f"expected pages >= 1 and page_size >= 1, got {pages} and {page_size}")
        self.page_size = page_size
        self.reserved = -(-(max(NULL_SLOT, TRASH_SLOT) + 1) // page_size)  # pages that no tree gets
        self.pages = pages
        self.ancestors, self.delta = shape.ancestors, shape.delta
        self.bytes_per_token = shape.kv_bytes_per_token(dtype)
        slots = (pages + self.reserved) * page_size
        self.stores = None if shape.delta is None else Stores(shape.delta, rows, states)
        self.row_bytes, self.state_bytes = shape.row_bytes, shape.state_bytes
        self.budget_page_bytes = self.page_bytes
        self.limit_page_bytes = self.page_bytes
        self.limit: int | None = None
        self.cache = _cache(shape, slots, dtype, device, rows, states)
        self.device = self.cache.k_LGSD.device
        self._copiers = [kv_copier(*group) for group in self.cache.groups]
        self._state = bytearray(bytes([USED]) * self.reserved + bytes(pages))  # the rest is FREE
        self.used_pages = self.idle_pages = 0
        self.prefixes: PrefixCache | None = None
        self.kept_states: KeptStates | None = None
        self.kept: set[int] = set()
        self._others: Counter[int] = Counter()  # page -> trees that hold it besides the first

    @property
    def free_pages(self) -> int:
        """The number of pages that no tree holds."""
        return self.pages - self.used_pages

    @property
    def page_bytes(self) -> int:
        return self.page_size * self.bytes_per_token

    @property
    def flag(self) -> str:
        """The flag that gives this pool more memory."""
        return "--kv-memory" if self.limit is None else "--memory"

    def bound(self, limit: int | None, beside: int = 0) -> None:
        """Set `limit`, and the bytes of `limit` beside the cache for each token."""
        self.limit, self.limit_page_bytes = limit, self.budget_page_bytes + self.page_size * beside
        for store in () if self.stores is None else (self.stores.rows, self.stores.states):
            store.flag = self.flag

    def cache_prefixes(self, most: int, most_rows: int, most_states: int) -> None:
        """Keep prefixes of finished requests, in at most this many idle pages, rows and states."""
        self.prefixes = PrefixCache(self, most)
        if self.stores is not None:
            size = self.state_bytes + (self.stores.kind.taps - 1) * self.row_bytes
            spacing = -(-size // self.bytes_per_token)
            self.kept_states = KeptStates(self.stores, self.page_size, most_rows, most_states, spacing)

    def claim(self, pages: int) -> range:
        """Claim `pages` contiguous pages, or fewer if no gap is long enough."""
        first = self._state.find(bytes(max(1, pages)))
        if first < 0:
            first, pages = self.roomiest()
        self._state[first : first + pages] = bytes([CLAIMED]) * pages
        return range(first, first + pages)

    def roomiest(self) -> tuple[int, int]:
        """First page and length of the longest run of free pages that no tree has claimed."""
        gaps = (match.span() for match in re.finditer(b"\0+", self._state))
        first, end = max(gaps, key=lambda gap: gap[1] - gap[0], default=(0, 0))
        return first, end - first

    def is_free(self, page: int) -> bool:
        """Whether a page can be taken, claimed or not."""
        return 0 <= page < len(self._state) and self._state[page] in (FREE, CLAIMED)

    def is_idle(self, page: int) -> bool:
        """Whether a page of a cached prefix is held by no tree."""
        return self._state[page] == IDLE

    def is_shared(self, page: int) -> bool:
        """Whether a page is cached or held by several trees, and so must not be written to."""
        return page in self.kept or page in self._others

    def unclaim(self, pages: range) -> None:
        """Withdraw a claim."""
        for page in pages:
            if self._state[page] == CLAIMED:
                self._state[page] = FREE

    def take(self, wish: int | None = None) -> int:
        """Take a page: the preferred one if it is free, otherwise the last free one. Raises KVMemoryError if none is
        free."""
        if self.used_pages == self.pages:
            raise KVMemoryError(
                f"the KV cache is full: all {self.pages} pages of {self.page_size} tokens are in use",
                remedy=f"give {self.flag} more, or ask for fewer beams or new tokens",
            )
        page = wish if wish is not None and self.is_free(wish) else self._state.rfind(FREE)
        if page < 0:
            page = self._state.rfind(CLAIMED)
        if page < 0:
            assert self.prefixes is not None
            self.prefixes.evict()
            page = self._state.find(FREE)
        self._state[page] = USED
        self.used_pages += 1
        return page

    def give(self, *pages: int) -> None:
        """Return pages. A page with other holders stays in use; a kept page becomes idle; the rest become free."""
        for page in pages:
            assert page >= self.reserved and self._state[page] == USED, f"page {page} is not in use"
            if page in self._others:
                self._others[page] -= 1
                if not self._others[page]:
                    del self._others[page]
                continue
            self._state[page] = IDLE if page in self.kept else FREE
            self.idle_pages += page in self.kept
            self.used_pages -= 1

    def hold(self, pages: Iterable[int]) -> None:
        """Add a holder to pages that are in use or kept."""
        for page in pages:
            if self._state[page] == IDLE:
                self._state[page] = USED
                self.idle_pages -= 1
                self.used_pages += 1
            else:
                assert self._state[page] == USED, f"page {page} is not in use"
                self._others[page] += 1

    def keep(self, pages: Iterable[int]) -> None:
        """Keep pages as idle when the trees that hold them return them."""
        self.kept.update(pages)

    def drop(self, pages: Iterable[int]) -> None:
        """Stop keeping pages."""
        for page in pages:
            self.kept.remove(page)
            if self.kept_states is not None:
                self.kept_states.forget(range(page * self.page_size, (page + 1) * self.page_size))
            if self._state[page] == IDLE:
                self._state[page] = FREE
                self.idle_pages -= 1

    def copy(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy the contents of slots to other slots."""
        for copy in self._copiers:
            copy(source, target)


def _cache(
    shape: ModelShape, slots: int, dtype: torch.dtype, device: torch.device | str, rows: int, states: int
) -> KVCache:
    """The tensors of a model's layers; see `KVCache`."""
    groups, places, seen = shape.groups, [], Counter[CacheKind | DeltaKind]()
    for layer, kept in enumerate(shape.kept):
        if not shape.keeps(layer):
            places.append(places[shape.keys_from[layer]])
            continue
        if kept is None:
            places.append(None)
            continue
        places.append((-1 if isinstance(kept, DeltaKind) else [*groups].index(kept), seen[kept]))
        seen[kept] += 1
    tensors = []
    for kept, layers in groups.items():
        width, own = kept.row(dtype)
        tensors.append([_reserve((layers, kept.heads, slots, width), own, device) for _ in range(kept.tensors)])
    (k_LGSD, *values), *others = tensors
    recurrent: tuple[Tensor, ...] = ()
    if (kind := shape.delta) is not None:
        sizes = (seen[kind], rows + max(NULL_SLOT, TRASH_SLOT) + 1, kind.row), (seen[kind], states + 1, *kind.state)
        recurrent = tuple(_reserve(size, torch.float32, device) for size in sizes)
    return KVCache(k_LGSD, values[0] if values else k_LGSD, others, places, recurrent)


def _reserve(size: Sequence[int], dtype: torch.dtype, device: torch.device | str) -> Tensor:
    """A tensor of zeros; on a CPU the operating system commits it page by page as it is first written."""
    cpu = torch.device(device).type == "cpu"
    return own_pages(size, dtype) if cpu else torch.zeros(size, dtype=dtype, device=device)
