"""Sentences that open the demo's page, and the page itself; figures of the headline are in tables.md."""

from __future__ import annotations

import math
from pathlib import Path

import h5py
import pytest

from jobs.report.groups import group_runs
from jobs.report.headline import SlowLinks, headline, xi_sentence
from jobs.report.summary import read_runs
from jobs.report.write import report
from tests.jobs.report.test_page import Page
from tests.jobs.report.test_report import rows, write_run
from tests.jobs.report.test_tables import STEPS, pair


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
    assert headline(group_runs(read_runs(empty)), [], SlowLinks()) == []


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
