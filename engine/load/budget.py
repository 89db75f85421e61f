"""The memory budget of a whole process: usage is predicted from headers, and the KV cache gets the rest."""

import re
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch

from engine.drafts.size import most_drafted
from engine.drafts.suffixes import full_store_bytes
from engine.errors import UsageError
from engine.load.experts import ExpertBytes, why_whole
from engine.load.file_cache import file_cache
from engine.load.loading import (
    device_of,
    dtype_of_cache,
    open_adapters,
    pick_device,
    pick_dtype,
    pick_quant,
)
from engine.load.options import FORMATS_SHOWN, LoadOptions, bytes_of
from engine.load.pools import MAX_TOKENS, ROWS_PART, in_context, least_stores, shares_of, total_memory, with_beams
from engine.load.repacking import bytes_to_pack
from engine.load.sizes import Workload, cgroup_limits, memory_of_process, size_text
from engine.rules.grammars import most_bytes
from engine.text.tokenizer import FILES
from engine.text.tokenizer_files import read_file
from engine.text.tokenizer_limits import parse
from kernels import cpp
from kernels.layout import NULL_SLOT, TRASH_SLOT
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import ModelSize, measure
from models.draft_heads import HEADS
from models.formats.linear import FORMATS
from models.gguf.vocabulary import FileVocabulary
from models.shape import ModelShape
from models.trim import release_libraries

TOKENS = 256  # tokens of a pass, see `Runner`
GROWTH = 24 << 20  # bytes that a process takes beyond its imports: code that is used again, threads, what malloc keeps
TOKENIZER = 20  # bytes in memory for a byte of a tokenizer's file
RANKED = {"tekken.json": 5, "tiktoken.model": 34}  # the same; the tokens of a tekken.json have long descriptions
TOKENIZER_LEAST, ENTRY = 2 << 20, 240  # bytes of a tokenizer.json in memory, and for each of its pieces and merges
MERGED = 145  # bytes for each of those of a GGUF file with merges, which are not read from JSON
READING = 2.5  # bytes in memory while a tokenizer is read, for a byte that it takes later: 1.7 to 3.0 measured
ARENA = 72 << 20  # address space of a thread: its stack, and what malloc reserves for it
LISTED = 120  # bytes of a token in Python's lists of tokens and pages, and in prepared passes
RESERVED = max(NULL_SLOT, TRASH_SLOT) + 1  # slots that no tree gets
BEAMS = (1, 4, 15)  # numbers of beams in the table


@dataclass(frozen=True)
class MemoryPlan:
    """The memory that a process will hold, in bytes.

    Args:
        lines: everything except the cache, by name, in the order of the sum.
        token: bytes of the cache per token, all models together, with the share of states of recurrent layers.
        least: bytes of the smallest cache.
        experts: the target's experts, which its weights include; None: it has none.
        rows: rows of log-probabilities of a pass that `lines` count.
        row: bytes of another one, all models together.
        start: bytes while the target's tokenizer is read, before its weights.
        beside: bytes beyond the cache for each token of a text, all models together.
        longest: tokens of the longest text that may be; 0: no limit.
    """

    lines: Mapping[str, int]
    token: int
    least: int = 0
    experts: ExpertBytes | None = None
    rows: int = TOKENS
    row: int = 0
    start: int = 0
    beside: int = 0
    longest: int = 0

    @property
    def fixed(self) -> int:
        """Bytes of everything except the cache."""
        return sum(self.lines.values())

    def cache(self, tokens: int) -> int:
        """Bytes of a cache for some tokens, and for the slots that no tree gets."""
        return max((tokens + RESERVED) * self.token, self.least)

    def texts(self, tokens: int) -> int:
        """Bytes beyond the cache for a text of as many tokens as a cache for `tokens` tokens may hold."""
        return self.beside * min(tokens, self.longest or tokens)

    def total(self, tokens: int) -> int:
        """The most bytes of everything, with a cache for `tokens` tokens."""
        return max(self.fixed + self.cache(tokens) + self.texts(tokens), self.start)

    def left(self, memory: int) -> int:
        """Bytes that are left for slots of the cache."""
        left = memory - self.fixed - RESERVED * self.token
        shared = left * self.token // (self.token + self.beside)
        return max(shared, left - self.beside * self.longest) if self.longest else shared

    def more_rows(self, free: int) -> int:
        """Rows of log-probabilities that some free bytes hold, beyond those that `lines` count."""
        return min(TOKENS - self.rows, max(0, free) // self.row)

    def most_rows(self, free: int) -> int | None:
        """Rows that some free bytes and `lines` hold; None: as many as a pass has tokens."""
        rows = self.rows + self.more_rows(free)
        return rows if rows < TOKENS else None

    def with_experts(self, limit: int) -> "MemoryPlan":
        """The same plan with `limit` bytes of the target's experts in memory."""
        assert self.experts is not None
        line = self.experts.line
        lines = {**self.lines, line: self.lines[line] - self.experts.every}
        return replace(self, lines={**lines, "experts that stay in memory": limit})

    def spelled(self, tokens: int, needs: str) -> str:
        """The sum, line by line."""
        rows = {**self.lines, f"cache for {tokens} tokens ({needs})": self.cache(tokens)}
        if texts := self.texts(tokens):
            rows["rotary tables and lists of tokens"] = texts
        if more := self.total(tokens) - sum(rows.values()):
            rows["more than that while the tokenizer is read"] = more
        width = max(map(len, rows))
        return "\n".join(f"  {name:{width}} {_megabytes(size):>10}" for name, size in rows.items())


def plan(options: LoadOptions, workload: Workload, runtime: int | None = None) -> MemoryPlan:
    """Plan the memory of a process, for any size of the cache; reads configurations and headers.

    Args:
        options: how the models are to be loaded; the plan is that of the process at `options.place`.
        workload: the work that must fit.
        runtime: bytes that it holds without a model; None: `runtime_bytes` of this process.

    Raises:
        CheckpointError, UsageError: see `Engine.load`.
    """
    device = device_of(options)
    if device.type != "cpu":
        raise UsageError("memory: the plan is for a CPU", remedy="use --kv-memory on a GPU, or add --device cpu")
    lines = {"runtime: Python, torch, kernels": runtime_bytes() if runtime is None else runtime}
    token, shapes, experts, rows, row, start = 0, list[ModelShape](), None, TOKENS, 0, sum(lines.values())
    auto_drafts = options.place.size == 1 and options.compile == "off" and not cpp.why_not()  # see `chosen_drafter`
    beside = 0
    drafts = auto_drafts if options.drafts == "auto" else options.drafts != "off"
    folders = {**options.folders, **({"draft": options.folder} if options.drafts == "mtp" else {})}
    for role, folder in folders.items():
        checkpoint, own_head = Checkpoint.open(folder), role == "draft" and options.drafts == "mtp"
        precision = pick_dtype(options.dtype, checkpoint, device)
        quant = pick_quant(options.quant, checkpoint, precision.dtype, device).name
        size = measure(checkpoint, precision.dtype, device, quant, options.place, own_head=own_head)
        name = role if len(folders) > 1 else ""
        if own_head or checkpoint.architecture in HEADS:
            prompts = workload.slots[0] * size.config.width * precision.dtype.itemsize
            lines["rows of prompts for the draft head"] = prompts
        format = f" ({quant})" if quant != "none" else ""
        lines[weights := f"{name} weights{format}".strip()] = size.weights
        pieces = 0 if own_head else _pieces(checkpoint.vocabulary) or _tokenizer(checkpoint.folder)
        if role == "target" and workload.grammars and pieces and find_spec("llguidance") is not None:
            lines["grammars and their vocabulary"] = most_bytes(size.config.vocab_size)
        if role == "target":
            packs = partial(bytes_to_pack, file_cache(options.cache), checkpoint, precision.dtype, quant)
            experts = ExpertBytes.of(size, weights, why_whole(options), packs)
        adapters = open_adapters(options, checkpoint) if role == "target" else {}
        if adapters:
            small = quant != "none" or checkpoint.quantization is not None or precision.dtype.itemsize < 4
            lines["weights of adapters"] = sum(adapter.bytes(small, precision.dtype) for adapter in adapters.values())
        if not own_head:
            lines[f"{name} tokenizer".strip()] = pieces
            start += int(READING * pieces) if role == "target" else 0
        counted, each = _rows(size, precision.dtype, workload, drafts and role != "reward")
        lines[f"{name} scratch of a pass".strip()] = _scratch(size, precision.dtype) + counted * each
        rows, row = counted if role == "target" else rows, row + each * (role != "reward")
        beside += _beside(size, precision.dtype)
        token += size.shape.kv_bytes_per_token(dtype_of_cache(options.kv_dtype, precision.dtype))
        shapes.append(size.shape)
    if drafts and options.drafts in ("suffix", "auto"):
        lines["suffix store, when full"] = full_store_bytes()
    longest = (shapes[0].max_positions or 0) if options.context is None else options.context
    token *= shares_of(shapes)
    return MemoryPlan(lines, token, least_stores(shapes), experts, rows, row, start, beside, longest)


class MemoryLimits(NamedTuple):
    """The limits that keep a process within its memory.

    Attributes:
        cache: bytes of the cache; None: it is not limited.
        experts: bytes of experts; None: all fit.
        limit: that memory, if the cache gets what the rest leaves of it.
        rows: rows of log-probabilities that searches may request in a pass; None: as many as a pass has tokens.
        beside: bytes beyond the cache for each token.
    """

    cache: int | None
    experts: int | None = None
    limit: int | None = None
    rows: int | None = None
    beside: int = 0


def allow(options: LoadOptions) -> MemoryLimits:
    """Return the limits that keep a process within `options.memory`.

    A part of what is left (`ROWS_PART`) is for rows beyond those of the workload, and the cache gets the rest; if the
    memory does not hold all experts of a mixture, experts and cache get the least that they need, and each half of the
    rest. If `options.kv_memory` sets the size of the cache, the others get all that is left.

    Raises:
        CheckpointError: see `Engine.load`.
        UsageError: the workload does not fit; the error has the sum, and options that would fit.
    """
    workload, kv_memory = options.workload or Workload(parallel=options.parallel), options.kv_bytes
    memory = memory_bytes(options, torch.get_num_threads())
    planned, (least, _) = plan(options, workload), workload.slots
    experts = planned.experts if memory < planned.total(least) else None
    if experts is not None and experts.apart is None:
        planned = planned.with_experts(experts.least)
    left = planned.left(memory)
    if memory < planned.total(least):
        lines = [f"  experts: {experts.touched()}; {experts.limits()}"] if experts is not None else []
        raise UsageError(
            f"memory: {size_text(memory)} is less than the {size_text(planned.total(least))} that this needs",
            where="\n".join([planned.spelled(least, str(workload)), *lines]),
            remedy=_remedies(options, memory, workload, planned.total(least)),
        )
    if kv_memory is not None and kv_memory > left:
        raise UsageError(
            f"--kv-memory {size_text(kv_memory)} is more than the {size_text(left)} that --memory leaves",
            where=planned.spelled(0, "none yet"),
            remedy="leave out --kv-memory, or lower it",
        )
    spare = memory - planned.total(least)
    taken = spare // 2 if experts is not None else planned.more_rows(spare // ROWS_PART) * planned.row
    cache = planned.left(memory - taken)
    cache = kv_memory if kv_memory is not None else min(cache, MAX_TOKENS * planned.token)
    if experts is not None:
        return MemoryLimits(cache, min(experts.least + left - cache, experts.every), rows=planned.most_rows(0))
    limit, free = memory if kv_memory is None else None, memory - planned.total(cache // planned.token)
    return MemoryLimits(cache, None, limit, planned.most_rows(free), planned.beside)


def _remedies(options: LoadOptions, memory: int, workload: Workload, needed: int) -> str:
    """List in one line what would fit: for each flag, alone or with others, the value nearest to the wanted plan."""
    fits: dict[str, tuple[int, str]] = {}
    cheaper = []
    device = pick_device(options.device)
    for other in FORMATS_SHOWN:
        if other != options.quant and FORMATS[other].why_not(device) is None:
            cheaper.append((f"--quant {other}", replace(options, quant=other), workload))
    if options.kv_dtype == "auto":
        cheaper += [("--kv-dtype int8", replace(options, kv_dtype="int8"), workload)]
        cheaper += [(f"{flag} --kv-dtype int8", replace(other, kv_dtype="int8"), w) for flag, other, w in cheaper[:-1]]
    if options.drafts != "off":
        cheaper.append(("--drafts off", replace(options, drafts="off"), workload))
    fewer = [n for n in (8, 4, 2, 1) if n < workload.beams]
    for beams in fewer:
        cheaper.append((f"--beams {beams}", options, replace(workload, search=with_beams(workload.search, beams))))
    for new in (128, 64, 32, 16):
        if new < workload.new:
            cheaper.append((f"--max-new-tokens {new}", options, replace(workload, new=new)))
    for flags, other, work in cheaper:
        try:
            total = plan(other, work).total(work.slots[0])
        except Exception:  # the checkpoint is packed, or the search refuses the value: no advice
            continue
        if total <= memory:
            flag = flags.partition(" ")[0]
            fits[flag] = max(fits.get(flag, (0, "")), (total, f"{flags} ({size_text(total)})"))
    nearest = [text for _, text in fits.values()]
    return f"what would fit: {', '.join(nearest)}{', ' * bool(nearest)}--memory of at least {(needed >> 20) + 1}M"


def _megabytes(size: int) -> str:
    """A size as text; lines that people add up have one unit."""
    return f"{size / 2**20:.1f} MB"


def _pieces(vocabulary: FileVocabulary | None) -> int:
    """Bytes of the tokenizer of a GGUF file; 0 if there is none."""
    if vocabulary is None:
        return 0
    merges = vocabulary.keys.config.get("merges", ())
    return TOKENIZER_LEAST + (MERGED if len(merges) else ENTRY) * (len(vocabulary.tokens) + len(merges))


def _tokenizer(folder: Path) -> int:
    """Bytes of a tokenizer, by its files."""
    path = next((folder / name for name in FILES if (folder / name).is_file()), None)
    if path is None:
        return 0
    merges = folder / "merges.txt"
    more = merges.stat().st_size if path.name == FILES[2] and merges.is_file() else 0
    return _of_file(path, path.stat().st_size + more)


@lru_cache(maxsize=8)
def _of_file(path: Path, size: int) -> int:
    if path.name != FILES[0]:
        return RANKED.get(path.name, TOKENIZER) * size
    model = parse(read_file(path)).get("model")
    parts = [model.get(name) for name in ("vocab", "merges")] if isinstance(model, dict) else []
    return TOKENIZER_LEAST + ENTRY * sum(len(part) for part in parts if isinstance(part, dict | list))


def _rows(size: ModelSize, dtype: torch.dtype, workload: Workload, drafts: bool) -> tuple[int, int]:
    """The rows of log-probabilities of a pass, those of nodes drafted under searches included if there are `drafts`,
    and the bytes of each."""
    vocab_size = size.config.vocab_size
    drafted = most_drafted(vocab_size) if drafts and not getattr(workload.search, "drafts_itself", False) else 0
    return min(TOKENS, workload.rows + workload.parallel * drafted), vocab_size * (max(dtype.itemsize, 2) + 2 * 4)


def _beside(size: ModelSize, dtype: torch.dtype) -> int:
    """Bytes for each token of a text beyond the cache, see `RotaryEmbedding.angles`."""
    kept = (rope for rope in size.config.tables() if rope.kind not in ("dynamic", "longrope"))
    rotary = sum((4 if rope.growth else 2) * rope.head_dim * dtype.itemsize for rope in kept)
    return rotary * 5 // 4 + LISTED


def _scratch(size: ModelSize, dtype: torch.dtype) -> int:
    """Bytes that a pass computes (kernels/stack/native.cpp), without rows of log-probabilities."""
    c, element = size.config, max(dtype.itemsize, 2)
    heads = max(2 * (c.query_heads(i) + c.kv_size(i)[0]) * c.kv_size(i)[1] for i in range(c.layers))
    heads += 4 * c.width * (c.convs is not None)
    row = 5 * c.width + heads + (3 if c.gated else 2) * max(map(c.inner, range(c.layers)))
    if c.layer_inputs is not None:  # inputs of all layers, and what they are computed from
        row += 3 * c.layers * c.layer_inputs.width
    if (latent := c.latent) is not None:  # narrow queries and values, rows of heads and their products
        row += c.heads * 2 * (latent.plain + latent.rotated + latent.value + latent.rank) + latent.query_rank
    if c.recurrent is not None:  # float32, in PyTorch
        row += 8 * c.recurrent.kind.channels * torch.float32.itemsize // element
    if c.experts is not None:  # rows of a token by each expert that it chose, and those of the shared one
        row += c.experts.routing.chosen * (c.width + 3 * c.experts.width) + c.width + 3 * c.experts.shared_width
        row += c.experts.count
    return TOKENS * row * element


# --- limits ---


def runtime_bytes() -> int:
    """Bytes that this process holds now, and those that it takes beyond that, without a model."""
    release_libraries()
    return resident() + GROWTH


def resident() -> int:
    """Bytes of this process in memory; their maximum so far if the system has no /proc."""
    return memory_of_process()[1] or peak()


def peak() -> int:
    """The most bytes of this process that were in memory so far."""
    try:  # `getrusage` of a new process counts what its parent held
        [size] = re.findall(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text("utf-8"))
        return int(size) * 1024
    except (OSError, ValueError):
        most = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return most if sys.platform == "darwin" else most * 1024


def memory_bytes(options: LoadOptions, threads: int) -> int:
    """`options.memory` in bytes; "auto" is the least of the limits of this process."""
    if options.memory != "auto":
        return bytes_of("memory", options.memory)
    together = min(total_memory(), *cgroup_limits(), sys.maxsize) // options.place.local
    limits = [together, *_address_space(options, threads)]
    return min(limits) * 31 // 32  # the system keeps page tables and the like for a process


def _address_space(options: LoadOptions, threads: int) -> Iterator[int]:
    """The memory that RLIMIT_AS leaves, without mapped address space and the largest mapped file."""
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return
    spaces = memory_of_process()[0] or resident()
    files = {info.file for folder in options.folders.values() for info in Checkpoint.open(folder).tensors.values()}
    mapped = max((file.stat().st_size for file in files), default=0)
    yield max(1, limit - (spaces - resident()) - mapped - ARENA * max(0, threads - 1))


# --- the table ---


def table(options: LoadOptions, search_of: Any, new: int) -> str:
    """The plan of a model: for each format of weights and cache and for some numbers of beams.

    Args:
        options: how the model is to be loaded, except its formats. Prompt and reply have `context` tokens; None: all
            that the checkpoint is made for, 4096 if it has no limit. With `memory`, the table also has the tokens for
            which that leaves room.
        search_of: a number of beams -> a search.
        new: tokens of the reply.

    Raises:
        CheckpointError, UsageError: see `Engine.load`.
    """
    device = pick_device("cpu")
    checkpoint = Checkpoint.open(options.folder)
    precision = pick_dtype(options.dtype, checkpoint, device)
    own = checkpoint.packing or checkpoint.quantization
    quants = [pick_quant("none", checkpoint, precision.dtype, device).name] if own else [*FORMATS_SHOWN]
    size = measure(checkpoint, precision.dtype, device, quants[0], options.place)
    context = in_context(size, options.context, checkpoint.name).max_positions or 4096
    new = min(new, context - 1) or 1
    start, runtime = peak(), runtime_bytes()  # a small model takes less than the imports did
    touched, of_experts = [], []
    memory = None if options.memory is None else memory_bytes(options, torch.get_num_threads())
    rows = [["weights", "", "cache", "", "beams", "tokens", "scratch", "runtime", "total"]]
    rows[0] += [] if memory is None else [f"in {size_text(memory)}"]
    for quant in quants:
        if FORMATS[quant].why_not(device) is not None:
            continue
        if size.config.experts is not None:
            one = measure(checkpoint, precision.dtype, device, quant, options.place).touched
            touched.append(f"{_megabytes(one)} ({'own' if own else quant})")
            some = plan(replace(options, quant=quant, device="cpu"), Workload(), runtime).experts
            assert some is not None
            of_experts.append(f"\nExperts, {'own' if own else quant}: {some.touched()}; {some.limits()}.")
        for kv_dtype in ("auto", "int8"):
            for beams in BEAMS:
                work = Workload(search_of(beams), context - new, new)
                each = replace(options, quant=quant, kv_dtype=kv_dtype, device="cpu")
                planned = plan(each, work, runtime)
                tokens = max(work.slots)
                weights = sum(n for name, n in planned.lines.items() if "weights" in name)
                scratch = sum(n for name, n in planned.lines.items() if "scratch" in name)
                others = planned.fixed - weights - scratch
                numbers = (weights, planned.cache(tokens), scratch, others, max(start, planned.total(tokens)))
                w, k, s, r, t = map(_megabytes, numbers)
                dtype = str(dtype_of_cache(kv_dtype, precision.dtype)).removeprefix("torch.")
                rows.append(["own" if own else quant, w, dtype, k, str(beams), str(tokens), s, r, t])
                if memory is not None:
                    more = planned.row * planned.more_rows((memory - planned.total(work.slots[0])) // ROWS_PART)
                    rows[-1].append(str(max(0, planned.left(memory - more) // planned.token)))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(f"{x:{n}}" if i in (0, 2) else f"{x:>{n}}" for i, (x, n) in enumerate(zip(row, widths, strict=True)))
        for row in rows
    ]
    title = f"{checkpoint.name}: {precision}; a prompt of {context - new} tokens, {new} new ones"
    notes = "runtime: Python, torch, kernels, tokenizer; tokens: the most that all beams can hold; nothing was read."
    notes += "" if memory is None else f"\n{rows[0][-1]}: the tokens for which --memory leaves room."
    if (mixed := size.config.experts) is not None:
        chosen = f"{mixed.routing.chosen} of {mixed.count} experts of a layer"
        notes += f"\nA token chooses {chosen}: a pass of one token reads {', '.join(touched)} of matrices."
        notes += "".join(of_experts)
    if options.place.size > 1:
        title += f"; each of {options.place.size} processes"
    return "\n".join([title, "", *lines, "", notes])
