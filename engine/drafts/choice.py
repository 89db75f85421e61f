"""The drafter that a loading option names."""

from typing import Any

from engine.drafts import Drafter
from engine.drafts.backoff import NGramDrafter
from engine.errors import UsageError

NAMES = ("off", "auto", "ngrams", "suffix", "model", "mtp")


def chosen_drafter(
    named: str | Drafter,
    runner: Any,
    tokenizer: Any = None,
    draft: Any = None,
    capacity: int | None = None,
) -> Drafter | None:
    """The drafter of an engine; None: nothing is drafted.

    Args:
        named: one of `NAMES`, or a drafter.
        runner: the target's runner, see `engine.step.runner`.
        tokenizer: its tokenizer; None if it has none.
        draft: the runner of a draft model, or of a head of the target; None without one.
        capacity: tokens of a suffix store; None: the default.

    Raises:
        UsageError: there is no such drafter, or drafts are not supported on this device.
    """
    if named == "off":
        return None
    why = ""
    if runner.asynchronous or runner.device.type != "cpu":
        why = "they are supported on a CPU only"
    elif runner.shared:
        why = "they depend on measured times, on which processes that share a model would differ"
    elif runner.token_buckets:
        why = "a compiled model supports few sizes of passes"
    if named == "auto":
        # Without the C++ kernels the last bits of a row may depend on the other tokens of the pass.
        if why or runner.impl != "cpp":
            return None
        named = "suffix"
    if why:
        raise UsageError(f"drafts: {why}", remedy="leave --drafts out, or give off or auto")
    if named == "ngrams":
        return NGramDrafter()
    if named == "suffix":
        from engine.drafts.suffixes import CAPACITY, SuffixDrafter, SuffixStore  # imports torch; flags do not need it

        fingerprint = "" if tokenizer is None else tokenizer.fingerprint
        return SuffixDrafter(SuffixStore(runner.vocab_size, fingerprint, capacity or CAPACITY))
    if named in ("model", "mtp"):
        return drafter_of(str(named), draft)
    assert not isinstance(named, str), named
    return named


def drafter_of(named: str, draft: Any) -> Drafter:
    """The drafter of a draft model or a head, by its runner.

    Raises:
        UsageError: there is none, or for "mtp" it is not the model's own head.
    """
    from engine.drafts.heads import HeadDrafter  # here and below: these import torch, which the flags do not need
    from engine.drafts.model import ModelDrafter
    from models.draft_heads import DraftHead
    from models.mtp import MTP

    if named == "mtp" and (draft is None or not isinstance(draft.model, MTP)):
        raise UsageError("drafts: the model was loaded without its own head", remedy="load it with --drafts mtp")
    if draft is None:
        remedy = "give --draft DIR, a smaller one of the same tokenizer, or an EAGLE-3 head of the model"
        raise UsageError("drafts: model needs a draft model", remedy=remedy)
    return (HeadDrafter if isinstance(draft.model, DraftHead) else ModelDrafter)(draft)


def check_drafter(named: Any) -> None:
    """Check the type of a choice. Raises UsageError."""
    if named not in NAMES if isinstance(named, str) else not callable(getattr(named, "open", None)):
        raise UsageError(f"drafts: expected {', '.join(NAMES[:-1])} or {NAMES[-1]}, or a Drafter, got {named!r}")
