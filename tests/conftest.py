"""Settings of all tests, on every machine and at every load: threads, kernels, properties, the Triton interpreter."""

import atexit
import os
import shutil
import signal
import sys
import tempfile
from collections import Counter
from collections.abc import Generator
from typing import Any

# Images of containers often set this. Every process that tests start, of hundreds, would compile all modules anew.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

# Some machines choose OpenBLAS's kernels of another processor, whose bits depend on the number of rows. The interpreter
# of Triton multiplies by them, and tests of the same bits compare.
os.environ.pop("OPENBLAS_CORETYPE", None)

# Two threads, however many cores there are. They sleep while they wait: where there are fewer cores than threads, as
# with a test process for each core, threads that spin take ten times the processor time of the work.
os.environ.setdefault("OMP_NUM_THREADS", "2")
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import pytest
import torch
from hypothesis import HealthCheck, settings

from kernels import cpp
from models import trim
from tests import draws

sys.dont_write_bytecode = False  # as above, for this process

# It is for a process that loads one model; here it was half of the time of a load, of thousands. Commands that tests
# start still do it.
trim.release_libraries = lambda: None

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")  # read when triton is first imported

# A shell's background job ignores Ctrl-C and one under nohup a closed terminal; so would what a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

# What a chat keeps, the history of typed lines for one, is not to be kept among the things of whoever runs the tests.
os.environ["XDG_STATE_HOME"] = tempfile.mkdtemp(prefix="coppice-tests-")
atexit.register(shutil.rmtree, os.environ["XDG_STATE_HOME"], ignore_errors=True)

os.environ["COPPICE_CACHE"] = "off"  # but in the tests of what is derived and kept

settings.register_profile("steady", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("steady")

PRETEND = "COPPICE_PRETEND"
THREADS = torch.get_num_threads()
FULL = "left out: {} of the tests and three quarters of the random draws; `make test-all` (--full) has them"
LEFT_OUT, LOST = pytest.StashKey[int](), pytest.StashKey[str]()
WORKER = "PYTEST_XDIST_WORKER"  # a variable of processes that xdist starts


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help="run the tests marked `full` too, and all random draws")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what only a full run has; `unless` is a function of a test's parameters that says which stay."""

    def is_full(item: pytest.Item) -> bool:
        called = getattr(item, "callspec", None)
        params = {} if called is None else called.params
        marks = [mark.kwargs.get("unless") for mark in item.iter_markers("full")]
        return any(unless is None or not unless(**params) for unless in marks)

    left_out = [] if config.getoption("full") else [item for item in items if is_full(item)]
    config.stash[LEFT_OUT] = len(left_out)
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        gone = set(left_out)
        items[:] = [item for item in items if item not in gone]


def pytest_sessionfinish(session: pytest.Session) -> None:
    if (told := getattr(session.config, "workeroutput", None)) is not None:  # a process of xdist
        told["left_out"] = session.config.stash.get(LEFT_OUT, 0)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """A process of xdist has ended; each has collected all tests."""
    node.config.stash[LEFT_OUT] = getattr(node, "workeroutput", {}).get("left_out", 0)


def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    """After an illegal access to a GPU all later tests of this process would fail: another one of xdist goes on."""
    if node.get_closest_marker("gpu") and torch.cuda.is_available():
        try:
            torch.cuda.synchronize()
        except Exception as error:
            node.session.stash[LOST] = f"the GPU is lost to this process: {error}"
            if WORKER not in os.environ:
                node.session.shouldstop = node.session.stash[LOST]


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Generator[None, object, object]:
    """A process of xdist that has lost the GPU ends when the test has been reported."""
    done = yield
    if LOST in item.session.stash and WORKER in os.environ:
        os._exit(1)
    return done


class AtOnce:
    """Tells of a failed test at once: of a run on a GPU that is killed there is no summary."""

    def __init__(self, config: pytest.Config):
        self.config = config

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A test has been reported, by this process or one of xdist's."""
        terminal = self.config.pluginmanager.get_plugin("terminalreporter")
        if report.failed and terminal is not None:
            why = [line for line in report.longreprtext.splitlines() if line.startswith("E ")][:3]
            terminal.write_line("\n".join([f" failed: {report.nodeid}", *why]))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Numbers that are drawn without a seed are the same whichever tests have run before, for fixtures and the test."""
    torch.manual_seed(0)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_call() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def own_process() -> None:
    """Reset what the process shares: the threads, which an engine sets. Kernels are loaded before a test moves the
    cache folder, where they would be built once more. Triton, which few tests import, is seen to after the first."""
    torch.set_num_threads(THREADS)
    cpp.why_not()
    if os.environ.get("TRITON_INTERPRET") == "1" and "triton.runtime.interpreter" in sys.modules:
        from tests.interpreter import quicken

        quicken()


@pytest.fixture
def one_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ask Triton's kernels for the same bits in any batch, by `COPPICE_SAME_BITS=on`, in the interpreter too."""
    from tests.marks import INTERPRETED

    monkeypatch.setenv("COPPICE_SAME_BITS", "on")
    if INTERPRETED:
        from triton.runtime.interpreter import InterpreterBuilder

        from tests.interpreter import dot_in_order

        monkeypatch.setattr(InterpreterBuilder, "create_dot", dot_in_order)


def pytest_configure(config: pytest.Config) -> None:
    """Builds the kernels before there are worker processes; refuses to test other code than the environment names."""
    draws.FULL = config.getoption("full")
    if WORKER not in os.environ and config.getoption("markexpr") == "gpu":
        config.pluginmanager.register(AtOnce(config))
    if PRETEND in os.environ:
        pretend()
    missing, kernels = cpp.why_not(), os.environ.get("COPPICE_KERNELS")
    if kernels and (kernels == "off") != bool(missing):
        raise pytest.UsageError(f"COPPICE_KERNELS={kernels}, but {missing or 'there are C++ kernels'}")
    loaded = torch.backends.cpu.get_cpu_capability()
    capability = os.environ.get("ATEN_CPU_CAPABILITY", loaded)
    if capability.upper() != loaded:
        raise pytest.UsageError(f"ATEN_CPU_CAPABILITY={capability}, but torch runs its code for {loaded}")


def pretend() -> None:
    """Sets the pretence of `engine.load.fastest.pretended` where it is "other": what this processor does not choose."""
    from engine.errors import UsageError
    from engine.load.capabilities import pick_precision
    from engine.load.fastest import pretended

    cpu = torch.device("cpu")
    if os.environ[PRETEND] == "other":
        del os.environ[PRETEND]
        own = pick_precision(torch.bfloat16, cpu, 0, 1).dtype
        os.environ[PRETEND] = "no-bf16" if own == torch.bfloat16 else "bf16"
    try:
        pretended(cpu)
    except UsageError as error:
        raise pytest.UsageError(str(error)) from None


def pytest_report_header() -> list[str]:
    kernels = cpp.why_not() or f"C++ for {cpp.find().target.name}, {cpp.find().path}"
    capability, isa = torch.backends.cpu.get_cpu_capability(), os.environ.get("ONEDNN_MAX_CPU_ISA", "all there is")
    told = [f"kernels: {kernels}", f"torch: {torch.__version__}, {capability}; oneDNN: {isa}; {THREADS} threads"]
    return told + ([f"{PRETEND}={os.environ[PRETEND]}"] if PRETEND in os.environ else [])


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """How many tests were left out, and skipped for which reason; -rs says where."""
    if left_out := terminalreporter.config.stash.get(LEFT_OUT, 0):
        terminalreporter.write_line(FULL.format(left_out))
    skipped = terminalreporter.stats.get("skipped", [])
    reasons = Counter(report.longrepr[-1].removeprefix("Skipped: ") for report in skipped)
    for reason, count in reasons.most_common():
        terminalreporter.write_line(f"{count} skipped: {reason}")
