"""Parts that the command lines share: flags, sizes, errors, exit codes."""

import argparse
import io
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass

import pytest

from engine.app import cli
from engine.demo import demo_folder
from engine.errors import CheckpointError, KVMemoryError, NumericsError, UsageError
from engine.load.sizes import read_size
from search import REGISTRY, ULTS, BeamSample, Greedy, Sample, Search, Trie, make_search, register
from search.base import parameters


def make_parser() -> cli.Parser:
    parser = cli.Parser("prog", "what it does")
    cli.add_load_flags(parser, "prog")
    for add in (cli.add_search_flags, cli.add_limit_flags, cli.add_verbosity_flags):
        add(parser)
    return parser


@pytest.mark.parametrize(
    ("text", "size"),
    [("1", 1), ("300000", 300000), ("512M", 512 << 20), ("1G", 1 << 30), ("1.5g", 3 << 29), ("2 KiB", 2048),
     ("1TB", 1 << 40)],
)  # fmt: skip
def test_sizes(text: str, size: int):
    assert cli.argument(read_size)(text) == size


@pytest.mark.parametrize("text", ["", "0", "-1", "0.0001", "M", "1X", "1e9", "nan", "inf", "1.M", "٣", "9" * 18 + "T"])
def test_no_sizes(text: str):
    with pytest.raises(argparse.ArgumentTypeError, match="expected a size"):
        cli.argument(read_size)(text)


def test_weights_are_int8_or_int4(capsys: pytest.CaptureFixture):
    parser = make_parser()
    assert [parser.parse_args(["--quant", name]).quant for name in ("int8", "int4", "auto")] == ["int8", "int4", "auto"]
    with pytest.raises(SystemExit):
        parser.parse_args(["--quant", "int4-64"])
    assert "choose from 'none', 'int8', 'int4', 'auto'" in capsys.readouterr().err


def test_search_parameters_are_those_given():
    args = make_parser().parse_args([])
    assert (args.search, cli.search_params(args)) == ("greedy", {})
    assert cli.limits(args) == {"max_new_tokens": 256, "stop": (), "ignore_eos": False}
    given = "--search trie --beams 15 --length-penalty 0.6 --early-stopping never --stop a --stop b --seed 3"
    args = make_parser().parse_args(given.split())
    assert cli.search_params(args) == {"beams": 15, "length_penalty": 0.6, "early_stopping": "never", "seed": 3}
    assert args.stop == ["a", "b"]
    with pytest.raises(UsageError, match="seed: the search 'trie' has no such parameter"):
        make_search(args.search, cli.search_params(args))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--beams 15", Trie(15)),
        ("--beams 15 --temperature 0", Trie(15)),
        ("--search beam --num-return-sequences 2", Trie(num_return_sequences=2)),
        ("--search beam-sample --beams 3 --temperature 0.7", BeamSample(beams=3, temperature=0.7)),
        ("--temperature 0", Greedy()),
        ("--temperature 0.0 --seed 1 --top-k 5 --top-p 0.9 --min-p 0.1", Greedy()),
        ("--search sample --temperature 0 --seed 1", Sample(temperature=0, seed=1)),
        ("--search ults --temperature 0 --seed 1", ULTS(seed=1)),
    ],
)
def test_the_search_that_parameters_mean(flags: str, expected: Search):
    args = make_parser().parse_args(flags.split())
    assert make_search(args.search, cli.search_params(args)) == expected


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ("--search greedy --beams 3", "beams: the search 'greedy' has no such parameter"),
        (
            "--beams 3 --temperature 0.7",
            "'trie' has no such parameter\nsearches that have all of the parameters: beam-sample",
        ),
        ("--temperature 1", "'greedy' has no such parameter\nsearches that have it: sample, aded, dsbd and 4 more"),
        ("--temperature 0 --top-p 7", "top_p: expected a number in"),
        ("--temperature 0 --seed -1", "seed: expected an integer from 0"),
        ("--seed 1", "seed: the search 'greedy' has no such parameter"),
    ],
)
def test_parameters_that_contradict_the_search(flags: str, words: str):
    args = make_parser().parse_args(flags.split())
    with pytest.raises(UsageError) as caught:
        make_search(args.search, cli.search_params(args))
    assert words in str(caught.value)


def test_an_alias_is_no_free_name():
    with pytest.raises(UsageError, match=r"'beam' belongs to another search, search.trie:Trie"):

        @register("beam")
        @dataclass(frozen=True)
        class Beam(Greedy):
            pass


@pytest.mark.parametrize("quiet", [False, True])
def test_warnings_have_the_form_of_messages(quiet: bool, capsys: pytest.CaptureFixture[str]):
    def main() -> int:
        warnings.warn("the kernels in PyTorch run, slower", stacklevel=1)
        return 0

    before = warnings.showwarning
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert cli.run(main, quiet=quiet) == 0
    assert capsys.readouterr() == ("", "" if quiet else "warning: the kernels in PyTorch run, slower\n")
    assert warnings.showwarning is before


def test_every_parameter_has_a_flag_with_its_default(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "500")  # else lines break at hyphens
    text = " ".join(make_parser().format_help().split())
    for name, search in REGISTRY.items():
        for key, field in parameters(name).items():
            flag = text[text.index("--" + key.replace("_", "-") + " ", text.index("options:")) :]
            default = re.escape(str(getattr(search, field)).lower())
            assert re.search(rf"\(({default}|[^()]*{name}[^();]*: {default})[;)]", flag[:400]), key


def test_a_search_of_its_own_flags(monkeypatch: pytest.MonkeyPatch):
    @dataclass(frozen=True)
    class Toy:
        """A toy.

        Args:
            epsilon: loss of 5% that is
                taken.
            exact: or not.
        """

        epsilon: float = 0.1
        exact: bool = False

    monkeypatch.setitem(REGISTRY, "toy", Toy)
    parser = make_parser()
    assert "toy: loss of 5% that is taken (0.1)" in " ".join(parser.format_help().split())
    args = parser.parse_args(["--search", "toy", "--toy-epsilon", "0.5", "--toy-exact", "true"])
    assert make_search(args.search, cli.search_params(args)) == Toy(0.5, True)


def test_search_list(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        make_parser().parse_args(["--search", "list"])
    out = capsys.readouterr().out.splitlines()
    assert end.value.code == 0 and [line.split()[0] for line in out] == list(REGISTRY)
    assert all(len(line.split()) > 3 for line in out)
    assert [line.split()[0] for line in out if line.endswith(" (also: beam)")] == ["trie"]


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["--search", "tri"], "did you mean trie?"),
        (["--search", "x"], "--search list"),
        (["--num-beams", "4"], "did you mean --beams?"),
        (["--beam", "4"], "did you mean --beams?"),
        ([str(demo_folder())], f"did you mean --model {demo_folder()}?"),
        (["-m", str(demo_folder())], f"did you mean --model {demo_folder()}?"),  # as llama.cpp calls it
        (["a" * 300], "unrecognized arguments: aaa"),  # too long for the name of a file
        (["--kv-memory", "lots"], "expected a size such as"),
        (["--beams", "many"], "invalid int value"),
        (["--max-new-tokens", "0"], "expected an integer >= 1"),
        (["--early-stopping", "maybe"], "never"),
        (["--stop", ""], "expected a text"),
        (["--stop", "\udcff"], "not valid UTF-8"),
    ],
)
def test_wrong_flags(argv: list[str], hint: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as end:
        make_parser().parse_args(argv)
    assert end.value.code == 2
    assert hint in capsys.readouterr().err


def test_no_model_means_the_demo():
    engine = cli.load_engine(make_parser().parse_args(["--kv-memory", "1M"]))
    assert engine.template is not None and {*engine.companions} == {"draft", "reward"}


@pytest.mark.parametrize("verbose", [False, True])
@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UsageError("what", where="where", remedy="do"), 2, "error: what\nwhere\ndo\n"),
        (CheckpointError("what"), 3, "error: what\n"),
        (KVMemoryError("what"), 4, "error: what\n"),
        (NumericsError("what"), 5, "error: what\n"),
        (KeyError("x"), 1, "error: KeyError: 'x'\nthis is a bug of ours, please report it\n"),
        (KeyboardInterrupt(), 130, "interrupted\n"),
        (KeyboardInterrupt("go on"), 130, "interrupted: go on\n"),
    ],
)
def test_exit_codes(error: BaseException, code: int, says: str, verbose: bool, capsys: pytest.CaptureFixture[str]):
    def main() -> int:
        raise error

    assert cli.run(main, verbose) == code
    out, err = capsys.readouterr()
    assert out == "" and ("Traceback" in err) == verbose
    assert err.endswith(says if verbose else says.replace("report it\n", "report it\n-v shows where\n"))


def test_run_returns_the_code_of_main():
    assert cli.run(lambda: 7) == 7


def test_a_pipe_that_closes_is_no_error(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    class Closed(io.StringIO):
        def flush(self):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Closed())
    assert cli.run(lambda: 0) == 141
    assert capsys.readouterr().err == ""


def test_ctrl_c_while_a_command_line_is_loaded_leaves_no_traceback():
    code = """
import signal, sys
sys.argv[0] = "-m"
from engine.load.startup import restore_interrupts
assert signal.getsignal(signal.SIGINT) == signal.SIG_DFL
restore_interrupts()
assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
"""
    library = code.replace('"-m"', '"-c"').replace("== signal.SIG_DFL", "!= signal.SIG_DFL")
    for program in (code, library):
        subprocess.run([sys.executable, "-c", program], check=True, timeout=120)
