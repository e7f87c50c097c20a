"""The bench's command line: what it means, and what is refused before anything starts."""

from __future__ import annotations

import math
import re

import pytest

from jobs.bench.document import BenchError
from jobs.bench.options import parse
from oktopk import METHODS


def test_warmup_is_two_over_the_density_rounded_up() -> None:
    assert parse(["--density", "0.03"]).warmup == 67
    assert parse(["--density", "0.03", "--warmup", "0"]).warmup == 0


def test_methods_part_at_commas_or_blanks_and_count_once() -> None:
    options = parse(["--methods", "mpi,oktopk", "dense", "mpi"])
    assert options.methods == ("mpi", "oktopk", "dense")


def test_several_lengths_are_measured_one_after_another() -> None:
    options = parse(["--length", "77,88,99"])
    assert options.lengths == (77, 88, 99)


def test_default_methods_are_those_of_the_device() -> None:
    assert parse([]).methods == (*METHODS, "mpi")
    assert parse(["--device", "cuda"]).methods == (*METHODS, "nccl", "nccl-bf16")


def test_settings_are_numbers_or_words() -> None:
    given = ["--set", "threshold_interval=4", "--set", "balance_trigger=inf", "--set", "nonfinite=skip"]
    settings = parse(given).settings
    assert settings == {"threshold_interval": 4, "balance_trigger": math.inf, "nonfinite": "skip"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "topkb"], "method 'topkb' is not one of dense, oktopk, "),
        (["--methods", ","], "no method is named"),
        (["--length", "0"], "argument --length: 0 is not at least 1"),
        (["--length", str(2**31)], "length 2147483648 is not in [1, 2147483647]"),
        (["--length", "many"], "argument --length: 'many' is not a list of numbers such as 2,4,8"),
        (["--length", "5,0"], "argument --length: 0 is not at least 1"),
        (["--density", "0"], "density 0.0 is not in (0, 0.25]"),
        (["--density", "0.5"], "density 0.5 is not in (0, 0.25]: above, every method runs densely"),
        (["--steps", "31"], "steps 31 is not at least 32, the threshold interval"),
        (["--steps", "0", "--set", "threshold_interval=1"], "argument --steps: 0 is not at least 1"),
        (["--dense-steps", "65"], "dense-steps 65 is not in [1, 64]"),
        (["--device", "abacus"], "invalid choice: 'abacus'"),
        (["--set", "density=0.1"], "--set 'density=0.1' is not NAME=VALUE with a name of threshold_interval"),
        (["--set", "threshold_interval"], "is not NAME=VALUE"),
        (["--set", "threshold_interval=0"], "threshold_interval 0 is not an integer >= 1"),
        (["--set", "balance_trigger=x"], "balance_trigger 'x' is not a number"),
        (["--gradient-type", "bfloat16"], "gradient type 'bfloat16' is not one of float32 on --device cpu"),
        (["--methods", "nccl"], "method 'nccl' is not one of dense, oktopk, "),
        (["--methods", "oktopk-mpi"], "oktopk-hosts-int4 on --device cpu"),
        (["--device", "cuda", "--methods", "mpi"], "oktopk-hosts-int4 on --device cuda"),
        (["-n", "4"], "arguments: -n 4 (-n is an option of the launcher: python -m jobs.launch -n RANKS -m"),
    ],
)
def test_what_cannot_be_done_names_value_and_bound(words: list[str], message: str) -> None:
    with pytest.raises(BenchError, match=re.escape(message)):
        parse(words)
