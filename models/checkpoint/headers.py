"""A checkpoint: its config and the headers of its tensors, checked before any weight is read."""

from __future__ import annotations

import difflib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from kernels.linear import Packed
from models.checkpoint.fields import Fields
from models.checkpoint.four_bits import FourBits, turn, with_four_bits
from models.checkpoint.hqq import Across, with_hqq
from models.checkpoint.joined import InParts, with_joined
from models.checkpoint.listing import CONFIG_BYTES, WEIGHTS, adapter_alone, adapter_base, listed_tensors, read_json
from models.checkpoint.mlx import from_mlx, has_forms
from models.checkpoint.model_types import with_architecture
from models.checkpoint.quantized_configs import with_quantization
from models.checkpoint.spellings import spelled_alike, usual_name
from models.checkpoint.tensor_files import (
    FETCH_AGAIN,
    FLOATS,
    PACK_AGAIN,
    LastFile,
    damaged,
    read_metadata,
    widened,
)
from models.checkpoint.tensors import GroupedReader, RowReader, TensorInfo
from models.checkpoint.wrapped import is_wrapped, parts, text_config, text_names
from models.errors import CheckpointError, show
from models.file_cache import FileCache
from models.folders import check_folder, gguf_file, name_of, snapshot
from models.formats.grouped import GroupedWeight
from models.formats.packed import PANELS, PREFIXES, Packing
from models.gguf.architectures import read_config
from models.gguf.cached_vocabulary import open_gguf
from models.gguf.reader import GGUF
from models.gguf.tensors import BlockReader, Stored, quantization_of, tensors_of
from models.gguf.vocabulary import FileVocabulary
from models.quantized import quantization
from models.quantized.bitnet import TernaryModules
from models.quantized.compressed import Compressed
from models.quantized.gemma import CODES_OF_ROWS, MobileGemma
from models.quantized.hqq import HQQ
from models.quantized.mlx import MLX
from models.quantized.parts import (
    CACHE_SCALES,
    EMBEDDING,
    LINEAR,
    TRANSPOSED,
    UNREAD,
    ModuleSchemes,
    Part,
    Quantization,
    Scheme,
    Source,
)
from models.quantized.torchao import TorchAO

# Suffixes of tensors that may hold a weight's codes.
STORED = ("weight", "qweight", "weight_packed", "_weight_qdata", "W_q", "weight._data", "weight._data._data",
          CODES_OF_ROWS)  # fmt: skip
WITH_EMBEDDINGS = (Compressed, MLX, MobileGemma, ModuleSchemes, TorchAO)  # methods that quantise them


@dataclass(frozen=True)
class Checkpoint:
    """A folder in Hugging Face layout. `config` and `generation_config` (None: absent) are the parsed files.

    `tensors` comes from the headers alone: opening a checkpoint reads no weights and allocates nothing of their size.
    For a GGUF file `folder` is the file, and `gguf` its header, from which the parsed files are made; `vocabulary` is
    its tokenizer data.
    `packing` describes the matrices that were packed ahead, if any; `tensors` has them under their own names as well.
    `quantization` is the config's description of quantised weights; None: all are floats.

    For a model of several modalities `config` and `tensors` are those of its text model, by that model's own names;
    `left_out` are the bytes of the other parts. `adapter`: the base model of an adapter in the folder, which is not
    applied; "" without an adapter.
    """

    folder: Path
    config: dict[str, Any]
    generation_config: dict[str, Any] | None
    tensors: dict[str, TensorInfo]
    packing: Packing | None = None
    quantization: Quantization | None = None
    left_out: Mapping[str, int] = field(default_factory=dict)
    adapter: str = ""
    gguf: GGUF | None = None
    vocabulary: FileVocabulary | None = None

    @staticmethod
    def open(folder: str | Path, cache: FileCache | None = None) -> Checkpoint:
        """Read and check the JSON files and every header. Raises a CheckpointError that names the file at fault.

        In a folder of the hub's cache the snapshot is opened, see `models.folders`.

        Args:
            cache: may have a GGUF file's vocabulary from an earlier start; the lists of the metadata are not read then.
        """
        try:
            return _open(snapshot(Path(folder)), cache)
        except OSError as error:  # no permission, a broken disk
            where = show(error.filename or folder)
            raise CheckpointError(f"the model cannot be read: {error.strerror}", where=where) from error

    @property
    def fields(self) -> Fields:
        """Validated access to `config`."""
        return Fields(self.config, show(self.folder if self.gguf else self.folder / "config.json"))

    @property
    def architecture(self) -> str:
        """The first of the config's architectures; "" if it names none."""
        names = self.config.get("architectures") or [""]
        if not isinstance(names, list) or not isinstance(names[0], str):
            raise self.fields.error("architectures", "a list of names")
        return names[0]

    @property
    def bos_token_id(self) -> int | None:
        """The config's beginning-of-sequence token (the first if it is a list), else generation_config's."""
        return self._ids("bos_token_id")[0]

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The tokens that end a text: config.json and generation_config.json together."""
        return frozenset(token for token in self._ids("eos_token_id") if token is not None)

    def _ids(self, name: str) -> list[int | None]:
        file = self.folder if self.gguf else self.folder / "generation_config.json"
        generation = Fields(self.generation_config or {}, show(file))
        return [*sorted(self.fields.ids(name)), *sorted(generation.ids(name)), None]

    @cached_property
    def modules(self) -> dict[str, list[TensorInfo]]:
        """The tensors of each module, by its name."""
        found: dict[str, list[TensorInfo]] = {}
        for name, info in self.tensors.items():
            found.setdefault(name.rpartition(".")[0], []).append(info)
        return found

    @property
    def name(self) -> str:
        """The folder's name, or the file's; in the hub's cache the repository's."""
        return name_of(self.folder)

    @property
    def torch_dtype(self) -> torch.dtype:
        """The declared dtype (`dtype`, formerly `torch_dtype`), else the float dtype that most tensors have."""
        names = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS.values()}
        names |= dict.fromkeys(("float8_e4m3fn", "float8_e5m2"), torch.bfloat16)  # see `widened`
        names |= {f"torch.{name}": dtype for name, dtype in names.items()}
        for name in ("dtype", "torch_dtype"):
            declared = self.fields.choice(name, {*names, "auto"}, None)
            if declared and declared != "auto":
                return names[declared]
        found = Counter(info.dtype for info in self.tensors.values() if info.dtype in FLOATS.values())
        return found.most_common(1)[0][0] if found else torch.float32

    def check(
        self,
        expected: Mapping[str, tuple[int, ...]],
        *,
        ignore: Sequence[re.Pattern[str]] = (),
        tied: Mapping[str, str] | None = None,
        base: str = "",
        kinds: Mapping[str, str] | None = None,
    ) -> dict[str, str]:
        """Compare the headers with the tensors that a model needs, by name and shape, without reading data.

        A name that fully matches a pattern of `ignore` may exist or not. `tied` maps names to the names they share
        their values with: one of each pair may be absent. `base` is a prefix of names in a checkpoint of the whole
        model, which checkpoints of the base model (without the head) omit: if no stored name has it, none is expected.
        If all have it and some have it twice, a module around the model has added it to every name, the head's too.
        `kinds` maps weights that may be stored quantised to the classes of their modules.
        Returns {absent name: the name to read instead}.
        Raises a CheckpointError that lists up to 10 tensors that are missing, extra, misshapen or of another dtype.
        """
        bare = bool(base) and not any(name.startswith(base) for name in self.tensors)
        begins = {name.startswith(base) + name.startswith(2 * base) for name in self.tensors}
        twice = bool(base) and begins in ({2}, {1, 2})
        stored = {name: name.removeprefix(base) if bare else base * twice + name for name in expected}

        def parts(name: str) -> dict[str, Part]:
            return self._parts(name, stored[name], expected[name], (kinds or {}).get(name, ""))

        def held(name: str) -> bool:
            return any(part in self.tensors for part in parts(name))

        known = set(stored.values())
        turn(self.tensors, [stored.get(name, name) for name, kind in (kinds or {}).items() if kind == TRANSPOSED])
        for one, other in (tied or {}).items():
            if held(one) and not held(other):
                one, other = other, one  # some checkpoints keep the head and drop the embedding
            if not held(one):
                stored[one] = stored[other]
        wanted = [part for name in expected for part in parts(name).items()]  # twice, if a head is tied
        missing = dict.fromkeys(name for name, part in wanted if name not in self.tensors and not part.optional)
        known |= dict(wanted).keys()
        extra = [n for n in self.tensors if n not in known and not any(p.fullmatch(n) for p in ignore)]
        if self.quantization is not None:
            extra = [name for name in extra if not CACHE_SCALES.fullmatch(name)]
        if self.packing:
            extra = [name for name in extra if not name.startswith(PREFIXES)]
        faults = [f"missing {show(name)}{_nearest(name, extra)}" for name in [*missing][:10]]
        faults += [f"unknown {show(name)} in {show(self.tensors[name].file.name)}" for name in extra[:10]]
        wrong = {name: part for name, part in wanted if name in self.tensors and not self.tensors[name].fits(part)}
        faults += [self._wrong(name, part) for name, part in [*wrong.items()][:10]]
        if faults:
            raise self._misfit(faults[:10], len(missing) + len(extra) + len(wrong))
        return {name: other for name, other in stored.items() if other != name}

    def grouped(
        self, name: str, stored: str, shape: tuple[int, ...], kind: str, *, biased: bool
    ) -> GroupedWeight | None:
        """Return the weight of a linear layer that is stored quantised; None if it is stored as floats.

        Args:
            name, shape: as given to `check`; kind: its class in transformers.
            stored: its name in this checkpoint.
            biased: the layer has a bias; a layer without one may be stored with a bias of zeros.

        Raises:
            CheckpointError: invalid values.
        """
        scheme = self._scheme(name, stored, kind)
        if scheme is None:
            return None
        module = stored.removesuffix(".weight")
        where = ", ".join(sorted({show(info.file) for info in self.modules.get(module, ())}))

        def read(suffix: str) -> Tensor | None:
            part = f"{module}.{suffix}"
            return self.read([part])[part] if part in self.tensors else None

        def error(what: str) -> CheckpointError:
            return CheckpointError(f"{show(module)}: {what}", where=where, remedy=FETCH_AGAIN)

        bias = None if biased else read("bias")
        if bias is not None and bias.any():
            raise error("it has a bias, and the model has none")
        outs, width = shape[::-1] if kind == TRANSPOSED else shape
        weight = scheme.weight(outs, width, Source(read, error))
        if weight.group % 8 and weight.group != width:
            what = f"groups of {weight.group} elements are not supported, but multiples of 8 and whole rows"
            raise CheckpointError(f"{show(module)}: {what}", where=where, remedy=UNREAD)
        return weight

    def scheme(self, name: str, stored: str) -> Scheme | None:
        """Return how the weight of a linear layer is stored under a name; None: as floats."""
        return self._scheme(name, stored, LINEAR)

    def _scheme(self, name: str, stored: str, kind: str) -> Scheme | None:
        """Return how a weight is stored; None: as floats, according to the config or the file."""
        info = self.tensors.get(stored)
        meant = isinstance(self.quantization, TernaryModules) and self.quantization.of_floats
        if not kind or self.quantization is None or (info and info.dtype in FLOATS.values() and not meant):
            return None
        other = not name.endswith(stored) and not stored.endswith(name)  # a tied head, or an embedding stored as one
        by_file = not other or isinstance(self.quantization, Compressed)
        if other and by_file:
            kind = EMBEDDING if kind == LINEAR else LINEAR
        if kind == EMBEDDING and not isinstance(self.quantization, WITH_EMBEDDINGS):
            return None
        own = stored.removesuffix(".weight")
        parts = (self.tensors.get(f"{own}.{suffix}") for suffix in STORED)
        inside = next((part.name for part in parts if part and part.name), None)  # configs use names of the whole
        module = own if by_file else name.removesuffix(".weight")
        return self.quantization.scheme(inside.rpartition(".")[0] if inside else module, kind)

    def _parts(self, name: str, stored: str, shape: tuple[int, ...], kind: str) -> dict[str, Part]:
        """Return the tensors that represent an expected one."""
        scheme = self._scheme(name, stored, kind)
        if scheme is None:
            return {stored: Part((tuple(shape),), FLOATS.values())}
        outs, width = shape[::-1] if kind == TRANSPOSED else shape
        module = stored.removesuffix(".weight")
        return {f"{module}.{suffix}": part for suffix, part in scheme.parts(outs, width).items()}

    def _wrong(self, name: str, part: Part) -> str:
        """Return the fault in a tensor's header."""
        info, floats = self.tensors[name], {*FLOATS.values()}
        dtypes = " or ".join(dict.fromkeys("floats" if dtype in floats else str(dtype)[6:] for dtype in part.dtypes))
        want = " or ".join(str(list(shape)) for shape in part.shapes)
        got = f"{list(info.shape)} of {str(info.dtype)[6:]}"
        return f"{show(name)} in {show(info.file.name)}: expected {want} of {dtypes}, got {got}"

    def _misfit(self, faults: Sequence[str], total: int) -> CheckpointError:
        """Return the error for headers that do not fit the model."""
        shown = "\n".join(f"  {fault}" for fault in faults)
        more = f"\n  and {total - len(faults)} more" if total > len(faults) else ""
        remedy = "Check that config.json and the weights belong together, and that the download is complete."
        if "tok_embeddings.weight" in self.tensors:
            remedy = "This is Meta's own layout: use the Hugging Face version of the model."
        elif self.gguf:
            remedy = "Is the download complete, or is it a variant of the architecture that is not supported?"
        elif self.packing:
            remedy = f"Check that config.json is that of the packed checkpoint. {PACK_AGAIN}"
        return CheckpointError(
            f"the weights do not fit the config ({total} tensors at fault):\n{shown}{more}",
            where=show(self.folder),
            remedy=remedy,
        )

    def read(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Map tensors: views of the file, in its dtype, whose memory is released with the last view.

        The file must not shrink while views of it exist: the operating system would kill the process (SIGBUS).
        """
        by_file: dict[Path, list[str]] = {}
        out: dict[str, Tensor] = {}
        for name in names:
            if self.tensors[name].packed:
                raise CheckpointError(
                    f"{show(name)} was packed with other matrices than this version multiplies it with",
                    where=show(self.tensors[name].file),
                    remedy=PACK_AGAIN,
                )
            if isinstance(info := self.tensors[name], Stored | FourBits | Across | InParts):
                out[name] = info.read()
            else:
                by_file.setdefault(info.file, []).append(name)
        last = vars(self).get("_last") or LastFile()
        for file, group in by_file.items():
            try:
                opened = last.get(file, sum(self.tensors[name].nbytes for name in group))
                for name in group:
                    info = self.tensors[name]
                    found = opened.get_tensor(info.name or name)
                    try:
                        out[name] = found if info.part is None else info.part.of(found)
                    except IndexError:
                        out[name] = found  # the file has changed, which is detected below
            except (SafetensorError, OSError) as error:
                raise damaged(file, error) from error
        for name, tensor in out.items():
            info = self.tensors[name]
            if tuple(tensor.shape) != info.shape or tensor.dtype != info.held:
                raise CheckpointError(f"{show(name)} changed while the model was loaded", where=show(info.file))
            if info.stored:
                out[name] = tensor.to(info.dtype)
            elif tensor.data_ptr() % tensor.element_size():  # legal in the format, but unsuitable for vector loads
                out[name] = tensor.clone()
        return out

    @contextmanager
    def held_open(self) -> Iterator[None]:
        """Context in which the file that was read last stays open."""
        vars(self)["_last"] = last = LastFile()
        try:
            yield
        finally:
            del vars(self)["_last"]
            last.close()

    def packed(self, names: Sequence[str], outs: int, width: int) -> Packed | None:
        """Return the matrix [outs, width] that was packed ahead from these weights; None if there is none.

        It is multiplied in the mapped file: processes share its memory, and the system may reclaim it at any time.
        Raises CheckpointError if it has another size, or its tensors do not fit it.
        """
        key = "+".join(names)
        if self.packing is None or key not in self.packing.sizes:
            return None
        size, wanted = self.packing.sizes[key], [prefix + key for prefix in PREFIXES]
        try:
            if (size.outs, size.width) != (outs, width):
                raise ValueError(f"expected {outs} outputs of width {width}, got {size.outs} of {size.width}")
            if PANELS + key not in self.tensors:
                raise ValueError("its panels are not in the file")
            found = self.read([name for name in wanted if name in self.tensors])
            return size.packed(found[wanted[0]], *map(found.get, wanted[1:]))
        except ValueError as error:
            file = self.tensors[names[0]].file
            raise CheckpointError(f"packed matrix {show(key)}: {error}", where=show(file), remedy=PACK_AGAIN) from error

    def rows(self, name: str, stored: str, shape: tuple[int, ...]) -> RowReader | GroupedReader | BlockReader:
        """Return a reader of the token embedding's rows in its file, see `RowReader`; arguments as for `grouped`."""
        if isinstance(info := self.tensors.get(stored), Stored):
            return info.reader(stored)
        scheme = self._scheme(name, stored, EMBEDDING)
        if scheme is None:
            return RowReader(self.tensors[stored], stored)
        readers = dict[str, RowReader]()
        for suffix, part in scheme.parts(*shape).items():
            name = f"{stored.removesuffix('.weight')}.{suffix}"
            if (info := self.tensors.get(name)) and len(info.shape) == 2 and info.shape[0] == shape[0]:
                readers[suffix] = RowReader(info, name)
            elif not part.optional:
                info = self.tensors[name]
                what = f"{show(name)}: an embedding is read row by row, expected {shape[0]} rows, got {[*info.shape]}"
                remedy = "Use a checkpoint whose embedding has scales per row and no packed zeros, or is not quantised."
                raise CheckpointError(what, where=show(info.file), remedy=remedy)
        return GroupedReader(scheme, shape[1], readers, stored)


def _open(folder: Path, cache: FileCache | None) -> Checkpoint:
    file = gguf_file(folder)
    checkpoint = _open_gguf(file, cache) if file else _open_folder(folder)
    # A bad value is reported here and not in the middle of a conversation.
    _ = checkpoint.architecture, checkpoint.torch_dtype, checkpoint.eos_token_ids, checkpoint.bos_token_id
    return checkpoint


def _open_gguf(path: Path, cache: FileCache | None) -> Checkpoint:
    file, vocabulary = open_gguf(path, cache)
    config = read_config(file)
    tensors = tensors_of(file, config)
    ends = {"bos_token_id": vocabulary.ids["bos"], "eos_token_id": vocabulary.ends() or None} if vocabulary else {}
    quantized = quantization_of(tensors, config)
    return Checkpoint(
        path, config | ends, ends, dict(tensors), quantization=quantized, gguf=file, vocabulary=vocabulary
    )


def _open_folder(folder: Path) -> Checkpoint:
    check_folder(folder)
    if not (folder / "config.json").exists():
        if adapter := adapter_base(folder):
            raise adapter_alone(folder, adapter)
        raise CheckpointError(
            "the model folder holds no config.json",
            where=show(folder),
            remedy="Name the folder that holds it, or download the model again with all its files.",
        )
    config = with_quantization(folder, with_architecture(read_json(folder / "config.json", CONFIG_BYTES)))
    generation = folder / "generation_config.json"
    generation_config = read_json(generation, CONFIG_BYTES) if generation.exists() else None
    tensors, settings = with_hqq(with_joined(with_four_bits(listed_tensors(folder))))
    left_out: dict[str, int] = {}
    if is_wrapped(config):
        config = text_config(config, show(folder / "config.json"))
        tensors, left_out = _text_tensors(tensors)
    quantized = quantization(Fields(config, show(folder / "config.json")))
    if settings and (quantized is None or isinstance(quantized, HQQ)):
        quantized = settings
    if isinstance(quantized, MLX) or (quantized is None and has_forms(config, tensors)):
        config, tensors = from_mlx(config, tensors)
    elif quantized is None:
        tensors = widened(tensors)
    tensors = spelled_alike(tensors)
    if isinstance(quantized, TorchAO):
        quantized = _with_types(quantized, tensors)
    packing = _packing(folder / WEIGHTS, tensors) if any(name.startswith(PANELS) for name in tensors) else None
    return Checkpoint(folder, config, generation_config, tensors, packing, quantized, left_out, adapter_base(folder))


def _with_types(quantized: TorchAO, tensors: Mapping[str, TensorInfo]) -> TorchAO:
    """Return the config with the types of tensors that the metadata of the files describe, by the files' names.

    transformers writes its modules' names into the metadata, and may give the tensors other names.
    """
    files, metadata = sorted({info.file for info in tensors.values()}), dict[str, str]()
    for file in files:
        metadata |= read_metadata(file)
    found = quantized.with_types(metadata, show(files[0]))
    names = text_names(f"{module}.weight" for module in found.schemes)
    usual = {usual_name(own): found.schemes[name.removesuffix(".weight")] for own, name in names.items()}
    stored = {(info.name or name).rpartition(".")[0]: name.rpartition(".")[0] for name, info in tensors.items()}
    more = {module: usual[f"{own}.weight"] for module, own in stored.items() if f"{own}.weight" in usual}
    return replace(found, schemes={**more, **found.schemes})


def _text_tensors(tensors: dict[str, TensorInfo]) -> tuple[dict[str, TensorInfo], dict[str, int]]:
    """Return the tensors of the text model by their own names, and the bytes of the other parts."""
    names = text_names(tensors) | {name: name for name in tensors if name.startswith(PREFIXES)}
    text = {name: replace(tensors[stored], name=stored) for name, stored in names.items()}
    taken = {*names.values()}
    others = {name: info for name, info in tensors.items() if name not in taken}
    sizes = {name: math.prod(info.shape) * info.dtype.itemsize for name, info in others.items()}
    return text, {show(part): size for part, size in parts(sizes).items()}


def _packing(file: Path, tensors: dict[str, TensorInfo]) -> Packing | None:
    """Read the description of the file's packed matrices, and add them to `tensors` under their own names."""
    try:
        with safe_open(file, framework="pt") as mapped:
            packing = Packing.parse(mapped.metadata() or {})
    except ValueError as error:
        raise CheckpointError(show(error), where=show(file), remedy=PACK_AGAIN) from error
    for name, (shape, dtype) in (packing.matrices if packing else {}).items():
        tensors.setdefault(name, TensorInfo(file, shape, dtype, packed=True))  # a head may share its embedding's name
    return packing


def _nearest(name: str, extra: list[str]) -> str:
    close = difflib.get_close_matches(name, extra[:1000], n=1)
    return f" (nearest: {show(close[0])})" if close else ""
