"""Train the weights of the demo models again, on a CPU: `python -m tools.demo.train`.

Trains target, reward and draft, in this order, from the config.json and tokenizer.json of their folders. glibc returns
freed memory to the system after every operation, which takes most of a step; these variables prevent it:
MALLOC_MMAP_MAX_=0 MALLOC_TRIM_THRESHOLD_=2147483647 MALLOC_TOP_PAD_=268435456

Shape legend: B rows, T tokens, E width, H query heads, G key/value heads, D head size, V vocabulary.
"""

import argparse
import json
import math
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random
from typing import Any, TypeVar

from engine.app.cli import ended
from engine.demo import demo_folder
from models.later import import_now, later
from tools.demo.generator import Dialogue, dialogue, pair, text

with later():
    import tokenizers
    import torch
    import torch.nn.functional as F
    from safetensors.torch import save_file
    from torch import Tensor
    from torch.nn.utils.rnn import pad_sequence

PAD, BEGIN, END = 0, 1, 2
ROLE = {"system": 3, "user": 4, "assistant": 5}
PROMPT_WEIGHT = 0.1  # of the tokens of prompts
STORIES = 0.05  # of the rows are plain text

STEPS = {"target": 3772, "reward": 4393, "draft": 1116}  # in this order: the draft learns from the target
RATES = {"target": 0.02, "reward": 0.02, "draft": 0.03}  # of Muon, for matrices
ADAM_RATE = 0.2  # of embeddings and norms, relative to that
WARMUP_STEPS = 50
TOKENS = 5000  # in a batch
CHUNK = 1200  # rows drawn at a time, to find some of like length
SEED = "coppice demo 1"
PARTIAL = 0.5  # weight of the judgement of unfinished replies, for searches that reject early
DRILL = 0.6  # share of pairs with a wrong answer, the hardest fault
LANGUAGE = 0.5  # weight of the reward model's language modelling, which teaches it the right answers

T = TypeVar("T")
Batch = tuple[Tensor, ...]
Weights = dict[str, Tensor]  # by the names of Hugging Face checkpoints


# --- text to batches ---


@dataclass(frozen=True)
class Row:
    """Token ids, the weight of each in the loss, and the place at which the last reply begins."""

    ids: list[int]
    weights: list[float]
    reply: int


def encode(tokenizer: tokenizers.Tokenizer, talk: Dialogue, last_reply: str | None = None) -> Row:
    """A conversation as the chat template renders it, with its last `<|end|>`."""
    ids, weights, start = [BEGIN], [0.0], 0
    for message in talk.messages(last_reply):
        content = [*tokenizer.encode(message["content"], add_special_tokens=False).ids, END]
        start = len(ids) + 1
        ids += [ROLE[message["role"]], *content]
        weight = 1.0 if message["role"] == "assistant" else PROMPT_WEIGHT
        weights += [0.0, *[weight] * len(content)]
    return Row(ids, weights, start)


def language_batches(tokenizer: tokenizers.Tokenizer, context: int, seed: str) -> list[Batch]:
    """Batches for language models: ids [B, T], weights [B, T]."""
    rows = []
    for i in range(CHUNK):
        rng = Random(f"{seed}:{i}")
        if rng.random() < STORIES:
            ids = [*tokenizer.encode(text(rng)).ids, END]
            rows.append(Row(ids, [0.0, *[1.0] * (len(ids) - 1)], 1))
        elif len((row := encode(tokenizer, dialogue(rng))).ids) <= context:
            rows.append(row)
    return [padded(group) for group in grouped(((len(row.ids), row) for row in rows), seed)]


def preference_batches(tokenizer: tokenizers.Tokenizer, context: int, seed: str) -> list[Batch]:
    """Batches for the reward model: ids and weights [B, T], end and cut of each row; better rows first, then worse."""
    items = []
    for i in range(CHUNK):
        rng = Random(f"{seed}:{i}")
        judged = pair(rng, DRILL)
        both = [encode(tokenizer, judged.dialogue, reply) for reply in (judged.better, judged.worse)]
        part = rng.random()
        if (longest := max(len(row.ids) for row in both)) <= context:
            cuts = [int(row.reply + part * (len(row.ids) - 1 - row.reply)) for row in both]
            items.append((2 * longest, [*zip(both, cuts, strict=True)]))
    batches = []
    for group in grouped(items, seed):
        rows, cuts = zip(*(item[side] for side in (0, 1) for item in group), strict=True)
        ends = torch.tensor([len(row.ids) - 1 for row in rows])
        batches.append((*padded(rows), ends, torch.tensor(cuts)))
    return batches


def grouped(items: Iterable[tuple[int, T]], seed: str) -> list[list[T]]:
    """Groups of items of similar length, of about `TOKENS` tokens each, shuffled."""
    groups: list[list[T]] = [[]]
    for length, item in sorted(items, key=lambda item: item[0]):
        if groups[-1] and (len(groups[-1]) + 1) * length > TOKENS:
            groups.append([])
        groups[-1].append(item)
    Random(seed).shuffle(groups)
    return groups


def padded(rows: Iterable[Row]) -> tuple[Tensor, Tensor]:
    """Ids and weights [B, T] of rows, padded on the right."""
    ids, weights = zip(*((torch.tensor(row.ids), torch.tensor(row.weights)) for row in rows), strict=True)
    return pad_sequence([*ids], True, PAD), pad_sequence([*weights], True)


# --- the model: Llama in plain PyTorch ---


def new_weights(config: dict[str, Any]) -> Weights:
    """Random weights; norms of ones."""
    width, mlp, layers = config["hidden_size"], config["intermediate_size"], config["num_hidden_layers"]
    queries, keys = (config["head_dim"] * config[name] for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (config["vocab_size"], width)}
    for i in range(layers):
        own = {
            "input_layernorm": (width,), "post_attention_layernorm": (width,),
            "self_attn.q_proj": (queries, width), "self_attn.k_proj": (keys, width),
            "self_attn.v_proj": (keys, width), "self_attn.o_proj": (width, queries),
            "mlp.gate_proj": (mlp, width), "mlp.up_proj": (mlp, width), "mlp.down_proj": (width, mlp),
        }  # fmt: skip
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in own.items()}
    shapes["model.norm"] = (width,)
    if is_reward(config):
        shapes["score"] = (1, width)
    generator, weights = torch.Generator().manual_seed(0), {}
    for name, shape in shapes.items():
        weight = torch.ones(shape)
        if len(shape) == 2:
            scale = (2 * layers) ** -0.5 if name.endswith(("o_proj", "down_proj")) else 1.0
            weight.normal_(std=shape[1] ** -0.5 * scale, generator=generator)
        weights[f"{name}.weight"] = weight.requires_grad_()
    return weights


def is_reward(config: dict[str, Any]) -> bool:
    """Whether the model has a scalar head besides the language model's."""
    return config["architectures"] == ["LlamaForSequenceClassification"]


def hidden(w: Weights, config: dict[str, Any], ids_BT: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows [B, T, E] before the head. A row sees its past only: padding on the right changes nothing."""
    head, eps = config["head_dim"], config["rms_norm_eps"]
    inverse = config["rope_theta"] ** -(torch.arange(0, head, 2) / head)
    angles = torch.arange(ids_BT.shape[1])[:, None] * inverse.repeat(2)
    cos_TD, sin_TD = angles.cos().to(dtype), angles.sin().to(dtype)

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], w[f"model.{name}.weight"].to(x.dtype), eps)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, w[f"model.{name}.weight"])

    x_BTE = F.embedding(ids_BT, w["model.embed_tokens.weight"]).to(dtype)
    for i in range(config["num_hidden_layers"]):
        at = f"layers.{i}"
        y = norm(x_BTE, f"{at}.input_layernorm")
        q, k, v = (linear(y, f"{at}.self_attn.{name}_proj").unflatten(-1, (-1, head)).transpose(1, 2) for name in "qkv")
        x_BTE = x_BTE + linear(attention(q, k, v, cos_TD, sin_TD), f"{at}.self_attn.o_proj")
        y = norm(x_BTE, f"{at}.post_attention_layernorm")
        y = F.silu(linear(y, f"{at}.mlp.gate_proj")) * linear(y, f"{at}.mlp.up_proj")
        x_BTE = x_BTE + linear(y, f"{at}.mlp.down_proj")
    return norm(x_BTE, "norm")


def attention(q_BHTD: Tensor, k_BGTD: Tensor, v_BGTD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    """Causal attention with rotary positions; returns [B, T, H * D]."""
    # Written out: on short rows it takes a fifth of the time that torch's fused attention takes on a CPU.
    length, head = cos_TD.shape
    q_BHTD, k_BGTD = (
        x * cos_TD + torch.cat((-x[..., head // 2 :], x[..., : head // 2]), -1) * sin_TD for x in (q_BHTD, k_BGTD)
    )
    shape, groups = q_BHTD.shape, k_BGTD.shape[1]
    rows = q_BHTD.reshape(shape[0], groups, -1, head) @ k_BGTD.transpose(-1, -2) * head**-0.5
    future = torch.full((length, length), float("-inf"), dtype=rows.dtype).triu(1)
    rows = (rows.unflatten(2, (-1, length)) + future).softmax(-1).flatten(2, 3).to(v_BGTD.dtype)
    return (rows @ v_BGTD).view(shape).transpose(1, 2).flatten(2)


def logits(w: Weights, rows: Tensor) -> Tensor:
    """Hidden rows to next-token logits."""
    return F.linear(rows, w["model.embed_tokens.weight"])


# --- losses: matrices are multiplied in bfloat16, weights stay float32 ---


def language_loss(w: Weights, config: dict[str, Any], batch: Batch, teacher: Callable | None = None) -> Tensor:
    """Cross-entropy of the next token, or of the teacher's distribution over it; the weighted mean."""
    ids_BT, weights_BT = batch
    keep = weights_BT[:, 1:] > 0
    weights = weights_BT[:, 1:][keep]
    with torch.autocast("cpu", torch.bfloat16):
        found = logits(w, hidden(w, config, ids_BT[:, :-1], torch.bfloat16)[keep]).float()
        wanted = ids_BT[:, 1:][keep] if teacher is None else teacher(ids_BT[:, :-1], keep)
    return (F.cross_entropy(found, wanted, reduction="none") * weights).sum() / weights.sum()


def teaching(w: Weights, config: dict[str, Any]) -> Callable[[Tensor, Tensor], Tensor]:
    """A function from ids and the rows to keep to the model's distributions over the next token."""

    @torch.no_grad()
    def distributions(ids_BT: Tensor, keep: Tensor) -> Tensor:
        return logits(w, hidden(w, config, ids_BT, torch.bfloat16)[keep]).float().softmax(-1)

    return distributions


def preference_loss(w: Weights, config: dict[str, Any], batch: Batch) -> Tensor:
    """Bradley-Terry on whole replies and on their beginnings, and language modelling on the better ones."""
    ids_BT, weights_BT, ends_B, cuts_B = batch  # the better rows, then the worse ones
    with torch.autocast("cpu", torch.bfloat16):
        x_BTE = hidden(w, config, ids_BT, torch.bfloat16)
        rows, half = torch.arange(len(ids_BT)), len(ids_BT) // 2
        last, cut = (F.linear(x_BTE[rows, at], w["score.weight"]).float().squeeze(-1) for at in (ends_B, cuts_B))
        keep = weights_BT[:half, 1:] == 1
        found = logits(w, x_BTE[:half, :-1][keep]).float()
    whole, begun = (-F.logsigmoid(scores[:half] - scores[half:]).mean() for scores in (last, cut))
    return whole + PARTIAL * begun + LANGUAGE * F.cross_entropy(found, ids_BT[:half, 1:][keep])


# --- training ---


def train(name: str, weights: Weights, make: Callable[[str], list[Batch]], loss: Callable[[Batch], Tensor]) -> None:
    """Train for the model's steps; `make(seed)` gives batches."""
    matrices = [p for n, p in weights.items() if p.ndim == 2 and "layers" in n]
    others = [p for n, p in weights.items() if p.ndim != 2 or "layers" not in n]
    optimizers: list[Any] = [
        torch.optim.Muon(matrices, lr=RATES[name], weight_decay=0.01),
        torch.optim.AdamW(others, lr=RATES[name] * ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
    ]
    bases = [optimizer.param_groups[0]["lr"] for optimizer in optimizers]
    chunk, waiting = 0, []
    for step in range(STEPS[name]):
        if not waiting:
            waiting, chunk = make(f"{SEED}:{name}:{chunk}"), step + 1
        value = loss(waiting.pop())
        warm = min(1.0, (step + 1) / WARMUP_STEPS)
        factor = warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * step / STEPS[name])))
        for optimizer, base in zip(optimizers, bases, strict=True):
            optimizer.param_groups[0]["lr"] = base * factor
        value.backward()
        torch.nn.utils.clip_grad_norm_(weights.values(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step % 50 == 0:
            print(f"{name}: step {step}, loss {value.item():.4f}", file=sys.stderr)


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo.train", description=__doc__)
    parser.add_argument("--folder", type=Path, default=demo_folder().parent, help="holds target, draft and reward")
    folder = parser.parse_args(argv).folder
    import_now()
    teacher = None
    for name in STEPS:
        config = json.loads((folder / name / "config.json").read_text(encoding="utf-8"))
        tokenizer = tokenizers.Tokenizer.from_file(str(folder / name / "tokenizer.json"))
        weights, context = new_weights(config), config["max_position_embeddings"]
        make, loss = language_batches, partial(language_loss, weights, config, teacher=teacher)
        if name == "reward":
            make, loss = preference_batches, partial(preference_loss, weights, config)
        train(name, weights, partial(make, tokenizer, context), loss)
        teacher = teacher or teaching(weights, config)
        tensors = {key: weight.detach().to(torch.bfloat16) for key, weight in weights.items()}
        save_file(tensors, folder / name / "model.safetensors", metadata={"format": "pt"})
    return 0


if __name__ == "__main__":
    sys.exit(ended(main))
