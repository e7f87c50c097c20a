"""The bench's command line: what it means, and what is refused before anything starts."""

from __future__ import annotations

import dataclasses
import math
import re
from pathlib import Path

import pytest

from jobs.bench.arguments import parse
from jobs.bench.document import BenchError
from jobs.bench.options import JOB
from oktopk import METHODS


def test_warmup_is_two_over_the_density_rounded_up() -> None:
    assert parse(["--density", "0.03"], launched=True).warmup == 67
    assert parse(["--density", "0.03", "--warmup", "0"], launched=True).warmup == 0


def test_methods_may_be_separated_by_commas_or_blanks_and_count_once() -> None:
    options = parse(["--methods", "mpi,oktopk", "dense", "mpi"], launched=True)
    assert options.methods == ("mpi", "oktopk", "dense")


def test_several_lengths_are_measured_one_after_another() -> None:
    options = parse(["--length", "77,88,99"], launched=True)
    assert options.lengths == (77, 88, 99)


def test_a_sweep_measures_words_only() -> None:
    options = parse(["--sweep-ranks", "2,4"], launched=False)
    assert options.sweep_ranks == (2, 4)
    assert options.methods == tuple(METHODS)
    assert (options.length, options.density) == (100_000, 0.02)
    assert not options.memory


def test_an_ablation_is_of_oktopk_on_four_and_eight_ranks() -> None:
    assert parse(["--ablate"], launched=False).ranks == (4, 8)
    launched = parse(["--ablate"], launched=True)
    assert (launched.ranks, launched.methods, launched.gradients) == ((), ("oktopk",), "clustered")


def test_settings_are_numbers_or_words() -> None:
    given = ["--set", "threshold_interval=4", "--set", "balance_trigger=inf", "--set", "nonfinite=skip"]
    settings = parse(given, launched=True).settings
    assert settings == {"threshold_interval": 4, "balance_trigger": math.inf, "nonfinite": "skip"}


def test_a_job_takes_the_command_line_of_its_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(JOB, "1")
    words = ["--sweep-ranks", "2,4"]
    driver = parse(words, launched=False)
    assert parse([*words, "--json", "x", "--quiet"], launched=True) == dataclasses.replace(
        driver, json=Path("x"), quiet=True
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--methods", "topkb"], "method 'topkb' is not one of dense, oktopk, "),
        (["--methods", ","], "no method is named"),
        (["--length", "0"], "argument --length: 0 is not at least 1"),
        (["--length", str(2**31)], "length 2147483648 is not in [1, 2147483647]"),
        (["--length", "many"], "argument --length: 'many' is not a list of numbers such as 2,4,8"),
        (["--length", "5,0"], "argument --length: 0 is not at least 1"),
        (["--length", "5,6", "--ablate"], "--length takes one length with --ablate"),
        (["--link", "fast"], "link 'fast' is neither a rate such as 10gbit nor 'none'"),
        (["--density", "0"], "density 0.0 is not in (0, 0.25]"),
        (["--density", "0.5"], "density 0.5 is not in (0, 0.25]: above, every method runs densely"),
        (["--steps", "31"], "steps 31 is not at least 32, the threshold interval"),
        (["--steps", "0", "--set", "threshold_interval=1"], "argument --steps: 0 is not at least 1"),
        (["--warmup", "-1"], "argument --warmup: -1 is not at least 0"),
        (["--dense-steps", "65"], "dense-steps 65 is not in [1, 64]"),
        (["--dense-steps", "0"], "argument --dense-steps: 0 is not at least 1"),
        (["--gradients", "odd"], "invalid choice: 'odd'"),
        (["--device", "abacus"], "invalid choice: 'abacus'"),
        (["--set", "density=0.1"], "--set 'density=0.1' is not NAME=VALUE with a name of threshold_interval"),
        (["--set", "threshold_interval"], "is not NAME=VALUE"),
        (["--set", "threshold_interval=0"], "threshold_interval 0 is not an integer >= 1"),
        (["--set", "balance_trigger=x"], "balance_trigger 'x' is not a number"),
        (["--sweep-ranks", "2,x"], "argument --sweep-ranks: '2,x' is not a list of numbers such as 2,4,8"),
        (["--sweep-ranks", "0,2"], "argument --sweep-ranks: 0 is not at least 1"),
        (["--sweep-ranks", "2", "--ablate"], "two different benches"),
        (["--ablate", "--methods", "topka"], "--ablate compares settings of oktopk, not methods topka"),
        (["--what"], "unrecognized arguments: --what"),
        (["-n", "4"], "arguments: -n 4 (-n is an option of the launcher: python -m jobs.launch -n RANKS -m"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_value_and_the_bound(words: list[str], message: str) -> None:
    with pytest.raises(BenchError, match=re.escape(message)):
        parse(words, launched=False)


def test_a_rank_starts_no_ranks() -> None:
    with pytest.raises(BenchError, match="starts mpiexec itself: run it without one"):
        parse(["--sweep-ranks", "2"], launched=True)
