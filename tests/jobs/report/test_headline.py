"""The headline of the demo's page: figures worked out from the run files."""

from __future__ import annotations

import math
from pathlib import Path

import h5py
import numpy as np
import pytest

from jobs.report.groups import group_runs
from jobs.report.headline import SlowLinks, headline, notes, sentence, xi_sentence
from jobs.report.summary import read_runs
from jobs.report.write import report
from tests.jobs.report.test_page import Page
from tests.jobs.report.test_report import DENSE_WORDS, SPARSE_WORDS, rows, write_run

STEPS = 50


def seconds(value: float) -> np.ndarray:
    return np.full(STEPS, value)


def pair(
    folder: Path, name: str, dense: float, oktopk: float, *, seed: int = 0, status: str = "complete"
) -> list[Path]:
    """Runs of both methods whose reductions take so many seconds, beside 4 ms of computing."""
    return [
        write_run(
            folder / f"{method}{name}.h5",
            method=method,
            seed=seed,
            accuracy=accuracy + 0.01 * seed,
            status=status,
            seconds_forward=seconds(0.004),
            seconds_reduction=seconds(reduction),
        )
        for method, accuracy, reduction in (("dense", 0.9, dense), ("oktopk", 0.9 - 4 / 773, oktopk))
    ]


def figures(here: list[Path], links: SlowLinks) -> list[str]:
    groups = group_runs(read_runs(here))
    return [figure.short for figure in headline(groups, group_runs(read_runs(links.paths)), links)]


def test_the_headline_is_computed_from_the_runs(tmp_path: Path) -> None:
    here, slow = pair(tmp_path, "", 0.001, 0.002), pair(tmp_path, "-slow", 0.02, 0.004)
    assert figures(here, SlowLinks(slow)) == [
        f"{DENSE_WORDS / SPARSE_WORDS:.0f} times fewer words",
        f"accuracy {400 / 773:.2g} points lower",
        "a step 20 % longer here",
        "a step 3.0 times shorter at 1 Gb/s",
    ]
    words, accuracy, step, links = headline(
        group_runs(read_runs(here)), group_runs(read_runs(slow)), SlowLinks(slow)
    )
    assert "sends 60 words in a step, with the dense allreduce 1,500" in words.text
    assert (
        "89.5% of the held-out images at the end, with the dense allreduce 90.0%: 4 of 773 images"
        in accuracy.text
    )
    assert "One seed" in accuracy.text
    assert "6 ms, with the dense allreduce 5 ms; the reduction alone 2 ms and 1 ms." in step.text
    assert links.text.startswith("8 ms, with the dense allreduce 24 ms; the reduction alone 4 ms and 20 ms.")
    assert "40 steps" in links.text


def test_a_method_that_is_better_or_equal_is_called_so(tmp_path: Path) -> None:
    alike = [write_run(tmp_path / f"{method}.h5", method=method) for method in ("dense", "oktopk")]
    assert figures(alike, SlowLinks())[1:3] == ["the same accuracy", "a step equally long here"]
    better = write_run(tmp_path / "b.h5", accuracy=0.95, words=seconds(2 * DENSE_WORDS))
    assert figures([alike[0], better], SlowLinks())[:2] == [
        "2.0 times more words",
        "accuracy 5 points higher",
    ]


def test_two_seeds_are_compared_by_their_means_and_their_distance(tmp_path: Path) -> None:
    here = pair(tmp_path, "", 0.001, 0.002) + pair(tmp_path, "-1", 0.001, 0.002, seed=1)
    accuracy = headline(group_runs(read_runs(here)), [], SlowLinks())[1]
    assert "90.0% of the held-out" in accuracy.text
    assert "4 of 773 images, means of 2 seeds. Seeds of one method are up to 1 points apart." in accuracy.text


@pytest.mark.parametrize("status", ["none", "failed"])
def test_a_step_that_was_not_measured_is_named_with_the_reason(tmp_path: Path, status: str) -> None:
    here = pair(tmp_path, "", 0.001, 0.002)
    slow = pair(tmp_path, "-slow", 0.02, 0.004, status=status) if status != "none" else []
    links = SlowLinks(slow, "no namespaces today")
    groups, others = group_runs(read_runs(here)), group_runs(read_runs(slow))
    found = headline(groups, others, links)
    assert sentence(found).endswith("; a step 20 % longer here")
    assert notes(found, links, groups, others) == ["A step at 1 Gb/s was not measured: no namespaces today."]


@pytest.mark.parametrize(("slower", "told"), [(1.2, False), (2.0, True)])
@pytest.mark.parametrize("links", [False, True])
def test_a_machine_that_was_busy_in_some_of_the_runs_is_told(
    tmp_path: Path, slower: float, told: bool, links: bool
) -> None:
    forward = seconds(0.02 * slower)
    dense = write_run(tmp_path / "dense.h5", method="dense", seconds_forward=seconds(0.02))
    ours = write_run(tmp_path / "oktopk.h5", seconds_forward=seconds(0.02) if links else forward)
    fast = write_run(tmp_path / "fast.h5", method="dense", seconds_forward=seconds(0.02))
    slow = write_run(tmp_path / "slow.h5", seconds_forward=forward)
    groups, others = (
        group_runs(read_runs([dense, ours])),
        group_runs(read_runs([fast, slow]) if links else []),
    )
    lines = notes(headline(groups, others, SlowLinks()), SlowLinks(), groups, others)
    compared = [
        figure.short.startswith("a step ")
        for figure in headline(groups, others, SlowLinks())
        if "step" in figure.short
    ]
    assert compared == [links or not told] + [not told] * links
    assert told == any(
        "are the same work in all runs, but took between 20 ms and 40 ms: other" in line for line in lines
    )


def test_a_large_xi_is_named_with_what_it_is_divided_by(tmp_path: Path) -> None:
    path = write_run(tmp_path / "a.h5", xi=(1.0, 8.0, math.nan, 4.0))
    with h5py.File(path, "r+") as file:
        file["measures/gradient_norm"][:] = [3.0, 0.5, 9.0, 1.5]
    assert xi_sentence(group_runs(read_runs([path]))) == (
        "ξ is not below P = 4 in 2 of 3 measured steps. ξ divides by the norm of the mean gradient, which is 1 in these "
        "steps on average and 3 in the others."
    )
    small = write_run(tmp_path / "b.h5", xi=(1.0, 3.9))
    assert xi_sentence(group_runs(read_runs([small]))) == "ξ is below P = 4 in all 2 measured steps."
    assert xi_sentence(group_runs(read_runs([write_run(tmp_path / "c.h5")]))) == ""


def test_there_is_no_headline_without_both_methods(tmp_path: Path) -> None:
    (alone,) = read_runs([write_run(tmp_path / "a.h5")])
    assert headline(group_runs([alone]), [], SlowLinks()) == []
    empty = [write_run(tmp_path / f"{method}-0.h5", method=method, steps=0) for method in ("dense", "oktopk")]
    assert figures(empty, SlowLinks()) == []


def test_the_page_of_the_demo_begins_with_its_headline(tmp_path: Path) -> None:
    here = pair(tmp_path, "", 0.001, 0.002) + pair(tmp_path, "-1", 0.001, 0.002, seed=1)
    slow = pair(tmp_path, "-slow", 0.02, 0.004)
    for name, links in (("measured", SlowLinks(slow)), ("missing", SlowLinks(problem="no <namespaces>"))):
        table = report(here, tmp_path / name, links=links)
        assert table.startswith("Ok-Topk: 25 times fewer words; accuracy ")
        text = (tmp_path / name / "index.html").read_text(encoding="utf-8")
        page = Page(text)
        assert "<dt>fill-in</dt><dd>entries that any rank selected" in text
        assert text.index("25 times fewer words") < text.index("<img") < text.index(">Methods<")
        missing = name == "missing"
        assert ("<h3>Time of a step on one host and over 1 Gb/s</h3>" in text) == (not missing)
        assert "Accuracy: mean over the seeds" in text and "PowerSGD" not in text and "ξ (mean" not in table
        assert ("no &lt;namespaces&gt;" in text) == missing
        assert ("A step at 1 Gb/s was not measured: no <namespaces>." in table) == missing
        assert ("oktopk-slow" in page.cells) == (not missing)
        assert text.count('<tr class="ours">') == 3  # in each table
    bars = rows(tmp_path / "measured" / "step-times.csv")
    assert [(bar["series"], round(1e3 * float(bar["reduction_seconds"]), 3)) for bar in bars] == [
        ("Dense, one host", 1.0),
        ("Ok-Topk, one host", 2.0),
        ("Dense, 1 Gb/s", 20.0),
        ("Ok-Topk, 1 Gb/s", 4.0),
    ]
    assert {round(1e3 * float(bar["compute_seconds"]), 3) for bar in bars} == {4.0}
    other = tmp_path / "other"
    report(here, other)
    assert 'class="headline"' not in (other / "index.html").read_text()
    assert (tmp_path / "measured" / "runs" / "oktopk-slow-steps.csv").is_file()


def test_seeds_of_one_method_are_drawn_as_one_line(tmp_path: Path) -> None:
    here = pair(tmp_path, "", 0.001, 0.002) + pair(tmp_path, "-1", 0.001, 0.002, seed=1)
    report(here, tmp_path / "out", links=SlowLinks())
    drawn = (tmp_path / "out" / "accuracy-over-steps.csv").read_text().splitlines()[1:]
    assert [line.split(",")[0] for line in drawn] == [
        "Dense",
        "Dense",
        "Ok-Topk",
        "Ok-Topk",
    ]  # two evaluations each
    ends = [float(value) for value in drawn[1].split(",")[1:]]
    assert ends == pytest.approx([STEPS, 0.905, 0.9, 0.91])
