"""The draft head in the checkpoints of Qwen3-Next and Qwen3.5, `mtp.*`: a layer with attention.

It is a multi-token prediction module (DeepSeek-AI, 2024, arXiv 2412.19437, section 2.2): a matrix combines the normed
embedding of a token and the normed hidden row that the model computed for the previous token; the module's output,
after its norm, goes to the model's head.
"""

import re
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from kernels.stack.calls import Call
from models.checkpoint.headers import Checkpoint
from models.checkpoint.weights import Weights
from models.config import Config
from models.decoder import Decoder
from models.draft_heads import DraftHead
from models.errors import CheckpointError, show
from models.layers import Layer
from models.norms import Norm
from models.quantized.parts import LINEAR
from models.running import Registers

PREFIX = "mtp."


class MTP(DraftHead):
    """The draft head for the model of the same checkpoint.

    Args:
        checkpoint: the model's checkpoint.
        family: the model's family; the head has its layer with attention.
        dtype, device, quant, reader: see `Weights`.

    Raises:
        CheckpointError: the checkpoint has no such head, or lacks some of its tensors.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        family: type[Decoder],
        dtype: torch.dtype,
        device: torch.device,
        quant: str = "none",
        reader: Callable[..., Weights] = Weights,
    ):
        if not family.has_mtp or not any(name.startswith(PREFIX) for name in checkpoint.tensors):
            raise CheckpointError(
                "the checkpoint has no draft head of its own (mtp.*)",
                where=show(checkpoint.folder),
                remedy="Leave out --drafts mtp; safetensors of Qwen3-Next and Qwen3.5 have one.",
            )
        c, names = _layer(family.read(checkpoint.fields)), replace(family.names, layer=f"{PREFIX}layers.{{}}.")
        shapes = {name: shape for name, shape in names.tensors(c).items() if name.startswith(PREFIX)}
        shapes[f"{PREFIX}fc.weight"] = c.width, 2 * c.width
        norms = [f"{PREFIX}{name}" for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")]
        shapes |= {f"{norm}.weight": (c.width,) for norm in norms}
        kinds = {name: LINEAR for name, shape in shapes.items() if len(shape) == 2}
        stored = checkpoint.check(shapes, ignore=[re.compile(rf"(?!{re.escape(PREFIX)}).*")], kinds=kinds)
        weights = reader(checkpoint, stored, shapes, dtype, device, quant)
        super().__init__(weights.divide(c), weights)
        self.fc, self.layer = weights.linear(f"{PREFIX}fc"), Layer(c, names, weights, 0)
        self.embedding_norm, self.row_norm, self.norm = (Norm(c, weights, norm) for norm in norms)
        self.calls = [*self.layer.calls, Call("norm", "stream", "stream", norm=self.norm)]

    def attach(self, target: Decoder) -> None:
        """See `DraftHead`; embedding and head are the model's."""
        self.embedding, self._logits = target.embedding, target.logits

    def taken(self, rows: Tensor) -> Tensor:
        return rows.to(self.dtype, copy=True)

    def logits(self, hidden_NE: Tensor, impl: str = "torch") -> Tensor:
        return self._logits(hidden_NE)

    def _enter(self, embedded_TE: Tensor, registers: Registers) -> None:
        impl = registers.impl
        normed = self.embedding_norm(embedded_TE, impl), self.row_norm(registers["stream"], impl)
        registers["stream"] = self.fc(torch.cat(normed, 1))


def _layer(c: Config) -> Config:
    """Return the configuration of a decoder of one layer with attention, and with experts if the model has any."""
    mixed = None if c.experts is None else replace(c.experts, layers=(True,))
    return replace(c, layers=1, recurrent=None, experts=mixed)
