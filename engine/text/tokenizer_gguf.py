"""The tokenizer of a GGUF file, from its metadata: without the files that `models.gguf.vocabulary` could write."""

import json
from typing import Any

import tokenizers
from tokenizers import AddedToken, models

from engine.text import tokenizer_limits
from engine.text.tokenizer_files import named_tokens
from engine.text.tokenizer_json import LibraryEncoder
from engine.text.tokenizer_model import SentencePieceEncoder
from models.gguf.vocabulary import FileVocabulary


def encoder_of(
    vocabulary: FileVocabulary,
) -> tuple[LibraryEncoder | SentencePieceEncoder, dict[str, Any], dict[str, str]]:
    """The arguments of a `Tokenizer`. Raises CheckpointError if its kind is not supported."""
    config, path = vocabulary.config(), vocabulary.file.path
    if vocabulary.has_scores:
        encoder = SentencePieceEncoder(vocabulary.model(), path, config, vocabulary.pieces)
        return encoder, config, encoder.names
    spec = vocabulary.tokenizer()
    guard = tokenizer_limits.guard(spec, str(path))
    model, added = spec["model"], spec["added_tokens"]
    bare = spec | {"model": {"type": "BPE", "vocab": {}, "merges": []}, "added_tokens": []}
    library = tokenizers.Tokenizer.from_str(json.dumps(bare))
    options = {name: value for name, value in model.items() if name not in ("type", "vocab", "merges") and value}
    try:
        library.model = models.BPE(model["vocab"], model["merges"], **options)  # JSON would take twice as long
    except Exception:  # a merge does not fit
        if not vocabulary.has_merges:
            raise
        library.model = models.BPE(model["vocab"], vocabulary.checked_merges(), **options)
    flags = {token["id"]: {k: v for k, v in token.items() if k not in ("id", "content")} for token in added}
    in_order = sorted(added, key=lambda token: token["id"])
    library.add_tokens([AddedToken(token["content"], **flags[token["id"]]) for token in in_order])
    names = named_tokens(config)
    return LibraryEncoder(library, config, names, guard, str(path), model["vocab"]), config, names
