"""Little stories, poems and jokes, put together from parts that fit each other."""

import re
from random import Random

from tools.demo.words import NAMES, STORY_ANIMALS, TRAITS, phrases

PLACES = phrases(
    "in a small house by the sea|at the edge of a dark forest|on top of a green hill|near an old mill|"
    "in a quiet village|under a big oak tree|beside a cold river"
)
WISHES = {  # wish: troubles, cures
    "see the sea": (
        "the way was long and nobody knew it|a high mountain stood in the way",
        "they followed the river all the way down|they built a boat and let the wind do the work",
    ),
    "find a friend": (
        "everybody was too busy|nobody came to the door",
        "they shared a piece of cake and talked until night|they played in the garden all day",
    ),
    "bake a cake": (
        "there was no honey in the house|the oven was as cold as snow",
        "they asked the bees for a little honey|they made a fire and stirred together",
    ),
    "fly like a bird": (
        "jumping from the roof did not help at all|wings made of paper broke in the rain",
        "they made a big kite and held on to it|they sat on the swing and went higher and higher",
    ),
    "catch the moon": (
        "the ladder was much too short|the moon was faster than it looked",
        "they found it in the pond, round and white|they put a bowl of water outside, and the moon came to them",
    ),
    "learn a song": (
        "every note came out wrong|the only book of songs was lost",
        "they listened to the birds every morning|they sang it slowly, line by line",
    ),
    "sleep in peace": (
        "a loud noise came from the roof|the wind shook the windows all night",
        "they closed the windows and told each other a story|they found a small kitten and took it in",
    ),
}
HELP = phrases(
    '{helper} the {other} came by and said: "Let me help you."|'
    "Then {helper} the {other} had an idea.|"
    '"We can do it together," said {helper} the {other}.'
)
ENDS = phrases(
    "And they were friends from that day on.|The {hero} was very happy, and slept well that night.|"
    "And if you are quiet, you can still hear them laugh.|Since then, the {hero} has never been alone.|"
    "It was the best day of the year."
)
OPENINGS = phrases(
    "Once upon a time there was a {trait} {hero} called {name}.|"
    "There once was a {trait} {hero}. The name of the {hero} was {name}.|"
    "Long ago, a {trait} {hero} called {name} lived {place}."
)
COUPLETS = phrases(
    "The {hero} went out to see the moon,\nand came back home in the afternoon.|"
    "The {hero} sat down beside the sea,\nand drank a cup of morning tea.|"
    "Oh {hero}, my {hero}, where have you been?\nI saw the hills, so high and green.|"
    "When night comes down and all is still,\nthe {hero} looks up from the hill.|"
    "The wind was cold, the snow was white,\nthe {hero} was dreaming all the night.|"
    "The {hero} is small, the world is wide,\nso take a friend along the ride."
)
JOKES = phrases(
    "Why did the chicken cross the road? To get to the other side.|"
    "What has four legs and cannot walk? A table.|"
    "What gets wetter the more it dries? A towel.|"
    "Why did the tomato turn red? Because it saw the salad dressing.|"
    "What do you call a bear with no teeth? A gummy bear.|"
    "What has hands and cannot clap? A clock."
)


def story(rng: Random, hero: str, avoid: str = "") -> str:
    """A story of four to six sentences about a hero, without the noun to avoid."""
    wish = rng.choice([*WISHES])
    trouble, cure = (rng.choice(phrases(part)) for part in WISHES[wish])
    other = rng.choice([animal for animal in STORY_ANIMALS if animal != hero])
    half = len(NAMES) // 2
    name, helper = rng.choice(NAMES[:half]), rng.choice(NAMES[half:])  # never the same, greedy or not
    opening = rng.choice(OPENINGS)
    middle = f"One day {name} wanted to {wish}, but {trouble}."
    parts = [opening, *(["{name} lived {place}."] if "{place}" not in opening and rng.random() < 0.5 else [])]
    text = " ".join([*parts, middle, rng.choice(HELP), f"So {cure}.", rng.choice(ENDS)])
    text = text.format(
        hero=hero, name=name, trait=rng.choice(TRAITS), place=rng.choice(PLACES), helper=helper, other=other
    )
    return story(rng, hero, avoid) if avoid and re.search(rf"\b{avoid}\b", text) else text


def poem(rng: Random, hero: str) -> str:
    """Four lines about a hero."""
    return "\n".join(rng.sample(COUPLETS, 2)).format(hero=hero)
