"""Operators on token trees, each a folder with its definition, its fast versions and a front that picks one."""

import warnings

# PyTorch warns when it is imported where NumPy is absent, which nothing here needs. The filter is set before any module
# imports it, and stays: a context manager would take back those that PyTorch itself sets meanwhile.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy")

DISTRIBUTION = "coppice"  # another one has a package of this name: `models/own.py` looks for this line
