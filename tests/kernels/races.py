"""A race detector for Triton kernels, in Triton's interpreter: it needs no GPU.

The programs of a launch run in a random order, one after the other. `Watch` records each element of global memory that
they load, store or update atomically, and orders these accesses by happens-before: an atomic that acquires learns what
all earlier atomics on its address that released knew. Inside a program, whose threads the interpreter runs as one,
barriers order accesses, and atomics do, which are barriers.
"""

import contextlib
import random
from collections import Counter, defaultdict
from unittest import mock

import numpy as np
from triton.runtime import interpreter

UNORDERED = "reads what another program has written, unordered"
# An acquire drops the first level of cache on GPUs of NVIDIA; the memory model does not promise it.
CACHED = "reads what another program has written, not past the first level of cache (.cg)"
OVERWRITTEN = "writes what another program has written, unordered"
STOLEN = "writes what another program has read, unordered"
UNCOUNTED = "counts by a number that another program has written, unordered"
EXCHANGED = "reads what another thread has written, no barrier between"
UNREAD = "writes what another thread has read, no barrier between"
REWRITTEN = "writes what another thread has written, no barrier between"
UNRELEASED = "releases what other threads have written, no barrier between"


class Watch:
    """The accesses of the launches, and the races among them.

    Attributes:
        found: how often each race was seen, by "kernel race".
        launches, accesses: how many there were.
    """

    def __init__(self, seed):
        self.random, self.found = random.Random(seed), Counter()
        self.launches = self.accesses = 0

    def launch(self, grid):
        """A launch orders everything before it: what is known begins anew."""
        self.launches += 1
        self.order = list(np.ndindex(*grid))
        self.random.shuffle(self.order)
        self.epoch = Counter()  # of a program: atomics so far
        self.known = defaultdict(dict)  # of a program: the epochs of others that it has acquired
        self.released = defaultdict(dict)  # of an address: the epochs that atomics on it have released
        self.barriers = Counter()  # of a program
        self.written, self.read = {}, {}  # of an address: the latest program, its epoch, barriers and the place
        self.readers = defaultdict(dict)  # of an address: the epoch of each program that read it since it was written
        self.stored = {}  # of a program: its barriers when it stored last

    def ordered(self, program, other, epoch):
        return program == other or self.known[program].get(other, -1) >= epoch

    def note(self, race):
        self.found[f"{self.kernel} {race}"] += 1

    def load(self, program, addresses, past_cache):
        now = self.epoch[program], self.barriers[program]
        self.accesses += len(addresses)
        for place, address in addresses:
            other, epoch, barriers, there = self.written.get(address, (program, *now, place))
            if other != program:
                if not self.ordered(program, other, epoch):
                    self.note(UNORDERED)
                elif not past_cache:
                    self.note(CACHED)
            elif barriers == now[1] and there != place:
                self.note(EXCHANGED)
            self.readers[address][program] = now[0]
            self.read[address] = program, *now, place

    def store(self, program, addresses):
        now = self.epoch[program], self.barriers[program]
        self.stored[program] = now[1]
        self.accesses += len(addresses)
        for place, address in addresses:
            other, epoch, barriers, there = self.written.get(address, (program, *now, place))
            if not self.ordered(program, other, epoch):
                self.note(OVERWRITTEN)
            elif other == program and barriers == now[1] and there != place:
                self.note(REWRITTEN)
            for other, epoch in self.readers.pop(address, {}).items():
                if not self.ordered(program, other, epoch):
                    self.note(STOLEN)
            other, _, barriers, there = self.read.get(address, (None, *now, place))
            if other == program and barriers == now[1] and there != place:
                self.note(UNREAD)
            self.written[address] = program, *now, place

    def atomic(self, program, addresses, order):
        if "RELEASE" in order and self.stored.get(program) == self.barriers[program]:
            self.note(UNRELEASED)
        for _, address in addresses:
            other, epoch, *_ = self.written.get(address, (program, 0))
            if not self.ordered(program, other, epoch):
                self.note(UNCOUNTED)
            known, released = self.known[program], self.released[address]
            if "ACQUIRE" in order:
                raise_to(known, released)
            if "RELEASE" in order:
                raise_to(released, {**known, program: self.epoch[program]})
            self.readers[address][program] = self.epoch[program]
        self.epoch[program] += 1
        self.barriers[program] += 1


def raise_to(epochs, others):
    for program, epoch in others.items():
        epochs[program] = max(epochs.get(program, -1), epoch)


@contextlib.contextmanager
def watching(seed):
    """Within it, kernels run their programs in an order by the seed, and a `Watch`, which it yields, sees them."""
    watch, cls, executor = Watch(seed), interpreter.InterpreterBuilder, interpreter.GridExecutor
    old = {name: getattr(cls, name) for name in (
        "set_grid_dim", "set_grid_idx", "create_masked_load", "create_masked_store", "create_atomic_rmw",
        "create_barrier")}  # fmt: skip
    if hasattr(cls, "get_cache_policy"):  # since triton 3.9, which passes its result in the modifier's place
        old["get_cache_policy"] = cls.get_cache_policy
    call = executor.__call__

    def run(self, *args, **options):
        watch.kernel = self.fn.__name__
        return call(self, *args, **options)

    def set_grid_dim(self, *sizes):
        watch.launch(sizes)
        old["set_grid_dim"](self, *sizes)

    def set_grid_idx(self, x, y, z):
        _, height, depth = self.grid_dim
        old["set_grid_idx"](self, *watch.order[(x * height + y) * depth + z])

    def create_masked_load(self, ptrs, mask, other, cache_modifier, *rest):
        watch.load(self.grid_idx, live(ptrs, mask), "CG" in str(cache_modifier).upper())
        return old["create_masked_load"](self, ptrs, mask, other, cache_modifier, *rest)

    def get_cache_policy(self, cache_modifier, eviction_policy):
        return cache_modifier

    def create_masked_store(self, ptrs, value, mask, *rest):
        watch.store(self.grid_idx, live(ptrs, mask))
        return old["create_masked_store"](self, ptrs, value, mask, *rest)

    def create_atomic_rmw(self, operation, ptr, value, mask, sem, scope):
        watch.atomic(self.grid_idx, live(ptr, mask), str(sem))
        return old["create_atomic_rmw"](self, operation, ptr, value, mask, sem, scope)

    def create_barrier(self):
        watch.barriers[self.grid_idx] += 1
        return old["create_barrier"](self)

    made = locals()
    with mock.patch.multiple(cls, **{name: made[name] for name in old}), mock.patch.object(executor, "__call__", run):
        yield watch


def live(ptrs, mask):
    """The places in a tensor that a mask leaves, and their addresses."""
    addresses = np.asarray(ptrs.data)
    places = np.broadcast_to(np.asarray(mask.data), addresses.shape).reshape(-1).nonzero()[0]
    return list(zip(places.tolist(), addresses.reshape(-1)[places].tolist(), strict=True))
