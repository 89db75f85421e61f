"""The budget of a process: predictions beside the truth, refusals, limits of control groups."""

import gc
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from engine import Engine, KVMemoryError, Request, UsageError
from engine.app.chat import main
from engine.app.chat_flags import parser
from engine.app.cli.loading import load_options
from engine.demo import demo_folder
from engine.drafts.size import FIRST_NODES
from engine.load.budget import (
    ENTRY,
    RANKED,
    TOKENIZER,
    TOKENIZER_LEAST,
    MemoryPlan,
    _tokenizer,
    allow,
    memory_bytes,
    plan,
    resident,
)
from engine.load.options import FORMATS_SHOWN, LoadOptions
from engine.load.pools import check_memory
from engine.load.sizes import Workload, cgroup_limits
from engine.rules.grammars import most_bytes
from kernels.linear import PackedParts
from kernels.linear.blocks import BLOCKS
from models import FAMILIES, load_model
from models.checkpoint.headers import Checkpoint
from models.checkpoint.sizes import measure
from models.formats import int4
from models.formats.floats import has_kernels
from models.formats.linear import FORMATS
from models.shard import Shard
from models.trim import trim_memory
from search import ADED, DSBD, ULTS, BoN, Greedy, Sample, Trie
from search.ults.prior import GATHERED
from tests.marks import needs_cpp
from tools import random_checkpoint
from tools.pack import pack

ROOT = Path(__file__).parents[3]
GOLDEN = ROOT / "tests" / "golden"
CPU = torch.device("cpu")
MB = 1 << 20


def folders() -> list[Path]:
    found = [path.parent for path in sorted(GOLDEN.glob("*/*/golden.json"))]
    return [folder for folder in found if json.loads((folder / "config.json").read_text()).get("architectures")]


def kind(folder: Path) -> tuple[str, ...]:
    """The family of a checkpoint, or the method and the format that quantised it."""
    fields = json.loads((folder / "config.json").read_text())
    quantised = fields.get("quantization_config", {})
    return tuple(quantised[name] for name in ("quant_method", "format") if name in quantised) or (
        fields["architectures"][0],
    )


ONE_OF_EACH = {kind(folder): folder for folder in folders()}.values()


def tensors_in(layers: Iterable[torch.nn.Module]) -> Iterator[torch.Tensor]:
    """The tensors of packed matrices and of their groups, each once."""
    found = [x.packed for x in layers if getattr(x, "packed", None) is not None]
    parts = [part for packed in found for part in (packed.parts if isinstance(packed, PackedParts) else [packed])]
    for packed in {id(p): p for p in parts}.values():
        yield from (x for x in (*vars(packed).values(), *(packed.groups or ())) if isinstance(x, torch.Tensor))


@pytest.mark.skipif(not has_kernels(torch.float32, CPU), reason="needs C++ kernels, whose panels are counted")
@pytest.mark.full(unless=lambda folder: folder in ONE_OF_EACH)
@pytest.mark.parametrize("folder", folders(), ids=lambda folder: str(folder.relative_to(GOLDEN)))
def test_weights_are_counted_to_the_byte(folder, monkeypatch):
    monkeypatch.setattr(int4, "STEPS", (8,))  # plain rounding: to search for the best scales changes no size
    monkeypatch.setattr(int4, "SPANS", (15,))
    checkpoint = Checkpoint.open(folder)
    if checkpoint.quantization:  # scales may change their dtype
        size, model = measure(checkpoint, torch.float32, CPU), load_model(checkpoint, torch.float32, CPU)
        tensors = [*tensors_in(model.modules())]
        least = 0.75 if folder.name == "gemma" else 0.9  # matrices of 32 rows with steps of their own are padded alone
        assert least < size.matrices / sum(x.nbytes for x in tensors) < 1.25
        return
    for quant in FORMATS if folder in ONE_OF_EACH else FORMATS_SHOWN:  # others of int4 differ by their groups alone
        size, model = measure(checkpoint, torch.float32, CPU, quant), load_model(checkpoint, torch.float32, CPU, quant)
        assert size.matrices == sum(x.nbytes for x in tensors_in(model.modules())), quant
        assert size.shape == model.shape and size.config == model.config


@pytest.mark.skipif(not has_kernels(torch.float32, CPU), reason="needs C++ kernels, whose panels are counted")
@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("format", BLOCKS)
def test_gguf_files_are_counted_to_the_byte(format, mixed, tmp_path):
    from tests.models.gguf.files import WIDE, File, gguf, random

    types = gguf.GGMLQuantizationType
    some = {"blk.0.attn_k.weight": types.Q8_0, "blk.0.attn_v.weight": types.F16, "blk.1.ffn_up.weight": types.Q4_1}
    file = File(random(tmp_path / "source", "llama/gqa", **WIDE), types[format], some if mixed else {})
    if format == "NVFP4":
        file.add("blk.1.attn_q.scale", torch.tensor([1 / 3]).numpy())
    checkpoint = Checkpoint.open(file.write(tmp_path / "file.gguf"))
    size, model = measure(checkpoint, torch.float32, CPU), load_model(checkpoint, torch.float32, CPU)
    assert size.matrices == sum(x.nbytes for x in tensors_in(model.modules()))


@pytest.mark.skipif(not has_kernels(torch.float32, CPU), reason="needs C++ kernels, whose panels are counted")
def test_converted_files_are_counted(tmp_path):
    from tests.models.gguf.files import WIDE, File, gguf, random
    from tools.gguf import convert

    types = gguf.GGMLQuantizationType
    file = File(random(tmp_path / "source", "llama/gqa", **WIDE), types.Q5_1, {"blk.1.ffn_up.weight": types.Q6_K})
    (tmp_path / "out").mkdir()
    convert(path := file.write(tmp_path / "file.gguf"), tmp_path / "out")
    checkpoint = Checkpoint.open(path)
    sizes = [measure(each, torch.float32, CPU).matrices for each in (checkpoint, Checkpoint.open(tmp_path / "out"))]
    assert sizes[1] == pytest.approx(sizes[0], rel=0.03)  # scales without units
    elsewhere = measure(checkpoint, torch.bfloat16, torch.device("meta")).matrices
    assert 9 / 6 * 0.97 < elsewhere / sizes[0] < 10 / 6 * 1.03  # codes of 8 bits, scales of float32


def test_all_families_are_counted():
    names = {Checkpoint.open(folder).architecture for folder in folders()}  # of a wrapped model that of its text
    assert {FAMILIES[name] for name in names if name in FAMILIES} == {*FAMILIES.values()}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> Path:
    """36 MB of float32, of which half are the head."""
    folder = tmp_path_factory.mktemp("budget") / "model"
    random_checkpoint.make(folder, layers=4, width=384, mlp=1024, heads=6, vocab=12000)
    return folder


PEAK = """
import sys
from pathlib import Path
from engine import Engine, LoadOptions
from engine.load.budget import peak, plan
from engine.load.sizes import Workload
from search import Trie
folder, spare, quant = sys.argv[1], int(sys.argv[2]), sys.argv[3]
work = Workload(Trie(beams=8), 400, 24)
planned = plan(LoadOptions(folder, quant=quant), work)
memory = planned.fixed + spare if spare else None
Path("/proc/self/clear_refs").write_text("5")  # from now on: plan() has released libraries, CUDA's among them
engine = Engine.load(folder, memory=memory, quant=quant, threads=2, kv_memory=None if spare else "64M")
engine.generate([[5 + i % 900 for i in range(400)]], work.search, max_new_tokens=24, ignore_eos=True)
print(planned.total(work.slots[1]), peak(), engine.pool.pages, memory)
"""


@pytest.mark.full(unless=lambda quant: quant != "int8")
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quant", ["none", "int8", "int4"])
def test_prediction_and_peak(checkpoint, quant):
    """The plan holds at the peak, loading included, and is not much more than the truth."""
    if FORMATS[quant].why_not(CPU) is not None:
        pytest.skip(f"no {quant} here")
    command = [sys.executable, "-c", PEAK, str(checkpoint), "0", quant]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    planned, peak = map(int, done.stdout.split()[:2])
    assert planned / 1.25 < peak < planned * 1.08, (planned / MB, peak / MB)


WIDE = """
import sys
from pathlib import Path
from engine import Engine, LoadOptions
from engine.load.budget import peak, plan
from engine.load.sizes import Workload
from search import BeamSample, Sample
work = Workload(eval(sys.argv[2]), 20, 6)
planned = plan(LoadOptions(sys.argv[1], dtype="float32"), work)
Path("/proc/self/clear_refs").write_text("5")
engine = Engine.load(sys.argv[1], dtype="float32", threads=1, kv_memory="4M")
engine.generate([[*range(5, 25)]], work.search, max_new_tokens=6, ignore_eos=True)
print(planned.fixed + (4 << 20), peak())
"""


@pytest.mark.full
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    "search",
    [
        "BeamSample(beams=15)",
        "BeamSample(beams=15, temperature=5.0, top_p=0.95)",
        "BeamSample(beams=64, temperature=5.0)",
        "Sample(num_return_sequences=15, temperature=5.0, top_p=0.95)",
        "Sample(num_return_sequences=15, temperature=5.0, typical_p=0.95)",
        "Sample(num_return_sequences=15, temperature=5.0, xtc_probability=0.5, xtc_threshold=1e-6)",
    ],
)
def test_distributions_over_large_vocabularies_fit(tmp_path, search):
    """15 rows of 262,144 float64 numbers would be 31 MB.

    The C library gives blocks of 512 KiB back when they are freed: holes in its heap took up to 50 MB, at random.
    """
    random_checkpoint.make(tmp_path / "model", layers=1, width=32, mlp=64, heads=2, vocab=1 << 18)
    command = [sys.executable, "-c", WIDE, str(tmp_path / "model"), search]
    heap = {"MALLOC_MMAP_THRESHOLD_": str(1 << 19), "MALLOC_TRIM_THRESHOLD_": str(1 << 20)}
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True, env=os.environ | heap
    )
    planned, peak = map(int, done.stdout.split())
    assert peak < planned * 1.12, (planned / MB, peak / MB)


LOAD = """
import json, sys
from dataclasses import replace
from pathlib import Path
from engine import Engine
from engine.load.budget import peak, resident
from models.trim import release_libraries
folder, quant = sys.argv[1:]
release_libraries()
Path("/proc/self/clear_refs").write_text("5")  # the peak is from now on
before = resident()
engine = Engine.load(folder, quant=quant, kv_memory="1M", threads=2)
print(json.dumps({"peak": peak(), "loaded": resident(), "before": before}))
"""


@pytest.mark.full(unless=lambda quant: quant in ("none", "packed"))
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("quant", ["none", "int8", "int4", "packed"])
def test_loading_peaks_at_the_loaded_model_and_one_tensor(tmp_path, quant):
    """67 MB of bfloat16 tensors: two of 16 MB are packed together, and never in memory together as they were.

    Libraries take 27 MB while they load and give it back.
    """
    if FORMATS["int4" if quant == "packed" else quant].why_not(CPU) is not None:
        pytest.skip(f"no {quant} here")
    make = random_checkpoint.make
    folder, largest = tmp_path / "model", 16 * MB
    make(folder, layers=1, width=1024, mlp=8192, heads=8, vocab=2000, dtype="bfloat16")
    if quant == "packed":
        pack(folder, tmp_path / "packed", quant="int4")
        folder, quant = tmp_path / "packed", "none"
    command = [sys.executable, "-c", LOAD, str(folder), quant]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    found = json.loads(done.stdout)
    assert found["peak"] - found["loaded"] < largest + (27 + 21) * MB, {name: size / MB for name, size in found.items()}


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_budget_is_kept(checkpoint):
    """The cache gets what is left, and the process stays within its budget."""
    spare = 108 * MB
    command = [sys.executable, "-c", PEAK, str(checkpoint), str(spare), "none"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    _, peak, pages, memory = map(int, done.stdout.split())
    assert peak <= memory
    token = 2 * 4 * 384 * 4
    assert abs(pages * token - spare * 7 / 8) < 24 * MB  # the process grew between the two plans


def test_refusal_spells_the_sum_out(checkpoint, monkeypatch):
    monkeypatch.setattr("engine.load.budget.runtime_bytes", lambda: 200 * MB)
    work = Workload(Trie(beams=15), 1, 256)
    short = plan(LoadOptions(checkpoint), work).total(work.slots[0]) - MB // 2
    with pytest.raises(UsageError) as refused:
        allow(LoadOptions(checkpoint, memory=short, workload=work))
    assert refused.value.exit_code == 2
    text = str(refused.value)
    for line in (
        "runtime: Python, torch, kernels",
        "weights",
        "tokenizer",
        "scratch of a pass",
        "cache for 270 tokens",
    ):
        assert line in text
    assert "what would fit: " in text and "--memory of at least" in text
    if FORMATS["int8"].why_not(CPU) is None:
        assert "--quant int8 (" in text
    assert "--beams" in text and "--max-new-tokens" in text
    flags = [fit.split()[0] for fit in text.rpartition("what would fit: ")[2].split(", ")]
    assert len(flags) == len({*flags}) <= 5 and flags[-1] == "--memory"  # of each flag the nearest alone


def test_what_is_left_is_the_caches(checkpoint, monkeypatch):
    monkeypatch.setattr("engine.load.budget.runtime_bytes", lambda: 200 * MB)
    fixed = plan(LoadOptions(checkpoint), Workload()).fixed
    options = LoadOptions(checkpoint, memory=fixed + 40 * MB, workload=Workload())
    assert 30 * MB < allow(options).cache < 41 * MB
    assert allow(replace(options, kv_memory=5 * MB))[:3] == (5 * MB, None, None)
    with pytest.raises(UsageError, match=r"--kv-memory 300\.0 MB is more than"):
        allow(replace(options, kv_memory="300M"))


@pytest.mark.parametrize("given", [0, -1, 1.5, True, "much", "12Q", 1 << 63])
def test_other_budgets_are_refused(checkpoint, given):
    with pytest.raises(UsageError, match="memory: expected auto"):
        Engine.load(checkpoint, memory=given)


def test_load_takes_it(checkpoint):
    gc.collect()  # what other tests left would go in between
    trim_memory()
    need = plan(LoadOptions(checkpoint), Workload(parallel=16)).fixed
    engine = Engine.load(checkpoint, memory=need + 30 * MB, threads=2)
    room = engine.pool.pages * engine.pool.page_size
    assert 0 < room * engine.pool.bytes_per_token <= 40 * MB
    with pytest.raises(KVMemoryError) as caught:
        check_memory(engine.pool, Greedy(), room + MB // engine.pool.bytes_per_token, 1)
    [(advised, unit)] = re.findall(r"--memory at least ([\d.]+) (MB|GB)", str(caught.value))
    size, rounding = (MB, 0) if unit == "MB" else (MB << 10, (MB << 10) / 10)  # a process with CUDA's libraries
    assert 30 * MB < float(advised) * size - need <= 32 * MB + rounding
    with pytest.raises(UsageError, match="is less than"):
        Engine.load(checkpoint, memory="1M")


def test_tokenizers_are_counted(tmp_path):
    """Pieces and merges of a tokenizer.json, bytes of other files."""
    for folder, name in (("tekken_ranks", "tekken.json"), ("kimi", "tiktoken.model")):
        size = (GOLDEN / "text" / folder / name).stat().st_size
        assert _tokenizer(GOLDEN / "text" / folder) == RANKED[name] * size
    assert _tokenizer(demo_folder()) == TOKENIZER_LEAST + ENTRY * (1536 + 1274)
    assert _tokenizer(tmp_path) == 0
    (tmp_path / "vocab.json").write_text("{}")
    (tmp_path / "merges.txt").write_text("a b\n")
    assert _tokenizer(tmp_path) == TOKENIZER * 6
    (tmp_path / "tokenizer.json").write_text('{"model": []}')
    assert _tokenizer(tmp_path) == TOKENIZER_LEAST


KEPT = """
import gc, sys
from pathlib import Path
from engine.load.budget import _pieces, resident
from engine.text.tokenizer import Tokenizer
from models.checkpoint.headers import Checkpoint
from models.trim import trim_memory
path, small = map(Path, sys.argv[1:])
Tokenizer.of(Checkpoint.open(small))  # what is imported once
checkpoint = Checkpoint.open(path)
counted = _pieces(checkpoint.vocabulary)
gc.collect()
trim_memory()
before = resident()
tokenizer = Tokenizer.of(checkpoint)
gc.collect()
trim_memory()
print(counted, resident() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_long_pieces_are_counted(tmp_path):
    """A GGUF file with scores; a seventh of the pieces take more than 24 bytes, as in texts of other alphabets."""
    from tests.models.gguf.files import sentencepiece_file

    small, file = sentencepiece_file().write(tmp_path / "small.gguf"), sentencepiece_file()
    letters, tokens = "абвгдежзиклмнопрстуфхцчшщэюя", file.keys["tokenizer.ggml.tokens"]
    for i in range(1 << 17):
        number = f"{i:06}"
        tokens.append("▁" * (i % 2) + "".join(letters[int(digit)] for digit in number) + letters[9 + i % 19] * (i % 7))
    more = len(tokens) - len(file.keys["tokenizer.ggml.token_type"])
    file.keys["tokenizer.ggml.token_type"] += [1] * more
    file.keys["tokenizer.ggml.scores"] = [-float(i) for i in range(len(tokens))]
    command = [sys.executable, "-c", KEPT, str(file.write(tmp_path / "file.gguf")), str(small)]
    environment = os.environ | {"COPPICE_CACHE": "off"}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True, env=environment)
    counted, kept = map(int, done.stdout.split())
    assert counted / 1.4 < kept < counted * 1.05, (counted / MB, kept / MB)


READ = """
import sys
from pathlib import Path
from engine import Engine, LoadOptions
from engine.load.budget import peak, plan
from engine.load.sizes import Workload
work = Workload(grammars=False)
for _ in range(2):  # the first plan leaves code in memory, which the plan of the engine counts
    needed = plan(LoadOptions(sys.argv[1]), work).total(work.slots[0])
Path("/proc/self/clear_refs").write_text("5")
Engine.load(sys.argv[1], workload=work, memory=needed + (4 << 20), threads=1)
print(needed, peak())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_tokenizer_is_read_within_the_limit(tmp_path):
    """A small model with many tokens takes less than reading them does."""
    random_checkpoint.make(tmp_path / "model", layers=1, width=32, mlp=64, heads=2, vocab=1 << 17)
    command = [sys.executable, "-c", READ, str(tmp_path / "model")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    needed, peak = map(int, done.stdout.split())
    assert peak < needed + 4 * MB, (needed / MB, peak / MB)
    with pytest.raises(UsageError, match="more than that while the tokenizer is read"):
        allow(LoadOptions(tmp_path / "model", memory=100 * MB, workload=Workload(grammars=False)))


def test_more_rows_get_a_part_of_what_is_left(checkpoint, monkeypatch):
    """A request whose rows have no room is refused."""
    monkeypatch.setattr("engine.load.budget.runtime_bytes", lambda: 200 * MB)
    work, row = Workload(parallel=4), 12000 * (4 + 2 * 4)
    need = plan(LoadOptions(checkpoint), work).total(1)
    options = LoadOptions(checkpoint, workload=work)
    rows = [allow(replace(options, memory=need + spare)).rows for spare in (MB, 40 * MB, 1000 * MB)]
    assert rows[0] == 4 and 4 + 30 * MB // 8 // row < rows[1] <= 4 + 41 * MB // 8 // row and rows[2] is None
    some = allow(replace(options, memory=need + 40 * MB, kv_memory=30 * MB))
    assert 4 + 8 * MB // row < some.rows <= 4 + 11 * MB // row  # all that such a cache leaves
    engine = Engine.load(checkpoint, memory=need + 9 * MB, workload=work, threads=2, drafts="off")
    room = engine.runner.most_rows
    assert 4 <= room < 16
    with pytest.raises(UsageError, match=f"requests 64 rows of log-probabilities at once, --memory .* for {room}"):
        engine.generate([[5, 6]], Trie(beams=64), max_new_tokens=4)
    engine.generate([[5, 6]], Trie(beams=room), max_new_tokens=4)


@needs_cpp
@pytest.mark.parametrize("drafts", ["off", "ngrams"])
def test_wide_requests_share_the_rows_that_are_planned(checkpoint, drafts, monkeypatch):
    """A request waits while a pass has no room for its rows, and its answer is the same."""
    engine = Engine.load(checkpoint, dtype="float32", kv_memory="8M", threads=1, drafts=drafts)
    seen, evaluate, best = [], engine.runner.evaluate, engine.runner.evaluate_top_sums
    monkeypatch.setattr(engine.runner, "evaluate", lambda work: (seen.append(len(work.asked)), evaluate(work))[1])
    monkeypatch.setattr(
        engine.runner, "evaluate_top_sums", lambda work, sums: (seen.append(len(work.asked)), best(work, sums))[1]
    )
    searches = [Trie(beams=6), Sample(num_return_sequences=8), Trie(beams=2), Greedy()]
    requests = [Request([*range(5 + i, 15 + i)], each, 5, ignore_eos=True) for i, each in enumerate(searches)]
    found = []
    for most in (None, 8):
        engine.runner.most_rows = most
        seen.clear()
        found.append([outcome.outputs for _, outcome in sorted(engine.serve(requests), key=lambda each: each[0])])
        assert (max(seen) <= 8) == (most == 8), seen
    assert found[0] == found[1]


@needs_cpp
def test_automatic_drafts_keep_to_the_rows_that_are_planned(checkpoint, monkeypatch):
    """ADED drafts as many nodes as a pass has rows for; its answer is the same."""
    engine = Engine.load(checkpoint, dtype="float32", kv_memory="8M", threads=1)
    monkeypatch.setattr("engine.step.timing.PassTime.charge", lambda *_: 1.0)  # drafted nodes cost nothing
    seen, evaluate = [], engine.runner.evaluate
    monkeypatch.setattr(engine.runner, "evaluate", lambda work: (seen.append(len(work.asked)), evaluate(work))[1])
    found = []
    for most in (None, 1 + FIRST_NODES):
        engine.runner.most_rows = most
        seen.clear()
        [result] = engine.generate([[5, 6, 7, 8] * 12], ADED(), max_new_tokens=60, ignore_eos=True)
        found.append(result.outputs)
        assert max(seen) <= 1 + FIRST_NODES if most else max(seen) > 1 + FIRST_NODES, seen
    assert found[0] == found[1]


def test_plan_and_workload():
    found = MemoryPlan({"a": 10, "b": 20}, token=5)
    assert (found.fixed, found.cache(4), found.total(4), found.left(100)) == (30, 30, 60, 60)
    assert Workload(Trie(beams=3), 10, 5).slots == (16, 22) and Workload(Greedy()).beams == 1
    assert resident() > 50 * MB


@pytest.mark.parametrize(
    ("search", "rows"),
    [
        (Greedy(), 1),
        (Trie(beams=3), 3),
        (Sample(num_return_sequences=5), 5),
        (BoN(n=6, num_return_sequences=2), 6),
        (ULTS(batch=4), GATHERED),  # of the prior
        (ULTS(batch=4, prior="dirichlet"), 4),
        (DSBD(width=3, gamma=2, draft_beams=4), 3 + 2 * 4),
        (ADED(nodes=6), 1 + 6),
        (ADED(), 1 + FIRST_NODES),
    ],
)
def test_rows_that_searches_request(checkpoint, search, rows):
    assert Workload(search, 1, 8, parallel=3).rows == 3 * rows
    one, some = (plan(LoadOptions(checkpoint, draft=checkpoint), Workload(each), 0).fixed for each in (None, search))
    assert some - one == 2 * (rows - 1) * 12000 * (4 + 2 * 4)


@pytest.mark.parametrize(
    ("drafts", "search", "drafted"),
    [("ngrams", Trie(beams=3), 64), ("off", Trie(beams=3), 0), ("ngrams", ADED(nodes=6), 0)],
)
def test_rows_of_drafts_are_counted(checkpoint, drafts, search, drafted):
    """A drafted node's row takes as much as one that the search asks for."""
    options = LoadOptions(checkpoint, drafts=drafts)
    work = Workload(search, 1, 8, parallel=2)
    one, some = (plan(options, each, 0).fixed for each in (Workload(ADED(nodes=1)), work))
    assert some - one == (work.rows + 2 * drafted - 2) * 12000 * (4 + 2 * 4)
    if drafted:
        enough = plan(replace(options, drafts="off"), work).total(work.slots[0]) + (4 << 20)
        with pytest.raises(UsageError, match="is less than") as refused:
            allow(replace(options, memory=enough, workload=work))
        assert "--drafts off (" in refused.value.remedy


def test_nothing_is_drafted_for_a_reward_model():
    off, some = (
        plan(LoadOptions(GOLDEN / "llama/gqa", reward=GOLDEN / "llama/classifier", drafts=drafts), Workload(Trie()), 0)
        for drafts in ("off", "ngrams")
    )
    assert [name for name, size in some.lines.items() if size > off.lines[name]] == ["target scratch of a pass"]


VOCABULARY = """
import sys
from pathlib import Path
from engine.load.budget import peak, resident
from engine.rules.grammars import KEPT_BYTES, Vocabulary, most_bytes
from engine.text.tokenizer import Tokenizer
from models.trim import trim_memory
tokenizer = Tokenizer.load(sys.argv[1])
trim_memory()
before = resident()
Path("/proc/self/clear_refs").write_text("5")
vocabulary = Vocabulary(tokenizer)
print(most_bytes(tokenizer.size) - KEPT_BYTES, peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(find_spec("llguidance") is None, reason="llguidance is not installed (extra grammar)")
def test_the_vocabulary_of_grammars_is_counted(checkpoint, tmp_path):
    """At its first grammar, a process takes as much for the tokens of Gemma 3 as for 80 MB of weights."""
    (tmp_path / "tokenizer.json").write_text(json.dumps(random_checkpoint.tokenizer_json(1 << 17)))
    command = [sys.executable, "-c", VOCABULARY, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    counted, taken = map(int, done.stdout.split())
    assert counted / 1.4 < taken < counted * 1.05, (counted / MB, taken / MB)
    without, some = (plan(LoadOptions(checkpoint), Workload(grammars=each), 0) for each in (False, True))
    assert some.fixed - without.fixed == most_bytes(12000)
    bare = tmp_path / "bare"  # without a tokenizer a request with a grammar is refused
    shutil.copytree(GOLDEN / "llama/gqa", bare, ignore=shutil.ignore_patterns("token*"))
    assert plan(LoadOptions(bare), Workload(), 0) == plan(LoadOptions(bare), Workload(grammars=False), 0)


def test_a_single_reply_counts_no_grammar_that_it_does_not_have():
    flags = ["--memory", "1G", "-p", "Hello"]
    for more, counted in (([], False), (["--regex", "[a-z]+"], True)):
        assert load_options(parser().parse_args([*flags, *more])).workload.grammars == counted
    assert load_options(parser().parse_args(flags[:2])).workload.grammars  # `/set` may give one


HOLES = """
import torch
from engine.load.budget import resident
from models.trim import return_large_blocks
return_large_blocks()
del [torch.ones(7 << 20)][0]
before, small = resident(), []
for size in range(3, 7):
    block = torch.ones(size << 20)
    small.append(torch.ones(1000))
    del block
print(resident() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="needs glibc")
def test_large_blocks_leave_no_holes():
    done = subprocess.run([sys.executable, "-c", HOLES], cwd=ROOT, capture_output=True, text=True, check=True)
    assert int(done.stdout) < 4 * MB


@needs_cpp
def test_the_suffix_store_is_counted_where_requests_draft_by_it(checkpoint):
    """The choice "auto" is a suffix store, except for a compiled model and several processes."""

    def stores(**options) -> set[str]:
        lines = plan(LoadOptions(checkpoint, **options), Workload()).lines
        return {line for line in lines if "suffix" in line}

    assert stores(drafts="suffix") == stores(drafts="auto") == stores(drafts="auto", shard=Shard(0, 1)) != set()
    assert not stores(drafts="off") | stores(drafts="ngrams") | stores(drafts="auto", compile="on")
    assert not stores(drafts="auto", shard=Shard(0, 2))


def test_a_command_line_imports_less_of_torch():
    """Modules that only torch's compiler needs are left out, and are there on request; so is NumPy."""
    code = "import torch, engine.load.startup as s, sys; print(s.METAS in sys.modules)\n"
    code += "torch.Generator(); import torch._prims.rng_prims; torch.Generator()\n"  # as searches that draw ahead do
    code += "import torch._meta_registrations as m; print(hasattr(m, '__file__'))"
    code += "; print('numpy' in sys.modules); import numpy; print(numpy.ones(1).sum())"
    run = f"from engine.load.startup import import_torch; import_torch(); {code}"
    for program, whole in ((run, "False"), (code, "True")):
        done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
        assert (done.stdout.split(), done.stderr) == ([whole, "True", whole, "1.0"], "")


# --- limits ---


@pytest.mark.parametrize(
    ("cgroup", "files", "limits"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "900", "memory.max": "700"}, [900, 700]),
        ("0::/../x\n", {"memory.max": "5000\n"}, [5000]),
        ("0::/host/path\n", {"memory.max": "77"}, [77]),
        ("4:cpu:/a\n3:memory:/a\n", {"memory/a/memory.limit_in_bytes": "123"}, [123]),
        ("3:cpu,memory:/\n", {"memory/memory.limit_in_bytes": "9223372036854771712"}, []),
        ("1:name=systemd:/\n", {"memory/memory.limit_in_bytes": "5"}, []),
        ("0::/\n", {"memory.max": "rubbish"}, []),
        ("nothing of the kind\n", {}, []),
    ],
)
def test_limits_of_control_groups(tmp_path, cgroup, files, limits):
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        file = tmp_path / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    assert [*cgroup_limits(tmp_path)] == limits


def test_without_control_groups(tmp_path):
    assert [*cgroup_limits(tmp_path)] == []


def test_auto_is_the_least_limit(checkpoint, monkeypatch):
    options = LoadOptions(checkpoint, memory="auto")
    monkeypatch.setattr("engine.load.budget.total_memory", lambda: 3200 * MB)
    monkeypatch.setattr("engine.load.budget.cgroup_limits", lambda: iter([640 * MB]))
    monkeypatch.setattr(resource, "getrlimit", lambda _: (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    assert memory_bytes(options, 2) == 620 * MB
    monkeypatch.setattr("engine.load.budget.cgroup_limits", lambda: iter(()))
    assert memory_bytes(options, 2) == 3100 * MB
    monkeypatch.setattr("engine.load.budget.total_memory", lambda: 1 << 50)
    monkeypatch.setattr(resource, "getrlimit", lambda _: (1 << 40, resource.RLIM_INFINITY))
    limited = memory_bytes(options, 1)
    assert limited < 1 << 40 and limited - memory_bytes(options, 2) > 60 * MB  # address space of a thread


# --- the command line ---


def test_the_table(checkpoint, capsys):
    assert main(["--plan", str(checkpoint), "--context", "1024", "--max-new-tokens", "24"]) == 0
    title, _, heads, *rows, _, notes = capsys.readouterr().out.splitlines()
    assert title.startswith("model: float32; a prompt of 1000 tokens, 24 new ones") and "tokens" in notes
    formats = [name for name in FORMATS_SHOWN if FORMATS[name].why_not(CPU) is None]
    assert heads.split() == ["weights", "cache", "beams", "tokens", "scratch", "runtime", "total"]
    assert [row.split()[0] for row in rows][:: len(rows) // len(formats)] == formats
    assert [row.split()[6:8] for row in rows[:3]] == [["1", "1023"], ["4", "1092"], ["15", "1345"]]


def test_the_table_with_a_limit(checkpoint, capsys):
    for limit, fits in (("4G", True), ("20M", False)):
        assert main(["--plan", str(checkpoint), "--context", "1024", "--memory", limit]) == 0
        _, _, heads, first, *_, note = capsys.readouterr().out.splitlines()
        room = int(first.split()[-1])
        assert heads.split()[-3] == "in" and note.startswith(f"{heads[heads.index('in ') :]}: the tokens")
        assert room > int(first.split()[7]) if fits else room == 0


def test_the_table_reads_no_weights(checkpoint, monkeypatch):
    monkeypatch.setattr(Checkpoint, "read", lambda *_: pytest.fail("weights are read"))
    assert main(["--plan", str(checkpoint)]) == 0


def test_refusals_on_the_command_line(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.stdin", None)
    assert main(["-p", "Hello", "--memory", "20M"]) == 2
    told = capsys.readouterr().err
    assert "error: memory: 20.0 MB is less than" in told and "target weights" in told and "reward tokenizer" in told
    assert main(["--plan", str(tmp_path)]) == 3
    with pytest.raises(SystemExit) as stop:
        main(["--memory", "lots"])
    assert stop.value.code == 2 and demo_folder().is_dir()


LONG = """
import sys
from pathlib import Path
from engine import Engine, LoadOptions
from engine.load.budget import peak, plan
from engine.load.sizes import Workload
from search import Greedy
folder, tokens = sys.argv[1], int(sys.argv[2])
work = Workload(Greedy(), tokens, 4, grammars=False)
for _ in range(2):  # the first plan leaves code in memory
    memory = plan(LoadOptions(folder), work).total(tokens + 8) + (2 << 20)
Path("/proc/self/clear_refs").write_text("5")
engine = Engine.load(folder, workload=work, memory=memory, threads=1)
engine.generate([[5 + i * i % 900 for i in range(tokens)]], Greedy(), max_new_tokens=4, ignore_eos=True)
print(memory, peak())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_long_texts_are_counted(tmp_path):
    """A small cache per token: what else grows with a text takes as much."""
    random_checkpoint.make(
        tmp_path / "model", layers=1, width=64, mlp=128, heads=2, vocab=2000, max_positions=1 << 16, dtype="float32"
    )
    command = [sys.executable, "-c", LONG, str(tmp_path / "model"), "60000"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=True)
    memory, peak = map(int, done.stdout.split())
    assert memory / 1.15 < peak <= memory, (memory / MB, peak / MB)
