"""Reads the output of a benchmark."""

import json
from typing import Any

import pytest


def last_line(capsys: pytest.CaptureFixture[str]) -> Any:
    """The JSON of the last line, which is for programs."""
    return json.loads(capsys.readouterr().out.splitlines()[-1])
