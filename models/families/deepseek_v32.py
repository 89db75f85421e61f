"""DeepSeek-V3.2 (DeepSeek-AI, 2025), GLM-5 (Zhipu AI, 2026): DeepSeek-V3 with an indexer for each layer or some layers,
which selects the tokens that attention reads.

An indexer that selects K tokens selects all that a query may read as long as its sequence has at most K. Its tensors
are therefore left out, and sequences limited to K tokens (`Config.selected`).
"""

import re
from collections.abc import Sequence
from typing import Any

from models.checkpoint.fields import Fields
from models.config import Config
from models.decoder import Decoder
from models.families.deepseek_v2 import NAMES, latent_attention, mixture
from models.families.deepseek_v3 import sigmoids
from models.reading import sparse_layers
from models.rope import BUFFERS


def without(draft: int) -> Sequence[re.Pattern[str]]:
    """Return patterns of tensors that are not read: those of indexers, and of layer `draft`, a draft head."""
    indexers = r"(model\.)?layers\.\d+\.self_attn\.indexer\..*"
    return *BUFFERS, re.compile(indexers), re.compile(rf"model\.layers\.{draft}\..*")


def indexed(fields: Fields, *, groups: int, kept: int, **sizes: Any) -> Config:
    """Read the configuration.

    Args:
        groups, kept: values of absent fields, see `Routing`.
        sizes: other arguments of `latent_attention`.

    Raises:
        CheckpointError: it names the field.
    """
    options = latent_attention(fields, **sizes)
    if not options["latent"].query_rank:
        raise fields.error("q_lora_rank", "a whole number from 1")
    first = fields.int("first_k_dense_replace", default=3, low=0)
    sparse, rules = sparse_layers(fields, options["layers"], first), sigmoids(fields, groups=groups, kept=kept)
    sizes = {"count": 256, "chosen": 8, "width": 2048, "shared": 1, "scale": 2.5}
    return Config(
        **options,
        experts=mixture(fields, sparse, **sizes, **rules),
        selected=fields.int("index_topk", default=2048),
    )


class DeepseekV32(Decoder):
    """Each layer has an indexer."""

    architectures = ("DeepseekV32ForCausalLM",)
    names = NAMES
    default_eos_token_ids = frozenset([1])
    ignored = without(61)

    @staticmethod
    def read(fields: Fields) -> Config:
        return indexed(fields, positions=163840, mlp_width=18432, query_rank=1536, groups=8, kept=4)


class GlmMoeDsa(Decoder):
    """Layers may share the selection of an earlier one."""

    architectures = ("GlmMoeDsaForCausalLM",)
    names = NAMES
    default_eos_token_ids = frozenset([1])
    ignored = without(78)

    @staticmethod
    def read(fields: Fields) -> Config:
        sizes = {"mlp_width": 12288, "query_rank": 2048, "plain": 192, "value": 256, "eps": 1e-5}
        return indexed(fields, positions=202752, groups=1, kept=1, **sizes)
