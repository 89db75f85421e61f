"""Defaults of `generation_config.json` for searches and requests, which transformers' `generate` applies
automatically; without that file they are those of `config.json`."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from engine.errors import shortened
from engine.words import RENORMALISED
from models.checkpoint.headers import Checkpoint

FILE = "generation_config.json"
PARAMS = {  # its fields -> parameters of searches, and the values that change nothing
    "num_beams": ("beams", 1),
    "length_penalty": ("length_penalty", 1),
    "early_stopping": ("early_stopping", False),
    "temperature": ("temperature", 1),
    "top_k": ("top_k", 0),
    "top_p": ("top_p", 1),
    "min_p": ("min_p", 0),
    "typical_p": ("typical_p", 1),
    "epsilon_cutoff": ("epsilon_cutoff", 0),
    "eta_cutoff": ("eta_cutoff", 0),
    "num_beam_groups": ("diverse_groups", 1),
    "diversity_penalty": ("diverse_penalty", 0),
}
RULES = {  # its fields -> fields of a request
    "sequence_bias": ("sequence_bias", []),
    "repetition_penalty": ("repetition_penalty", 1),
    "no_repeat_ngram_size": ("no_repeat_ngram_size", 0),
    "bad_words_ids": ("bad_words", []),
    "min_length": ("min_length", 0),
    "min_new_tokens": ("min_new_tokens", 0),
    "suppress_tokens": ("suppress_tokens", []),
    "begin_suppress_tokens": ("begin_suppress_tokens", []),
}
OTHERS = {  # fields that change outputs and have no counterpart, or (`renormalize_logits`) one in `rules_of`
    "forced_bos_token_id": None,
    "forced_eos_token_id": None,
    "exponential_decay_length_penalty": None,
    "guidance_scale": 1,
    "renormalize_logits": False,
    "top_h": None,
    "watermarking_config": None,
    "penalty_alpha": None,
    "dola_layers": None,
    "encoder_repetition_penalty": 1,  # the prompt is what `generate` takes for an encoder's text
    "encoder_no_repeat_ngram_size": 0,
    "constraints": None,
    "force_words_ids": None,
    "max_time": None,
    "stop_strings": None,
    "token_healing": False,
}
INSTEAD = {"stop_strings": "--stop ends outputs before such a text", "token_healing": "requests have `heal`"}
TOP_K = 50  # the default of `generate` if the file has none
OF_ROWS = ("greedy", "sample", "bon", "sbon", "aded", "speculative")  # their processors get logits in transformers


@dataclass(frozen=True)
class Generation:
    """Fields of `generation_config.json`, or else of `config.json`, without those that are null or change nothing.

    Args:
        fields: the fields by their names in the file.
        params: parameters of searches, by the keys of batch lines; among them `top_k`, which is 50 if the file has
            none, as in transformers.
        rules: fields of `engine.Request`.
        file: the name of the file.
    """

    fields: Mapping[str, Any] = field(default_factory=dict)
    params: Mapping[str, Any] = field(default_factory=dict)
    rules: Mapping[str, Any] = field(default_factory=dict)
    file: str = FILE

    @staticmethod
    def of(checkpoint: Checkpoint) -> "Generation":
        """Read the fields of a checkpoint. Searches and requests check the values."""
        found, file = checkpoint.generation_config, FILE
        if found is None:
            found, file = checkpoint.config, "config.json"
        given = {name: value for name, value in found.items() if value is not None}
        least = {name: given[name] for name in ["min_new_tokens"] if name in given}
        if least:  # replaces the other, even if it is 0
            given.pop("min_length", None)
        plain = {name: same for name, (_, same) in (PARAMS | RULES).items()} | OTHERS
        fields = {name: given[name] for name in plain if name in given and given[name] != plain[name]}
        params = {to: fields[name] for name, (to, _) in PARAMS.items() if name in fields}
        rules = {to: fields[name] for name, (to, _) in RULES.items() if name in fields} | least
        return Generation(fields, {"top_k": given.get("top_k", TOP_K)} | params, rules, file)

    def params_of(self, known: Collection[str]) -> dict[str, Any]:
        """The parameters for a search that knows these."""
        return {key: value for key, value in self.params.items() if key in known}

    def rules_of(self, search: str) -> dict[str, Any]:
        """The fields of a request with a search of this name. A repetition penalty gets logits or log-probabilities as
        in transformers (`constraint_scores`)."""
        of_logits = search in OF_ROWS if "repetition_penalty" in self.rules else "renormalize_logits" in self.fields
        return ({"constraint_scores": RENORMALISED} if of_logits else {}) | dict(self.rules)

    def note(self, known: Collection[str], given: Collection[str], applied: bool) -> str:
        """Name for people the fields that are not applied; "" if there are none.

        Args:
            known: parameters of the search.
            given: parameters, and fields of requests, that the caller has given.
            applied: whether all fields with a counterpart are applied.
        """
        of = PARAMS | RULES
        left = [name for name in self.fields if name not in of]
        if "constraint_scores" in given or (applied and not {"beams", "repetition_penalty"} <= {*known, *self.rules}):
            left = [name for name in left if name != "renormalize_logits"]
        if not applied:
            meant = [name for name, (to, _) in of.items() if (name in RULES or to in known) and to not in given]
            left = [name for name in self.fields if name in meant or name in left]
        if not left:
            return ""
        named = ", ".join(f"{name} {shortened(repr(self.fields[name]))}" for name in left)
        if not applied:
            return f"{self.file} has {named}, not applied here: --generation-config applies what it can"
        like = [f"{name}: {INSTEAD[name]}" for name in left if name in INSTEAD]
        others = "the others" if like else "it"
        remedy = "; ".join(like + [f"there is nothing like {others} here"] * (len(like) < len(left)))
        return f"{self.file} has {named}, not applied here: {remedy}"
