"""A decoder computes hidden rows from tokens, positions and a layout, and logits from hidden rows. A family is a
subclass.

Shape legend: T tokens of a pass, N asked rows, E width, P positions, D rotated dims, V vocabulary.
"""

import re
from collections.abc import Callable, Sequence
from collections.abc import Set as AbstractSet
from typing import ClassVar, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from kernels import same_bits
from kernels.layout import KVCache, TreeLayout
from kernels.low_rank import Adapters
from kernels.rows import activation
from kernels.rows.checks import TopSums
from kernels.stack import Angles, Matrix, Stack
from kernels.stack.calls import Call
from models.adapted_ends import AdaptedEnds
from models.adapters import Adapter, low_rank, matrices
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.checkpoint.weights import Weights
from models.config import Config
from models.errors import CheckpointError
from models.formats.floats import has_kernels
from models.formats.linear import Linear, is_small
from models.layer_inputs import InputMaker
from models.layers import Layer
from models.names import HEAD, SCORE, Names
from models.norms import Norm, PlainNorm, rounded
from models.reading import check_layers_alike
from models.rope import BUFFERS, RotaryEmbedding
from models.running import Registers, fused, run
from models.shape import ModelShape
from models.shared_blocks import uses_of_blocks
from models.streams import StreamEnds


class HeadDense(nn.Module):
    """A matrix, an activation and a norm, which make the head's inputs of hidden rows (`Config.head_dense`)."""

    def __init__(self, c: Config, names: Names, weights: Weights):
        super().__init__()
        self.matrix, self.activation = weights.linear(names.head_dense, bias=c.head_dense_bias), c.head_dense
        self.norm = Norm(c, weights, names.head_dense_norm)

    def forward(self, x_NE: Tensor) -> Tensor:
        """[N, E] -> the same."""
        return self.norm(activation(self.matrix(x_NE), self.activation, impl="torch"), "torch")


class Decoder(nn.Module):
    """A causal language model, or one with a scalar head.

    A family sets the class attributes and `read`.

    Attributes:
        architectures: the family's names of architectures in config.json.
        names: the names of the tensors.
        default_eos_token_ids: used if no file of the checkpoint gives end-of-sequence tokens.
        default_pad_token_id: used by a scalar head if config.json has no `pad_token_id`, as by transformers.
        ignored: tensors that a checkpoint may have and that are not read.
        has_mtp: whether checkpoints may hold a draft head, see `models.mtp`.
        uneven: `read` reads the fields of single layers (`per_layer_config`).
        base: the prefix of tensor names in a checkpoint of the whole model; absent if the model was saved without its
            head.
        config, shape: configuration and shape of this process's part of the model, see `models.sharding`.
        shard, part: the rank of this process among those that compute the model, and its part of the model.
        rotaries: the rotary tables, in the order of `Config.table`.
        before, after: the calls before the first layer, on a GPU, and after the last one.
        stack: all layers as one call, on a CPU; None if it lacks an operator.
        tail: the head, if it can join the call of `stack`.
        adapters: the adapters that requests choose from; adapter i has number i + 1 in a pass.
        inputs: computes per-layer embeddings; None: the model has none.
        streams: makes and joins several streams; None: there is one.
        dense: makes the head's inputs of hidden rows; None: they are these rows.
        ends: the adapters' changes to the embedding and the head.
        tapped: the layers before which passes copy the residual stream, see `tap`.
    """

    architectures: ClassVar[tuple[str, ...]]
    names: ClassVar[Names] = Names()
    default_eos_token_ids: ClassVar[frozenset[int]] = frozenset([2])
    default_pad_token_id: ClassVar[int | None] = None
    ignored: ClassVar[Sequence[re.Pattern[str]]] = BUFFERS
    has_mtp: ClassVar[bool] = False
    uneven: ClassVar[bool] = False
    base: ClassVar[str] = "model."

    @staticmethod
    def read(fields: Fields) -> Config:
        """Read and check a Hugging Face config. Raises CheckpointError naming the field."""
        raise NotImplementedError

    @classmethod
    def view(cls, checkpoint: Checkpoint) -> Checkpoint:
        """Return the checkpoint as the family reads it, if tensors determine options or not all of them are read."""
        return checkpoint

    @staticmethod
    def rates(c: Config) -> Tensor | None:
        """Return the angles of position 1, float32 [F], if the sines and then the cosines of positions times these are
        added to the embedding; None: they are not."""
        return None

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        quant: str = "none",
        reader: Callable[..., Weights] = Weights,
    ):
        """Load from a checkpoint; see `Weights` for the arguments.

        Args:
            reader: creates the reader of the weights.

        Raises:
            CheckpointError: wrong fields or tensors; it is raised before any tensor is read.
        """
        super().__init__()
        if not self.uneven:
            check_layers_alike(checkpoint.fields)
        c, names = self.read(checkpoint.fields), self.names
        if device.type != "cpu":
            _check_for_gpu(c, checkpoint)
        tied = {f"{HEAD}.weight": f"{names.embedding}.weight"} if c.tied and not c.scores else {}
        shapes = names.tensors(c)
        stored = checkpoint.check(shapes, ignore=self.ignored, tied=tied, base=self.base, kinds=names.kinds(c))
        weights = reader(checkpoint, stored, shapes, dtype, device, quant)
        self.config = c = weights.divide(c)
        self.shape, self.shard, self.part = ModelShape.of(c), weights.shard, weights.part
        self.embedding = weights.embedding(f"{names.embedding}.weight")
        self.embedding_scale = rounded(c.embedding_scale, dtype) if c.rounded_scale else c.embedding_scale
        own_norm = Norm(c, weights, names.embedding_norm) if names.embedding_norm else PlainNorm(c, weights, c.width)
        self.embedding_norm = own_norm if c.embedding_norm else None
        self.inputs = InputMaker(c, names, weights, c.layer_inputs) if c.layer_inputs else None
        self.streams = StreamEnds(c, names, weights, c.streams) if c.streams else None
        self.positions_PE = weights.vector(f"{names.positions}.weight") if names.positions else None
        rates_F = self.rates(c)
        self.rates_F = None if rates_F is None else rates_F.to(device)
        self.rotaries = [RotaryEmbedding(rope).to(device) for rope in c.tables()]
        projected = names.project if c.embedding_width else (None, None)
        self.project_in, self.project_out = (weights.linear(name) if name else None for name in projected)
        blocks = uses_of_blocks(c, names, weights, c.shared) if c.shared else {}
        self.layers = nn.ModuleList(Layer(c, names, weights, i, blocks.get(i)) for i in range(c.layers))
        self.norm = Norm(c, weights, names.norm, final=True) if c.final_norm else None
        self.dense = HeadDense(c, names, weights) if c.head_dense else None
        self.head = weights.head(SCORE) if c.scores else weights.head(HEAD, bias=c.head_bias)
        self.dtype, self.device, self.adapters = dtype, device, list[Adapter]()
        self.ends: AdaptedEnds | None = None
        self.tapped: Sequence[int] = ()
        joined = self.norm is None or self.streams is not None  # streams are normed after they are joined
        self.after = [] if joined else [Call("norm", "stream", "read", norm=self.norm)]
        self._join()
        self.stack = self._stack()
        plain = self.project_out is None and c.logit_divisor == 1.0 and c.logit_cap is None and not c.scores
        plain = plain and self.streams is None and self.dense is None
        self.tail: Matrix | None = getattr(self.head, "matrix", None) if plain and self.stack else None

    def forward(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        spans_T: Tensor,
        cache: KVCache,
        layout: TreeLayout,
        tapped_TNE: Tensor | None = None,
    ) -> Tensor:
        """Evaluate the T tokens of a pass and write their keys and values to the cache.

        Args:
            tokens_T, positions_T: int64; positions are less than `shape.max_positions` if they are learned.
            spans_T: int64, length of each token's sequence when it was evaluated (for length-dependent rotary kinds).
            tapped_TNE: filled with the stream before each layer of `tapped`; None: not needed.

        Returns:
            hidden rows [T, E], after the final norm.
        """
        x_TE = self._embedded(tokens_T, positions_T, layout)
        inputs_TF, streams_TNE = self._inputs(tokens_T, x_TE, layout), None
        if self.streams is not None:
            streams_TNE = self.streams.split(x_TE)
            x_TE = streams_TNE[:, self.streams.active].clone()  # which a stack overwrites
        if self.stack is not None and self.stack.takes(layout):
            more = tapped_TNE, inputs_TF, streams_TNE
            x_TE = self.stack(x_TE, self._angles(positions_T, spans_T), cache, layout, *more)
            return x_TE if streams_TNE is None else self._joined(streams_TNE, layout)
        tables = [rotary.cos_sin(positions_T, spans_T, x_TE.dtype) for rotary in self.rotaries]
        registers = Registers(x_TE, self.config, tables, cache, layout)
        registers["tapped"], registers["inputs"], registers["streams"] = tapped_TNE, inputs_TF, streams_TNE
        run(self.before if registers.together else (), registers)
        for layer in self.layers:
            layer(registers)
        run(() if registers.together else self.after, registers)
        if streams_TNE is not None:
            return self._joined(registers["streams"], layout)
        return registers["stream" if self.norm is None else "read"]

    @property
    def joins(self) -> bool:
        """Whether `top_sums` can evaluate passes in C++."""
        return self.tail is not None and self.stack is not None and self.stack.ready

    def top_sums(
        self,
        tokens_T: Tensor,
        positions_T: Tensor,
        spans_T: Tensor,
        cache: KVCache,
        layout: TreeLayout,
        asked: Sequence[int],
        size: int,
        wanted: Sequence[TopSums],
        tapped_TNE: Tensor | None = None,
    ) -> tuple[Tensor, list[Tensor], list[bool]]:
        """Run `forward` and compute the logits of some tokens and their top sums, in one call.

        Args:
            tokens_T, positions_T, spans_T, cache, layout, tapped_TNE: see `forward`.
            asked: these tokens, ascending.
            size, wanted: see `kernels.rows.top_sums_of_logits`.

        Returns:
            hidden rows, see `forward`; the results of `top_sums_of_logits`.
        """
        assert self.stack is not None and self.tail is not None
        x_TE = self._embedded(tokens_T, positions_T, layout)
        pass_ = (x_TE, self._angles(positions_T, spans_T), cache, layout)
        inputs_TF = self._inputs(tokens_T, x_TE, layout)
        return x_TE, *self.stack.top_sums(*pass_, self.tail, asked, size, wanted, tapped_TNE, inputs_TF)

    def _angles(self, positions_T: Tensor, spans_T: Tensor) -> list[Angles]:
        return [rotary.angles(positions_T, spans_T, self.dtype) for rotary in self.rotaries]

    def _inputs(self, tokens_T: Tensor, x_TE: Tensor, layout: TreeLayout) -> Tensor | None:
        """Return the per-layer embeddings for the rows that enter the first layer; None: the model has none."""
        return None if self.inputs is None else self.inputs(tokens_T, x_TE, layout.rows_impl)

    def _joined(self, streams_TNE: Tensor, layout: TreeLayout) -> Tensor:
        """The hidden rows of several streams."""
        assert self.streams is not None
        x_TE = self.streams.join(streams_TNE)
        return x_TE if self.norm is None else self.norm(x_TE, layout.rows_impl)

    def _embedded(self, tokens_T: Tensor, positions_T: Tensor, layout: TreeLayout) -> Tensor:
        """Return the rows that enter the first layer."""
        x_TE = self.embedding(tokens_T)
        if self.ends is not None and layout.adapters_T is not None:
            x_TE = self.ends.embed(x_TE, tokens_T, layout.adapters_T)
        if self.embedding_norm is not None:
            x_TE = self.embedding_norm(x_TE, layout.rows_impl)
        if self.embedding_scale != 1.0:
            x_TE = x_TE * self.embedding_scale
        if self.project_in is not None:
            x_TE = self.project_in(x_TE)
        if self.positions_PE is not None:
            x_TE = x_TE + F.embedding(positions_T + self.names.offset, self.positions_PE)
        if self.rates_F is not None:
            angles_TF = (positions_T + self.names.offset).float().unsqueeze(1) * self.rates_F
            waves_TE = F.pad(torch.cat([angles_TF.sin(), angles_TF.cos()], 1), (0, x_TE.shape[1] % 2))
            x_TE = x_TE + waves_TE.to(x_TE.dtype)
        return x_TE

    @property
    def adapted_heads(self) -> AbstractSet[int]:
        """The numbers of the adapters that change logits."""
        return frozenset() if self.ends is None else self.ends.heads

    def logits(self, hidden_NE: Tensor, head: Linear | None = None, adapters: Sequence[int] = ()) -> Tensor:
        """Compute next-token logits [N, V] (scores [N, 1] with a scalar head) of hidden rows, in the model's dtype.

        Args:
            head: some rows of the head, or this process's part of it, to compute only the logits of their tokens.
            adapters: the adapter number of each row, if one of them changes logits; not together with `head`.
        """
        c, rows_NE = self.config, self.outputs(hidden_NE)
        if self.dense is not None:
            rows_NE = self.dense(rows_NE)
        if adapters and self.ends is not None:
            logits_NV = self.ends.logits(rows_NE, adapters, self.head)
        else:
            logits_NV = (head or self.head)(rows_NE)
        if c.scores:
            return logits_NV
        if c.logit_divisor != 1.0:
            logits_NV = logits_NV / c.logit_divisor
        return logits_NV if c.logit_cap is None else (logits_NV / c.logit_cap).tanh_().mul_(c.logit_cap)

    def outputs(self, hidden_NE: Tensor) -> Tensor:
        """Return the head's input rows for hidden rows: Hugging Face's `last_hidden_state`."""
        return hidden_NE if self.project_out is None else self.project_out(hidden_NE)

    def adapt(self, adapters: Sequence[Adapter]) -> None:
        """Load adapters. `TreeLayout.adapters_T` chooses each token's adapter by number, from 1 on.

        Raises:
            CheckpointError: an adapter does not fit the model, or has values that are not finite.
        """
        c, names, device = self.config, self.names, self.device
        fitted, outs = [adapter.fitted(names, c, self.base) for adapter in adapters], matrices(names, c)
        for layer in cast(Sequence[Layer], self.layers):
            calls = []
            for call in layer.calls:
                calls.append(call)
                if call.code != "product":
                    continue
                matrix: Linear = call.matrix
                options = {"small": is_small(matrix, self.dtype), "packed": has_kernels(self.dtype, device)}
                order = self.part.qkv if call.target == "heads" else None
                each = [
                    low_rank(matrix.made_of, adapter, found, outs, self.dtype, device, order=order, **options)
                    for adapter, found in zip(adapters, fitted, strict=True)
                ]
                if any(each):
                    total = sum(outs[module][0] for module in matrix.made_of)
                    table = Adapters(total, outs[matrix.made_of[0]][1], each)
                    calls.append(Call("adapt", call.source, call.target, adapters=table))
            layer.calls = calls
        self.adapters = [*adapters]
        self.ends = AdaptedEnds(adapters, fitted, names, c, self.head, self.dtype, device)
        self._join()
        self.stack = self._stack()

    def tap(self, layers: Sequence[int]) -> None:
        """Make passes copy the residual stream before some layers, on a CPU, for a reader such as a draft head.

        Args:
            layers: ascending; `config.layers` means the stream after the last layer, before the norm.
        """
        self.tapped = tuple(layers)
        calls = {layer: Call("tap", "stream", table=number) for number, layer in enumerate(layers)}
        for index, layer in enumerate(cast(Sequence[Layer], self.layers)):
            layer.calls = [*([calls[index]] if index in calls else []), *layer.calls]
        if (last := calls.get(self.config.layers)) is not None:
            self.after = [last, *self.after]
        self._join()
        self.stack = self._stack()

    def _join(self) -> None:
        """Give each layer its calls for a GPU, which fuse the first norm of a layer into the end of the previous
        layer."""
        layers = cast(Sequence[Layer], self.layers)
        parts = [list(layer.calls) for layer in layers]
        begins = [part[:1] if part and part[0].code == "norm" else [] for part in parts]
        self.before = begins[0]
        for layer, part, begin, end in zip(layers, parts, begins, [*begins[1:], self.after], strict=True):
            layer.together = fused([*part[len(begin) :], *end])

    def _stack(self) -> Stack | None:
        layers = cast(Sequence[Layer], self.layers)
        calls = [call for layer in layers for call in layer.calls]
        if any(call.matrix is not None and call.matrix.matrix is None for call in calls):
            return None
        if any(call.mixture is not None and call.mixture.matrices is None for call in calls):
            return None
        if any(call.latent is not None and not call.latent.ready for call in calls):
            return None
        after = [call._replace(target="stream") for call in self.after]
        c = self.config
        return Stack([*calls, *after], dtype=self.dtype, width=c.width, streams=c.streams.count if c.streams else 0)


def _check_for_gpu(c: Config, checkpoint: Checkpoint) -> None:
    """Raise CheckpointError for what only a CPU does."""
    if c.experts is not None and checkpoint.packing is not None:
        raise CheckpointError(
            "mixtures of experts that were packed ahead run on a CPU only",
            where=str(checkpoint.folder),
            remedy="Use --device cpu, or give the checkpoint that they were packed from.",
        )
    if not same_bits.asked():
        return
    what = "multi-head latent attention" if c.latent is not None else ""
    if max(size for _, size in map(c.kv_size, range(c.layers))) > same_bits.MOST_HEAD:
        what = f"attention of heads of more than {same_bits.MOST_HEAD} elements"
    if c.streams is not None:
        what = "a model of several residual streams"
    if what:
        raise CheckpointError(
            f"{what} does not give the same bits in any batch on a GPU",
            where=str(checkpoint.folder),
            remedy=f"Do not set {same_bits.NAME}, or use --device cpu.",
        )
