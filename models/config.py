"""The computation of a decoder; together with tensor names (`models.names`), everything in which most families
differ."""

import math
from dataclasses import dataclass
from typing import Literal

from kernels.experts.routing import Routing
from kernels.layout import CacheKind, DeltaKind
from models.rope import RopeConfig

# Kinds of layers in `layer_types`.
FULL, SLIDING, RECURRENT = "full_attention", "sliding_attention", "linear_attention"
Placement = Literal["input", "stream", "output", "sum"]  # of the norms of attention and MLP
XIELU = "xielu"  # an activation whose parameters differ from layer to layer, see `kernels.rows.xielu`


@dataclass(frozen=True)
class Experts:
    """A mixture of experts, in place of the MLP or in parallel with it: each expert is an MLP, gated if the other MLPs
    are, and each token chooses a few of them.

    Args:
        count, width: the number of experts, and the inner width of each.
        routing: how tokens choose.
        layers: which layers have it; the others have an MLP.
        factor: factor of the sum of the chosen experts and the shared one.
        beside_mlp: these layers also have an MLP, which reads the same stream; MLP and experts each have their own
            norms on both sides, and so has the sum. The router reads the normed stream times a vector, and the weights
            of chosen experts are multiplied by the elements of another.
        choice_bias: a vector is added to the scores of experts for the choice, but not for the weights.
        shared_width: inner width of an expert that all tokens use in addition; 0: there is none.
        shared_gate: a matrix produces the weight of the shared expert; otherwise its weight is 1.
        bias: the matrices of the experts and the router have biases.
        normed: a norm follows the sum of the chosen experts and the shared one.
        latent: experts read and write rows of this width, which a matrix makes of what the router and the shared expert
            read, and another leads back; 0: they read the same.
    """

    count: int
    width: int
    routing: Routing
    layers: tuple[bool, ...]
    choice_bias: bool = False
    shared_width: int = 0
    shared_gate: bool = False
    bias: bool = False
    factor: float = 1.0
    beside_mlp: bool = False
    normed: bool = False
    latent: int = 0


@dataclass(frozen=True)
class Recurrent:
    """Layers with a gated delta net, a Mamba-2 selective scan or Mamba's scan by channels, instead of attention or in
    parallel with it.

    Args:
        kind: the sizes, equal in all of these layers; a `ScanKind` for scans, a `ChannelKind` for scans by
            channels.
        layers: whether each layer is one of them.
        interleaved: two matrices produce its inputs, key head by key head, each with its value heads (Qwen3-Next);
            otherwise one, four or six matrices do, with the heads of each kind together.
        most: (gated delta nets) strengths lie between 0 and this number.
        bound: (gated delta nets) logarithms of decays lie between this number and 0; 0: they have no bound.
        sigmoid: (gated delta nets) gates are multiplied by the logistic function of their inputs; otherwise by silu.
        eps: of their own norms; None: as of the other norms.
        norms: `Config.norms` of these layers; empty: as of the others.
        bias, conv_bias: (scans of both kinds) whether the matrices around the scan, and its convolution, have biases.
        steps: (scans) the smallest and the largest step.
        beside: (scans) these layers also have attention, which reads the same input; both outputs are added.
        normed: (scans) a norm follows the gates.
        factors: (scans) of its inputs: gates, x, B, C, and those of steps.
        rank: (scans by channels) the number of elements from which a matrix computes the inputs of steps; (gated delta
            nets) those of each of two rows, from which matrices compute gates and inputs of decays; 0: these are
            computed from the stream.
        part_norms: (scans by channels) these elements, B and C have RMSNorms, with their "own" weights or "plain" ones
            without; "": they have none.
    """

    kind: DeltaKind
    layers: tuple[bool, ...]
    interleaved: bool = False
    bias: bool = False
    conv_bias: bool = False
    steps: tuple[float, float] = (0.0, math.inf)
    most: float = 1.0
    bound: float = 0.0
    sigmoid: bool = False
    eps: float | None = None
    norms: tuple[Placement, ...] = ()
    beside: bool = False
    normed: bool = True
    factors: tuple[float, ...] = (1.0,) * 5
    rank: int = 0
    part_norms: Literal["", "plain", "own"] = ""


@dataclass(frozen=True)
class Latent:
    """Multi-head latent attention (DeepSeek-AI, 2024, "DeepSeek-V2", section 2.1): the keys and values of all heads are
    computed from one row per token, the latent, and a key that all heads share.

    All `Config.heads` read one head of keys, whose `Config.head_dim` elements are the `rotated` ones and then the
    latent.

    Args:
        rank: elements of the latent.
        query_rank: elements of the row from which queries are computed; 0: they are computed from the stream.
        plain, rotated, value: the number of unrotated and of rotated elements of a query, and of elements of a head's
            values.
        interleaved: elements that are rotated with each other lie side by side.
        split: separate matrices produce keys and values; otherwise one does, with keys and values of each head in turn.
        growth: a rotary table that only scales queries, by way of the row that computes them; None: none does.
    """

    rank: int
    query_rank: int
    plain: int
    rotated: int
    value: int
    interleaved: bool = True
    split: bool = False
    growth: RopeConfig | None = None


@dataclass(frozen=True)
class ShortConvs:
    """Layers with a gated short convolution instead of attention.

    Args:
        taps: number of taps of the convolution, by layer; 0: the layer has attention.
        width: number of channels.
        bias: whether convolutions and the matrices around them have biases.
    """

    taps: tuple[int, ...]
    width: int
    bias: bool = False


@dataclass(frozen=True)
class Uneven:
    """Layers that differ in their heads and MLPs, or read other layers' keys and values; every argument has an entry
    per layer.

    Args:
        kv_sizes: number of key/value heads, and elements of a head.
        keys_from: the layer whose keys and values this layer reads: itself or an earlier one.
        keys_as_values: whether one matrix produces both keys and values, before their norms.
        mlp_widths: inner width of the MLP.
        heads: number of query heads; empty: `Config.heads` in all layers.
    """

    kv_sizes: tuple[tuple[int, int], ...]
    keys_from: tuple[int, ...]
    keys_as_values: tuple[bool, ...]
    mlp_widths: tuple[int, ...]
    heads: tuple[int, ...] = ()


@dataclass(frozen=True)
class LayerInputs:
    """Per-layer embeddings (Gemma Team, 2025, "Gemma 3n"): for each token and layer, a row of a table plus a normed
    projection of the token's embedding.

    Args:
        width: elements of a layer's row.
        vocab_size: rows of the table; later tokens use the first row.
        scale: factor of the table's rows, rounded to the model's dtype.
        made_scale: factor of the projection, before the norm.
        sum_scale: factor of the sum.
    """

    width: int
    vocab_size: int
    scale: float
    made_scale: float
    sum_scale: float = 2.0**-0.5


@dataclass(frozen=True)
class Streams:
    """Several residual streams (AltUp; Baykal et al., 2023, "Alternating updates for efficient transformers"): each
    layer predicts all of them, computes one, and corrects all by its change of that one.

    Args:
        count: the number of streams.
        active: the number of the stream that layers compute.
        scaled: per-layer embeddings weight that stream times a vector of the layer.
    """

    count: int
    active: int
    scaled: bool


@dataclass(frozen=True)
class SharedBlocks:
    """Blocks of attention and an MLP that several scans share (Zamba2): a block reads the stream beside the embedding,
    and its output, which a matrix of the layer multiplies, is added to what the layer's scan reads.

    Args:
        owners: by layer, the layer whose names the tensors of its block have; None: the layer uses no block.
        rank: elements between the two matrices of a layer whose output is added to that of the MLP's first matrix.
        adapted: layers have such matrices for queries, keys and values too.
    """

    owners: tuple[int | None, ...]
    rank: int
    adapted: bool = False

    def use(self, layer: int) -> int:
        """Return the number of layers before one that use a block."""
        return sum(owner is not None for owner in self.owners[:layer])


@dataclass(frozen=True)
class OutputFactors:
    """Factors of the outputs of a layer's parts before they are added to the stream.

    Args:
        attention, scan, mlp: the factor of each part.
    """

    attention: float = 1.0
    scan: float = 1.0
    mlp: float = 1.0


@dataclass(frozen=True)
class Config:
    """Every option that affects the computation. The defaults are Llama's.

    Args:
        width, mlp_width, head_dim: elements of the residual stream, inside an MLP, and of a head.
        scores: the model has a scalar head instead of a language model's.
        tied: the head's matrix is the embedding matrix.
        rope: the rotary embeddings; None: positions are learned (rows of a table) or not used at all.
        ropes: `rope` by layer, if layers differ; empty: all layers have `rope`.
        rms: norms are RMSNorms and not LayerNorms; affine: they have weights; norm_bias: LayerNorms have biases too.
        plus_one: norms multiply by 1 + weight; "layers": those of layers, but not the final one.
        norms: the positions of the norms of attention and MLP: on the input, on the stream itself before it is read, on
            the output before it is added to the stream, on the sum. One or several.
        out_norm_eps: epsilon of norms on outputs; None: that of the others.
        parallel: attention and MLP run in parallel, and their input norm is "shared" or each has its "own"; "": the MLP
            reads the stream after attention.
        head_norms: norms on queries and keys: "each" head separately, "all" heads as one row, each head with its "own"
            weights and no bias, or each by a "plain" RMSNorm without weights.
        first_norm: the attention of the first layer has a norm on its input, as in other layers.
        normed: which layers have head norms; empty: all.
        value_norms: values are normed head by head, by RMSNorms without weights.
        interleaved: elements of a head that are rotated with each other lie side by side.
        grouped_qkv: one matrix produces queries, keys and values, grouped by key/value "head", or queries, values and
            keys of the heads of each of four "quarters"; "": they lie below each other.
        norms_last: head norms are applied after the rotation, not before.
        clip: queries, keys and values lie between -clip and clip, after head norms and before the rotation.
        query_gate: attention's output is multiplied by the sigmoid of gates, which the query matrix produces "below"
            the queries of each head, or a separate matrix ("apart").
        head_gates: each head of attention's output is multiplied by the sigmoid, or "softplus", of a matrix's output;
            "elements": each element is multiplied by the softplus of an output.
        sub_norms: the inputs of the last matrices of attention and of the MLP are normed.
        activation: the MLP's, see `kernels.rows.activation`; or `XIELU`, if the MLP is not gated.
        gated: the MLP multiplies its activated half by the other half.
        experts: the mixture of experts that some layers have instead of the MLP; None: all have an MLP.
        attention_bias, out_bias, mlp_bias, head_bias: biases on the query, key and value matrices, on the output
            projection (None: as `attention_bias`; "last": of the last layer only), on the MLP and on the head.
        head_dense: activation of a matrix before the head, with a norm after it, and `head_dense_bias`; "": none.
        windows, scales: attention's windows and score factors by layer; empty: no windows, and 1 / sqrt(head_dim).
        chunks: a token sees the chunk of positions that it is in, as long as the window, and not a window that moves.
        attention_cap: scores of attention become cap * tanh(score / cap).
        sinks: a logit of each query head joins the denominator of its softmax.
        slopes: of each query head, whose scores fall by this number for each position between query and key (ALiBi);
            empty: they do not. `coarse_slopes`: slopes times positions are rounded to bfloat16, and scaled like dot
            products.
        convs: layers with a short convolution instead of attention; None: there are none.
        recurrent: layers with a recurrent state, instead of keys and values or beside them; None: there are none.
        shared: blocks that scans share; None: there are none.
        latent: latent attention; None: attention has key and value matrices.
        selected: the number of tokens that an indexer selects for attention to read. The indexer is not computed, so no
            sequence may be longer: up to this length it selects all. None: there is no indexer.
        embedding_rows: of the embedding, if those after the vocabulary's have no logits: they belong to tokens that no
            text has. None: as many as the vocabulary.
        embedding_width: width of the embedding, if projections lead from it to `width` and back.
        embedding_norm: the embedding is normed, by a norm without weights if `Names` has no name for it.
        embedding_scale: factor of the embedding; `rounded_scale`: it is first rounded to the model's dtype.
        residual_scale: factor of what attention and MLP add to the stream; `output_factors`: others, of each part.
        mlp_scale: factor of the rows that the activation of the MLP reads, of both halves if it is gated.
        alone: by layer, the only part that it has: "attention", or what stands in its place, or an "mlp"; or it
            has "both" or "none"; empty: all layers have both.
        uneven: the heads and MLPs of layers that differ; None: all have `kv_heads` of `head_dim`, and `mlp_width`.
        layer_inputs: per-layer embeddings; None: none.
        streams: several residual streams; None: there is one. Per-layer embeddings are then added to all but the first.
        laurel: rank of a learned residual (LAuReL; Menghani et al., 2024, "LAuReL: Learned augmented residual layer")
            beside attention: two matrices and a norm; the sum is divided by the square root of 2. 0: there is none.
        sparsity: by layer, `factor` of `kernels.rows.sparsify`, for gates of the MLP; None, empty: they are not sparse.
        layer_scales: as its last step, each layer multiplies the stream by its own scalar.
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
    norm_bias: bool = True
    plus_one: bool | Literal["layers"] = False
    gated: bool = True
    experts: Experts | None = None
    norms: tuple[Placement, ...] = ("input",)
    out_norm_eps: float | None = None
    parallel: Literal["", "shared", "own"] = ""
    final_norm: bool = True
    first_norm: bool = True
    head_norms: Literal["", "each", "all", "own", "plain"] = ""
    normed: tuple[bool, ...] = ()
    value_norms: bool = False
    norms_last: bool = False
    interleaved: bool = False
    grouped_qkv: Literal["", "head", "quarters"] = ""
    clip: float | None = None
    query_gate: Literal["", "below", "apart"] = ""
    head_gates: bool | Literal["softplus", "elements"] = False
    sub_norms: bool = False
    attention_bias: bool = False
    out_bias: bool | Literal["last"] | None = None
    mlp_bias: bool = False
    head_bias: bool = False
    head_dense: str = ""
    head_dense_bias: bool = False
    windows: tuple[int | None, ...] = ()
    scales: tuple[float, ...] = ()
    chunks: bool = False
    attention_cap: float | None = None
    sinks: bool = False
    slopes: tuple[float, ...] = ()
    coarse_slopes: bool = False
    convs: ShortConvs | None = None
    recurrent: Recurrent | None = None
    shared: SharedBlocks | None = None
    latent: Latent | None = None
    selected: int | None = None
    embedding_rows: int | None = None
    embedding_width: int | None = None
    embedding_norm: bool = False
    embedding_scale: float = 1.0
    rounded_scale: bool = False
    residual_scale: float = 1.0
    output_factors: OutputFactors = OutputFactors()
    mlp_scale: float = 1.0
    alone: tuple[Literal["attention", "mlp", "none", "both"], ...] = ()
    uneven: Uneven | None = None
    layer_inputs: LayerInputs | None = None
    streams: Streams | None = None
    laurel: int = 0
    sparsity: tuple[float | None, ...] = ()
    layer_scales: bool = False
    logit_divisor: float = 1.0
    logit_cap: float | None = None

    def tables(self) -> dict[RopeConfig, int]:
        """Number the rotary tables of the layers."""
        ropes = (self.ropes or (self.rope,)) if any(map(self.attends, range(self.layers))) else ()
        ropes = *ropes, self.latent and self.latent.growth
        return {rope: i for i, rope in enumerate(dict.fromkeys(rope for rope in ropes if rope is not None))}

    def table(self, layer: int) -> int | None:
        """The number of the rotary table for a layer's queries and keys; None: no rotary embeddings."""
        rope = self.ropes[layer] if self.ropes else self.rope
        return None if rope is None else self.tables()[rope]

    def window(self, layer: int) -> int | None:
        """Return the window of a layer's attention; None: no window."""
        return self.windows[layer] if self.windows else None

    def scale(self, layer: int) -> float:
        """Return the factor of the scores of a layer's attention."""
        return self.scales[layer] if self.scales else self.kv_size(layer)[1] ** -0.5

    def norms_heads(self, layer: int) -> bool:
        """Whether a layer has norms of queries and keys."""
        return self.head_norms != "" and (not self.normed or self.normed[layer])

    def kv_size(self, layer: int) -> tuple[int, int]:
        """Return the number of key/value heads of a layer, and the elements of a head."""
        return self.uneven.kv_sizes[layer] if self.uneven else (self.kv_heads, self.head_dim)

    def has_out_bias(self, layer: int) -> bool:
        """Whether the output projection of a layer's attention has a bias."""
        if self.out_bias == "last":
            return layer == self.layers - 1
        return self.attention_bias if self.out_bias is None else self.out_bias

    def query_heads(self, layer: int) -> int:
        """Return the number of query heads of a layer."""
        return self.uneven.heads[layer] if self.uneven and self.uneven.heads else self.heads

    def reads(self, layer: int) -> int:
        """Return the layer whose keys and values this layer reads."""
        return self.uneven.keys_from[layer] if self.uneven else layer

    def values_are_keys(self, layer: int) -> bool:
        """Whether one matrix produces both keys and values of a layer."""
        return self.uneven is not None and self.uneven.keys_as_values[layer]

    def inner(self, layer: int) -> int:
        """Return the inner width of a layer's MLP."""
        return self.uneven.mlp_widths[layer] if self.uneven else self.mlp_width

    def mixed(self, layer: int) -> bool:
        """Whether a layer has a mixture of experts."""
        return self.experts is not None and self.experts.layers[layer]

    def recurs(self, layer: int) -> bool:
        """Whether a layer has a recurrent state."""
        return self.recurrent is not None and self.recurrent.layers[layer]

    def convolves(self, layer: int) -> bool:
        """Whether a layer has a short convolution."""
        return self.convs is not None and self.convs.taps[layer] > 0

    def norms_of(self, layer: int) -> tuple[Placement, ...]:
        """The positions of the norms of a layer."""
        return (self.recurrent.norms if self.recurrent and self.recurs(layer) else ()) or self.norms

    def attends(self, layer: int) -> bool:
        """Whether a layer has attention."""
        recurs = self.recurs(layer) and not self.has_both(layer)
        return self.has("attention", layer) and not recurs and not self.convolves(layer)

    @property
    def beside(self) -> bool:
        """Whether recurrent layers, or some of them, also have attention."""
        return self.recurrent is not None and (self.recurrent.beside or self.shared is not None)

    def has_both(self, layer: int) -> bool:
        """Whether a recurrent layer also has attention."""
        return self.beside and (self.shared is None or self.shared.owners[layer] is not None)

    def place(self, layer: int) -> int:
        """The place of what a recurrent layer keeps in `ModelShape.kept`."""
        return layer + self.layers * self.beside

    def has(self, part: Literal["attention", "mlp"], layer: int) -> bool:
        """Whether a layer has this part; replacements of attention count as attention."""
        return not self.alone or self.alone[layer] in (part, "both")

    def kept(self, layer: int) -> CacheKind | DeltaKind | None:
        """The rows that a layer keeps of each token, or the sizes of a recurrent layer if none has attention; None: it
        keeps nothing here."""
        if not self.has("attention", layer):
            return None
        if self.recurrent is not None and self.recurs(layer) and not self.has_both(layer):
            return None if self.beside else self.recurrent.kind
        if self.convs is not None and self.convolves(layer):
            return CacheKind(1, self.convs.width, pair=False)
        return CacheKind(*self.kv_size(layer), shared=self.latent is not None)
