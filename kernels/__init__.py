"""Operators over token trees: each a folder with its definition, its fast versions and a front that picks one."""

DISTRIBUTION = "coppice"  # another one has a package of this name: `models.own` looks for this line
