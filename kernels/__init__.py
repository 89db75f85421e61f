"""Operators over token trees: each a folder with its definition, its fast versions and a front that picks one."""
