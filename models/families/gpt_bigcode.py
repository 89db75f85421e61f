"""StarCoder and SantaCoder (Li et al. 2023, Ben Allal et al. 2023): a GPT-2 with one key/value head."""

from dataclasses import replace

from models.checkpoint.fields import Fields
from models.config import Config
from models.families.gpt2 import GPT2


class GPTBigCode(GPT2):
    """Multi-query attention, matrices stored [out, in]."""

    architectures = ("GPTBigCodeForCausalLM", "GPTBigCodeForSequenceClassification")
    names = replace(GPT2.names, transposed=False)

    @staticmethod
    def read(fields: Fields) -> Config:
        c, shared = GPT2.read(fields), fields.bool("multi_query", default=True)
        return replace(c, kv_heads=1 if shared else c.heads, grouped_qkv="" if shared else "head")
