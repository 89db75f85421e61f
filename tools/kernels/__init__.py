"""The kernel lab: `python -m tools.kernels`."""
