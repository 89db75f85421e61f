"""The requirements of a GPU, checked before weights are read; errors say what to do. The GPU is pretended."""

import importlib.util
import warnings
from types import SimpleNamespace

import pytest
import torch

from engine import Engine, UsageError
from engine.load import compiling
from engine.load.loading import pick_device
from kernels import cpp

needs_triton = pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="needs triton")


@pytest.fixture
def gpu(monkeypatch):
    """Pretends a GPU of the given capability."""

    def pretend(capability):
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Tesla T4")

    return pretend


def set_driver(monkeypatch, build) -> None:
    """Triton's driver, which builds a module when it is first asked for."""
    driver = type("Driver", (), {"active": property(lambda self: build())})()
    monkeypatch.setattr("triton.runtime.driver", driver)


@pytest.mark.parametrize("name", ["auto", "cuda"])
def test_an_old_gpu_is_refused(gpu, name):
    gpu((7, 5))
    with pytest.raises(UsageError, match=r"(?s)Tesla T4 has compute capability 7\.5.*8\.0 \(Ampere\).*--device cpu"):
        pick_device(name)
    with pytest.raises(UsageError, match="too old"):
        Engine.load("no/such/folder", device=name)  # before anything is read
    assert pick_device("cpu") == torch.device("cpu")


@needs_triton
def test_kernels_that_are_still_to_be_compiled_are_announced(gpu, monkeypatch, tmp_path, capsys):
    gpu((9, 0))
    set_driver(monkeypatch, lambda: SimpleNamespace(get_current_target=lambda: 0))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    pick_device("cuda")
    assert "Triton compiles each kernel at its first use" in capsys.readouterr().err
    (tmp_path / "kernel").mkdir()
    (tmp_path / "kernel/_attend.cubin").touch()
    pick_device("cuda")
    assert not capsys.readouterr().err


@needs_triton
def test_what_triton_builds_with(gpu, monkeypatch, tmp_path):
    gpu((9, 0))
    set_driver(monkeypatch, lambda: SimpleNamespace(get_current_target=lambda: 0))
    assert pick_device("auto") == pick_device("cuda") == torch.device("cuda")

    def fail():
        raise RuntimeError("Failed to find C compiler. Please specify via CC")

    set_driver(monkeypatch, fail)
    monkeypatch.setattr("sysconfig.get_paths", lambda: {"include": str(tmp_path)})
    with pytest.raises(UsageError, match=r"(?s)there is no .*Python\.h.*install a C compiler.*python3-dev"):
        pick_device("cuda")
    (tmp_path / "Python.h").touch()
    with pytest.raises(UsageError, match=r"(?s)Failed to find C compiler.*name one in CC"):
        pick_device("cuda")


def test_no_triton(gpu, monkeypatch):
    gpu((9, 0))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"(?s)needs the package triton.*coppice\[gpu\]"):
        pick_device("cuda")


@pytest.mark.skipif(cpp.compiler() is None, reason="no C++ compiler")
def test_warnings_of_tf32_are_no_errors(monkeypatch):
    """Under `-W error`, as in these tests, inductor's advice would end the compilation."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", "unused")
    assert compiling.prepare()
    warnings.warn(
        "TensorFloat32 tensor cores for float32 matrix multiplication available but not enabled", stacklevel=1
    )


@needs_triton
def test_versions_that_do_not_go_together():
    from kernels.gpu import check_interpreter

    with pytest.raises(ImportError, match=r"triton 3\.6\.0 fails with NumPy 2\.4\.1: pip install 'triton>=3\.7'"):
        check_interpreter("3.6.0", "2.4.1")
    for versions in (("3.6.0", "2.3.5"), ("3.7.1", "2.4.6"), ("3.10.0", "2.5.0")):
        check_interpreter(*versions)
