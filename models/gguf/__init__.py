"""GGUF files as checkpoints: headers, configurations, block formats, names, tokenizers.

The format is read here, in a few hundred lines, rather than with the package `gguf`, which builds an array for each
string of a vocabulary (a minute and half a gigabyte), reads past the end of a truncated file, and depends on NumPy,
which nothing else here needs. Tests compare every table and every block with it.
"""
