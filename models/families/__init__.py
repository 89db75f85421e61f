"""A file for each family: its configuration, its tensors, its layer."""
