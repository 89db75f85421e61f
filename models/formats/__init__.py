"""The weight formats, one file each, and their registry."""

from typing import TYPE_CHECKING, cast

if TYPE_CHECKING:
    from models.formats.linear import Format

NAMES = "none", "int8", "int4", "int4-head", "int4-64", "int4-128", "int4-zeros", "int4-zeros-64", "int4-zeros-128"
# Keys are the values of --quant, which are known without torch; `models.formats.linear` fills in the formats.
FORMATS = cast("dict[str, Format]", dict.fromkeys(NAMES))
