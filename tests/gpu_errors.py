"""How far a GPU's fast operations on float32, into which Triton compiles `tl.exp`, `tl.exp2` and `/`, may be off."""

FAST = 2.0**-22  # relative: an exponential (PTX ISA, ex2.approx); a quotient (div.full, two units in the last place)
