"""The profiler: `python -m tools.profile`."""
