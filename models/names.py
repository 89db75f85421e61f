"""The names of a decoder's tensors in a checkpoint, with their shapes."""

from dataclasses import dataclass

from kernels.layout import ChannelKind, ScanKind
from models.config import XIELU, Config, Latent, Recurrent, SharedBlocks
from models.quantized.parts import EMBEDDING, LINEAR, TRANSPOSED

HEAD, SCORE = "lm_head", "score"
CURVE = {"alpha_p": (1,), "alpha_n": (1,), "beta": (), "eps": ()}  # the numbers of `XIELU`, after `Names.curve`


@dataclass(frozen=True)
class Names:
    """The tensors in a checkpoint, without `.weight` and `.bias`; the defaults are Llama's.

    Args:
        layer: prefix of the names of a layer's parts; {} stands for its number.
        conv: the matrix before a short convolution, its own weights, and the matrix after it.
        recurrent_in: the matrices before a gated delta net (two if interleaved), or the one before a scan. Their
            weights are `delta_taps`, `delta_decay`, `delta_bias`, `delta_norm`, for scans also `scan_shift` and
            `scan_skip`; `recurrent_out` is the matrix after them.
        recurrent_low: (gated delta nets with a `Recurrent.rank`) the matrices before those of gates and of decays.
        scan_low, scan_step: (scans by channels) the matrix that computes a row of the inputs of steps, B and C, and the
            one that computes inputs of steps for all channels, whose bias takes the place of `delta_bias`.
        scan_norms: the norms of the three parts of that row.
        block_norm, block_out: (shared blocks) the norm before attention, and the layer's matrix after the block; the
            rest has the names of attention and MLP.
        block_qkv, block_up: the pairs of matrices whose outputs are added to queries, keys, values and in the MLP; {}
            stands for `SharedBlocks.use`.
        attention_norm, mlp_norm: the norm on the input or on the sum, see `Config.norms`.
        attention_out_norm, mlp_out_norm: the norm on the output.
        q_norm, k_norm: the norms of heads; if each head has its own, {} stands for its number, or one tensor has a row
            for each.
        attention_sub_norm, mlp_sub_norm: the norms before the last matrices of attention and of the MLP.
        head_gate: the matrix of `Config.head_gates`.
        qkv, up: one stored matrix or several, which are stacked here.
        q_low, q_low_norm, q_high: (latent attention) the matrices that compute queries by way of a narrower row, and
            the norm of that row; without such a row, the first of `qkv` computes queries.
        latent, latent_norm: the matrix that computes the latent and the rotated key, and the latent's norm.
        keys_and_values: the matrix that computes both from the latent, head by head; or `keys`, which stacks the heads'
            transposed matrices, and `values`.
        curve: prefix of the names of an MLP's activation parameters.
        sinks: the logits of the heads' sinks.
        router, choice_bias: (mixture of experts) the matrix that computes the scores of experts, and a vector.
        expert: an expert's matrices, those of `up` before the last; {} stands for its number.
        shared, shared_gate: the matrices of the shared expert, and the matrix of its weight.
        experts_in, experts_out: the matrices before and after experts that read a latent.
        router_scale, factors: the vectors that multiply the router's input and the weights of experts.
        experts_out_norm: the norm of the experts' output, if there is one.
        experts_norm, mlp_own_norm: (experts in parallel with an MLP) the norms of the experts' input, and of the MLP's
            output alone.
        input_table, input_matrix, input_norm: these compute `Config.layer_inputs` from tokens and their embeddings.
        input_gate, input_out, input_out_norm: the matrices before and after a layer's inputs, and the norm after them.
        streams_in, streams_out: the matrices that compute the other streams from the embedding, and from them rows like
            the first stream's; {} stands for the number of one.
        stream_norm, stream_router, predict, correct: a layer's norm and matrix before the two matrices that compute
            weights of streams, and these two.
        stream_scale: the vector of `Streams.scaled`.
        laurel, laurel_norm: the two matrices of LAuReL, and the norm after them.
        layer_scale: the scalar that a layer multiplies the stream by.
        embedding_norm: the norm of the embedding, if it has weights.
        head_dense, head_dense_norm: the matrix of `Config.head_dense`, and the norm after it.
        positions: the table of learned positions; position p has row p + `offset`.
        project: the matrices from `embedding_width` to `width` and back.
        transposed: the layers' matrices are stored [in, out].
    """

    embedding: str = "model.embed_tokens"
    layer: str = "model.layers.{}."
    attention_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    out: str = "self_attn.o_proj"
    q_low: str = "self_attn.q_a_proj"
    q_low_norm: str = "self_attn.q_a_layernorm"
    q_high: str = "self_attn.q_b_proj"
    latent: str = "self_attn.kv_a_proj_with_mqa"
    latent_norm: str = "self_attn.kv_a_layernorm"
    keys_and_values: str = "self_attn.kv_b_proj"
    keys: str = "self_attn.k_b_proj"
    values: str = "self_attn.v_b_proj"
    sinks: str = "self_attn.sinks"
    conv: tuple[str, str, str] = ("conv.in_proj", "conv.conv", "conv.out_proj")
    recurrent_in: tuple[str, ...] = (
        "linear_attn.in_proj_qkv",
        "linear_attn.in_proj_z",
        "linear_attn.in_proj_b",
        "linear_attn.in_proj_a",
    )
    recurrent_low: tuple[str, ...] = ()
    delta_taps: str = "linear_attn.conv1d.weight"
    delta_decay: str = "linear_attn.A_log"
    delta_bias: str = "linear_attn.dt_bias"
    delta_norm: str = "linear_attn.norm.weight"
    scan_shift: str = "mamba.conv1d.bias"
    scan_skip: str = "mamba.D"
    scan_low: str = "mamba.x_proj"
    scan_step: str = "mamba.dt_proj"
    scan_norms: tuple[str, str, str] = ("", "", "")
    recurrent_out: str = "linear_attn.out_proj"
    block_norm: str = "shared_transformer.input_layernorm"
    block_out: str = "linear"
    block_qkv: tuple[str, ...] = tuple(f"shared_transformer.self_attn.linear_{x}_adapter_list.{{}}" for x in "qkv")
    block_up: str = "shared_transformer.feed_forward.gate_up_proj_adapter_list.{}"
    attention_out_norm: str = "post_attention_layernorm"
    mlp_norm: str = "post_attention_layernorm"
    mlp_out_norm: str = "post_feedforward_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    down: str = "mlp.down_proj"
    attention_sub_norm: str = "self_attn.attn_sub_norm"
    mlp_sub_norm: str = "mlp.ffn_sub_norm"
    head_gate: str = "self_attn.gate_proj"
    curve: str = "mlp.act_fn"
    router: str = "mlp.gate"
    choice_bias: str = "mlp.gate.e_score_correction_bias"
    expert: tuple[str, ...] = (
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
    experts_in: str = "mixer.fc1_latent_proj"
    experts_out: str = "mixer.fc2_latent_proj"
    router_scale: str = "router.scale"
    factors: str = "router.per_expert_scale"
    experts_norm: str = "pre_feedforward_layernorm_2"
    experts_out_norm: str = "post_feedforward_layernorm_2"
    mlp_own_norm: str = "post_feedforward_layernorm_1"
    input_table: str = "model.embed_tokens_per_layer"
    input_matrix: str = "model.per_layer_model_projection"
    input_norm: str = "model.per_layer_projection_norm"
    input_gate: str = "per_layer_input_gate"
    input_out: str = "per_layer_projection"
    input_out_norm: str = "post_per_layer_input_norm"
    streams_in: str = "model.altup_projections.{}"
    streams_out: str = "model.altup_unembed_projections.{}"
    stream_norm: str = "altup.router_norm"
    stream_router: str = "altup.modality_router"
    predict: str = "altup.prediction_coefs"
    correct: str = "altup.correction_coefs"
    stream_scale: str = "altup.correct_output_scale"
    laurel: tuple[str, str] = ("laurel.linear_left", "laurel.linear_right")
    laurel_norm: str = "laurel.post_laurel_norm"
    layer_scale: str = "layer_scalar"
    norm: str = "model.norm"
    embedding_norm: str = ""
    head_dense: str = "lm_head.dense"
    head_dense_norm: str = "lm_head.norm"
    positions: str = ""
    offset: int = 0
    project: tuple[str, str] = ("", "")
    transposed: bool = False

    def tensors(self, c: Config) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of all tensors of a checkpoint with this configuration."""
        embedding_width, rows = c.embedding_width or c.width, c.embedding_rows or c.vocab_size
        shapes: dict[str, tuple[int, ...]] = {f"{self.embedding}.weight": (rows, embedding_width)}
        if self.positions:
            shapes[f"{self.positions}.weight"] = (c.max_positions + self.offset, c.width)
        if c.embedding_width:
            into, out_of = self.project
            shapes |= {f"{into}.weight": (c.width, embedding_width), f"{out_of}.weight": (embedding_width, c.width)}
        if inputs := c.layer_inputs:
            every = c.layers * inputs.width
            shapes[f"{self.input_table}.weight"] = inputs.vocab_size, every
            shapes[f"{self.input_matrix}.weight"] = every, c.width
            shapes[f"{self.input_norm}.weight"] = (inputs.width,)
        for name in self.streams_of(c, self.streams_in) + self.streams_of(c, self.streams_out):
            shapes[f"{name}.weight"] = c.width, c.width
        for i in range(c.layers):
            shapes |= {self.layer.format(i) + name: shape for name, shape in self.of_layer(c, i).items()}
        biased = c.norm_bias and not c.rms
        if c.final_norm and c.affine:
            shapes |= self._stored(self.norm, (c.width,), biased)
        if c.embedding_norm and self.embedding_norm:
            shapes |= self._stored(self.embedding_norm, (c.width,), biased)
        if c.head_dense:
            shapes |= self._stored(self.head_dense, (c.width, c.width), c.head_dense_bias)
            shapes |= self._stored(self.head_dense_norm, (c.width,), biased)
        if c.scores:
            return shapes | {f"{SCORE}.weight": (1, embedding_width)}
        bias = {f"{HEAD}.bias": (c.vocab_size,)} if c.head_bias else {}
        return shapes | {f"{HEAD}.weight": (c.vocab_size, embedding_width)} | bias

    def of_layer(self, c: Config, i: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a layer: names after `layer`, and shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        biased = c.norm_bias and not c.rms
        if c.affine:
            for name, size in self.norms(c, i).items():
                shapes |= self._stored(name, (size,), biased)
            for name, size in self.norms_of_heads(c, i).items():
                shapes |= self._stored(name, size, biased and c.head_norms != "own")
        shapes |= self.attention(c, i)
        if inputs := c.layer_inputs:
            shapes |= self._stored(self.input_gate, (inputs.width, c.width))
            shapes |= self._stored(self.input_out, (c.width, inputs.width))
        if streams := c.streams:
            shapes |= self._stored(self.stream_router, (streams.count, c.width))
            shapes |= self._stored(self.predict, (streams.count**2, streams.count))
            shapes |= self._stored(self.correct, (streams.count, streams.count))
            shapes |= {self.stream_scale: (c.width,)} if streams.scaled else {}
        if c.laurel:
            for name, shape in zip(self.laurel, ((c.laurel, c.width), (c.width, c.laurel)), strict=True):
                shapes |= self._stored(name, shape)
        if c.layer_scales:
            shapes[self.layer_scale] = (1,)
        return shapes | self.mlp(c, i) if c.has("mlp", i) else shapes

    def attention(self, c: Config, i: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a layer's attention, or of what stands in its place: names after `layer`, and
        shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        if c.recurrent is not None and c.recurs(i):
            made = {ScanKind: self.scan, ChannelKind: self.by_channels}.get(type(c.recurrent.kind), self.delta)
            shapes |= made(c, c.recurrent)
        if c.convs is not None and c.convolves(i):
            shapes_of = (3 * c.width, c.width), (c.width, 1, c.convs.taps[i]), (c.width, c.width)
            for name, shape in zip(self.conv, shapes_of, strict=True):
                shapes |= self._stored(name, shape, c.convs.bias)
        elif c.latent is not None and c.attends(i):
            for name, (shape, bias) in self.latents(c, c.latent).items():
                shapes |= self._stored(name, shape, bias)
            if c.head_gates:
                shapes |= self._stored(self.head_gate, (c.heads, c.width))
        elif c.shared is not None and c.attends(i):
            shapes |= self.block(c, c.shared, i)
        elif c.attends(i):
            for name, outs in self.heads(c, i).items():
                shapes |= self._stored(name, (outs, c.width), c.attention_bias)
            q = c.query_heads(i) * c.kv_size(i)[1]
            shapes |= self._stored(self.out, (c.width, q), c.has_out_bias(i))
            if c.sinks:
                shapes[self.sinks] = (c.query_heads(i),)
            if c.head_gates:
                shapes |= self._stored(self.head_gate, (q if c.head_gates == "elements" else c.query_heads(i), c.width))
        return shapes

    def mlp(self, c: Config, i: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a layer's MLP, or of its experts: names after `layer`, and shapes."""
        shapes: dict[str, tuple[int, ...]] = {}
        if c.experts is not None and c.mixed(i):
            shapes |= self.mixture(c)
            if not c.experts.beside_mlp:
                return shapes
        up = (2 if c.gated else 1) * c.inner(i)
        for name in self.up:
            shapes |= self._stored(name, (up // len(self.up), c.width), c.mlp_bias)
        shapes |= self._stored(self.down, (c.width, c.inner(i)), c.mlp_bias)
        if c.activation == XIELU:
            shapes |= {f"{self.curve}.{part}": shape for part, shape in CURVE.items()}
        return shapes

    def _stored(self, name: str, shape: tuple[int, ...], bias: bool = False) -> dict[str, tuple[int, ...]]:
        """Return a weight as the checkpoint has it, and its bias."""
        weight = {f"{name}.weight": shape[::-1] if self.transposed else shape}
        return weight | {f"{name}.bias": shape[:1]} if bias else weight

    def streams_of(self, c: Config, name: str) -> list[str]:
        """The matrices of all streams but the first."""
        return [name.format(i) for i in range(c.streams.count - 1)] if c.streams else []

    def heads_of(self, c: Config, layer: int) -> tuple[str, ...]:
        """Return the matrices that compute a layer's queries, keys and values; one that computes keys and values is
        listed twice."""
        if c.reads(layer) != layer:
            return self.qkv[:1]
        return (*self.qkv[:2], self.qkv[1]) if c.values_are_keys(layer) else self.qkv

    def heads(self, c: Config, layer: int) -> dict[str, int]:
        """Return these matrices and the outputs of each."""
        (kv_heads, size), names = c.kv_size(layer), self.heads_of(c, layer)
        q, kv = c.query_heads(layer) * size, kv_heads * size
        queries = (2 if c.query_gate else 1) * q
        if len(self.qkv) == 1:
            return {names[0]: queries + 2 * kv}
        outs = (q, q, kv, kv) if c.query_gate == "apart" else (queries, kv, kv)
        return dict(zip(names, outs, strict=False))

    def latent_high(self, latent: Latent) -> tuple[str, ...]:
        """Return the matrices that compute keys and values from a latent."""
        return (self.keys, self.values) if latent.split else (self.keys_and_values,)

    def latents(self, c: Config, latent: Latent) -> dict[str, tuple[tuple[int, ...], bool]]:
        """Return the tensors of latent attention: names after `layer`, shapes, and whether they have biases."""
        queries, bias = c.heads * (latent.plain + latent.rotated), c.attention_bias
        shapes: dict[str, tuple[tuple[int, ...], bool]] = {self.qkv[0]: ((queries, c.width), False)}
        if low := latent.query_rank:
            shapes = {
                self.q_low: ((low, c.width), bias),
                self.q_low_norm: ((low,), False),
                self.q_high: ((queries, low), False),
            }
        shapes |= {
            self.latent: ((latent.rank + latent.rotated, c.width), bias),
            self.latent_norm: ((latent.rank,), False),
            self.out: ((c.width, c.heads * latent.value), bias),
        }
        outs = (c.heads * latent.rank, latent.plain), (c.heads * latent.value, latent.rank)
        if not latent.split:
            outs = ((c.heads * (latent.plain + latent.value), latent.rank),)
        return shapes | {name: (shape, False) for name, shape in zip(self.latent_high(latent), outs, strict=True)}

    def delta(self, c: Config, recurrent: Recurrent) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a gated delta net: names after `layer`, and shapes."""
        kind, (H, _, V), rank = recurrent.kind, recurrent.kind.state, recurrent.rank
        outs = kind.channels + H * V, H + kind.decays
        if not recurrent.interleaved:
            made = (kind.channels,) if len(self.recurrent_in) == 4 else kind.parts
            outs = *made, H * V, H, kind.decays
        if len(self.recurrent_in) == 1:
            outs = (sum(outs),)
        matrices = {f"{name}.weight": (out, c.width) for name, out in zip(self.recurrent_in, outs, strict=True)}
        if rank:
            matrices |= {f"{self.recurrent_in[i]}.weight": (outs[i], rank) for i in (-3, -1)}
            matrices |= {f"{name}.weight": (rank, c.width) for name in self.recurrent_low}
        vectors = {self.delta_taps: (kind.channels, 1, kind.taps), self.delta_norm: (V,)}
        vectors |= {self.delta_decay: (H,), self.delta_bias: (kind.decays,)}
        return matrices | vectors | {f"{self.recurrent_out}.weight": (c.width, H * V)}

    def scan(self, c: Config, recurrent: Recurrent) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a selective scan: names after `layer`, and shapes."""
        kind, (H, _, V), [into] = recurrent.kind, recurrent.kind.state, self.recurrent_in
        shapes: dict[str, tuple[int, ...]] = {f"{into}.weight": (kind.width, c.width)}
        shapes[f"{self.recurrent_out}.weight"] = c.width, H * V
        if recurrent.bias:
            shapes |= {f"{into}.bias": (kind.width,), f"{self.recurrent_out}.bias": (c.width,)}
        if recurrent.conv_bias:
            shapes[self.scan_shift] = (kind.channels,)
        shapes |= dict.fromkeys((self.delta_decay, self.delta_bias, self.scan_skip), (H,))
        shapes |= {self.delta_norm: (H * V,)} if recurrent.normed else {}
        return shapes | {self.delta_taps: (kind.channels, 1, kind.taps)}

    def by_channels(self, c: Config, recurrent: Recurrent) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a scan by channels: names after `layer`, and shapes."""
        kind, rank, [into] = recurrent.kind, recurrent.rank, self.recurrent_in
        K, C = kind.key_size, kind.channels
        shapes: dict[str, tuple[int, ...]] = {f"{into}.weight": (2 * C, c.width)}
        shapes |= {f"{self.recurrent_out}.weight": (c.width, C), f"{self.scan_low}.weight": (rank + 2 * K, C)}
        if recurrent.bias:
            shapes |= {f"{into}.bias": (2 * C,), f"{self.recurrent_out}.bias": (c.width,)}
        if recurrent.conv_bias:
            shapes[self.scan_shift] = (C,)
        if recurrent.part_norms == "own":
            norms = zip(self.scan_norms, (rank, K, K), strict=True)
            shapes |= {f"{name}.weight": (size,) for name, size in norms}
        shapes |= {f"{self.scan_step}.weight": (C, rank), f"{self.scan_step}.bias": (C,), self.scan_skip: (C,)}
        return shapes | {self.delta_taps: (C, 1, kind.taps), self.delta_decay: (C, K)}

    def block(self, c: Config, shared: SharedBlocks, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a layer with a shared block, and those of the block if they have its names: names after
        `layer`, and shapes."""
        E, M, heads, use = c.width, c.mlp_width, self.heads(c, layer), shared.use(layer)
        shapes: dict[str, tuple[int, ...]] = {f"{self.block_out}.weight": (E, E)}
        pairs = [(self.block_up, 2 * M, E)]
        pairs += [(name, outs, 2 * E) for name, outs in zip(self.block_qkv, heads.values(), strict=True)]
        for name, outs, width in pairs if shared.adapted else pairs[:1]:
            ends = (shared.rank, width), (outs, shared.rank)
            shapes |= {f"{name.format(use)}.{i}.weight": shape for i, shape in enumerate(ends)}
        if shared.owners[layer] != layer:
            return shapes
        shapes |= {f"{name}.weight": (outs, 2 * E) for name, outs in heads.items()}
        shapes |= {f"{self.out}.weight": (E, c.heads * c.head_dim), f"{self.down}.weight": (E, M)}
        shapes |= {f"{name}.weight": (2 * M // len(self.up), E) for name in self.up}
        if c.mlp_bias:
            shapes |= {f"{name}.bias": shapes[f"{name}.weight"][:1] for name in (*self.up, self.down)}
        return shapes | {f"{self.block_norm}.weight": (2 * E,), f"{self.mlp_norm}.weight": (E,)}

    def mixture(self, c: Config) -> dict[str, tuple[int, ...]]:
        """Return the tensors of a mixture of experts: names after `layer`, and shapes."""
        if (mixed := c.experts) is None:
            return {}
        shapes: dict[str, tuple[int, ...]] = {f"{self.router}.weight": (mixed.count, c.width)}
        if mixed.choice_bias:
            shapes[self.choice_bias] = (mixed.count,)
        if mixed.beside_mlp:
            shapes |= {self.router_scale: (c.width,), self.factors: (mixed.count,)}
        every = [(tuple(name.format(i) for name in self.expert), mixed.width) for i in range(mixed.count)]
        for (*up, down), width in every + ([(self.shared, mixed.shared_width)] if mixed.shared_width else []):
            read = c.width if down == self.shared[-1] else mixed.latent or c.width
            shapes |= {f"{name}.weight": ((1 + c.gated) * width // len(up), read) for name in up}
            shapes[f"{down}.weight"] = read, width
        if mixed.latent:
            shapes |= {f"{self.experts_in}.weight": (mixed.latent, c.width)}
            shapes |= {f"{self.experts_out}.weight": (c.width, mixed.latent)}
        if mixed.bias:
            shapes |= {f"{name.removesuffix('.weight')}.bias": shape[:1] for name, shape in shapes.items()}
        return shapes | ({f"{self.shared_gate}.weight": (1, c.width)} if mixed.shared_gate else {})

    def kinds(self, c: Config) -> dict[str, str]:
        """Map the weights of linear layers and the token embedding to their classes in transformers."""
        others = (f"{self.embedding}.weight", f"{self.positions}.weight", f"{self.input_table}.weight")
        others += tuple(
            f"{self.layer.format(i)}{name}.weight" for i in range(c.layers) for name in self.norms_of_heads(c, i)
        )
        matrices = (name for name, shape in self.tensors(c).items() if len(shape) == 2 and name not in others)
        layer = self.layer.partition("{")[0]
        tables = (self.embedding, self.input_table) if c.layer_inputs else (self.embedding,)
        embedding = {f"{name}.weight": EMBEDDING for name in tables}
        return embedding | {
            name: TRANSPOSED if self.transposed and name.startswith(layer) else LINEAR for name in matrices
        }

    def norms(self, c: Config, layer: int) -> dict[str, int]:
        """Return the norms of a layer, except those of heads, and the sizes of their vectors."""
        names = []
        norms = c.norms_of(layer)
        if {"input", "stream", "sum"} & {*norms}:
            names += [self.attention_norm] if c.has("attention", layer) and (layer or c.first_norm) else []
            names += [self.mlp_norm] if c.has("mlp", layer) and c.parallel != "shared" else []
        if "output" in norms:
            names += [self.attention_out_norm, self.mlp_out_norm]
        if c.layer_inputs:
            names.append(self.input_out_norm)
        names += [self.stream_norm] if c.streams else []
        names += [self.laurel_norm] if c.laurel else []
        if c.experts is not None and c.experts.beside_mlp and c.mixed(layer):
            names += [self.experts_norm, self.experts_out_norm, self.mlp_own_norm]
        names += [self.experts_out_norm] if c.experts is not None and c.experts.normed and c.mixed(layer) else []
        found = dict.fromkeys(names, c.width)
        if c.sub_norms:
            found |= {
                self.attention_sub_norm: c.query_heads(layer) * c.kv_size(layer)[1],
                self.mlp_sub_norm: c.inner(layer),
            }
        return found

    def norms_of_heads(self, c: Config, layer: int) -> dict[str, tuple[int, ...]]:
        """Return the norms of a layer's queries and keys, and the shapes of their weights."""
        if not c.norms_heads(layer) or c.head_norms == "plain" or not c.attends(layer):
            return {}
        kv_heads, size = c.kv_size(layer)
        both = [(self.q_norm, c.query_heads(layer)), (self.k_norm, kv_heads)][: 2 if c.reads(layer) == layer else 1]
        if c.head_norms == "own" and "{}" in self.q_norm:
            return {name.format(h): (size,) for name, heads in both for h in range(heads)}
        if c.head_norms == "own":
            return {name: (heads, size) for name, heads in both}
        return {name: ((heads if c.head_norms == "all" else 1) * size,) for name, heads in both}
