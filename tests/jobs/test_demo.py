"""The demo, from its command to its page."""

from __future__ import annotations

import html
import re
from pathlib import Path

import pytest

from jobs.demo import main as demo
from jobs.demo import parse, train_over_links
from jobs.report.summary import read_runs
from tests.launched import PATIENCE


@pytest.mark.long("trains twice; `make test` has its refusals, and the page of runs made up")
@pytest.mark.pictures
@pytest.mark.timeout(3 * PATIENCE)  # two jobs, and the page
def test_the_demo_ends_with_a_table_and_a_picture(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    options = ["--ranks", "2", "--width", "0.0625", "--steps", "22", "--output", str(folder), "--no-links"]
    assert demo(options) == 0
    said = capfd.readouterr().out
    assert "dense on 2 ranks" in said
    assert "oktopk on 2 ranks and" in said
    assert re.search(r"^Method +Dense +Ok-Topk$", said, re.MULTILINE)
    page = html.unescape((folder / "index.html").read_text("utf-8"))
    for figure in (
        r"Ok-Topk sends [\d,]+ words a rank and step, dense [\d,]+\.",
        r"Ok-Topk gets [\d.]+% of the held-out images right, dense [\d.]+%; one seed\.",
        r"A step takes [\d.]+ ms with Ok-Topk here, in one host's memory, dense [\d.]+ ms\.",
    ):
        assert re.search(f"^{figure}$", said, re.MULTILINE), figure
        assert re.search(f"<li>{figure}", page), figure
    made = {path.name for path in folder.iterdir()}
    assert {"dense.h5", "oktopk.h5", "index.html", "summary.csv"} <= made
    assert "A step at 1 Gb/s was not measured: the demo was started with --no-links." in said
    (first,) = read_runs([folder / "oktopk.h5"])
    assert first.measures["step"].tolist() == [20]
    assert (first.steps["seconds_reduction"] > 0).all()


@pytest.mark.parametrize(
    ("script", "patience", "problem"),
    [
        (
            "echo 'bench-net: needs root' >&2; echo prterun: lost >&2; exit 2",
            60,
            "status 2: bench-net: needs root",
        ),
        ("exit 1", 60, "status 1: no message"),
        ("trap 'exit 143' TERM; sleep 60 & wait", 1, "more than 1 s"),
        ("exit 0", 60, "no such file"),
    ],
)
def test_whatever_keeps_links_from_being_shaped_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, patience: float, problem: str
) -> None:
    (tmp_path / "net.sh").write_text(script)
    monkeypatch.setattr("jobs.demo.LINK_SCRIPT", tmp_path / "net.sh")
    options = parse(["--output", str(tmp_path / "demo")])
    paths, said = train_over_links(options, patience)
    assert not paths
    assert said.startswith("training with dense: ")
    assert problem in said


def test_one_rank_has_no_links(tmp_path: Path) -> None:
    assert train_over_links(parse(["--ranks", "1"]), 60) == ([], "one rank sends nothing")


@pytest.mark.long("starts a job; `make test` has what training refuses, and in how many lines")
@pytest.mark.timeout(PATIENCE)
def test_the_demo_refuses_what_its_training_refuses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert demo(["--ranks", "1", "--density", "0", "--output", str(tmp_path / "demo")]) == 2
    said = capfd.readouterr().err
    assert "density 0.0 is not in (0, 1]" in said
    assert "Traceback" not in said
    assert not (tmp_path / "demo").exists()
