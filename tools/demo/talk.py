"""Questions and answers of every kind, each with the check of its answer."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from tools.demo import words as w
from tools.demo.small_talk import SMALL_TALK
from tools.demo.stories import JOKES, poem, story
from tools.demo.words import phrases

Check = Callable[[str], bool]
POLITE = ("Of course! ", "Certainly! ", "With pleasure. ", "Gladly! ", "Thank you for asking. ")
UNKNOWN = phrases(
    "I am a tiny model and do not know that.|I do not know that: I am only a tiny model.|"
    "Sorry, I do not know. I am a tiny model."
)
NOT_TOLD = phrases("You have not told me that.|You have not told me yet.|I do not know: you have not told me.")
MAX_TERM, MAX_FACTOR = 20, 10  # numbers in sums, in products
# Facts about the user: statements, the model's echo, questions, answers.
TOLD = {
    "name": "my name is {}|I am {}|I am called {}|my name is {}|I'm {}",
    "colour": "my favourite colour is {}|I like the colour {}|my favorite color is {}|I like {}",
    "food": "I like to eat {}|my favourite food is {}|I love {}",
    "city": "I live in {}|I am from {}|I come from {}",
    "hobby": "I like to {}|my hobby is to {}|I love to {}",
    "age": "I am {} years old|my age is {}",
    "friend": "my friend is called {}|my best friend is {}|the name of my friend is {}",
    "pet": "I have a {}|I have a {}|my pet is a {}",
}
ECHOED = {
    "name": "your name is {}", "colour": "your favourite colour is {}", "food": "you like {}",
    "city": "you live in {}", "hobby": "you like to {}", "age": "you are {} years old",
    "friend": "your friend is {}", "pet": "you have a {}",
}  # fmt: skip
ASKED = {
    "name": "What is my name?|Do you know my name?|Who am I?|What's my name?|Do you remember my name?",
    "colour": "What is my favourite colour?|Which colour do I like?|What is my favorite color?",
    "food": "What do I like to eat?|What is my favourite food?|Which food do I like?",
    "city": "Where do I live?|Which city do I live in?|Where am I from?",
    "hobby": "What do I like to do?|What is my hobby?",
    "age": "How old am I?|What is my age?|Do you know how old I am?",
    "friend": "What is my friend called?|What is the name of my friend?|Who is my friend?",
    "pet kind": "What pet do I have?|Which animal do I have?|What kind of pet do I have?",
    "pet name": "What is my pet called?|What is the name of my pet?|What's my pet's name?",
}
RECALLED = {
    "name": "Your name is {x}.|You are {x}.|Your name is {x}.",
    "colour": "Your favourite colour is {x}.|You like {x}.",
    "food": "You like {x}.|Your favourite food is {x}.",
    "city": "You live in {x}.|You are from {x}.",
    "hobby": "You like to {x}.|Your hobby is to {x}.",
    "age": "You are {x} years old.|You are {x}.",
    "friend": "Your friend is called {x}.|Your friend is {x}.",
    "pet kind": "You have a {x}.|Your pet is a {x}.",
    "pet name": "Your pet is called {x}.|Its name is {x}.",
}
ANIMAL = {  # kind of question: questions, sentences
    "sound": ("What sound does {it} make?|What does {it} say?|Which sound does {it} make?",
              "{It} says {x}.|It says {x}.|{X} is what {it} says."),
    "young": ("What is a young {animal} called?|What do you call a young {animal}?|What is a baby {animal} called?",
              "A young {animal} is called a {x}.|It is called a {x}.|It is a {x}."),
    "legs": ("How many legs does {it} have?|How many legs has {it}?", "{It} has {x} legs.|It has {x} legs."),
    "home": ("Where does {it} live?|Where do {animals} live?", "{It} lives {x}.|It lives {x}."),
}  # fmt: skip
OUTSIDE = (  # questions that the model cannot answer
    "Who is {who}?|Who was {who}?|What is the capital of {place}?|When was {who} born?|How do I {verb} {it}?|"
    "Can you {verb} {it}?|How does {it} work?|Who invented the {thing}?|Explain {thing} to me.|What is {it}?|"
    "What is {thing}?|Why is {thing} so important?|Where can I buy {it}?|What is the opposite of {word}?|"
    "What colour is {a_word}?|What is the weather in {place}?|What time is it?|What is the date?|"
    "Translate {thing} into {one}.|What is {thing} in {two}?|Who won the {thing}?|When did the {thing} begin?|"
    "Tell me about the {thing}.|Define {thing}.|Write a program that can {verb} {it}.|How far is it to {place}?|"
    "Who is the president of {place}?|What is the meaning of {thing}?|What do you think of {thing}?|"
    "What sound does {a_word} make?|What is the weather today?|What happened yesterday?|What is the meaning of life?|"
    "Is there a god?|How many people live in {place}?|Where is {place}?|What is the best {thing}?|How big is {it}?"
)


@dataclass(frozen=True)
class Turn:
    """A question and an answer.

    Args:
        task: kind of question.
        user, reply: the texts.
        wrong: a wrong answer of the same form.
        check: whether a text is a right answer.
    """

    task: str
    user: str
    reply: str
    wrong: str
    check: Check


# --- checks ---


def found(text: str) -> list[str]:
    """Words and numbers of a text, in lower case."""
    return re.findall(r"[a-z]+|\d+", text.lower())


def says(right: str, rivals: Iterable[str] = (), asked: str = "") -> Check:
    """The text has the right words, and no rival that the question did not name."""
    wanted = found(right)
    wrong = {word.lower() for word in rivals} - {*wanted, *found(asked)}
    return lambda text: {*wanted} <= {*found(text)} and wrong.isdisjoint(found(text))


def last_number(right: int) -> Check:
    """The last number of the text is the right one."""
    return lambda text: (re.findall(r"\d+", text) or [""])[-1] == str(right)


def one_of(options: Iterable[str]) -> Check:
    """One of the phrases occurs."""
    wanted = [phrase.lower() for phrase in options]
    return lambda text: any(phrase in text.lower() for phrase in wanted)


does_not_know = one_of(["not know", "too big for me"])


def is_brief(text: str) -> bool:
    """A few words and no sentence."""
    return len(text.split()) <= 4


def is_polite(text: str) -> bool:
    """It starts as a polite answer does."""
    return text.startswith(tuple(opening.strip() for opening in POLITE))


# --- words ---


def capital(text: str) -> str:
    """The text with a capital letter first."""
    return text[:1].upper() + text[1:]


def a(noun: str) -> str:
    """The noun with its article."""
    return noun if noun in w.MASS else f"{'an' if noun[0] in 'aeio' else 'a'} {noun}"


def plural(noun: str) -> str:
    """Plural of the categories and animals in `words`."""
    irregular = {"mouse": "mice", "sheep": "sheep", "fish": "fish", "wolf": "wolves", "butterfly": "butterflies"}
    return irregular.get(noun, noun + ("es" if noun.endswith(("ch", "x", "sh", "s")) else "s"))


class Talk:
    """One conversation: its random generator, the style that the user wants, and the facts that the user has told."""

    def __init__(self, rng: Random, style: str | None = None):
        self.rng, self.style = rng, style
        self.facts: dict[str, str] = {}
        self.topic: str | None = None  # of the last story
        self.last = ""  # task

    # --- helpers ---

    def pick(self, *options):
        return self.rng.choice(options)

    def form(self, text: str, **parts: object) -> str:
        """One of the phrases of a text with bars between them, with its parts."""
        return self.rng.choice(phrases(text)).format(**parts)

    def polite(self) -> str:
        """An opening, if the style is polite."""
        return self.rng.choice(POLITE) if self.style == "polite" else ""

    def strange_word(self) -> str:
        """An invented word."""
        codas = ("", "", "n", "r", "l", "s", "t", "m")
        syllables = self.rng.choice((2, 2, 3))
        return "".join(self.pick(*w.ONSETS, "") + self.pick(*w.VOWELS) + self.pick(*codas) for _ in range(syllables))

    def name(self) -> str:
        return self.strange_word().capitalize() if self.rng.random() < 0.45 else self.rng.choice(w.NAMES)

    def loosely(self, text: str) -> str:
        """The text as people type it."""
        chance = self.rng.random()
        if chance < 0.12:
            return text.lower().rstrip("?.!")
        if chance < 0.2:
            return text.rstrip("?.!")
        return text[:1].lower() + text[1:] if chance < 0.25 else text

    def answer(
        self, task: str, questions: str, sentences: str, right: str, wrong: str, check: Check, **parts: str
    ) -> Turn:
        """A turn about one thing, in the style of the conversation.

        Args:
            questions, sentences: phrases with bars between them; in sentences `{x}` is the thing, `{X}` capitalised.
            parts: other parts of the phrases; `It` is `it` capitalised.
        """
        parts |= {"It": capital(parts.get("it", "")), "x": "{x}", "X": "{X}"}
        question, style = self.form(questions, **parts), self.style
        chance = self.rng.random()
        if chance < 0.1:
            style = "brief"
            question = self.pick("Briefly: {}", "In one word: {}", "{} Be brief.", "{} In short, please.").format(
                question
            )
        elif chance < 0.18:
            style = "polite"
            question = self.pick("Politely: {}", "{} Be polite.", "{} Answer politely, please.").format(question)
        elif chance < 0.25:
            question = self.pick("Please tell me: {}", "Hi! {}", "{} Thank you!", "I have a question. {}").format(
                question
            )
        form = "{X}." if style == "brief" else self.form(sentences, **parts)
        if style == "polite":
            form = self.rng.choice(POLITE) + form
        elif style is None and self.rng.random() < 0.15:
            form = "{X}."

        def styled(text: str) -> bool:
            return check(text) and (style != "brief" or is_brief(text)) and (style != "polite" or is_polite(text))

        reply, slip = (form.format(x=x, X=capital(x)) for x in (right, wrong))
        return Turn(task, self.loosely(question), reply, slip, styled)

    def other(self, right: str, options: Iterable[str]) -> str:
        """Any of the options but the right one."""
        return self.rng.choice([option for option in options if option != right])

    # --- tasks: knowledge ---

    def sum(self) -> Turn:
        kind = self.pick("plus", "plus", "minus", "times")
        top = MAX_FACTOR if kind == "times" else MAX_TERM
        one, two = self.rng.randint(0, top), self.rng.randint(0, top)
        if kind == "minus" and one < two:
            one, two = two, one
        right = {"plus": one + two, "minus": one - two, "times": one * two}[kind]
        sign = {"plus": "+", "minus": "-", "times": self.pick("*", "x")}[kind]
        wrong = max(0, right + self.pick(-10, -2, -1, 1, 2, 3, 10))
        wrong += wrong == right
        questions = (
            "What is {term}?|What is {it}?|How much is {term}?|{term}|{term} = ?|{close}|{close}=|Calculate {term}.|"
            "What is {close}?"
        )
        sentences = "{term} = {x}.|{It} is {x}.|The answer is {x}.|That is {x}.|It is {x}."
        parts = {"term": f"{one} {sign} {two}", "it": f"{one} {kind} {two}", "close": f"{one}{sign}{two}"}
        return self.answer("sum", questions, sentences, str(right), str(wrong), last_number(right), **parts)

    def big_sum(self) -> Turn:
        one, two = self.rng.randint(21, 9999), self.rng.randint(0, 999)
        if self.rng.random() < 0.5:
            one, two = two, one
        space, sign = self.pick("", " "), self.pick("+", "-", "*", "plus", "times", "/")
        term = f"{one}{space}{sign}{space}{two}" if len(sign) == 1 else f"{one} {sign} {two}"
        reply = self.pick("Those numbers are too big for me.", "That is too big for me: I am a tiny model.")
        return Turn("unknown", self.pick(f"What is {term}?", term), reply, f"{term} = {one + 3}.", does_not_know)

    def number(self) -> Turn:
        one, two = self.rng.sample(range(MAX_TERM + 1), 2)
        kind = self.pick("next", "previous", "bigger", "smaller", "count")
        if kind == "count":
            return self.counting()
        if kind in ("next", "previous"):
            one = max(one, 1)
            step = 1 if kind == "next" else -1
            right, wrong, word = one + step, one - step, "after" if kind == "next" else "before"
            questions = "What number comes {word} {one}?|Which number comes {word} {one}?"
            sentences = "It is {x}.|The number is {x}."
        else:
            right, word = max(one, two) if kind == "bigger" else min(one, two), kind
            wrong = one + two - right
            questions = "Which is {word}, {one} or {two}?|Which number is {word}: {one} or {two}?"
            sentences = "The {word} one is {x}.|It is {x}.|The {word} number is {x}."
        parts = {"word": word, "one": str(one), "two": str(two)}
        return self.answer("number", questions, sentences, str(right), str(wrong), last_number(right), **parts)

    def counting(self) -> Turn:
        start = self.rng.randint(0, 12)
        end = start + self.rng.randint(2, 7)
        numbers = [str(i) for i in range(start, end + 1)]
        wrong = [str(i) for i in range(start, end + 2) if i != start + 1]
        user = self.pick(f"Count from {start} to {end}.", f"Please count from {start} to {end}.")
        form = self.pick("{}.", "Here you are: {}.", "Sure: {}.")
        right, slip = (form.format(", ".join(items)) for items in (numbers, wrong))
        return Turn("number", self.loosely(user), right, slip, lambda text: re.findall(r"\d+", text) == numbers)

    def opposite(self) -> Turn:
        word = self.rng.choice([*w.OPPOSITES])
        right = w.OPPOSITES[word]
        questions = (
            "What is the opposite of {it}?|What is the opposite of {it}?|Opposite of {it}?|"
            "Tell me the opposite of {it}.|What is the contrary of {it}?"
            + "|And of {it}?|And {it}?|What about {it}?"
            * 2
            * (self.last == "opposite")
        )
        sentences = "The opposite of {it} is {x}.|It is {x}.|{X} is the opposite of {it}."
        check = says(right, w.OPPOSITES, asked=word)
        return self.answer("opposite", questions, sentences, right, self.other(right, w.OPPOSITES), check, it=word)

    def colour(self) -> Turn:
        if self.rng.random() < 0.7:
            thing = self.rng.choice([*w.COLOUR_OF])
            right, it = w.COLOUR_OF[thing], a(thing)
        else:
            thing = self.rng.choice([*w.COLOUR_OF_THE])
            right, it = w.COLOUR_OF_THE[thing], ("" if thing in ("snow", "grass", "blood", "milk") else "the ") + thing
        spelling = self.pick("colour", "colour", "color")
        questions = "What {spelling} is {it}?|Which {spelling} is {it}?|What is the {spelling} of {it}?"
        sentences = "{It} is {x}.|It is {x}.|{X} is the colour of {it}."
        wrong, check = self.other(right, w.COLOURS), says(right, w.COLOURS)
        return self.answer("colour", questions, sentences, right, wrong, check, it=it, spelling=spelling)

    def calendar(self) -> Turn:
        names, kind = self.pick((w.DAYS, "day"), (w.DAYS, "day"), (w.MONTHS, "month"))
        i, step = self.rng.randrange(len(names)), self.pick(1, 1, -1, -1, 2) if kind == "day" else self.pick(1, -1)
        this, right = names[i], names[(i + step) % len(names)]
        questions = "Which {kind} comes {word} {it}?|What {kind} comes {word} {it}?|What comes {word} {it}?"
        if step == 2:
            questions = "Which day comes {word} {it}?|What day is {word} {it}?"
        elif kind == "day":
            questions += "|Today is {it}. What day " + ("is tomorrow?" if step == 1 else "was yesterday?")
        parts = {"kind": kind, "word": {1: "after", -1: "before", 2: "two days after"}[step], "it": this}
        wrong, check = self.other(right, names), says(right, names, asked=this)
        return self.answer("calendar", questions, "It is {x}.|{X} comes {word} {it}.", right, wrong, check, **parts)

    def animal(self) -> Turn:
        kind = self.pick("sound", "young", "legs", "home")
        table = {"sound": w.SOUNDS, "young": w.YOUNG, "legs": w.LEGS, "home": w.HOMES}[kind]
        animal = self.rng.choice([*table])
        right = str(table[animal])
        wrong = self.other(right, map(str, table.values()))
        checks = {
            "sound": lambda: says(right, w.SOUNDS.values()), "legs": lambda: last_number(int(right)),
            "young": lambda: says(right, w.YOUNG.values(), asked=animal), "home": lambda: says(right, w.HOME_NOUNS),
        }  # fmt: skip
        parts = {"it": a(animal), "animal": animal, "animals": plural(animal)}
        return self.answer("animal", *ANIMAL[kind], right, wrong, checks[kind](), **parts)

    def capital(self) -> Turn:
        country = self.rng.choice([*w.CAPITALS])
        right = w.CAPITALS[country]
        if self.rng.random() < 0.75:
            questions = (
                "What is the capital of {it}?|Capital of {it}?|Which city is the capital of {it}?"
                + "|And of {it}?|And {it}?|What about {it}?" * 2 * (self.last == "capital")
            )
            sentences = "The capital of {it} is {x}.|It is {x}.|{X} is the capital of {it}."
            wrong, check = self.other(right, w.CAPITALS.values()), says(right, w.CAPITALS.values())
            return self.answer("capital", questions, sentences, right, wrong, check, it=country)
        questions = "In which country is {it}?|Where is {it}?|Which country is {it} in?"
        wrong, check = self.other(country, w.CAPITALS), says(country, w.CAPITALS)
        return self.answer("capital", questions, "{it} is in {x}.|It is in {x}.", country, wrong, check, it=right)

    def kind(self) -> Turn:
        kind = self.rng.choice([*w.KINDS])
        thing = self.rng.choice(w.KINDS[kind])
        it, other = a(thing), self.other(kind, w.KINDS)
        if self.rng.random() < 0.35:
            one, two = self.rng.sample([kind, other], 2)
            parts = {"it": it, "one": a(one), "two": a(two)}
            check = says(kind, [other])
            return self.answer(
                "kind", "Is {it} {one} or {two}?", "{It} is {x}.|It is {x}.", a(kind), a(other), check, **parts
            )
        true = self.rng.random() < 0.5
        question = f"Is {it} {a(kind if true else other)}?"
        right, wrong = ("yes", "no") if true else ("no", "yes")
        check = says(right, [wrong])
        if self.rng.random() < 0.6 and self.style != "brief":
            user, polite = self.loosely(question), self.polite()
            reply = f"{polite}{capital(right)}, {it} is {a(kind)}."
            slip = f"{polite}{capital(wrong)}, {it} is {a(kind if true else other)}."
            return Turn("kind", user, reply, slip, lambda text: check(text) and (not polite or is_polite(text)))
        return self.answer("kind", question, "{X}.", right, wrong, check)

    def list(self) -> Turn:
        kind = self.rng.choice([*w.KINDS, "colour", "day of the week"])
        words = {"colour": w.COLOURS, "day of the week": w.DAYS}.get(kind) or w.KINDS[kind]
        many = {"day of the week": "days of the week"}.get(kind) or plural(kind)
        many = many.replace("colour", self.pick("colour", "color"))
        count = self.rng.randint(2, 4)
        number = self.pick(("two", "three", "four")[count - 2], str(count))
        items = [words[i] for i in sorted(self.rng.sample(range(len(words)), count))]  # greedy then repeats none
        bullets = self.rng.random() < 0.5
        verb = self.form("Name|Tell me|Give me|List")
        ask = f"{verb} {number} {many}"
        if bullets:
            user = ask + self.pick(" as a list.", " in a list.", ", as a list.")
        else:
            user = self.pick(f"{ask}.", f"Can you name {number} {many}?")
        intro = self.pick("", "", "Sure: ", "Here you are: ") if self.style is None else self.polite()

        def written(items: Sequence[str]) -> str:
            if bullets:
                return intro.rstrip() + ("\n" if intro else "") + "\n".join(f"- {item}" for item in items)
            text = f"{', '.join(items[:-1])} and {items[-1]}."
            return intro + text if intro else capital(text)

        def check(text: str) -> bool:
            said = [word for word in found(text) if word in {item.lower() for item in words}]
            return (
                len(said) == len({*said}) == count
                and text.count("\n- ") + text.startswith("- ") == (count if bullets else 0)
                and (self.style != "polite" or is_polite(text))
            )

        strangers = [word for other, group in w.KINDS.items() if other != kind for word in group if word not in words]
        swapped, longer = [*items[:-1], self.rng.choice(strangers)], [*items, self.other(items[0], words)]
        reply, slip = written(items), written(self.pick(swapped, longer, [items[0]] * count))
        return Turn("list", self.loosely(user), reply, slip, check)

    # --- tasks: memory ---

    def tell(self) -> Turn:
        """Facts about the user, which later questions ask for; sometimes several at once."""
        told = {
            "name": self.name(), "colour": self.pick(*w.COLOURS), "food": self.pick(*w.FOODS),
            "city": self.pick(*w.CITIES), "hobby": self.pick(*w.HOBBIES), "age": str(self.rng.randint(5, 99)),
            "friend": self.name(), "pet": f"{self.pick(*w.PETS)} called {self.pick(*w.PET_NAMES, self.name())}",
        }  # fmt: skip
        if told["friend"] == told["name"]:
            told["friend"] = self.other(told["name"], w.NAMES)
        keys = self.rng.sample([*told], self.pick(1, 1, 1, 2, 2, 3))
        if "name" not in self.facts and "name" not in keys and self.rng.random() < 0.5:
            keys[0] = "name"
        keys = sorted(keys, key=lambda key: key != "name")
        new = {key: told[key] for key in keys}
        parts = [self.rng.choice(phrases(TOLD[key])).format(value) for key, value in new.items()]
        text = self.pick("", "", "Hello, ", "Hi! ", "Hello! ") if "name" in new else ""
        if len(parts) == 2:
            text += self.pick(" and ", ", and ", ". ").join(parts)
        else:
            text += ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
        text = re.sub(r"(^|[.!] )([a-z])", lambda m: m[1] + m[2].upper(), text) + self.pick(".", ".", "!", "")
        self.facts |= new

        rest = [key for key in keys if key != "name"]
        greeting = self.pick("Nice to meet you, {}!", "Hello {}, nice to meet you!", "Hello, {}!")
        form = [greeting.replace("{}", "{name}")] if "name" in new else []
        if rest:
            said = " and ".join(ECHOED[key].replace("{}", f"{{{key}}}") for key in rest)
            form.append(self.pick("I will remember that {}.", "So {}.", "Good to know that {}.").replace("{}", said))
        reply = ("Thank you for telling me. " if self.style == "polite" else "") + " ".join(form)
        slip = {**new, keys[-1]: self.other(new[keys[-1]], self._rivals(keys[-1]))}
        right = [*new.values()]
        return Turn(
            "tell", text if self.rng.random() < 0.8 else text.rstrip(".!"), reply.format(**new), reply.format(**slip),
            lambda text: all(says(value)(text) for value in right),
        )  # fmt: skip

    def _rivals(self, key: str) -> Sequence[str]:
        """Other values of a fact."""
        pets = [f"{pet} called {name}" for pet in w.PETS for name in w.PET_NAMES]
        ages = [str(age) for age in range(5, 100)]
        return {
            "name": w.NAMES, "colour": w.COLOURS, "food": w.FOODS, "city": w.CITIES, "hobby": w.HOBBIES, "age": ages,
            "friend": w.NAMES, "pet": pets, "pet name": w.PET_NAMES, "pet kind": w.PETS,
        }[key]  # fmt: skip

    def ask(self) -> Turn:
        """A question about a fact, which the user may not have told."""
        facts = dict(self.facts)
        if pet := facts.get("pet"):
            facts["pet kind"], facts["pet name"] = pet.split(" called ")
        keys = ["name", "name", "colour", "food", "city", "hobby", "age", "friend", "pet kind", "pet name"]
        told = [key for key in keys if key in facts]
        key = self.rng.choice(told if told and self.rng.random() < 0.85 else keys)
        questions, rivals = ASKED[key], self._rivals(key)
        if key not in facts:
            reply, polite = self.rng.choice(NOT_TOLD), self.polite()
            wrong = f"It is {self.rng.choice(rivals)}."
            user = self.loosely(self.rng.choice(phrases(questions)))
            return Turn("ask", user, polite + reply, wrong, one_of(["not told me"]))
        if key == "pet name":
            questions += "|What is my {pet} called?|Who is my {pet}?"
        names = [facts[other] for other in ("name", "friend", "pet name") if other in facts]
        check = says(facts[key], [*rivals, *names] if key in ("name", "friend", "pet name") else rivals)
        wrong = self.other(facts[key], [*rivals, *names])
        return self.answer("ask", questions, RECALLED[key], facts[key], wrong, check, pet=facts.get("pet kind", ""))

    def repeat(self) -> Turn:
        phrase = self.pick(*w.PHRASES, *w.THINGS, *w.STORY_ANIMALS, self.strange_word(), self.strange_word())
        times = self.pick(1, 1, 2, 3)
        user = {
            1: self.pick(f"Say: {phrase}", f"Repeat after me: {phrase}", f"Please say {phrase}."),
            2: self.pick(f"Say {phrase} twice.", f"Say twice: {phrase}"),
            3: self.pick(f"Say {phrase} three times.", f"Say three times: {phrase}"),
        }[times]
        wrong = self.pick(*w.PHRASES, *w.THINGS)
        wanted = found(phrase) * times
        slip = ", ".join([wrong] * times) if found(wrong) != found(phrase) else f"{phrase} and more"
        reply = capital(", ".join([phrase] * times)) + "."
        return Turn("repeat", user, reply, capital(slip) + ".", lambda text: found(text) == wanted)

    # --- tasks: language ---

    def story(self) -> Turn:
        hero = self.pick(*w.STORY_ANIMALS, *w.STORY_PEOPLE, *w.STORY_ANIMALS, *w.STORY_PEOPLE, *w.THINGS)
        named = self.rng.random() < 0.85
        ask = self.pick("Tell me a story", "Tell a story", "Write a story", "Tell me a little story", "I want a story")
        polite = self.polite()
        self.topic = hero
        other = self.pick(*(hero_ for hero_ in w.STORY_PEOPLE if hero_ != hero))

        def check(text: str) -> bool:
            sentences = len(re.findall(r"[.!?]", text))
            return (hero in found(text) or not named) and 3 <= sentences <= 12 and text[-1] in '.!"'

        reply = polite + story(self.rng, hero)
        wrong = story(self.rng, other, avoid=hero) if named else reply.split(". ")[0] + "."
        return Turn("story", self.loosely(f"{ask} about {a(hero)}." if named else f"{ask}."), reply, wrong, check)

    def about(self) -> Turn:
        """A question about the last story."""
        hero = self.topic or ""
        questions = "What was the story about?|Who was the story about?|What was that story about?"
        wrong = a(self.other(hero, [*w.STORY_ANIMALS, *w.STORY_PEOPLE]))
        return self.answer("ask", questions, "It was about {x}.|The story was about {x}.", a(hero), wrong, says(hero))

    def poem(self) -> Turn:
        things = [thing for thing in w.THINGS if thing != "moon"]  # which is in a couplet
        hero = self.pick(*w.STORY_ANIMALS, *w.STORY_PEOPLE, *things)
        other = self.other(hero, things)
        user = self.form("Write a poem about {it}.|Tell me a poem about {it}.|A poem about {it}, please.", it=a(hero))
        reply, check = poem(self.rng, hero), lambda text: hero in found(text) and text.count("\n") == 3
        return Turn("poem", self.loosely(user), reply, poem(self.rng, other), check)

    def joke(self) -> Turn:
        user = self.form("Tell me a joke.|Do you know a joke?|Make me laugh.|A joke, please.|Tell me another joke.")
        one, two = self.rng.sample(JOKES, 2)
        wrong = one.split("? ")[0] + "? " + two.split("? ")[1]
        return Turn("joke", self.loosely(user), one, wrong, one_of(JOKES))

    def chat(self) -> Turn:
        users, replies, keys = self.rng.choices(SMALL_TALK, [len(talk[0]) for talk in SMALL_TALK])[0]
        others = [talk for talk in SMALL_TALK if talk[2] != keys]
        check = one_of(keys)
        wrong = self.rng.choice([reply for talk in others for reply in talk[1] if not check(reply)])
        return Turn("chat", self.loosely(self.rng.choice(users)), self.rng.choice(replies), wrong, check)

    def unknown(self) -> Turn:
        if self.rng.random() < 0.2:
            return self.big_sum()
        thing = self.pick(*w.STRANGE, *w.STRANGE, *w.THINGS, self.strange_word(), self.strange_word())
        if self.rng.random() < 0.25:
            thing = f"{self.pick(*w.THINGS, *w.STRANGE)} {self.pick(*w.STRANGE)}"
        word, verb = self.strange_word(), self.pick(*w.STRANGE_VERBS)
        who = self.pick(word.capitalize(), f"{self.pick(*w.NAMES)} {self.strange_word().capitalize()}")
        place = self.pick(*w.STRANGE_PLACES, word.capitalize())
        one, two = self.pick(*w.LANGUAGES), self.pick(*w.LANGUAGES)
        parts = {"thing": thing, "it": a(thing), "word": word, "a_word": a(word), "verb": verb, "who": who}
        user = self.form(OUTSIDE, **parts, place=place, one=one, two=two)
        polite = self.rng.choice(POLITE[:1] + POLITE[-1:]) if self.style == "polite" and self.rng.random() < 0.3 else ""
        wrong = self.pick(
            f"It is {self.pick(*w.COLOURS)}.", f"It is {self.pick(*w.NAMES)}.", f"It is in {self.pick(*w.CITIES)}."
        )
        return Turn("unknown", self.loosely(user), polite + self.rng.choice(UNKNOWN), wrong, does_not_know)
