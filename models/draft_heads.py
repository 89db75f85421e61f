"""Draft heads: a single decoder layer that guesses a model's next tokens from rows that the model computed.

A head reads a token together with the model's row of the token before it, and predicts the next token. If that
row is not computed yet because the token is itself a guess, the head's own row stands in.

EAGLE-3 (Li et al., 2025, arXiv 2503.01840, section 3): the row combines the hidden states before three of the model's
layers.

Shape legend: T tokens of a pass, N asked rows, E width, R tapped rows of a token, V tokens of the head's vocabulary.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from kernels.layout import KVCache, TreeLayout
from kernels.stack.calls import Call
from models.checkpoint.fields import Fields
from models.checkpoint.headers import Checkpoint
from models.checkpoint.weights import Weights
from models.config import Config
from models.decoder import Decoder
from models.errors import CheckpointError, show
from models.layers import MLP, Attention
from models.names import HEAD, Names
from models.norms import Norm
from models.quantized.parts import LINEAR
from models.reading import rotary
from models.rope import BUFFERS, RotaryEmbedding
from models.running import Registers, run
from models.shape import ModelShape

EMBEDDING = "embed_tokens"
MAPS = "d2t", "t2d"  # tensors that map the tokens of a head with a smaller vocabulary to the model's tokens


class DraftHead(nn.Module):
    """A decoder layer that reads tokens and rows of a model, and the logits after it.

    A subclass makes the layer and defines `_enter`.

    Args:
        c: the layer's configuration.
        weights: the head's weights.

    Attributes:
        taps: whether it reads rows that the model taps (`Decoder.tap`) instead of hidden rows.
        tokens_V: the model's token of each logit, int64; None: logit i is that of token i.
        embedding: the token embedding, the model's if the head has none.
    """

    taps: ClassVar[bool] = False
    default_eos_token_ids: ClassVar[frozenset[int]] = frozenset()
    default_pad_token_id: ClassVar[int | None] = None
    calls: Sequence[Call]
    tokens_V: Tensor | None = None
    embedding: nn.Module

    def __init__(self, c: Config, weights: Weights):
        super().__init__()
        folder = weights.checkpoint.folder
        if weights.device.type != "cpu":
            raise CheckpointError("draft heads run on a CPU only", where=show(folder), remedy="Use --device cpu.")
        if weights.shard.size > 1:
            what = "draft heads cannot be divided among processes"
            raise CheckpointError(what, where=show(folder), remedy="Start one process.")
        self.config, self.shape, self.where = c, ModelShape.of(c), show(folder)
        self.dtype, self.device, self.shard = weights.dtype, weights.device, weights.shard
        self.rotaries = [RotaryEmbedding(rope).to(weights.device) for rope in c.tables()]

    def attach(self, target: Decoder) -> None:
        """Become the head of a model. Raises CheckpointError if the head was made for another model."""
        raise NotImplementedError

    def taken(self, rows: Tensor) -> Tensor:
        """Return the head's input, a copy [T, E], from a model's tapped rows [T, R, E] or hidden rows [T, E]."""
        raise NotImplementedError

    def forward(
        self,
        given_TE: Tensor,
        tokens_T: Tensor,
        positions_T: Tensor,
        spans_T: Tensor,
        cache: KVCache,
        layout: TreeLayout,
    ) -> Tensor:
        """Evaluate the tokens of a pass; their keys and values go into the cache.

        Args:
            given_TE: for each token the row of the token before it: the model's, see `taken`, or the head's own.
            tokens_T, positions_T, spans_T, cache, layout: see `Decoder.forward`.

        Returns:
            the head's rows [T, E].
        """
        tables = [rotary.cos_sin(positions_T, spans_T, self.dtype) for rotary in self.rotaries]
        registers = Registers(given_TE, self.config, tables, cache, layout)
        self._enter(self.embedding(tokens_T).to(self.dtype), registers)
        run(self.calls, registers)
        return registers["stream"]

    def _enter(self, embedded_TE: Tensor, registers: Registers) -> None:
        """Make the layer's inputs from the embeddings of tokens and the rows in "stream"."""
        raise NotImplementedError

    def logits(self, hidden_NE: Tensor, impl: str = "torch") -> Tensor:
        """Compute logits [N, V] of the next tokens from the head's rows; `impl` is that of the pass's rows."""
        raise NotImplementedError

    def misfit(self, what: str, target: str) -> CheckpointError:
        """Return the error for a head of another model."""
        what = f"the draft head does not fit the model: it has {what}, the model {target}"
        return CheckpointError(what, where=self.where, remedy="Give the head that was trained for this model.")


class Eagle3(DraftHead):
    """EAGLE-3: the layer reads the normed embedding and the normed row side by side, and adds its output to the row.

    Checkpoints have the layout of the paper's authors (as SpecForge's), or that of "speculators", whose config nests
    the layer's in `transformer_layer_config`. Some norm the three rows first, together (`norm_before_fc`) or each
    (`fc_norm`), or give their own rows back normed (`norm_output`).
    """

    architectures = ("LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM", "Eagle3Speculator", "Eagle3DraftModel")
    taps = True
    READS = 3  # number of the model's rows that it reads

    def __init__(
        self,
        checkpoint: Checkpoint,
        dtype: torch.dtype,
        device: torch.device,
        quant: str = "none",
        reader: Callable[..., Weights] = Weights,
    ):
        """Load from a checkpoint; see `Weights` for the arguments.

        Raises:
            CheckpointError: wrong fields or tensors.
        """
        outer = checkpoint.fields
        inner = outer.sub("transformer_layer_config")
        fields = inner or outer
        c = _layer(fields)
        if c.layers != 1:
            raise fields.error("num_hidden_layers", "1, as heads of several layers are not supported")
        known = outer.int("draft_vocab_size", default=c.vocab_size)
        target_width = outer.int("target_hidden_size", default=c.width)
        names = replace(Names(), layer=_layer_name(checkpoint))
        shapes = {name: shape for name, shape in names.tensors(c).items() if name.startswith(names.layer)}
        for name in names.qkv:
            shapes[f"{names.layer}{name}.weight"] = shapes[f"{names.layer}{name}.weight"][0], 2 * c.width
        shapes |= {f"{names.layer}hidden_norm.weight": (c.width,), "norm.weight": (c.width,)}
        shapes |= {"fc.weight": (c.width, self.READS * target_width), f"{HEAD}.weight": (known, c.width)}
        together, each = (outer.bool(name, default=False) for name in ("norm_before_fc", "fc_norm"))
        normed = {"input_norm": self.READS * target_width} if together else {}
        normed |= {f"fc_norm.{i}": target_width for i in range(self.READS)} if each else {}
        if together and each:
            raise outer.error("fc_norm", "false, as norm_before_fc is true")
        shapes |= {f"{name}.weight": (size,) for name, size in normed.items()}
        if (embedding := f"{EMBEDDING}.weight") in checkpoint.tensors:
            shapes[embedding] = c.vocab_size, c.width
        kinds = {name: LINEAR for name, shape in shapes.items() if len(shape) == 2 and name != embedding}
        stored = checkpoint.check(shapes, ignore=[*BUFFERS, *map(re.compile, MAPS)], kinds=kinds)
        weights = reader(checkpoint, stored, shapes, dtype, device, quant)
        super().__init__(weights.divide(c), weights)
        self.target_width, self.layers_read = target_width, _layers_read(outer)
        self.output_normed = outer.bool("norm_output", default=False)
        self.residual_normed = outer.bool("norm_before_residual", default=inner is not None)
        self.tokens_V = _known_tokens(checkpoint, known, c.vocab_size)
        self.embedding = weights.embedding(embedding) if embedding in shapes else nn.Identity()
        self.owns_embedding = embedding in shapes
        self.fc = weights.linear("fc")
        self.given_norms = nn.ModuleList(Norm(c, weights, name) for name in normed)
        self.embedding_norm = Norm(c, weights, names.layer + names.attention_norm)
        self.row_norm = Norm(c, weights, f"{names.layer}hidden_norm")
        self.mlp_norm = Norm(c, weights, names.layer + names.mlp_norm)
        self.attention, self.mlp = Attention(c, names, weights, 0), MLP(c, names, weights, 0)
        self.norm, self.head = Norm(c, weights, "norm"), weights.head(HEAD)
        self.calls = [
            *self.attention.calls("read"),
            Call("add", "out", "stream"),
            Call("norm", "stream", "read", norm=self.mlp_norm),
            *self.mlp.calls("read"),
            Call("add", "read", "stream"),
            *([Call("norm", "stream", "stream", norm=self.norm)] if self.output_normed else []),
        ]

    def attach(self, target: Decoder) -> None:
        """See `DraftHead`; from now on the model taps the rows that the head reads."""
        c, own = target.config, self.config
        if own.vocab_size != c.vocab_size:
            raise self.misfit(f"a vocabulary of {own.vocab_size} tokens", f"one of {c.vocab_size}")
        if self.target_width != c.width:
            raise self.misfit(f"rows of width {self.target_width}", f"of {c.width}")
        if not self.owns_embedding:
            if own.width != (width := c.embedding_width or c.width):
                raise self.misfit(f"no embedding and a width of {own.width}", f"an embedding of {width}")
            self.embedding = target.embedding
        read = self.layers_read or (2, c.layers // 2, c.layers - 3)
        if not 0 <= read[0] < read[1] < read[2] <= c.layers:
            where = "the layers to read by default are" if not self.layers_read else "its config names the layers"
            raise CheckpointError(
                f"the draft head reads the streams before three layers; {where} {', '.join(map(str, read))}, "
                f"and the model has {c.layers}",
                where=self.where,
                remedy="Name three of them, ascending, in its config: eagle_aux_hidden_state_layer_ids.",
            )
        target.tap(read)

    def taken(self, rows: Tensor) -> Tensor:
        """Compute the paper's g, one row from three."""
        parts = rows.flatten(1).to(self.dtype).tensor_split(max(1, len(self.given_norms)), 1)
        if self.given_norms:
            parts = [norm(part, "torch") for norm, part in zip(self.given_norms, parts, strict=True)]
        return self.fc(torch.cat([*parts], 1))

    def _enter(self, embedded_TE: Tensor, registers: Registers) -> None:
        normed_TE = self.row_norm(registers["stream"], registers.impl)
        if self.residual_normed:
            registers["stream"] = normed_TE
        registers["read"] = torch.cat([self.embedding_norm(embedded_TE, registers.impl), normed_TE], 1)

    def logits(self, hidden_NE: Tensor, impl: str = "torch") -> Tensor:
        return self.head(hidden_NE if self.output_normed else self.norm(hidden_NE, impl))


def _layer(fields: Fields) -> Config:
    """Return the configuration of the layer, which is one of Llama or of Qwen3."""
    return Config(
        **rotary(fields, positions=2048),
        head_norms="each" if fields.str("model_type", None) == "qwen3" else "",
        norm_eps=fields.float("rms_norm_eps", default=1e-6, low=0.0),
        attention_bias=fields.bool("attention_bias", default=False),
        mlp_bias=fields.bool("mlp_bias", default=False),
    )


def _layer_name(checkpoint: Checkpoint) -> str:
    """Return the prefix of the names of the layer's tensors."""
    return "layers.0." if any(name.startswith("layers.0.") for name in checkpoint.tensors) else "midlayer."


def _layers_read(outer: Fields) -> tuple[int, ...]:
    """Return the layers whose input streams the head reads, ascending; () means the layers of the paper's code.

    A field at the config's top level numbers layers as the default does. Inside `eagle_config` the numbers are those of
    the layers that write the streams, as in SGLang and TensorRT-LLM.
    """
    name = "eagle_aux_hidden_state_layer_ids"
    for fields, shift in ((outer, 0), (outer.sub("eagle_config"), 1)):
        if fields is None or (given := fields.config.get(name)) is None:
            continue
        if not isinstance(given, list) or len(given) != Eagle3.READS or any(type(layer) is not int for layer in given):
            raise fields.error(name, f"{Eagle3.READS} numbers of layers")
        return tuple(sorted(layer + shift for layer in given))
    return ()


def _known_tokens(checkpoint: Checkpoint, known: int, vocab_size: int) -> Tensor | None:
    """Return the model's token of each of the head's, j + d2t[j]; None: the head has all. Raises CheckpointError."""
    name, where = MAPS[0], show(checkpoint.folder)
    if (info := checkpoint.tensors.get(name)) is None:
        if known == vocab_size:
            return None
        what = f"the draft head knows {known} of {vocab_size} tokens, and no tensor d2t says which"
        raise CheckpointError(what, where=where, remedy="Download it again with all its files.")
    if info.shape != (known,) or info.dtype.is_floating_point or info.dtype == torch.bool:
        what = f"d2t: expected {[known]} of int64, got {[*info.shape]} of {str(info.dtype)[6:]}"
        raise CheckpointError(what, where=where, remedy="Check that config.json and the weights belong together.")
    tokens_V = torch.arange(known) + checkpoint.read([name])[name].long()
    if not 0 <= int(tokens_V.min()) <= int(tokens_V.max()) < vocab_size or len(tokens_V.unique()) < known:
        what = f"d2t: expected offsets to {known} different tokens below {vocab_size}"
        raise CheckpointError(what, where=where, remedy="Check that config.json and the weights belong together.")
    return tokens_V


HEADS: dict[str, Any] = dict.fromkeys(Eagle3.architectures, Eagle3)
