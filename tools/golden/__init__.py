"""The golden files' checkpoints, one file per family: its `VARIANTS` are what `tools/make_golden.py` makes.

    VARIANTS: dict[str, Variant]    name -> how to write the checkpoint, and what to ask of it

A variant's place in the dict is its seed, so new ones go to the end. Nothing here imports transformers.
"""
