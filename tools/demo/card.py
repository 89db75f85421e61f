"""The model card, written from the figures."""

from pathlib import Path
from typing import Any

from tools.demo import text
from tools.demo.talk import MAX_FACTOR, MAX_TERM
from tools.demo.words import TABLES

TEMPLATE = Path(__file__).with_name("card.md")


def card(figures: dict[str, Any]) -> str:
    """Fill the template with the content of figures.json."""
    evaluation, training = figures["evaluation"], figures["training"]
    target, draft, reward = (evaluation[name] for name in ("target", "draft", "reward"))

    def share(part: dict[str, int]) -> str:
        return f"{part['right']} of {part['asked']}"

    return TEMPLATE.read_text(encoding="utf-8").format(
        models="\n".join(
            f"| [{name}]({name}/) | {model['parameters']:,} | {model['tokens'] / 1e6:.1f} million tokens | "
            f"{model['seconds'] / 60:.0f} minutes, {model['step']} steps | {model['validation_loss']:.3f} |"
            for name in ("target", "draft", "reward")
            for model in [training[name]]
        ),
        vocabulary=text.VOCABULARY,
        context=text.CONTEXT,
        sum=MAX_TERM,
        product=MAX_FACTOR,
        capitals=len(TABLES["capitals"]),
        opposites=len(TABLES["opposites"]),
        questions=target["questions"],
        pairs=reward["pairs"],
        accuracy=target["accuracy"],
        draft_accuracy=draft["accuracy"],
        agreement=draft["agreement"],
        preference=reward["accuracy"],
        tasks="\n".join(
            f"| {task} | {share(part)} | {share(draft['tasks'][task])} |" for task, part in target["tasks"].items()
        ),
        faults="\n".join(f"| {fault} | {share(part)} |" for fault, part in reward["faults"].items()),
    )
