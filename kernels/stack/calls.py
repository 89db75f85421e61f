"""A layer as a list of operator calls, which Python, Triton (fusing some) and C++ (stack/native.cpp) each execute.

Calls read and write registers, which hold rows of the tokens of a pass.
"""

from typing import Any, NamedTuple

# C++ numbers both in this order. E width, M MLP width, H heads, D head size.
REGISTERS = (
    "stream",  # E: what layers add to
    "read",  # E: the norm of the stream that a part reads; later the output of the MLP
    "out",  # E: the output of attention or of a convolution
    "heads",  # see `Heads`
    "mixed",  # H D: what attention makes of the values
    # 3 E: what a convolution reads; as wide as it is, what a layer with a state reads; or gates: H of heads, or H D of
    # elements
    "gates",
    "convolved",  # E; the result of a layer with a state
    "up",  # M, or 2 M of a gated MLP
    "middle",  # M
    # between two matrices, of fewer elements: of queries of latent attention, of LAuReL, of AltUp's weights, of layers
    # with a state
    "low",
    "queries",  # its queries; or, of "low", the elements from which the inputs of steps are made
    "latent",  # the latent, and the key that is rotated
    "values",  # what its heads make of values; or what is joined to "gates"; or the stream beside the embedding
    "narrow",  # what a layer makes of the stream to weigh its input of each token
    "inputs",  # those inputs, of all layers side by side; or the embedding
    "streams",  # N E: of AltUp, of which the stream is a copy of one
    "weights",  # by which they change
    "steps",  # the inputs of steps of a scan by channels, or of decays
)
CODES = (
    "norm",  # target = the norm of source
    "product",  # target = source times `matrix`, plus its bias
    # queries by `norm`, keys by `more`, values by `third`, where there is one, in place; `all_heads`: of all heads as
    # one row; `own_norms`: of each by its own
    "head_norms",
    "rotate",  # queries and keys, by the angles of `table`, in place
    "write",  # keys and values into the cache of layer `table`
    "attend",  # target = attention of the queries to that cache; `scale`, `window`, `chunked`, `cap`, `sinks`, `slopes`
    "convolve",  # target = the short convolution of source, with the weights and bias of `norm` and the rows of `table`
    "activate",  # target = `function` of source; `gated`: of the first half, times the second
    "scale",  # target *= `scale`
    "add",  # target += source
    "adapt",  # target += what the adapters of tokens make of source
    "mix",  # target = what the experts of `mixture` make of source; what is `beside` it chooses them
    # target *= the logistic function, or the `softplus`, of the gates in source: those of "heads", or one for each head
    # (of one element, where each has its own)
    "gate",
    "recur",  # target = the gated delta net `delta` of source, with the rows and states of `table`
    "scan",  # target = the selective scan `delta` of source, with the same
    "absorb",  # target = queries and keys of source and "latent", by the `latent` of `kernels.latent`
    "expand",  # target = the values of source, by `latent`
    "tap",  # the rows of source are copied for whoever wants them, as number `table` of each token's
    "inject",  # target = `function` of source, times the input of layer `table` in `beside`
    "xielu",  # target = that function of source, by the four numbers that are the weight of `norm`
    "sparsify",  # target = source, but gates, its first half, without most of their elements, by `scale`
    # Of "streams", which change. Target = the one that `table` numbers, times the weight of `norm`, if there is one.
    "predict",  # each adds all of them, by the weights in source [N, N]
    "correct",  # each adds the difference of the stream to the one of `table`, by 1 + the weights in source [N]
    "spread",  # all but the first add source
    "clip",  # elements of target are limited to -`scale` .. `scale`
    # Of the scan by channels `delta`, with the rows and states of `table`.
    "channel_conv",  # target = its convolution of source
    "part",  # target = the elements of source from which the inputs of steps are made
    "channel_scan",  # target, "convolved", = the scan of source, "convolved", "low" and "steps"
    "join",  # target, of `table` elements, gets those of source after its own; of 0, it becomes source
)


class Heads(NamedTuple):
    """The heads of a token, of `size` elements each, in the order in which they are stored, and those in the cache.

    Args:
        gates: as many heads as queries, or none.
        queries, keys, values: without values, keys serve as values; without keys too, those of another layer are read.
        kept: key/value heads in the cache that queries read.
    """

    gates: int
    queries: int
    keys: int
    values: int
    size: int
    kept: int

    @property
    def count(self) -> int:
        """The number of heads of a token."""
        return self.gates + self.queries + self.keys + self.values


class Call(NamedTuple):
    """An operator call of a layer. `CODES` lists the arguments that each code reads.

    Args:
        code: which operator.
        source, target: registers; equal for an in-place operator.
        beside: another register that is read; "": the source.
        norm, more, third: with a `weight` and a `bias`, which is None for an RMSNorm.
        matrix: a linear layer, with a `matrix`, see `models.formats.linear.Linear`.
        scale, window, cap, sinks, slopes: of attention, see `kernels.tree_attention`; or a factor or bound.
        chunked: windows are chunks, see `TreeLayout.in_chunks`; not together with slopes.
        table: the number of the angles, of the tapped rows, of a stream, of the layer whose input is used, of elements
            before others are joined, or of what a layer keeps in `KVCache.layers`; C++ takes the rows and states of
            convolutions and recurrent layers in the order of calls.
        heads: the heads in the register "heads".
        function: the name of an activation, see `kernels.rows`.
        adapters: by their numbers in a pass, see `kernels.low_rank`.
        mixture: experts, with packed `matrices`, see `kernels.experts`.
        latent: with `heads`, see `models.latent`.
        delta: with `weights`, and of a gated delta net an `order`, see `models.layers`.
    """

    code: str
    source: str = ""
    target: str = ""
    beside: str = ""
    norm: Any = None
    more: Any = None
    third: Any = None
    matrix: Any = None
    scale: float = 1.0
    window: int | None = None
    chunked: bool = False
    cap: float | None = None
    sinks: Any = None
    slopes: Any = None
    table: int = 0
    heads: Heads | None = None
    function: str = "relu"
    gated: bool = False
    all_heads: bool = False
    own_norms: bool = False
    softplus: bool = False
    adapters: Any = None
    mixture: Any = None
    delta: Any = None
    latent: Any = None
