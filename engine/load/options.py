"""The loading options, each defined once, as a field of `LoadOptions`.

Each field defines an argument of `Engine.load`, a flag with its help in every command that loads a model
(`engine.app.cli.loading`), and what a memory plan counts (`engine.load.budget`).
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated, Any

from engine.drafts import Drafter
from engine.drafts.choice import NAMES, check_drafter
from engine.errors import UsageError, check_integer
from engine.load.flags import Flag, NoFlag, options_of
from engine.load.sizes import Workload, read_size
from models.formats import FORMATS
from models.shard import Shard

DTYPES = ("float32", "bfloat16", "float16", "float64")  # names of torch dtypes
KV_DTYPES = ("auto", "int8", "fp8")
ACTIVATIONS = ("auto", "int8")
FORMATS_SHOWN = "none", "int8", "int4"  # formats in tables and flags: other groups of int4 differ by a few per cent
ONE_AT_A_TIME = "it runs one search at a time"
NO_ADAPTER = "none"  # the name by which a request asks for the base model
READ_ONCE = "it reads each prompt once"
RewardFunction = Callable[[Any, list[str]], Iterable[float]]
"""(prompt, texts) -> a score for each text. The prompt is the request's messages if it has any, else its text."""


def read_integer(text: str) -> int:
    """An integer. Raises ValueError."""
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"expected an integer, got {text!r}") from None


def read_budget(text: str) -> int | str:
    """A budget of memory: auto, or bytes. Raises ValueError."""
    return text if text == "auto" else read_size(text)


def _scaled(text: Any) -> tuple[Any, float]:
    """The folder and the factor of DIR[=SCALE]."""
    if isinstance(text, str) and not Path(text).exists():
        folder, equals, scale = text.rpartition("=")
        with suppress(ValueError):
            if equals and folder:
                return folder, float(scale)
    return text, 1.0


def bytes_of(name: str, size: Any) -> int:
    """A size of memory, given as bytes or as text. Raises UsageError, in which `name` is the option."""
    if type(size) is int and 0 < size < 1 << 63:
        return size
    with suppress(ValueError):
        if isinstance(size, str):
            return read_size(size)
    auto = "auto, " if name == "memory" else ""
    raise UsageError(f"{name}: expected {auto}bytes, or a size such as '512M' or '1.5G', got {size!r}")


MACHINE = functools.partial(Flag, group="machine", changes_answers=False)
SWITCH = functools.partial(MACHINE, choices=("on", "off"))


@dataclass(frozen=True)
class LoadOptions:
    """The loading options: arguments of `Engine.load`, and flags of the command lines.

    Args:
        folder: folder with config.json, safetensors, tokenizer, a GGUF file, or a name on the hub: org/name[:Q4_K_M]. A
            name may have a revision and a file, `org/name@revision:FILE.gguf`; an existing path takes precedence.
        draft: a smaller model with the same tokenizer, for searches and `drafts` that use a draft model. Given like
            `folder`; for `drafts` it may also be an EAGLE-3 head of the model.
        reward: a model with a scalar head, for searches that rank. Given like `folder`; from Python also a function,
            see `Request`.
        chat_template: a Jinja file; none: plain completion.
        adapters: a folder of peft with a LoRA adapter of the model; repeatable. An adapter is named after its folder;
            requests choose one with `adapter`, and use the first one by default. A factor may follow, as in DIR=0.5;
            from Python also a mapping from names to folders, or to pairs of folder and factor. See docs/adapters.md.
        dtype: type of weights and cache. "auto" is the checkpoint's own, but float32 on a processor without dot
            products for that dtype, or if float32 is measured to be faster; `Engine.capabilities` reports the choice.
        quant: weights in 8 or 4 bits. On a CPU with int8 arithmetic, or on a GPU; "auto" chooses int8 on a CPU if it is
            measured to be faster.
        activations: rows of activations that are multiplied by quantised weights. "auto" rounds them only with `quant`
            int8 or int4, not with quantised checkpoints and GGUF files; "int8" rounds them there too, to 8 bits scaled
            by the largest magnitude of each 32, on a CPU: faster but less exact.
        kv_dtype: keys and values in 8 bits; fp8 on a GPU. With a scale per token and head they take about half the
            memory of bfloat16.
        device: where models run.
        context: longest sequence of the model, prompt and output together. None uses the checkpoint's; more than that
            needs rotary positions, and answers may get worse there.
        threads: limit of CPU threads.
        kv_memory: size of all KV caches, as 512M. From Python also a number of bytes.
        memory: limit of the process, as 900M; auto: its own. The KV caches get what weights and everything else leave;
            "auto" is the lowest limit that applies to the process. On a CPU; from Python also a number of bytes.
        workload: what `memory` must hold at least; None: one token for each of `parallel` searches.
        parallel: searches that run at once.
        prefix_cache: keep read prompts in pages that nothing else needs. A shared prefix of several prompts is
            evaluated once; without `kv_memory` or `memory` up to 1 GiB is kept on a CPU.
        cache: keep results of loading, such as packed matrices, in the user's cache folder, so that later starts need
            less time. "off" neither writes nor reads the cache; see docs/starts.md.
        compile: compile the operators between matrix products with torch.compile, on a GPU only. Loading takes some
            seconds longer.
        graphs: run small passes as CUDA graphs on a GPU.
        drafts: guessed tokens that the passes of every search also evaluate, so that fewer are needed. From "ngrams"
            of a request's prompt and output; from what followed earlier occurrences of its last tokens, in its own text
            and in those of ended requests ("suffix"); from a smaller "model" or a head of the model (`draft`); or from
            the head in the model's own checkpoint, "mtp". "auto": suffix, if that changes no bit. From Python also an
            `engine.drafts.Drafter`. On a CPU; see docs/drafts.md.
        shard: the rank of this process among several that share the models, including companions, see
            `engine.load.distributed.together`. All load the same and get the same requests; memory limits apply to
            each.

    Raises:
        UsageError: a value of another type, or out of range.
    """

    folder: Annotated[str | Path, Flag("model", metavar="DIR", shown="the demo")]
    _: KW_ONLY
    draft: Annotated[str | Path | None, Flag(metavar="DIR", shown="the demo's")] = None
    reward: Annotated[str | Path | RewardFunction | None, Flag(metavar="DIR", shown="the demo's")] = None
    chat_template: Annotated[str | Path | None, Flag(metavar="FILE|none", shown="the checkpoint's")] = None
    adapters: Annotated[
        Sequence[str | Path] | Mapping[str, Any],
        Flag("adapter", metavar="DIR[=SCALE]", many=True, shown="none"),
    ] = ()
    dtype: Annotated[
        str,
        Flag(
            choices=("auto", "float32", "bfloat16", "float16"),
            also=DTYPES,
            shown="auto: the checkpoint's, or float32",
        ),
    ] = "auto"
    quant: Annotated[str, Flag(choices=(*FORMATS_SHOWN, "auto"), also=FORMATS)] = "none"
    activations: Annotated[str, Flag(choices=ACTIVATIONS, shown="auto: int8 beside --quant int8 and int4")] = "auto"
    kv_dtype: Annotated[str, Flag(choices=KV_DTYPES, shown="auto: as --dtype")] = "auto"
    device: Annotated[str, MACHINE(choices=("auto", "cpu", "cuda"), shown="auto: the GPU if there is one")] = "auto"
    context: Annotated[int | None, Flag(metavar="N", read=read_integer, shown="the checkpoint's")] = None
    threads: Annotated[int | None, MACHINE(metavar="N", read=read_integer, shown="torch's choice")] = None
    kv_memory: Annotated[int | str | None, MACHINE(metavar="SIZE", read=read_size, shown="half of what is free")] = None
    memory: Annotated[int | str | None, MACHINE(metavar="SIZE|auto", read=read_budget, shown="none")] = None
    workload: Annotated[Workload | None, NoFlag("the flags of the search and its limits say it")] = None
    parallel: Annotated[
        int,
        MACHINE(
            metavar="N",
            read=read_integer,
            without=dict.fromkeys(("chat", "tree", "profile"), ONE_AT_A_TIME),
        ),
    ] = 16
    prefix_cache: Annotated[
        str,
        SWITCH(
            default="on",
            without=dict.fromkeys(("tree", "ults_prior"), READ_ONCE)
            | {"profile": "it measures how a prompt is read", "fleet": "workers share the memory of their machine"},
        ),
    ] = "off"
    cache: Annotated[
        str,
        SWITCH("no_cache", constant="off", help="keep nothing that is derived from model files for later starts"),
    ] = "on"
    compile: Annotated[str, SWITCH()] = "off"
    graphs: Annotated[str, SWITCH()] = "on"
    drafts: Annotated[
        str | Drafter,
        Flag(
            choices=NAMES,
            changes_answers=False,
            without=dict.fromkeys(("tree", "profile", "ults_prior"), "it measures or shows passes without them"),
        ),
    ] = "off"
    shard: Annotated[Shard | None, NoFlag("torchrun starts the processes and numbers them")] = None

    def __post_init__(self) -> None:
        for option in options_of(type(self)):
            name, value = option.name, getattr(self, option.name)
            if isinstance(option.flag, Flag) and (words := option.flag.choices):
                words = [*dict.fromkeys([*option.flag.also, *words])]
                if name != "drafts" and (not isinstance(value, str) or value not in words):
                    raise UsageError(f"{name}: expected {', '.join(words[:-1])} or {words[-1]}, got {value!r}")
        for name in ("folder", "draft", "reward", "chat_template"):
            value = getattr(self, name)
            if isinstance(value, str | Path) or (value is None and name != "folder"):
                continue
            if name != "reward" or not callable(value):
                kind = "a path or a function of (prompt, texts)" if name == "reward" else "a path"
                raise UsageError(f"{name}: expected {kind}, got {value!r}")
        check_drafter(self.drafts)
        if self.context is not None:
            check_integer("context", self.context, 1)
        if self.threads is not None:
            check_integer("threads", self.threads, 1, 4096)
        check_integer("parallel", self.parallel, 1)
        _ = self.scaled_adapters
        if self.kv_memory is not None:
            bytes_of("kv_memory", self.kv_memory)
        if self.memory not in (None, "auto"):
            bytes_of("memory", self.memory)

    @property
    def folders(self) -> dict[str, str | Path]:
        """The folders of the models by role: target, draft, reward."""
        roles = {"target": self.folder, "draft": self.draft, "reward": self.reward}
        return {role: path for role, path in roles.items() if isinstance(path, str | Path)}

    @property
    def scaled_adapters(self) -> dict[str, tuple[Path, float]]:
        """The folders of adapters and their factors, by name. Raises UsageError."""
        given, found = self.adapters, dict[str, tuple[Path, float]]()
        if isinstance(given, str | Path) or not isinstance(given, Sequence | Mapping):
            raise UsageError(f"adapters: expected a list of folders, or a mapping of names, got {given!r}")
        named = given.items() if isinstance(given, Mapping) else [(None, each) for each in given]
        for name, each in named:
            folder, scale = each if isinstance(each, tuple) and len(each) == 2 else _scaled(each)
            if not isinstance(folder, str | Path) or type(scale) not in (int, float) or not abs(scale) < 1e6:
                raise UsageError(f"adapters: expected DIR or DIR=SCALE, got {each!r}")
            name = Path(folder).resolve().name if name is None else name
            if not isinstance(name, str) or name in ("", NO_ADAPTER):
                raise UsageError(f"adapters: {name!r} cannot be the name of one", remedy="rename the folder")
            if name in found:
                remedy = "requests choose by the folder's name: rename one of them"
                raise UsageError(f"adapters: two of them have the name {name!r}", remedy=remedy)
            found[name] = Path(folder), float(scale)
        return found

    @property
    def kv_bytes(self) -> int | None:
        """`kv_memory` in bytes."""
        return None if self.kv_memory is None else bytes_of("kv_memory", self.kv_memory)

    @property
    def place(self) -> Shard:
        """The place of this process, which may be alone."""
        return self.shard or Shard()
