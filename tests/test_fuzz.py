"""Every file that a user can be handed, mutated: each is answered or refused in the project's own words, and costs no
memory.

A case changes bytes, or values inside the structure of a file, whose checksums are made right again. It is read as the
command lines read it, inside `cli.run`, so that exit code 1 is what any exception of another kind ends in.

The seed is the day's, so that days try different files; a failure names what repeats it: COPPICE_FUZZ_SEED=N.
COPPICE_FUZZ_TIMES=N tries N times as many files. What has failed once is a test of its own, beside those of its reader.
"""

import copy
import io
import itertools
import json
import math
import os
import random
import re
import resource
import shutil
import struct
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch

from engine.app import batch, chat, cli, trace_page, transcript
from engine.contract.trace import Trace
from engine.conversation import Conversation
from engine.engine import Engine
from engine.load import fastest
from engine.rules import catalogue
from engine.text.template import ChatTemplate
from kernels import cpp
from models.formats import packed
from search import ADED, ULTS
from search.aded import ngrams
from search.greedy import Greedy
from search.trie import Trie
from search.ults import prior
from tests.invariants import check_pool
from tools import catalogue as catalogue_tool
from tools import convert, pack, tree
from tools.fleet import store
from tools.random_checkpoint import make

SEED = int(os.environ.get("COPPICE_FUZZ_SEED") or datetime.now(UTC).toordinal())
TIMES = int(os.environ.get("COPPICE_FUZZ_TIMES") or 1)
LISTED = 8  # faults of a reader that are shown
GOLDEN = Path(__file__).parent / "golden"
SHAPE: dict[str, Any] = {"layers": 1, "width": 16, "mlp": 16, "heads": 2, "vocab": 220, "max_positions": 64}
ROPES: list[dict[str, Any] | None] = [
    None,
    {"rope_type": "linear", "factor": 2.0},
    {"rope_type": "dynamic", "factor": 2.0},
    {
        "rope_type": "llama3",
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 32,
    },
    {"rope_type": "yarn", "factor": 2.0, "beta_fast": 32, "beta_slow": 1, "original_max_position_embeddings": 32},
]

# --- mutations ---

INTEGERS = [0, 1, 2, 3, 7, -1, -2, 64, 300, 2**24, 2**31, 2**32 - 1, 2**53, 2**63, 10**18, 10**30, -(10**18)]
FLOATS = [0.5, 1.0, -1.0, 1e-9, 1e18, 1e38, 1e308, math.inf, -math.inf, math.nan]
TEXTS = ["", "a", "float16", "int8", "llama", "\ud800", "\x00", "../x", "0", "é" * 9]
ATOMS = [*INTEGERS, *FLOATS, *TEXTS, None, True, False]


class Draw(random.Random):
    """Random values and changes."""

    def value(self, depth: int = 2) -> Any:
        """A value of JSON, most often an atom."""
        match self.randrange(8) if depth else 0:
            case 6:
                return [self.value(depth - 1) for _ in range(self.randrange(4))]
            case 7:
                return {self.choice([*TEXTS, "x"]): self.value(depth - 1) for _ in range(self.randrange(4))}
        return self.choice(ATOMS)

    def mutated(self, valid: Any) -> Any:
        """A value with up to three places replaced, changed a little, taken away, exchanged or added."""
        value = copy.deepcopy(valid)
        for _ in range(self.randint(1, 3)):
            place: tuple[Any, ...] = self.choice(list(places(value)) or [("new",)])
            *path, last = place
            inner: Any = value
            for key in path:
                inner = inner[key]
            if not isinstance(inner, dict | list) or (isinstance(inner, list) and last == "new"):
                return self.value()
            there = last in inner if isinstance(inner, dict) else last < len(inner)
            match self.randrange(7):
                case 0 if there:
                    del inner[last]
                case 1 if isinstance(inner, dict) and there:
                    inner[str(self.choice([*inner, "new", *TEXTS]))] = inner.pop(last)
                case 2 if there:
                    other = value
                    for key in self.choice([*places(value), ()]):
                        other = other[key]
                    inner[last] = copy.deepcopy(other)
                case 3 | 4 if there and type(inner[last]) in (int, float):
                    inner[last] += self.choice([1, -1, 7, -inner[last], -2 * inner[last]])
                case _:
                    inner[last] = self.value()
        return value

    def damaged(self, valid: bytes) -> bytes:
        """Bytes cut short, or with a piece cut out, overwritten, repeated or added."""
        start, length = self.randrange(len(valid) + 1), self.randrange(40)
        piece = self.choice([b"", self.randbytes(self.randrange(5)), valid[start : start + length] * 2])
        match self.randrange(5):
            case 0:
                return valid[:start]
            case 1:
                return valid + self.randbytes(self.randrange(1, 40))
            case 2 if valid:
                at = self.randrange(len(valid))
                return valid[:at] + bytes([valid[at] ^ 1 << self.randrange(8)]) + valid[at + 1 :]
        return valid[:start] + piece + valid[start + length :]

    def text(self, valid: Any) -> bytes:
        """A JSON file."""
        return dump(self.mutated(valid)) if self.randrange(4) else self.damaged(dump(valid))

    def number(self, size: int, old: int) -> int:
        """An unsigned integer of some bytes, in the place of another."""
        return (self.choice([*INTEGERS, old + 1, old - 1, 2 * old, self.getrandbits(8 * size)])) % (1 << 8 * size)

    def numbers(self, valid: bytes, start: int = 0, end: int | None = None) -> bytes:
        """Bytes with up to three integers changed, of 4 or 8 bytes, aligned to 4 from `start` on."""
        data, end = bytearray(valid), len(valid) if end is None else end
        for _ in range(self.randint(1, 3)):
            size = self.choice((4, 8))
            if end - start >= size:
                at = start + self.randrange((end - start - size) // 4 + 1) * 4
                old = int.from_bytes(data[at : at + size], sys.byteorder)
                data[at : at + size] = self.number(size, old).to_bytes(size, sys.byteorder)
        return bytes(data)

    def tensors(self, valid: bytes, *, header: bool = True) -> bytes:
        """A safetensors file with other metadata, another header or other data."""
        listed, data = safetensors(valid)
        match self.randrange(4 if header else 3):
            case 0 | 1 if meta := listed.get("__metadata__"):
                key = self.choice(sorted(meta))
                meta[key] = self.nested(meta[key])
            case 3:
                text = self.text(listed)
                length = self.choice([len(text)] * 6 + [0, 2**31, 2**63, 2**64 - 1, len(text) + 1])
                return length.to_bytes(8, "little") + text + data
            case _:
                data = self.elements(listed, data)
        return joined(listed, data)

    def elements(self, listed: dict[str, Any], data: bytes) -> bytes:
        """The data of a safetensors file with some elements of a tensor changed."""
        names = sorted(name for name in listed if name != "__metadata__")
        entry, changed = listed[self.choice(names)], bytearray(data)
        codes = {"F64": "d", "F32": "f", "F16": "e", "I64": "q", "I32": "i"}
        code, (first, last) = codes.get(entry["dtype"], "B"), entry["data_offsets"]
        size = struct.calcsize(code)
        for _ in range(self.choice((1, 3, 100))):
            if last - first < size:
                break
            at = first + self.randrange((last - first) // size) * size
            if code == "f":
                value: Any = self.choice([*FLOATS[:-4], math.inf, -math.inf, math.nan])
            elif code in "ed":
                value = self.choice([0.0, -1.0, 6e4, math.inf, math.nan])
            else:
                bits = 8 * size
                value = self.number(size, 0)
                value = value - (1 << bits) if code in "qi" and value >> bits - 1 else value
            changed[at : at + size] = struct.pack(f"<{code}", value)
        return bytes(changed)

    def nested(self, text: str) -> str:
        """A string of metadata, which may have JSON in it."""
        try:
            value = json.loads(text)
        except ValueError:
            value = text
        if not isinstance(value, dict | list) or not self.randrange(4):
            deep = "[" * 5000
            return str(self.choice([*TEXTS, self.damaged(text.encode()).decode(errors="ignore"), deep]))
        return json.dumps(self.mutated(value))


def places(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """Paths to everything in a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def dump(value: Any) -> bytes:
    return value if isinstance(value, bytes) else json.dumps(value).encode()


def safetensors(raw: bytes) -> tuple[dict[str, Any], bytes]:
    """Header and data of a file."""
    size = int.from_bytes(raw[:8], "little")
    return json.loads(raw[8 : 8 + size]), raw[8 + size :]


def joined(listed: dict[str, Any], data: bytes) -> bytes:
    """A file of header and data."""
    text = json.dumps(listed).encode()
    return len(text).to_bytes(8, "little") + text + data


# --- checksums ---


def sealed_prefix(raw: bytes) -> bytes:
    """A prefix file whose checksum is right; the file itself if it has none."""
    try:
        listed, data = safetensors(raw)
        checksum = zlib.crc32(listed["__metadata__"].get("tokens", "").encode())
        for name in sorted(listed.keys() - {"__metadata__"}):
            first, last = listed[name]["data_offsets"]
            checksum = zlib.crc32(data[first:last], checksum)
        listed["__metadata__"]["checksum"] = f"{checksum:08x}"
        return joined(listed, data)
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return raw


def sealed(header: struct.Struct, raw: bytes) -> bytes:
    """A file that ends its header with two checksums: of all that follows it, and of the header before the second."""
    if len(raw) < header.size:
        return raw
    body = raw[: header.size - 8] + struct.pack("=I", zlib.crc32(raw[header.size :]))
    return body + struct.pack("=I", zlib.crc32(body)) + raw[header.size :]


# --- reading, as the command lines do it ---


@contextmanager
def little_memory(room: int = 1 << 30) -> Iterator[None]:
    """Let no more than this be allocated: what asks for more fails, and an error of another kind shows it."""
    if not sys.platform.startswith("linux"):
        yield
        return
    status, limits = Path("/proc/self/status").read_text(), resource.getrlimit(resource.RLIMIT_AS)
    found = re.search(r"VmSize:\s+(\d+)", status)
    assert found
    resource.setrlimit(resource.RLIMIT_AS, ((int(found[1]) << 10) + room, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)


def ended(read: Callable[[], Any]) -> tuple[int, str]:
    """Exit code and stderr of a command line that reads a file; -v, so that a bug of ours has its traceback."""
    with little_memory(), redirect_stderr(io.StringIO()) as err, redirect_stdout(io.StringIO()):
        code = cli.run(lambda: read() or 0, verbose=True)
    return code, err.getvalue()


def loading(folder: Path, *flags: str) -> Callable[[], None]:
    """Loads a folder as the command lines do, encodes and renders a text, and answers a prompt."""
    argv = ["--model", folder, "--threads", 1, "--kv-memory", "512K", *flags]
    args = chat.parser().parse_args([*map(str, argv)])

    def read() -> None:
        engine = cli.load_engine(args)
        if engine.model.tokenizer is not None:
            ids = engine.tokenizer.encode("Hé  <s> 1\n")
            engine.tokenizer.decode(ids)
        if engine.template is not None:
            engine.template.render([{"role": "user", "content": "hi </s>"}])
        if engine.shape.scores:
            engine.scores([[1, 5, 6]])
        else:
            engine.generate([[1, 5, 6]], Greedy(), max_new_tokens=2)
        check_pool(engine.pool, [])

    return read


@dataclass
class Case:
    """A file to mutate.

    Args:
        path: the file, which is valid.
        change: returns a mutant of its bytes.
        read: reads it, as a command line does.
        blamed: words of which an error has one; by default the name of the file.
        codes: exit codes that it may end with; `at_first`: that of the valid file.
    """

    path: Path
    change: Callable[[Draw, bytes], bytes]
    read: Callable[[], Any]
    blamed: Sequence[str] = ()
    codes: Sequence[int] = (0, 2, 3)
    at_first: int = 0
    valid: bytes = field(init=False)

    def __post_init__(self) -> None:
        self.valid = self.path.read_bytes()


Make = Callable[[Path, Engine], list[Case]]
READERS: dict[str, tuple[int, Make]] = {}


def reader(files: int) -> Callable[[Make], Make]:
    """Registers the cases of a reader, and how many files it is given."""

    def register(make: Make) -> Make:
        READERS[make.__name__] = files, make
        return make

    return register


def checkpoint(path: Path, change: Callable[[Draw, bytes], bytes], *flags: str) -> Case:
    """A file of a checkpoint: errors may name its folder alone; its numbers may be no numbers, or too few positions."""
    blamed = path.name, str(path.parent), "this model's maximum context length is"
    return Case(path, change, loading(path.parent, *flags), blamed, (0, 2, 3, 5))


def as_json(draw: Draw, valid: bytes) -> bytes:
    return draw.text(json.loads(valid))


def golden(folder: Path, pattern: str) -> list[Path]:
    """Copies of golden checkpoints."""
    found = []
    for path in sorted(GOLDEN.glob(f"{pattern}/config.json")):
        if (path.parent / "model.safetensors").is_file():
            copied = folder / f"{path.parent.parent.name}-{path.parent.name}"
            found.append(Path(shutil.copytree(path.parent, copied)))
    return found


# --- checkpoints ---


@reader(250)
def configs(folder: Path, _: Engine) -> list[Case]:
    """config.json of Llamas of every rotary kind, and of golden models of every family."""
    for i, (rope, style) in enumerate(itertools.product(ROPES, ("v4", "v5"))):
        make(folder / f"llama{i}", rope=rope, config_style=style, **SHAPE)
    llamas = [*folder.iterdir()]
    families = [path for family in sorted(GOLDEN.iterdir()) if family.is_dir() and family.name not in ("llama", "text")
                for path in golden(folder, f"{family.name}/*")[:3]]  # fmt: skip
    return [checkpoint(path / "config.json", as_json) for path in [*llamas, *families]]


@reader(60)
def generation_configs(folder: Path, _: Engine) -> list[Case]:
    make(folder / "model", **SHAPE)
    valid = {"bos_token_id": 1, "eos_token_id": [2, 5], "pad_token_id": 0, "do_sample": True}
    path = folder / "model/generation_config.json"
    path.write_text(json.dumps(valid))
    return [checkpoint(path, as_json)]


@reader(150)
def indexes(folder: Path, _: Engine) -> list[Case]:
    make(folder / "model", shards=2, **SHAPE)
    return [checkpoint(folder / "model/model.safetensors.index.json", as_json)]


@reader(120)
def headers(folder: Path, _: Engine) -> list[Case]:
    make(folder / "model", shards=2, **SHAPE)
    path = folder / "model/model-00001-of-00002.safetensors"
    return [checkpoint(path, Draw.tensors)]


@reader(60)
def adapters(folder: Path, _: Engine) -> list[Case]:
    """An adapter in the place of a model, and one beside it."""
    valid = {"peft_type": "LORA", "base_model_name_or_path": "org/base", "r": 8, "target_modules": ["q_proj"]}
    made = []
    for name in ("alone", "beside"):
        (folder / name).mkdir()
        if name == "beside":
            make(folder / name, **SHAPE)
        path = folder / name / "adapter_config.json"
        path.write_text(json.dumps(valid))
        made.append(checkpoint(path, as_json))
    made[0].at_first = 3
    return made


FORMATS = (
    "awq",
    "fp8_block",
    "gptq_desc_act",
    "gptq_v1",
    "pack4_zeros",
    "int8_token",
    "mixed",
    "hqq",
    "quark",
    "torchao",
)


@reader(150)
def quantised(folder: Path, _: Engine) -> list[Case]:
    """quantization_config, and the tensors of quantised weights, of every method."""
    made = []
    for path in golden(folder, "quantized/*"):
        if path.name.endswith(FORMATS):
            made.append(checkpoint(path / "config.json", quantisation))
            made.append(checkpoint(path / "model.safetensors", Draw.tensors))
        if path.name == "torchao":
            made.append(checkpoint(path / "model.safetensors", described("model.layers.0.self_attn.q_proj.weight")))
    return made


def quantisation(draw: Draw, valid: bytes) -> bytes:
    config = json.loads(valid)
    return dump(config | {"quantization_config": draw.mutated(config["quantization_config"])})


@reader(200)
def packed_folders(folder: Path, _: Engine) -> list[Case]:
    if why := cpp.why_not():
        pytest.skip(f"no C++ kernels: {why}")
    make(folder / "model", **SHAPE | dict[str, Any](mlp=64, width=64))
    for quant in ("none", "int8", "int4", "int4-zeros-64"):
        pack.pack(folder / "model", folder / quant, quant=quant)
    paths = [folder / quant / "model.safetensors" for quant in ("none", "int8", "int4", "int4-zeros-64")]
    return [checkpoint(path, described(packed.KEY)) for path in paths]


def described(key: str) -> Callable[[Draw, bytes], bytes]:
    """Changes of what a header's metadata have under a key, most of the time."""

    def change(draw: Draw, valid: bytes) -> bytes:
        if draw.randrange(3) == 0:
            return draw.tensors(valid)
        listed, data = safetensors(valid)
        listed["__metadata__"][key] = draw.nested(listed["__metadata__"][key])
        return joined(listed, data)

    return change


# --- tokenizers and templates ---


@reader(120)
def tokenizers(folder: Path, _: Engine) -> list[Case]:
    """Every file of every kind of tokenizer, in the folder of a model."""
    made = []
    for kind in sorted(path for path in (GOLDEN / "text").iterdir() if path.is_dir() and path.name != "templates"):
        home = folder / kind.name
        make(home, **SHAPE | dict[str, Any](vocab=600))
        (home / "tokenizer.json").unlink()
        for path in kind.iterdir():
            shutil.copy(path, home)
        for path in sorted(kind.iterdir()):
            change = as_json if path.suffix == ".json" else Draw.damaged
            made.append(checkpoint(home / path.name, change))
    return made


@reader(40)
def templates(folder: Path, engine: Engine) -> list[Case]:
    path = folder / "template.jinja"
    path.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m['content'] | trim }}{% if loop.last %}.{% endif %}{% endfor %}"
    )
    messages = [{"role": "user", "content": "hi"}]
    return [Case(path, Draw.damaged, lambda: ChatTemplate.from_file(path, engine.tokenizer).render(messages) and None)]


# --- files with checksums ---


@reader(300)
def prefixes(folder: Path, engine: Engine) -> list[Case]:
    make(folder / "model", **SHAPE)
    eight = Engine.load(folder / "model", threads=1, kv_memory=1 << 18, prefix_cache="on", kv_dtype="int8")
    made = []
    for i, one in enumerate((engine, eight)):
        path = folder / f"{i}.prefix"
        one.save_prefix(path, [1, 5, 6, 7])

        def read(one: Engine = one, path: Path = path) -> None:
            one.pool.prefixes.clear()  # type: ignore[union-attr]
            tokens = one.load_prefix(path)
            one.generate([[*tokens, 3]], Greedy(), max_new_tokens=2)
            check_pool(one.pool, [])

        made.append(Case(path, lambda draw, valid: sealed_prefix(draw.tensors(valid)), read))
    return made


@reader(300)
def catalogues(folder: Path, engine: Engine) -> list[Case]:
    lines = [{"id": f"item {i}", "token_ids": [3 + i % 7, 3 + i % 5, 3 + i % 3, *[9] * (i % 2)]} for i in range(40)]
    (folder / "items").write_text("\n".join(map(json.dumps, lines)))
    path = folder / "catalogue"
    argv = ["--model", str(folder.parent / "base"), "--input", str(folder / "items"), "--output", str(path), "-q"]
    assert catalogue_tool.main(argv) == 0

    def change(draw: Draw, valid: bytes) -> bytes:
        raw = draw.damaged(valid) if not draw.randrange(4) else draw.numbers(valid, 12)
        return sealed(catalogue.CATALOGUE_FILE.header, raw)

    def read() -> None:
        catalogue.open_catalogue(path).check(engine.model.tokenizer, engine.runner.vocab_size)
        engine.generate([[5, 6]], Trie(beams=4), max_new_tokens=6, catalogue=path)

    return [Case(path, change, read)]


@reader(200)
def ngram_stores(folder: Path, engine: Engine) -> list[Case]:
    text, path = [5, 6, 7, 8] * 9 + [5, 6, 9, 4, 5, 7], folder / "store"
    ngrams.write_store(path, ngrams.merge([ngrams.count(text)]), engine.tokenizer.size, engine.tokenizer.fingerprint)

    def change(draw: Draw, valid: bytes) -> bytes:
        raw = draw.damaged(valid) if not draw.randrange(4) else draw.numbers(valid, 12)
        return sealed(ngrams.NGRAM_FILE.header, raw)

    def read() -> None:
        engine.generate([[5, 6, 7, 8, 5, 6]], ADED(store=str(path)), max_new_tokens=6)
        check_pool(engine.pool, [])

    return [Case(path, change, read)]


# --- other files of safetensors and JSON ---


@reader(150)
def priors(folder: Path, engine: Engine) -> list[Case]:
    path = folder / "prior.safetensors"
    logp = torch.rand(6, 4).log_softmax(1).sort(1, descending=True).values
    prior.Vectors(logp, torch.arange(24).view(6, 4)).save(path)
    search = ULTS(prior=str(path), children=3)

    def read() -> None:
        engine.generate([[5, 6]], search, max_new_tokens=3)
        check_pool(engine.pool, [])

    return [Case(path, Draw.tensors, read)]


@reader(200)
def transcripts(folder: Path, engine: Engine) -> list[Case]:
    path, conversation = folder / "chat.json", Conversation(engine)
    [*conversation.stream("hi", Greedy(), max_new_tokens=3), *conversation.stream("so", Greedy(), max_new_tokens=3)]
    transcript.save(path, conversation, {"search": "greedy"})
    conversation.session.close()

    def read() -> None:
        saved, again = transcript.load(path), Conversation(engine)
        again.restore(saved.turns, saved.system)
        try:
            [*again.stream("on", Greedy(), max_new_tokens=2)]
        finally:
            again.session.close()
        check_pool(engine.pool, [])

    return [Case(path, as_json, read)]


@reader(120)
def traces(folder: Path, engine: Engine) -> list[Case]:
    path, trace = folder / "trace.json", Trace("a")
    engine.generate([[5, 6]], Trie(beams=3), max_new_tokens=4, trace=trace)
    assert trace.record
    trace_page.write(path, [trace.record])
    output = str(folder / "page.html")
    argv = [str(path), "-o", output, "-q"]
    return [Case(path, as_json, lambda: tree.main(argv))]


@reader(120)
def resumed_outputs(folder: Path, engine: Engine) -> list[Case]:
    lines = b'{"id": "a", "prompt": "b"}\n{"id": 7, "prompt": "c"}\n'
    path, argv = folder / "out.jsonl", ["--max-new-tokens", "2", "-q", "--output"]
    assert batch.main([*argv, str(path)], io.BytesIO(lines), io.BytesIO()) == 0

    def change(draw: Draw, valid: bytes) -> bytes:
        if not draw.randrange(3):
            return draw.damaged(valid)
        return b"".join(dump(draw.mutated(json.loads(line))) + b"\n" for line in valid.splitlines())

    return [Case(path, change, lambda: batch.main([*argv, str(path), "--resume"], io.BytesIO(lines), io.BytesIO()))]


@reader(120)
def runs_of_a_fleet(folder: Path, _: Engine) -> list[Case]:
    lines = [store.Line(i, i + 1, b'{"prompt": "a"}') for i in range(3)]

    def opened() -> store.Store:
        return store.Store(folder / "run", lines, ["--search", "greedy"])

    one = opened()
    for i in range(3):
        one.add(i, b'{"id": 0, "outputs": [{"text": "a"}]}')
    one.close()

    def read() -> None:
        again = opened()
        try:
            for i in range(3):
                if i not in again:
                    again.add(i, b'{"id": 0, "outputs": []}')
            again.merge()
        finally:
            again.close()

    rows = lambda draw, valid: b"\n".join(as_json(draw, row) for row in valid.splitlines()) + b"\n"  # noqa: E731
    return [Case(folder / "run" / store.RUN, as_json, read), Case(folder / "run" / store.COMING, rows, read)]


@reader(60)
def measurements(folder: Path, _: Engine) -> list[Case]:
    """The measurements that are kept of this machine, in the cache."""
    question, ways = "fuzz", {"one": lambda: [1.0] * 3, "two": lambda: [2.0] * 3}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        fastest.choose(question, ways)
    paths = [*folder.rglob("fastest-*.json")]

    def read() -> None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(folder))
            patch.setattr(fastest, "_answers", {})
            assert fastest.choose(question, ways).name in ways

    return [Case(path, as_json, read) for path in paths]


@reader(40)
def tools_of_a_template(folder: Path, _: Engine) -> list[Case]:
    path = folder / "tools.json"
    path.write_text('[{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]')
    args = chat.parser().parse_args(["--tools", str(path)])
    return [Case(path, as_json, lambda: cli.template_options(args) and None)]


# --- input of converters ---


@reader(100)
def items(folder: Path, _: Engine) -> list[Case]:
    """Lines of `tools.catalogue`."""
    path = folder / "items.jsonl"
    path.write_text('{"id": "a", "text": "ab"}\n{"id": 3, "token_ids": [5, 6]}\n')
    argv = ["--model", str(folder.parent / "base"), "--input", str(path), "--output", str(folder / "made"), "-q"]
    lines = lambda draw, valid: b"\n".join(as_json(draw, row) for row in valid.splitlines())  # noqa: E731
    return [Case(path, lines, lambda: catalogue_tool.main(argv))]


@reader(100)
def pickles(folder: Path, _: Engine) -> list[Case]:
    make(folder / "model", **SHAPE)
    source, output = folder / "pickles", folder / "made"
    source.mkdir()
    shutil.copy(folder / "model/config.json", source)
    listed = safetensors((folder / "model/model.safetensors").read_bytes())[0]
    names = sorted(listed.keys() - {"__metadata__"})
    shards = {f"pytorch_model-{i}.bin": names[i::2] for i in range(2)}
    for file, part in shards.items():
        torch.save({name: torch.zeros(listed[name]["shape"]) for name in part}, source / file)
    index = source / convert.PICKLE_INDEX
    index.write_text(json.dumps({"metadata": {}, "weight_map": {n: f for f, part in shards.items() for n in part}}))

    def read() -> int:
        shutil.rmtree(output, ignore_errors=True)
        return convert.main([str(source), str(output), "-q"])

    return [Case(index, as_json, read), *(Case(source / file, Draw.damaged, read) for file in shards)]


def read_gguf(path: Path) -> None:
    engine = Engine.load(path, threads=1, kv_memory=1 << 18)
    if engine.model.tokenizer:
        engine.tokenizer.encode("ab <b> cd")
    engine.generate([[3, 5]], Greedy(), max_new_tokens=2)


@reader(150)
def gguf_files(folder: Path, _: Engine) -> list[Case]:
    from tests.models.gguf.files import WIDE, File, gguf, random, sentencepiece_file

    output, made, codes = folder / "made", list[Case](), (0, 2, 3, 5)  # weights may become numbers that overflow
    variants = ("llama/plain", "gemma/one", "phi3/longrope", "qwen2/tied", "lfm2/plain", "sentencepiece")
    for variant in variants:

        def written(variant: str = variant) -> File:
            return sentencepiece_file() if variant == "sentencepiece" else File(GOLDEN / variant)

        path = written().write(folder / f"{variant.replace('/', '-')}.gguf")

        def change(draw: Draw, valid: bytes, written: Callable[[], File] = written) -> bytes:
            if draw.randrange(2):
                return (
                    draw.numbers(valid, draw.randrange(8, 3000), min(len(valid), 6000))
                    if draw.randrange(3)
                    else draw.damaged(valid)
                )
            file = written()
            for _ in range(draw.randint(1, 2)):
                key = draw.choice(sorted(file.keys))
                old = file.keys[key]
                choices = {
                    bool: [True, False],
                    int: [n for n in INTEGERS if 0 <= n < 2**32],
                    str: ["", "a", "llama", "gpt2"],
                }
                found = draw.choice(choices.get(type(old), FLOATS[:6] if type(old) is float else [old]))
                if isinstance(old, list) and old:
                    found = draw.choice(
                        [
                            old[:1],
                            old * 2,
                            old[1:],
                            [old[0]] * len(old),
                            [*old[:-1], 7 if type(old[0]) is int else old[0]],
                        ]
                    )
                file.keys[key] = found
            return file.write(folder / "changed").read_bytes()

        blamed = path.name, "cannot spell", "context"
        made.append(Case(path, change, lambda path=path: read_gguf(path), blamed, codes))

    def converted(path: Path = made[0].path) -> int:
        shutil.rmtree(output, ignore_errors=True)
        return convert.main([str(path), str(output), "-q"])

    made.append(Case(made[0].path, made[0].change, converted))
    for format in ("Q4_1", "Q6_K"):  # bytes of blocks are numbers too
        source = random(folder / f"source-{format}", "llama/gqa", **WIDE)
        path = File(source, gguf.GGMLQuantizationType[format]).write(folder / f"blocks-{format}.gguf")
        made.append(Case(path, Draw.damaged, lambda path=path: read_gguf(path), codes=codes))
    return made


# --- batch lines ---

LINES: list[dict[str, Any]] = [
    {"id": "x", "prompt": "ab", "params": {"search": "trie", "beams": 3, "length_penalty": 0.5, "stop": ["zz"]}},
    {"prompt_ids": [1, 5, 9], "params": {"search": "sample", "temperature": 0.7, "top_k": 5, "top_p": 0.9, "seed": 3}},
    {"messages": [{"role": "user", "content": "hi"}], "params": {"max_new_tokens": 3, "eos_token_ids": [2, 3]}},
    {"id": 7, "prompt": "b", "params": {"search": "trie", "early_stopping": "never", "num_return_sequences": 2}},
    {"prompt": "", "params": {"search": "sample", "num_return_sequences": 2, "ignore_eos": True}},
]


def test_batch_lines(engine: Engine):
    for i in range(200 * TIMES):
        draw = Draw(f"{SEED} batch {i}")
        lines = [draw.text(draw.choice(LINES)).replace(b"\n", b" ") for _ in range(draw.randint(1, 4))]
        good, out = b'{"id": "good", "prompt": "ab"}', io.BytesIO()
        with little_memory(), redirect_stderr(io.StringIO()):
            code = batch.main(["--max-new-tokens", "2", "-q"], io.BytesIO(b"\n".join([*lines, good])), out)
        check_pool(engine.pool, [])
        records, repeat = [json.loads(line) for line in out.getvalue().splitlines()], (SEED, i, lines)
        assert len(records) == 1 + sum(bool(line.strip()) for line in lines), repeat
        assert code == (2 if any("error" in record for record in records) else 0), repeat
        for record in records:
            assert set(record) in ({"id", "error"}, {"id", "outputs", "stats"}), repeat
            assert "error" not in record or record["error"]["code"] in ("usage", "memory", "checkpoint"), (
                record,
                repeat,
            )
        assert records[-1]["id"] == "good" and "outputs" in records[-1], repeat


# --- all of them ---


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("fuzz")
    make(folder / "base", **SHAPE)
    (folder / "base/chat_template.jinja").write_text("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def engine(base: Path) -> Iterator[Engine]:
    engine = Engine.load(base / "base", threads=1, kv_memory=1 << 18, prefix_cache="on")
    assert engine.template
    engine.template.render([{"role": "user", "content": "a"}])  # its process starts before memory is short
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch, "load_engine", lambda args, shard=None: engine)
        yield engine


@pytest.mark.parametrize("name", READERS)
def test_files(name: str, base: Path, engine: Engine):
    files, make = READERS[name]
    (base / name).mkdir()
    cases = make(base / name, engine)
    for case in cases:
        code, err = ended(case.read)
        assert code == case.at_first, f"the valid file {case.path}: {err}"
    faults: dict[str, str] = {}
    for i in range(files * TIMES):
        draw = Draw(f"{SEED} {name} {i}")
        case = draw.choice(cases)
        case.path.write_bytes(mutant := case.change(draw, case.valid))
        try:
            code, err = ended(case.read)
        finally:
            case.path.write_bytes(case.valid)
        message = re.split(r"^error: ", err, flags=re.MULTILINE)[-1]  # what follows a traceback
        blamed = any(word in message for word in case.blamed or (case.path.name,))
        if code not in case.codes or (code in (2, 3) and not blamed):
            head = f"COPPICE_FUZZ_SEED={SEED}, file {i}, {case.path}: exit {code}, {len(mutant)} bytes"
            told = [line for line in err.splitlines() if line.strip(" ~^")]
            faults.setdefault(re.sub(r"\d+|'.*'", "", "".join(told[-3:])), "\n".join([head, *told[-10:]]))
    assert not faults, f"{len(faults)} faults:\n\n" + "\n\n".join([*faults.values()][:LISTED])
