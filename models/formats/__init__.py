"""A file for each format of weights; their names, which are the values of --quant."""

FORMAT_NAMES = (
    "none", "int8", "int4", "int4-head", "int4-64", "int4-128", "int4-zeros", "int4-zeros-64", "int4-zeros-128",
)  # fmt: skip
