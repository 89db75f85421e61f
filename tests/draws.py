"""How many random draws the statistical tests make: all in a full run, else a quarter.

A quarter finds a bias twice as large. Tests that need the others to find anything are marked `full`.
"""

FULL = False  # tests/conftest.py sets it by --full


def draws(number: int) -> int:
    """How many of so many draws to make."""
    return number if FULL else number // 4
