"""nanochat (Karpathy 2025): norms without weights, also of the embedding; heads that are rotated backwards."""

from dataclasses import replace

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.gemma import cap
from models.names import Names
from models.reading import rotary


class NanoChat(Decoder):
    """Norms of heads after the rotation, MLPs with squared ReLU, capped logits."""

    architectures = ("NanoChatForCausalLM",)
    names = Names(up=("mlp.fc1",), down="mlp.fc2")
    default_eos_token_ids = frozenset([1])

    @staticmethod
    def read(fields: Fields) -> Config:
        options = rotary(fields, positions=2048, activation="relu2", inner=8192, eps=1e-6, bias=False)
        options["rope"] = replace(options["rope"], backwards=True)
        return Config(
            affine=False,
            embedding_norm=True,
            head_norms="each",
            norms_last=True,
            gated=False,
            logit_cap=cap(fields, "final_logit_softcapping", 15.0),
            **options,
        )
