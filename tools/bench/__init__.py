"""Benchmarks: `python -m tools.bench COMMAND`."""
