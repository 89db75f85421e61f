"""Models by their names on the hub, fetched from a small local server; what must never fetch; errors."""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from engine import CheckpointError, Engine, LoadOptions
from engine.app import batch, chat
from engine.demo import demo_folder
from engine.load import hub_headers
from engine.load.hub import local_path, located
from engine.serve.command import named
from models.checkpoint.headers import Checkpoint
from models.folders import HubName
from search import Greedy
from tests.engine.load.hub_server import Hub, files_of, serving
from tests.models.copies import GOLDEN
from tests.models.gguf.files import File
from tests.served import background

ROOT = Path(__file__).parents[3]
TOY = files_of(demo_folder())
NEVER = {"pytorch_model.bin": b"\x80\x02.", "modeling_toy.py": b"raise SystemExit", "README.md": b"x" * 1000}


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    """A hub with org/toy, which this process asks, with an empty cache in tmp_path / "hub"."""
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    with serving() as hub:
        hub.add("org/toy", TOY | NEVER)
        _use(monkeypatch, hub.url)
        changes = {
            "HF_HUB_CACHE": tmp_path / "hub",
            "HF_TOKEN_PATH": tmp_path / "token",
            "DOWNLOAD_CHUNK_SIZE": 1 << 16,
        }
        for name, value in changes.items():
            monkeypatch.setattr(constants, name, value if isinstance(value, int) else str(value))
        yield hub


def _use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    def switch() -> None:
        from huggingface_hub import constants

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    return switch


def fetch(name: str) -> Path:
    return Path(local_path(name, progress=False))


def refused(name: str) -> CheckpointError:
    with pytest.raises(CheckpointError) as caught:
        fetch(name)
    return caught.value


# --- names ---


@pytest.mark.parametrize(
    ("text", "repo", "revision", "file"),
    [
        ("org/name", "org/name", "main", ""),
        ("org/name:Q4_K_M", "org/name", "main", "Q4_K_M"),
        ("org/na-me.v1_2@v1.0", "org/na-me.v1_2", "v1.0", ""),
        ("org/name@refs/pr/1:sub/model-Q8_0.gguf", "org/name", "refs/pr/1", "sub/model-Q8_0.gguf"),
    ],
)
def test_names(text: str, repo: str, revision: str, file: str):
    name = HubName.parse(text)
    assert name == HubName(repo, revision, file) and str(name) == text


NO_NAMES = "name ./org/name /org/name org/name/ a/b/c ~/name models/smol.gguf org/../name org/a..b http://x/y orgé/name"
NO_NAMES += " org/name@ org/name: org/name@../x org/name:../x"


@pytest.mark.parametrize("text", [*NO_NAMES.split(), "org/na me", ""])
def test_paths_are_no_names(text: str, hub: Hub):
    assert HubName.parse(text) is None and local_path(text) == text and not hub.asked


def test_neither_says_what_both_look_like(tmp_path: Path, hub: Hub):
    with pytest.raises(CheckpointError) as caught:
        Engine.load(tmp_path / "none")
    assert "there is no such folder" in caught.value.what and "org/name:Q4_K_M" in caught.value.remedy
    assert not hub.asked


def test_a_name_that_is_not_utf_8(tmp_path: Path):
    shutil.copytree(demo_folder(), folder := tmp_path / os.fsdecode(b"g\xff"))
    with pytest.raises(CheckpointError, match="the path is not valid UTF-8"):
        Engine.load(folder)
    file = File(GOLDEN / "llama/plain").write(tmp_path / os.fsdecode(b"g\xff.gguf"))
    engine = Engine.load(file, threads=1, kv_memory=1 << 20)
    assert engine.name == "g\ufffd" and engine.logits([3]).isfinite().all()


def test_a_path_that_is_there_goes_first(tmp_path: Path, hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    Path("org").mkdir()
    Path("org/toy").symlink_to(demo_folder())
    assert Engine.load("org/toy", threads=1, kv_memory=1 << 20).name == "target" and not hub.asked
    Path("org/toy").unlink()
    Path("org/toy").symlink_to("nothing")  # a mistake of the user's, not a name on the hub
    Path("itself").symlink_to("itself")
    for wrong in ("org/toy", tmp_path / "itself", "nul\0", "surrogate\udcff"):
        with pytest.raises(CheckpointError, match="no such folder"):
            Engine.load(wrong)
    assert not hub.asked


def test_the_server_calls_a_model_by_its_name():
    assert named("org/toy@v1:Q4_K_M") == ("org/toy@v1:Q4_K_M", "org/toy@v1:Q4_K_M")
    assert named("x=org/toy") == ("x", "org/toy")


# --- fetching ---


def test_a_model_is_fetched_once_without_pickles_and_code(hub: Hub):
    engine = Engine.load("org/toy", threads=1, kv_memory=1 << 20)
    assert engine.name == "toy" and engine.template is not None
    [result] = engine.generate(["2 + 2 ="], Greedy(), max_new_tokens=4)
    [local] = Engine.load(demo_folder(), threads=1, kv_memory=1 << 20).generate(["2 + 2 ="], Greedy(), max_new_tokens=4)
    assert result.outputs[0].text == local.outputs[0].text != ""
    assert sorted(hub.fetched()) == sorted(TOY)
    hub.asked.clear()
    assert Engine.load("org/toy", threads=1, kv_memory=1 << 20).name == "toy"
    assert [method for method, *_ in hub.asked] == ["GET"] and not hub.fetched()  # whether there is a new commit


def test_a_new_commit_is_fetched(hub: Hub):
    before = fetch("org/toy")
    hub.add("org/toy", TOY | {"generation_config.json": b"{}"})
    after = fetch("org/toy")
    assert after != before and (after / "generation_config.json").read_bytes() == b"{}"


def test_answers_of_different_commits_end_in_an_error(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    before = fetch("org/toy")
    commit = hub.add("org/toy", TOY | {"generation_config.json": b"{}"})
    monkeypatch.setattr("engine.load.hub._Repository._download", lambda self, file, revision: before / file)
    error = refused("org/toy")
    assert f"the hub names commit {commit} and gives files of {before.name}" in error.what


def test_a_revision(hub: Hub):
    commit = hub.add("org/toy", TOY | {"generation_config.json": b"{}"}, "v2")
    assert (fetch("org/toy@v2") / "generation_config.json").read_bytes() == b"{}"
    assert fetch(f"org/toy@{commit}").name == commit and fetch("org/toy").name != commit
    error = refused("org/toy@v3")
    assert error.what == "org/toy has no revision v3" and error.exit_code == 3


def test_all_shards_of_an_index_and_no_others(hub: Hub):
    shards = {"a-00001-of-00002.safetensors": b"1", "a-00002-of-00002.safetensors": b"2"}
    index = json.dumps({"weight_map": {"x": "a-00001-of-00002.safetensors", "y": "a-00002-of-00002.safetensors"}})
    files = {
        "config.json": TOY["config.json"],
        "consolidated.safetensors": b"3",
        "model.safetensors.index.json": index.encode(),
    }
    hub.add("org/shards", files | shards | NEVER)
    fetch("org/shards")
    assert sorted(hub.fetched()) == sorted([*shards, "config.json", "model.safetensors.index.json"])
    for wrong in ("../x.safetensors", "sub/x.safetensors", "x.bin", "absent.safetensors"):
        index = json.dumps({"weight_map": {"x": wrong}}).encode()
        hub.add("org/wrong", files | {"model.safetensors.index.json": index, "x.bin": b"", "sub/x.safetensors": b""})
        assert wrong in refused("org/wrong").what


def test_no_weights_of_a_model_that_is_not_supported(hub: Hub):
    config = json.dumps({"architectures": ["RwkvForCausalLM"]}).encode()
    hub.add("org/rwkv", TOY | {"config.json": config})
    error = refused("org/rwkv")
    assert "architecture 'RwkvForCausalLM' is not supported" in error.what and hub.fetched() == ["config.json"]
    assert error.where == f"{hub.url}/org/rwkv: config.json"


def test_companions_and_the_plan(hub: Hub, capsys: pytest.CaptureFixture[str]):
    for role in ("draft", "reward"):
        hub.add(f"org/{role}", files_of(demo_folder(role)))
    engine = Engine.load("org/toy", draft="org/draft", reward="org/reward", threads=1, kv_memory=1 << 20)
    assert {role: other.name for role, other in engine.companions.items()} == {"draft": "draft", "reward": "reward"}
    hub.add("org/other", files_of(demo_folder("draft")))
    fetch("org/other")
    hub.asked.clear()
    assert chat.main(["--plan", "org/other", "-q"]) == 0 and not hub.fetched()
    assert capsys.readouterr().out.startswith("other: ")


def largest_fetched(hub: Hub, name: str) -> int:
    """The bytes of a file in the largest answer to those who asked for it."""
    asked = [wanted for method, path, wanted in hub.asked if method == "GET" and path.endswith(f"/{name}")]
    assert asked and all(wanted.startswith("bytes=0-") for wanted in asked)
    return max(int(wanted.removeprefix("bytes=0-")) + 1 for wanted in asked)


def test_a_plan_fetches_headers_alone(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(hub_headers, "FIRST", 100)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "scratch"))
    (tmp_path / "scratch").mkdir()
    assert chat.main(["--plan", str(demo_folder()), "-q"]) == 0
    local = capsys.readouterr().out
    assert chat.main(["--plan", "org/toy", "-q"]) == 0
    table, _, last = capsys.readouterr().out.rstrip().rpartition("\n")
    size = len(TOY["model.safetensors"])
    assert last.startswith("Only headers were fetched; loading it fetches ") and numbers(table) == numbers(local)
    assert 100 < largest_fetched(hub, "model.safetensors") < size / 2
    assert not [*(tmp_path / "hub").rglob("*.safetensors")] and not [*(tmp_path / "scratch").iterdir()]
    hub.add("org/cut", TOY | {"model.safetensors": TOY["model.safetensors"][:90]})
    assert chat.main(["--plan", "org/cut", "-q"]) == 3 and "Download the file again" in capsys.readouterr().err


def numbers(table: str) -> list[list[str]]:
    """The rows of a plan without what the process itself takes, which is measured."""
    return [row.split()[:7] for row in table.splitlines()[3:-2]]


def test_options_without_names_are_the_same():
    options = LoadOptions(demo_folder(), reward=lambda prompt, texts: [0.0 for _ in texts])
    assert located(options) is options


# --- GGUF files ---


@pytest.mark.skipif(find_spec("gguf") is None, reason="needs the package gguf")
def test_a_gguf_file_by_its_quantisation(hub: Hub, tmp_path: Path):
    from tests.models.gguf.files import File, random

    whole = File(random(tmp_path / "random", "llama/gqa")).write(tmp_path / "x.gguf").read_bytes()
    hub.add("org/tiny-GGUF", {"config.json": b"{}", "tiny-Q8_0.gguf": whole, "tiny-Q4_K_M.gguf": b"GGUF"} | NEVER)
    engine = Engine.load("org/tiny-GGUF:q8_0", threads=1, kv_memory=1 << 20)
    assert engine.name == "tiny-Q8_0" and hub.fetched() == ["tiny-Q8_0.gguf"]
    assert named("org/tiny-GGUF:q8_0")[0] == "org/tiny-GGUF:q8_0"


@pytest.mark.skipif(find_spec("gguf") is None, reason="needs the package gguf")
def test_a_plan_fetches_the_header_of_a_gguf_file_alone(
    hub: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    from tests.models.gguf.files import File, random

    monkeypatch.setattr(hub_headers, "FIRST", 100)
    monkeypatch.setattr(hub_headers, "GROWTH", 2)
    whole = File(random(tmp_path / "random", "llama/gqa")).write(tmp_path / "tiny-Q8_0.gguf").read_bytes()
    hub.add("org/tiny-GGUF", {"tiny-Q8_0.gguf": whole})
    assert chat.main(["--plan", str(tmp_path / "tiny-Q8_0.gguf"), "-q"]) == 0
    local = capsys.readouterr().out
    assert chat.main(["--plan", "org/tiny-GGUF", "-q"]) == 0
    shown = capsys.readouterr().out.rstrip().rpartition("\n")[0]
    assert shown.startswith("tiny-Q8_0: ") and numbers(shown) == numbers(local)
    assert 200 < largest_fetched(hub, "tiny-Q8_0.gguf") < len(whole)


@pytest.mark.skipif(find_spec("gguf") is None, reason="needs the package gguf")
def test_all_parts_of_a_divided_gguf_model(hub: Hub, tmp_path: Path):
    """The parts lie side by side as links, as the hub's cache keeps them, and are blobs of other names."""
    from tests.models.gguf.test_reader import divided

    whole, parts = divided(tmp_path)
    hub.add("org/tiny-GGUF", {f"F32/tiny-F32{name[1:]}": data for name, data in files_of(parts).items()})
    path = fetch("org/tiny-GGUF:f32")
    assert path.name == "tiny-F32-00001-of-00003.gguf" and path.is_symlink() and len(hub.fetched()) == 3
    expected = Engine.load(whole, kv_memory=1 << 22).logits([3, 5, 7])
    assert Engine.load("org/tiny-GGUF:f32", kv_memory=1 << 22).logits([3, 5, 7]).equal(expected)


# --- downloads that break off ---


def test_a_download_that_breaks_off_goes_on(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", lambda seconds: None)
    hub.breaks["model.safetensors"] = 2
    assert (fetch("org/toy") / "model.safetensors").read_bytes() == TOY["model.safetensors"]
    starts = [int(wanted[6:-1] or 0) for _, path, wanted in hub.asked if path.endswith(".safetensors") and wanted]
    assert len(starts) == 2 and 0 < starts[0] < starts[1] < len(TOY["model.safetensors"])


def test_what_was_complete_is_kept(hub: Hub):
    hub.faults["model.safetensors"] = 500
    error = refused("org/toy")
    assert "500" in error.what and "run it again: complete files are kept" in error.remedy
    [folder] = (Path(os.fspath(_cache())) / "models--org--toy" / "snapshots").iterdir()
    kept = {path.name for path in folder.iterdir()}
    assert kept == {*TOY} - {"model.safetensors"}  # the weights come last
    hub.faults.clear()
    hub.asked.clear()
    fetch("org/toy")
    assert hub.fetched() == ["model.safetensors"]


def _cache() -> str:
    from huggingface_hub import constants

    return constants.HF_HUB_CACHE


# --- offline, out of reach, refused ---


def test_offline(hub: Hub, offline: Callable[[], None], recwarn: pytest.WarningsRecorder):
    folder = fetch("org/toy")
    hub.asked.clear()
    offline()
    assert fetch("org/toy") == folder and not recwarn.list
    error = refused("org/other")
    assert str(error).count("\n") == 0 and error.exit_code == 3
    for words in ("no file or folder org/other here", str(_cache()), "HF_HUB_OFFLINE is set"):
        assert words in error.what
    assert "HF_HUB_OFFLINE is set" in refused("org/toy@v2").what
    (folder / "model.safetensors").unlink()
    error = refused("org/toy")
    assert "of org/toy the hub's cache has only a part" in error.what and error.where == str(folder)
    assert not hub.asked


def test_out_of_reach(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    folder = fetch("org/toy")
    for away in ("http://127.0.0.1:9", "http://hub.invalid"):
        _use(monkeypatch, away)
        with pytest.warns(UserWarning, match=f"{away} is out of reach: org/toy is used as it was fetched before"):
            assert fetch("org/toy") == folder
        error = refused("org/other")
        assert "fetching it from the hub failed: " in error.what and error.where == f"{away}/org/other"
        assert "HF_ENDPOINT" in error.remedy
    _use(monkeypatch, hub.url)
    hub.status = 503
    with pytest.warns(UserWarning, match="out of reach"):
        assert fetch("org/toy") == folder


def test_gated(hub: Hub, monkeypatch: pytest.MonkeyPatch):
    hub.gated["org/toy"] = "hf_secret"
    error = refused("org/toy")
    assert error.what == "org/toy is gated: its owners choose who may fetch it" and error.exit_code == 3
    assert error.where == f"{hub.url}/org/toy" and "HF_TOKEN" in error.remedy and "ask for access" in error.remedy
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    assert (fetch("org/toy") / "model.safetensors").read_bytes() == TOY["model.safetensors"]


def test_not_found(hub: Hub):
    error = refused("org/none")
    assert error.what == "there is no file or folder org/none here, and no model org/none on the hub that you may see"
    assert error.exit_code == 3 and "HF_TOKEN" in error.remedy


@pytest.mark.parametrize("answer", [b"<html>", b'{"id": "org/toy"}', b"[]"])
def test_an_endpoint_that_is_no_hub(hub: Hub, answer: bytes):
    hub.answer = answer
    error = refused("org/toy")
    assert "fetching it from the hub failed: " in error.what and "HF_ENDPOINT" in str(error) and error.exit_code == 3


def test_a_cache_that_cannot_be_written(hub: Hub, tmp_path: Path):
    (tmp_path / "hub").write_text("a file")
    error = refused("org/toy")
    assert "the hub's cache cannot be written" in error.what and str(tmp_path / "hub") in error.where


# --- who fetches ---


def test_lines_of_a_batch_never_fetch(hub: Hub, tmp_path: Path):
    fields = ("model", "draft", "reward", "adapter", "folder", "chat_template", "search", "catalogue")
    lines = [{"prompt": "2 + 2 =", name: "org/toy"} for name in fields] + [{"prompt": "org/toy"}]
    file, out = tmp_path / "lines.jsonl", tmp_path / "out.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    flags = ["--input", file, "--output", out, "--max-new-tokens", "2", "--kv-memory", "8M", "--threads", "1", "-q"]
    batch.main([*map(str, flags)])
    assert len(out.read_text().splitlines()) == len(lines) and not hub.asked


def test_http_requests_never_fetch(hub: Hub):
    httpx = pytest.importorskip("httpx2")
    pytest.importorskip("uvicorn")
    from engine.serve import command

    flags = ["--kv-memory", "8M", "--threads", "1", "-q", "--max-new-tokens", "2"]
    args = command.make_parser().parse_args(flags)
    with command.application(args) as app, background(app) as url:
        told: dict[str, Any] = {"model": "demo", "prompt": "2 + 2 ="}
        names = ("model", "draft", "reward", "adapter", "folder", "chat_template", "search", "catalogue")
        bodies = [told, *(told | {name: "org/toy"} for name in names)]
        answers = [httpx.post(f"{url}/v1/completions", json=body, timeout=60).status_code for body in bodies]
        answers.append(httpx.get(f"{url}/v1/models/org/toy", timeout=60).status_code)
    assert answers[0] == 200 and answers[1] == 404 and 500 not in answers and not hub.asked


def test_nothing_of_the_hub_is_imported_for_paths():
    code = "import sys; from engine.app.chat import main; main(['-p', 'hi', '-q', '--max-new-tokens', '1'])\n"
    code += "sys.exit('huggingface_hub' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT, stdin=subprocess.DEVNULL, timeout=120)


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[tuple[Hub, dict[str, str]]]:
    """A hub with org/toy, and the environment that leads a new user's commands to it."""
    plain = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    with serving() as hub:
        hub.add("org/toy", TOY | NEVER)
        yield hub, plain | {"HF_HOME": str(tmp_path / "hf"), "HF_ENDPOINT": hub.url, "PYTHONPATH": str(ROOT)}


COPPICE = [sys.executable, "-P", "-m", "coppice"]
ASKED = ["chat", "--model", "org/toy", "-p", "2+2", "--max-new-tokens", "8"]


def test_a_session_of_a_new_user(tmp_path: Path, environment: tuple[Hub, dict[str, str]]):
    hub, variables = environment
    hub.add("org/many-GGUF", {"a-Q4_0.gguf": b"", "a-Q8_0.gguf": b""})

    def coppice(*words: str, **more: str) -> tuple[int, str, str]:
        options: dict[str, Any] = {"cwd": tmp_path, "env": variables | more, "input": "", "timeout": 120}
        done = subprocess.run([*COPPICE, *words], capture_output=True, text=True, **options)
        return done.returncode, done.stdout, done.stderr

    answer = 0, "2 + 2 = 4.\n", ""  # progress bars are for terminals
    assert coppice(*ASKED) == answer and sorted(hub.fetched()) == sorted(TOY)
    hub.asked.clear()
    assert coppice(*ASKED, HF_HUB_OFFLINE="1") == answer and not hub.asked
    code, out, told = coppice("chat", "--model", "org/other", "-p", "2+2", HF_HUB_OFFLINE="1")
    assert (code, out, told.count("\n")) == (3, "", 1) and "HF_HUB_OFFLINE is set" in told
    code, out, told = coppice("batch", "--model", "org/many-GGUF", "-q")
    assert (code, out) == (3, "") and "2 GGUF files suit: a-Q4_0.gguf, a-Q8_0.gguf" in told


def test_ctrl_c_ends_a_download_at_once(tmp_path: Path, environment: tuple[Hub, dict[str, str]]):
    hub, variables = environment
    hub.stalls["model.safetensors"] = stalled = threading.Event()
    pipes: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    variables["HF_HUB_DOWNLOAD_TIMEOUT"] = "90"
    with subprocess.Popen([*COPPICE, *ASKED], cwd=tmp_path, env=variables, **pipes) as chat:
        assert stalled.wait(120)
        chat.send_signal(signal.SIGINT)
        out, told = chat.communicate(timeout=120)
    assert (chat.returncode, out, told) == (130, b"", b"interrupted\n")


def test_a_blob_that_repositories_share(tmp_path: Path):
    """The hub's cache can hold a blob once for all repositories: blobs/DIGEST is a link then."""
    folder = tmp_path / "models--org--toy" / "snapshots" / ("0" * 40)
    store, blob = tmp_path / "blobs" / "ab" / ("ab" * 32), folder.parent.parent / "blobs" / "weights"
    for path in (folder, store.parent, blob.parent):
        path.mkdir(parents=True)
    for name, data in TOY.items():
        (folder / name).write_bytes(data)
    (folder / "model.safetensors").replace(store)
    blob.symlink_to(f"../../blobs/ab/{store.name}")
    (folder / "model.safetensors").symlink_to("../../blobs/weights")
    assert Checkpoint.open(folder).name == "toy"
    outside = store.rename(tmp_path / "blobs" / "ab" / "x")
    blob.unlink()
    blob.symlink_to(outside)
    with pytest.raises(CheckpointError, match="leads out"):
        Checkpoint.open(folder)
