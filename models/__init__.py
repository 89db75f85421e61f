"""Model families: from a Hugging Face checkpoint folder to modules that evaluate token trees."""

from typing import TYPE_CHECKING

# isort: off
import models.own  # noqa: F401  # before any code of `kernels` runs
import kernels  # noqa: F401  # sets a filter before torch is imported

# isort: on
from models.lazy import exports

if TYPE_CHECKING:
    from models.checkpoint.headers import Checkpoint
    from models.errors import CheckpointError
    from models.families import FAMILIES, family_of, load_model

__all__ = ["FAMILIES", "Checkpoint", "CheckpointError", "family_of", "load_model"]
__getattr__ = exports(
    __name__,
    {
        "models.checkpoint.headers": "Checkpoint",
        "models.errors": "CheckpointError",
        "models.families": "FAMILIES family_of load_model",
    },
)
