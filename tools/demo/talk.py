"""Questions and answers of every kind, each with the check of its answer."""

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from random import Random

from tools.demo import words as w
from tools.demo.small_talk import SMALL_TALK
from tools.demo.stories import JOKES, poem, story

Check = Callable[[str], bool]
POLITE = ("Of course! ", "Certainly! ", "With pleasure. ", "Gladly! ", "Thank you for asking. ")
UNKNOWN = (
    "I am a tiny model and do not know that.",
    "I do not know that: I am only a tiny model.",
    "Sorry, I do not know. I am a tiny model.",
)
MAX_TERM, MAX_FACTOR = 20, 10  # numbers in sums, in products


TOLD = {  # facts as people tell them
    "name": ("my name is {}", "I am {}", "I am called {}", "my name is {}", "I'm {}"),
    "colour": ("my favourite colour is {}", "I like the colour {}", "my favorite color is {}", "I like {}"),
    "food": ("I like to eat {}", "my favourite food is {}", "I love {}"),
    "city": ("I live in {}", "I am from {}", "I come from {}"),
    "hobby": ("I like to {}", "my hobby is to {}", "I love to {}"),
    "age": ("I am {} years old", "my age is {}"),
    "friend": ("my friend is called {}", "my best friend is {}", "the name of my friend is {}"),
    "pet": ("I have a {}", "I have a {}", "my pet is a {}"),
}
ECHOED = {
    "name": "your name is {}", "colour": "your favourite colour is {}", "food": "you like {}",
    "city": "you live in {}", "hobby": "you like to {}", "age": "you are {} years old",
    "friend": "your friend is {}", "pet": "you have a {}",
}  # fmt: skip
ASKED = {
    "name": (
        "What is my name?",
        "Do you know my name?",
        "Who am I?",
        "What's my name?",
        "Do you remember my name?",
    ),
    "colour": ("What is my favourite colour?", "Which colour do I like?", "What is my favorite color?"),
    "food": ("What do I like to eat?", "What is my favourite food?", "Which food do I like?"),
    "city": ("Where do I live?", "Which city do I live in?", "Where am I from?"),
    "hobby": ("What do I like to do?", "What is my hobby?"),
    "age": ("How old am I?", "What is my age?", "Do you know how old I am?"),
    "friend": ("What is my friend called?", "What is the name of my friend?", "Who is my friend?"),
    "pet kind": ("What pet do I have?", "Which animal do I have?", "What kind of pet do I have?"),
    "pet name": ("What is my pet called?", "What is the name of my pet?", "What's my pet's name?"),
}
RECALLED = {
    "name": ("Your name is {x}.", "You are {x}.", "Your name is {x}."),
    "colour": ("Your favourite colour is {x}.", "You like {x}."),
    "food": ("You like {x}.", "Your favourite food is {x}."),
    "city": ("You live in {x}.", "You are from {x}."),
    "hobby": ("You like to {x}.", "Your hobby is to {x}."),
    "age": ("You are {x} years old.", "You are {x}."),
    "friend": ("Your friend is called {x}.", "Your friend is {x}."),
    "pet kind": ("You have a {x}.", "Your pet is a {x}."),
    "pet name": ("Your pet is called {x}.", "Its name is {x}."),
}


@dataclass(frozen=True)
class Turn:
    """A question and an answer.

    Args:
        task: what kind of question it is.
        user, reply: the texts.
        wrong: an answer of the same form that is not right.
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
    """The right words are there, and no rival that the question did not name."""
    wanted = found(right)
    wrong = {word.lower() for word in rivals} - {*wanted, *found(asked)}
    return lambda text: {*wanted} <= {*found(text)} and wrong.isdisjoint(found(text))


def last_number(right: int) -> Check:
    """The last number of the text is the right one."""
    return lambda text: (re.findall(r"\d+", text) or [""])[-1] == str(right)


def one_of(phrases: Iterable[str]) -> Check:
    """One of the phrases occurs."""
    wanted = [phrase.lower() for phrase in phrases]
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
    """Of the category names and the animals here."""
    return {"mouse": "mice", "sheep": "sheep", "fish": "fish", "wolf": "wolves", "butterfly": "butterflies"}.get(
        noun, noun + ("es" if noun.endswith(("ch", "x", "sh", "s")) else "s")
    )


class Talk:
    """One conversation in the making: a generator, the style asked for, and what the person has said of herself."""

    def __init__(self, rng: Random, style: str | None = None):
        self.rng, self.style = rng, style
        self.facts: dict[str, str] = {}
        self.topic: str | None = None  # of the last story
        self.last = ""  # task

    # --- helpers ---

    def pick(self, *options):
        return self.rng.choice(options)

    def strange_word(self) -> str:
        """A word that there is none like."""
        codas = ("", "", "n", "r", "l", "s", "t", "m")
        syllables = self.rng.choice((2, 2, 3))
        return "".join(self.pick(*w.ONSETS, "") + self.pick(*w.VOWELS) + self.pick(*codas) for _ in range(syllables))

    def name(self) -> str:
        return self.strange_word().capitalize() if self.rng.random() < 0.45 else self.rng.choice(w.NAMES)

    def loosely(self, text: str) -> str:
        """As people type."""
        chance = self.rng.random()
        if chance < 0.12:
            return text.lower().rstrip("?.!")
        if chance < 0.2:
            return text.rstrip("?.!")
        return text[:1].lower() + text[1:] if chance < 0.25 else text

    def answer(
        self, task: str, questions: Sequence[str], sentences: Sequence[str], right: str, wrong: str, check: Check
    ) -> Turn:
        """A turn about one thing, in the style asked for; in sentences `{x}` is the thing, `{X}` capitalised."""
        question, style = self.rng.choice(questions), self.style
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
        form = "{X}." if style == "brief" else self.rng.choice(sentences)
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
        term, spelled = f"{one} {sign} {two}", f"{one} {kind} {two}"
        questions = [f"What is {term}?", f"What is {spelled}?", f"How much is {term}?", f"{term}", f"{term} = ?"]
        questions += [f"{one}{sign}{two}", f"{one}{sign}{two}=", f"Calculate {term}.", f"What is {one}{sign}{two}?"]
        sentences = [
            f"{term} = {{x}}.",
            f"{capital(spelled)} is {{x}}.",
            "The answer is {x}.",
            "That is {x}.",
            "It is {x}.",
        ]
        return self.answer("sum", questions, sentences, str(right), str(wrong), last_number(right))

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
            start = self.rng.randint(0, 12)
            end = start + self.rng.randint(2, 7)
            right = ", ".join(map(str, range(start, end + 1)))
            wrong = ", ".join(str(i) for i in range(start, end + 2) if i != start + 1)
            user = self.pick(f"Count from {start} to {end}.", f"Please count from {start} to {end}.")
            numbers = [str(i) for i in range(start, end + 1)]
            form = self.pick("{}.", "Here you are: {}.", "Sure: {}.")
            return Turn(
                "number", self.loosely(user), form.format(right), form.format(wrong),
                lambda text: re.findall(r"\d+", text) == numbers,
            )  # fmt: skip
        if kind in ("next", "previous"):
            one = max(one, 1)
            step = 1 if kind == "next" else -1
            right, word = one + step, "after" if kind == "next" else "before"
            questions = [f"What number comes {word} {one}?", f"Which number comes {word} {one}?"]
            sentences = ["It is {x}.", "The number is {x}."]
            return self.answer("number", questions, sentences, str(right), str(one - step), last_number(right))
        right = max(one, two) if kind == "bigger" else min(one, two)
        questions = [f"Which is {kind}, {one} or {two}?", f"Which number is {kind}: {one} or {two}?"]
        sentences = [f"The {kind} one is {{x}}.", "It is {x}.", f"The {kind} number is {{x}}."]
        return self.answer("number", questions, sentences, str(right), str(one + two - right), last_number(right))

    def opposite(self) -> Turn:
        word = self.rng.choice([*w.OPPOSITES])
        right = w.OPPOSITES[word]
        questions = [f"What is the opposite of {word}?", f"What is the opposite of {word}?", f"Opposite of {word}?"]
        questions += [f"Tell me the opposite of {word}.", f"What is the contrary of {word}?"]
        if self.last == "opposite":
            questions += [f"And of {word}?", f"And {word}?", f"What about {word}?"] * 2
        sentences = [f"The opposite of {word} is {{x}}.", "It is {x}.", f"{{X}} is the opposite of {word}."]
        check = says(right, w.OPPOSITES, asked=word)
        return self.answer("opposite", questions, sentences, right, self.other(right, w.OPPOSITES), check)

    def colour(self) -> Turn:
        if self.rng.random() < 0.7:
            thing = self.rng.choice([*w.COLOUR_OF])
            right, one, it = w.COLOUR_OF[thing], a(thing), a(thing)
        else:
            thing = self.rng.choice([*w.COLOUR_OF_THE])
            article = "" if thing in ("snow", "grass", "blood", "milk") else "the "
            right, one, it = w.COLOUR_OF_THE[thing], article + thing, article + thing
        spelling = self.pick("colour", "colour", "color")
        questions = [f"What {spelling} is {one}?", f"Which {spelling} is {one}?", f"What is the {spelling} of {one}?"]
        sentences = [f"{capital(it)} is {{x}}.", "It is {x}.", f"{{X}} is the colour of {it}."]
        return self.answer("colour", questions, sentences, right, self.other(right, w.COLOURS), says(right, w.COLOURS))

    def calendar(self) -> Turn:
        names, kind = self.pick((w.DAYS, "day"), (w.DAYS, "day"), (w.MONTHS, "month"))
        i, step = self.rng.randrange(len(names)), self.pick(1, 1, -1, -1, 2) if kind == "day" else self.pick(1, -1)
        word = {1: "after", -1: "before", 2: "two days after"}[step]
        this, right = names[i], names[(i + step) % len(names)]
        questions = [
            f"Which {kind} comes {word} {this}?",
            f"What {kind} comes {word} {this}?",
            f"What comes {word} {this}?",
        ]
        if kind == "day" and abs(step) == 1:
            tense = "tomorrow" if step == 1 else "yesterday"
            questions.append(f"Today is {this}. What day {'is' if step == 1 else 'was'} {tense}?")
        if step == 2:
            questions = [f"Which day comes {word} {this}?", f"What day is {word} {this}?"]
        sentences = ["It is {x}.", f"{{X}} comes {word} {this}."]
        check = says(right, names, asked=this)
        return self.answer("calendar", questions, sentences, right, self.other(right, names), check)

    def animal(self) -> Turn:
        kind = self.pick("sound", "young", "legs", "home")
        table = {"sound": w.SOUNDS, "young": w.YOUNG, "legs": w.LEGS, "home": w.HOMES}[kind]
        animal = self.rng.choice([*table])
        right = str(table[animal])
        wrong = self.other(right, map(str, table.values()))
        it = a(animal)
        if kind == "sound":
            questions = [f"What sound does {it} make?", f"What does {it} say?", f"Which sound does {it} make?"]
            sentences = [f"{capital(it)} says {{x}}.", "It says {x}.", f"{{X}} is what {it} says."]
            check = says(right, w.SOUNDS.values())
        elif kind == "young":
            questions = [
                f"What is a young {animal} called?",
                f"What do you call a young {animal}?",
                f"What is a baby {animal} called?",
            ]
            sentences = [f"A young {animal} is called a {{x}}.", "It is called a {x}.", "It is a {x}."]
            check = says(right, w.YOUNG.values(), asked=animal)
        elif kind == "legs":
            questions = [f"How many legs does {it} have?", f"How many legs has {it}?"]
            sentences = [f"{capital(it)} has {{x}} legs.", "It has {x} legs."]
            check = last_number(int(right))
        else:
            questions = [f"Where does {it} live?", f"Where do {plural(animal)} live?"]
            sentences = [f"{capital(it)} lives {{x}}.", "It lives {x}."]
            check = says(right, w.HOME_NOUNS)
        return self.answer("animal", questions, sentences, right, wrong, check)

    def capital(self) -> Turn:
        country = self.rng.choice([*w.CAPITALS])
        right = w.CAPITALS[country]
        check = says(right, w.CAPITALS.values())
        if self.rng.random() < 0.75:
            questions = [
                f"What is the capital of {country}?",
                f"Capital of {country}?",
                f"Which city is the capital of {country}?",
            ]
            if self.last == "capital":
                questions += [f"And of {country}?", f"And {country}?", f"What about {country}?"] * 2
            sentences = [f"The capital of {country} is {{x}}.", "It is {x}.", f"{{X}} is the capital of {country}."]
            return self.answer("capital", questions, sentences, right, self.other(right, w.CAPITALS.values()), check)
        questions = [f"In which country is {right}?", f"Where is {right}?", f"Which country is {right} in?"]
        sentences = [f"{right} is in {{x}}.", "It is in {x}."]
        wrong = self.other(country, w.CAPITALS)
        return self.answer("capital", questions, sentences, country, wrong, says(country, w.CAPITALS))

    def kind(self) -> Turn:
        kind = self.rng.choice([*w.KINDS])
        thing = self.rng.choice(w.KINDS[kind])
        it, other = capital(a(thing)), self.other(kind, w.KINDS)
        if self.rng.random() < 0.35:
            one, two = self.rng.sample([kind, other], 2)
            questions = [f"Is {a(thing)} {a(one)} or {a(two)}?"]
            sentences = [f"{it} is {{x}}.", "It is {x}."]
            return self.answer("kind", questions, sentences, a(kind), a(other), says(kind, [other]))
        true = self.rng.random() < 0.5
        asked = kind if true else other
        yes, no = f"yes, {a(thing)} is {a(kind)}", f"no, {a(thing)} is {a(kind)}"
        right, wrong = ("yes", "no") if true else ("no", "yes")
        if self.rng.random() < 0.6 and self.style != "brief":
            reply, slip = (yes, no) if true else (no, f"yes, {a(thing)} is {a(other)}")
            user = self.loosely(f"Is {a(thing)} {a(asked)}?")
            polite = self.rng.choice(POLITE) if self.style == "polite" else ""
            check = says(right, [wrong])
            return Turn(
                "kind", user, f"{polite}{capital(reply)}.", f"{polite}{capital(slip)}.",
                lambda text: check(text) and (not polite or is_polite(text)),
            )  # fmt: skip
        return self.answer("kind", [f"Is {a(thing)} {a(asked)}?"], ["{X}."], right, wrong, says(right, [wrong]))

    def list(self) -> Turn:
        kind = self.rng.choice([*w.KINDS, "colour", "day of the week"])
        words = {"colour": w.COLOURS, "day of the week": w.DAYS}.get(kind) or w.KINDS[kind]
        many = {"day of the week": "days of the week"}.get(kind) or plural(kind)
        many = many.replace("colour", self.pick("colour", "color"))
        count = self.rng.randint(2, 4)
        number = self.pick(("two", "three", "four")[count - 2], str(count))
        items = [words[i] for i in sorted(self.rng.sample(range(len(words)), count))]  # greedy then repeats none
        bullets = self.rng.random() < 0.5
        ask = self.pick("Name {} {}", "Tell me {} {}", "Give me {} {}", "List {} {}").format(number, many)
        if bullets:
            user = ask + self.pick(" as a list.", " in a list.", ", as a list.")
        else:
            user = self.pick(f"{ask}.", f"Can you name {number} {many}?")
        intro = self.pick("", "", "Sure: ", "Here you are: ") if self.style is None else ""
        intro = self.rng.choice(POLITE) if self.style == "polite" else intro

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
        """Something about oneself, to be asked for later; a few things may be told at once."""
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
        parts = [self.rng.choice(TOLD[key]).format(value) for key, value in new.items()]
        text = self.pick("", "", "Hello, ", "Hi! ", "Hello! ") if "name" in new else ""
        if len(parts) == 2:
            text += self.pick(" and ", ", and ", ". ").join(parts)
        else:
            text += ", ".join(parts[:-1]) + (" and " if len(parts) > 1 else "") + parts[-1]
        text = re.sub(r"(^|[.!] )([a-z])", lambda m: m[1] + m[2].upper(), text) + self.pick(".", ".", "!", "")
        self.facts |= new

        rest = [key for key in keys if key != "name"]
        greeting = self.pick("Nice to meet you, {}!", "Hello {}, nice to meet you!", "Hello, {}!")
        form = [greeting] if "name" in new else []
        if rest:
            said = " and ".join(ECHOED[key].replace("{}", f"{{{key}}}") for key in rest)
            form.append(self.pick("I will remember that {}.", "So {}.", "Good to know that {}.").format(said))
        text_of = " ".join(form).replace("{}", "{name}")
        if self.style == "polite":
            text_of = "Thank you for telling me. " + text_of
        slip = {**new, keys[-1]: self.other(new[keys[-1]], self._rivals(keys[-1]))}
        right = [*new.values()]
        return Turn(
            "tell", text if self.rng.random() < 0.8 else text.rstrip(".!"),
            text_of.format(**new), text_of.format(**slip),
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
        """About something told before, or not told."""
        facts = dict(self.facts)
        if pet := facts.get("pet"):
            facts["pet kind"], facts["pet name"] = pet.split(" called ")
        keys = ["name", "name", "colour", "food", "city", "hobby", "age", "friend", "pet kind", "pet name"]
        told = [key for key in keys if key in facts]
        key = self.rng.choice(told if told and self.rng.random() < 0.85 else keys)
        questions = ASKED[key]
        if key not in facts:
            replies = (
                "You have not told me that.",
                "You have not told me yet.",
                "I do not know: you have not told me.",
            )
            reply = self.rng.choice(replies)
            polite = self.rng.choice(POLITE) if self.style == "polite" else ""
            wrong = f"It is {self.rng.choice(self._rivals(key))}."
            return Turn("ask", self.loosely(self.rng.choice(questions)), polite + reply, wrong, one_of(["not told me"]))
        if key == "pet name":
            questions = (*questions, f"What is my {facts['pet kind']} called?", f"Who is my {facts['pet kind']}?")
        value, rivals = facts[key], self._rivals(key)
        told_names = [facts[other] for other in ("name", "friend", "pet name") if other in facts]
        check = says(value, [*rivals, *told_names] if key in ("name", "friend", "pet name") else rivals)
        return self.answer("ask", questions, RECALLED[key], value, self.other(value, [*rivals, *told_names]), check)

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
        return Turn(
            "repeat", user, capital(", ".join([phrase] * times)) + ".", capital(slip) + ".",
            lambda text: found(text) == wanted,
        )  # fmt: skip

    # --- tasks: language ---

    def story(self) -> Turn:
        hero = self.pick(*w.STORY_ANIMALS, *w.STORY_PEOPLE, *w.STORY_ANIMALS, *w.STORY_PEOPLE, *w.THINGS)
        named = self.rng.random() < 0.85
        ask = self.pick("Tell me a story", "Tell a story", "Write a story", "Tell me a little story", "I want a story")
        polite = self.rng.choice(POLITE) if self.style == "polite" else ""
        self.topic = hero
        other = self.pick(*(hero_ for hero_ in w.STORY_PEOPLE if hero_ != hero))

        def check(text: str) -> bool:
            return (
                (hero in found(text) or not named) and 3 <= len(re.findall(r"[.!?]", text)) <= 12 and text[-1] in '.!"'
            )

        reply = polite + story(self.rng, hero)
        wrong = story(self.rng, other, avoid=hero) if named else reply.split(". ")[0] + "."
        return Turn("story", self.loosely(f"{ask} about {a(hero)}." if named else f"{ask}."), reply, wrong, check)

    def about(self) -> Turn:
        """What the last story was about."""
        hero = self.topic or ""
        rivals = [*w.STORY_ANIMALS, *w.STORY_PEOPLE]
        check = says(hero)
        questions = ["What was the story about?", "Who was the story about?", "What was that story about?"]
        sentences = ["It was about {x}.", "The story was about {x}."]
        return self.answer("ask", questions, sentences, a(hero), a(self.other(hero, rivals)), check)

    def poem(self) -> Turn:
        things = [thing for thing in w.THINGS if thing != "moon"]  # which is in a couplet
        hero = self.pick(*w.STORY_ANIMALS, *w.STORY_PEOPLE, *things)
        other = self.other(hero, things)
        user = self.pick("Write a poem about {}.", "Tell me a poem about {}.", "A poem about {}, please.").format(
            a(hero)
        )
        reply = poem(self.rng, hero)
        return Turn(
            "poem", self.loosely(user), reply, poem(self.rng, other),
            lambda text: hero in found(text) and text.count("\n") == 3,
        )  # fmt: skip

    def joke(self) -> Turn:
        user = self.pick(
            "Tell me a joke.", "Do you know a joke?", "Make me laugh.", "A joke, please.", "Tell me another joke."
        )
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
        user = self.pick(
            f"Who is {who}?", f"Who was {who}?", f"What is the capital of {place}?", f"When was {who} born?",
            f"How do I {verb} {a(thing)}?", f"Can you {verb} {a(thing)}?", f"How does {a(thing)} work?",
            f"Who invented the {thing}?", f"Explain {thing} to me.", f"What is {a(thing)}?", f"What is {thing}?",
            f"Why is {thing} so important?", f"Where can I buy {a(thing)}?", f"What is the opposite of {word}?",
            f"What colour is {a(word)}?", f"What is the weather in {place}?", "What time is it?", "What is the date?",
            f"Translate {thing} into {self.pick(*w.LANGUAGES)}.", f"What is {thing} in {self.pick(*w.LANGUAGES)}?",
            f"Who won the {thing}?", f"When did the {thing} begin?", f"Tell me about the {thing}.", f"Define {thing}.",
            f"Write a program that can {verb} {a(thing)}.", f"How far is it to {place}?",
            f"Who is the president of {place}?",
            f"What is the meaning of {thing}?", f"What do you think of {thing}?", f"What sound does {a(word)} make?",
            "What is the weather today?", "What happened yesterday?", "What is the meaning of life?", "Is there a god?",
            f"How many people live in {place}?", f"Where is {place}?", f"What is the best {thing}?",
            f"How big is {a(thing)}?",
        )  # fmt: skip
        polite = self.rng.choice(POLITE[:1] + POLITE[-1:]) if self.style == "polite" and self.rng.random() < 0.3 else ""
        wrong = self.pick(
            f"It is {self.pick(*w.COLOURS)}.", f"It is {self.pick(*w.NAMES)}.", f"It is in {self.pick(*w.CITIES)}."
        )
        return Turn("unknown", self.loosely(user), polite + self.rng.choice(UNKNOWN), wrong, does_not_know)
