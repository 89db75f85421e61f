"""Questions and answers of every kind, each with a wrong answer."""

import re
from collections.abc import Iterable, Sequence
from random import Random
from typing import Any

from tools.demo.stories import PARTS, poem, story
from tools.demo.words import CITIES, HOMES, KINDS, PHRASES, TABLES, TEXTS, Turn, a, capital, plural
from tools.demo.words import LISTS as w

POLITE = PHRASES["polite"]
Form = dict[str, list[str]]  # questions and sentences
ANSWERS: dict[str, Form] = TEXTS["answers"]
FACTS: dict[str, dict[str, Any]] = TEXTS["facts"]
SMALL_TALK: list[Form] = TEXTS["small_talk"]
MAX_TERM, MAX_FACTOR = 20, 10  # numbers in sums, in products


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

    def form(self, texts: Sequence[str], **parts: object) -> str:
        """One of the texts, with its parts."""
        return self.rng.choice(texts).format(**parts)

    def polite(self) -> str:
        """An opening, if the style is polite."""
        return self.rng.choice(POLITE) if self.style == "polite" else ""

    def strange_word(self) -> str:
        """An invented word."""
        codas = ("", "", "n", "r", "l", "s", "t", "m")
        syllables = self.rng.choice((2, 2, 3))
        return "".join(self.pick(*w.onsets, "") + self.pick(*w.vowels) + self.pick(*codas) for _ in range(syllables))

    def name(self) -> str:
        return self.strange_word().capitalize() if self.rng.random() < 0.45 else self.rng.choice(w.names)

    def loosely(self, text: str) -> str:
        """The text as people type it."""
        chance = self.rng.random()
        if chance < 0.12:
            return text.lower().rstrip("?.!")
        if chance < 0.2:
            return text.rstrip("?.!")
        return text[:1].lower() + text[1:] if chance < 0.25 else text

    def answer(
        self,
        task: str,
        form: Form,
        right: str,
        wrong: str,
        more: Sequence[str] = (),
        **parts: str,
    ) -> Turn:
        """A turn about one thing, in the style of the conversation.

        Args:
            form: the questions and sentences, from `ANSWERS` or `FACTS`.
            more: further questions.
            parts: values of the texts' fields; `{x}` is the right answer, and `It` is `it` capitalised.
        """
        parts |= {"It": capital(parts.get("it", "")), "x": "{x}", "X": "{X}"}
        question, style = self.form([*form["questions"], *more], **parts), self.style
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
        sentence = "{X}." if style == "brief" else self.form(form["sentences"], **parts)
        if style == "polite":
            sentence = self.rng.choice(POLITE) + sentence
        elif style is None and self.rng.random() < 0.15:
            sentence = "{X}."
        reply, slip = (sentence.format(x=x, X=capital(x)) for x in (right, wrong))
        return Turn(task, self.loosely(question), reply, slip)

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
        parts = {"term": f"{one} {sign} {two}", "it": f"{one} {kind} {two}", "close": f"{one}{sign}{two}"}
        return self.answer("sum", ANSWERS["sum"], str(right), str(wrong), **parts)

    def big_sum(self) -> Turn:
        one, two = self.rng.randint(21, 9999), self.rng.randint(0, 999)
        if self.rng.random() < 0.5:
            one, two = two, one
        space, sign = self.pick("", " "), self.pick("+", "-", "*", "plus", "times", "/")
        term = f"{one}{space}{sign}{space}{two}" if len(sign) == 1 else f"{one} {sign} {two}"
        reply = self.pick("Those numbers are too big for me.", "That is too big for me: I am a tiny model.")
        return Turn("unknown", self.pick(f"What is {term}?", term), reply, f"{term} = {one + 3}.")

    def number(self) -> Turn:
        one, two = self.rng.sample(range(MAX_TERM + 1), 2)
        kind = self.pick("next", "previous", "bigger", "smaller", "count")
        if kind == "count":
            return self.counting()
        if kind in ("next", "previous"):
            one = max(one, 1)
            step = 1 if kind == "next" else -1
            right, wrong, word = one + step, one - step, "after" if kind == "next" else "before"
            texts = "next number"
        else:
            right, word = max(one, two) if kind == "bigger" else min(one, two), kind
            wrong = one + two - right
            texts = "greater number"
        parts = {"word": word, "one": str(one), "two": str(two)}
        return self.answer("number", ANSWERS[texts], str(right), str(wrong), **parts)

    def counting(self) -> Turn:
        start = self.rng.randint(0, 12)
        end = start + self.rng.randint(2, 7)
        numbers = [str(i) for i in range(start, end + 1)]
        wrong = [str(i) for i in range(start, end + 2) if i != start + 1]
        user = self.pick(f"Count from {start} to {end}.", f"Please count from {start} to {end}.")
        form = self.pick("{}.", "Here you are: {}.", "Sure: {}.")
        right, slip = (form.format(", ".join(items)) for items in (numbers, wrong))
        return Turn("number", self.loosely(user), right, slip)

    def opposite(self) -> Turn:
        word = self.rng.choice([*TABLES["opposites"]])
        right = TABLES["opposites"][word]
        more = ["And of {it}?", "And {it}?", "What about {it}?"] * 2 if self.last == "opposite" else []
        wrong = self.other(right, TABLES["opposites"])
        return self.answer("opposite", ANSWERS["opposite"], right, wrong, more, it=word)

    def colour(self) -> Turn:
        if self.rng.random() < 0.7:
            thing = self.rng.choice([*TABLES["colour_of"]])
            right, it = TABLES["colour_of"][thing], a(thing)
        else:
            thing = self.rng.choice([*TABLES["colour_of_the"]])
            right = TABLES["colour_of_the"][thing]
            it = thing if thing in ("snow", "grass", "blood", "milk") else f"the {thing}"
        spelling = self.pick("colour", "colour", "color")
        wrong = self.other(right, w.colours)
        return self.answer("colour", ANSWERS["colour"], right, wrong, it=it, spelling=spelling)

    def calendar(self) -> Turn:
        names, kind = self.pick((w.days, "day"), (w.days, "day"), (w.months, "month"))
        i, step = self.rng.randrange(len(names)), self.pick(1, 1, -1, -1, 2) if kind == "day" else self.pick(1, -1)
        this, right = names[i], names[(i + step) % len(names)]
        more = []
        if kind == "day" and step != 2:
            more = ["Today is {it}. What day " + ("is tomorrow?" if step == 1 else "was yesterday?")]
        parts = {"kind": kind, "word": {1: "after", -1: "before", 2: "two days after"}[step], "it": this}
        wrong = self.other(right, names)
        return self.answer("calendar", ANSWERS["two days" if step == 2 else "calendar"], right, wrong, more, **parts)

    def animal(self) -> Turn:
        kind = self.pick("sound", "young", "legs", "home")
        table = {"sound": TABLES["sounds"], "young": TABLES["young"], "legs": TABLES["legs"], "home": HOMES}[kind]
        animal = self.rng.choice([*table])
        right = str(table[animal])
        wrong = self.other(right, map(str, table.values()))
        parts = {"it": a(animal), "animal": animal, "animals": plural(animal)}
        return self.answer("animal", ANSWERS[kind], right, wrong, **parts)

    def capital(self) -> Turn:
        country = self.rng.choice([*TABLES["capitals"]])
        right = TABLES["capitals"][country]
        if self.rng.random() < 0.75:
            more = ["And of {it}?", "And {it}?", "What about {it}?"] * 2 if self.last == "capital" else []
            wrong = self.other(right, TABLES["capitals"].values())
            return self.answer("capital", ANSWERS["capital"], right, wrong, more, it=country)
        wrong = self.other(country, TABLES["capitals"])
        return self.answer("capital", ANSWERS["country"], country, wrong, it=right)

    def kind(self) -> Turn:
        kind = self.rng.choice([*KINDS])
        thing = self.rng.choice(KINDS[kind])
        it, other = a(thing), self.other(kind, KINDS)
        if self.rng.random() < 0.35:
            one, two = self.rng.sample([kind, other], 2)
            parts = {"it": it, "one": a(one), "two": a(two)}
            return self.answer("kind", ANSWERS["one kind of two"], a(kind), a(other), **parts)
        true = self.rng.random() < 0.5
        parts = {"it": it, "one": a(kind if true else other)}
        right, wrong = ("yes", "no") if true else ("no", "yes")
        if self.rng.random() < 0.6 and self.style != "brief":
            user, polite = self.loosely("Is {it} {one}?".format(**parts)), self.polite()
            reply = f"{polite}{capital(right)}, {it} is {a(kind)}."
            slip = f"{polite}{capital(wrong)}, {it} is {a(kind if true else other)}."
            return Turn("kind", user, reply, slip)
        return self.answer("kind", ANSWERS["kind"], right, wrong, **parts)

    def list(self) -> Turn:
        kind = self.rng.choice([*KINDS, "colour", "day of the week"])
        words = {"colour": w.colours, "day of the week": w.days}.get(kind) or KINDS[kind]
        many = {"day of the week": "days of the week"}.get(kind) or plural(kind)
        many = many.replace("colour", self.pick("colour", "color"))
        count = self.rng.randint(2, 4)
        number = self.pick(("two", "three", "four")[count - 2], str(count))
        items = [words[i] for i in sorted(self.rng.sample(range(len(words)), count))]  # greedy then repeats none
        bullets = self.rng.random() < 0.5
        verb = self.pick("Name", "Tell me", "Give me", "List")
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

        strangers = [word for other, group in KINDS.items() if other != kind for word in group if word not in words]
        swapped, longer = [*items[:-1], self.rng.choice(strangers)], [*items, self.other(items[0], words)]
        reply, slip = written(items), written(self.pick(swapped, longer, [items[0]] * count))
        return Turn("list", self.loosely(user), reply, slip)

    # --- tasks: memory ---

    def tell(self) -> Turn:
        """Facts about the user, which later questions ask for; sometimes several at once."""
        told = {
            "name": self.name(), "colour": self.pick(*w.colours), "food": self.pick(*w.foods),
            "city": self.pick(*CITIES), "hobby": self.pick(*w.hobbies), "age": str(self.rng.randint(5, 99)),
            "friend": self.name(), "pet": f"{self.pick(*w.pets)} called {self.pick(*w.pet_names, self.name())}",
        }  # fmt: skip
        if told["friend"] == told["name"]:
            told["friend"] = self.other(told["name"], w.names)
        keys = self.rng.sample([*told], self.pick(1, 1, 1, 2, 2, 3))
        if "name" not in self.facts and "name" not in keys and self.rng.random() < 0.5:
            keys[0] = "name"
        keys = sorted(keys, key=lambda key: key != "name")
        new = {key: told[key] for key in keys}
        parts = [self.rng.choice(FACTS[key]["told"]).format(value) for key, value in new.items()]
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
            said = " and ".join(FACTS[key]["echoed"].replace("{}", f"{{{key}}}") for key in rest)
            form.append(self.pick("I will remember that {}.", "So {}.", "Good to know that {}.").replace("{}", said))
        reply = ("Thank you for telling me. " if self.style == "polite" else "") + " ".join(form)
        slip = {**new, keys[-1]: self.other(new[keys[-1]], self._rivals(keys[-1]))}
        text = text if self.rng.random() < 0.8 else text.rstrip(".!")
        return Turn("tell", text, reply.format(**new), reply.format(**slip))

    def _rivals(self, key: str) -> Sequence[str]:
        """All values that a fact may have."""
        pets = [f"{pet} called {name}" for pet in w.pets for name in w.pet_names]
        ages = [str(age) for age in range(5, 100)]
        return {
            "name": w.names, "colour": w.colours, "food": w.foods, "city": CITIES, "hobby": w.hobbies, "age": ages,
            "friend": w.names, "pet": pets, "pet name": w.pet_names, "pet kind": w.pets,
        }[key]  # fmt: skip

    def ask(self) -> Turn:
        """A question about a fact, which the user may not have told."""
        facts = dict(self.facts)
        if pet := facts.get("pet"):
            facts["pet kind"], facts["pet name"] = pet.split(" called ")
        keys = ["name", "name", "colour", "food", "city", "hobby", "age", "friend", "pet kind", "pet name"]
        told = [key for key in keys if key in facts]
        key = self.rng.choice(told if told and self.rng.random() < 0.85 else keys)
        rivals = self._rivals(key)
        if key not in facts:
            reply, polite = self.rng.choice(PHRASES["not_told"]), self.polite()
            wrong = f"It is {self.rng.choice(rivals)}."
            user = self.loosely(self.rng.choice(FACTS[key]["questions"]))
            return Turn("ask", user, polite + reply, wrong)
        more = ["What is my {pet} called?", "Who is my {pet}?"] if key == "pet name" else []
        names = [facts[other] for other in ("name", "friend", "pet name") if other in facts]
        wrong = self.other(facts[key], [*rivals, *names])
        return self.answer("ask", FACTS[key], facts[key], wrong, more, pet=facts.get("pet kind", ""))

    def repeat(self) -> Turn:
        phrase = self.pick(*PHRASES["repeated"], *w.things, *w.story_animals, self.strange_word(), self.strange_word())
        times = self.pick(1, 1, 2, 3)
        user = {
            1: self.pick(f"Say: {phrase}", f"Repeat after me: {phrase}", f"Please say {phrase}."),
            2: self.pick(f"Say {phrase} twice.", f"Say twice: {phrase}"),
            3: self.pick(f"Say {phrase} three times.", f"Say three times: {phrase}"),
        }[times]
        wrong = self.pick(*PHRASES["repeated"], *w.things)
        slip = ", ".join([wrong] * times) if wrong != phrase else f"{phrase} and more"
        reply = capital(", ".join([phrase] * times)) + "."
        return Turn("repeat", user, reply, capital(slip) + ".")

    # --- tasks: language ---

    def story(self) -> Turn:
        hero = self.pick(*w.story_animals, *w.story_people, *w.story_animals, *w.story_people, *w.things)
        named = self.rng.random() < 0.85
        ask = self.pick("Tell me a story", "Tell a story", "Write a story", "Tell me a little story", "I want a story")
        polite = self.polite()
        self.topic = hero
        other = self.pick(*(hero_ for hero_ in w.story_people if hero_ != hero))

        reply = polite + story(self.rng, hero)
        wrong = story(self.rng, other, avoid=hero) if named else reply.split(". ")[0] + "."
        return Turn("story", self.loosely(f"{ask} about {a(hero)}." if named else f"{ask}."), reply, wrong)

    def about(self) -> Turn:
        """A question about the last story."""
        hero = self.topic or ""
        wrong = a(self.other(hero, [*w.story_animals, *w.story_people]))
        return self.answer("ask", ANSWERS["topic"], a(hero), wrong)

    def poem(self) -> Turn:
        things = [thing for thing in w.things if thing != "moon"]  # which is in a couplet
        hero = self.pick(*w.story_animals, *w.story_people, *things)
        other = self.other(hero, things)
        user = self.pick("Write a poem about {}.", "Tell me a poem about {}.", "A poem about {}, please.").format(
            a(hero)
        )
        reply = poem(self.rng, hero)
        return Turn("poem", self.loosely(user), reply, poem(self.rng, other))

    def joke(self) -> Turn:
        user = self.pick(
            "Tell me a joke.", "Do you know a joke?", "Make me laugh.", "A joke, please.", "Tell me another joke."
        )
        one, two = self.rng.sample(PARTS["jokes"], 2)
        wrong = one.split("? ")[0] + "? " + two.split("? ")[1]
        return Turn("joke", self.loosely(user), one, wrong)

    def chat(self) -> Turn:
        talk = self.rng.choices(SMALL_TALK, [len(talk["users"]) for talk in SMALL_TALK])[0]
        others = [reply for other in SMALL_TALK if other["keys"] != talk["keys"] for reply in other["replies"]]
        keys = [key.lower() for key in talk["keys"]]  # of right replies
        wrong = self.rng.choice([reply for reply in others if not any(key in reply.lower() for key in keys)])
        user, reply = self.loosely(self.rng.choice(talk["users"])), self.rng.choice(talk["replies"])
        return Turn("chat", user, reply, wrong)

    def unknown(self) -> Turn:
        if self.rng.random() < 0.2:
            return self.big_sum()
        thing = self.pick(*w.strange, *w.strange, *w.things, self.strange_word(), self.strange_word())
        if self.rng.random() < 0.25:
            thing = f"{self.pick(*w.things, *w.strange)} {self.pick(*w.strange)}"
        word, verb = self.strange_word(), self.pick(*w.strange_verbs)
        who = self.pick(word.capitalize(), f"{self.pick(*w.names)} {self.strange_word().capitalize()}")
        place = self.pick(*w.strange_places, word.capitalize())
        one, two = self.pick(*w.languages), self.pick(*w.languages)
        parts = {"thing": thing, "it": a(thing), "word": word, "a_word": a(word), "verb": verb, "who": who}
        user = self.form(PHRASES["outside"], **parts, place=place, one=one, two=two)
        polite = self.rng.choice(POLITE[:1] + POLITE[-1:]) if self.style == "polite" and self.rng.random() < 0.3 else ""
        wrong = self.pick(
            f"It is {self.pick(*w.colours)}.",
            f"It is {self.pick(*w.names)}.",
            f"It is in {self.pick(*CITIES)}.",
        )
        return Turn("unknown", self.loosely(user), polite + self.rng.choice(PHRASES["unknown"]), wrong)
