"""Rotary embeddings against numbers of transformers 5.23.0 (LlamaRotaryEmbedding, heads of 8 dims)."""

import pytest
import torch

from kernels.rows import rotary
from models.checkpoint.fields import Fields
from models.errors import CheckpointError
from models.families.phi3 import ROPE_KINDS
from models.rope import BUFFERS, RopeConfig, RotaryEmbedding

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3["original_max_position_embeddings"] = 32
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
MSCALE = {"truncate": False, "mscale": 1.0, "mscale_all_dim": 0.5}
BETAS = {"beta_fast": 16, "beta_slow": 2, "attention_factor": 1.3}
PLAIN = [1.0, 0.1, 0.01, 0.001]
LONGROPE = {"rope_type": "longrope", "short_factor": [1.0, 1.25, 1.5, 2.0], "long_factor": [1.5, 2.5, 4.0, 8.0]}
PHI3 = {"max_position_embeddings": 128, "original_max_position_embeddings": 32}

# parameters of a share of 5 in 20 dims; then inv_freq, and the sines of position 50 (dynamic: cosines of position 99)
ODD = {
    "default": ({}, [1.0, 0.02511886321, 0.0006309572973], [-0.2623748481, 0.9508418441, 0.03154263273]),
    "linear": (
        {"rope_type": "linear", "factor": 4.0},
        *([0.25, 0.006279715803, 0.0001577393268], [-0.06632189453, 0.3088520169, 0.007886884735]),
    ),
    "llama3": (
        {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 16, "low_freq_factor": 1.0}
        | {"high_freq_factor": 4.0},
        *([0.5760563612, 0.003139857901, 7.886966341e-05], [-0.5042251348, 0.1563487947, 0.003943473101]),
    ),
    "dynamic": (
        {"rope_type": "dynamic", "factor": 2.0},
        *([1.0, 0.02511886321, 0.0006309572973], [0.03982087970, 0.06623501331, 0.9997386336]),
    ),
}

# theta, max_position_embeddings, parameters; then inv_freq, attention scaling, and the sines of position 50
TABLE = {
    "default": (1e4, 64, {}, PLAIN, 1.0, [-0.26237485, -0.95892429, 0.47942555, 0.04997917]),
    "theta": (
        *(5e5, 64, {}, [1.0, 0.03760603070259094, 0.001414213445968926, 5.3182957344688475e-05], 1.0),
        [-0.26237485, 0.95248443, 0.07065176, 0.00265914],
    ),
    "linear": (
        *(1e4, 64, {"rope_type": "linear", "factor": 4.0}, [0.25, 0.025, 0.0025, 0.00025], 1.0),
        [-0.06632189, 0.94898462, 0.12467473, 0.01249967],
    ),
    "dynamic": (
        *(1e4, 64, {"rope_type": "dynamic", "factor": 2.0}, PLAIN, 1.0),
        [-0.26237485, -0.95892429, 0.47942555, 0.04997917],
    ),
    "llama3": (
        *(5e5, 256, LLAMA3, [1.0, 0.004700753837823868, 0.00017677668074611574, 6.647869668086059e-06], 1.0),
        [-0.26237485, 0.23287964, 0.00883872, 0.00033239],
    ),
    "yarn": (
        *(1e4, 4096, YARN, [1.0, 0.07499999552965164, 0.004999999888241291, 0.0002500000118743628], 1.138629436111989),
        [-0.29874772, -0.65079629, 0.28170145, 0.01423250],
    ),
    "proportional": (
        *(1e4, 64, {"rope_type": "proportional", "partial_rotary_factor": 0.5, "factor": 2.0}, [0.5, 0.05, 0.0, 0.0]),
        *(1.0, [-0.13235175, 0.59847215, 0.0, 0.0]),
    ),
    "yarn mscale": (
        *(1e4, 4096, YARN | MSCALE, [1.0, 0.08539863675832748, 0.003556971438229084, 0.0002500000118743628]),
        *(1.0648216253695715, [-0.27938241, -0.96228176, 0.18838026, 0.01330992]),
    ),
    "yarn betas": (
        *(1e4, 4096, YARN | BETAS, [1.0, 0.1, 0.0025, 0.00025], 1.3),
        [-0.34108728, -1.24660158, 0.16207714, 0.01624958],
    ),
}


def rope_of(config: dict, head_dim: int = 8, **options) -> RopeConfig:
    return RopeConfig.from_hf(
        Fields(config, "config.json"), head_dim, config.get("max_position_embeddings", 64), **options
    )


def spelled(how: str, theta: float, length: int, parameters: dict) -> dict:
    if how == "v5":
        return {"max_position_embeddings": length, "rope_parameters": {**parameters, "rope_theta": theta}}
    scaling = {how if key == "rope_type" else key: value for key, value in parameters.items()}
    return {"max_position_embeddings": length, "rope_theta": theta, "rope_scaling": scaling or None}


@pytest.mark.parametrize("how", ["v5", "type", "rope_type"])
@pytest.mark.parametrize("name", TABLE)
def test_frequencies_are_those_of_transformers(name, how):
    theta, length, parameters, inv_freq, scaling, sines = TABLE[name]
    rope = RotaryEmbedding(rope_of(spelled(how, theta, length, parameters)))
    assert rope.inv_freq.dtype == torch.float32
    torch.testing.assert_close(rope.inv_freq, torch.tensor(inv_freq), rtol=3e-7, atol=0)
    assert rope.config.attention_factor == pytest.approx(scaling, rel=1e-12)
    cos, sin = rope.cos_sin(torch.tensor([0, 50]), torch.tensor([51, 51]), torch.float32)
    torch.testing.assert_close(sin[1], torch.tensor(sines * 2), rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(cos[0], torch.full((8,), rope.config.attention_factor))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_angles_are_kept_by_position(dtype):
    """To the bit those of the positions alone, however far they reach; of kinds that look at spans they are not."""
    rope = RotaryEmbedding(rope_of({}))
    for positions in ([3], [7, 3, 3], [0, 255], [256, 1], [5000, 4999, 17]):
        positions_T = torch.tensor(positions)
        tables, by_position = rope.angles(positions_T, positions_T + 1, dtype)
        assert by_position and len(tables[0]) < 2 * max(256, max(positions) + 1)
        for table, expected in zip(tables, rope.cos_sin(positions_T, positions_T + 1, dtype), strict=True):
            assert table[positions_T].equal(expected)
    assert rope.angles(positions_T, positions_T + 1, dtype).tables[0] is tables[0]
    dynamic = RotaryEmbedding(rope_of(spelled("v5", 1e4, 64, {"rope_type": "dynamic", "factor": 2.0})))
    assert not dynamic.angles(positions_T, positions_T + 1, dtype).by_position


def test_dynamic_follows_the_span_of_each_token():
    rope = RotaryEmbedding(rope_of(spelled("v5", 1e4, 64, {"rope_type": "dynamic", "factor": 2.0})))
    # A prompt of 64 and one generated token; a prompt of 100 and one: cosines as a fresh transformers model has them.
    positions, spans = torch.tensor([63, 64, 99, 100]), torch.tensor([64, 65, 100, 101])
    cos, _ = rope.cos_sin(positions, spans, torch.float32)
    expected = [
        [0.9858965873718262, 0.9998586177825928, 0.8080275058746338, 0.9980161786079407],
        [0.39185723662376404, 0.9986739158630371, 0.8097886443138123, 0.9980748295783997],
        [0.03982087969779968, 0.15293912589550018, 0.8259239196777344, 0.9989149570465088],
        [0.8623188734054565, 0.1132747232913971, 0.8258165717124939, 0.9989247918128967],
    ]
    torch.testing.assert_close(cos[:, :4], torch.tensor(expected), rtol=0, atol=2e-6)
    alone, _ = rope.cos_sin(positions[2:3], spans[2:3], torch.float32)
    torch.testing.assert_close(cos[2:3], alone, rtol=0, atol=2e-6)  # neighbours change nothing


@pytest.mark.parametrize(
    ("parameters", "length", "scaling"),
    [
        ({}, 128, 1.1832159566199232),
        ({"attention_factor": 1.3}, 128, 1.3),
        ({"factor": 2.0}, 128, 1.0954451150103321),
        ({"factor": 0.5}, 128, 1.0),
        ({}, 16, 1.0),
    ],
)
@pytest.mark.parametrize("label", ["longrope", "su", "yarn"])
@pytest.mark.parametrize("how", ["v5", "type", "rope_type"])
def test_longrope_picks_factors_by_the_span_of_each_token(how, label, parameters, length, scaling):
    """Frequencies, scaling and the sines of position 20 in texts of 32 and 33 tokens: Phi3RotaryEmbedding's."""
    config = spelled(how, 1e4, length, LONGROPE | {"rope_type": label} | parameters)
    rope = rope_of(config | {"original_max_position_embeddings": 32}, kinds=ROPE_KINDS)
    assert rope == rope_of(PHI3 | {"max_position_embeddings": length, "rope_scaling": LONGROPE | parameters})
    assert (rope.kind, rope.switch_length, rope.steady_length, rope.reach(length)) == ("longrope", 32, None, length)
    assert rope.attention_factor == pytest.approx(scaling, rel=1e-12)
    rotary = RotaryEmbedding(rope)
    short, long = [1.0, 0.08, 0.006666666828, 0.0005], [0.66666668653, 0.04, 0.0025, 0.000125]
    assert rotary.long_inv_freq is not None
    torch.testing.assert_close(rotary.inv_freq, torch.tensor(short), rtol=1e-7, atol=0)
    torch.testing.assert_close(rotary.long_inv_freq, torch.tensor(long), rtol=1e-7, atol=0)
    cos, sin = rotary.cos_sin(torch.tensor([20, 20, 0]), torch.tensor([32, 33, 1]), torch.float32)
    expected = [[0.91294527, 0.99957359, 0.13293862, 0.00999983], [0.69395196, 0.71735603, 0.04997917, 0.0025]]
    torch.testing.assert_close(sin[:2, :4], torch.tensor(expected) * scaling, rtol=3e-7, atol=1e-8)
    torch.testing.assert_close(cos[2], torch.full((8,), scaling))  # short texts are scaled as well
    alone = rotary.cos_sin(torch.tensor([20]), torch.tensor([33]), torch.float32)
    for one, among in zip(alone, (cos, sin), strict=True):  # neighbours change nothing
        torch.testing.assert_close(one[0], among[1], rtol=3e-7, atol=1e-8)


def test_longrope_of_half_a_head():
    halves = {"partial_rotary_factor": 0.5, "short_factor": [1.0, 1.25], "long_factor": [1.5, 2.5]}
    rotary = RotaryEmbedding(rope_of(PHI3 | {"rope_parameters": LONGROPE | halves}, partial=1.0))
    _, sin = rotary.cos_sin(torch.tensor([20, 20]), torch.tensor([32, 33]), torch.float32)
    expected = [[1.0802114, 0.18850787] * 2, [0.82109505, 0.09455635] * 2]
    torch.testing.assert_close(sin, torch.tensor(expected), rtol=3e-7, atol=1e-8)


def test_phi3_takes_its_original_length_from_the_top_level_or_not_at_all():
    nested = {"rope_scaling": LONGROPE | {"original_max_position_embeddings": 32}, "max_position_embeddings": 8192}
    assert rope_of(nested, original=4096).original_length == 4096  # as transformers has it
    assert rope_of(nested).original_length == 32


@pytest.mark.parametrize(
    ("config", "kind", "theta"),
    [
        ({}, "default", 1e4),
        ({"rope_theta": None, "rope_scaling": None}, "default", 1e4),
        ({"rope_theta": 2e4, "rope_scaling": {}}, "default", 2e4),
        ({"rope_theta": 2e4, "rope_parameters": {"rope_theta": 3e4}}, "default", 3e4),
        ({"rope_scaling": {"type": "linear", "factor": 2}, "rope_parameters": {"rope_theta": 3e4}}, "linear", 1e4),
        ({"rope_parameters": {"rope_type": "linear", "type": "dynamic", "factor": 2}}, "linear", 1e4),
    ],
)
def test_precedence_is_that_of_transformers(config, kind, theta):
    rope = rope_of(config)
    assert (rope.kind, rope.theta) == (kind, theta)


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("model.layers.3.self_attn.rotary_emb.inv_freq", True),
        ("transformer.h.0.self_attention.rotary_emb.inv_freq", True),
        ("rotary_emb.original_inv_freq", True),
        ("layers.0.attention.rotary_emb.sin_cached", True),
        ("model.embed_tokens.position_ids", True),
        ("model.layers.0.self_attn.rotary_emb.weight", False),
        ("model.inv_freq", False),
        ("model.layers.0.my_rotary_emb.inv_freq", False),
        ("model.position_ids.weight", False),
    ],
)
def test_names_of_tables_that_are_computed(name, known):
    assert any(pattern.fullmatch(name) for pattern in BUFFERS) is known


def test_original_length():
    long = {"max_position_embeddings": 4096}
    bare = {key: value for key, value in YARN.items() if key != "original_max_position_embeddings"}
    assert rope_of(long | {"rope_scaling": bare}).original_length == 4096
    assert rope_of(long | {"rope_scaling": YARN}).original_length == 1024
    assert rope_of(long | {"rope_scaling": YARN, "original_max_position_embeddings": 512}).original_length == 512
    assert rope_of(long | {"rope_scaling": YARN | {"factor": None}}).factor == 4.0  # the ratio of the lengths
    dynamic = {"type": "dynamic", "factor": 2.0, "original_max_position_embeddings": 16}
    assert rope_of(long | {"rope_scaling": dynamic}).original_length == 4096
    assert rope_of(long | {"rope_scaling": dynamic}).reach(4096) == 8192
    assert rope_of(long | {"rope_scaling": YARN}).reach(4096) == 4096
    assert rope_of(long).reach(4096) == 4096


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (
            {"rope_scaling": {"type": "su"}},
            r"rope_scaling.type: expected one of default, dynamic, linear, llama3, longrope, proportional, yarn",
        ),
        ({"rope_parameters": {"rope_type": ["yarn"]}}, r"rope_parameters.rope_type"),
        ({"rope_scaling": "linear"}, "rope_scaling: expected an object"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling.factor: expected a value"),
        ({"rope_scaling": {"type": "linear", "factor": float("nan")}}, "rope_scaling.factor"),
        ({"rope_scaling": LLAMA3 | {"high_freq_factor": 1.0}}, "high_freq_factor: expected more than"),
        ({"rope_scaling": YARN | {"original_max_position_embeddings": 0}}, "original_max_position_embeddings"),
        ({"rope_scaling": LONGROPE | {"long_factor": None}}, "long_factor: expected a list of 4 numbers"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1.0] * 3}}, "long_factor: expected a list of 4 numbers"),
        ({"rope_scaling": LONGROPE | {"short_factor": [1.0, 1.0, "1", 1.0]}}, "short_factor: expected numbers from"),
        ({"rope_scaling": LONGROPE | {"short_factor": [1.0, 0.0, 1.0, 1.0]}}, "short_factor: expected numbers from"),
        ({"rope_scaling": LONGROPE | {"long_factor": [1, 1, float("nan"), 1]}}, "long_factor: expected numbers from"),
        ({"rope_scaling": LONGROPE, "original_max_position_embeddings": 1}, "more than 1, got 1"),
        ({"rope_parameters": {"full_attention": {"rope_type": "default"}}}, "per type of layer"),
        ({"rope_theta": 0}, "rope_theta: expected a number from 1"),
        ({"rope_theta": float("inf")}, "rope_theta"),
        ({"rope_scaling": YARN, "partial_rotary_factor": 0.5}, "rotates whole heads"),
    ],
)
def test_bad_configs_name_the_field(config, message):
    with pytest.raises(CheckpointError, match=message) as caught:
        rope_of(config)
    assert caught.value.where == "config.json"


@pytest.mark.parametrize("name", ODD)
def test_an_odd_share_of_a_head_is_that_of_transformers(name):
    parameters, inv_freq, expected = ODD[name]
    rope = RotaryEmbedding(rope_of({"rope_parameters": parameters}, head_dim=20, partial=0.25))
    assert rope.config.head_dim == 6
    torch.testing.assert_close(rope.inv_freq, torch.tensor(inv_freq), rtol=3e-7, atol=0)
    cos, sin = rope.cos_sin(torch.tensor([50, 99]), torch.tensor([51, 100]), torch.float32)
    found = cos[1] if name == "dynamic" else sin[0]
    torch.testing.assert_close(found, torch.tensor(expected * 2), rtol=1e-5, atol=1e-6)


def test_odd_shares_that_transformers_cannot_rotate():
    for parameters in (YARN, {"rope_type": "dynamic", "factor": 2.0, "partial_rotary_factor": 0.1}):
        with pytest.raises(CheckpointError, match="pairs"):
            rope_of({"rope_parameters": parameters}, head_dim=10, partial=0.5)


def test_a_share_that_frequencies_do_not_depend_on_is_ignored():
    """transformers 5.24 reads the field in its kinds of stretching only."""
    for field in ({"partial_rotary_factor": 0.5}, {"rope_parameters": {"partial_rotary_factor": 0.25}}):
        assert rope_of(field) == rope_of({})


def test_scales_by_length_that_only_phi_with_experts_has_are_ignored():
    scales = {"short_mscale": 1.2, "long_mscale": 1.3}
    assert rope_of({"rope_scaling": LONGROPE | scales}) == rope_of({"rope_scaling": LONGROPE})


def test_a_proportional_share_in_families_that_rotate_a_part():
    """Nothing but the frequencies of Gemma 4: all dims take part, of which the last do not turn."""
    proportional = {"rope_parameters": {"rope_type": "proportional"}}
    assert rope_of(proportional, partial=0.5) == RopeConfig(8, "proportional", turned=2, original_length=64)
    with pytest.raises(CheckpointError, match="rope_type: expected another kind"):
        rope_of(proportional, partial=0.5, even=True)


def test_partial_rotation():
    assert rope_of({}, partial=0.5).head_dim == 4
    assert rope_of({"rope_parameters": {"partial_rotary_factor": 0.25}}, partial=0.5).head_dim == 2
    with pytest.raises(CheckpointError, match="pairs"):
        rope_of({}, head_dim=7)
    x = torch.randn(3, 2, 8)
    cos, sin = RotaryEmbedding(rope_of({}, partial=0.5)).cos_sin(torch.arange(3), torch.full((3,), 3), x.dtype)
    turned = rotary(x, cos, sin, impl="torch")
    assert torch.equal(turned[..., 4:], x[..., 4:]) and torch.equal(turned[0], x[0])
    # Dims i and i + D/2 are a complex number, turned by its angle.
    pair = torch.complex(x[..., :2], x[..., 2:4]) * torch.complex(cos[:, None, :2], sin[:, None, :2])
    torch.testing.assert_close(turned[..., :4], torch.cat((pair.real, pair.imag), -1))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_only_the_result_is_cast(dtype):
    rope = RotaryEmbedding(rope_of({}))
    positions = torch.tensor([8191])
    for exact, cast in zip(
        rope.cos_sin(positions, positions, torch.float32), rope.cos_sin(positions, positions, dtype), strict=True
    ):
        assert cast.dtype == dtype and torch.equal(exact.to(dtype), cast)


@pytest.mark.parametrize("places", [4096, 5000, 40000])
def test_tables_of_long_texts_take_little_more_than_their_rows(places):
    rope = RotaryEmbedding(rope_of({}))
    rope.angles(torch.tensor([places - 1]), torch.tensor([places]), torch.float32)
    assert rope._kept is not None
    assert places <= len(rope._kept.tables[0]) <= places * 5 / 4
