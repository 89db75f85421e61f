"""A layer as a list of operator calls, which Python, Triton (some together) and C++ (stack/native.cpp) each execute.

Calls read and write registers: rows of the tokens of a pass.
"""

from typing import Any, NamedTuple

# C++ numbers both in this order. E width, M MLP width, H heads, G of keys and values, D head size.
REGISTERS = (
    "stream",  # E: what layers add to
    "read",  # E: the norm of the stream that a part reads; later the output of the MLP
    "out",  # E: the output of attention or of a convolution
    "heads",  # (H + 2 G) D: queries, keys and values; (2 H + 2 G) D: gates before them; (H + 1) D: of a latent
    "mixed",  # H D: what attention makes of the values
    "gates",  # 3 E: what a convolution reads; as wide as it is, what a layer with a state reads
    "convolved",  # E; the result of a layer with a state
    "up",  # M, or 2 M of a gated MLP
    "middle",  # M
    "low",  # of attention with a latent: the row that queries are made of
    "queries",  # its queries
    "latent",  # the latent, and the key that is rotated
    "values",  # what its heads make of values
)
CODES = (
    "norm",  # target = the norm of source
    "product",  # target = source times `matrix`, plus its bias
    # queries by `norm`, keys by `more`, in place; `all_heads`: of all heads as one row; `own_norms`: of each by its own
    "head_norms",
    "rotate",  # queries and keys, by the angles of `table`, in place
    "write",  # keys and values into the cache
    "attend",  # target = attention of the queries; `scale`, `window`, `cap`, `sinks`
    "convolve",  # target = the short convolution of source, with the weights and bias of `norm`
    "activate",  # target = `function` of source; `gated`: of the first half, times the second
    "scale",  # target *= `scale`
    "add",  # target += source
    "adapt",  # target += what the adapters of tokens make of source
    "mix",  # target = what the experts of `mixture` make of source
    "gate",  # target *= the logistic function of the gates in source
    "recur",  # target = the gated delta net `delta` of source
    "scan",  # target = the selective scan `delta` of source
    "absorb",  # target = queries and keys of source and "latent", by the `latent` of `kernels.latent`
    "expand",  # target = the values of source, by `latent`
    "tap",  # the rows of source are copied for whoever wants them, as number `table` of each token's
)


class Call(NamedTuple):
    """An operator of a layer. `CODES` tells which arguments a code reads.

    Args:
        code: which operator.
        source, target: registers; the same for an operator in place.
        norm, more: with a `weight` and a `bias`, which is None for an RMSNorm.
        matrix: a linear layer, with a `matrix`, see `models.formats.linear.Linear`.
        scale, window, cap, sinks: of attention, see `kernels.tree_attention`; or a factor.
        table: the number of the angles, or of what is tapped.
        function: the name of an activation, see `kernels.rows`.
        adapters: by their numbers in a pass, see `kernels.low_rank`.
        mixture: experts, with packed `matrices`, see `kernels.experts`.
        latent: with `heads`, see `models.latent`.
        delta: with `weights`, and of a gated delta net an `order`, see `models.layers`.
    """

    code: str
    source: str = ""
    target: str = ""
    norm: Any = None
    more: Any = None
    matrix: Any = None
    scale: float = 1.0
    window: int | None = None
    cap: float | None = None
    sinks: Any = None
    table: int = 0
    function: str = "relu"
    gated: bool = False
    all_heads: bool = False
    own_norms: bool = False
    adapters: Any = None
    mixture: Any = None
    delta: Any = None
    latent: Any = None
