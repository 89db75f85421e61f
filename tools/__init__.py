"""Command lines for developers: golden files, checkpoint tools, benchmarks, viewers."""
