"""The families, one file each, and the registry of their architectures: from a checkpoint to the model of its
family."""

from collections.abc import Callable
from typing import Any

import torch

from models.checkpoint.headers import Checkpoint
from models.checkpoint.weights import Weights
from models.decoder import Decoder
from models.draft_heads import HEADS
from models.errors import CheckpointError, nearest
from models.families import (
    afmoe,
    apertus,
    bitnet,
    bloom,
    cohere,
    dbrx,
    deepseek_v2,
    deepseek_v3,
    dots1,
    ernie,
    exaone4,
    falcon,
    falcon_h1,
    gemma,
    gemma3n,
    gemma4,
    glm,
    gpt2,
    gpt_bigcode,
    gpt_neox,
    gpt_oss,
    gptj,
    granite,
    granite_hybrid,
    helium,
    hunyuan,
    jamba,
    laguna,
    lfm2,
    lfm3,
    llama,
    llama4,
    mamba,
    mamba2,
    minicpm3,
    minimax,
    mistral,
    mixtral,
    modernbert,
    nanochat,
    nemotron,
    nemotron_h,
    olmo,
    olmo_hybrid,
    olmoe,
    opt,
    phi,
    phi3,
    qwen2,
    qwen3,
    qwen3_5,
    qwen3_next,
    qwen_moe,
    seed_oss,
    smollm3,
    stablelm,
    starcoder2,
)

_CLASSES: list[type[Decoder]] = [
    laguna.Laguna,
    llama.Llama,
    llama4.Llama4,
    llama.Emu3,
    llama.Mllama,
    llama.IQuestCoder,
    gpt2.GPT2,
    gpt2.GPT,
    gpt2.GPTNeo,
    opt.OPT,
    opt.BioGPT,
    opt.XGLM,
    opt.CTRL,
    phi.Phi,
    phi.Persimmon,
    phi3.Phi3,
    phi3.Phi4Multimodal,
    qwen2.Qwen2,
    qwen3.Qwen3,
    qwen3_5.Qwen35,
    qwen3_5.Qwen35Moe,
    qwen3_next.Qwen3Next,
    qwen_moe.Qwen2Moe,
    qwen_moe.Qwen3Moe,
    qwen_moe.Mellum,
    qwen_moe.Flint,
    qwen_moe.Kolibri1,
    dbrx.Dbrx,
    deepseek_v2.DeepseekV2,
    deepseek_v3.DeepseekV3,
    deepseek_v3.Glm4MoeLite,
    deepseek_v3.AXK1,
    deepseek_v3.Youtu,
    minicpm3.MiniCPM3,
    mistral.Mistral,
    mistral.Cwm,
    mistral.Ministral3,
    mistral.Mistral4,
    modernbert.ModernBertDecoder,
    mixtral.Mixtral,
    mixtral.Aria,
    mixtral.PhiMoe,
    gpt_oss.GptOss,
    smollm3.SmolLM3,
    granite.Granite,
    granite.GraniteMoe,
    granite.GraniteSWA,
    granite.GraniteMoeSWA,
    granite.HyperCLOVAX,
    granite_hybrid.GraniteHybrid,
    olmo.Olmo1,
    olmo.Olmo,
    olmo_hybrid.OlmoHybrid,
    olmoe.Olmoe,
    olmoe.FlexOlmo,
    hunyuan.HunYuan,
    hunyuan.HunYuanMoe,
    hunyuan.HYV3,
    stablelm.StableLM,
    lfm2.LFM2,
    lfm2.LFM2Moe,
    lfm3.LFM3,
    gemma.Gemma,
    gemma.Gemma2,
    gemma.VaultGemma,
    gemma.Gemma3,
    gemma3n.Gemma3n,
    gemma4.Gemma4,
    gemma4.Gemma4Unified,
    glm.Glm,
    glm.Glm4,
    glm.Glm4Moe,
    glm.SolarOpen,
    gpt_neox.GPTNeoX,
    gpt_neox.GPTNeoXJapanese,
    gptj.GPTJ,
    gptj.CodeGen,
    gpt_bigcode.GPTBigCode,
    falcon.Falcon,
    bloom.Bloom,
    bloom.MPT,
    falcon_h1.FalconH1,
    falcon_h1.Bamba,
    starcoder2.Starcoder2,
    cohere.Cohere,
    cohere.Cohere2,
    cohere.Cohere2Moe,
    cohere.CohereCompass,
    exaone4.Exaone4,
    exaone4.ExaoneMoe,
    seed_oss.SeedOss,
    seed_oss.InternLM3,
    nemotron.Nemotron,
    nemotron.Arcee,
    nemotron.Jais2,
    nemotron_h.NemotronH,
    mamba2.Mamba2,
    mamba.MambaModel,
    mamba.FalconMamba,
    jamba.Jamba,
    ernie.Ernie,
    ernie.ErnieMoe,
    helium.Helium,
    dots1.Dots1,
    minimax.MiniMaxM2,
    afmoe.Afmoe,
    apertus.Apertus,
    nanochat.NanoChat,
    bitnet.BitNet,
]
SUPPORTED = "docs/checkpoints.md lists all that are supported"
FAMILIES = {name: family for family in _CLASSES for name in family.architectures}


def load_model(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    quant: str = "none",
    reader: Callable[..., Weights] = Weights,
) -> Any:
    """Build the checkpoint's model, or its draft head (`models.draft_heads`).

    See `Weights` for the arguments, and `Sizes` for another reader.

    Raises:
        CheckpointError: the architecture is not supported, or the folder lacks something that it needs.
    """
    name = checkpoint.architecture
    family = HEADS.get(name) or family_of(name, str(checkpoint.folder / "config.json"))
    checkpoint = family.view(checkpoint) if issubclass(family, Decoder) else checkpoint
    with checkpoint.held_open():
        return family(checkpoint, dtype, device, quant, reader).eval()


def family_of(architecture: str, where: str) -> type[Decoder]:
    """Return the class of an architecture. Raises CheckpointError, which names the config `where`, if there is none."""
    if architecture not in FAMILIES:
        raise CheckpointError(
            f"architecture {architecture!r} is not supported",
            where=where,
            remedy=nearest(architecture, FAMILIES, SUPPORTED),
        )
    return FAMILIES[architecture]
