"""The process that renders templates: which interpreter it runs, how long it lives, and that nothing disturbs it."""

import os
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import venv
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.errors import CheckpointError, UsageError
from engine.text import sandbox, sandbox_process
from engine.text.template import ChatTemplate

ROOT = Path(__file__).parents[3]
HI = [{"role": "user", "content": "hi"}]
LINUX = pytest.mark.skipif(not os.path.isdir("/proc/self"), reason="looks at processes in /proc")


def rendered(source: str = "{{ messages[0].content }}") -> str:
    return "".join(text for text, _ in ChatTemplate(source).render(HI))


def pid() -> int:
    assert sandbox_process.TEMPLATES.process is not None
    return sandbox_process.TEMPLATES.process._popen.pid


def gone(number: int) -> bool:
    """Whether there is no such process any more, not even a zombie."""
    try:
        os.kill(number, 0)
    except ProcessLookupError:
        return True
    return False


def soon(condition: Callable[[], bool]) -> bool:
    deadline = time.monotonic() + 60
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
    return condition()


@pytest.fixture(autouse=True)
def afresh():
    """No process from the tests before, none left for those after."""
    sandbox_process.TEMPLATES.end()
    yield
    sandbox_process.TEMPLATES.end()


def run(program: str, **environment: str) -> subprocess.CompletedProcess:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )


# --- one process, as long as it is used ---


def test_one_process_for_all_templates_and_none_before_the_first_render():
    first, second = ChatTemplate("1{{ messages[0].content }}"), ChatTemplate("2{{ messages[0].content }}")
    assert sandbox_process.TEMPLATES.process is None
    assert first.render(HI) == [("1hi", True)]
    number = pid()
    for n in range(2 * sandbox.COMPILED):  # more than are kept compiled
        assert rendered(f"{n}") == f"{n}"
    assert second.render(HI) == [("2hi", True)] and first.render(HI) == [("1hi", True)]
    assert pid() == number


def test_an_idle_process_ends(monkeypatch):
    started, start = [], sandbox_process._Process
    monkeypatch.setattr(sandbox_process, "_Process", lambda of: started.append(start(of)) or started[-1])
    monkeypatch.setattr(sandbox_process, "IDLE_SECONDS", 0.3)
    rendered()
    assert soon(lambda: gone(started[0]._popen.pid)) and sandbox_process.TEMPLATES.process is None
    monkeypatch.setattr(sandbox_process, "IDLE_SECONDS", 60.0)
    assert rendered() == "hi" and pid() != started[0]._popen.pid


def test_a_process_in_use_does_not_count_as_idle(monkeypatch):
    rendered()
    process, waits = sandbox_process.TEMPLATES.process, []
    process.used = now = 1000.0

    def wait(seconds: float) -> bool:
        """Lets the time pass that a request, at first, or nothing interrupts."""
        nonlocal now
        waits.append(seconds)
        now += seconds
        if len(waits) == 1:
            process.used = now - 1
        return len(waits) == 3

    monkeypatch.setattr(process, "_ended", SimpleNamespace(wait=wait))
    monkeypatch.setattr(sandbox_process, "time", SimpleNamespace(monotonic=lambda: now))
    used = []
    monkeypatch.setattr(sandbox_process.TEMPLATES, "end", lambda: used.append(now - process.used))
    process._expire()
    assert waits == [60, 59, 0] and used == [60], "it ended while it was in use"


def test_a_dead_process_is_replaced():
    rendered()
    os.kill(number := pid(), signal.SIGKILL)
    assert soon(lambda: sandbox_process.TEMPLATES.process is None or not sandbox_process.TEMPLATES.process.alive())
    assert rendered() == "hi" and pid() != number


def test_a_refused_template_does_not_disturb_the_next():
    hostile = ["{% for i in range(99999) %}{% for m in messages[0].content * 99999 %}{% endfor %}{% endfor %}"]
    hostile += [f"{{% set x = 'x' | center({n}00000000) %}}{{{{ x | upper ~ x ~ x }}}}" for n in range(1, 6)]
    for source in hostile:
        with pytest.raises(CheckpointError):
            rendered(source)
        assert rendered() == "hi"
    assert rendered("{{ messages[0].content | center(40000000) | length }}") == "40000000"


def test_a_process_with_little_memory_left_is_replaced(monkeypatch):
    rendered()
    monkeypatch.setattr(sandbox, "MEMORY_BYTES", 1 << 20)
    assert sandbox.spent() == os.path.isdir("/proc/self")
    monkeypatch.setattr(sandbox, "MEMORY_BYTES", 1 << 60)
    assert not sandbox.spent()
    replies = iter([{"text": "one", "spent": True}])
    monkeypatch.setattr(sandbox_process.TEMPLATES.process, "ask", lambda *_: next(replies))
    number = pid()
    assert rendered() == "one" and sandbox_process.TEMPLATES.process is None and gone(number)


@pytest.mark.parametrize("end", ["", "os._exit(0)", "os.kill(os.getpid(), signal.SIGKILL)", "raise KeyboardInterrupt"])
def test_it_ends_with_the_program(end):
    done = run(f"""
        import os, signal
        from engine.text import sandbox_process
        from engine.text.template import ChatTemplate
        ChatTemplate("x").render([{{"role": "user", "content": "hi"}}])
        print(sandbox_process.TEMPLATES.process._popen.pid, flush=True)
        {end}
    """)
    assert soon(lambda: gone(int(done.stdout)))


def test_an_interrupt_leaves_no_answer_for_the_next_request(monkeypatch):
    rendered()
    process = sandbox_process.TEMPLATES.process
    assert process is not None

    def interrupted(*_: object) -> bool:
        raise KeyboardInterrupt

    monkeypatch.setattr(sandbox_process, "_ready", interrupted)
    with pytest.raises(KeyboardInterrupt):
        rendered("other")
    monkeypatch.undo()
    assert gone(process._popen.pid) and rendered() == "hi"


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork on this system")
def test_a_fork_has_a_process_of_its_own():
    """Whatever its parent's threads are doing with theirs; and the parent's ends although the fork lives on."""
    done = run("""
        import os, sys, threading, time, warnings
        warnings.simplefilter("error")
        from engine.text import sandbox_process
        from engine.text.template import ChatTemplate
        template = ChatTemplate("{{ messages[0].content }}")
        render = lambda text: "".join(t for t, _ in template.render([{"role": "user", "content": text}]))
        render("x")
        own = sandbox_process.TEMPLATES.process._popen.pid
        stop = threading.Event()
        def busy():
            while not stop.is_set():
                assert render("thread") == "thread"
        thread = threading.Thread(target=busy)
        thread.start()
        warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns of any fork beside threads
        for n in range(8):
            child = os.fork()
            if not child:
                os._exit(0 if render(str(n)) == str(n) and sandbox_process.TEMPLATES.process._popen.pid != own else 1)
            assert os.waitpid(child, 0)[1] == 0
        stop.set()
        thread.join()
        assert render("x") == "x" and sandbox_process.TEMPLATES.process._popen.pid == own
        if not os.fork():
            os.close(1), os.close(2)
            time.sleep(150)  # holds whatever it inherited
            os._exit(0)
        print(own, flush=True)
        os._exit(0)
    """)
    assert not done.stderr and soon(lambda: gone(int(done.stdout)))


@LINUX
def test_the_terminals_signals_do_not_reach_it_even_while_it_starts():
    """A child that stops between fork and exec would hold its parent for ever."""
    rendered()
    status = Path(f"/proc/{pid()}/status").read_text()
    blocked = int(status.split("SigBlk:")[1].split()[0], 16)
    for number in (signal.SIGINT, signal.SIGTSTP, signal.SIGQUIT, signal.SIGHUP):
        assert blocked >> (number - 1) & 1
    assert os.getsid(pid()) == pid()
    assert signal.SIGTSTP not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


# --- the limits hold wherever it is started from ---


def test_a_mask_of_signals_does_not_lift_the_limit(monkeypatch):
    """An application may block signals in its threads; a mask is inherited."""
    found = []
    monkeypatch.setattr(sandbox_process.Sandbox.ask, "__defaults__", (600.0,))  # seconds: the CPU limit has to end it

    def work() -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGPROF])
        rendered()
        process = sandbox_process.TEMPLATES.process
        try:
            rendered("{% for a in range(99999) %}{% for m in messages[0].content * 2000 %}{% endfor %}{% endfor %}")
        except CheckpointError as error:
            found.append((str(error), process._popen.returncode))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    [(message, status)] = found
    assert "takes more than 0.8 s" in message and status == -signal.SIGPROF


@LINUX
def test_its_memory_is_limited():
    rendered()
    limits = Path(f"/proc/{pid()}/limits").read_text()
    assert f"Max address space         {sandbox.MEMORY_BYTES}" in limits


def test_a_system_without_that_limit(monkeypatch):
    """On macOS, for example, the process runs with the other limits."""
    asked = []

    def refuse(which: int, limit: tuple[int, int]) -> None:
        asked.append(which)
        if which == resource.RLIMIT_AS:
            raise ValueError("current limit exceeds maximum limit")

    monkeypatch.setattr(resource, "setrlimit", refuse)
    sandbox.limit_memory()
    assert asked == [resource.RLIMIT_AS, resource.RLIMIT_CORE]


def test_many_open_files():
    """`select` refuses descriptors from 1024 on."""
    done = run("""
        import os, resource
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 4096), hard))
        if min(hard, 4096) > 1100:
            for _ in range(1050):
                os.open(os.devnull, os.O_RDONLY)
        from engine.text.template import ChatTemplate
        print(ChatTemplate("x" * 10).render([{"role": "user", "content": "hi"}])[0][0])
    """)
    assert done.stdout == "x" * 10 + "\n", done.stderr


# --- which interpreter ---


@pytest.fixture
def application(tmp_path) -> Path:
    """A program that embeds Python, as `sys.executable` names it; it leaves a mark when it is started again."""
    path = tmp_path / "painter"
    path.write_text(f"#!/bin/sh\ntouch {tmp_path}/started\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("executable", ["application", "", None])
@pytest.mark.parametrize("base", ["application", sys._base_executable])
def test_an_application_that_embeds_python_is_not_started_again(monkeypatch, application, executable, base):
    monkeypatch.delenv(sandbox_process.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "executable", str(application) if executable == "application" else executable)
    monkeypatch.setattr(sys, "_base_executable", str(application) if base == "application" else base)
    assert rendered() == "hi"
    assert not (application.parent / "started").exists()


def test_without_an_interpreter_the_error_says_what_to_set(monkeypatch, application):
    monkeypatch.delenv(sandbox_process.VARIABLE, raising=False)
    monkeypatch.setattr(sys, "frozen", True, raising=False)  # as PyInstaller sets it
    monkeypatch.setattr(sys, "executable", str(application))
    monkeypatch.setattr(sys, "base_prefix", str(application.parent))
    monkeypatch.setattr(sandbox_process.sysconfig, "get_config_var", lambda _: None)
    with pytest.raises(UsageError, match=r"set COPPICE_PYTHON to a Python 3 interpreter") as raised:
        rendered()
    assert str(application) in str(raised.value) and not (application.parent / "started").exists()
    monkeypatch.setenv(sandbox_process.VARIABLE, sys._base_executable)
    assert rendered() == "hi"


def test_the_interpreter_that_was_chosen(monkeypatch, tmp_path, application):
    chosen = tmp_path / "mine"
    chosen.write_text(f'#!/bin/sh\ntouch {tmp_path}/chosen\nexec {sys._base_executable} "$@"\n')
    chosen.chmod(0o755)
    monkeypatch.setenv(sandbox_process.VARIABLE, str(chosen))
    assert rendered() == "hi" and (tmp_path / "chosen").exists()
    for wrong, words in ((tmp_path / "none", "names no executable"), (tmp_path, "names no executable"),
                         (application, "does not run")):  # fmt: skip
        sandbox_process.TEMPLATES.end()
        monkeypatch.setenv(sandbox_process.VARIABLE, str(wrong))
        with pytest.raises(UsageError, match=words) as raised:
            rendered()
        assert str(wrong) in str(raised.value) and "COPPICE_PYTHON" in str(raised.value)
        assert sandbox_process.TEMPLATES.process is None


def test_an_interpreter_without_jinja2(monkeypatch, tmp_path):
    """Where this program's copy is in no folder, as in an archive, the interpreter's own serves."""
    for package in (sandbox_process.jinja2, sys.modules["markupsafe"], sandbox_process.tokenizers):
        monkeypatch.setattr(package, "__file__", str(tmp_path / "archive.zip" / "jinja2" / "__init__.py"))
    assert rendered() == "hi"
    sandbox_process.TEMPLATES.end()
    venv.create(tmp_path / "bare", with_pip=False)
    monkeypatch.setenv(sandbox_process.VARIABLE, str(tmp_path / "bare" / "bin" / "python"))
    with pytest.raises(UsageError, match="cannot be started: No module named 'jinja2'") as raised:
        rendered()
    assert "set COPPICE_PYTHON" in str(raised.value)
