"""How tokens choose their experts: the definition, in PyTorch.

Shape legend: T tokens, X experts, K chosen ones of a token.
"""

from typing import NamedTuple

import torch
from torch import Tensor

# C++ and Triton number them in this order.
SCORES = "softmax", "softmax_of_chosen", "sigmoid", "sparsemixer", "sigmoid_of_chosen"


class Routing(NamedTuple):
    """The rules by which a token chooses experts and weighs what they compute.

    Args:
        chosen: experts of a token.
        scores: the weight of a chosen expert: its part of the softmax of all logits, or of those of the chosen experts
            alone; the sigmoid of its logit; "sparsemixer": its part of the softmax of the logits that are near to the
            largest, for the second expert without the first (Liu et al., 2024). "sigmoid_of_chosen": logits choose, not
            their sigmoids, many of which may round to 1.
        normalized: weights are divided by their sum plus `epsilon`.
        scale: a factor of the weights.
        jitter: sparsemixer's limit for logits that are near.
        groups, kept: experts lie in groups of one size; a token chooses from the `kept` best groups.
        best: a group is scored by the sum of its `best` largest scores.
        on_inputs: weights multiply what experts read, rounded to its dtype, and not what they compute (Llama 4).
    """

    chosen: int
    scores: str = "softmax"
    normalized: bool = False
    epsilon: float = 0.0
    scale: float = 1.0
    jitter: float = 0.0
    groups: int = 1
    kept: int = 1
    best: int = 1
    on_inputs: bool = False


def choose(
    logits_TX: Tensor, routing: Routing, bias_X: Tensor | None = None, factors_X: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Choose the experts of each token, the likeliest first; among equals the one with the lower number comes first.

    Args:
        logits_TX: the router's outputs, floats of any dtype.
        bias_X: float32, added to sigmoids, to parts of a softmax, or to logits of which the sigmoids are weights, when
            experts and groups are chosen, but not to the weights; None: no bias.
        factors_X: float32, factors of the weights of chosen experts; None: 1. Not for sparsemixer.

    Returns:
        their numbers [T, K], int64, and their weights [T, K], float32 (float64 for such logits).
    """
    logits_TX = logits_TX.to(torch.promote_types(logits_TX.dtype, torch.float32))
    if routing.scores == "sparsemixer":
        return _sparsemixer(logits_TX, routing.jitter)
    scores_TX = logits_TX.sigmoid() if routing.scores == "sigmoid" else logits_TX
    if routing.scores == "softmax" and bias_X is not None:
        scores_TX = logits_TX.softmax(-1)
    keys_TX = scores_TX if bias_X is None else scores_TX + bias_X
    if routing.groups > 1:
        keys_TX = _in_groups(keys_TX, routing)
    order_TX = keys_TX.argsort(dim=-1, descending=True, stable=True)
    experts_TK = order_TX[:, : routing.chosen]
    if routing.scores == "softmax":
        scores_TX = logits_TX.softmax(-1)
    weights_TK = scores_TX.gather(1, experts_TK)
    if routing.scores == "softmax_of_chosen":
        weights_TK = weights_TK.softmax(-1)
    elif routing.scores == "sigmoid_of_chosen":
        weights_TK = weights_TK.sigmoid()
    if routing.normalized:
        weights_TK = weights_TK / (weights_TK.sum(-1, keepdim=True) + routing.epsilon)
    factors_TK = 1.0 if factors_X is None else factors_X[experts_TK]
    return experts_TK, weights_TK * (routing.scale * factors_TK)


def _in_groups(keys_TX: Tensor, routing: Routing) -> Tensor:
    """The keys of the best groups; -inf in the others, the higher number of equals (DeepSeek-V3, 2024, 2.1.2)."""
    keys_TGX = keys_TX.unflatten(-1, (routing.groups, -1))
    best_TG = keys_TGX.topk(routing.best, -1).values.sum(-1)
    others_TG = best_TG.argsort(dim=-1, descending=True, stable=True)[:, routing.kept :]
    return keys_TGX.scatter(1, others_TG.unsqueeze(-1).expand(-1, -1, keys_TGX.shape[-1]), float("-inf")).flatten(1)


def _sparsemixer(logits_TX: Tensor, jitter: float) -> tuple[Tensor, Tensor]:
    """Two experts of each token. Nearness is relative to the larger magnitude."""
    left_TX, experts, weights = logits_TX, [], []
    for _ in range(2):
        most_T1 = left_TX.amax(-1, keepdim=True)
        first_T1 = (left_TX == most_T1).to(torch.uint8).argmax(-1, keepdim=True)
        far_TX = (most_T1 - logits_TX) / logits_TX.abs().maximum(most_T1) > 2 * jitter
        experts.append(first_T1)
        weights.append(left_TX.masked_fill(far_TX, float("-inf")).softmax(-1).gather(1, first_T1))
        left_TX = left_TX.scatter(1, first_T1, float("-inf"))
    return torch.cat(experts, 1), torch.cat(weights, 1)
