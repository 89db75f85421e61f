"""The command `coppice`: `coppice chat ...` is `python -m engine.chat ...`, and so on; `python -m coppice` is the same.

A module of its own beside the packages, which import torch: `coppice --help` takes no time.
"""

import difflib
import importlib
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path

COMMANDS = {  # name -> module, what it does
    "chat": ("engine.chat", "talk to a model, or answer one prompt"),
    "batch": ("engine.batch", "answer a file of prompts, JSON Lines"),
    "serve": ("engine.serve", "serve models by OpenAI's HTTP interface"),
    "plan": ("engine.chat", "the memory that a model would take: coppice plan MODEL [FLAGS]"),
    "tree": ("tools.tree", "a page that shows a search step by step"),
    "convert": ("tools.convert", "GGUF files and pickled weights to safetensors"),
    "pack": ("tools.pack", "pack a model's matrices ahead, to start at once"),
    "catalogue": ("tools.catalogue", "the items that outputs may be, for --catalogue"),
    "ngrams": ("tools.ngrams", "count texts into a store, for --search aded"),
    "fleet": ("tools.fleet", "answer a file of prompts with many workers"),
    "lm-eval": ("tools.lm_eval", "lm-evaluation-harness on this engine"),
    "bench": ("tools.bench", "benchmarks"),
    "profile": ("tools.profile", "where the time of a search goes"),
    "kernels": ("kernels.build", "build the C++ kernels ahead"),
}
HELP = """\
usage: coppice COMMAND [FLAGS]

Search trees of tokens with a language model.

commands:
{commands}

coppice COMMAND --help lists the flags of a command; coppice --version shows the version.
coppice chat is the same as python -m engine.chat, and so on."""
PLAN = """\
usage: coppice plan MODEL [FLAGS]

Print the memory that a model would take. MODEL is a folder, a GGUF file or a name on the hub; the flags are those of
coppice chat, as --dtype, --quant, --kv-dtype, --context N, --processes N."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command. Returns the exit code."""
    ended = runpy.run_path(str(Path(__file__).with_name("kernels") / "ending.py"))["ended"]
    return ended(lambda: _command(argv))


def _command(argv: Sequence[str] | None) -> int:
    name, *args = [*(sys.argv[1:] if argv is None else argv)] or ["--help"]
    if name in ("-h", "--help", "help"):
        print(HELP.format(commands="\n".join(f"  {name:10} {text}" for name, (_, text) in COMMANDS.items())))
        return 0
    if name == "--version":
        print("coppice", runpy.run_path(str(Path(__file__).with_name("engine") / "version.py"))["__version__"])
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, 3)
        remedy = f"the nearest: {', '.join(near)}; " if near else ""
        print(f"error: there is no command {name!r:.80}\n{remedy}coppice --help lists all", file=sys.stderr)
        return 2
    if name == "plan":
        if not args or args[0].startswith("-"):
            asked = args[:1] in (["-h"], ["--help"])
            print(PLAN, file=sys.stdout if asked else sys.stderr)
            return 0 if asked else 2
        args = [f"--plan={args[0]}", *args[1:]]
    return _run(name, COMMANDS[name][0], args)


def _leave_out_the_folder_of_scripts() -> None:
    """Take from the path what Python puts first there, the folder of the script, which can have modules of any name."""
    root, first = str(Path(__file__).resolve().parent), str(Path(sys.argv[0]).absolute().parent)
    if sys.path[:1] == [first]:
        del sys.path[0]
    if root not in sys.path:
        sys.path.append(root)


def _run(name: str, module: str, args: list[str]) -> int:
    """Run a module's `main` as `python -m` does: what the packages do at the start of a program, they do here too."""
    _leave_out_the_folder_of_scripts()
    sys.orig_argv, sys.argv = [sys.executable, "-m", module, *args], ["-m", *args]  # see engine/load/startup.py
    found = importlib.import_module(module)
    if hasattr(found, "__path__"):
        found = importlib.import_module(f"{module}.__main__")
    sys.argv[0] = f"coppice {name}"
    return found.main()


if __name__ == "__main__":
    sys.exit(main())
