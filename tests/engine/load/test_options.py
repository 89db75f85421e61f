"""An option of loading is written once: every front follows from its field, or the field says why one has no flag."""

import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, MISSING, dataclass, fields
from typing import Annotated, get_type_hints

import pytest

from engine import AsyncEngine, Engine, LoadOptions, UsageError
from engine.app import batch, chat, cli
from engine.app.cli.searches import flag_of
from engine.demo import demo_folder
from engine.load.flags import Flag, NoFlag, options_of, takes
from engine.load.options import bytes_of
from engine.serve import command
from tools.fleet import worker

FRONTS: dict[str, tuple[Callable[[], cli.Parser], list[str]]] = {
    "chat": (chat.parser, []),
    "batch": (batch.make_parser, []),
    "serve": (command.make_parser, []),
    "fleet": (worker.make_parser, ["--input", "in", "--output", "out"]),
}
TOOLS = ("profile", "tree", "ults_prior")


@dataclass(frozen=True)
class More(LoadOptions):
    """One option more.

    Args:
        turbo: how much faster than possible. Nobody has asked for it.
    """

    _: KW_ONLY
    turbo: Annotated[str, Flag(group="machine", choices=("low", "high"), without={"chat": "people read slowly"})] = (
        "low"
    )


@pytest.mark.parametrize("front", [*FRONTS, *TOOLS])
def test_every_front_offers_every_option_or_says_why(front: str):
    parser = cli.Parser("prog", "a tool")
    cli.add_load_flags(parser, front)
    offered = {*(FRONTS[front][0]() if front in FRONTS else parser)._option_string_actions}
    for option in options_of(LoadOptions):
        flag = flag_of(option.argument)
        if isinstance(option.flag, NoFlag):
            assert len(option.flag.why.split()) > 3 and flag not in offered
        elif front in option.flag.without:
            assert len(option.flag.without[front].split()) > 3 and flag not in offered
        else:
            assert flag in offered


def test_reasons_are_of_fronts_that_exist():
    named = {name for option in options_of(LoadOptions) for name in getattr(option.flag, "without", ())}
    assert named <= {*FRONTS, *TOOLS}


@pytest.mark.parametrize("load", [Engine.load, AsyncEngine.load], ids=["Engine", "AsyncEngine"])
def test_python_takes_every_option_with_its_type_and_default(load: Callable):
    taken, hints = inspect.signature(load).parameters, get_type_hints(LoadOptions)
    assert [*taken] == [f.name for f in fields(LoadOptions)]
    for f in fields(LoadOptions):
        default = inspect.Parameter.empty if f.default is MISSING else f.default
        assert (taken[f.name].annotation, taken[f.name].default) == (hints[f.name], default)


@pytest.mark.parametrize("front", FRONTS)
def test_a_new_option_is_written_once(front: str, monkeypatch: pytest.MonkeyPatch):
    """With a field more the front has its flag, its help, its default, and hands it to the loader."""
    monkeypatch.setattr("engine.app.cli.loading.LoadOptions", More)
    loaded: list[LoadOptions] = []
    monkeypatch.setattr(Engine, "of", lambda options: loaded.append(options) or pytest.skip("loaded"))
    make, needed = FRONTS[front]
    parser = make()
    parser.whole = True
    shown = "--turbo {low,high} how much faster than possible (low)" in " ".join(parser.format_help().split())
    assert shown == (front != "chat")
    given = [] if front == "chat" else ["--turbo", "high"]
    with pytest.raises(pytest.skip.Exception):
        cli.load_engine(make().parse_args([*needed, *given, "--dtype", "float32"]))
    [options] = loaded
    assert isinstance(options, More) and options.dtype == "float32"
    assert options.turbo == ("low" if front == "chat" else "high")


def test_python_takes_a_new_option():
    @takes(More)
    def load(options: More) -> More:
        return options

    assert load("x", turbo="high") == More("x", turbo="high")
    assert inspect.signature(load).parameters["turbo"].annotation is str
    with pytest.raises(UsageError, match="turbo: expected low or high, got 'medium'"):
        load("x", turbo="medium")
    with pytest.raises(TypeError, match="turbro"):
        load("x", turbro="high")  # type: ignore[call-arg]


def test_every_option_has_a_text():
    assert [option.name for option in options_of(LoadOptions) if len(option.help.split()) < 2] == []


def test_a_field_that_says_no_flag_is_an_error():
    @dataclass(frozen=True)
    class Bare(LoadOptions):
        bare: int = 0

    with pytest.raises(TypeError, match=r"Bare\.bare: expected Annotated with a Flag or a NoFlag"):
        options_of(Bare)


@pytest.mark.parametrize(
    ("flags", "name", "value"),
    [
        ("", "folder", demo_folder()),
        ("", "draft", demo_folder("draft")),
        ("--model x", "draft", None),
        ("--model x --reward y", "reward", "y"),
        ("", "prefix_cache", "on"),
        ("--kv-memory 2M", "kv_memory", 2 << 20),
        ("--memory auto", "memory", "auto"),
        ("--threads 3", "threads", 3),
        ("--parallel 5", "parallel", 5),
    ],
)
def test_flags_become_options(flags: str, name: str, value: object):
    options = cli.load_options(batch.make_parser().parse_args(flags.split()))
    assert getattr(options, name) == value


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--threads many", "expected an integer, got 'many'"),
        ("--kv-memory lots", "expected a size such as"),
        ("--memory lots", "expected a size such as"),
        ("--quant int4-64", "choose from 'none', 'int8', 'int4', 'auto'"),
    ],
)
def test_wrong_flags(flags: str, says: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        batch.make_parser().parse_args(flags.split())
    assert end.value.code == 2 and says in capsys.readouterr().err


def test_roles_and_sizes():
    options = LoadOptions("a", draft="b", reward=lambda prompt, texts: [0.0], kv_memory="1M")
    assert (options.folders, options.kv_bytes) == ({"target": "a", "draft": "b"}, 1 << 20)
    assert options.place.size == 1 and LoadOptions("a").kv_bytes is None
    with pytest.raises(UsageError, match="memory: expected auto, bytes"):
        bytes_of("memory", "12Q")


def test_answers_of_a_fleet_depend_on_what_says_so():
    of = lambda *flags: worker.depended_on(worker.make_parser().parse_args(["--input=", "--output=", *flags]))  # noqa: E731
    for flags in ("--threads 2", "--kv-memory 1M", "--memory 1G", "--device cpu", "--graphs off", "--parallel 3"):
        assert of(*flags.split()) == of()
    for flags in (
        "--dtype float32",
        "--quant int8",
        "--kv-dtype int8",
        "--model x",
        "--draft x",
        "--chat-template none",
    ):
        assert of(*flags.split()) != of()
