"""docs/serving.md: its snippets run in their order and print what the page shows."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.served import background

pytest.importorskip("starlette", reason="needs the extra serve")
pytest.importorskip("openai", reason="needs the extra test")
pytest.importorskip("llguidance", reason="needs the extra grammar")

ROOT = Path(__file__).parent.parent
PAGE = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
SNIPPETS = re.findall(r"^```(python|sh)\n(.*?)^```\n(?:\n```text\n(.*?)^```)?", PAGE, re.M | re.S)
ADDRESS = "http://127.0.0.1:8000"


def test_the_snippets_run(capsys: pytest.CaptureFixture[str]):
    from engine.serve import command

    names: dict = {}
    [flags] = re.findall(r"^python -m engine.serve (.*?) +# the demo model", PAGE, re.M)
    args = command.make_parser().parse_args([*flags.split(), "--kv-memory", "8M", "--threads", "1", "-q"])
    with command.application(args) as app, background(app) as url:
        for kind, code, shown in SNIPPETS:
            line = PAGE[: PAGE.index(code)].count("\n")
            code = code.replace(ADDRESS, url)
            if kind == "python":
                exec(compile("\n" * line + code, "docs/serving.md", "exec"), names)
                printed = capsys.readouterr().out
            elif shutil.which("curl") is None:
                continue
            else:
                printed = subprocess.run(code, shell=True, capture_output=True, text=True, timeout=60).stdout + "\n"
                printed = printed.rstrip("\n") + "\n"
            pattern = ".*".join(map(re.escape, shown.split("…")))
            assert re.fullmatch(pattern, printed), f"line {line}: {printed}"
        names["client"].close()


def test_the_page_names_every_flag_of_the_server():
    from engine.serve import command

    flags = {option for action in command.make_parser()._actions for option in action.option_strings}
    limits = (ROOT / "docs/serving-limits.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(--[\w-]+)", PAGE + limits))
    assert named <= flags
    own = {"--parallel", "--queue", "--timeout", "--traces", "--drain", "--host", "--api-key-file", "--open"}
    assert own | {flag for flag in flags if flag.startswith("--max-")} <= named


def test_the_page_names_every_figure():
    from engine.serve.metrics import COUNTERS, GAUGES, HISTOGRAMS

    listed = set(re.findall(r"`coppice_(\w+)`", PAGE)) | {
        f"requests_{name}" for name in re.findall(r"`\.\.\._(\w+)`", PAGE)
    }
    assert listed == {f"{name}_total" for name in COUNTERS} | set(GAUGES) | set(HISTOGRAMS)
