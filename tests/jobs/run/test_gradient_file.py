"""Recorded gradients come back as they were, also from a recording that was killed, and wrong ones are refused."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import h5py
import numpy as np
import pytest

from jobs.run.gradient_file import (
    GradientFileError,
    GradientRecorder,
    RecordedGradients,
    gradient_path,
    steps_recorded,
)

ROOT = Path(__file__).parents[3]
ROWS = np.random.default_rng(0).standard_normal((5, 13)).astype(np.float32)


def record(folder: Path, ranks: int = 2, steps: int = 5) -> None:
    for rank in range(ranks):
        with GradientRecorder(folder, rank, ranks, 13, steps=steps, source="a test") as recorder:
            for row in ROWS:
                recorder.add(row + rank)


def test_gradients_come_back_in_order_and_start_over(tmp_path: Path) -> None:
    record(tmp_path / "deep" / "er")
    for rank in range(2):
        recorded = RecordedGradients(tmp_path / "deep" / "er", rank, 2)
        assert (recorded.length, recorded.steps) == (13, 5)
        for step in range(12):
            assert np.array_equal(recorded.next(), ROWS[step % 5] + rank)
        recorded.close()


def test_a_recorder_keeps_as_many_steps_as_it_was_asked_for(tmp_path: Path) -> None:
    with GradientRecorder(tmp_path, 0, 1, 13, steps=2) as recorder:
        fullness = []
        for row in ROWS:
            recorder.add(row)
            fullness.append(recorder.full)
    assert fullness == [False, True, True, True, True]
    assert RecordedGradients(tmp_path, 0, 1).steps == 2


def test_a_recording_of_more_ranks_than_replay_it_will_do(tmp_path: Path) -> None:
    record(tmp_path, ranks=3)
    described = RecordedGradients(tmp_path, 1, 2).describe()
    assert described["recorded_ranks"] == 3
    assert described["recorded_steps"] == 5
    assert described["source"] == "a test"


def test_a_killed_recording_can_be_read(tmp_path: Path) -> None:
    script = (
        "import os, signal, sys, numpy as np\n"
        "from jobs.run.gradient_file import GradientRecorder\n"
        "recorder = GradientRecorder(sys.argv[1], 0, 1, 3, steps=9)\n"
        "for step in range(4):\n"
        "    recorder.add(np.full(3, step, np.float32))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], cwd=ROOT, timeout=150, check=False)
    recorded = RecordedGradients(tmp_path, 0, 1)
    assert recorded.steps == 4
    assert [recorded.next().tolist() for _ in range(4)] == [[step] * 3 for step in range(4)]
    recorded.close()
    # and be continued, from any step that it has; a draft that was left behind is no obstacle
    assert [steps_recorded(tmp_path, *shape) for shape in ((0, 1, 3), (0, 2, 3), (0, 1, 4), (1, 1, 3))] == [
        *(4, 0, 0, 0)
    ]
    (tmp_path / ".rank-0.h5.part").write_text("left behind")
    with GradientRecorder(tmp_path, 0, 1, 3, steps=3, overwrite=True, kept=2) as recorder:
        for value in (7, 8):
            recorder.add(np.full(3, value, np.float32))
    recorded = RecordedGradients(tmp_path, 0, 1)
    assert [recorded.next()[0] for _ in range(recorded.steps)] == [0, 1, 7]
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.h5"]


def test_a_recording_is_not_overwritten_unless_allowed(tmp_path: Path) -> None:
    record(tmp_path, ranks=1)
    with pytest.raises(GradientFileError, match="rank-0.h5 exists"):
        GradientRecorder(tmp_path, 0, 1, 13, steps=1)
    with GradientRecorder(tmp_path, 0, 1, 2, steps=1, overwrite=True) as recorder:
        recorder.add(np.ones(2, np.float32))
    assert RecordedGradients(tmp_path, 0, 1).length == 2


def test_what_is_no_recording_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GradientFileError, match="is no recording: there is no rank-0.h5 in it"):
        RecordedGradients(tmp_path / "nowhere", 0, 1)
    record(tmp_path / "one", ranks=1)
    with pytest.raises(GradientFileError, match="has no rank-1.h5: recorded on fewer than 2 ranks"):
        RecordedGradients(tmp_path / "one", 1, 2)
    gradient_path(tmp_path, 0).write_text("no HDF5")
    with pytest.raises(GradientFileError, match="cannot be read"):
        RecordedGradients(tmp_path, 0, 1)
    with h5py.File(gradient_path(tmp_path, 1), "w"):
        pass
    with pytest.raises(GradientFileError, match="its format is None, not 'oktopk gradients 1'"):
        RecordedGradients(tmp_path, 1, 2)


def test_an_empty_recording_and_one_without_steps_are_refused(tmp_path: Path) -> None:
    with GradientRecorder(tmp_path, 0, 1, 13, steps=3):
        pass
    with pytest.raises(GradientFileError, match="holds no gradient"):
        RecordedGradients(tmp_path, 0, 1)
    with pytest.raises(GradientFileError, match="0 steps to record are not at least 1"):
        GradientRecorder(tmp_path / "x", 0, 1, 13, steps=0)


def test_a_folder_that_cannot_be_made_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(GradientFileError, match="cannot be written"):
        GradientRecorder(tmp_path / "file" / "folder", 0, 1, 13, steps=1)
