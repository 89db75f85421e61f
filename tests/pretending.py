"""A plugin of pytest that runs the tests marked `gpu` on the pretended device, in Triton's interpreter.

    python -m pytest -p tests.pretending --full -m gpu FILES

It shows a test whose tensors lie on two devices, or that asks for what no device has. A few fail there: those that need
torch's compiler (`..._compilers_see_...`, `..._opaque_...`, `..._custom_ops`) or its device "meta" (`..._refuses_...`),
and short convolutions in bfloat16, to which Triton's interpreter does not round.
"""

import os
from collections.abc import Generator

os.environ.pop("OPENBLAS_CORETYPE", None)  # before NumPy is imported; see conftest
os.environ["TRITON_INTERPRET"] = "1"

import pytest

from tests.pretended_cuda import DEVICE, Numbered, pretend

pretend(processors=4)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """Within a test there is the device."""
    with DEVICE, Numbered():
        return (yield)
