"""What lies where a program is about to write is refused by name: a link, a pipe."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from data.durable import create, replaced, take_lock
from data.images.file import LAYOUT
from jobs.bench.document import BenchError, Output
from jobs.render.table import write_columns
from jobs.report.write import report
from jobs.restart.start import folder_lock, plan_start
from jobs.run.file import RunFile, RunFileError, check_creatable
from tests.jobs.bench.test_bandwidth import RESULTS
from tests.jobs.bench.test_bandwidth import main as draw
from tests.jobs.report.test_report import write_run
from tests.jobs.restart.test_start import config
from tests.jobs.run.test_file import INFO

PUBLISHED = str(RESULTS / "network-1gbit.json")
PRECIOUS = "<!-- sweep.json --><!-- end of sweep.json -->"


def prepare(folder: Path) -> None:
    shapes = {split: {"labels": (1,)} for split in ("train", "test")}
    with LAYOUT.created(folder / "data.h5", shapes):
        raise AssertionError("it was created")


# the name that is a link -> what writes there
WRITERS: dict[str, Callable[[Path], object]] = {
    "run.h5": lambda folder: RunFile(folder / "run.h5", INFO, overwrite=True),
    ".run.h5.part": lambda folder: RunFile(folder / "run.h5", INFO),
    "lock": lambda folder: folder_lock(folder).__enter__(),
    ".data.h5.part": prepare,
    "a.csv": lambda folder: write_columns(folder / "a.csv", {"a": np.arange(3)}),
    "index.html": lambda folder: report([write_run(folder / "run.h5")], folder),
    ".bench.json.part": lambda folder: Output(folder / "bench.json"),
    "bench.json": lambda folder: Output(folder / "bench.json"),
    "line.png": lambda folder: sys.exit(draw([PUBLISHED, "--output", str(folder / "line.png")])),
}


@pytest.mark.parametrize("name", WRITERS)
def test_no_writer_follows_a_link(tmp_path: Path, name: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder, outside = tmp_path / "folder", tmp_path / "outside"
    folder.mkdir()
    outside.write_text(PRECIOUS)
    (folder / name).symlink_to(outside)
    with pytest.raises((OSError, RunFileError, BenchError, SystemExit)) as raised:
        WRITERS[name](folder)
    said = str(raised.value) + capsys.readouterr().err
    assert f"{folder / name} is a symbolic link" in said or f"{folder / name} cannot be written" in said
    assert (folder / name).is_symlink()
    assert outside.read_text() == PRECIOUS


@pytest.mark.parametrize(
    "writer",
    [
        create,
        take_lock,
        lambda path: replaced(path).__enter__(),
        lambda path: check_creatable(path, overwrite=True),
        lambda path: plan_start(config(path), 4, {}),
        lambda path: plan_start(config(path, run={"overwrite": True}), 4, {}),
    ],
)
def test_only_a_regular_file_is_replaced(tmp_path: Path, writer: Callable[[Path], object]) -> None:
    os.mkfifo(tmp_path / "pipe")
    for special in (tmp_path / "pipe", tmp_path, Path("/dev/null")):
        with pytest.raises((OSError, RunFileError), match=f"{special} is not a regular file"):
            writer(special)


def test_of_two_processes_that_replace_a_file_one_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    with pytest.raises(OSError, match="file: another process is writing it"), replaced(path) as first:
        first.write_text("first")
        with replaced(path) as second:
            second.write_text("second")
    assert path.read_text() == "second"
    assert os.listdir(tmp_path) == ["file"]
