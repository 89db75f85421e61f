"""AutoRound (Cheng et al. 2023): integers in the layout of GPTQ or AWQ, whichever `packing_format` names, or floats.

"auto_round:auto_gptq" stores zeros minus one, like the first version of GPTQ; "auto_round" alone and
"auto_round:gptqmodel" store plain zeros; "auto_round:auto_awq" is AWQ. `extra_config` changes the fields of single
modules, first by name, then by expressions that match anywhere in a name. Floats of 8 and 4 bits (`data_type` fp,
mx_fp, nv_fp) are stored as `quant_method: fp8` and compressed-tensors have them; activations are not rounded, as there.
"""

from collections.abc import Callable, Mapping
from typing import Any

from models.checkpoint.fields import Fields
from models.quantized import awq, gptq, mxfp4, nvfp4
from models.quantized.float8 import MX, Float8
from models.quantized.parts import Grid, ModuleRules, Scheme, pattern, unsupported

FLOAT_BITS = 16  # `bits` of modules that stay floats
READ = "read: auto_round, auto_round:auto_gptq and auto_round:auto_awq, of int; fp, mx_fp and nv_fp of 8 and 4 bits"
Rule = tuple[Callable[[str], object], Scheme | None]  # of `ModuleRules`
FLOATS: dict[tuple[str, int, int], Scheme] = {  # by `data_type`, `bits` and `group_size`
    ("mx_fp", 4, mxfp4.GROUP): mxfp4.COMPRESSED,
    ("mx_fp", 8, MX[1]): Float8(Grid(*MX), "weight_scale"),
    ("nv_fp", 4, nvfp4.GROUP): nvfp4.COMPRESSED,
    ("fp", 8, -1): Float8(Grid(1, None), "weight_scale"),
    ("fp", 8, 0): Float8(Grid(None, None), "weight_scale"),
}


def parse(fields: Fields) -> ModuleRules:
    """Read a config. Raises CheckpointError if it is not supported."""
    layout = fields.str("packing_format", None) or fields.str("backend", "auto_round:auto_gptq")
    if fields.sub("rotation_config"):
        raise unsupported(fields, "auto-round with rotation_config")
    names, expressions = list[Rule](), list[Rule]()
    given = fields.within("extra_config")
    for key in given.config:
        changes = given.within(key)
        own = _scheme({**fields.config, **changes.config}, fields, layout)
        names.append((key.__eq__, own))
        if changes.config and not key.replace(".", "").replace("_", "").isalnum():
            expressions.append((pattern(key, fields).search, own))
    common = _scheme(fields.config, fields, layout)
    if common is None:
        raise unsupported(fields, "auto-round whose weights are floats")
    return ModuleRules(common, (*names, *expressions))


def _scheme(config: Mapping[str, Any], fields: Fields, layout: str) -> Scheme | None:
    own = Fields(config, fields.file, fields.prefix)
    kind, rounded = own.str("data_type", "int"), own.int("act_bits", FLOAT_BITS) < FLOAT_BITS
    if own.int("bits") >= FLOAT_BITS:
        return None
    if (floats := _floats(own, kind)) is not None:
        return floats
    packing = layout.removeprefix("auto_round").removeprefix(":").partition(":")[0]
    if kind != "int" or rounded or not layout.startswith("auto_round"):
        packing = "other"
    if packing in ("auto_awq", "awq"):
        return awq.scheme(own)
    if own.int("bits") == 3:  # zeros of 3 bits are packed in several ways
        raise unsupported(fields, "auto-round with 3 bits (read: 2, 4, 8)")
    if packing in ("auto_gptq", "gptq"):
        return gptq.scheme(config, fields, "gptq")
    if packing in ("", "gptqmodel", "exllamav2", "triton", "tritonv2"):
        return gptq.scheme(config, fields, "gptq_v2")
    rounding = "rounded" if rounded else "as they are"
    what = f"auto-round in the format {layout[:80]!r}, weights of {kind[:80]!r}, activations {rounding}"
    raise unsupported(fields, f"{what} ({READ})")


def _floats(own: Fields, kind: str) -> Scheme | None:
    """Return the scheme of weights that are floats of few bits; None: they are not, or of another form."""
    if own.str("fmt", "e4m3") != "e4m3":
        return None
    bits = own.int("bits")
    if isinstance(own.config.get("group_size"), list):
        return Float8(Grid.block(own, "group_size"), "weight_scale_inv") if (kind, bits) == ("fp", 8) else None
    return FLOATS.get((kind, bits, own.int("group_size", 128, low=-1)))
