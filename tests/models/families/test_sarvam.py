"""Fields that published configs and those that transformers saves name differently."""

import json
from pathlib import Path

import pytest

from models.checkpoint.fields import Fields
from models.families import FAMILIES

GOLDEN = Path(__file__).parents[2] / "golden" / "published"

SAVED = {
    "exaone": {
        "num_layers": "num_hidden_layers",
        "layer_norm_epsilon": "rms_norm_eps",
        "activation_function": "hidden_act",
    },
    "sarvam": {
        "num_experts": "n_routed_experts",
        "num_shared_experts": "n_shared_experts",
        "use_qkv_bias": "attention_bias",
    },
    "sarvam_mla": {"num_experts": "n_routed_experts", "num_shared_experts": "n_shared_experts"},
}


@pytest.mark.parametrize("variant", SAVED)
def test_the_names_of_fields_do_not_matter(variant: str):
    published = json.loads((GOLDEN / variant / "config.json").read_text())
    saved = {SAVED[variant].get(name, name): value for name, value in published.items()}
    if variant == "sarvam_mla":
        saved["rope_scaling"] = published["rope_scaling"] | {"type": "yarn"}
    family = FAMILIES[published["architectures"][0]]
    assert saved != published
    assert family.read(Fields(saved, "")) == family.read(Fields(published, ""))
