"""The clocks of a GPU while a stage runs: by a program that stands in for nvidia-smi."""

import os
import time
from types import SimpleNamespace

import pytest
import torch

from tools.bench.gpu import clocks

CUDA = torch.device("cuda")
OLD = """#!/bin/sh
case "$*" in *clocks_event_reasons*) echo 'Field "clocks_event_reasons.active" is not a valid field'; exit 2;; esac
case "$*" in *--id=GPU-11-22*) ;; *) exit 3;; esac
echo "1755, 1980, 2619, 512.30, 700.00, 61, 0x0000000000000004"
echo >> "$0.ran"
"""


@pytest.fixture
def program(monkeypatch, tmp_path):
    """Puts a program in the place of nvidia-smi; None: there is none."""
    clocks.query.cache_clear()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="11-22"))
    monkeypatch.setattr(clocks, "LOOP", clocks.LOOP.replace("sleep 1", "sleep 0.02"))

    def put(text):
        if text is not None:
            (tmp_path / "nvidia-smi").write_text(text)
            (tmp_path / "nvidia-smi").chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}" if text else str(tmp_path))

    yield put
    clocks.query.cache_clear()


def test_samples_of_a_stage(program, tmp_path):
    """The field of the reasons has the name that the driver knows."""
    program(OLD)
    ran = tmp_path / "nvidia-smi.ran"
    with clocks.watching_clocks(CUDA) as found:
        until = time.monotonic() + 60
        while len(ran.read_bytes()) < 2 and time.monotonic() < until:  # the first time was to see whether it works
            time.sleep(0.01)
        assert not found
    assert found["samples"] >= 1 and found["clocks.sm"] == [1755, 1755] and found["slowed"] == {"power cap": 1.0}
    assert clocks.text_of(found).endswith("at most 512 of 700 W, 61 degrees Celsius. Slowed: power cap in 100%.")


@pytest.mark.parametrize(
    ("text", "device", "why"),
    [
        (None, CUDA, "nvidia-smi: No such file or directory"),
        ("#!/bin/sh\necho no driver >&2; exit 9\n", CUDA, "nvidia-smi: no driver"),
        (OLD, torch.device("cpu"), "nvidia-smi knows no cpu"),
    ],
)
def test_where_nothing_is_known_a_line_says_why(text, device, why, program):
    program(text)
    with clocks.watching_clocks(device) as found:
        pass
    assert clocks.text_of(found) == f"Clocks of the GPU are not known: {why}."


def test_idle_samples_and_what_a_card_does_not_tell():
    """A GPU that was idle throughout is told of as it was; half a line is no sample."""
    idle = clocks.parsed("345, 1980, 2619, 70.1, [N/A], 30, 0x0000000000000001\n")
    busy = [
        clocks.parsed(f"{mhz}, 1980, 2619, 400, [N/A], 60, {bits}\n") for mhz, bits in ((1900, "0x0"), (1500, "0x60"))
    ]
    assert clocks.parsed("1755, 1980, 26") is None and clocks.parsed("1, 2, 3, 4, 5, 6, 0x") is None
    found = clocks.summed_up([idle, *busy, idle])
    assert found["samples"] == 2 and found["clocks.sm"] == [1500, 1900] and found["power.limit"] is None
    assert found["slowed"] == {"heat (software)": 0.5, "heat (hardware)": 0.5}
    assert "1500 to 1900 MHz of 1980, memory 2619 MHz; at most 400 of ? W" in clocks.text_of(found)
    assert clocks.summed_up([idle])["clocks.sm"] == [345, 345] and "why_not" in clocks.summed_up([])
