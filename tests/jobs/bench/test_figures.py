"""Documents of a sweep become a picture."""

from __future__ import annotations

from pathlib import Path

import pytest
from matplotlib.image import imread

from jobs.bench.document import BenchError, Output, read
from jobs.bench.figures import report_bench

RESULTS = Path(__file__).parents[3] / "docs" / "results"
SWEEP = RESULTS / "sweep.json"


@pytest.mark.pictures
@pytest.mark.parametrize("runs", [1, 6])
def test_a_sweep_is_drawn(tmp_path: Path, runs: int) -> None:
    content = read(SWEEP)
    Output(tmp_path / "sweep.json").write(content | {"runs": content["runs"][:runs]})
    said = report_bench(tmp_path / "sweep.json", tmp_path / "out" / "deeper")
    (picture,) = (tmp_path / "out" / "deeper").iterdir()
    assert said.endswith(f"picture: {picture}")
    assert min(imread(picture).shape[:2]) > 400


def test_a_table_has_no_picture(tmp_path: Path) -> None:
    assert "picture" not in report_bench(RESULTS / "hook-2.json", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be read"):
        report_bench(tmp_path / "none.json", tmp_path)
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="file cannot be written"):
        report_bench(SWEEP, tmp_path / "file")
