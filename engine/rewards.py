"""Rewards: a reward model scores a prompt with partial answers, on a tree that grows with them.

The model reads the conversation in its own chat template, if it has one, and in its own tokens, if they differ. The
template's text after a message (the closing) is appended to each response only for its score.
"""

import math
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.cache.prefixes import shared_length
from engine.cache.tree import TokenTree
from engine.contract import Answer, Evaluate
from engine.errors import KVMemoryError, UsageError
from engine.load.loading import LoadedModel
from engine.load.options import RewardFunction
from engine.rules.endings import Endings
from engine.text.stopping import CONTEXT, StopStrings, text_after
from engine.text.tokenizer import Tokenizer

Messages = Sequence[Mapping[str, Any]]
HALF = "\ufffd"  # a character whose bytes are incomplete


@dataclass(frozen=True)
class Responses:
    """Responses to one prompt, as the target's tokens and as text.

    Args:
        tokenizer: the target's.
        prompt: token ids.
        messages: the messages that were rendered to the prompt; None for a plain prompt.
        eos: ids that end a response and are no part of it.
        stops: strings that end a response and are no part of it.
        prompt_text: the prompt as text; if it was given as ids, decoded without special tokens.
        healed: the end of `prompt_text` with which responses begin, after `prompt`; "": none.
        endings: the ends of responses after which no token was allowed; None if no token is ever forbidden.
    """

    tokenizer: Tokenizer | None
    prompt: Sequence[int]
    messages: Messages | None = None
    eos: frozenset[int] = frozenset()
    stops: StopStrings | None = None
    prompt_text: str = ""
    healed: str = ""
    endings: Endings | None = None

    def body(self, tokens: Sequence[int]) -> Sequence[int]:
        """A response without its end-of-sequence token, or the token that stands for one."""
        tokens = tokens if self.endings is None else self.endings.real(tokens)
        return tokens[:-1] if tokens and tokens[-1] in self.eos else tokens

    def text(self, tokens: Sequence[int]) -> str:
        """The text of a response, as in an output."""
        assert self.tokenizer is not None
        text = text_after(self.tokenizer, self.body(tokens), self.healed, self.prompt)
        return self.stops.cut(text) if self.stops else text

    def continuation(self, tokens: Sequence[int]) -> str:
        """The text that a response adds to the prompt's."""
        if self.healed:
            return self.text(tokens)
        assert self.tokenizer is not None
        text = self.tokenizer.decode_continuation(self.prompt[-CONTEXT:], self.body(tokens))
        return self.stops.cut(text) if self.stops else text

    def before_stop(self, tokens: Sequence[int]) -> list[int]:
        """A response without the tokens from a stop string on."""
        body = list(self.body(tokens))
        if self.stops is not None and not self.stops.special_ids.isdisjoint(body[-1:]):
            body.pop()
        if self.stops is not None and self.stops(body):
            text = self.stops.cut(self.stops.text(body))
            while not text.startswith(self.stops.text(body)):
                body.pop()
        return body


@dataclass(frozen=True)
class Script:
    """The input of a reward model.

    Args:
        whole: response in the target's tokens -> the reward model's tokens of the prompt and the response.
        closing: the reward model's tokens after a response.
    """

    whole: Callable[[Sequence[int]], list[int]]
    closing: list[int]

    def scored(self, padding: int | None) -> "Script":
        """The script without padding at its end, see `scored`."""
        if all(token == padding for token in self.closing):
            return Script(lambda tokens: [*scored(self.whole(tokens), padding)], [])
        return Script(self.whole, [*scored(self.closing, padding)])

    @staticmethod
    def write(answer: Responses, target: LoadedModel, reward: LoadedModel) -> "Script":
        """The script for responses. Raises UsageError if the vocabularies differ and a tokenizer is missing."""
        mine, its = answer.tokenizer, reward.tokenizer
        same = not mine.difference(its) if mine and its else target.shape.vocab_size == reward.shape.vocab_size
        if not same and not (mine and its):
            raise UsageError(
                "the reward model has another vocabulary than the model, and one of them has no tokenizer",
                where=f"{reward.shape.vocab_size} tokens, {target.shape.vocab_size} tokens",
                remedy="add the tokenizer files",
            )
        if reward.template is not None and mine and its:
            asked = answer.messages
            asked = [{"role": "user", "content": answer.prompt_text}] if asked is None else [*asked]
            before, mark, after = reward.template.around_reply(asked)
            opened = its.encode_rendered([*before, mark])
            closed = its.encode_rendered([*before, mark, *after])
            closing = closed[shared_length(opened, closed) :]
            alike = answer.messages and target.template and target.template.source == reward.template.source
            if not same or (answer.healed and not alike):  # the first tokens of a response have the prompt's text
                read = its.encode_rendered
                return Script(lambda tokens: read([*before, (answer.text(tokens).rstrip(HALF), False)]), closing)
            start = list(answer.prompt) if alike else its.encode_rendered(before)
        elif same:
            start, closing = list(answer.prompt), []
        else:
            assert its is not None
            head, closing = _specials(its)
            text = answer.prompt_text if answer.messages is None else _plain(answer.messages)
            continued = answer.continuation if answer.messages is None else answer.text
            encode = partial(its.encode, add_special=False)
            return Script(lambda tokens: head + encode(text + continued(tokens).rstrip(HALF)), closing)
        return Script(lambda tokens: start + answer.before_stop(tokens), closing)


class ModelJudge:
    """Rewards by a model with a scalar head. Its cache keeps evaluated responses until they are dropped.

    Args:
        script: the model's input.
        open_tree: prompt -> a tree on the reward model's pool.
        reach: tokens that its context and its cache hold; a longer text is cut.

    Raises:
        UsageError: the prompt is longer than `reach`.
    """

    def __init__(self, script: Script, open_tree: Callable[[Sequence[int]], TokenTree], reach: int):
        self.script, self.open_tree, self.reach = script, open_tree, reach
        self.tree: TokenTree | None = None
        self._score: dict[int, float] = {}  # evaluated live node -> its score
        self._ids: dict[tuple[int, ...], list[int]] = {}  # response of the latest call -> the model's tokens
        prompt = len(script.whole([])) + len(script.closing)
        if prompt > reach:
            raise UsageError(
                f"the prompt has {prompt} tokens for the reward model, its context and cache hold {reach}",
                remedy="shorten the prompt, or give the KV cache more memory",
            )

    def rewards(self, responses: Sequence[Sequence[int]]) -> Generator[Evaluate, Answer, list[float]]:
        """The rewards of responses, in one pass or, if the cache is too small for that, in parts."""
        room = self.reach - len(self.script.closing)
        self._ids = {tuple(tokens): self.script.whole(tokens)[:room] for tokens in responses}
        texts = [self._ids[tuple(tokens)] for tokens in responses]
        tree = self.tree
        if tree is None or shared_length(tree.trunk.tokens, *texts) < len(tree.trunk.tokens):
            tree = self.tree = self._open(texts)
        return (yield from self._ask(tree, texts))

    def keep(self, responses: Sequence[Sequence[int]]) -> None:
        if self.tree is not None:
            texts = [self._ids.get(tuple(tokens)) or self.script.whole(tokens) for tokens in responses]
            self._keep(self.tree, [self.tree.descend(ids[self.tree.prompt_length :]) for ids in texts])

    def _open(self, texts: Sequence[Sequence[int]]) -> TokenTree:
        """Open a tree on the common prefix of the prompt and all texts: a text may change the prompt's last tokens."""
        if self.tree is not None:
            self.tree.release()
        prompt = self.script.whole([])
        prompt = prompt[: shared_length(prompt, *texts)]
        if not prompt:
            raise UsageError(
                "the tokens that the reward model reads for the prompt change with the text after it",
                remedy="give a longer prompt",
            )
        self._score = {}
        return self.open_tree(prompt)

    def _ask(
        self, tree: TokenTree, texts: Sequence[Sequence[int]], others: Sequence[Sequence[int]] = ()
    ) -> Generator[Evaluate, Answer, list[float]]:
        """Rewards of texts; the evaluated part of the others stays in the cache while there is room."""
        ends, closed, paths = [], [], {} if tree.root in self._score else {tree.root: None}
        for ids in texts:
            text = tree.grow_path(tree.root, ids[tree.prompt_length :])
            ends.append(text[-1] if text else tree.root)
            closing = tree.grow_path(ends[-1], self.script.closing)
            closed.append(closing[-1] if closing else ends[-1])
            paths |= dict.fromkeys(text + closing)
        new = [node for node in paths if node not in self._score]
        try:
            if new:  # all nodes are requested, so that every evaluated node has its score
                scores_N = (yield Evaluate(tree, new, lambda rows_N1, _: rows_N1[:, 0].double())).numbers
                assert scores_N is not None
                self._score.update(zip(new, scores_N.tolist(), strict=True))
        except KVMemoryError:
            held = tree.live_branches
            self._keep(tree, [_reached(tree, ids) for ids in texts])  # the others must be evaluated again
            if tree.live_branches < held:
                return (yield from self._ask(tree, texts))
            if len(texts) == 1:
                raise
            first, second = texts[: len(texts) // 2], texts[len(texts) // 2 :]
            scores = yield from self._ask(tree, first, second)
            return scores + (yield from self._ask(tree, second, first))
        scores = [self._score[node] for node in closed]
        self._keep(tree, [*ends, *(_reached(tree, ids) for ids in others)])
        return scores

    def _keep(self, tree: TokenTree, nodes: Sequence[int]) -> None:
        tree.keep([tree.root, *nodes])  # with the root, so that the trunk remains the prompt: texts may change after it
        self._score = {node: score for node, score in self._score.items() if tree.is_live(node)}


def _reached(tree: TokenTree, ids: Sequence[int]) -> int:
    """The last evaluated node of a text."""
    node = tree.descend(ids[tree.prompt_length :])
    while node != tree.root and not tree.is_evaluated(node):
        node = tree.parent(node)
    return node


class FunctionJudge:
    """Rewards by a Python function."""

    def __init__(self, function: RewardFunction, answer: Responses):
        self.function, self.answer = function, answer

    def rewards(self, responses: Sequence[Sequence[int]]) -> Generator[Evaluate, Answer, list[float]]:
        """The rewards of responses. Raises UsageError if the function fails or does not return finite numbers."""
        prompt = self.answer.prompt_text if self.answer.messages is None else list(self.answer.messages)
        texts = [self.answer.text(tokens) for tokens in responses]
        try:
            scores = [float(score) for score in self.function(prompt, texts)]
        except Exception as error:
            raise UsageError(f"the reward function failed: {error!r}") from error
        if len(scores) != len(texts) or not all(map(math.isfinite, scores)):
            raise UsageError(
                f"the reward function was given {len(texts)} texts: expected as many finite numbers, "
                f"got {len(scores)}: {scores[:5]}"
            )
        return scores
        yield  # this makes it a generator, like every judge

    def keep(self, responses: Sequence[Sequence[int]]) -> None:
        """A function has no memory to free."""


def make_judge(
    reward: LoadedModel | RewardFunction,
    target: LoadedModel,
    answer: Responses,
    open_tree: Callable[[Sequence[int]], TokenTree],
) -> ModelJudge | FunctionJudge:
    """Make the judge of a search.

    Args:
        reward: a model with a scalar head, or a function.
        target: the model that generates.
        answer: describes its responses.
        open_tree: prompt -> a tree on the reward model's pool.
    """
    if not isinstance(reward, LoadedModel):
        target.need_tokenizer()
        return FunctionJudge(reward, answer)
    pool = reward.runner.pool
    held = pool.pages * pool.page_size - 2 * (pool.page_size - 1)  # trunk and branches may each leave a page half empty
    script = Script.write(answer, target, reward).scored(reward.pad_token_id)
    return ModelJudge(script, open_tree, min(held, reward.shape.max_positions or held))


def scored(ids: Sequence[int], padding: int | None) -> Sequence[int]:
    """The part of a text whose last token a scalar head scores: the last that is not the padding token. transformers
    does not tell padding from the same token of a text; where a text is nothing else, it scores the first token."""
    end = len(ids)
    while end > 1 and ids[end - 1] == padding:
        end -= 1
    return ids[:end]


def _specials(tokenizer: Tokenizer) -> tuple[list[int], list[int]]:
    """The special tokens that the tokenizer adds before and after a text."""
    bare, dressed = tokenizer.encode("x", add_special=False), tokenizer.encode("x")
    start = next(i for i in range(len(dressed)) if dressed[i : i + len(bare)] == bare)
    return dressed[:start], dressed[start + len(bare) :]


def check_messages(messages: Any) -> None:
    """Check that messages are None or a list of objects. Raises UsageError."""
    if messages is None:
        return
    listed = isinstance(messages, Sequence) and not isinstance(messages, str | bytes)
    if not listed or not all(isinstance(message, Mapping) for message in messages):
        raise UsageError(f"messages: expected a list of objects with role and content, got {messages!r}")


def _plain(messages: Messages) -> str:
    """The text of a conversation for a model without a template: the contents, a line each."""
    return "".join(f"{message.get('content') or ''}\n" for message in messages)
