"""Token trees, their slots, the pages of the pool, and cached prefixes: the owners of memory."""
