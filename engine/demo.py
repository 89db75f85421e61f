"""The bundled demo models: their folders, and the defaults that use them."""

from pathlib import Path

import models
from engine.errors import UsageError

ROLES = ("target", "draft", "reward")
BANNER = (
    "This is the bundled toy: it knows small sums, opposites, colours, days, capitals, stories, and what you tell it.\n"
    "A real model: --model DIR, a Hugging Face checkpoint folder, or FILE.gguf (make chat MODEL=FILE.gguf)"
)


def demo_folder(role: str = "target") -> Path:
    """The checkpoint folder of a bundled model: the target, its draft, or the reward model. Raises UsageError."""
    if role not in ROLES:
        raise UsageError(f"role: expected one of {', '.join(ROLES)}, got {role!r}")
    return Path(models.__file__).parent / "demo" / role


def is_demo(folder: str | Path) -> bool:
    """Whether a folder is that of the bundled target."""
    return Path(folder).resolve() == demo_folder().resolve()


def with_defaults(
    model: str | Path | None, draft: str | Path | None, reward: str | Path | None
) -> tuple[str | Path, str | Path | None, str | Path | None]:
    """Target, draft and reward to load; None means the bundled one, except that another target gets no draft or reward.

    The bundled draft and reward model have the bundled target's vocabulary, so another target cannot use them.
    """
    model = model or demo_folder()
    if is_demo(model):
        draft, reward = draft or demo_folder("draft"), reward or demo_folder("reward")
    return model, draft, reward
