"""Per-layer embeddings, see `Config.layer_inputs`: computes them, and adds their contribution to the residual stream.

Shape legend: T tokens of a pass, E width, L layers, P width of a layer's input.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from kernels.stack.calls import Call
from models.checkpoint.weights import Weights
from models.config import Config, LayerInputs
from models.names import Names
from models.norms import Norm, rounded


class InputMaker(nn.Module):
    """Makes the inputs of all layers from tokens and their embeddings."""

    def __init__(self, c: Config, names: Names, weights: Weights, inputs: LayerInputs):
        super().__init__()
        self.width, self.made_scale, self.sum_scale = inputs.width, inputs.made_scale, inputs.sum_scale
        self.scale = rounded(inputs.scale, weights.dtype)
        self.known = inputs.vocab_size if inputs.vocab_size < c.vocab_size else None
        self.table = weights.embedding(f"{names.input_table}.weight")
        self.matrix = weights.linear(names.input_matrix)
        self.norm = Norm(c, weights, names.input_norm)

    def forward(self, tokens_T: Tensor, x_TE: Tensor, impl: str) -> Tensor:
        """Map tokens, int64 [T], and the rows that enter the first layer to [T, L P]; `impl` is the pass's."""
        made_TLP = (self.matrix(x_TE) * self.made_scale).unflatten(1, (-1, self.width))
        if self.known is not None:
            tokens_T = torch.where(tokens_T < self.known, tokens_T, 0)
        rows_TF = self.table(tokens_T).to(x_TE.dtype) * self.scale
        return (self.norm(made_TLP, impl).flatten(1) + rows_TF) * self.sum_scale


class LayerInput(nn.Module):
    """Projects the stream through two matrices and adds the result to it; between them the product is activated and
    multiplied by the layer's input. With several streams (`Config.streams`), the one in "read" is projected, and the
    result is added to all but the first."""

    def __init__(self, c: Config, names: Names, weights: Weights, index: int):
        super().__init__()
        layer, self.index, self.activation = names.layer.format(index), index, c.activation
        self.gate, self.out = weights.linear(layer + names.input_gate), weights.linear(layer + names.input_out)
        self.norm = Norm(c, weights, layer + names.input_out_norm)
        self.streams = c.streams

    def calls(self) -> Iterator[Call]:
        """Yield the calls from the stream, or "read", to the stream."""
        yield Call("product", "read" if self.streams else "stream", "narrow", matrix=self.gate)
        yield Call("inject", "narrow", "narrow", "inputs", table=self.index, function=self.activation)
        yield Call("product", "narrow", "out", matrix=self.out)
        yield Call("norm", "out", "out", norm=self.norm)
        if self.streams is None:
            yield Call("add", "out", "stream")
        else:
            yield Call("spread", "out", "stream", table=self.streams.active)
