"""How many random draws the statistical tests make, and how well counts suit probabilities.

All draws are made in a full run, else a quarter, which finds a bias twice as large. Tests that need the others to find
anything are marked `full`.
"""

import math

FULL = False  # tests/conftest.py sets it by --full


def draws(number: int) -> int:
    """How many of so many draws to make."""
    return number if FULL else number // 4


def chi_square_bound(cells, z=3.72):
    """The 1 - 1e-4 quantile of chi-square with cells - 1 degrees of freedom (Wilson-Hilferty)."""
    d = cells - 1
    return d * (1 - 2 / (9 * d) + z * math.sqrt(2 / (9 * d))) ** 3


def chi_square(counts, probabilities):
    total = sum(counts.values())
    assert set(counts) <= {cell for cell, p in probabilities.items() if p > 0}
    cells = {cell: p for cell, p in probabilities.items() if p > 0}
    return sum((counts[c] - total * p) ** 2 / (total * p) for c, p in cells.items()), len(cells)
