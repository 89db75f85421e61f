"""NumPy, Triton and matplotlib are no dependencies: without them nothing warns and nothing fails on a CPU, under
`python -W error` too."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
# Importing one of them raises ModuleNotFoundError.
HIDE = "import sys; sys.modules |= dict.fromkeys(('numpy', 'triton', 'matplotlib'))\n"
RUN = "import runpy; sys.argv = ['-m', *sys.argv[1:]]; runpy.run_module('engine.{}', run_name='__main__')"


def run(code: str, *arguments: str, **options) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "error", "-c", HIDE + code, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, **options)


@pytest.mark.full(unless=lambda module: module == "search.base")
@pytest.mark.parametrize("module", ["kernels.rows", "models.formats.linear", "engine", "search.base", "tools.convert"])
def test_whatever_is_imported_first(module):
    done = run(f"import {module}")
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_engine_batch():
    searches = ["greedy", "trie", "sample", "sbon", "dsbd", "aded", "ults"]
    lines = [{"prompt": "Hello", "params": {"search": search, "max_new_tokens": 3}} for search in searches]
    done = run(RUN.format("batch"), "-q", "--threads", "1", input="\n".join(map(json.dumps, lines)))
    assert (done.returncode, done.stderr) == (0, "")
    assert [len(json.loads(line)["outputs"]) > 0 for line in done.stdout.splitlines()] == [True] * len(searches)


def test_engine_chat():
    asked = ["-p", "What is the opposite of hot?", "--dtype", "float32", "--threads", "1"]
    done = run(RUN.format("chat"), *asked, stdin=subprocess.DEVNULL)
    assert (done.returncode, done.stdout, done.stderr) == (0, "Cold is the opposite of hot.\n", "")


def test_files_are_written(tmp_path):
    """Files that ULTS keeps: the `save` of safetensors needs NumPy."""
    code = (
        "from pathlib import Path; from search.ults.prior import Vectors; import torch\n"
        "Vectors.of(torch.randn(3, 9).log_softmax(-1)).save(Path(sys.argv[1])); print(Vectors.load(Path(sys.argv[1])))"
    )
    done = run(code, str(tmp_path / "prior.safetensors"))
    assert (done.returncode, done.stderr) == (0, "") and "Vectors" in done.stdout
