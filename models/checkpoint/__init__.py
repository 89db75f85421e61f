"""Checkpoint folders: files, headers, fields, sizes, weights."""
