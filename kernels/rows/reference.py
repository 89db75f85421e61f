"""The definitions of the row-wise operators, in plain PyTorch, for any device; a compiler sees and fuses them."""

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.rows.checks import SPAN, NextNodes, TopSums, Vectors

ACTIVATIONS = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "silu": F.silu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "tanh": torch.tanh,
    "relu_squared": lambda x: F.relu(x).square(),
}
GATES = {"clamped_swiglu": lambda gate, up: ACTIVATIONS["quick_gelu"](gate.clamp(max=7)) * (up.clamp(-7, 7) + 1)}
LINES = 16  # see `top_k`: this many make reading and sorting cost least together


def rms_norm(x_NE: Tensor, weight_E: Tensor, eps: float) -> Tensor:
    """See the front for arguments."""
    if weight_E.dtype != x_NE.dtype:  # PyTorch's own would round before the weight
        return F.rms_norm(x_NE.float(), weight_E.shape, weight_E, eps).to(x_NE.dtype)
    return F.rms_norm(x_NE, weight_E.shape, weight_E, eps)


def layer_norm(x_NE: Tensor, weight_E: Tensor, bias_E: Tensor, eps: float) -> Tensor:
    """See the front for arguments."""
    return F.layer_norm(x_NE, weight_E.shape, weight_E, bias_E, eps)


def add_norm(
    x_NE: Tensor,
    addends: Sequence[Tensor],
    norm: Vectors | None,
    out_norm: Vectors | None = None,
    *,
    scale: float = 1.0,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """See the front for arguments."""
    left = [_normed(y_NE, out_norm, eps) for y_NE in addends]
    if scale != 1.0:
        left = [y_NE * scale for y_NE in left]
    if left:
        x_NE = x_NE + (left[0] if len(left) == 1 else left[0] + left[1])
    return x_NE, _normed(x_NE, norm, eps)


def _normed(x_NE: Tensor, vectors: Vectors | None, eps: float) -> Tensor:
    if vectors is None:
        return x_NE
    weight_E, bias_E = vectors
    return rms_norm(x_NE, weight_E, eps) if bias_E is None else layer_norm(x_NE, weight_E, bias_E, eps)


def rotary(x_THD: Tensor, cos_TR: Tensor, sin_TR: Tensor) -> Tensor:
    """See the front for arguments."""
    dims = cos_TR.shape[-1]
    head = x_THD[..., :dims]
    out = head * cos_TR.unsqueeze(-2)
    (first, second), (out_first, out_second) = head.chunk(2, -1), out.chunk(2, -1)
    sin = sin_TR[:, None, : dims // 2]
    out_first.addcmul_(second, sin, value=-1)
    out_second.addcmul_(first, sin)
    return out if dims == x_THD.shape[-1] else torch.cat((out, x_THD[..., dims:]), dim=-1)


def activation_mul(x_NM: Tensor, name: str) -> Tensor:
    """See the front for arguments."""
    gate, up = x_NM.chunk(2, -1)
    return GATES[name](gate, up) if name in GATES else ACTIVATIONS[name](gate) * up


def activation(x_NM: Tensor, name: str) -> Tensor:
    """See the front for arguments."""
    return ACTIVATIONS[name](x_NM)


def xielu(x_NM: Tensor, curve_4: Tensor) -> Tensor:
    """See the front for arguments."""
    exact_NM = x_NM if x_NM.dtype == torch.float64 else x_NM.float()
    above, below, slope, near = curve_4.to(exact_NM.dtype).unbind()
    left_NM = below * (torch.expm1(torch.minimum(exact_NM, near.clamp(max=0))) - exact_NM)
    return (torch.where(exact_NM > 0, above * exact_NM.square(), left_NM) + slope * exact_NM).to(x_NM.dtype)


def sparsify(x_NM: Tensor, factor: float) -> Tensor:
    """See the front for arguments."""
    gate, up = x_NM.chunk(2, -1)
    exact = gate if gate.dtype == torch.float64 else gate.float()
    variance, mean = torch.var_mean(exact, -1, correction=0, keepdim=True)
    return torch.cat((F.relu(exact - (mean + factor * variance.sqrt())).to(x_NM.dtype), up), -1)


def add_weighted(x_TNE: Tensor, more_TME: Tensor, weights_TF: Tensor) -> Tensor:
    """See the front for arguments."""
    return torch.baddbmm(x_TNE, weights_TF.unflatten(1, (x_TNE.shape[1], -1)), more_TME)


def sigmoid_mul(x_NM: Tensor, gate_NM: Tensor, softplus: bool = False) -> Tensor:
    """See the front for arguments."""
    gate_NM = F.softplus(gate_NM) if softplus else gate_NM.sigmoid()
    return x_NM * gate_NM.repeat_interleave(x_NM.shape[1] // max(1, gate_NM.shape[1]), 1)


def log_softmax(x_NV: Tensor, size: int) -> tuple[Tensor, Tensor, Tensor | None]:
    """See the front for arguments; without peaks."""
    x_NV = x_NV.float()
    finite_N = torch.isfinite(x_NV.sum(-1))  # a sum is finite only if its terms are
    x_NV = x_NV - x_NV.amax(-1, keepdim=True)
    # torch.log_softmax adds up a row one vector after the other: 4e-5 off in a vocabulary of 150,000 tokens.
    logp_NV = x_NV - x_NV.exp().sum(-1, keepdim=True).log()
    logp_NV[:, size:] = float("-inf")
    return logp_NV, finite_N, None


def next_nodes(
    numbers: Sequence[Tensor], wanted: Sequence[NextNodes], ancestry_TC: Tensor, vocab_size: int
) -> tuple[Tensor, Tensor, Tensor]:
    """See the front for arguments."""
    sums, tokens, words = [], [], []

    def there(values: Sequence[int], dtype: torch.dtype = torch.int64) -> Tensor:
        return torch.tensor(values, dtype=dtype).to(ancestry_TC.device, non_blocking=True)

    for x, each in zip(numbers, wanted, strict=True):
        k = len(x) // 2
        place_k = x[k : 2 * k].nan_to_num(0).clamp(0, len(each.parents) * vocab_size - 1).long()
        ended_k = torch.isin(place_k % vocab_size, there(sorted(each.ends)))
        chosen_n = ended_k.byte().sort(stable=True).indices[: each.width]
        parent_n = there(each.parents)[place_k[chosen_n] // vocab_size]
        sums.append(x[chosen_n].float())
        tokens.append(place_k[chosen_n] % vocab_size)
        words.append(ancestry_TC[parent_n] & there(each.live_C, torch.int32))
    return torch.cat(sums), torch.cat(tokens), torch.cat(words)


def top_sums_of_logits(x_NV: Tensor, size: int, wanted: Sequence[TopSums]) -> tuple[list[Tensor], list[bool]]:
    """See the front for arguments."""
    (logp_NV, finite_N, _), found, first = log_softmax(x_NV, size), [], 0
    for sums, k in wanted:
        sums_N = torch.as_tensor(sums, dtype=torch.float32, device=x_NV.device)
        sums_M = (logp_NV[first : first + len(sums)] + sums_N.unsqueeze(1)).view(-1)
        values_M, place_M = sums_M.sort(descending=True, stable=True)
        count = min(k, int((values_M > -math.inf).sum()))
        found.append(torch.stack([values_M[:count].double(), place_M[:count].double()]).cpu())
        first += len(sums)
    return found, finite_N.tolist()


def peaks(x_NV: Tensor) -> Tensor:
    """The largest of each block of a row; the last block may be a short one."""
    short = -x_NV.shape[1] % SPAN
    return F.pad(x_NV, (0, short), value=float("-inf")).view(len(x_NV), -1, SPAN).amax(-1)


def at_least(logp_NV: Tensor, least: float, k: int, peaks_NB: Tensor | None = None) -> Tensor:
    """See the front for arguments."""
    V = logp_NV.shape[1]
    place_NV = torch.where(logp_NV >= least, torch.arange(V, device=logp_NV.device), V)
    place_NK = place_NV.topk(k, largest=False).values
    found_NK = place_NK < V
    values_NK = logp_NV.gather(1, place_NK.clamp(max=V - 1))
    return torch.where(found_NK.unsqueeze(1), torch.stack([values_NK.double(), place_NK.double()], 1), math.nan)


def top_k(x_NV: Tensor, k: int) -> Tensor:
    """See the front for arguments; a row is read once and hardly sorted.

    Laid out in lines, one below the other, a row has its k largest in the k columns with the largest maxima, or among
    the few values that fill no line.
    """
    N, V = x_NV.shape
    width, rest = divmod(V, LINES)
    if k >= width:
        values_NK, place_NK = torch.topk(x_NV, k)
        return torch.stack([values_NK.double(), place_NK.double()], 1)
    filled_NV = x_NV[:, :-rest] if rest else x_NV
    maxima_NW = filled_NV.view(N, LINES, width).amax(1)
    _, column_NK = torch.topk(maxima_NW, k, sorted=False)
    place_NP = (column_NK.unsqueeze(1) + _line_starts(width, x_NV.device)).view(N, -1)
    if rest:
        place_NP = torch.cat([place_NP, torch.arange(V - rest, V, device=x_NV.device).expand(N, -1)], 1)
    values_NK, which_NK = torch.topk(x_NV.gather(1, place_NP), k)
    return torch.stack([values_NK.double(), place_NP.gather(1, which_NK).double()], 1)


@lru_cache
def _line_starts(width: int, device: torch.device) -> Tensor:
    """Where the lines of a row begin, as a column."""
    return torch.arange(0, LINES * width, width, device=device).unsqueeze(1)


def top_sums(logp_NV: Tensor, sums: Sequence[float] | Tensor, k: int, peaks_NB: Tensor | None = None) -> Tensor:
    """See the front for arguments."""
    N, V = logp_NV.shape
    sums_N = torch.as_tensor(sums, dtype=torch.float32).to(logp_NV.device, non_blocking=True)
    k = min(k, N * V)
    # The k best lie in the k blocks with the largest maxima, so most of the vocabulary is read once and never sorted.
    block = next((b for b in range(512, 15, -1) if V % b == 0), 0)
    if block and k < N * V // block:
        blocks_MB = logp_NV.view(-1, block)
        maxima_M = (blocks_MB.amax(-1).view(N, -1) + sums_N.unsqueeze(1)).view(-1)
        top, which_k = torch.topk(maxima_M, k + 1)
        which_k = which_k[:k]
        near = (blocks_MB[which_k] + sums_N[which_k // (V // block)].unsqueeze(1)).view(-1)
        values, place = torch.topk(near, min(k + 1, len(near)))
        flat = which_k[place // block] * block + place % block
        rival = torch.cat([top[k:], values[k:]]).max()
    else:
        values, flat = torch.topk((logp_NV + sums_N.unsqueeze(1)).view(-1), min(k + 1, N * V))
        rival = values[k] if len(values) > k else torch.full_like(values[0], float("-inf"))
    return torch.cat([values[:k].double(), flat[:k].double(), rival.double().view(1)])


def gumbel_argmax(logp_NV: Tensor, keys: Sequence[int]) -> Tensor:
    """See the front for arguments."""
    return (logp_NV + gumbels(keys, logp_NV.shape[1], logp_NV.device)).argmax(-1)


def window_max(tape_P: Tensor, start_RW: Tensor, sum_RW: Tensor, width: int) -> Tensor:
    """See the front for arguments."""
    return window_samples(tape_P, start_RW, sum_RW, width).amax(1)


def window_wins(tape_P: Tensor, start_RW: Tensor, sum_RW: Tensor, best_N: Tensor) -> Tensor:
    """See the front for arguments."""
    sample_RWN = window_samples(tape_P, start_RW, sum_RW, len(best_N))
    return ((sample_RWN >= best_N) & (sum_RW > -torch.inf).unsqueeze(2)).sum(2)


def window_samples(tape_P: Tensor, start_RW: Tensor, sum_RW: Tensor, width: int) -> Tensor:
    """All samples, float32 [R, W, N]."""
    windows = tape_P.as_strided((len(tape_P) - width + 1, width), (1, 1))
    return windows[start_RW.view(-1)].view(*start_RW.shape, width) + sum_RW.unsqueeze(2)


def gumbels(keys: Sequence[int], size: int, device: torch.device) -> Tensor:
    """Gumbel noise -log(-log(u)), float32 [N, size]: u is made of 32 uniform bits, out of the row's key and the token
    by integer arithmetic, the same on every device and for every size that includes the token."""
    token_V = torch.arange(size, dtype=torch.int32, device=device)
    key_N2 = torch.tensor([_signed(key) for key in keys], dtype=torch.int32).to(device, non_blocking=True)
    key_N21 = key_N2.view(-1, 2, 1)
    one_N1, two_N1 = key_N21.unbind(1)
    bits_NV = mix(mix(token_V ^ one_N1).add_(two_N1)).bitwise_xor_(-1 << 31)
    uniform_NV = bits_NV.double().add_((1 << 31) + 0.5).div_(1 << 32)
    return uniform_NV.log_().neg_().log_().neg_().float()


def mix(x: Tensor) -> Tensor:
    """A bijection of 32-bit integers (int32, two's complement) whose output bits each depend on all input bits: two
    multiply-xorshift rounds."""
    x = (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x).mul_(_signed(0x7FEB352D))
    x = (x >> 15).bitwise_and_(0x1FFFF).bitwise_xor_(x).mul_(_signed(0x846CA68B))
    return (x >> 16).bitwise_and_(0xFFFF).bitwise_xor_(x)


def _signed(x: int) -> int:
    """32 bits as two's complement."""
    return (x ^ 1 << 31) - (1 << 31)
