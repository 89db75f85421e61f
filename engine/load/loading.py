"""The loader: turns checkpoint folders into models with their pools, on a suitable device and in a suitable dtype."""

import hashlib
import json
import math
import os
import sys
import time
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from engine.cache.pool import PagePool
from engine.errors import CheckpointError, UsageError, check_flag, check_utf8, shortened
from engine.load.capabilities import Capabilities, Precision, explicit_precision, pick_precision, processor
from engine.load.compiling import check_compile, check_same_bits, prepare, warm_up
from engine.load.distributed import agree, least
from engine.load.experts import keep_experts
from engine.load.fastest import FormatChoice, fastest_format
from engine.load.file_cache import file_cache
from engine.load.generation import Generation
from engine.load.options import NO_ADAPTER, LoadOptions
from engine.load.pooling import Pooling
from engine.load.pools import in_context, make_pools, shares_of, total_memory
from engine.load.repacking import experts_file
from engine.step.gpu import check_gpu, compile_ahead
from engine.step.graphs import GraphRunner, make_runner
from engine.step.runner import Runner
from engine.text.template import ChatTemplate
from engine.text.tokenizer import Tokenizer
from kernels.kv_fp8 import DTYPE as FP8
from models.adapters import Adapter
from models.checkpoint.cached_matrices import cached_matrices
from models.checkpoint.headers import Checkpoint
from models.checkpoint.tensor_files import PACK_AGAIN
from models.checkpoint.weights import Weights
from models.draft_heads import DraftHead
from models.families import family_of, load_model
from models.formats.floats import has_products
from models.formats.linear import FORMATS, rounds_rows
from models.gguf.cached_vocabulary import NewVocabulary
from models.mtp import MTP
from models.shape import ModelShape
from models.trim import trim_memory

IDLE = 1 << 30  # bytes of cached prefixes that no request uses, if no option sets the size of the pool
SAMPLED, PIECE = 16, 1 << 14  # places of a weights file that are hashed, and bytes read at each


@dataclass
class LoadedModel:
    """A model ready to run, with its pool, tokenizer and metadata.

    Args:
        runner: evaluates it; has its pool.
        shape: its dimensions.
        tokenizer, template: those of its checkpoint; None if it has none.
        eos_token_ids: tokens that end a text.
        name: for messages.
        capabilities: its dtype, and the fast paths of this machine.
        key, start_token: `model_key` and `start_token` of a `Task`.
        parameters: number of parameters of the checkpoint.
        adapters: digests by name; an adapter's number in a pass is its place, counted from 1.
        warned: whether a warning about a control token that is read as text was given.
        pooling: how it embeds texts.
        generation: its defaults for generation, which are applied only on request.
        pad_token_id: of its config or its family, see `engine.rewards.scored`.
    """

    runner: Runner
    shape: ModelShape
    tokenizer: Tokenizer | None = None
    template: ChatTemplate | None = None
    eos_token_ids: frozenset[int] = frozenset()
    name: str = "model"
    capabilities: Capabilities = field(default_factory=Capabilities)
    key: str = ""
    start_token: int = 0
    parameters: int = 0
    adapters: Mapping[str, str] = field(default_factory=dict)
    warned: bool = False
    pooling: Pooling = field(default_factory=Pooling)
    generation: Generation = field(default_factory=Generation)
    pad_token_id: int | None = None

    def encode(self, prompt: str, parse_special: bool = False) -> list[int]:
        """The token ids of a prompt that is text. Warns once if it spells a control token and is not to be parsed.

        Raises:
            UsageError: see `Tokenizer.encode`.
        """
        check_flag("parse_special", parse_special)
        tokenizer = self.need_tokenizer()
        if not parse_special and not self.warned and (token := tokenizer.spelled(prompt)):
            self.warned = True
            warnings.warn(
                f"{token!r} in a prompt is read as text, not as the control token: parse_special (--parse-special) "
                "reads such spellings as tokens; further ones are not reported",
                stacklevel=2,
            )
        return tokenizer.encode(check_utf8(prompt, "prompt"), parse_special=parse_special)

    def adapter(self, name: str | None) -> int:
        """The number of an adapter in a pass; for None that of the first one, 0 without adapters. Raises UsageError."""
        if name is None:
            return min(1, len(self.adapters))
        names = [NO_ADAPTER, *self.adapters]
        if name not in names:
            expected = f"one of {', '.join(names)}" if self.adapters else "none: the engine has no adapters"
            raise UsageError(f"adapter: expected {expected}, got {shortened(repr(name))}")
        return names.index(name)

    def key_with(self, name: str | None) -> str:
        """`key` of the model with an adapter."""
        number = self.adapter(name)
        return f"{self.key}-{[*self.adapters.values()][number - 1]}" if number and self.key else self.key

    def cache_prefixes(self, bounded: bool) -> None:
        """Keep prefixes of requests in the pool, unless keys depend on the final length of their sequence.

        Args:
            bounded: keep at most `IDLE` bytes on a CPU, where memory of the pool is taken only when it is written to.
        """
        pool, shape = self.runner.pool, self.shape
        if shape.steady_length is not None:
            return
        room = IDLE // shares_of([shape]) if bounded and pool.device.type == "cpu" else sys.maxsize
        most = max(1, min(room // pool.page_bytes, pool.pages))
        if self.runner.shared:
            most = least(self.runner.model.shard, most)  # all processes drop the same pages
        stored = (0, 0) if shape.delta is None else (room // shape.row_bytes, room // shape.state_bytes)
        pool.cache_prefixes(most, *stored)

    def need_tokenizer(self) -> Tokenizer:
        """The tokenizer. Raises CheckpointError if there is none."""
        if self.tokenizer is None:
            raise CheckpointError(
                "the checkpoint has no tokenizer",
                where=self.name,
                remedy="add its tokenizer files, or give prompts as token ids",
            )
        return self.tokenizer


@dataclass
class _Weights:
    """A checkpoint in memory, without a pool yet: pools share the memory that the weights of all models leave."""

    checkpoint: Checkpoint
    model: Any
    precision: Precision
    quant: FormatChoice
    compiled: bool
    tokenizer: Tokenizer | None
    template: ChatTemplate | None
    adapters: Mapping[str, Adapter]
    options: LoadOptions

    @staticmethod
    def load(folder: str | Path, options: LoadOptions, device: torch.device, in_part: bool = False) -> "_Weights":
        """Load a checkpoint; with `in_part`, only a part of its experts will be in memory."""
        opened, cache = time.time(), file_cache(options.cache)
        checkpoint, shard = Checkpoint.open(folder, cache), options.place
        precision = shard.first(lambda: pick_dtype(options.dtype, checkpoint, device))
        kept = shard.first(lambda: pick_quant(options.quant, checkpoint, precision.dtype, device))
        adapters = open_adapters(options, checkpoint)
        tokenizer = Tokenizer.of(checkpoint)
        if isinstance(checkpoint.vocabulary, NewVocabulary):
            checkpoint.vocabulary.keep()
        template = load_template(checkpoint.folder, options.chat_template, tokenizer)
        trim_memory()  # frees the parsed files: a third of a tokenizer's memory
        if in_part:
            cached = experts_file(cache, checkpoint, precision.dtype, kept.name, opened)
        else:
            cached = cached_matrices(cache, checkpoint, kept.name, shard, device, opened)
        reader = partial(Weights, shard=shard, cached=cached, rounding=options.activations == "int8")
        model = load_model(checkpoint, precision.dtype, device, kept.name, reader)
        model.shape = in_context(model, options.context, checkpoint.name)
        if cached:
            cached.keep()
        if adapters:
            model.adapt([*adapters.values()])
        compiled = options.compile == "on" and prepare()
        return _Weights(checkpoint, model, precision, kept, compiled, tokenizer, template, adapters, options)

    def eos_token_ids(self) -> frozenset[int]:
        """The end tokens of the checkpoint; if its files have none, those of the family, else of the tokenizer."""
        eos, checkpoint = self.checkpoint.eos_token_ids, self.checkpoint
        if not eos and "eos_token_id" not in checkpoint.config and not checkpoint.generation_config:
            eos = self.model.default_eos_token_ids
        if not eos and self.tokenizer and self.tokenizer.eos_token_id is not None:
            eos = frozenset([self.tokenizer.eos_token_id])
        return eos

    def with_pool(self, pool: PagePool, graphs: bool) -> LoadedModel:
        """Make the model ready to run on a pool, on a GPU with CUDA graphs if they are wanted."""
        shape, tokenizer, bos = self.model.shape, self.tokenizer, self.checkpoint.bos_token_id
        vocab_size = min(shape.vocab_size, tokenizer.size) if tokenizer else shape.vocab_size
        dtype = self.precision.dtype
        runner = make_runner(self.model, pool, vocab_size, dtype, graphs=graphs, compiled=self.compiled)
        eos, pad = self.eos_token_ids(), None if self.checkpoint.gguf else self.model.default_pad_token_id
        start = bos if bos is not None else min(eos, default=0)
        if self.compiled and not warm_up(lambda: runner.logits([start] * 5)):
            runner.rows = None
        key = self.key()
        agree(self.model.shard, "checkpoint, formats or processor", f"{key}, {runner.impl}, {processor()}")
        return LoadedModel(
            runner,
            shape,
            tokenizer,
            self.template,
            eos,
            self.checkpoint.name,
            self._capabilities(runner),
            key if self.model.shard.size == 1 else "",  # processes would differ by files that only some find
            start,
            sum(tensor.elements for tensor in self.checkpoint.tensors.values()),
            {name: adapter.digest() for name, adapter in self.adapters.items()},
            pooling=Pooling.of(self.checkpoint),
            generation=Generation.of(self.checkpoint),
            pad_token_id=self.checkpoint.config.get("pad_token_id", pad),
        )

    def key(self) -> str:
        """A name for the model as it is computed: the folder's, and a hash of config, dtypes and weight samples."""
        checkpoint, options = self.checkpoint, self.options
        formats = [str(self.precision.dtype), self.quant.name]
        formats += [options.kv_dtype] if options.kv_dtype != "auto" else []
        formats += [f"{options.activations} activations"] if options.activations != "auto" else []
        digest = hashlib.sha256(json.dumps([checkpoint.config, *formats], sort_keys=True).encode())
        for path in sorted({info.file for info in checkpoint.tensors.values()}):
            size = path.stat().st_size
            digest.update(os.fsencode(path.name) + f" {size}".encode())
            with path.open("rb") as file:
                for i in range(SAMPLED):
                    file.seek(max(0, size - PIECE) * i // (SAMPLED - 1))
                    digest.update(file.read(PIECE))
        return f"{checkpoint.name}-{digest.hexdigest()[:16]}"

    def _capabilities(self, runner: Runner) -> Capabilities:
        """Describe what the model runs on; the warning names the parts of the checkpoint that are not loaded."""
        formats = self.options.kv_dtype, isinstance(runner, GraphRunner), self.options.activations
        found = Capabilities.of(self.model, self.precision, self.quant, runner.device, runner.impl, *formats)
        if (size := self.model.shard.size) > 1:
            found = replace(found, paths=f"{found.paths}; one of {size} processes that share the model")
        return found.noting(self._beyond(), *self.left_out())

    def _beyond(self) -> str:
        """The note that sequences may be longer than those that the checkpoint is made for; "" if not."""
        given, own = self.model.shape.max_positions, ModelShape.of(self.model.config).max_positions
        beyond = given is not None and own is not None and given > own
        return f"context {given}: the checkpoint is made for {own} tokens; past them answers may get worse" * beyond

    def left_out(self) -> list[str]:
        """Names, for people, of the parts of the checkpoint that are not loaded."""
        notes = []
        if selected := self.model.config.selected:
            longer = f"which selects what attention reads in texts of more than {selected} tokens"
            notes.append(f"the indexer is not loaded, {longer}: longer texts are refused")
        if left_out := self.checkpoint.left_out:
            parts = ", ".join(f"{name} ({size / 2**20:.1f} MiB)" for name, size in left_out.items())
            notes.append(f"only the text model is loaded, without {parts}")
        if adapter := self.checkpoint.adapter:
            what = f"the adapter (LoRA) beside the weights, for {adapter}, is not applied"
            notes.append(f"{what}: name its folder by --adapter to use it")
        return notes

    def own_head(self) -> "_Weights":
        """The draft head in the model's own checkpoint."""
        options = self.precision.dtype, self.model.device, self.quant.name
        reader = partial(Weights, rounding=self.options.activations == "int8")
        head = MTP(self.checkpoint, type(self.model), *options, reader=reader).eval()
        return replace(self, model=head, tokenizer=None, template=None, adapters={})


def open_adapters(options: LoadOptions, checkpoint: Checkpoint) -> dict[str, Adapter]:
    """The adapters of a model, checked against its configuration. Raises CheckpointError, UsageError."""
    found = {}
    for name, (folder, scale) in options.scaled_adapters.items():
        family = family_of(checkpoint.architecture, str(checkpoint.folder / "config.json"))
        for option, used in (("shard", options.place.size > 1), ("compile", options.compile == "on")):
            if used:
                raise UsageError(f"adapters: they cannot be combined with {option}", remedy="merge the adapter")
        found[name] = Adapter.open(folder, scale)
        found[name].fitted(family.names, family.read(family.view(checkpoint).fields), family.base)
    return found


def load_models(options: LoadOptions, kv_memory: int | None, experts: int | None = None) -> dict[str, LoadedModel]:
    """Load models by role, with pools of equally many tokens; raises the errors of `Engine.load`.

    Args:
        options: the loading options; `memory` and `kv_memory` are not read.
        kv_memory: bytes of all pools; None: chosen by the free memory.
        experts: bytes of the target's experts that stay in memory; None: all.
    """
    device, shard = device_of(options), options.place
    check_compile(options.compile, device)
    check_same_bits()
    if shard.size > 1 and options.compile == "on":
        raise UsageError("compile: a model that processes share is not compiled", remedy="leave out --compile on")
    parts = {"target": _Weights.load(options.folder, options, device, in_part=experts is not None)}
    others = replace(options, adapters=(), context=None, chat_template=None)
    parts |= {role: _Weights.load(path, others, device) for role, path in options.folders.items() if role != "target"}
    if options.activations == "int8" and not rounds_rows(parts["target"].model):
        raise UsageError(
            "activations: int8 applies to quantised matrices, and this model has none",
            where=parts["target"].checkpoint.name,
            remedy="leave out --activations int8, or add --quant int8",
        )
    if experts is not None:
        held = keep_experts(parts["target"].model, experts, parts["target"].checkpoint.name)
    if options.drafts == "mtp":
        head = parts["target"].own_head()  # first: the demo's draft model is there without --draft
        if "draft" in parts:
            raise UsageError("drafts: mtp is the head of the model's own checkpoint", remedy="leave out --draft")
        parts["draft"] = head
    attach_heads(parts)
    caches = [(part.model.shape, dtype_of_cache(options.kv_dtype, part.precision.dtype)) for part in parts.values()]
    recorded = options.graphs == "on" and shard.size == 1
    pools = make_pools(caches, device, kv_memory, shard)
    models = {role: part.with_pool(pool, recorded) for (role, part), pool in zip(parts.items(), pools, strict=True)}
    target = models["target"]
    if experts is not None:
        target.capabilities = target.capabilities.noting(held)
    for model in models.values():
        if shard.size == 1:
            compile_ahead(model.runner)
    for role in list(models)[1:]:
        check_companion(role, target, models[role])
        notes = parts[role].left_out() if parts[role].checkpoint is not parts["target"].checkpoint else []
        target.capabilities = target.capabilities.noting(*(f"{role}: {note}" for note in notes))
    return models


def attach_heads(parts: Mapping[str, _Weights]) -> None:
    """Give the target its draft head, if there is one. Raises UsageError, CheckpointError."""
    for role, part in parts.items():
        if isinstance(part.model, DraftHead):
            if role != "draft":
                raise UsageError(
                    f"a draft head cannot be the {'model' if role == 'target' else role}: it drafts for one",
                    where=part.checkpoint.name,
                    remedy="give it by --draft, with --drafts model",
                )
            part.model.attach(parts["target"].model)


def check_companion(role: str, target: LoadedModel, other: LoadedModel) -> None:
    """Refuse a model that does not suit its role, "draft" or "reward", for another model. Raises UsageError."""
    if role == "reward":
        if not other.shape.scores:
            raise UsageError(
                "the reward model has no scalar head",
                where=other.name,
                remedy="give a checkpoint whose architecture ends in ForSequenceClassification",
            )
        return
    if isinstance(other.runner.model, DraftHead):
        return  # the head has become the target's
    if other.shape.scores:
        raise UsageError("the draft is a reward model, which generates no tokens", where=other.name)
    if target.tokenizer and other.tokenizer:
        differ = target.tokenizer.difference(other.tokenizer)
    elif target.shape.vocab_size != other.shape.vocab_size:
        differ = f"{target.shape.vocab_size} tokens in one, {other.shape.vocab_size} in the other"
    else:
        differ = ""
    if differ:
        raise UsageError(
            "the draft has another tokenizer than the model",
            where=f"{other.name}: {differ}",
            remedy="drafts must be made of the same tokens",
        )


def pick_device(name: str) -> torch.device:
    """The device of a name: cpu, cuda, or auto for the GPU if there is one. Raises UsageError for a GPU that is absent
    or unsupported."""
    if name == "cpu" or not torch.cuda.is_available():
        if name == "cuda":
            raise UsageError("device: this machine has no CUDA GPU that torch can use", remedy="use --device cpu")
        return torch.device("cpu")
    check_gpu()
    return torch.device("cuda")


def pick_dtype(name: str, checkpoint: Checkpoint, device: torch.device) -> Precision:
    """The dtype of a name, see `LoadOptions`, and its reason. Raises UsageError."""
    if name == "auto" and checkpoint.quantization is not None and device.type == "cpu":
        return Precision(torch.float32, "the checkpoint is quantised")
    if name == "auto":
        size = torch.float32.itemsize * sum(math.prod(tensor.shape) for tensor in checkpoint.tensors.values())
        return pick_precision(checkpoint.torch_dtype, device, size, total_memory())
    return explicit_precision(getattr(torch, name), device)


def dtype_of_cache(kv_dtype: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype of keys and values of a name, see `LoadOptions`; `dtype` is the model's."""
    return {"auto": dtype, "int8": torch.int8, "fp8": FP8}[kv_dtype]


def device_of(options: LoadOptions) -> torch.device:
    """The device that options name. Raises UsageError if its kernels do not serve them."""
    device = pick_device(options.device)
    check_quant(options.quant, device)
    if options.activations == "int8" and device.type != "cpu":
        raise UsageError("activations: a GPU does not round them", remedy="leave out --activations int8")
    if options.kv_dtype == "fp8" and device.type == "cpu":
        raise UsageError("kv_dtype: the kernels of a CPU do not read fp8", remedy="use --kv-dtype int8")
    return device


def check_quant(name: str, device: torch.device) -> None:
    """Refuse a quantisation that is unknown, or that this machine cannot run. Raises UsageError."""
    if name == "auto":
        return
    if not isinstance(name, str) or name not in FORMATS:
        raise UsageError(f"quant: expected {', '.join(FORMATS)} or auto, got {name!r}")
    if reason := FORMATS[name].why_not(device):
        halves = has_products(torch.bfloat16, device)
        remedy = "--dtype bfloat16 halves the weights" if halves else "--dtype float32 is the fastest here"
        raise UsageError(f"quant: {reason}", remedy=f"leave out --quant {name}; {remedy}")


def pick_quant(name: str, checkpoint: Checkpoint, dtype: torch.dtype, device: torch.device) -> FormatChoice:
    """The format of the matrices: that of a packed checkpoint, or the chosen one. Raises UsageError.

    Args:
        name: a key of `FORMATS`, or "auto": the fastest that is measured for a model that computes in `dtype`.
    """
    if checkpoint.quantization is not None and name not in ("none", "auto"):
        raise UsageError(
            f"quant: the checkpoint's weights are quantised already, got {name}",
            where=str(checkpoint.folder),
            remedy="leave out --quant: they are used as they are",
        )
    if checkpoint.packing is None:
        if name != "auto":
            return FormatChoice(name)
        own = checkpoint.torch_dtype
        return FormatChoice("none") if checkpoint.quantization else fastest_format(own, dtype, device)
    packed = checkpoint.packing.quant
    if packed not in FORMATS:
        raise CheckpointError(
            f"the matrices were packed in the format {packed!r:.80}, which this version does not know",
            where=str(checkpoint.folder),
            remedy=PACK_AGAIN,
        )
    if name not in ("none", "auto", packed):
        raise UsageError(
            f"quant: the matrices were packed without it, expected {packed}, got {name}",
            where=str(checkpoint.folder),
            remedy=f"pack the checkpoint with --quant {name}",
        )
    return FormatChoice(packed if FORMATS[packed].why_not(device) is None else "none")


def load_template(folder: str | Path, choice: str | Path | None, tokenizer: Tokenizer | None) -> ChatTemplate | None:
    """The chat template to use: a file, none, or the checkpoint's own."""
    if choice == "none" or tokenizer is None:
        return None
    return ChatTemplate.load(folder, tokenizer) if choice is None else ChatTemplate.from_file(choice, tokenizer)
