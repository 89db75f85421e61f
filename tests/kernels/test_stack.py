"""The layers of a model as one call: the same to the bit as the operators one by one."""

import json
import shutil
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from itertools import chain
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from engine import Engine
from engine.cache.tree import TokenTree
from engine.errors import NumericsError
from engine.step.packing import Chunk, pack
from engine.step.runner import Keep, PassWork
from kernels import cpp
from kernels.rows import TopSums
from kernels.stack import Angles, Stack, one_by_one
from models import FAMILIES
from models.checkpoint.headers import Checkpoint
from models.config import LayerInputs, Streams, Uneven
from models.families.llama import Llama
from models.names import Names
from models.rope import RopeConfig
from models.running import Registers, run
from search import Greedy, Trie
from tests.recurrent import BY_KEY, CHANNELS, SCAN, hybrid
from tools.random_checkpoint import make

GOLDEN = Path(__file__).parents[1] / "golden"
SIZES = {
    "grouped heads": {"heads": 6, "kv_heads": 2},
    "odd heads, biases": {"heads": 3, "head_dim": 20, "attention_bias": True, "mlp_bias": True},
    "wide": {"heads": 4, "mlp": 512, "width": 512},
}
VARIANTS = [
    *("opt/plain", "opt/no_biases", "opt/no_affine", "gpt2/plain", "gpt2/unscaled", "gpt2/gelu", "gpt2/wide"),
    *("opt/post_norm", "opt/no_final_norm", "gpt2/by_layer", "phi/plain", "phi/gqa", "phi/partial", "phi/qk_layernorm"),
    *("phi3/plain", "phi3/window", "qwen3/plain", "qwen3/windows", "qwen3/bias", "qwen3_5/plain", "qwen3_5/bias"),
    *("qwen2/windows", "mistral/ministral", "stablelm/plain", "stablelm/parallel", "stablelm/qk_layernorm"),
    *("mistral/ministral3", "smollm3/plain", "granite/plain", "olmo/olmo3", "hunyuan/plain"),
    *("lfm2/plain", "lfm2/bias", "lfm2/one_tap", "lfm3/plain", "bitnet/plain"),
    *("olmo_hybrid/plain", "olmo_hybrid/rotated", "kimi_linear/plain", "kimi_linear/kinds"),
    *("bailing_hybrid/plain", "bailing_hybrid/unbounded", "zamba2/plain", "zamba2/bias"),
    *("experts/qwen2", "experts/qwen3_steps", "experts/olmoe", "experts/mixtral_window", "experts/granite_shared"),
    *("experts/lfm2", "experts/phi", "experts/qwen3_5", "experts/qwen3_next", "gpt_oss/plain"),
    *("qwen3_5/recurrent_taps", "experts/qwen3_next_recurrent", "granite/scans_experts", "granite/scans_groups"),
    *("glm/plain", "glm/four", "glm/moe", "gpt_neox/plain", "gpt_neox/in_turn", "gpt_neox/gptj", "gpt_neox/starcoder"),
    *("gpt_neox/japanese", "experts/minimax_three", "muse/others"),
    *("gpt_neox/falcon_groups", "cohere/norms", "cohere/two", "llamas/exaone_windows", "llamas/nemotron"),
    *("llamas/arcee", "llamas/starcoder2", "experts/minimax", "experts/afmoe", "experts/ernie", "experts/aria"),
    *("deepseek/plain", "deepseek/groups", "deepseek/three_halves", "deepseek/glm_kinds", "deepseek/axk1"),
    *("mistral/mistral4", "cohere/compass", "modernbert/biases", "laguna/plain", "laguna/bias", "laguna/elements"),
    *("apertus/plain", "nemotron_h/plain", "nemotron_h/bias", "nemotron_h/experts", "nemotron_h/latent"),
    *("relatives/olmo", "relatives/minicpm3", "relatives/nanochat", "relatives/granite_swa", "relatives/cohere_moe"),
    *("relatives/persimmon", "relatives/gpt_neo", "relatives/codegen", "relatives/mllama"),
    *("falcon_h1/plain", "falcon_h1/norm", "falcon_h1/bias", "falcon_h1/bamba"),
    *("mamba/plain", "mamba/bias", "mamba/falcon", "jamba/plain", "jamba/experts", "jamba/bias"),
    *("gemma/one", "gemma/two", "gemma/two_full", "gemma/three", "gemma/three_defaults"),
    *("gemma4/plain", "gemma4/inputs", "gemma4/experts", "gemma4/everything", "gemma4/defaults"),
    *("gemma3n/plain", "gemma3n/others", "gemma3n/defaults"),
    *("llama4/plain", "llama4/steps", "llama4/types", "relatives/dbrx", "relatives/olmoe_clipped", "relatives/hy3"),
    *("relatives/flint", "relatives/kolibri", "published/minicpm", "published/internlm2_biases", "published/ling"),
    "alibi/bloom_normed",
]
KINDS = [(dtype, quant) for dtype in ("float32", "bfloat16", "float16") for quant in ("none", "int8")]
IN_EVERY_KIND = (
    "opt/post_norm",
    "gpt2/plain",
    "lfm2/bias",
    "gemma/two",
    "experts/qwen2",
    "deepseek/groups",
    "gemma4/everything",
    "gemma3n/plain",
    "gemma3n/others",
)
INT8_CACHES = [(dtype, "none", "int8") for dtype in ("float32", "bfloat16", "float16")]

pytestmark = pytest.mark.skipif(bool(cpp.why_not()), reason=f"no C++ kernels: {cpp.why_not()}")


def load(folder, kind=("float32", "none")):
    dtype, quant, kv_dtype = (*kind, "auto")[:3]
    return Engine.load(folder, dtype=dtype, quant=quant, kv_dtype=kv_dtype, kv_memory=16 << 20)


@pytest.fixture(scope="module", params=SIZES)
def folder(request, tmp_path_factory):
    path = tmp_path_factory.mktemp("stack") / "model"
    make(path, **{"layers": 2, "width": 96, "vocab": 300, **SIZES[request.param]})
    return path


def stored(engine):
    """The first slots and rows of the cache: all that `passes` writes, and more."""
    cache = engine.pool.cache
    return [*(x[:, :, :256] for x in chain(*cache.groups)), *(x[:, :256] for x in cache.recurrent)]


def passes(engine, length=20):
    """Hidden rows of a prompt, of branches below it, and of a second tree beside them; then the cache."""
    trees = [TokenTree(engine.pool, [5, 6, 7, 8, 9]), TokenTree(engine.pool, list(range(length)))]
    found = []
    for rounds in range(2):
        chunks = []
        for tree in trees:
            prompt = len(tree.trunk.tokens) if not rounds else 0
            parents = tree.grow([tree.root] * 4, [1, 2, 3, 4])
            nodes = tree.grow([*parents[:2], *parents[:2]], [9, 9, 11, 12]) if rounds else []
            nodes = [*parents, *nodes] if rounds else []
            chunks.append(Chunk(tree, prompt, nodes, tree.allocate(prompt, nodes)))
        found.append(engine.runner.forward(chunks).clone())
    found += [x.clone() for x in stored(engine)]
    for tree in trees:
        tree.release()
    return found


@pytest.mark.parametrize("kind", [*KINDS, *INT8_CACHES], ids="-".join)
def test_as_the_operators_one_by_one(folder, kind, monkeypatch):
    check(folder, kind, monkeypatch)


@pytest.mark.full(unless=lambda variant, kind: kind == KINDS[0] or variant in IN_EVERY_KIND)
@pytest.mark.parametrize("kind", KINDS, ids="-".join)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_family_as_its_operators_one_by_one(variant, kind, monkeypatch):
    check(GOLDEN / variant, kind, monkeypatch)


ROPES = RopeConfig(8, theta=100.0), RopeConfig(8), None


def uneven(sizes=((2, 8),) * 3, reads=(0, 1, 2), alike=(False,) * 3, inner=(2048,) * 3):
    """Layers of the sizes that `write` makes, but for some."""
    return Uneven(sizes, reads, alike, inner)


SLOPES = (0.5, 0.25, 0.1, 0.0, 2.0, 0.07)

OPTIONS = {
    "norms of outputs": {"norms": ("output",)},
    "four norms": {"norms": ("input", "output"), "plus_one": True},
    "an epsilon of outputs": {"norms": ("input", "output"), "out_norm_eps": 0.1, "plus_one": "layers"},
    "norms of the stream": {"norms": ("stream",), "rms": False},
    "norms of outputs and sums": {"norms": ("output", "sum")},
    "all heads": {"head_norms": "all"},
    "norms of each head": {"head_norms": "own", "rms": False},
    "norms after the rotation": {"head_norms": "each", "norms_last": True},
    "multipliers": {"embedding_scale": 12.0, "residual_scale": 0.22, "logit_divisor": 8.0, "logit_cap": 3.0},
    "side by side": {"parallel": "shared", "residual_scale": 0.22, "rms": False},
    "side by side, two norms": {"parallel": "own", "rms": False},
    "no biases of norms": {"rms": False, "norm_bias": False},
    "interleaved": {"interleaved": True, "head_norms": "each", "attention_bias": True},
    "interleaved in part": {"interleaved": True, "head_norms": "own", "rms": False, "rope": RopeConfig(4)},
    "three tables": {"ropes": ROPES},
    "gelu": {"activation": "gelu_tanh"},
    "squares": {"activation": "relu_squared", "gated": False},
    "a learned activation": {"activation": "xielu", "gated": False},
    "groups": {"grouped_qkv": "head", "attention_bias": True, "out_bias": False},
    "norms without weights": {"affine": False, "embedding_norm": True, "head_norms": "each"},
    "backwards": {"rope": RopeConfig(8, backwards=True)},
    "bias of queries": {"attention_bias": True, "out_bias": False},
    "gates": {"query_gate": "below", "head_norms": "each", "plus_one": True},
    "gates apart": {"query_gate": "apart", "head_norms": "each"},
    "gates of heads": {"head_gates": True, "head_norms": "each"},
    "softplus of gates of heads": {"head_gates": "softplus"},
    "softplus of gates of elements": {"head_gates": "elements"},
    "norms before the last matrices": {"sub_norms": True, "activation": "relu_squared"},
    "gates, bias": {"query_gate": "below", "attention_bias": True},
    "cap": {"attention_cap": 2.0, "windows": (7, None, 3)},
    "sinks": {"sinks": True, "windows": (7, None, 3)},
    "clipped heads": {"clip": 0.3, "head_norms": "each"},
    "chunks": {"chunks": True, "windows": (7, None, 3)},
    "plain norms of some heads": {"head_norms": "plain", "normed": (True, False, True), "norms_last": True},
    "queries that grow": {"ropes": (RopeConfig(8), RopeConfig(8, "proportional", growth=0.4, growth_start=1), None)},
    "slopes": {"slopes": SLOPES, "rope": None, "windows": (7, None, 3)},
    "coarse slopes": {"slopes": SLOPES, "coarse_slopes": True, "rope": None},
    "clipped": {"clip": 0.5},
    "heads by layer": {"uneven": uneven(sizes=((2, 8), (1, 20), (3, 10))), "head_norms": "each", "value_norms": True},
    "keys of other layers": {"uneven": uneven(reads=(0, 1, 0), inner=(16, 40, 24)), "windows": (7, None, 3)},
    "keys as values": {"uneven": uneven(alike=(False, True, True)), "attention_bias": True},
    "sparse gates": {"sparsity": (1.5, None, -0.3), "activation": "gelu_tanh"},
    "a learned residual": {"laurel": 5, "norms": ("input", "output")},
    "streams": {"streams": Streams(4, 0, scaled=True), "layer_inputs": LayerInputs(6, 10, 2.5, 0.3)},
    "streams, another active": {"streams": Streams(3, 2, scaled=False), "layer_inputs": LayerInputs(6, 300, 2.5, 0.3)},
    "streams alone": {"streams": Streams(2, 1, scaled=False)},
    "inputs": {"layer_inputs": LayerInputs(6, 300, 2.5, 0.3), "layer_scales": True},
}


@pytest.mark.parametrize("kind", [*KINDS, ("float32", "none", "int8")], ids="-".join)
@pytest.mark.parametrize("options", OPTIONS)
def test_every_option_as_the_operators_one_by_one(options, kind, tmp_path, monkeypatch):
    write(tmp_path, OPTIONS[options], monkeypatch)
    check(tmp_path, kind, monkeypatch)


def write(folder, options, monkeypatch):
    """A checkpoint of a family that is a Llama but for some options."""
    names = Names(mlp_norm="before_mlp", attention_out_norm="after_attention", mlp_out_norm="after_mlp")
    if options.get("head_norms") == "own":
        names = replace(names, q_norm="q_norms.{}", k_norm="k_norms.{}")
    if options.get("query_gate") == "apart":
        names = replace(names, qkv=("self_attn.gate_proj", *names.qkv))
    if options.get("grouped_qkv"):
        names = replace(names, qkv=("self_attn.qkv",))
    if not options.get("gated", True):
        names = replace(names, up=names.up[:1])

    class Other(Llama):
        @staticmethod
        def read(fields):
            return replace(Llama.read(fields), **options)

    Other.names = names
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", Other)
    make(folder, layers=3, width=48, heads=6, kv_heads=2, head_dim=8, vocab=300)
    shapes = names.tensors(Other.read(Checkpoint.open(folder).fields))
    generator = torch.Generator().manual_seed(0)
    save_file({name: torch.randn(size, generator=generator) / 4 for name, size in shapes.items()},
              folder / "model.safetensors")  # fmt: skip


def test_what_the_options_mean(tmp_path, monkeypatch):
    """Each against arithmetic in float64, from the tensors that the layer reads and writes."""
    write(tmp_path, {"norms": ("input", "output"), "plus_one": True, "residual_scale": 0.5}, monkeypatch)
    model = load(tmp_path).runner.model
    residual, stored = model.layers[1].mlp_residual, load_file(tmp_path / "model.safetensors")
    x, out = torch.randn(2, 5, 48, generator=torch.Generator().manual_seed(1))
    nothing: Any = SimpleNamespace(rows_impl="cpp")

    def norm(x, name):
        weight = 1 + stored[f"model.layers.1.{name}.weight"].double()
        return x / (x.square().mean(-1, keepdim=True) + model.config.norm_eps).sqrt() * weight

    registers = Registers(x, model.config, (), nothing, nothing)
    run(residual.read(), registers)
    assert torch.allclose(registers["read"].double(), norm(x.double(), "before_mlp"), atol=1e-5)
    registers["read"] = out
    run(list(residual.add("read")), registers)
    expected = x + 0.5 * norm(out.double(), "after_mlp")
    assert torch.allclose(registers["stream"].double(), expected, atol=1e-5)


def test_logits_and_embedding_take_their_multipliers(tmp_path, monkeypatch):
    options = {"logit_divisor": 8.0, "logit_cap": 3.0, "embedding_scale": 48**0.5, "rounded_scale": True}
    write(tmp_path, options, monkeypatch)
    model = load(tmp_path).runner.model
    hidden = 9 * torch.randn(4, 48, generator=torch.Generator().manual_seed(1))
    expected = 3 * torch.tanh(model.head(hidden) / 8 / 3)
    assert torch.allclose(model.logits(hidden), expected, atol=1e-6) and expected.abs().max() > 2
    assert model.embedding_scale == torch.tensor(48**0.5).item()
    assert load(tmp_path, ("bfloat16", "none")).runner.model.embedding_scale == 6.9375


@pytest.mark.parametrize(
    "variant",
    [
        *(
            "opt/post_norm",
            "phi/qk_layernorm",
            "phi3/window",
            "qwen3/windows",
            "qwen3_5/bias",
            "lfm2/bias",
            "gemma/two",
        ),
        *("deepseek/plain", "deepseek/groups", "gemma4/everything", "gemma3n/plain"),
    ],
)
def test_an_int8_cache_of_other_families(variant, monkeypatch):
    check(GOLDEN / variant, ("float32", "none", "int8"), monkeypatch)


@pytest.mark.parametrize("kind", [*KINDS, ("float32", "none", "int8")], ids="-".join)
@pytest.mark.parametrize(
    "options",
    [
        *({}, {"interleaved": True, "layers": "rrar"}, {"kind": SCAN, "layers": "rrar"}),
        *({"kind": SCAN, "beside": True}, {"kind": CHANNELS, "layers": "rrar"}, {"kind": BY_KEY}),
        {"kind": SCAN, "shared": True, "layers": "araa"},
    ],
    ids=["in order", "interleaved", "scan", "scan beside attention", "scan by channels", "decays by key", "shared"],
)
def test_recurrent_layers_as_their_operators(options, kind, tmp_path, monkeypatch):
    """Blocks end in the trunk and in branches, whose tokens read states and each other's rows."""
    hybrid(tmp_path, monkeypatch, **options)
    check(tmp_path, kind, monkeypatch, length=94)


def test_paths_and_stores_of_recurrent_layers_that_do_not_fit(tmp_path, monkeypatch):
    hybrid(tmp_path, monkeypatch)
    engine = load(tmp_path)
    stack, cache, E = engine.runner.model.stack, engine.pool.cache, 32
    tree = TokenTree(engine.pool, [1, 2, 3])
    chunk = Chunk(tree, 3, [], tree.allocate(3, []))
    layout = engine.runner.pack([chunk]).layout
    angles = [Angles((torch.ones(3, engine.runner.model.config.head_dim),) * 2)]
    rows, states = cache.recurrent
    others = [
        ("expected a layout with paths", replace(layout, paths=None), cache.recurrent),
        ("rows_T: expected", replace(layout, paths=replace(layout.paths, rows_T=layout.paths.rows_T + 10**6)), None),
        ("stack's rows of layers with a state: expected", layout, (rows[:1], states)),
        ("stack's states: expected", layout, (rows, states.bfloat16())),
    ]
    for words, other, recurrent in others:
        stores = copy(cache)
        stores.recurrent = recurrent or cache.recurrent
        with pytest.raises(ValueError, match=words):
            stack(torch.zeros(3, E), angles, stores, other)
    stack(torch.zeros(3, E), angles, cache, layout)
    tree.release()


def test_inputs_and_streams_that_do_not_fit():
    engine = load(GOLDEN / "gemma3n/plain")
    tree = TokenTree(engine.pool, [1, 2, 3])
    layout = engine.runner.pack([Chunk(tree, 3, [], tree.allocate(3, []))]).layout
    for words, inputs_TF, streams_TNE in (
        (r"layers have inputs: expected \[3, 36\]", None, torch.zeros(3, 4, 24)),
        (r"layers have streams: expected \[3, 4, 24\]", torch.zeros(3, 36), None),
        ("a stack's streams: expected", torch.zeros(3, 36), torch.zeros(3, 3, 24)),
    ):
        with pytest.raises(ValueError, match=words):
            engine.runner.model.stack(torch.zeros(3, 24), [], engine.pool.cache, layout, None, inputs_TF, streams_TNE)
    tree.release()


def check(folder, kind, monkeypatch, length=20):
    taken, run = [], Stack.__call__
    monkeypatch.setattr(Stack, "__call__", lambda self, x, *rest: taken.append(len(x)) or run(self, x, *rest))
    engine = load(folder, kind)
    together = passes(engine, length)
    assert taken == [5 + length, 16]
    for x in stored(engine):
        x.zero_()  # as it was
    engine.runner.model.stack.idle = True
    assert all(map(torch.equal, together, passes(engine, length))) and len(taken) == 2


def test_a_window(tmp_path):
    make(tmp_path / "model", layers=2, width=64, heads=2, vocab=300)
    config = json.loads((tmp_path / "model/config.json").read_text())
    config |= {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "sliding_window": 7,
        "num_key_value_heads": 2,
    }
    (tmp_path / "model/config.json").write_text(json.dumps(config))
    found = []
    for idle in (False, True):
        engine = load(tmp_path / "model")
        engine.runner.model.stack.idle = idle
        found.append(engine.generate([list(range(3, 20))], Trie(beams=4), max_new_tokens=12)[0])
    ours, theirs = ([(output.token_ids, output.logprob) for output in result.outputs] for result in found)
    assert ours == theirs


@pytest.mark.parametrize("kind", [("float32", "none"), ("bfloat16", "none"), ("float32", "int8"), ("bfloat16", "int4")])
def test_the_head_and_top_sums_join(folder, kind):
    """To the bit what the layers, the head and the operator on logits make one after the other, of some tokens."""
    engine = load(folder, kind)
    runner, found = engine.runner, []
    assert runner.model.joins
    wanted = [TopSums([0.5], 4), TopSums([0.0, -1.0], 300)]
    for joined in (True, False):
        trees = [TokenTree(engine.pool, tokens) for tokens in ([5, 6, 7, 8, 9], [*range(20)])]
        chunks = [Chunk(tree, n, [], tree.allocate(n, [])) for tree, n in zip(trees, (5, 20), strict=True)]
        hidden = []
        with nullcontext() if joined else one_by_one(runner.model):
            answers, finite = runner.evaluate_top_sums(
                PassWork(chunks, [4, 20, 24], keeps=[Keep(slice(3, 5), hidden.append)]), wanted
            )
        found.append([*answers, hidden[0].clone(), torch.tensor(finite)])
        with pytest.raises(ValueError, match="asked: expected 3 tokens of 25, ascending") if joined else nullcontext():
            runner.evaluate_top_sums(PassWork(chunks, [4, 20, 25] if joined else [4, 20, 24]), wanted)
        for tree in trees:
            tree.release()
    assert all(x.equal(y) for x, y in zip(*found, strict=True))


def turned(calls, table):
    """A layer's calls with another table of angles, or without its rotation."""
    others = [call._replace(table=table) if call.code == "rotate" else call for call in calls]
    return [call for call in others if call.code != "rotate" or table is not None]


def test_a_table_of_angles_for_each_layer(folder):
    """Some models rotate layers of long and of short reach differently, others leave some layers unrotated."""
    engine = load(folder)
    model, cache = engine.runner.model, engine.pool.cache
    tree = TokenTree(engine.pool, [1, 2, 3])
    layout = pack([Chunk(tree, 3, [], tree.allocate(3, []))], engine.pool.page_size, impl="cpp").layout
    x_TE = torch.randn(3, len(model.norm.weight))
    angles = [(torch.randn(3, dims), torch.randn(3, dims)) for dims in (4, model.config.head_dim)]
    for tables in [(None, 1), (1, 0)]:
        layers = [turned(layer.calls, table) for layer, table in zip(model.layers, tables, strict=True)]
        after = [call._replace(target="stream") for call in model.after]
        together = Stack([*layers[0], *layers[1], *after], dtype=torch.float32, width=model.config.width)
        registers = Registers(x_TE, model.config, angles, cache, layout)
        for calls in layers:
            run(calls, registers)
        run(model.after, registers)
        assert together(x_TE.clone(), [*map(Angles, angles)], cache, layout).equal(registers["read"])
    tree.release()


@pytest.mark.parametrize(
    ("variant", "part"), [("opt/plain", "fc2"), ("gpt2/plain", "mlp.c_proj"), ("phi/plain", "fc2")]
)
def test_nan_is_traced_to_its_layer(tmp_path, variant, part):
    folder = tmp_path / "model"
    shutil.copytree(GOLDEN / variant, folder)
    tensors = load_file(GOLDEN / variant / "model.safetensors")
    [name] = [name for name in tensors if name.endswith(f".1.{part}.bias") or name.endswith(f".1.mlp.{part}.bias")]
    tensors[name][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    engine = load(folder)
    with pytest.raises(NumericsError, match="in layer 2 of 2"):
        engine.generate([[5, 6, 7]], search=Greedy(), max_new_tokens=2)
    assert not engine.runner.model.stack.idle


def test_what_does_not_fit_is_refused(folder):
    engine = load(folder)
    stack, cache, width = engine.runner.model.stack, engine.pool.cache, len(engine.runner.model.norm.weight)
    tree = TokenTree(engine.pool, [1, 2, 3])
    layout = pack([Chunk(tree, 3, [], tree.allocate(3, []))], engine.pool.page_size, impl="cpp").layout
    angles = torch.ones(3, engine.runner.model.config.head_dim)
    for x, cos in (
        (torch.zeros(4, width), angles),
        (torch.zeros(3, width).bfloat16(), angles),
        (torch.zeros(3, 2 * width)[:, ::2], angles),
        (torch.zeros(3, width), angles[:2]),
        (torch.zeros(3, width), angles.double()),
    ):
        with pytest.raises(ValueError, match="expected contiguous"):
            stack(x, [Angles((cos, cos))], cache, layout)
    tree.release()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_tapped_streams_are_those_before_layers(dtype, tmp_path):
    """By the layers in one call and one by one, those that hooks see; rows stay the same bits. Untapped, no call is
    added."""
    make(tmp_path, layers=4, width=64, mlp=96, heads=4, kv_heads=2, vocab=260, max_positions=64, seed=1)
    engine = load(tmp_path, (dtype, "none"))
    runner, model, streams = engine.runner, engine.runner.model, []

    def evaluate(*keeps):
        tree = TokenTree(runner.pool, range(3, 20))
        with torch.inference_mode():
            chunks = [Chunk(tree, 17, [], tree.allocate(17, []))]
            [best], _ = runner.evaluate_top_sums(PassWork(chunks, [16], keeps=keeps), [TopSums([0.0], 9)])
        tree.release()
        return best

    assert "tap" not in [call.code for call in model.stack.calls]
    plain = evaluate()
    first = model.layers[0].register_forward_pre_hook(lambda _, args: streams.append(args[0]["stream"].clone()))
    hooks = [layer.register_forward_hook(lambda _, args, out: streams.append(out.clone())) for layer in model.layers]
    with one_by_one(model):
        evaluate()
    for hook in (first, *hooks):
        hook.remove()
    model.tap([0, 2, 4])
    seen, hidden = [], []
    keeps = Keep(slice(2, 17), seen.append, True), Keep(slice(2, 17), hidden.append)
    assert evaluate().equal(plain) and evaluate(*keeps).equal(plain)
    with one_by_one(model):
        evaluate(*keeps)
    want = torch.stack([streams[layer][2:] for layer in (0, 2, 4)], 1)
    assert seen[0].equal(want) and seen[1].equal(want) and hidden[0].equal(hidden[1])
    with pytest.raises(ValueError, match="tapped rows: expected contiguous"):
        tree = TokenTree(runner.pool, [3])
        runner.forward([Chunk(tree, 1, [], tree.allocate(1, []))], None, torch.empty(1, 2, 64, dtype=runner.dtype))
    tree.release()
