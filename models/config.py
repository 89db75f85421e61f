"""The computation of a decoder and the names of its tensors: all that most families differ in."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from kernels.experts.routing import Routing
from kernels.layout import CacheKind, DeltaKind, ScanKind
from models.checkpoint.fields import Fields
from models.quantized import EMBEDDING, LINEAR, TRANSPOSED
from models.rope import RopeConfig

ACTIVATIONS = {  # to the names of `kernels.rows.activation`
    **{name: name for name in ("silu", "relu", "gelu", "quick_gelu", "tanh")},
    **dict.fromkeys(("gelu_new", "gelu_pytorch_tanh", "gelu_fast"), "gelu_tanh"),
    "swish": "silu",
}
HEAD, SCORE = "lm_head", "score"
# Kinds of layers in `layer_types`, and what transformers called them before.
FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
OLD_KINDS = {"attention": FULL, "mamba": RECURRENT}


@dataclass(frozen=True)
class Experts:
    """A mixture of experts in the place of the MLP: gated MLPs, of which a token chooses a few.

    Args:
        count, width: of the experts, and inside each.
        routing: how tokens choose.
        layers: which layers have it; the others have an MLP.
        choice_bias: the choice, and nothing else, adds a vector to the scores of experts.
        shared_width: inside an expert that all tokens have besides; 0: there is none.
        shared_gate: a matrix makes the weight of the shared expert; if not, it weighs 1.
        bias: the matrices of experts, and the one that makes their scores, have biases.
    """

    count: int
    width: int
    routing: Routing
    layers: tuple[bool, ...]
    choice_bias: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    bias: bool = False


@dataclass(frozen=True)
class Recurrent:
    """Layers with a gated delta net in the place of attention, or with a selective scan of Mamba-2.

    Args:
        kind: the sizes, in all of them; those of a scan are a `ScanKind`.
        layers: which layers they are.
        interleaved: two matrices make what it reads, the heads of keys one after the other, each with its heads of
            values (Qwen3-Next); if not, four do, and heads of one kind lie together.
        bias, conv_bias: of a scan: the matrices around it have biases, and its convolution.
        steps: of a scan: the least step, and the greatest.
    """

    kind: DeltaKind
    layers: tuple[bool, ...]
    interleaved: bool = False
    bias: bool = False
    conv_bias: bool = False
    steps: tuple[float, float] = (0.0, math.inf)


@dataclass(frozen=True)
class Config:
    """Every option that affects the computation. The defaults are Llama's.

    Args:
        width, mlp_width, head_dim: of the stream between layers; inside an MLP; of a head.
        scores: a scalar head in place of the language model's.
        tied: the head's matrix is the embedding.
        rope: None: nothing is rotated; positions are learned, a row of a table each, or not seen at all.
        ropes: by layer, where layers differ; empty: `rope` in all.
        rms: norms are RMSNorms and not LayerNorms; affine: they have weights (and biases).
        plus_one: norms multiply by 1 + weight.
        norms: where the norms of attention and of the MLP stand: on their input, on their output before it is added to
            the stream, on the sum. One, or several.
        parallel: attention and MLP stand side by side and share the norm of the input.
        head_norms: queries and keys have norms of their own: "each" head by itself, or "all" heads as one row, or each
            by itself with a weight of its "own" and no bias.
        norms_last: they are normed after they are rotated, not before.
        query_gate: the matrix of queries makes as many gates: below the queries of each head, whose attention they let
            through by the logistic function.
        gated: the MLP multiplies its activated half with the other half.
        experts: what some layers have in the place of the MLP; None: all have an MLP.
        attention_bias, out_bias, mlp_bias, head_bias: the matrices of queries, keys and values, the one after
            attention (None: as those), those of the MLP and the head have biases.
        windows, scales: of attention, by layer; empty: none, and 1 / sqrt(head_dim).
        attention_cap: scores of attention become cap * tanh(score / cap).
        sinks: a logit of each query head joins the denominator of its softmax.
        taps: of the short convolution that a layer has in the place of attention, 0: it has attention; empty: all have.
        conv_bias: convolutions and the matrices around them have biases.
        conv_width: channels of convolutions; 0: `width` of them.
        recurrent: layers with a state in the place of keys and values; None: there are none.
        embedding_width: of the embedding, where matrices lead from it to `width` and back.
        embedding_scale: factor of the embedding; `rounded_scale`: it is rounded to the model's dtype first.
        residual_scale: factor of what attention and MLP add to the stream.
        logit_divisor, logit_cap: logits are divided by the first, then become cap * tanh(logit / cap).
    """

    vocab_size: int
    width: int
    mlp_width: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    tied: bool
    scores: bool
    max_positions: int
    rope: RopeConfig | None = None
    ropes: tuple[RopeConfig | None, ...] = ()
    rms: bool = True
    affine: bool = True
    plus_one: bool = False
    gated: bool = True
    experts: Experts | None = None
    norms: tuple[Literal["input", "output", "sum"], ...] = ("input",)
    parallel: bool = False
    final_norm: bool = True
    head_norms: Literal["", "each", "all", "own"] = ""
    norms_last: bool = False
    query_gate: bool = False
    attention_bias: bool = False
    out_bias: bool | None = None
    mlp_bias: bool = False
    head_bias: bool = False
    windows: tuple[int | None, ...] = ()
    scales: tuple[float, ...] = ()
    attention_cap: float | None = None
    sinks: bool = False
    taps: tuple[int, ...] = ()
    conv_bias: bool = False
    conv_width: int = 0
    recurrent: Recurrent | None = None
    embedding_width: int | None = None
    embedding_scale: float = 1.0
    rounded_scale: bool = False
    residual_scale: float = 1.0
    logit_divisor: float = 1.0
    logit_cap: float | None = None

    def tables(self) -> dict[RopeConfig, int]:
        """The rotary tables of the layers, numbered."""
        found = dict.fromkeys(rope for rope in self.ropes or (self.rope,) if rope is not None)
        return {rope: i for i, rope in enumerate(found)}

    def table(self, layer: int) -> int | None:
        """The number of the rotary table of a layer's queries and keys; None: they are not rotated."""
        rope = self.ropes[layer] if self.ropes else self.rope
        return None if rope is None else self.tables()[rope]

    def window(self, layer: int) -> int | None:
        """The window of a layer's attention; None: there is none."""
        return self.windows[layer] if self.windows else None

    def scale(self, layer: int) -> float:
        """The factor of the scores of a layer's attention."""
        return self.scales[layer] if self.scales else self.head_dim**-0.5

    def mixed(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts in the place of the MLP."""
        return self.experts is not None and self.experts.layers[layer]

    def recurs(self, layer: int) -> bool:
        """Whether a layer has a state in the place of keys and values."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        return not self.recurs(layer) and not (self.taps and self.taps[layer])

    def kept(self, layer: int) -> CacheKind | DeltaKind:
        """The rows that a layer keeps of each token, or the sizes of a recurrent layer."""
        if self.recurrent is not None and self.recurs(layer):
            return self.recurrent.kind
        if self.taps and self.taps[layer]:
            return CacheKind(1, self.conv_width or self.width, pair=False)
        return CacheKind(self.kv_heads, self.head_dim)


@dataclass(frozen=True)
class ModelShape:
    """The sizes that the engine needs to know of any model.

    Args:
        layers, kv_heads, head_dim, vocab_size: dimensions.
        max_positions: longest sequence the checkpoint is made for; None: no limit.
        steady_length: keys of sequences longer than this depend on how long the sequence was when they were computed,
            so that a longer prompt cannot take them over; None: they never do.
        scores: a scalar head: the model scores texts and generates none.
        switch_length: sequences longer than this use other rotary factors throughout (longrope), so that a path which
            grows past it is evaluated afresh; None: they never do.
        kept: what each layer keeps of a token, where some keep something else than keys and values of `kv_heads`
            heads of `head_dim`; empty: none does. Recurrent layers are all of one kind.
        ancestors: how many of a token's latest ancestors short convolutions read.
        output_width: of the rows that the head reads.
    """

    layers: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_positions: int | None
    steady_length: int | None = None
    scores: bool = False
    switch_length: int | None = None
    kept: tuple[CacheKind | DeltaKind, ...] = ()
    ancestors: int = 0
    output_width: int = 0

    @staticmethod
    def of(c: Config) -> "ModelShape":
        """The shape of a configuration."""
        reach = min((rope.reach(c.max_positions) for rope in c.tables()), default=c.max_positions)
        steady = min((rope.steady_length for rope in c.tables() if rope.steady_length is not None), default=None)
        switch = next((rope.switch_length for rope in c.tables() if rope.switch_length is not None), None)
        kept = tuple(map(c.kept, range(c.layers)))
        kept = kept if len({*kept}) > 1 else ()
        more = {"kept": kept, "ancestors": max(c.taps, default=1) - 1, "output_width": c.embedding_width or c.width}
        return ModelShape(c.layers, c.kv_heads, c.head_dim, c.vocab_size, reach, steady, c.scores, switch, **more)

    @property
    def groups(self) -> dict[CacheKind, int]:
        """How many layers keep what; keys and values of `kv_heads` heads of `head_dim` first."""
        first = CacheKind(self.kv_heads, self.head_dim)
        kept = Counter(kept for kept in self.kept if isinstance(kept, CacheKind))
        return {first: 0} | kept if self.kept else {first: self.layers}

    @property
    def delta(self) -> DeltaKind | None:
        """The kind of recurrent layers; None: there are none."""
        return next((kept for kept in self.kept if isinstance(kept, DeltaKind)), None)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row in all recurrent layers, which are float32 in every model."""
        return 0 if self.delta is None else 4 * self.delta.row * self.kept.count(self.delta)

    @property
    def state_bytes(self) -> int:
        """Bytes of a state in all recurrent layers."""
        return 0 if self.delta is None else 4 * math.prod(self.delta.state) * self.kept.count(self.delta)

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        """Bytes that one token's slot takes in all layers, in a cache of this dtype."""
        return sum(layers * kept.bytes(dtype) for kept, layers in self.groups.items())


@dataclass(frozen=True)
class Names:
    """The tensors in a checkpoint, without `.weight` and `.bias`; the defaults are Llama's.

    Args:
        layer: begins the names of a layer's parts, {} is its number.
        conv: the matrix before a short convolution, its own weights, and the matrix after it.
        recurrent_in: the matrices before a gated delta net, two of an interleaved one, or the one before a scan; its
            weights `delta_taps`, `delta_decay`, `delta_bias`, `delta_norm`, those of a scan alone `scan_shift` and
            `scan_skip`, and the matrix after it, `recurrent_out`.
        attention_norm, mlp_norm: on the input or on the sum, see `Config.norms`.
        attention_out_norm, mlp_out_norm: on the output.
        q_norm, k_norm: of heads; where each has its own, the place of its number is {}.
        qkv, up: one stored matrix or several, which lie below each other here.
        sinks: a logit of each head.
        router, choice_bias: of a mixture of experts: the matrix that makes the scores of experts, and a vector.
        expert: its matrices, those of `up` before the last, the place of its number is {}.
        shared, shared_gate: the same of the shared expert, and the matrix of its weight.
        positions: the table of learned positions; position p has row p + `offset`.
        project: the matrices between `embedding_width` and `width`, in and out.
        transposed: the layers' matrices are stored [in, out].
    """

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    sinks: str = "self_attn.sinks"
    conv: tuple[str, str, str] = ("conv.in_proj", "conv.conv", "conv.out_proj")
    recurrent_in: tuple[str, ...] = (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    )
    delta_taps: str = "linear_attn.conv1d.weight"
    delta_decay: str = "linear_attn.A_log"
    delta_bias: str = "linear_attn.dt_bias"
    delta_norm: str = "linear_attn.norm.weight"
    scan_shift: str = "mamba.conv1d.bias"
    scan_skip: str = "mamba.D"
    recurrent_out: str = "linear_attn.out_proj"
    attention_out_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    router: str = "mlp.gate"
    choice_bias: str = "mlp.expert_bias"
    expert: tuple[str, str, str] = (
        "mlp.experts.{}.gate_proj",
        "mlp.experts.{}.up_proj",
        "mlp.experts.{}.down_proj",
    )
    shared: tuple[str, ...] = (
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
        "mlp.shared_expert.down_proj",
    )
    shared_gate: str = "mlp.shared_expert_gate"
    norm: str = "model.norm"
    positions: str = ""
    offset: int = 0
    project: tuple[str, str] = ("", "")
    transposed: bool = False

    def tensors(self, c: Config) -> dict[str, tuple[int, ...]]:
        """Names and shapes of everything that a checkpoint of this configuration holds."""
        embedding_width = c.embedding_width or c.width
        shapes: dict[str, tuple[int, ...]] = {f"{self.embedding}.weight": (c.vocab_size, embedding_width)}
        if self.positions:
            shapes[f"{self.positions}.weight"] = (c.max_positions + self.offset, c.width)
        if c.embedding_width:
            into, out_of = self.project
            shapes |= {f"{into}.weight": (c.width, embedding_width), f"{out_of}.weight": (embedding_width, c.width)}

        def add(name: str, shape: tuple[int, ...], bias: bool) -> None:
            shapes[f"{name}.weight"] = shape[::-1] if self.transposed else shape
            if bias:
                shapes[f"{name}.bias"] = shape[:1]

        q, kv, up = c.heads * c.head_dim, c.kv_heads * c.head_dim, (2 if c.gated else 1) * c.mlp_width
        queries = (2 if c.query_gate else 1) * q
        qkv = (queries, kv, kv) if len(self.qkv) == 3 else (queries + 2 * kv,)
        for i in range(c.layers):
            layer = self.layer.format(i)
            for name, size in self.norms(c).items():
                if c.affine:
                    add(layer + name, (size,), not c.rms)
            for name, size in self.norms_of_heads(c, i).items():
                if c.affine:
                    add(layer + name, (size,), not c.rms and c.head_norms != "own")
            if c.taps and (taps := c.taps[i]):
                shapes_of = (3 * c.width, c.width), (c.width, 1, taps), (c.width, c.width)
                for name, shape in zip(self.conv, shapes_of, strict=True):
                    add(layer + name, shape, c.conv_bias)
            elif c.recurrent is not None and c.recurs(i):
                made = self.scan if isinstance(c.recurrent.kind, ScanKind) else self.delta
                shapes |= {layer + name: shape for name, shape in made(c, c.recurrent).items()}
            else:
                for name, outs in zip(self.qkv, qkv, strict=True):
                    add(layer + name, (outs, c.width), c.attention_bias)
                add(layer + self.out, (c.width, q), c.attention_bias if c.out_bias is None else c.out_bias)
                if c.sinks:
                    shapes[layer + self.sinks] = (c.heads,)
            if c.mixed(i):
                shapes |= {layer + name: shape for name, shape in self.mixture(c).items()}
                continue
            for name in self.up:
                add(layer + name, (up // len(self.up), c.width), c.mlp_bias)
            add(layer + self.down, (c.width, c.mlp_width), c.mlp_bias)
        if c.final_norm and c.affine:
            add(self.norm, (c.width,), not c.rms)
        if c.scores:
            return shapes | {f"{SCORE}.weight": (1, embedding_width)}
        bias = {f"{HEAD}.bias": (c.vocab_size,)} if c.head_bias else {}
        return shapes | {f"{HEAD}.weight": (c.vocab_size, embedding_width)} | bias

    def delta(self, c: Config, recurrent: Recurrent) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of a gated delta net, after `layer`."""
        kind, (H, _, V) = recurrent.kind, recurrent.kind.state
        outs = kind.channels + H * V, 2 * H
        if not recurrent.interleaved:
            outs = kind.channels, H * V, H, H
        matrices = {f"{name}.weight": (out, c.width) for name, out in zip(self.recurrent_in, outs, strict=True)}
        vectors = {self.delta_taps: (kind.channels, 1, kind.taps), self.delta_norm: (V,)}
        vectors |= dict.fromkeys((self.delta_decay, self.delta_bias), (H,))
        return matrices | vectors | {f"{self.recurrent_out}.weight": (c.width, H * V)}

    def scan(self, c: Config, recurrent: Recurrent) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of a selective scan, after `layer`."""
        kind, (H, _, V), [into] = recurrent.kind, recurrent.kind.state, self.recurrent_in
        shapes: dict[str, tuple[int, ...]] = {f"{into}.weight": (kind.width, c.width)}
        shapes[f"{self.recurrent_out}.weight"] = c.width, H * V
        if recurrent.bias:
            shapes |= {f"{into}.bias": (kind.width,), f"{self.recurrent_out}.bias": (c.width,)}
        if recurrent.conv_bias:
            shapes[self.scan_shift] = (kind.channels,)
        shapes |= dict.fromkeys((self.delta_decay, self.delta_bias, self.scan_skip), (H,))
        return shapes | {self.delta_taps: (kind.channels, 1, kind.taps), self.delta_norm: (H * V,)}

    def mixture(self, c: Config) -> dict[str, tuple[int, ...]]:
        """Names and shapes of the tensors of a mixture of experts, after `layer`."""
        if (mixed := c.experts) is None:
            return {}
        shapes: dict[str, tuple[int, ...]] = {f"{self.router}.weight": (mixed.count, c.width)}
        if mixed.choice_bias:
            shapes[self.choice_bias] = (mixed.count,)
        every = [(tuple(name.format(i) for name in self.expert), mixed.width) for i in range(mixed.count)]
        for (*up, down), width in every + ([(self.shared, mixed.shared_width)] if mixed.shared_width else []):
            shapes |= {f"{name}.weight": (2 * width // len(up), c.width) for name in up}
            shapes[f"{down}.weight"] = c.width, width
        if mixed.bias:
            shapes |= {f"{name.removesuffix('.weight')}.bias": shape[:1] for name, shape in shapes.items()}
        return shapes | ({f"{self.shared_gate}.weight": (1, c.width)} if mixed.shared_gate else {})

    def kinds(self, c: Config) -> dict[str, str]:
        """The classes in transformers of linear layers and the token embedding, by the names of their weights."""
        tables = (f"{self.embedding}.weight", f"{self.positions}.weight")
        matrices = (name for name, shape in self.tensors(c).items() if len(shape) == 2 and name not in tables)
        layer = self.layer.partition("{")[0]
        embedding = {f"{self.embedding}.weight": EMBEDDING}
        return embedding | {
            name: TRANSPOSED if self.transposed and name.startswith(layer) else LINEAR for name in matrices
        }

    def norms(self, c: Config) -> dict[str, int]:
        """The norms of a layer but for those of heads, and the sizes of their vectors."""
        names = []
        if {"input", "sum"} & {*c.norms}:
            names += [self.attention_norm] if c.parallel else [self.attention_norm, self.mlp_norm]
        if "output" in c.norms:
            names += [self.attention_out_norm, self.mlp_out_norm]
        return dict.fromkeys(names, c.width)

    def norms_of_heads(self, c: Config, layer: int) -> dict[str, int]:
        """The norms of queries and keys of a layer, and the sizes of their vectors."""
        if not c.head_norms or not c.attends(layer):
            return {}
        both = ((self.q_norm, c.heads), (self.k_norm, c.kv_heads))
        if c.head_norms == "own":
            return {name.format(h): c.head_dim for name, heads in both for h in range(heads)}
        return {name: (heads if c.head_norms == "all" else 1) * c.head_dim for name, heads in both}


def architecture(fields: Fields) -> str:
    """The first of the config's architectures, checked by `Checkpoint.architecture`."""
    return str((fields.config.get("architectures") or [""])[0])


def common(fields: Fields, *, activation: str, default: str, tied: bool) -> dict[str, Any]:
    """Arguments of a `Config` that every family reads alike.

    Args:
        activation, default: the field of the MLP's activation, and its value where it is absent.
        tied: the value of `tie_word_embeddings` where it is absent.
    """
    return {
        "vocab_size": fields.int("vocab_size"),
        "activation": ACTIVATIONS[fields.choice(activation, set(ACTIVATIONS), default=default)],
        "tied": fields.bool("tie_word_embeddings", default=tied),
        # A `...ForSequenceClassification` is a reward model, which scores the text so far.
        "scores": architecture(fields).endswith("ForSequenceClassification"),
    }


def rotary(
    fields: Fields,
    *,
    positions: int,
    activation: str = "silu",
    activation_field: str = "hidden_act",
    kv_heads: int | None = None,
    head_dim: int | None = None,
    mlp_width: int | None = None,
    tied: bool = False,
    one_rope: bool = True,
    **rope: Any,
) -> dict[str, Any]:
    """Arguments of a `Config` that families with rotary embeddings read alike.

    Args:
        positions, activation, kv_heads, head_dim, tied: values of absent fields; None: as many heads as queries have,
            and an even share of the width.
        activation_field: the name of the field.
        one_rope: all layers share a rotary table; if not, `Config.ropes` is for the caller to read.
        mlp_width: of a family that has another field for it than `intermediate_size`.
        rope: see `RopeConfig.from_hf`.

    Raises:
        CheckpointError: naming the field.
    """
    width = fields.int("hidden_size")
    heads = fields.int("num_attention_heads", high=2**14)
    shared = fields.int("num_key_value_heads", default=kv_heads or heads, high=2**14)
    if heads % shared:
        raise fields.error("num_key_value_heads", f"a divisor of num_attention_heads {heads}")
    if not head_dim and fields.config.get("head_dim") is None and width % heads:
        raise fields.error("hidden_size", f"a multiple of num_attention_heads {heads}")
    size = fields.int("head_dim", default=head_dim or width // heads, high=2**14)
    if size % 2 and "partial" not in rope:
        raise fields.error("head_dim", "an even number")
    max_positions = fields.int("max_position_embeddings", default=positions, high=2**31)
    return common(fields, activation=activation_field, default=activation, tied=tied) | {
        "width": width,
        "heads": heads,
        "kv_heads": shared,
        "head_dim": size,
        "mlp_width": mlp_width or fields.int("intermediate_size"),
        "layers": fields.int("num_hidden_layers", high=2**14),
        "max_positions": max_positions,
        "rope": RopeConfig.from_hf(fields, size, max_positions, **rope) if one_rope else None,
    }


def experts(
    fields: Fields, *, count: int, chosen: int, width: int, layers: Sequence[bool], scores: str = "softmax", **more: Any
) -> Experts | None:
    """`Config.experts` of the fields that families share; None: no layer has any.

    Args:
        count, chosen: of experts, and of those of a token, where the fields are absent.
        width, layers: see `Experts`.
        scores: see `Routing`.
        more: of `Routing` and of `Experts`.

    Raises:
        CheckpointError: more experts are chosen than there are.
    """
    if not any(layers):
        return None
    name = "num_experts" if fields.config.get("num_experts") is not None else "num_local_experts"
    count = fields.int(name, default=count, high=2**12)
    chosen = fields.int("num_experts_per_tok", default=chosen, high=2**12)
    if chosen > count:
        raise fields.error("num_experts_per_tok", f"at most {name}, which is {count},")
    rules = {field: more.pop(field) for field in Routing._fields if field in more}
    return Experts(count, width, Routing(chosen, scores, **rules), tuple(layers), **more)


def layer_types(fields: Fields, default: Sequence[str], kinds: Sequence[str] = (FULL, SLIDING)) -> tuple[str, ...]:
    """The kind of each layer, by the field `layer_types`, or `default` where that is absent.

    Raises:
        CheckpointError: another number of layers, or a kind that is not one of `kinds`.
    """
    found = fields.config.get("layer_types") or list(default)
    if type(found) is list:
        found = [OLD_KINDS.get(kind, kind) if type(kind) is str else kind for kind in found]
    if type(found) is not list or len(found) != len(default) or any(kind not in kinds for kind in found):
        raise fields.error("layer_types", f"{len(default)} of {' and '.join(kinds)}")
    return tuple(found)


def windows(fields: Fields, kinds: Sequence[str], window: int | None) -> tuple[int | None, ...]:
    """`Config.windows` of layers of these kinds: sliding ones have the window of the field `sliding_window`.

    Raises:
        CheckpointError: a layer slides, and there is no window.
    """
    if SLIDING in kinds and window is None:
        raise fields.error("sliding_window", "a window, as layer_types has layers of sliding attention")
    return tuple(window if kind == SLIDING else None for kind in kinds)


def ropes(
    fields: Fields, kinds: Sequence[str], head_dim: int, max_positions: int, bases: Mapping[str, tuple[str, float]]
) -> tuple[RopeConfig, ...]:
    """`Config.ropes` of layers of these kinds, whose rotary tables differ.

    `rope_parameters` of transformers 5 has an object for each kind; before, `rope_scaling` was of full attention, and
    each kind had a field of its own for the base.

    Args:
        bases: by kind, the name of that field, and the base where there is none.

    Raises:
        CheckpointError: naming the field.
    """
    nested, tables = fields.sub("rope_parameters") or Fields({}, fields.file), {}
    for kind, (name, base) in bases.items():
        stretched = fields.sub("rope_scaling") if kind == FULL else None
        found = {**getattr(nested.sub(kind), "config", {}), **getattr(stretched, "config", {})}
        if found.get("rope_theta") is None:
            found["rope_theta"] = fields.float(name, base, low=1.0, high=1e15) if name else base
        part = Fields({"rope_parameters": found}, fields.file)
        tables[kind] = RopeConfig.from_hf(part, head_dim, max_positions)
    if len({table.switch_length for table in tables.values()} - {None}) > 1:
        raise fields.error("rope_parameters", "one original_max_position_embeddings of longrope for all layers")
    return tuple(tables[kind] for kind in kinds)
