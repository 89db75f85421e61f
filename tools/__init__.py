import models  # noqa: F401  # checks whose `kernels` Python finds, sets a filter before torch is imported
