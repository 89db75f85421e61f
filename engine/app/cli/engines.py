"""The engine that the loading flags ask for. Imports torch, unlike the flags themselves."""

import argparse
import os
from contextlib import AbstractContextManager, nullcontext

from engine.app.cli.exits import written_after
from engine.app.cli.loading import load_options
from engine.app.cli.requests import rules
from engine.app.cli.searches import search_params
from engine.drafts.suffixes import SuffixDrafter, SuffixStore
from engine.engine import Engine
from engine.errors import UsageError
from engine.load.hub import located
from engine.load.options import LoadOptions
from engine.rules import Rules
from engine.rules.catalogue import open_catalogue
from models.checkpoint.files import obstacle


def fetch_models(args: argparse.Namespace) -> LoadOptions:
    """The options that the flags of loading give, with models on the hub fetched. Raises CoppiceError."""
    options = load_options(args)
    return located(options, progress=not getattr(args, "quiet", False) and options.place.rank == 0)


def load_engine(args: argparse.Namespace, options: LoadOptions | None = None) -> Engine:
    """The engine that the flags of loading ask for; with `args.shard`, in one of several processes. Raises
    CoppiceError.

    Args:
        options: the result of `fetch_models(args)`; None: it is called here.
    """
    engine = Engine.of(options or fetch_models(args))
    if hasattr(args, "generation_config"):
        _take_generation(args, engine)
    if (catalogue := getattr(args, "catalogue", None)) is not None:  # an error of the run, not of each of its lines
        open_catalogue(catalogue).check(engine.model.tokenizer, engine.runner.vocab_size)
    if (prefix := getattr(args, "load_prefix", None)) is not None:
        engine.load_prefix(prefix)
    if (file := getattr(args, "draft_store", None)) is not None:
        store = _suffix_store(engine)
        if found := obstacle(file):
            raise UsageError(f"the suffix store cannot be written: {found[0]}", where=found[1])
        if os.path.exists(file):
            store.load(file)
    return engine


def _take_generation(args: argparse.Namespace, engine: Engine) -> None:
    """Keep the checkpoint's defaults as `args.generation`, or note which fields are not applied. Raises UsageError."""
    from search.base import make_search, parameters  # after flags may have loaded searches from outside

    generation, given, applied = engine.generation, search_params(args) | rules(args), args.generation_config
    known = parameters(args.search)
    if applied:
        args.generation = generation
        try:
            make_search(args.search, generation.params_of(known) | search_params(args))
            Rules(**generation.rules).check()
        except UsageError as error:
            raise UsageError(error.what, where=generation.file, remedy="leave out --generation-config") from None
    if note := generation.note(known, given, applied):
        engine.capabilities = engine.capabilities.noting(note)


def kept_texts(args: argparse.Namespace, engine: Engine) -> AbstractContextManager[None]:
    """Write the texts of --draft-store at the end of the block, see `written_after`; without the flag, do nothing."""
    if args.draft_store is None:
        return nullcontext()
    return written_after(lambda: _suffix_store(engine).save(args.draft_store))


def _suffix_store(engine: Engine) -> SuffixStore:
    """The store of the engine's suffix drafter. Raises UsageError."""
    drafter = engine.drafts.drafter if engine.drafts is not None else None
    if not isinstance(drafter, SuffixDrafter):
        raise UsageError("--draft-store: it has texts for suffix drafts", remedy="add --drafts suffix")
    return drafter.store
