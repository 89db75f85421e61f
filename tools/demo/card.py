"""The model card, written from the figures."""

from typing import Any

from tools.demo import text, words
from tools.demo.talk import MAX_FACTOR, MAX_TERM

TEXT = """\
# Sprig: coppice's demo models

Written by `python -m tools.demo.evaluate --write`; change `tools/demo/card.py`, not this page.

Toys, so that every search can be tried the minute that coppice is installed. Sprig holds a short conversation in simple
English about the few things that it was taught. It knows nothing else, and should not be used for anything.

| model | parameters | trained on | in | validation loss |
|---|---|---|---|---|
{models}

All three are of the Llama family: ordinary Hugging Face folders in bfloat16, one byte-level BPE tokenizer of
{vocabulary} tokens in which every digit is one, context {context} tokens, a chat template with the roles system, user
and assistant. `SHA256SUMS` has the checksums of their files, `figures.json` what is on this page and the loss curves.

## What they were trained on

Text drawn by [tools/demo/generator.py](../../tools/demo/generator.py) from word lists and sentences that were written
for this project: conversations of one to nine turns, and stories. There is no outside data in it. Sums go to
{sum} + {sum}, products to {product} x {product}; there are {capitals} capitals and {opposites} words with an opposite;
names that one tells it may be any. It was taught to say that it does not know what lies outside, and will sometimes
say something wrong instead.

The generator was improved while these weights were trained: the runs were stopped and continued, so that part of what
they read is what an earlier version wrote (other orders of lists, fewer names, some slips of grammar).

The draft learned the target's distribution over next tokens on that text. The reward model learned to tell the
generator's answer from a worse one: wrong, rude, unhelpful, rambling, beside the question, torn off or garbled; judged
whole and unfinished.

## How good they are

On {questions} fresh questions, greedy, in bfloat16, with the answers checked by the generator. Fresh means seeds that
training never uses: the conversations are new, the words and numbers in them are those of the lists. An answer counts
only if it comes to its end and keeps the style asked for.

| | |
|---|---|
| target: right answers | **{accuracy:.1%}** |
| draft: right answers, alone | {draft_accuracy:.1%} |
| draft: its first choice is the target's greedy token | **{agreement:.1%}** |
| reward: better answer ranked first, of {pairs} fresh pairs | **{preference:.1%}** |

| task | target | draft |
|---|---|---|
{tasks}

| what is wrong with the worse answer | ranked right |
|---|---|
{faults}

## Making them again

    python -m tools.demo.train       # 80 minutes, for two CPU cores; goes on where it stopped
    python -m tools.demo.evaluate --write
    python -m tools.demo.golden      # the golden answers of the tests

The budget is time, so that another machine makes other weights. The target here was trained on two
shared CPU cores, the others side by side on one each.
"""


def card(figures: dict[str, Any]) -> str:
    """The page for what figures.json holds."""
    evaluation, training = figures["evaluation"], figures["training"]
    target, draft, reward = (evaluation[name] for name in ("target", "draft", "reward"))

    def share(part: dict[str, int]) -> str:
        return f"{part['right']} of {part['asked']}"

    return TEXT.format(
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
        capitals=len(words.CAPITALS),
        opposites=len(words.OPPOSITES),
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
