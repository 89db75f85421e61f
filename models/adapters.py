"""peft's adapters (LoRA, Hu et al., 2021): folders with adapter_config.json and adapter_model.safetensors, checked
before any value is read, and their factors in the form that a layer's matrices take.

An adapter adds scale * (x A^T) B^T to the outputs of some transformers modules. Here one matrix may combine several
modules; their outputs are then ranges of its outputs. An adapter may also replace the base's embedding or head.
"""

import hashlib
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from kernels.low_rank import Factors, LowRank
from models.checkpoint.fields import Fields
from models.checkpoint.files import open_regular
from models.checkpoint.headers import Checkpoint
from models.checkpoint.listing import ADAPTERS, CONFIG_BYTES, header_of, read_json
from models.checkpoint.spellings import usual_name
from models.checkpoint.tensor_files import FETCH_AGAIN, FLOATS
from models.checkpoint.tensors import TensorInfo
from models.checkpoint.wrapped import NESTED
from models.config import Config
from models.errors import CheckpointError, show
from models.names import HEAD, Names

CONFIG, WEIGHTS, PICKLE = ADAPTERS
KEY = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+)\.lora_(?:(?P<factor>[AB])(?:\.default)?\.weight"
    r"|embedding_(?P<table>[AB])(?:\.default)?)"
)
WHOLE = re.compile(
    r"(?:base_model\.model\.)?(?P<module>.+?)(?:\.base_layer|\.modules_to_save(?:\.default)?)?\.(?P<what>weight|bias)"
)
HALVES = (torch.bfloat16, torch.float16)
REPLACED = "it is replaced, which is supported for the embedding and the head only"
MERGE = "Merge it into its base (PEFT: merge_and_unload, then save_pretrained), and load the result."
REFUSED = {  # unsupported options of peft's configurations -> their names in messages
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "use_bdlora": "BD-LoRA",
    "lora_bias": "biases of LoRA",
    "ensure_weight_tying": "an embedding and a head that stay tied",
    "trainable_token_indices": "trained rows of the embedding",
    "layer_replication": "repeated layers",
    "target_parameters": "LoRA of parameters that are no modules",
    "alora_invocation_tokens": "activated LoRA",
    "megatron_config": "Megatron's layers",
    "arrow_config": "Arrow's routing",
    "velora_config": "VeLoRA",
    "monteclora_config": "MonteCLoRA",
    "kasa_config": "KaSA",
}
PLAIN_STARTS = (None, True, False, "gaussian", "eva", "mica", "orthogonal")  # initialisations that keep the base


@dataclass(frozen=True)
class Adapted:
    """A module that an adapter changes: the tensors A [rank, width] and B [outs, rank], and the factor of B A.

    `table`: the module is an embedding, whose width is the vocabulary.
    """

    a: str
    b: str
    rank: int
    scale: float
    table: bool = False


@dataclass(frozen=True)
class Fitted:
    """An adapter's factors, by the model's names of the modules, and the tensors that replace those of the embedding
    (weight) or the head (weight [V, E], bias [V]), by the model's names of these."""

    modules: Mapping[str, Adapted]
    whole: Mapping[str, str]


@dataclass(frozen=True)
class Adapter:
    """An adapter whose files are checked.

    Args:
        folder: the folder of the files.
        base: the model that it was made for, for messages; "" if it names none.
        file: its tensors.
        modules: the modules with factors, by their names in transformers.
        whole: the tensors of modules that it replaces, by the tensors' names in transformers.
        scale: a factor of the adapter's contribution, in addition to its own.
    """

    folder: Path
    base: str
    file: Checkpoint
    modules: Mapping[str, Adapted]
    whole: Mapping[str, str]
    scale: float = 1.0

    @staticmethod
    def open(folder: str | Path, scale: float = 1.0) -> "Adapter":
        """Read and check the configuration and the header of a folder. Raises CheckpointError naming the fault."""
        folder = Path(folder)
        if not folder.is_dir() or not (folder / CONFIG).exists():
            what = f"the folder holds no {CONFIG}" if folder.is_dir() else "there is no such folder"
            remedy = f"An adapter is a folder of peft, with {CONFIG} and {WEIGHTS}."
            raise CheckpointError(f"adapter: {what}", where=show(folder), remedy=remedy)
        fields = Fields(read_json(folder / CONFIG, CONFIG_BYTES), show(folder / CONFIG))
        _refuse(fields)
        if not (folder / WEIGHTS).exists() and (folder / PICKLE).exists():
            raise CheckpointError(
                f"the adapter's weights are a pickle ({PICKLE}), which can run code and is never loaded",
                where=show(folder),
                remedy="If you trust its source, save it again with peft, which writes safetensors.",
            )
        tensors = header_of(folder, WEIGHTS)
        modules, whole = _modules(fields, tensors, folder)
        base = fields.str("base_model_name_or_path", default="")
        return Adapter(folder, base, Checkpoint(folder, {**fields.config}, None, tensors), modules, whole, scale)

    def fitted(self, names: Names, c: Config, base: str) -> Fitted:
        """Return the modules by the model's names.

        Args:
            names, c: the model's names and configuration.
            base: the prefix of names in a checkpoint of the whole model.

        Raises:
            CheckpointError: a module that the model lacks, that has another shape, or that is not supported.
        """
        ends = _ends(names, c)
        there, faults = matrices(names, c) | ends, list[str]()
        modules, whole = dict[str, Adapted](), dict[str, str]()

        def named(module: str) -> str | None:
            inside = NESTED.fullmatch(module)
            spelled = [
                module,
                base + module,
                usual_name(f"{module}.weight").removesuffix(".weight"),
                *([inside[1], f"model.{inside[1]}"] if inside else []),
            ]
            if (name := next((each for each in spelled if each in there), None)) is None:
                faults.append(f"{show(module)}: {_not_served(module, names)}")
            return name

        for module, adapted in self.modules.items():
            if (name := named(module)) is None:
                continue
            outs, width = there[name]
            a, b = (self.file.tensors[tensor] for tensor in (adapted.a, adapted.b))
            if (a.shape[1], b.shape[0]) != (width, outs) or adapted.table != (name == names.embedding):
                got = f"{a.shape[1]} to {b.shape[0]}"
                faults.append(f"{show(module)}: expected factors from {width} elements to {outs}, got {got}")
            modules[name] = adapted
        for replaced, tensor in self.whole.items():
            module, _, what = replaced.rpartition(".")
            if (name := named(module)) is None:
                continue
            if name not in ends:
                faults.append(f"{show(module)}: {REPLACED}")
                continue
            wanted = ends[name] if name == HEAD else ends[name][::-1]
            if what == "bias":
                wanted = wanted[:1] if name == HEAD and c.head_bias else None
            if wanted is None:
                faults.append(f"{show(module)}: the model has no bias there")
            elif (got := self.file.tensors[tensor].shape) != wanted:
                faults.append(f"{show(replaced)}: expected a tensor {[*wanted]}, got {[*got]}")
            whole[f"{name}.{what}"] = tensor
        if faults:
            shown, more = "\n".join(f"  {fault}" for fault in faults[:5]), len(faults) - 5
            raise CheckpointError(
                f"the adapter does not fit the model:\n{shown}" + (f"\n  and {more} more" if more > 0 else ""),
                where=show(self.folder),
                remedy=f"It was made for {show(self.base) if self.base else 'a model that it does not name'}. {MERGE}",
            )
        return Fitted(modules, whole)

    def bytes(self, small: bool, dtype: torch.dtype) -> int:
        """Return the bytes that it takes; `small`: with quantised matrices, or in half precision."""
        whole = [self.file.tensors[name] for name in self.whole.values()]
        total = sum(math.prod(each.shape) * min(each.dtype.itemsize, dtype.itemsize) for each in whole)
        for each in self.modules.values():
            a, b = (self.file.tensors[name] for name in (each.a, each.b))
            kept = 2 if small or {a.dtype} == {b.dtype} <= {*HALVES} else 4
            total += each.rank * (a.shape[1] + -(-b.shape[0] // 16) * 16) * kept
        return total

    def digest(self) -> str:
        """Return a digest of its contribution."""
        found = hashlib.sha256()
        with open_regular(self.folder / WEIGHTS) as file:
            while piece := file.read(1 << 20):
                found.update(piece)
        found.update(repr((self.scale, sorted((name, each.scale) for name, each in self.modules.items()))).encode())
        return found.hexdigest()[:16]

    def read(self, name: str) -> torch.Tensor:
        """Read a tensor of its file. Raises CheckpointError if values are not finite."""
        x = self.file.read([name])[name]
        if not torch.isfinite(x).all():
            where = show(self.folder / WEIGHTS)
            raise CheckpointError(f"{show(name)} has values that are not finite", where=where, remedy=FETCH_AGAIN)
        return x

    def factors(self, first: int, adapted: Adapted, dtype: torch.dtype, *, small: bool) -> Factors:
        """Return the factors of a module.

        Args:
            first: the first of the matrix's outputs that belong to the module.
            dtype: the dtype that the model computes in.
            small: keep them in 16 bits, scaled by a power of two so that float16 holds them; rounding leaves 11 bits.

        Raises:
            CheckpointError: values are not finite.
        """
        names, scale = (adapted.a, adapted.b), adapted.scale * self.scale
        a, b = (self.read(name) for name in names)
        own = {a.dtype, b.dtype}
        kept = own.pop() if len(own) == 1 and own <= {*HALVES} else torch.float32
        kept = dtype if dtype == torch.float64 else kept
        if kept != torch.float32 or not small:
            return Factors(first, a.to(kept, copy=True), b.to(kept, copy=True), scale)
        powers = [math.frexp(float(x.abs().max()))[1] for x in (a, b)]
        a, b = ((x.double() * 2.0**-power).half() for x, power in zip((a, b), powers, strict=True))
        return Factors(first, a, b, scale * 2.0 ** sum(powers))


def _ends(names: Names, c: Config) -> dict[str, tuple[int, int]]:
    """Return outputs and width of the embedding, whose inputs are tokens, and of the head."""
    rows, width = names.tensors(c)[f"{names.embedding}.weight"]
    return {names.embedding: (width, rows)} | ({} if c.scores else {HEAD: (c.vocab_size, width)})


def matrices(names: Names, c: Config) -> dict[str, tuple[int, int]]:
    """Return outputs and width of the layers' matrices, by their modules' names; matrices of experts, and matrices that
    are multiplied head by head, are left out."""
    begin, found = names.layer.partition("{")[0], {}
    mixed = {names.layer.format(i) + name for name in names.mixture(c) for i in range(c.layers) if c.mixed(i)}
    if c.latent is not None:
        mixed |= {
            f"{names.layer.format(i)}{name}.weight" for name in names.latent_high(c.latent) for i in range(c.layers)
        }
    for name, shape in names.tensors(c).items():
        if name not in mixed and name.startswith(begin) and name.endswith(".weight") and len(shape) == 2:
            found[name.removesuffix(".weight")] = shape[::-1] if names.transposed else shape
    return found


def low_rank(
    modules: Sequence[str],
    adapter: Adapter,
    fitted: Fitted,
    outs: Mapping[str, tuple[int, int]],
    dtype: torch.dtype,
    device: torch.device,
    *,
    small: bool,
    packed: bool,
    order: Sequence[range] | None = None,
) -> LowRank | None:
    """Return the adapter of a matrix that stacks these modules; None if it changes none of them.

    Args:
        fitted: see `Adapter.fitted`; outs: see `matrices`.
        dtype, device: the dtype and device of the computation.
        small: see `Adapter.factors`.
        packed: factors are packed for C++.
        order: outputs of all modules in the matrix's order; None: the order of the modules.

    Raises:
        CheckpointError: values are not finite.
    """
    parts, first = [], 0
    for module in modules:
        if module in fitted.modules:
            part = adapter.factors(first, fitted.modules[module], dtype, small=small)
            own = [x for x in order or () if first <= x.start < first + outs[module][0]]
            rows = [part.b_OR[x.start - first : x.stop - first : x.step] for x in own]
            parts.append(part._replace(b_OR=torch.cat(rows)) if len(rows) > 1 else part)
        first += outs[module][0]
    if not parts:
        return None
    if len({part.a_RI.dtype for part in parts}) > 1 or any(p.a_RI.dtype != p.b_OR.dtype for p in parts):
        parts = [part._replace(a_RI=part.a_RI.float(), b_OR=part.b_OR.float()) for part in parts]
    parts = [part._replace(a_RI=part.a_RI.to(device), b_OR=part.b_OR.to(device)) for part in parts]
    return LowRank(parts, packed=packed)


def _refuse(fields: Fields) -> None:
    """Raise a CheckpointError that names the kind of adapter if it is not supported."""
    kind = fields.str("peft_type", default="LORA")

    def refused(name: str) -> CheckpointError:
        return CheckpointError(f"adapters with {name} are not supported", where=fields.file, remedy=MERGE)

    if kind != "LORA":
        what = f"adapters of the kind {show(kind)} are not supported, but LORA"
        raise CheckpointError(what, where=fields.file, remedy=MERGE)
    config = fields.config
    unknown = [name for name, value in config.items() if name.startswith("use_") and name not in REFUSED and value]
    for name in (*REFUSED, *unknown):
        if config.get(name) and name != "use_rslora":
            raise refused(REFUSED.get(name, show(name)))
    start = config.get("init_lora_weights")
    if not any(start is each for each in PLAIN_STARTS[:3]) and start not in PLAIN_STARTS[3:]:
        raise refused(f"init_lora_weights: {show(str(start))}, which changes the base,")


def _modules(
    fields: Fields, tensors: Mapping[str, TensorInfo], folder: Path
) -> tuple[dict[str, Adapted], dict[str, str]]:
    """Return the modules with factors in a file, and the tensors of modules that it replaces.

    Raises:
        CheckpointError: other tensors, a factor without the other one, a rank that differs from the config's.
    """
    pairs: dict[tuple[str, bool], dict[str, str]] = {}
    whole: dict[str, str] = {}

    def error(what: str) -> CheckpointError:
        return CheckpointError(what, where=show(folder / WEIGHTS), remedy=FETCH_AGAIN)

    bias = fields.str("bias", default="none")  # a base without biases leaves nothing of it in the file
    for name, info in tensors.items():
        if bias != "none" and name.endswith(".bias"):
            what = f"adapters with biases (bias: {show(bias)}) are not supported"
            raise CheckpointError(what, where=fields.file, remedy=MERGE)
        if (key := KEY.fullmatch(name) or WHOLE.fullmatch(name)) is None or (key.re is WHOLE and ".lora_" in name):
            what = f"the adapter's tensor {show(name)} is no factor of LoRA of a linear layer, which is not supported"
            raise CheckpointError(what, where=show(folder / WEIGHTS), remedy=MERGE)
        if (key.re is WHOLE and len(info.shape) != 2) != name.endswith(".bias"):
            what = f"{show(key['module'])}: {REPLACED}"
            raise CheckpointError(what, where=show(folder / WEIGHTS), remedy=MERGE)
        if len(info.shape) != (1 if name.endswith(".bias") else 2) or info.dtype not in FLOATS.values():
            raise error(f"{show(name)}: expected floats, got {show(list(info.shape))} of {info.dtype}")
        if key.re is WHOLE:
            if whole.setdefault(f"{key['module']}.{key['what']}", name) != name:
                raise error(f"{show(name)}: there are two such tensors of its module")
            continue
        place = pairs.setdefault((key["module"], key["factor"] is None), {})
        if place.setdefault(key["factor"] or key["table"], name) != name:
            raise error(f"{show(name)}: there are two such factors of its module")
    for name in whole:
        if f"{(module := name.rpartition('.')[0])}.weight" not in whole:
            raise error(f"{show(module)} has a bias and lacks the weight")
    for name in fields.config.get("modules_to_save") or ():
        if not any(f".{name}." in f".{module}." for module in whole):
            raise error(f"modules_to_save names {show(str(name))}, of which the file has no weight")
    ranks, alphas = _patterns(fields, "rank_pattern"), _patterns(fields, "alpha_pattern")
    rank, alpha = fields.int("r", default=8), fields.float("lora_alpha", default=8.0)
    rooted, found = fields.bool("use_rslora", default=False), {}
    for (module, table), pair in pairs.items():
        if len(pair) < 2 or module in found:
            raise error(f"{show(module)} has one factor of LoRA and lacks the other")
        wanted, each_alpha = _matching(ranks, module, rank), _matching(alphas, module, alpha)
        a, b = (tensors[pair[factor]].shape for factor in "AB")
        if not a[0] == b[1] == wanted:
            raise error(f"{show(module)}: expected factors of rank {wanted:g}, got {[*a]} and {[*b]}")
        scale = each_alpha / (math.sqrt(a[0]) if rooted else a[0])
        found[module] = Adapted(pair["A"], pair["B"], a[0], scale, table)
    return found, whole


def _patterns(fields: Fields, name: str) -> dict[re.Pattern[str], float]:
    """Read a field that maps patterns of modules to numbers. Raises CheckpointError."""
    given: Any = fields.config.get(name) or {}
    try:
        found = {re.compile(rf"(.*\.)?({pattern})$"): float(value) for pattern, value in given.items()}
        if all(math.isfinite(value) for value in found.values()):
            return found
    except (AttributeError, TypeError, ValueError, OverflowError, re.error, RecursionError):
        pass
    raise fields.error(name, "an object that maps patterns of modules' names to numbers")


def _matching(patterns: Mapping[re.Pattern[str], float], module: str, default: float) -> float:
    """Return the number of the first pattern that matches the end of a module's name, as in peft."""
    return next((value for pattern, value in patterns.items() if pattern.match(module)), default)


def _not_served(module: str, names: Names) -> str:
    if any(part in module for part in (".experts.", ".shared_expert", ".shared_mlp.", f".{names.router}")):
        return "LoRA of experts, and of what chooses them, is not supported"
    if f".{names.keys_and_values}" in module:
        return "LoRA of the matrix that makes keys and values of a latent is not supported"
    return "the model has no such linear layer"
