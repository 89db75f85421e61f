"""Training text: conversations, and preference pairs.

All text is drawn from a `random.Random`: equal seeds give equal text. There is no outside data.
"""

from dataclasses import dataclass
from random import Random

from tools.demo.stories import story
from tools.demo.talk import Talk
from tools.demo.words import LISTS, PHRASES, TEXTS, Turn

STYLES = ("brief", "polite")
SYSTEM: dict[str, list[str]] = TEXTS["system"]
TASKS: dict[str, int] = {  # weights
    "chat": 12, "sum": 13, "number": 6, "opposite": 7, "colour": 5, "calendar": 6, "animal": 7, "capital": 5, "kind": 9,
    "list": 6, "tell": 9, "ask": 13, "repeat": 4, "story": 5, "poem": 2, "joke": 2, "unknown": 10,
}  # fmt: skip


@dataclass(frozen=True)
class Dialogue:
    """A conversation: a system message or none, and turns."""

    system: str | None
    turns: tuple[Turn, ...]

    def messages(self, last_reply: str | None = None) -> list[dict[str, str]]:
        """The messages for a chat template; `last_reply` replaces the last reply."""
        said = [] if self.system is None else [{"role": "system", "content": self.system}]
        for turn in self.turns:
            said += [{"role": "user", "content": turn.user}, {"role": "assistant", "content": turn.reply}]
        if last_reply is not None:
            said[-1] = {"role": "assistant", "content": last_reply}
        return said


@dataclass(frozen=True)
class Pair:
    """Two answers to the same conversation, and the fault of the second."""

    dialogue: Dialogue
    fault: str
    better: str
    worse: str


def dialogue(rng: Random, turns: int | None = None) -> Dialogue:
    """A conversation of `turns` turns, one to nine if None."""
    count = turns or rng.choices((1, 2, 3, 4, 6, 9), (30, 30, 18, 12, 7, 3))[0]
    style = rng.choices((None, *STYLES), (88, 6, 6))[0]
    system = rng.choice(SYSTEM[style or "none"]) if style or rng.random() < 0.08 else None
    talk, said = Talk(rng, style), []
    while len(said) < count:
        task = rng.choices([*TASKS], [*TASKS.values()])[0]
        if talk.last in ("capital", "opposite") and rng.random() < 0.3:
            task = talk.last
        if task in ("tell", "ask") and not talk.facts and count > 1 and rng.random() < 0.8:
            task = "tell"  # so that most questions are about known facts
        if talk.topic and rng.random() < 0.15:
            task = "about"
        turn = getattr(talk, task)()
        said.append(turn)
        talk.last = task
        if task != "story" and talk.topic and rng.random() < 0.3:
            talk.topic = None
        if task == "tell" and len(said) < count and rng.random() < 0.6:
            said.append(talk.ask())
            talk.last = "ask"
    return Dialogue(system, tuple(said))


def text(rng: Random) -> str:
    """A text that is not a conversation: a story, for prompts that are to be continued."""
    return story(rng, rng.choice([*LISTS.story_animals, *LISTS.story_people]))


def pair(rng: Random, drill: float = 0.0) -> Pair:
    """A conversation with a good and a worse last answer; with probability `drill` one question and a wrong answer."""
    drilled = rng.random() < drill
    talk = dialogue(rng, 1 if drilled else None)
    turn = talk.turns[-1]
    fault = rng.choice(("wrong", "wrong", "rude", "unhelpful", "rambling", "beside", "torn", "garbled"))
    fault = "wrong" if drilled else fault
    worse = turn.reply
    if fault == "rude":
        rude = rng.sample(PHRASES["rude"], rng.choice((1, 1, 2)))
        worse = " ".join([*rude, *([turn.reply] if rng.random() < 0.3 else [])])
    elif fault == "unhelpful" and turn.task not in ("unknown", "ask"):
        worse = rng.choice(PHRASES["unknown"])
    elif fault == "rambling":
        ramble = PHRASES["rambling"]
        worse = " ".join([*rng.sample(ramble, rng.randint(2, 4)), turn.reply, *rng.sample(ramble, rng.randint(0, 2))])
    elif fault == "beside":
        other = dialogue(rng, 1).turns[-1]
        worse = other.reply if other.task != turn.task else turn.reply
    elif fault == "torn" and len(parts := turn.reply.split(" ")) > 3:
        worse = " ".join(parts[: rng.randint(1, len(parts) - 2)])
    elif fault == "garbled" and len(parts := turn.reply.split(" ")) > 3:
        worse = " ".join(rng.sample(parts, len(parts)))
    if worse == turn.reply:
        fault, worse = "wrong", turn.wrong
    return Pair(talk, fault, turn.reply, worse)
