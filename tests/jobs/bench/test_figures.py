"""Every kind of document becomes a picture and two CSV files."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pytest
from matplotlib.image import imread

from jobs.bench.document import FORMAT, BenchError
from jobs.bench.figures import draw, method_rows

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
@pytest.mark.parametrize(
    ("kind", "ranks"), [("bench", (4,)), ("bench", (1,)), ("ablation", (4, 8)), ("sweep", (2, 4, 8))]
)
def test_a_document_is_drawn(tmp_path: Path, kind: str, ranks: tuple[int, ...]) -> None:
    path = tmp_path / "figures.json"
    path.write_text(json.dumps(content(kind, *ranks)))
    files = draw(path, tmp_path / "out" / "deeper")
    assert [file.name for file in files] == ["figures.png", "figures-methods.csv", "figures-stages.csv"]
    assert sorted(file.name for file in (tmp_path / "out" / "deeper").iterdir()) == sorted(
        f.name for f in files
    )
    height, width, _ = imread(files[0]).shape
    assert width > 1000
    assert height > 400
    with open(files[1], newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [(row["ranks"], row["name"]) for row in rows] == [
        (str(count), name) for count in ranks for name in ("dense", "oktopk", "mpi")
    ]
    assert rows[1]["exact_mean"] == "0.03"
    assert rows[0]["exact_mean"] == ""
    with open(files[2], newline="", encoding="utf-8") as file:
        stages = list(csv.DictReader(file))
    first = next(row for row in stages if row["name"] == "oktopk" and row["kind"] == "regular")
    assert (first["stage"], first["mean"], first["floor"]) == ("select", "0.02", "0.01")


def test_rows_hold_words_and_formulas() -> None:
    row = method_rows(content("bench", 4))[1]
    assert (row["words_mean"], row["words_busiest"], row["formula_most"]) == (400.0, 600.0, 500.0)


@pytest.mark.parametrize("kind", ["hook table", "rows table"])
def test_a_table_has_no_picture(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "table.json"
    path.write_text(json.dumps(content(kind, 2)))
    with pytest.raises(BenchError, match="has no picture"):
        draw(path, tmp_path)


def test_bad_input_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BenchError, match="cannot be read"):
        draw(tmp_path / "none.json", tmp_path)
    (tmp_path / "bench.json").write_text(json.dumps(content("bench", 2)))
    (tmp_path / "file").write_text("")
    with pytest.raises(BenchError, match="file cannot be written"):
        draw(tmp_path / "bench.json", tmp_path / "file")
