"""The GPU benchmark: what of it needs no GPU."""

import dataclasses

import pytest
import torch
from torch.nn import functional as F

from engine.pool import PagePool
from kernels.tree_attention import tree_attention
from models.config import ModelShape
from tools.bench import gpu
from tools.bench.__main__ import main


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so(capsys):
    assert main(["gpu"]) == 0
    assert capsys.readouterr().out == "no GPU here: nothing to measure\n"


def test_rivals_are_given_the_same_attention():
    pool = PagePool(ModelShape(1, 2, 8, 1, None), 40, 16)
    k_GSD, v_GSD = pool.cache.k_LGSD[0].normal_(), pool.cache.v_LGSD[0].normal_()
    s = gpu.scene(pool, 100, 7)
    q_THD = torch.randn(7, 2, 8)
    layout = dataclasses.replace(s.layout, impl="reference")
    ours = tree_attention(q_THD, k_GSD, v_GSD, layout, scale=8**-0.5)
    k, v = (x[:, s.slots_S][None] for x in (k_GSD, v_GSD))
    theirs = F.scaled_dot_product_attention(q_THD.transpose(0, 1)[None], k, v, attn_mask=s.visible_QS)
    torch.testing.assert_close(ours, theirs[0].transpose(0, 1))
    assert len(s.slots_S) == 100 + 2 * 7 and s.visible_QS.sum() == 7 * (100 + 2)
