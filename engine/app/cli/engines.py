"""The engine that the flags of loading ask for. Imports torch, which the flags themselves do without."""

import argparse

from engine.app.cli.loading import load_options
from engine.engine import Engine
from engine.load.hub import located
from engine.load.options import LoadOptions
from engine.rules.catalogue import open_catalogue


def fetch_models(args: argparse.Namespace) -> LoadOptions:
    """The options that the flags of loading give, with models on the hub fetched. Raises CoppiceError."""
    options = load_options(args)
    return located(options, progress=not getattr(args, "quiet", False) and options.place.rank == 0)


def load_engine(args: argparse.Namespace, options: LoadOptions | None = None) -> Engine:
    """The engine that the flags of loading ask for; with `args.shard`, in one of several processes. Raises
    CoppiceError.

    Args:
        options: what `fetch_models` gave for them.
    """
    engine = Engine.of(options or fetch_models(args))
    if (catalogue := getattr(args, "catalogue", None)) is not None:  # an error of the run, not of each of its lines
        open_catalogue(catalogue).check(engine.model.tokenizer, engine.runner.vocab_size)
    if (prefix := getattr(args, "load_prefix", None)) is not None:
        engine.load_prefix(prefix)
    return engine
