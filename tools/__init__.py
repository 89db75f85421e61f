import kernels  # noqa: F401  # sets a filter before torch is imported
