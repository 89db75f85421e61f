"""The fastest of several ways is measured once per machine, kept as safely as the kernels, and said."""

import json

import pytest
import torch

from engine import Engine, UsageError
from engine.app import chat
from engine.demo import demo_folder
from engine.load import capabilities, fastest, loading
from engine.load.capabilities import Capabilities, Precision, pick_precision
from engine.load.fastest import FormatChoice, choose, fastest_dtype, fastest_format
from kernels import cpp

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    """An empty cache, and nothing remembered."""
    cpp.why_not()  # the kernels are found before the cache moves
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(fastest, "_answers", {})
    monkeypatch.delenv(fastest.PRETEND, raising=False)
    return tmp_path / "coppice" / "kernels"


@pytest.fixture
def measured(monkeypatch):
    """Ways to multiply that take injected seconds; what was measured."""
    seconds = {(FORMAT, dtype): 1.0 for FORMAT in fastest.AUTO_FORMATS for dtype in (torch.float32, torch.bfloat16)}
    asked = []

    def timed(format, own, dtype, device):
        name = next(name for name, found in fastest.FORMATS.items() if found is format)
        asked.append((name, dtype))
        return [seconds[name, dtype]] * len(fastest.ROWS)

    monkeypatch.setattr(fastest, "timed", timed)
    return seconds, asked


def again(monkeypatch):
    """Forget the answers, which a new process would not have."""
    monkeypatch.setattr(fastest, "_answers", {})


def ways(asked, **seconds):
    def measure(name):
        asked.append(name)
        return seconds[name]

    return {name: lambda name=name: measure(name) for name in seconds}


def test_the_geometric_mean_decides_and_small_gains_do_not():
    asked = []
    slow, fast = [1e-3, 2e-3, 3e-2], [1e-3, 1e-3, 2e-2]
    chosen = choose("a", ways(asked, first=slow, second=fast))
    assert chosen.name == "second" and asked == ["first", "second"]
    assert str(chosen) == f"{3 ** (1 / 3):.2f}x as fast as first, measured here"
    assert choose("b", ways([], first=fast, second=[t / 1.05 for t in fast])).name == "first"
    assert choose("c", ways([], first=fast, second=slow)).name == "first"


def test_one_way_is_not_measured():
    asked = []
    assert choose("a", ways(asked, only=[1.0])) == FormatChoice("only") and not asked and not str(FormatChoice("only"))


def test_a_machine_chooses_once(cache, monkeypatch):
    asked = []
    for _ in range(2):
        assert choose("a", ways(asked, first=[2.0] * 3, second=[1.0] * 3)).name == "second"
        again(monkeypatch)
    assert asked == ["first", "second"] and [f.stat().st_mode & 0o777 for f in cache.iterdir()] == [0o600]
    choose("a", ways(asked, first=[1.0] * 3, second=[2.0] * 3))
    assert len(asked) == 2
    monkeypatch.setattr(fastest.processor, "identity", lambda: ("another",))
    assert choose("a", ways(asked, first=[1.0] * 3, second=[2.0] * 3)).name == "first" and len(asked) == 4
    assert choose("b", ways(asked, first=[1.0] * 3, second=[2.0] * 3)).name == "first" and len(asked) == 6


@pytest.mark.parametrize(
    "content",
    [
        *("", "{", "[]", '{"first": [1.0, 1.0, 1.0]}', '{"second": [1.0, 1.0, 1.0], "first": [1.0, 1.0, 1.0]}'),
        *('{"first": [1.0, 1.0, 1.0], "second": 1.0}', '{"first": [1.0, 1.0, 1.0], "second": [1.0, 1.0]}'),
        *('{"first": [1.0, 1.0, 1.0], "second": [0.0, 1.0, 1.0]}',),
        *('{"first": [1.0, 1.0, 1.0], "second": [NaN, 1.0, 1.0]}',),
        *('{"first": [1.0, 1.0, 1.0], "second": ["x", 1.0, 1.0]}',),
    ],
)
def test_a_damaged_file_is_measured_again_and_replaced(cache, monkeypatch, content):
    asked = []
    choose("a", ways(asked, first=[2.0] * 3, second=[1.0] * 3))
    (file,) = cache.iterdir()
    whole = file.read_text()
    file.write_text(content)
    again(monkeypatch)
    assert choose("a", ways(asked, first=[2.0] * 3, second=[1.0] * 3)).name == "second"
    assert len(asked) == 4 and file.read_text() == whole and json.loads(whole)["first"] == [2.0] * 3


def test_what_others_could_have_written_is_not_believed(cache, monkeypatch):
    asked = []
    seconds = {"first": [2.0] * 3, "second": [1.0] * 3}
    choose("a", ways(asked, **seconds))
    (file,) = cache.iterdir()
    file.chmod(0o666)
    again(monkeypatch)
    assert choose("a", ways(asked, **seconds)).name == "second" and len(asked) == 4
    file.unlink()
    file.symlink_to(cache / "elsewhere")
    again(monkeypatch)
    choose("a", ways(asked, **seconds))
    assert len(asked) == 6 and not (cache / "elsewhere").exists()
    cache.chmod(0o777)
    again(monkeypatch)
    choose("a", ways(asked, **seconds))
    choose("a", ways(asked, **seconds))
    assert len(asked) == 8  # once per process


def test_the_dtype_is_measured_where_there_are_two_ways(measured, monkeypatch):
    seconds, asked = measured
    monkeypatch.setattr(fastest, "has_kernels", lambda *_: False)
    assert fastest_dtype(torch.bfloat16, CPU) == FormatChoice("bfloat16") and not asked
    monkeypatch.setattr(fastest, "has_kernels", lambda *_: True)
    monkeypatch.setattr(fastest, "has_products", lambda dtype, _: dtype == torch.float32)
    assert fastest_dtype(torch.bfloat16, CPU) == FormatChoice("bfloat16") and not asked
    monkeypatch.setattr(fastest, "has_products", lambda *_: True)
    monkeypatch.setattr(capabilities, "has_products", lambda *_: True)
    assert fastest_dtype(torch.float32, CPU) == FormatChoice("float32") and not asked
    seconds["none", torch.bfloat16] = 2.0
    expected = Precision(torch.float32, "2.00x as fast as bfloat16, measured here")
    assert pick_precision(torch.bfloat16, CPU, 1, 1) == expected and len(asked) == 2
    fastest._answers.clear()
    seconds["none", torch.bfloat16] = 0.5
    assert pick_precision(torch.bfloat16, CPU, 1, 1) == expected and len(asked) == 2, "as the file has it"


def test_the_format_is_measured_where_there_are_two(measured, monkeypatch):
    seconds, asked = measured
    assert fastest_format(torch.float32, torch.float32, CUDA) == FormatChoice("none") and not asked
    monkeypatch.setattr(fastest.FORMATS["int8"], "why_not", lambda _: None)
    seconds["int8", torch.float32] = 0.5
    chosen = fastest_format(torch.float32, torch.float32, CPU)
    assert chosen.name == "int8" and len(asked) == 2
    told = Capabilities.of(None, Precision(torch.float32), chosen, CPU, "cpp").precision
    assert told == "float32, int8 weights (2.00x as fast as none, measured here)"
    told = Capabilities.of(None, Precision(torch.float32), FormatChoice("none", {"none": 1.0, "int8": 2.0}), CPU, "cpp")
    assert told.precision == "float32, weights as they are (2.00x as fast as int8, measured here)"


@pytest.mark.parametrize(("value", "dtype", "format"), [("bf16", "bfloat16", "int8"), ("no-bf16", "float32", "none")])
@pytest.mark.parametrize("products", [True, False])
def test_tests_pretend_a_processor(measured, monkeypatch, value, dtype, format, products):
    _, asked = measured
    for module in (capabilities, fastest):
        monkeypatch.setattr(module, "has_products", lambda own, _: products or own == torch.float32)
    monkeypatch.setattr(fastest.FORMATS["int8"], "why_not", lambda _: None)
    monkeypatch.setenv("COPPICE_PRETEND", value)
    assert capabilities.dtype_name(pick_precision(torch.bfloat16, CPU, 1, 8).dtype) == dtype
    assert fastest_format(torch.bfloat16, torch.float32, CPU) == FormatChoice(format) and not asked
    assert pick_precision(torch.float32, CPU, 1, 8).dtype == torch.float32
    for own, expected in ((torch.bfloat16, products), (torch.float32, True)):  # a GPU is none of it
        assert (pick_precision(own, CUDA, 1, 8).dtype == own) == expected
    assert fastest_format(torch.bfloat16, torch.float32, CUDA) == FormatChoice("none")


def test_an_unknown_pretence_is_an_error(monkeypatch):
    monkeypatch.setenv("COPPICE_PRETEND", "avx2")
    with pytest.raises(UsageError, match="expected bf16 or no-bf16, got 'avx2'"):
        Engine.load(demo_folder())


@pytest.mark.skipif(loading.FORMATS["int8"].why_not(CPU) is not None, reason="this machine runs no int8 weights")
@pytest.mark.parametrize("faster", ["none", "int8"])
def test_the_engine_loads_what_is_faster(measured, faster):
    seconds, _ = measured
    seconds[faster, torch.float32] = 0.5
    engine = Engine.load(demo_folder(), dtype="float32", quant="auto", threads=1, kv_memory=1 << 20)
    plain = Engine.load(demo_folder(), dtype="float32", quant=faster, threads=1, kv_memory=1 << 20)
    assert engine.capabilities.precision.split(" (")[0].count("int8") == (faster == "int8")
    assert "measured" not in plain.capabilities.precision
    told = chat.banner(engine, chat.Settings("greedy", {}, 256, False, ()), demo_folder())
    assert f"2.00x as fast as {'int8' if faster == 'none' else 'none'}, measured here" in told


def test_other_names_are_refused():
    with pytest.raises(UsageError, match="or auto, got 'int3'"):
        Engine.load(demo_folder(), quant="int3")


def test_real_products_are_timed(monkeypatch):
    monkeypatch.setattr(fastest, "SIDE", 64)
    for name in fastest.AUTO_FORMATS:
        if fastest.FORMATS[name].why_not(CPU) is None:
            taken = fastest.timed(fastest.FORMATS[name], torch.bfloat16, torch.float32, CPU)
            assert len(taken) == len(fastest.ROWS) and all(seconds > 0 for seconds in taken)
