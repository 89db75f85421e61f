"""Train the demo models: `python -m tools.demo.train`. Generator, tokenizer, target, reward, draft, in this order.

The schedule is by the clock: each model has its minutes, and its learning rate falls to zero when they end. A run that
was interrupted continues; one that is finished is not repeated (`--fresh` starts again).
"""

import argparse
import ctypes
import hashlib
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor

from tools.demo.generator import pair
from tools.demo.net import SIZES, Net, Size, write_json
from tools.demo.text import CONTEXT, PAD, batches, encode, pad, rows, tokenizer_config, train_tokenizer

ORDER = ("target", "reward", "draft")  # the draft learns from the target
MINUTES = {"target": 53.0, "reward": 22.0, "draft": 10.0}
RATES = {"target": 0.02, "reward": 0.02, "draft": 0.03}  # of Muon, for matrices
ADAM_RATE = 0.2  # of embeddings and norms, relative to that
WARMUP_STEPS = 50
CHUNK = 1200  # rows drawn at a time, to find some of like length
SEED = "coppice demo 1"
FIGURES, MANIFEST = "figures.json", "SHA256SUMS"
PARTIAL = 0.5  # weight of the judgement of unfinished replies, for searches that reject early
DRILL = 0.6  # share of pairs with a wrong answer, the hardest fault
LANGUAGE = 0.5  # weight of the reward model's language modelling, which teaches it the right answers

Batch = tuple[Tensor, ...]
Loss = Callable[[Batch], Tensor]


@dataclass
class Progress:
    """The part of a checkpoint besides weights and optimizer states."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    curve: list[dict[str, float]] = field(default_factory=list)


class Trainer:
    """One model, its optimizers and its schedule.

    Args:
        name: target, draft or reward.
        loss: of a batch, to be made smaller.
        minutes, steps: the budget; steps count if they are given.
        work: folder of the checkpoint.
    """

    def __init__(self, name: str, net: Net, minutes: float, steps: int | None, work: Path):
        self.name, self.net, self.minutes, self.steps, self.file = name, net, minutes, steps, work / f"{name}.pt"
        matrices = [p for n, p in net.named_parameters() if p.ndim == 2 and "layers" in n]
        others = [p for n, p in net.named_parameters() if p.ndim != 2 or "layers" not in n]
        rate = RATES[name]
        self.optimizers = [
            torch.optim.Muon(matrices, lr=rate, weight_decay=0.01),
            torch.optim.AdamW(others, lr=rate * ADAM_RATE, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["base"] = group["lr"]
        self.progress = Progress()

    @property
    def done(self) -> float:
        """The part of the budget that is used, 0 to 1."""
        used = self.progress.step / self.steps if self.steps else self.progress.seconds / (60 * self.minutes)
        return min(1.0, used)

    def load(self) -> bool:
        """Load the checkpoint, if there is one; returns whether there is."""
        if not self.file.is_file():
            return False
        saved = torch.load(self.file, weights_only=True)
        self.net.load_state_dict(saved["net"])
        for optimizer, state in zip(self.optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
        self.progress = Progress(**saved["progress"])
        return True

    def save(self) -> None:
        """Write the checkpoint, whole or not at all."""
        state = {
            "net": self.net.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self.optimizers],
            "progress": vars(self.progress),
        }
        torch.save(state, self.file.with_suffix(".new"))
        self.file.with_suffix(".new").replace(self.file)

    def run(self, stream: Callable[[int], list[Batch]], loss: Loss, validate: Callable[[], float]) -> None:
        """Train until the budget is used up. `stream(k)` gives the k-th chunk of batches."""
        progress, shown, saved, measured = self.progress, 0.0, time.monotonic(), -1.0
        chunk, waiting = progress.step, []
        while self.done < 1:
            began = time.monotonic()
            if not waiting:
                waiting, chunk = (
                    stream(chunk),
                    progress.step + 1,
                )  # chunks are named by steps: resumed runs see new text
            batch = waiting.pop()
            self._step(batch, value := loss(batch))
            progress.step += 1
            progress.tokens += batch[0].numel()
            now = time.monotonic()
            progress.seconds += now - began
            if now - shown > 5:
                shown = now
                rate = progress.tokens / progress.seconds
                print(
                    f"\r{self.name}: {self.done:6.1%}, step {progress.step}, loss {value.item():.4f}, "
                    f"{rate:.0f} tokens/s ", end="", file=sys.stderr, flush=True,
                )  # fmt: skip
            if self.done - measured >= 0.05 or self.done >= 1:
                measured = self.done
                point = {"step": progress.step, "tokens": progress.tokens, "seconds": progress.seconds}
                progress.curve.append({**point, "train": value.item(), "validation": validate()})
                print(f"\nvalidation loss {progress.curve[-1]['validation']:.4f}", file=sys.stderr)
            if now - saved > 120:
                saved = now
                self.save()
        self.save()

    def _step(self, batch: Batch, loss: Tensor) -> None:
        warm = min(1.0, (self.progress.step + 1) / WARMUP_STEPS)
        factor = warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * self.done)))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["base"] * factor
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()


# --- losses ---


def autocast(device: torch.device) -> torch.autocast:
    """Matrices are multiplied in bfloat16, weights stay float32."""
    return torch.autocast(device.type, torch.bfloat16)


def language_loss(net: Net, ids_BT: Tensor, weights_BT: Tensor, teacher: Net | None = None) -> Tensor:
    """Cross-entropy of the next token, or of the teacher's distribution over it; the mean by the weights."""
    keep = weights_BT[:, 1:] > 0
    weights = weights_BT[:, 1:][keep]
    with autocast(ids_BT.device):
        logits = net.logits(net.hidden(ids_BT[:, :-1], torch.bfloat16)[keep]).float()
        if teacher is None:
            target: Tensor = ids_BT[:, 1:][keep]
        else:
            with torch.no_grad():
                target = teacher.logits(teacher.hidden(ids_BT[:, :-1], torch.bfloat16)[keep]).float().softmax(-1)
    return (F.cross_entropy(logits, target, reduction="none") * weights).sum() / weights.sum()


def preference_loss(net: Net, batch: Batch) -> Tensor:
    """Bradley-Terry on whole replies and on their beginnings, and language modelling on the better ones."""
    ids_BT, weights_BT, ends_B, cuts_B = batch  # the better rows, then the worse ones
    with autocast(ids_BT.device):
        hidden = net.hidden(ids_BT, torch.bfloat16)
        rows = torch.arange(len(ids_BT), device=ids_BT.device)
        last, cut = (net.score(hidden[rows, at]).float().squeeze(-1) for at in (ends_B, cuts_B))
        half = len(ids_BT) // 2
        keep = weights_BT[:half, 1:] == 1
        logits = net.logits(hidden[:half, :-1][keep]).float()
    whole, partial = (-F.logsigmoid(scores[:half] - scores[half:]).mean() for scores in (last, cut))
    return whole + PARTIAL * partial + LANGUAGE * F.cross_entropy(logits, ids_BT[:half, 1:][keep])


# --- data ---


def language_batches(tokenizer: tokenizers.Tokenizer, seed: str, count: int, tokens: int, device) -> list[Batch]:
    """Batches for language models: ids, weights."""
    made = batches(rows(tokenizer, seed, count), tokens, Random(seed))
    return [(ids.to(device), weights.to(device)) for ids, weights in made]


def preference_batches(tokenizer: tokenizers.Tokenizer, seed: str, count: int, tokens: int, device) -> list[Batch]:
    """Batches for the reward model: ids, weights, end and cut of each row; better rows first, then worse ones."""
    items = []
    for i in range(count):
        rng = Random(f"{seed}:{i}")
        judged = pair(rng, DRILL)
        both = [encode(tokenizer, judged.dialogue, reply) for reply in (judged.better, judged.worse)]
        part = rng.random()
        if (longest := max(len(row.ids) for row in both)) <= CONTEXT:
            items.append((longest, both, [int(row.reply + part * (len(row.ids) - 1 - row.reply)) for row in both]))
    items.sort(key=lambda item: item[0])
    groups, made = [[]], []
    for item in items:
        if groups[-1] and 2 * (len(groups[-1]) + 1) * item[0] > tokens:
            groups.append([])
        groups[-1].append(item)
    Random(seed).shuffle(groups)
    for group in groups:
        both = [(item[1][side], item[2][side]) for side in (0, 1) for item in group]
        ids, weights = pad([row.ids for row, _ in both], PAD), pad([row.weights for row, _ in both], 0.0)
        ends = torch.tensor([len(row.ids) - 1 for row, _ in both])
        made.append(tuple(part.to(device) for part in (ids, weights, ends, torch.tensor([cut for _, cut in both]))))
    return made


# --- the command ---


def keep_memory() -> None:
    """Have the C library keep freed memory: giving it back after every operation takes most of a step on a CPU."""
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError, TypeError):
        return  # not glibc
    for option, value in ((-4, 0), (-1, 2**31 - 1), (-2, 256 << 20)):  # M_MMAP_MAX, M_TRIM_THRESHOLD, M_TOP_PAD
        mallopt(option, value)


def parser() -> argparse.ArgumentParser:
    """All flags."""
    parser = argparse.ArgumentParser(prog="python -m tools.demo.train", description=__doc__)
    parser.add_argument("models", nargs="*", default=[], metavar="MODEL", help=f"{', '.join(ORDER)} (all)")
    parser.add_argument("--minutes", type=float, help=f"for each model ({MINUTES})")
    parser.add_argument("--steps", type=int, help="for each model, instead of minutes")
    parser.add_argument("--tokens", type=int, default=5000, help="in a batch (5000)")
    parser.add_argument("--chunk", type=int, default=CHUNK, help=f"rows drawn at a time ({CHUNK})")
    parser.add_argument("--tiny", action="store_true", help="very small models, to try the command out")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--threads", type=int, help="of the CPU")
    parser.add_argument("--work", type=Path, default=Path("build/demo"), help="checkpoints (build/demo)")
    parser.add_argument("--out", type=Path, default=Path("models/demo"), help="the finished models (models/demo)")
    parser.add_argument("--fresh", action="store_true", help="do not go on from checkpoints")
    return parser


def main(argv: list[str] | None = None) -> int:
    """The command line."""
    args = parser().parse_args(argv)
    if unknown := {*args.models} - {*ORDER}:
        parser().error(f"expected models out of {', '.join(ORDER)}, got {', '.join(sorted(unknown))}")
    keep_memory()
    if args.threads:
        torch.set_num_threads(args.threads)
    for folder in (args.work, args.out):
        folder.mkdir(parents=True, exist_ok=True)
    tokenizer = make_tokenizer(args)
    for name in [name for name in ORDER if name in (args.models or ORDER)]:
        trainer = train(name, tokenizer, args)
        export(name, trainer, tokenizer, args.out)
    write_manifest(args.out)
    return 0


def make_tokenizer(args: argparse.Namespace) -> tokenizers.Tokenizer:
    """The tokenizer of the work folder, or a new one."""
    file = args.work / "tokenizer.json"
    if args.fresh or not file.is_file():
        print("training the tokenizer", file=sys.stderr)
        train_tokenizer(SEED, dialogues=500 if args.tiny else 20000).save(str(file), pretty=False)
    return tokenizers.Tokenizer.from_file(str(file))


def size_of(name: str, args: argparse.Namespace, tokenizer: tokenizers.Tokenizer) -> Size:
    """The size of a model; tiny with --tiny."""
    tiny = {"width": 32, "mlp": 48, "layers": 1, "heads": 2, "kv_heads": 1} if args.tiny else {}
    return Size(**{**vars(SIZES[name]), **tiny, "vocabulary": tokenizer.get_vocab_size()})


def train(name: str, tokenizer: tokenizers.Tokenizer, args: argparse.Namespace) -> Trainer:
    """Train one model within its budget."""
    device = torch.device(args.device)
    net = Net(size_of(name, args, tokenizer)).to(device)
    trainer = Trainer(name, net, args.minutes or MINUTES[name], args.steps, args.work)
    if not args.fresh and trainer.load():
        print(f"{name}: going on at step {trainer.progress.step}", file=sys.stderr)
    make = preference_batches if name == "reward" else language_batches
    teacher = None
    if name == "draft":
        teacher = Net(size_of("target", args, tokenizer)).to(device)
        teacher.load_state_dict(torch.load(args.work / "target.pt", weights_only=True)["net"])

    def loss(batch: Batch) -> Tensor:
        return preference_loss(net, batch) if name == "reward" else language_loss(net, *batch, teacher=teacher)

    held_out = make(tokenizer, f"{SEED}:validation", 200, args.tokens, device)

    def validate() -> float:
        with torch.no_grad():
            return sum(loss(batch).item() for batch in held_out) / len(held_out)

    trainer.run(lambda k: make(tokenizer, f"{SEED}:{name}:{k}", args.chunk, args.tokens, device), loss, validate)
    return trainer


def export(name: str, trainer: Trainer, tokenizer: tokenizers.Tokenizer, out: Path) -> None:
    """Write an ordinary Hugging Face folder, and the facts of its training into figures.json."""
    trainer.net.save(out / name)
    tokenizer.save(str(out / name / "tokenizer.json"), pretty=False)
    write_json(out / name / "tokenizer_config.json", tokenizer_config())
    figures = read_figures(out)
    figures.setdefault("training", {})[name] = {
        "parameters": sum(parameter.numel() for parameter in trainer.net.parameters()),
        "validation_loss": trainer.progress.curve[-1]["validation"],
        **vars(trainer.progress),
    }
    write_json(out / FIGURES, figures)


def read_figures(out: Path) -> dict[str, Any]:
    """The content of figures.json; empty without the file."""
    return json.loads((out / FIGURES).read_text(encoding="utf-8")) if (out / FIGURES).is_file() else {}


def write_manifest(out: Path) -> None:
    """Write SHA256SUMS of the models' files, for `sha256sum -c`."""
    files = [file for name in sorted(ORDER) for file in sorted((out / name).glob("*"))]
    lines = (f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.relative_to(out).as_posix()}\n" for file in files)
    (out / MANIFEST).write_text("".join(lines), encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
