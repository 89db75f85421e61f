"""Times of work on a GPU, by events; what it copies per second; FlexAttention to compare with."""

import statistics
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

BUSY = 400_000  # clocks, about 0.2 ms: longer than a graph's launch takes


def seconds_of(work: Callable[[], object], runs: int) -> float:
    """Median time of work on the device."""
    return in_turns([work], runs)[0]


def in_turns(works: Sequence[Callable[[], object]], runs: int) -> list[float]:
    """Median times of several works on the device; each round runs all of them, so that a ratio of two is of the same
    clocks."""
    rounds = [[once(work) for work in works] for _ in range(runs + 3)][3:]
    return [statistics.median(times) for times in zip(*rounds, strict=True)]


def once(work: Callable[[], object]) -> float:
    """Seconds of work on the device, by events. The device is kept busy until the work has been launched: otherwise the
    first event would be reached at once, and the time of the launch would count."""
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(BUSY)
    begin.record()
    work()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end) / 1e3


def copying(size: int = 1 << 30) -> tuple[Callable[[], object], int]:
    """A copy on the device, and the number of bytes that it reads and writes."""
    source = torch.empty(size, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return lambda: target.copy_(source), 2 * size


def copy_bandwidth(runs: int) -> float:
    """Bytes per second of a copy on the device; read and written bytes are counted."""
    work, moved = copying()
    return moved / seconds_of(work, runs)


def read_bandwidth(runs: int, size: int = 1 << 31) -> float:
    """Bytes per second of a sum on the device, which reads and hardly writes."""
    source = torch.zeros(size // 4, dtype=torch.float32, device="cuda")
    return size / seconds_of(source.sum, runs)


def recorded(calls: Sequence[Callable[[], object]]) -> Callable[[], None]:
    """Record all calls as one CUDA graph; the caller keeps what they read."""
    for call in calls[:2]:
        call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    return graph.replay


def flex_attention(q_1HTD: Tensor, visible_QS: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """FlexAttention, compiled, with its block mask made beforehand."""
    from torch.nn.attention import flex_attention as flex

    blocks = flex.create_block_mask(
        lambda b, h, q, k: visible_QS[q, k], None, None, *visible_QS.shape, device=visible_QS.device
    )
    compiled = torch.compile(flex.flex_attention, dynamic=False)
    return lambda k, v: compiled(q_1HTD, k, v, block_mask=blocks, enable_gqa=True)  # type: ignore[return-value]
