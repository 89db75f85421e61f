"""The engine on a CUDA device gives what it gives on the CPU. Run by `make gpu`."""

from pathlib import Path

import pytest
import torch

from engine import Engine
from search import Greedy, Sample, Trie

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
GOLDEN = Path(__file__).parent / "golden" / "llama"


@pytest.mark.parametrize("variant", ["gqa", "dynamic", "llama3"])
def test_cuda_equals_cpu(variant):
    cpu = Engine.load(GOLDEN / variant, dtype="float32", device="cpu")
    cuda = Engine.load(GOLDEN / variant, dtype="float32", device="cuda")
    prompts = [[7, 20, 33], list(range(5, 60)), [9]]
    for ids in prompts:
        torch.testing.assert_close(cuda.logits(ids).cpu(), cpu.logits(ids), atol=1e-3, rtol=1e-3)
    for search in (Greedy(), Trie(beams=4), Sample(seed=3, num_return_sequences=3)):
        want = cpu.generate(prompts, search, max_new_tokens=20)
        got = cuda.generate(prompts, search, max_new_tokens=20)
        assert [[o.token_ids for o in r.outputs] for r in got] == [[o.token_ids for o in r.outputs] for r in want]
    cuda.pool.check_invariants([])
