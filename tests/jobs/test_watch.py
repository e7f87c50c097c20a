"""The live view of a run."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from jobs.run.file import RunFile
from jobs.watch import STALE, curve, duration, follow, main, view
from tests.jobs.run.test_file import INFO, columns, evaluation


def write(path: Path, steps: int = 3) -> RunFile:
    file = RunFile(path, INFO)
    file.append_steps(columns(1, steps), {"select": np.ones(steps)})
    return file


def shown(path: Path, *, now: float | None = None) -> tuple[str, bool]:
    console = Console(width=120)
    with console.capture() as capture:
        panel, ended = view(path, time.time() if now is None else now, 40)
        console.print(panel)
    return capture.get(), ended


def test_a_run_is_shown_with_all_that_it_has(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    info = INFO.__class__(**{**vars(INFO), "config": '{"training": {"steps": 10, "epochs": 0}}'})
    with RunFile(path, info) as file:
        file.append_steps(columns(1, 4), {"select": np.ones(4)})
        file.append_evaluation(**evaluation(4))
        text, ended = shown(path)
        assert not ended
        for part in (
            "running  oktopk on 4 ranks of here, last news",
            "4 of 10 steps (40.0%)",
            "2,500.0 ms: data 20%",
            "0:00:15 left",
            "0.5000",
            "a step and rank",
            "25.00% after step 4, best 25.00%",
        ):
            assert part in text
        assert "restarts" not in text
    text, ended = shown(path)
    assert ended
    assert "complete" in text


def test_a_run_without_steps_or_end_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    info = INFO.__class__(**{**vars(INFO), "config": '{"training": {"steps": 0, "epochs": 3}}'})
    with RunFile(path, info) as file:
        assert "0 steps" in shown(path)[0]
        file.append_steps(columns(1, 5), {})
        assert "5 steps" in shown(path)[0]
        file.append_evaluation(**{**evaluation(5), "epoch": 0.5})
        assert "5 of 30 steps" in shown(path)[0]


def test_a_run_that_says_nothing_is_called_silent(tmp_path: Path) -> None:
    with write(tmp_path / "run.h5"):
        text, ended = shown(tmp_path / "run.h5", now=time.time() + STALE + 60)
    assert "silent" in text
    assert "last news 0:02:00 ago" in text
    assert not ended


def test_the_view_follows_a_run_to_its_end(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"

    def live() -> None:
        time.sleep(0.3)
        file = write(path)
        time.sleep(0.3)
        file.close("interrupted")

    writer = threading.Thread(target=live)
    writer.start()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        console = Console(file=nowhere, record=True, width=120)
        follow([path], console, every=0.05, once=False)
    writer.join()
    assert "interrupted" in console.export_text()


def test_what_is_no_run_file_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--once", str(tmp_path / "none.h5")]) == 2
    assert "no such file" in capsys.readouterr().err
    write(tmp_path / "run.h5").close("failed")
    assert main(["--once", str(tmp_path / "run.h5")]) == 0
    assert "failed" in capsys.readouterr().out


def test_a_curve_shows_the_course_and_what_is_not_finite() -> None:
    assert curve(np.array([8.0, 4.0, 0.0]), 10) == "█▅▁"
    assert len(curve(np.linspace(1, 0, 1000), 40)) == 40
    assert curve(np.array([1.0, np.nan]), 10) == "▁x"
    assert curve(np.array([np.nan]), 10) == "x"


def test_durations_read_like_clocks() -> None:
    assert duration(3725.4) == "1:02:05"
    assert duration(-1) == "0:00:00"
