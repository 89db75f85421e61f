"""Command lines for developers: golden files, checkpoint tools, benchmarks, viewers."""

import runpy
from pathlib import Path

own = runpy.run_path(str(Path(__file__).parents[1] / "models" / "own.py"), run_name="models.own")
own["check"]("engine", "kernels", "models", "search")
import models  # noqa: E402, F401  # sets a filter before torch is imported
from models.later import let_wait  # noqa: E402

let_wait(__name__)
