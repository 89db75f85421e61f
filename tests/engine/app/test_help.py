"""--help: two screens of common flags, those of a search that is named besides, and with `all` every flag."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.app import batch, chat, cli
from engine.serve import command
from search import REGISTRY
from search.base import SHARED_PARAMS, parameters
from tools.fleet import worker

FRONTS: dict[str, Callable[[], cli.Parser]] = {
    "chat": chat.parser,
    "batch": batch.make_parser,
    "serve": command.make_parser,
    "fleet": worker.make_parser,
}
TWO_SCREENS = 60  # lines of 100 columns: windows of terminals are about as large


@pytest.fixture(autouse=True)
def columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")


@pytest.fixture
def help_of(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    def ask(front: str, *words: str) -> str:
        with pytest.raises(SystemExit) as end:
            FRONTS[front]().parse_args([*words])
        assert end.value.code == 0
        return capsys.readouterr().out

    return ask


def flags_in(text: str) -> set[str]:
    """The flags that a help describes."""
    return set(re.findall(r"^  (?:-\w[^-\n]*)?(--[\w-]+)", text, re.MULTILINE))


@pytest.mark.parametrize("front", FRONTS)
def test_help_fits_two_screens(front: str, help_of: Callable[..., str]):
    lines = help_of(front, "--help").splitlines()
    assert len(lines) <= TWO_SCREENS and max(map(len, lines)) <= 100
    assert lines[-1] == "--search NAME --help adds the flags of a search; --help all shows every flag"


@pytest.mark.parametrize("front", FRONTS)
def test_help_shows_the_common_flags_alone(front: str, help_of: Callable[..., str]):
    parser = FRONTS[front]()
    assert {*parser.common} <= {*parser._option_string_actions}, "a flag that does not exist"
    assert len(parser.common) == len({*parser.common})
    assert flags_in(help_of(front, "-h")) == {*parser.common}


@pytest.mark.parametrize("front", FRONTS)
def test_help_all_shows_every_flag(front: str, help_of: Callable[..., str]):
    parser = FRONTS[front]()
    every = {option for option in parser._option_string_actions if option.startswith("--")}
    text = help_of(front, "--help", "all")
    assert flags_in(text) == every and "exit codes: " in text


@pytest.mark.parametrize("name", REGISTRY)
def test_help_of_a_search_adds_its_flags(name: str, help_of: Callable[..., str]):
    params = parameters(name)
    added = {"--" + key.replace("_", "-") for key in params}
    for words in (("--search", name, "--help"), ("--help", f"--search={name}")):
        assert flags_in(help_of("chat", *words)) == added | {*chat.parser().common}
    own = [key for key in params if key not in SHARED_PARAMS]
    assert all("--" + key.replace("_", "-") not in help_of("chat", "--help") for key in own)


def test_help_of_nothing_else(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        chat.parser().parse_args(["--help", "everything"])
    assert end.value.code == 2 and "choose from 'all'" in capsys.readouterr().err


def test_errors_name_the_help_that_lists_all(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        chat.parser().parse_args(["--no-such-flag"])
    assert "python -m engine.chat --help all lists the options" in capsys.readouterr().err


def test_a_file_without_a_flag_is_taken_for_the_input_or_the_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    for name, flag in (("lines.jsonl", "input"), ("model.gguf", "model"), ("folder", "model")):
        path = tmp_path / name
        path.mkdir() if name == "folder" else path.touch()
        with pytest.raises(SystemExit):
            batch.make_parser().parse_args([str(path)])
        assert f"did you mean --{flag} {path}?" in capsys.readouterr().err


def test_a_tool_without_common_flags_shows_all(capsys: pytest.CaptureFixture[str]):
    parser = cli.Parser("prog", "a tool")
    cli.add_load_flags(parser, "tree")
    with pytest.raises(SystemExit):
        parser.parse_args(["--help"])
    assert "--kv-dtype" in capsys.readouterr().out
