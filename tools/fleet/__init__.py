"""Many processes, each with a model of its own, answer the lines of a file: `python -m tools.fleet`, on Ray Data."""
