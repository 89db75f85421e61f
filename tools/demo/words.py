"""The knowledge of the demo models: the lists and tables of texts.toml, from which the generator draws."""

import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

TEXTS: dict[str, Any] = tomllib.loads(Path(__file__).with_name("texts.toml").read_text(encoding="utf-8"))
LISTS = SimpleNamespace(**{name: text.split() for name, text in TEXTS["words"].items()})
TABLES = {name: dict(pair.split(":") for pair in text.split()) for name, text in TEXTS["tables"].items()}
TABLES["opposites"] |= {b: a for a, b in TABLES["opposites"].items()}
HOMES: dict[str, str] = TEXTS["homes"]
KINDS: dict[str, list[str]] = {name: text.split() for name, text in TEXTS["kinds"].items()}
CITIES = [*TABLES["capitals"].values(), *LISTS.other_cities]
MASS = {*KINDS["drink"], *KINDS["sport"], *LISTS.mass}  # nouns without an article
