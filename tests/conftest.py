"""What all tests run with, on every machine and at every load: threads, properties, the Triton interpreter."""

import os
import signal

# Two threads per process, whatever the machine has. They wait asleep: with more threads than cores, those that spin
# take most of the processor.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings

from kernels import cpp

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

# A shell's background job ignores Ctrl-C, and so would every command line that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

THREADS = torch.get_num_threads()


@pytest.fixture(autouse=True)
def threads():
    """No test runs with the threads that an engine of another test was loaded with."""
    torch.set_num_threads(THREADS)


def pytest_report_header() -> list[str]:
    """What runs: also builds the kernels, once, before worker processes ask for them."""
    return [f"kernels: {cpp.why_not() or 'C++'}", f"torch: {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"]
