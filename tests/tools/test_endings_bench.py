"""`tools.bench endings`: what its rules say of a recorded search is what searches by these rules do."""

from engine import Engine
from engine.demo import demo_folder
from tools.bench import __main__ as bench
from tools.bench import endings


def test_rules_applied_to_a_record_are_searches():
    engine = Engine.load(demo_folder(), dtype="float32")
    prompts = [engine.encode(text) for text in ("The dog", "Once upon a time", "The opposite of hot is")]
    for beams in (3, 5):
        records = endings.record(engine, prompts, beams, 40, None)
        for prompt, one in zip(prompts, records, strict=True):
            endings.check(engine, prompt, one, beams, None)
        rows = endings.figures(records, ["dog|cold|time", None, "cold"], beams)
        assert len(rows) == len(endings.RULES) * len(endings.PENALTIES)
        best, waits = (next(row for row in rows if row["rule"] == rule and row["penalty"] == 1) for rule in (
            "early_stopping best", "early_stopping false"
        ))  # fmt: skip
        assert best["passes"] <= waits["passes"] and 0 <= best["after"] < 1 and best["right"] <= 2


def test_the_command(capsys):
    argv = [
        "endings",
        "--model",
        str(demo_folder()),
        "--stories",
        "1",
        "--tokens",
        "20",
        "--beams",
        "3",
        "--check",
        "1",
    ]
    assert bench.main(argv) == 0
    assert '"bench": "endings-stories"' in capsys.readouterr().out.splitlines()[-1]
