"""A reward that can be checked: the share of its tests that a generated Python function passes, in a process of its own
that may use a second of the processor, half a gigabyte, no file, no network and no other program."""

import contextlib
import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple


class Exercise(NamedTuple):
    """A function to write, and calls of it with what they return, as Python."""

    name: str
    order: str
    tests: tuple[tuple[str, str], ...]

    @property
    def text(self) -> str:
        return f"Write a Python function {self.name} {self.order}. Answer with the code only, without comments."


EXERCISES = (
    Exercise("digit_sum(n)", "that returns the sum of the decimal digits of an integer, which may be negative",
             (("digit_sum(0)", "0"), ("digit_sum(472)", "13"), ("digit_sum(-38)", "11"), ("digit_sum(9009)", "18"))),
    Exercise("second_largest(numbers)", "that returns the second largest distinct number of a list, or None",
             (("second_largest([3, 1, 2])", "2"), ("second_largest([5, 5, 4])", "4"), ("second_largest([7])", "None"),
              ("second_largest([2, 2])", "None"), ("second_largest([-1, -5, -3])", "-3"))),
    Exercise("rotate(items, k)", "that returns a new list, rotated to the right by k places, for any k",
             (("rotate([1, 2, 3], 1)", "[3, 1, 2]"), ("rotate([1, 2, 3], 0)", "[1, 2, 3]"), ("rotate([], 2)", "[]"),
              ("rotate([1, 2, 3, 4], 6)", "[3, 4, 1, 2]"), ("rotate([1, 2, 3], -1)", "[2, 3, 1]"))),
    Exercise("is_leap(year)", "that tells whether a year of the Gregorian calendar is a leap year",
             (("is_leap(2024)", "True"), ("is_leap(1900)", "False"), ("is_leap(2000)", "True"),
              ("is_leap(2023)", "False"))),
    Exercise("run_lengths(text)", "that returns a list of pairs (character, length) for the runs of equal characters",
             (("[tuple(x) for x in run_lengths('aabccc')]", "[('a', 2), ('b', 1), ('c', 3)]"),
              ("[tuple(x) for x in run_lengths('')]", "[]"), ("[tuple(x) for x in run_lengths('z')]", "[('z', 1)]"),
              ("[tuple(x) for x in run_lengths('abba')]", "[('a', 1), ('b', 2), ('a', 1)]"))),
    Exercise("roman(n)", "that returns a number from 1 to 3999 as a Roman numeral",
             (("roman(1)", "'I'"), ("roman(4)", "'IV'"), ("roman(9)", "'IX'"), ("roman(2024)", "'MMXXIV'"),
              ("roman(649)", "'DCXLIX'"))),
)  # fmt: skip
SECONDS, BYTES = 1, 1 << 29  # that a program may use
JUDGE = """
import resource, sys, collections, functools, itertools, math, re, string, typing
for limit, most in (("CPU", {seconds}), ("AS", {bytes}), ("FSIZE", 0), ("NPROC", 0), ("CORE", 0)):
    resource.setrlimit(getattr(resource, "RLIMIT_" + limit), (most, most))
source, tests = eval(sys.stdin.read())
denied = "open", "os.", "socket.", "subprocess.", "shutil.", "ctypes.", "import", "signal.", "sys._", "mmap.", "pty."
def refuse(event, args):
    if event.startswith(denied) and not (event == "import" and args[0] in sys.modules):
        raise PermissionError(event)
sys.addaudithook(refuse)
scope, passed, write, sys.stdout = {{"__name__": "program"}}, 0, sys.stdout.write, None
exec(source, scope)
for call, wanted in tests:
    try:
        passed += repr(eval(call, scope)) == repr(eval(wanted, {{}}))
    except Exception:
        pass
write(str(passed))
"""


def reward(prompt: Any, texts: Sequence[str]) -> list[float]:
    """Rewards of answers, or of their beginnings: the share of the tests that the longest part which compiles passes;
    0 where there is none."""
    question = prompt if isinstance(prompt, str) else prompt[-1]["content"]
    exercise = next(one for one in EXERCISES if one.text == question)
    return [judged(program(text), exercise) for text in texts]


def program(text: str) -> str:
    """The code of an answer, in a Markdown fence or bare, up to the last line up to which it compiles."""
    fence = re.search(r"```(?:python|py)?\n", text)
    lines = (text[fence.end() :] if fence else text).partition("```")[0].splitlines()
    for end in range(len(lines), 0, -1):
        with contextlib.suppress(SyntaxError, ValueError):
            compile(source := "\n".join(lines[:end]) + "\n", "program", "exec")
            return source
    return ""


@cache
def judged(source: str, exercise: Exercise) -> float:
    """The share of the tests that a program passes; 0 for one that does not define its function."""
    if f"def {exercise.name.partition('(')[0]}(" not in source:
        return 0.0
    with tempfile.TemporaryDirectory() as empty:
        try:
            done = subprocess.run(
                [sys.executable, "-I", "-S", "-c", JUDGE.format(seconds=SECONDS, bytes=BYTES)],
                input=repr((source, exercise.tests)), cwd=empty, env={}, capture_output=True, text=True,
                timeout=20 * SECONDS,
            )  # fmt: skip
        except subprocess.TimeoutExpired:
            return 0.0
    return int(done.stdout) / len(exercise.tests) if done.stdout.isdigit() else 0.0
