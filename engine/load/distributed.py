"""The processes that compute models together, started by `torchrun` and communicating through torch.distributed.

Every process runs the same driver on the same requests, and every value on which a search's decision depends comes from
a gathered tensor, so all make the same decisions. If a process ends early, the others end too, because their exchanges
fail.
"""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from engine.errors import CoppiceError, UsageError
from models.checkpoint.tensor_files import buffer_of
from models.shard import Shard

TIMEOUT = 600.0  # seconds that a process waits for the others: they may load from slower disks
HALVES = (torch.float16, torch.bfloat16)
T = TypeVar("T")


class ProcessError(CoppiceError):
    """Another process of those that compute a model together has ended, or does not answer."""

    exit_code = 6
    code = "processes"


def process_count() -> int:
    """How many processes `torchrun` started; 1 without it."""
    size = os.environ.get("WORLD_SIZE", "1")
    return int(size) if size.isascii() and size.isdigit() else 1


def check_alone(command: str) -> None:
    """Refuse a command that runs in one process, if `torchrun` started several. Raises UsageError."""
    if (count := process_count()) > 1:
        raise UsageError(
            f"{command} runs in one process, torchrun started {count}",
            remedy="start it without torchrun; engine.batch and Engine.load take several processes",
        )


@contextmanager
def together(device: str = "auto", timeout: float = TIMEOUT, backend: str | None = None) -> Iterator[Shard]:
    """The place of this process among those that `torchrun` started; a process alone without it.

    On GPUs each process selects the GPU of its local rank, before anything else uses one.

    Args:
        device: the device of the models, see `Engine.load`.
        timeout: seconds that a process waits for the others.
        backend: backend of torch.distributed; None: NCCL for tensors on GPUs, gloo for others.

    Raises:
        UsageError: more processes on this machine than it has GPUs, or an environment that is not torchrun's.
        ProcessError: the other processes cannot be reached.
    """
    if (count := process_count()) == 1:
        yield Shard()
        return
    import torch.distributed as dist

    try:
        place, local = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
        _ = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"], os.environ["RANK"]
    except (KeyError, ValueError) as error:
        remedy = "start the processes by torchrun, or unset WORLD_SIZE"
        raise UsageError(f"WORLD_SIZE is {count}, but {error} is not as torchrun sets it", remedy=remedy) from None
    on_gpu = device != "cpu" and torch.cuda.is_available()
    if on_gpu:
        if local > torch.cuda.device_count() and backend is None:
            what = f"{local} processes, and {torch.cuda.device_count()} GPUs"
            raise UsageError(what, remedy="--nproc-per-node may be as many as there are GPUs; or add --device cpu")
        torch.cuda.set_device(place % torch.cuda.device_count())
    try:
        backend = backend or ("cpu:gloo,cuda:nccl" if on_gpu else "gloo")
        dist.init_process_group(backend, timeout=timedelta(seconds=timeout))
    except (RuntimeError, ValueError) as error:
        raise ProcessError(f"the other processes cannot be reached: {_line(error)}") from error
    shard = Processes(local)
    try:
        yield shard
        shard.gather(torch.zeros(1))  # the first to end ends the others: torchrun takes its exit code for a failure
    finally:
        with suppress(RuntimeError):
            dist.destroy_process_group()


class Processes(Shard):
    """Several processes, see `models.sharding.Shard`.

    Raises:
        ProcessError: (every method) another process has ended or does not answer.
    """

    def __init__(self, local: int):
        import torch.distributed as dist

        super().__init__(dist.get_rank(), dist.get_world_size(), local)
        self._dist = dist

    def sum(self, x: Tensor) -> Tensor:
        """See `Shard`; in float32 on a CPU, where each sum of halves would be rounded."""
        summed = x.float() if x.dtype in HALVES and x.device.type == "cpu" else x.contiguous()
        self._run(self._dist.all_reduce, summed)
        return summed.to(x.dtype)

    def gather(self, x: Tensor) -> Tensor:
        x = x.contiguous()
        parts = [torch.empty_like(x) for _ in range(self.size)]
        self._run(self._dist.all_gather, parts, x)
        return torch.stack(parts)

    def first(self, make: Callable[[], T]) -> T:
        """See `Shard`; what `make` returns is pickled."""
        data = bytearray(pickle.dumps(make())) if self.rank == 0 else bytearray()
        size = torch.tensor([len(data)])
        self._run(self._dist.broadcast, size, 0)
        message = torch.frombuffer(data, dtype=torch.uint8) if data else torch.empty(int(size), dtype=torch.uint8)
        self._run(self._dist.broadcast, message, 0)
        return pickle.loads(buffer_of(message))

    def _run(self, collective: Callable[..., Any], *arguments: Any) -> None:
        try:
            collective(*arguments)
        except RuntimeError as error:
            raise ProcessError(
                f"process {self.rank} of {self.size}: another process has ended or does not answer: {_line(error)}",
                remedy="the message of that process has the reason",
            ) from error


def agree(shard: Shard, what: str, own: str) -> None:
    """Check that all processes have the same text, such as the name of a processor: its first 250 bytes. Raises
    UsageError."""
    if shard.size == 1:
        return
    data, row = own.encode()[:250], torch.zeros(256, dtype=torch.uint8)
    row[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    texts = [bytes(row.tolist()).rstrip(b"\0").decode(errors="replace") for row in shard.gather(row)]
    if len({*texts}) > 1:
        where = "; ".join(f"process {rank}: {text}" for rank, text in enumerate(texts))
        raise UsageError(f"the processes differ in {what}", where=where, remedy="start them alike, on machines alike")


def least(shard: Shard, number: int) -> int:
    """The least of the numbers of all processes."""
    return int(shard.gather(torch.tensor([number])).min())


def shared(shard: Shard, items: Callable[[], Iterator[T]]) -> Iterator[T]:
    """The items that the first process reads, in all processes."""
    if shard.size == 1:
        yield from items()
        return
    source = items() if shard.rank == 0 else iter(())
    while found := shard.first(lambda: [*islice(source, 1)]):
        yield from found


def _line(error: Exception) -> str:
    """The first line of an error."""
    return str(error).strip().partition("\n")[0][:200] or type(error).__name__
