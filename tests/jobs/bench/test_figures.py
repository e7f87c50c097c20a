"""Documents of a sweep become a picture."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from jobs.bench.document import FORMAT, BenchError
from jobs.bench.figures import report_bench

STAGES = {"select": 0.02, "exchange": 0.003, "unheard of": 0.001}


def method(name: str, mean: float, ranks: int, *, exact: bool = True, counted: bool = True) -> dict[str, Any]:
    times = {"steps": 3, "median": mean, "mean": mean, "min": mean, "max": mean}
    stages = {
        stage: {"mean": seconds, "median": seconds, "slowest": seconds, "least": seconds}
        for stage, seconds in STAGES.items()
    }
    words = {"mean": 100.0 * ranks, "busiest": 150.0 * ranks, "largest_step": 110.0 * ranks}
    return {
        "name": name,
        "method": name,
        "counted": counted,
        "seconds": {"all": times, "regular": times, "exact": times if exact else None},
        "stages": {"all": stages, "regular": stages, "exact": stages if exact else None},
        "floors": {"select": {"seconds": 0.01}},
        **dict.fromkeys(("words", "messages", "control_words", "control_messages"), words),
        "formulas": {"least": 50.0, "most": 500.0},
        "nnz": {"local": 10.0, "global": 10.0},
    }


def content(kind: str, *ranks: int, dirty: bool = False) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "kind": kind,
        "commit": "0123456789abcdef",
        "dirty": dirty,
        "date": "2026-01-02T03:04:05+00:00",
        "machine": {"cpu": "Abacus", "cores": 2},
        "runs": [
            {
                "ranks": count,
                "length": 1000,
                "density": 0.01,
                "k": 10,
                "network": "",
                "gradients": {"name": "heavy"},
                "bounds": {"lower": 15.0, "upper": 45.0, "step_limit": 56.0, "dense": 1500.0},
                "methods": [
                    method("dense", 0.08, count, exact=False),
                    method("oktopk", 0.03, count),
                    method("mpi", 0.09, count, exact=False, counted=False),
                ],
            }
            for count in ranks
        ],
    }


@pytest.mark.pictures
@pytest.mark.parametrize("ranks", [(1,), (2, 4, 8)])
def test_a_sweep_is_drawn(tmp_path: Path, ranks: tuple[int, ...]) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(content("sweep", *ranks)))
    said = report_bench(path, tmp_path / "out" / "deeper")
    (picture,) = (tmp_path / "out" / "deeper").iterdir()
    assert said.endswith(f"picture: {picture}")
    height, width, _ = imread(picture).shape
    assert width > 1000
    assert height > 400


def test_a_table_has_no_picture(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    run = {"backend": "gloo", "device": "cpu", "course": {"steps": 1, "warmup": 0}, "methods": []}
    path.write_text(json.dumps(content("hook table") | {"runs": [content("", 2)["runs"][0] | run]}))
    assert "picture" not in report_bench(path, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be read"):
        report_bench(tmp_path / "none.json", tmp_path)
    (tmp_path / "bench.json").write_text(json.dumps(content("sweep", 2)))
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="file cannot be written"):
        report_bench(tmp_path / "bench.json", tmp_path / "file")
