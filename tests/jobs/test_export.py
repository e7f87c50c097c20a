"""A run file for other tools: every value arrives, with its name and its step."""

from __future__ import annotations

import csv
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jobs.export import main
from jobs.run.columns import EVALUATION_COLUMNS, MEASURE_COLUMNS, STEP_COLUMNS
from jobs.run.file import RunFile, RunInfo
from tests.jobs.run.test_file import INFO as RUN_INFO

CONFIG = '{"training": {"steps": 3}, "model": {"name": "vgg16"}}'
INFO = RunInfo(**{**vars(RUN_INFO), "config": CONFIG, "versions": "{}"})
BEGAN = 1767225600.0  # 2026-01-01T00:00:00 UTC
LOSSES = [2.5, 1.25, 0.625]


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    """Three steps with the stage `select`, an evaluation and a measurement after the second, whose xi is NaN."""
    path = tmp_path / "run.h5"
    steps: dict[str, Any] = {name: np.full(3, 0.5) for name in STEP_COLUMNS}
    steps |= {"step": np.arange(1, 4), "loss": np.array(LOSSES), "elapsed": np.array([1.0, 2.0, 4.0])}
    measures = {name: np.full(1, 3.0) for name in MEASURE_COLUMNS} | {
        "step": np.array([2]),
        "xi": np.array([np.nan]),
    }
    with RunFile(path, INFO) as file:
        file.append_steps(steps, {"select": np.array([0.1, 0.2, 0.3])})
        file.append_evaluation(**{**dict.fromkeys(EVALUATION_COLUMNS, 0.25), "step": 2})
        file.append_measures(measures)
    return path


def test_csv_has_every_series_and_a_row_for_each_step(run_file: Path, tmp_path: Path) -> None:
    assert main([str(run_file), "--csv", str(tmp_path / "run.csv")]) == 0
    with open(tmp_path / "run.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    groups = {"steps": STEP_COLUMNS, "evaluations": EVALUATION_COLUMNS, "measures": MEASURE_COLUMNS}
    names = [f"{group}/{name}" for group, columns in groups.items() for name in columns if name != "step"]
    assert list(rows[0]) == ["step", *names, "stages/select"]
    assert [row["step"] for row in rows] == ["1", "2", "3"]
    assert [float(row["steps/loss"]) for row in rows] == LOSSES
    assert [float(row["stages/select"]) for row in rows] == [0.1, 0.2, 0.3]
    assert [row["evaluations/accuracy"] for row in rows] == ["", "0.25", ""]
    assert [row["measures/fill_in"] for row in rows] == ["", "3.0", ""]
    assert [row["measures/xi"] for row in rows] == ["", "", ""]


def test_tensorboard_reads_the_values_with_their_steps_and_times(run_file: Path, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard", reason="of the extra export")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    assert main([str(run_file), "--tensorboard", str(tmp_path / "logs")]) == 0
    found = EventAccumulator(str(tmp_path / "logs")).Reload()
    events = found.Scalars("steps/loss")
    assert [event.step for event in events] == [1, 2, 3]
    assert [event.value for event in events] == LOSSES
    assert [event.wall_time - BEGAN for event in events] == [1.0, 2.0, 4.0]
    assert [(event.step, event.value) for event in found.Scalars("evaluations/accuracy")] == [(2, 0.25)]
    tags = found.Tags()
    assert "measures/fill_in" in tags["scalars"]
    assert "measures/xi" not in tags["scalars"]
    assert "config/text_summary" in tags["tensors"]


def test_wandb_gets_an_offline_run_with_every_step(
    run_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a module that stands in for wandb and records the calls."""
    calls: list[tuple[str, dict[str, Any]]] = []

    class Run:
        def log(self, row: dict[str, float], step: int) -> None:
            calls.append(("log", {"row": row, "step": step}))

        def finish(self) -> None:
            calls.append(("finish", {}))

    def init(**keywords: Any) -> Run:
        calls.append(("init", keywords))
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(init=init))  # type: ignore[arg-type]
    folder = tmp_path / "deeper" / "wandb"
    assert main([str(run_file), "--wandb-offline", str(folder)]) == 0
    assert folder.is_dir()
    assert [name for name, _ in calls] == ["init", "log", "log", "log", "finish"]
    started = calls[0][1]
    assert (started["mode"], started["dir"], started["name"]) == ("offline", folder, "run")
    assert started["config"]["training"]["steps"] == 3
    assert [call["step"] for _, call in calls[1:4]] == [1, 2, 3]
    assert [call["row"]["steps/loss"] for _, call in calls[1:4]] == LOSSES
    assert "evaluations/accuracy" not in calls[1][1]["row"]
    assert calls[2][1]["row"]["evaluations/accuracy"] == 0.25


@pytest.mark.parametrize(
    ("option", "module"), [("--tensorboard", "tensorboard"), ("--wandb-offline", "wandb")]
)
def test_a_library_that_is_missing_is_a_sentence(
    option: str,
    module: str,
    run_file: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in [name for name in sys.modules if name.startswith("torch.utils.tensorboard")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)  # type: ignore[arg-type]
    assert main([str(run_file), option, str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("jobs.export: ")
    assert line.endswith("pip install -e '.[export]'")


def test_what_cannot_be_read_or_written_is_a_sentence(
    run_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "damaged.h5").write_bytes(run_file.read_bytes()[:100])
    for run, target, sentence in (
        (tmp_path / "none.h5", tmp_path / "out.csv", "none.h5: no such file"),
        (tmp_path / "damaged.h5", tmp_path / "out.csv", "damaged.h5 is not a run file"),
        (run_file, tmp_path / "no" / "out.csv", "No such file or directory"),
    ):
        assert main([str(run), "--csv", str(target)]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("jobs.export: ")
        assert sentence in line
