"""docs/embedding.md: its snippets run in their order and print what the page shows."""

import re
import threading
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/embedding.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", PAGE, re.M | re.S)


def test_the_snippets_run(capsys: pytest.CaptureFixture[str]):
    names: dict = {}
    for code, shown in SNIPPETS:
        line = PAGE[: PAGE.index(code)].count("\n")
        exec(compile("\n" * line + code, "docs/embedding.md", "exec"), names)
        printed = capsys.readouterr().out
        assert printed == shown or (not shown and "engine.capabilities" in code), f"line {line}"


def test_every_text_block_is_compared():
    assert PAGE.count("```text") == sum(bool(shown) for _, shown in SNIPPETS) > 5


def test_engines_in_threads_do_not_disturb_each_other():
    from engine import Engine
    from engine.demo import demo_folder
    from search import Trie

    engines = [Engine.load(demo_folder(), dtype="float32", threads=1, kv_memory="4M") for _ in range(2)]
    answers: list[list[int]] = []

    def work(engine: Engine) -> None:
        for _ in range(5):
            [result] = engine.generate(["Once upon a time"], Trie(beams=4), max_new_tokens=16)
            answers.append(result.outputs[0].token_ids)

    threads = [threading.Thread(target=work, args=(engine,)) for engine in engines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(answers) == 10 and all(answer == answers[0] for answer in answers)
