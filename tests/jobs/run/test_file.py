from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
from numpy.typing import NDArray

from jobs.run.columns import EVALUATION_COLUMNS, MEASURE_COLUMNS, STEP_COLUMNS
from jobs.run.file import STAGE_SLOTS, RunFile, RunFileError, RunInfo
from jobs.run.reader import RunReader, read_record

INFO = RunInfo(
    config='{"training": {"steps": 3}}',
    versions='{"python": "3"}',
    method="oktopk",
    ranks=4,
    length=1000,
    k=20,
    batch_size=16,
    seed=0,
    host="here",
    commit="",
    started="2026-01-01T00:00:00+00:00",
)


def columns(first: int, count: int) -> dict[str, NDArray[Any]]:
    made: dict[str, NDArray[Any]] = {name: np.full(count, 0.5) for name in STEP_COLUMNS}
    made["step"] = np.arange(first, first + count)
    return made


def evaluation(step: int) -> dict[str, float]:
    return {**dict.fromkeys(EVALUATION_COLUMNS, 0.25), "step": step}


def test_what_is_written_is_read(tmp_path: Path) -> None:
    path = tmp_path / "deeper" / "run.h5"
    with RunFile(path, INFO) as file:
        file.append_steps(columns(1, 3), {"select": np.array([1.0, 2.0, 3.0])})
        file.append_steps(columns(4, 1), {"reduce": np.array([4.0])})
        file.append_evaluation(**evaluation(4))
        file.append_measures({name: np.array([0.5, 1.5]) for name in MEASURE_COLUMNS})
    with RunReader(path) as reader:
        assert reader.info == INFO
        assert reader.config == {"training": {"steps": 3}}
        assert reader.status == "complete"
        steps = reader.steps()
        assert steps.keys() == STEP_COLUMNS.keys()
        assert steps["step"].tolist() == [1, 2, 3, 4]
        assert steps["loss"].tolist() == [0.5] * 4
        assert {name: values.tolist() for name, values in reader.stages().items()} == {
            "select": [1.0, 2.0, 3.0, 0.0],
            "reduce": [0.0, 0.0, 0.0, 4.0],
        }
        assert reader.evaluations()["accuracy"].tolist() == [0.25]
        assert reader.evaluations()["step"].tolist() == [4]
        assert reader.measures().keys() == MEASURE_COLUMNS.keys()
        assert reader.measures()["xi"].tolist() == [0.5, 1.5]


def test_a_reader_follows_a_run_that_goes_on(tmp_path: Path) -> None:
    with RunFile(tmp_path / "run.h5", INFO) as file, RunReader(tmp_path / "run.h5") as reader:
        assert reader.status == "running"
        assert len(reader.steps()["step"]) == 0
        file.append_steps(columns(1, 2), {"select": np.ones(2)})
        assert reader.steps()["step"].tolist() == [1, 2]
        assert list(reader.stages()) == ["select"]
        file.append_steps(columns(3, 5000), {"allreduce": np.ones(5000)})
        assert len(reader.steps()["step"]) == 5002
        assert list(reader.stages()) == ["select", "allreduce"]
        file.close("interrupted")
        assert reader.status == "interrupted"


WRITER = """
import sys, time
sys.path.insert(0, {root!r})
from tests.jobs.run.test_file import *
file = RunFile(sys.argv[1], INFO)
file.append_steps(columns(1, 20), {{"select": np.ones(20)}})
file.append_evaluation(**evaluation(20))
# Extended but never flushed: none of it may spoil what was.
file._groups['steps']["loss"].resize(25, axis=0)
print("flushed", flush=True)
time.sleep(60)
"""


def test_a_run_file_outlives_the_killing_of_its_writer(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    script = WRITER.format(root=str(Path(__file__).parents[3]))
    with subprocess.Popen(
        [sys.executable, "-c", script, str(path)], stdout=subprocess.PIPE, text=True
    ) as writer:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "flushed\n"
        with RunReader(path) as reader:
            assert len(reader.steps()["step"]) == 20
        os.kill(writer.pid, signal.SIGKILL)
        assert writer.wait(10) == -signal.SIGKILL
    with RunReader(path) as reader:
        assert reader.status == "running"
        assert reader.info == INFO
        assert reader.steps()["step"].tolist() == list(range(1, 21))
        assert reader.evaluations()["step"].tolist() == [20]
        assert reader.stages()["select"].tolist() == [1.0] * 20


def test_a_writer_notes_how_its_block_ended(tmp_path: Path) -> None:
    for kind, status in (
        (KeyboardInterrupt, "interrupted"),
        (SystemExit, "interrupted"),
        (RuntimeError, "failed"),
    ):
        with pytest.raises(kind), RunFile(tmp_path / f"{kind.__name__}.h5", INFO):
            raise kind
        with RunReader(tmp_path / f"{kind.__name__}.h5") as reader:
            assert reader.status == status


def test_a_closed_writer_can_be_closed_again(tmp_path: Path) -> None:
    file = RunFile(tmp_path / "run.h5", INFO)
    with pytest.raises(ValueError, match="status 'over' is not one of"):
        file.close("over")
    file.close("failed")
    file.close("complete")
    with RunReader(tmp_path / "run.h5") as reader:
        assert reader.status == "failed"


def test_a_run_file_that_exists_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    path.write_text("precious")
    with pytest.raises(RunFileError, match=re.escape(f"run file {path} exists: choose another name")):
        RunFile(path, INFO)
    assert path.read_text() == "precious"
    assert os.listdir(tmp_path) == ["run.h5"]


def test_a_run_file_is_replaced_while_it_is_written(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    older = RunFile(path, INFO)
    with RunReader(path) as reader:
        with RunFile(path, INFO, overwrite=True) as newer:
            newer.append_steps(columns(1, 1), {})
            older.append_steps(columns(7, 2), {})
        assert reader.steps()["step"].tolist() == [7, 8]
    older.close("failed")
    with RunReader(path) as reader:
        assert (reader.status, reader.steps()["step"].tolist()) == ("complete", [1])
    assert os.listdir(tmp_path) == ["run.h5"]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RunFileError, match="cannot be created"):
        RunFile(tmp_path / "file" / "run.h5", INFO)
    assert os.listdir(tmp_path) == ["file"]


def test_what_is_no_run_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunFileError, match=re.escape(f"{tmp_path / 'none.h5'}: no such file")):
        RunReader(tmp_path / "none.h5")
    with pytest.raises(RunFileError, match="is not a run file"):
        RunReader(tmp_path)
    (tmp_path / "text.h5").write_text("no HDF5 at all")
    with pytest.raises(RunFileError, match=r"text\.h5 is not a run file"):
        RunReader(tmp_path / "text.h5")
    for libver in ("earliest", "latest"):
        with h5py.File(tmp_path / f"{libver}.h5", "w", libver=libver) as other:
            other["images"] = np.zeros(3)
        with pytest.raises(RunFileError, match="is not a run file"):
            RunReader(tmp_path / f"{libver}.h5")


def test_time_goes_on_behind_the_last_evaluation(tmp_path: Path) -> None:
    with RunFile(tmp_path / "run.h5", INFO) as file:
        assert file.elapsed == 0
        file.append_steps(columns(1, 3), {})
        trained = file.elapsed
        file.append_evaluation(**{**evaluation(2), "seconds": 9.0})
        assert file.elapsed == trained > 0
        file.append_evaluation(**{**evaluation(3), "seconds": 5.0})
        assert file.elapsed == trained + 5


def test_columns_must_be_the_known_ones_and_of_one_length(tmp_path: Path) -> None:
    with RunFile(tmp_path / "run.h5", INFO) as file:
        incomplete = columns(1, 2)
        del incomplete["loss"]
        with pytest.raises(ValueError, match="columns"):
            file.append_steps(incomplete, {})
        with pytest.raises(ValueError, match="columns of different lengths: \\[1, 2\\]"):
            file.append_steps({**columns(1, 2), "loss": np.zeros(1)}, {})


def test_more_stages_than_slots_share_the_last(tmp_path: Path) -> None:
    stages = {f"stage{number}": np.array([1.0]) for number in range(STAGE_SLOTS + 3)}
    with RunFile(tmp_path / "run.h5", INFO) as file:
        file.append_steps(columns(1, 1), stages)
    with RunReader(tmp_path / "run.h5") as reader:
        read = reader.stages()
        assert list(read)[-1] == "other"
        assert len(read) == STAGE_SLOTS
        assert read["other"].tolist() == [4.0]


def test_a_run_file_continues_without_gap_or_doubled_step(tmp_path: Path) -> None:
    path = tmp_path / "run.h5"
    with RunFile(path, INFO) as file:
        file.append_steps(columns(1, 8), {"select": np.arange(8.0)})
        file.append_evaluation(**evaluation(4))
        file.append_evaluation(**evaluation(8))
    (tmp_path / ".run.h5.part").write_text("a job that was killed while it continued left this")
    later = RunInfo(**{**vars(INFO), "ranks": 2, "started": "2026-01-02T00:00:00+00:00"})
    file = RunFile(path, later, overwrite=True, earlier=read_record(path, 5))
    assert (file.done, file.elapsed) == (5, 0.5)
    file.append_steps(columns(6, 3), {"reduce": np.ones(3), "select": np.ones(3)})
    file.close("complete")
    record = read_record(path, 100)
    assert record.steps["step"].tolist() == list(range(1, 9))
    assert record.evaluations["step"].tolist() == [4]
    assert record.stages["select"].tolist() == [0, 1, 2, 3, 4, 1, 1, 1]
    assert record.stages["reduce"].tolist() == [0, 0, 0, 0, 0, 1, 1, 1]
    assert record.segments["step"].tolist() == [0, 5]
    assert record.segments["ranks"].tolist() == [4, 2]
    assert record.info.started == INFO.started
    assert [left.name for left in tmp_path.iterdir()] == ["run.h5"]


def test_a_run_file_is_synced_before_it_replaces_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.h5"
    synced: list[tuple[str, int, bool]] = []
    RunFile(path, INFO).close("interrupted")
    before = path.read_bytes()

    def note(descriptor: int) -> None:
        name = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((name.name, name.stat().st_size, path.read_bytes() == before))

    monkeypatch.setattr(os, "fsync", note)
    with RunFile(path, INFO, overwrite=True, earlier=read_record(path, 5)):
        (draft, size, before_it), (folder, _, before_folder) = synced
        assert (draft, before_it) == (".run.h5.part", True)
        assert size >= len(before)
        assert (folder, before_folder) == (tmp_path.name, False)
