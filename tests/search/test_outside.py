"""Searches from outside: by module:Class and by entry points, on both command lines, and what may be wrong there."""

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from engine import Engine, UsageError
from engine.app import batch, chat, cli
from engine.app.chat import Settings
from engine.app.dialog import Dialog
from engine.app.terminal import Interrupt, Screen
from engine.conversation import Conversation
from search import REGISTRY, Evaluate, Greedy, Output, Search, SearchResult, Trie, make_search, register
from search.base import parameters
from search.outside import entry_points, find_search
from tools.random_checkpoint import make

OWN = '''
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from search import Evaluate, Output, Report, Search, SearchResult, register

@dataclass(frozen=True)
class Count_Up(Search):
    """Tokens from a first one on; 100% sure.

    Args:
        start: the first token.
        mode: up, or down by
            one each.
        file: ignored.
    """

    start: int = 40
    mode: Literal["up", "down"] = "up"
    rate: float = 0.5
    file: Path | None = None
    weights: list[int] = field(default_factory=list)
    beams: int = 2

    def run(self, task):
        yield Evaluate(task.tree, [task.tree.root])
        step = 1 if self.mode == "up" else -1
        tokens = [self.start + step * i for i in range(task.max_new_tokens)]
        yield Report(tokens, beams=lambda: [(None, tokens)])
        return SearchResult([Output(tokens, None, None, "length")], {"rate": self.rate, "weights": self.weights})

@register("other-name")
@dataclass(frozen=True)
class Other(Count_Up):
    """Another one."""

    needed: str | None = None

@dataclass(frozen=True)
class Drawn(Count_Up):
    temperature: float = 1.0

function = print
'''


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Engine:
    folder = tmp_path_factory.mktemp("tiny")
    make(folder, layers=1, width=16, mlp=16, heads=2, kv_heads=1, vocab=260, max_positions=64)
    return Engine.load(folder, threads=1, kv_memory=1 << 18)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A current folder with a module; afterwards everything that was loaded is forgotten."""
    (tmp_path / "own.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [p for p in sys.path if p])
    registered, modules = dict(REGISTRY), set(sys.modules)
    yield tmp_path
    REGISTRY.clear()
    REGISTRY.update(registered)
    for name in set(sys.modules) - modules:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(tmp_path)):
            del sys.modules[name]


@pytest.fixture
def refused(capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """The message of a command line that ends with a usage error."""

    def run(*argv: str, code: int = 2) -> str:
        with pytest.raises(SystemExit) as end:
            chat.parser().parse_args([*argv])
        assert end.value.code == code
        return capsys.readouterr().err

    return run


def answer(engine: Engine, monkeypatch: pytest.MonkeyPatch, lines: list[Any], *flags: str) -> list[dict[str, Any]]:
    monkeypatch.setattr(batch, "load_engine", lambda args, shard=None: engine)
    out, source = io.BytesIO(), io.BytesIO("".join(json.dumps(line) + "\n" for line in lines).encode())
    batch.main(["--max-new-tokens", "3", *flags], source, out)
    return [json.loads(line) for line in out.getvalue().splitlines()]


def distribution(folder: Path, name: str, **searches: str) -> None:
    """Install a distribution that offers searches."""
    info = folder / f"{name.replace('-', '_')}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{key.replace('_', '-')} = {value}" for key, value in searches.items()]
    (info / "entry_points.txt").write_text("\n".join(["[coppice.searches]", *lines, ""]))


# --- module:Class ---


def test_a_class_by_its_module(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    lines = [
        {"prompt": "a"},
        {"prompt": "a", "params": {"count_up_start": 60, "count_up_mode": "down", "count_up_weights": [1, 2]}},
        {"prompt": "a", "params": {"search": "greedy"}},
        {"prompt": "a", "params": {"search": "count-up", "count_up_rate": 1}},
    ]
    first, second, third, fourth = answer(
        engine, monkeypatch, lines, "--search", "own:Count_Up", "--count-up-start=50", "--count-up-rate", "0.25"
    )
    assert first["outputs"][0]["token_ids"] == [50, 51, 52] and first["stats"]["rate"] == 0.25
    assert second["outputs"][0]["token_ids"] == [60, 59, 58] and second["stats"]["weights"] == [1, 2]
    assert "rate" not in third["stats"]
    assert fourth["outputs"][0]["token_ids"] == [50, 51, 52] and fourth["stats"]["rate"] == 1.0


def test_names(engine: Engine):
    assert find_search("own:Count_Up") == "count-up" == find_search("own:Count_Up") == find_search("count-up")
    assert find_search("own:Other") == "other-name"
    assert find_search("search.trie:Trie") == "trie" == find_search("search:Trie")
    assert find_search("absent") is None
    assert parameters("other-name")["other_name_needed"] == "needed"


def test_several_are_known_and_the_last_is_the_default(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    lines = [{"prompt": "a"}, {"prompt": "a", "params": {"search": "count-up"}}]
    both = answer(engine, monkeypatch, lines, "--search", "own:Count_Up", "--search=own:Other", "--other-name-start=9")
    assert [record["outputs"][0]["token_ids"][0] for record in both] == [9, 40]


def test_a_batch_line_loads_nothing(engine: Engine, monkeypatch: pytest.MonkeyPatch, here: Path):
    distribution(here, "a-thing", offered="own:Count_Up")
    monkeypatch.syspath_prepend(here)
    lines = [{"prompt": "a", "params": {"search": name}} for name in ("own:Count_Up", "offered", "count-up")]
    for record in answer(engine, monkeypatch, lines):
        assert "search: expected one of" in record["error"]["message"]
    assert "own" not in sys.modules


def test_a_batch_line_names_no_file(engine: Engine, monkeypatch: pytest.MonkeyPatch):
    lines = [{"prompt": "a", "params": {"count_up_file": value}} for value in ("x", None)]
    wrong, right = answer(engine, monkeypatch, lines, "--search", "own:Count_Up")
    assert "params.count_up_file: paths are given on the command line only" in wrong["error"]["message"]
    assert right["outputs"]


def test_flags(refused: Callable[..., str], capsys: pytest.CaptureFixture[str]):
    args = chat.parser().parse_args(
        ["--search", "own:Count_Up", "--count-up-start=7", "--count-up-mode=down", "--count-up-file=x", "--beams=3"]
    )
    assert args.search == "count-up"
    search = make_search(args.search, cli.search_params(args))
    assert (search.start, search.mode, search.file, search.beams) == (7, "down", Path("x"), 3)  # type: ignore[attr-defined]
    assert "expected an integer, got 'x'" in refused("--search", "own:Count_Up", "--count-up-start", "x")
    assert "expected up or down, got 'side'" in refused("--search", "own:Count_Up", "--count-up-mode", "side")
    assert "did you mean --count-up-start?" in refused("--search", "own:Count_Up", "--count-up-strat", "3")
    assert "unrecognized arguments: --count-up-weights" in refused("--search", "own:Count_Up", "--count-up-weights=1")
    with pytest.raises(SystemExit) as end:
        chat.parser().parse_args(["--help", "--search", "own:Count_Up"])
    text = " ".join(capsys.readouterr().out.split())
    assert end.value.code == 0 and "search count-up: Tokens from a first one on; 100% sure." in text
    assert "--count-up-start N count-up: the first token (40)" in text
    assert "--count-up-mode up|down count-up: up, or down by one each (up)" in text
    assert "--count-up-file FILE count-up: ignored (none)" in text and "It also takes --beams (2)." in text


def test_the_chat_knows_it(engine: Engine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(cli, "load_engine", lambda args, shard=None: engine)
    monkeypatch.setattr(sys, "stdin", None)
    code = chat.main(["--search", "own:Count_Up", "--count-up-start", "70", "-p", "a", "--json", "--max-new-tokens=2"])
    assert code == 0 and json.loads(capsys.readouterr().out)["outputs"][0]["token_ids"] == [70, 71]

    settings = Settings("count-up", {"count_up_file": Path("x")}, 8, False, ())
    shown = settings.shown()
    assert json.dumps(shown) and shown["search"] == "count-up" and shown["count_up_file"] == "x"
    dialog = dialog_of(engine, settings)
    dialog._obey("/set count_up_start=5 count-up-mode=down", False)
    assert (dialog.settings.shown()["count_up_start"], dialog.settings.shown()["count_up_mode"]) == (5, "down")
    for line, says in {
        "/set count_up_start=x": "count_up_start: expected an integer, got 'x'",
        "/set count_up_stort=1": "did you mean count_up_start?",
        "/set search=absent": "search: expected one of",
        "/set search=absent:X": "there is no module absent",
        "/set search=5": "search: expected one of",
    }.items():
        with pytest.raises(UsageError) as caught:
            dialog._obey(line, False)
        assert says in str(caught.value)
    dialog._obey("/set search=own:Other other_name_start=30", False)
    assert dialog.settings.shown()["search"] == "other-name"
    assert dialog.reply("hi").token_ids == list(range(30, 38))


def dialog_of(engine: Engine, settings: Settings) -> Dialog:
    args, screen = chat.parser().parse_args([]), Screen(quiet=True)
    commands = {"commands": chat.COMMANDS, "aliases": chat.ALIASES}
    return Dialog(Conversation(engine), settings, screen, Interrupt(), args, **commands)


def test_regen_needs_no_seed(engine: Engine):
    """A search that draws may have no seed among its parameters, or none by default."""
    assert find_search("own:Drawn") == "drawn"
    for search, params in {"drawn": {"temperature": 0.5}, "aded": {"temperature": 0.5}}.items():
        settings = Settings(search, params, 3, False, ())
        dialog = dialog_of(engine, settings)
        dialog.reply("hi")
        dialog._obey("/regen", False)
        assert len(dialog.conversation.turns) == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("own:Absent", ["the module own has no Absent", "own.py", "its searches: Count_Up, Other, Drawn"]),
        ("absent:X", ["there is no module absent", "searched: the current folder", "PYTHONPATH"]),
        ("own.inner:X", ["there is no module own.inner"]),
        ("own:function", ["own:function: expected a class that derives from search.Search, got a builtin_function"]),
        ("own:Path", ["expected a class that derives from search.Search, got a class that does not derive"]),
        ("own:Search", ["own:Search: the class has no method run"]),
        ("own.py:Other", ["there is no module own.py"]),
        ("./own:Other", ["expected module:Class, got './own:Other'", "my_search:MyClass"]),
        ("own:", ["expected module:Class"]),
        (":Other", ["expected module:Class"]),
        ("raises:X", ["the module raises failed while it was imported: ZeroDivisionError", "raises.py:2", "-v shows"]),
        ("wrong:X", ["the module wrong failed while it was imported: SyntaxError", "wrong.py:1"]),
        ("needs:X", ["the module needs failed while it was imported: ModuleNotFoundError", "needs.py:1"]),
        ("ends:X", ["the module ends failed while it was imported: SystemExit: 3", "ends.py:1"]),
        ("bare:Bare", ["bare:Bare: the class is no dataclass", "@dataclass(frozen=True)"]),
        ("taken:Trie", ["the name 'trie' belongs to another search, search.trie:Trie", "@register("]),
        ("twice:Two", ["the name 'greedy' belongs to another search", "asked for by twice:Two"]),
        ("badly:Two", ["the name of a search: expected lower-case letters", "'Two!'"]),
        ("clash:KV", ["the search 'kv' has a parameter whose flag would be --kv-memory, which exists", "clash:KV"]),
        ("tri", ["did you mean trie?"]),
    ],
)  # fmt: skip
def test_what_cannot_be_loaded(here: Path, refused: Callable[..., str], text: str, says: list[str]):
    head = "from dataclasses import dataclass\nfrom search import Search, register\n"
    body = "    memory: int = 1\n    def run(self, task):\n        yield\n"
    frozen = "@dataclass(frozen=True)\n"
    for name, source in {
        "raises": "\n1 / 0",
        "wrong": "def",
        "needs": "import absent_thing",
        "ends": "raise SystemExit(3)",
        "bare": f"{head}class Bare(Search):\n{body}",
        "taken": f"{head}{frozen}class Trie(Search):\n{body}",
        "twice": f"{head}@register('greedy')\n{frozen}class Two(Search):\n{body}",
        "badly": f"{head}@register('Two!')\n{frozen}class Two(Search):\n{body}",
        "clash": f"{head}{frozen}class KV(Search):\n{body}",
    }.items():
        (here / f"{name}.py").write_text(source)
    told = refused("--search", text)
    assert all(part in told for part in says), told
    assert "Traceback" not in told
    if "failed while it was imported" in says[0] or "-v shows" in says[-1]:
        assert "Traceback" in refused("-v", "--search", text)


def test_it_starts_in_the_current_folder(here: Path):
    """python -m finds modules of the current folder, also where sys.path is kept safe."""
    root = Path(__file__).parents[2]
    for safe in ("", "1"):
        done = subprocess.run(
            [sys.executable, "-m", "engine.chat", "--search", "own:Count_Up", "--help"],
            capture_output=True,
            text=True,
            timeout=300,
            env={"PYTHONPATH": str(root), "PYTHONSAFEPATH": safe, "PATH": ""},
        )
        assert done.returncode == 0 and "--count-up-start" in done.stdout, done.stderr


# --- register ---


def test_register_refuses_what_is_no_search():
    for cls in (int, print, Search, type("Bare", (Greedy,), {})):
        with pytest.raises(UsageError):
            register("toy")(cls)  # type: ignore[arg-type,type-var]
    for name in ("", "list", "A", "a_b", "a:b", "-a", "a--b", 5):
        with pytest.raises(UsageError, match="the name of a search"):
            register(name)(Greedy)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"belongs to another search, search\.trie:Trie"):
        register("trie")(Greedy)
    assert register("trie")(Trie) is Trie and REGISTRY["trie"] is Trie


def test_a_class_that_is_loaded_twice_keeps_its_name():
    def load() -> type[Search]:
        @register("toy")
        @dataclass(frozen=True)
        class Toy(Greedy):
            """The same file, the same name."""

        return Toy

    first, second = load(), load()
    assert first is not second and REGISTRY["toy"] is second


def test_a_parameter_without_default():
    @register("toy")
    @dataclass(frozen=True)
    class Toy(Search):
        depth: int

        def __post_init__(self):
            if self.depth < 0:
                raise ValueError("negative")

        def run(self, task):
            yield Evaluate(task.tree, [task.tree.root])
            return SearchResult([Output([5], 0.0, 0.0, "length")])

    parser = cli.Parser("prog", "what it does")
    cli.add_search_flags(parser)
    text = parser.format_help()
    assert "toy: depth (must be given)" in text and text == parser.format_help()
    with pytest.raises(UsageError, match=r"toy_depth: the search 'toy' has no default for it\ngive --toy-depth"):
        make_search("toy", {})
    with pytest.raises(UsageError, match="toy_depth: expected an integer, got 'x'"):
        make_search("toy", {"toy_depth": "x"})
    with pytest.raises(UsageError, match="toy_deep: the search 'toy' has no such parameter\ndid you mean toy_depth"):
        make_search("toy", {"toy_deep": 1})
    with pytest.raises(Exception, match=r"the search Toy of the module .* failed: ValueError: negative") as caught:
        make_search("toy", {"toy_depth": -1})
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
    settings = Settings("greedy", {}, 8, False, ())
    assert settings.changed({"search": "toy", "toy_depth": 2}).configuration() == Toy(2)


# --- entry points ---


def test_entry_points(
    here: Path, monkeypatch: pytest.MonkeyPatch, refused: Callable[..., str], capsys: pytest.CaptureFixture[str]
):
    distribution(here, "good-thing", offered="own:Count_Up", other_name="own:Other")
    distribution(here, "bad-thing", gone="absent_module:X", broken="raises:X", trie="own:Count_Up")
    distribution(here, "first-thing", two_of_it="own:Count_Up")
    distribution(here, "second-thing", two_of_it="own:Other")
    (here / "raises.py").write_text("1 / 0")
    monkeypatch.syspath_prepend(here)
    assert {entry.name for entry in entry_points()} >= {"offered", "gone", "broken"} and "own" not in sys.modules

    args = chat.parser().parse_args(["--search", "offered", "--offered-start", "3"])
    assert make_search(args.search, cli.search_params(args)).start == 3  # type: ignore[attr-defined]
    assert chat.parser().parse_args(["--search", "other-name"]).search == "other-name"
    assert find_search("trie") == "trie" and REGISTRY["trie"] is Trie  # a built-in name is not taken away

    told = refused("--search", "gone")
    assert "the search 'gone' of the distribution bad-thing is unusable: there is no module absent_module" in told
    told = refused("--search", "broken")
    assert "of the distribution bad-thing is unusable: the module raises failed" in told and "raises.py:1" in told
    told = refused("--search", "two-of-it")
    assert "comes from several distributions: first-thing (own:Count_Up), second-thing (own:Other)" in told

    with pytest.raises(SystemExit) as end:
        chat.parser().parse_args(["--search", "list"])
    out, err = capsys.readouterr()
    names = [line.split()[0] for line in out.splitlines()]
    assert end.value.code == 0 and {"greedy", "offered", "other-name"} <= {*names} and "gone" not in names
    assert err.count("of the distribution bad-thing is unusable") == 3 and "'trie'" in err


@pytest.mark.parametrize("given", [{"toy_depth": 1}, {"toy_width": 5}])
def test_errors_of_a_constructor_name_parameters_as_the_command_line_does(given: dict[str, int]):
    @register("toy")
    @dataclass(frozen=True)
    class Toy(Search):
        depth: int = 2
        width: int = 1

        def __post_init__(self):
            if self.depth <= self.width:
                raise UsageError(f"depth: expected more, got {self.depth}")

        def run(self, task):
            yield Evaluate(task.tree, [task.tree.root])
            return SearchResult([Output([5], 0.0, 0.0, "length")])

    with pytest.raises(UsageError, match=r"^toy_depth: expected more"):
        make_search("toy", given)
