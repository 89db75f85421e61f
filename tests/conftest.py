"""Property tests are the same on every machine and at every load; without a GPU, Triton kernels are interpreted."""

import atexit
import os
import shutil
import signal
import tempfile

import torch
from hypothesis import HealthCheck, settings

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

# A shell's background job ignores Ctrl-C, and so would every command line that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# What a chat keeps, the history of typed lines for one, is not to be kept among the things of whoever runs the tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="coppice-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")
