"""A file for each format of weights."""
