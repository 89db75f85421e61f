"""Several residual streams, see `Config.streams`: computed from the embedding, changed by each layer, joined after the
last. LAuReL, a learned residual in parallel with attention.

Shape legend: T tokens of a pass, N streams, E width.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kernels.stack.calls import Call
from models.checkpoint.weights import Weights
from models.config import Config, Streams
from models.names import Names
from models.norms import Norm

LEAST_SQUARE = 1e-5  # lower bound on the mean of squares of a new row


class StreamEnds(nn.Module):
    """The streams before the first layer and after the last. Every matrix computes the rows of another stream, which
    are scaled to the magnitude of the first stream's."""

    def __init__(self, c: Config, names: Names, weights: Weights, streams: Streams):
        super().__init__()
        self.active = streams.active
        self.into = weights.linear(*names.streams_of(c, names.streams_in))
        self.out_of = nn.ModuleList(weights.linear(name) for name in names.streams_of(c, names.streams_out))  # type: ignore[arg-type]

    def split(self, x_TE: Tensor) -> Tensor:
        """The rows that enter the first layer -> [T, N, E]."""
        others_TNE = self.into(x_TE).unflatten(1, (-1, x_TE.shape[1]))
        return torch.cat((x_TE.unsqueeze(1), _as_large(others_TNE, x_TE)), 1)

    def join(self, streams_TNE: Tensor) -> Tensor:
        """[T, N, E] -> [T, E], before the last norm."""
        first_TE, *others = (x_TE.contiguous() for x_TE in streams_TNE.unbind(1))
        made_TNE = torch.stack([matrix(x_TE) for matrix, x_TE in zip(self.out_of, others, strict=True)], 1)
        return torch.cat((first_TE.unsqueeze(1), _as_large(made_TNE, first_TE)), 1).mean(1)


def _as_large(x_TNE: Tensor, like_TE: Tensor) -> Tensor:
    """Scale rows to the root mean square of others."""
    wanted_T11 = like_TE.float().square().mean(-1).sqrt()[:, None, None]
    found_TN1 = x_TNE.float().square().mean(-1, keepdim=True).clamp(min=LEAST_SQUARE).sqrt()
    return (x_TNE * (wanted_T11 / found_TN1)).to(x_TNE.dtype)


class StreamFactors(nn.Module):
    """A vector [E], `weight`, that rows are multiplied by."""

    bias = None

    def __init__(self, weight: Tensor):
        super().__init__()
        self.weight = weight


class StreamUpdates(nn.Module):
    """A layer's prediction and correction of streams, by weights of each token: of a norm of its active row, by a
    matrix, a hyperbolic tangent and another matrix. These are small, and stay as exact as the checkpoint has them."""

    def __init__(self, c: Config, names: Names, weights: Weights, streams: Streams, index: int):
        super().__init__()
        layer, self.active, self.scale = names.layer.format(index), streams.active, 1 / c.width
        self.norm = Norm(c, weights, layer + names.stream_norm)
        each = names.stream_router, names.predict, names.correct
        self.router, self.predicted, self.corrected = (weights.linear(layer + name, exact=True) for name in each)
        self.corrects = "read" if c.layer_inputs else "stream"
        self.factors = StreamFactors(weights.vector(layer + names.stream_scale)) if streams.scaled else None

    def predict(self) -> Iterator[Call]:
        """The calls from the stream, the active one, to its prediction there."""
        yield from self._weights()
        yield Call("product", "low", "weights", matrix=self.predicted)
        yield Call("predict", "weights", "stream", table=self.active)

    def correct(self) -> Iterator[Call]:
        """The calls from the stream that the layer computed to the corrected one: where per-layer embeddings follow,
        which weigh it, times a vector in "read"."""
        yield from self._weights()
        yield Call("product", "low", "weights", matrix=self.corrected)
        yield Call("correct", "weights", self.corrects, norm=self.factors, table=self.active)

    def _weights(self) -> Iterator[Call]:
        yield Call("norm", "stream", "out", norm=self.norm)
        yield Call("scale", "out", "out", scale=self.scale)
        yield Call("product", "out", "low", matrix=self.router)
        yield Call("activate", "low", "low", function="tanh")


class Laurel(nn.Module):
    """A learned residual: attention's input, plus the norm of its product with two low-rank matrices."""

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        layer = names.layer.format(index)
        self.left, self.right = (weights.linear(layer + name) for name in names.laurel)
        self.norm = Norm(c, weights, layer + names.laurel_norm)

    def calls(self, source: str) -> Iterator[Call]:
        """Yield the calls that add it to the stream, from the register `source`."""
        yield Call("product", source, "low", matrix=self.left)
        yield Call("product", "low", "out", matrix=self.right)
        yield Call("add", source, "stream")
        yield Call("norm", "out", "out", norm=self.norm)
        yield Call("add", "out", "stream")
