"""The demo, from its command to its page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from jobs.demo import main as demo
from tests.launched import PATIENCE


@pytest.mark.pictures
@pytest.mark.timeout(PATIENCE)
def test_the_demo_ends_with_a_table_and_a_picture(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "demo"
    options = ["--ranks", "2", "--width", "0.0625", "--steps", "12", "--output", str(folder)]
    assert demo(options) == 0
    said = capfd.readouterr().out
    assert "[1/2] dense on 2 ranks" in said
    assert re.search(r"^ +Dense +Ok-Topk$", said, re.MULTILINE)
    made = {path.name for path in folder.iterdir()}
    assert {"dense.h5", "oktopk.h5", "index.html", "report.png", "summary.csv"} <= made


@pytest.mark.timeout(PATIENCE)
def test_the_demo_refuses_what_its_training_refuses(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert demo(["--ranks", "1", "--density", "0", "--output", str(tmp_path / "demo")]) == 2
    said = capfd.readouterr().err
    assert "density 0.0 is not in (0, 1]" in said
    assert "Traceback" not in said
    assert not (tmp_path / "demo").exists()
