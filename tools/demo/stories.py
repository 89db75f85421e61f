"""Short stories and poems, composed of parts that fit each other."""

import re
from random import Random

from tools.demo.words import LISTS, TEXTS

PARTS: dict[str, list[str]] = TEXTS["story"]
WISHES: dict[str, dict[str, list[str]]] = TEXTS["wishes"]


def story(rng: Random, hero: str, avoid: str = "") -> str:
    """A story of four to six sentences about a hero, without the noun to avoid."""
    wish = rng.choice([*WISHES])
    trouble, cure = (rng.choice(WISHES[wish][part]) for part in ("troubles", "cures"))
    other = rng.choice([animal for animal in LISTS.story_animals if animal != hero])
    half = len(LISTS.names) // 2
    name, helper = rng.choice(LISTS.names[:half]), rng.choice(LISTS.names[half:])  # never the same, greedy or not
    opening = rng.choice(PARTS["openings"])
    middle = f"One day {name} wanted to {wish}, but {trouble}."
    parts = [opening, *(["{name} lived {place}."] if "{place}" not in opening and rng.random() < 0.5 else [])]
    text = " ".join([*parts, middle, rng.choice(PARTS["help"]), f"So {cure}.", rng.choice(PARTS["ends"])])
    trait, place = rng.choice(LISTS.traits), rng.choice(PARTS["places"])
    text = text.format(hero=hero, name=name, trait=trait, place=place, helper=helper, other=other)
    return story(rng, hero, avoid) if avoid and re.search(rf"\b{avoid}\b", text) else text


def poem(rng: Random, hero: str) -> str:
    """Four lines about a hero."""
    return "\n".join(rng.sample(PARTS["couplets"], 2)).format(hero=hero)
