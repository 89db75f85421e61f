"""Imported first: while a command line's modules are loaded, Ctrl-C ends the process without a traceback. Command lines
import torch with `import_torch`, which leaves out what only torch's compiler needs.

`engine.app.cli.run` restores Ctrl-C, `engine.load.compiling` imports the rest. Nothing changes in programs
that import the engine.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib.util
import runpy
import signal
import sys
import threading
from pathlib import Path
from types import ModuleType

starting = sys.argv[:1] == ["-m"]  # Python's placeholder until it has found the module to run
if starting and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

METAS = "torch._meta_registrations"  # shapes of results without data, for the compiler: 21 MB
# The class of generators' class and its module, which torch has imported: before torch 2.14, and since.
GENERATORS = {"torch._opaque_base": "OpaqueBaseMeta", "torch._custom_class_base": "CustomClassBaseMeta"}
WITHOUT_TORCH = "asyncio", "importlib.metadata", "jinja2", "sentencepiece", "tokenizers"  # but imported anyway
COMMANDS = {"engine.chat", "engine.batch", "engine.serve"}
command = starting and not COMMANDS.isdisjoint(sys.orig_argv)
# Programs that import the engine may have a module `search` of their own.
own = runpy.run_path(str(Path(__file__).parents[2] / "models" / "own.py"), run_name="models.own")
own["check"]("kernels", "models", *(["search"] if command else []))

import models  # noqa: E402, F401  # sets a filter before torch is imported


def import_torch() -> None:
    """Import torch for a command line: without the parts that only its compiler needs, and without NumPy, which
    torch imports and nothing here needs.

    If a search from outside was loaded, which may need both, torch is already imported as a whole.
    """
    if "torch" in sys.modules:
        return
    atexit.register(gc.freeze)  # Python's last collections would go through all of torch, for 0.2 s
    left_out = {METAS: ModuleType(METAS), **({} if "numpy" in sys.modules else {"numpy": None})}
    loading = threading.Thread(target=_load_library, daemon=True)  # holds no lock of Python most of the time
    loading.start()
    for name in WITHOUT_TORCH:
        importlib.import_module(name)
    sys.modules |= left_out  # type: ignore[arg-type]
    gc.disable()  # collections would go through the growing modules again and again: a twentieth of the import's time
    try:
        import torch
    finally:
        for name in left_out:
            del sys.modules[name]  # a later import gets the real one
        gc.enable()
    gc.freeze()  # collections during a run need not go through it either
    if allow := getattr(torch._C, "_set_generator_metaclass", None):  # not in torch 2.11
        # A module that was left out with it makes torch.Generator() possible, by this call.
        for module, name in GENERATORS.items():
            if module in sys.modules:
                allow(getattr(sys.modules[module], name))


def _load_library() -> None:
    """Load the largest library of torch, a sixth of the time of its import; for a GPU torch itself first chooses
    among CUDA's libraries."""
    found = importlib.util.find_spec("torch")
    for folder in found.submodule_search_locations or () if found is not None else ():
        libraries = Path(folder) / "lib"
        if not (libraries / "libtorch_cuda.so").exists():
            with contextlib.suppress(OSError):  # on other systems the library has another name: torch loads it itself
                ctypes.CDLL(str(libraries / "libtorch_cpu.so"))


def restore_interrupts() -> None:
    """Make Ctrl-C a KeyboardInterrupt again."""
    if signal.getsignal(signal.SIGINT) == signal.SIG_DFL:
        signal.signal(signal.SIGINT, signal.default_int_handler)
