"""Damaged run files are refused by name; one that cannot be written is one error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from jobs.run.file import RunFile, RunFileError
from jobs.run.reader import check_readable
from tests.data.test_image_file import put
from tests.jobs.run.test_file import INFO, columns, evaluation
from tests.launched import ROOT


def write_run(folder: Path) -> tuple[Path, Path]:
    """A run file that was closed, and one whose writer was killed."""
    closed, killed = folder / "closed.h5", folder / "killed.h5"
    with RunFile(closed, INFO) as file:
        file.append_steps(columns(1, 8), {"select": np.arange(8.0)})
        file.append_evaluation(**evaluation(4))
        shutil.copy(closed, killed)
    return closed, killed


def test_a_run_file_that_is_whole_passes(tmp_path: Path) -> None:
    for path in write_run(tmp_path):
        check_readable(path)


def huge(file: h5py.File) -> None:
    del file["steps/loss"]
    file.create_dataset("steps/loss", shape=(1 << 40,), dtype="f8", chunks=(1024,))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (put("@config", "no JSON"), "Expecting value"),
        (put("@config", '{"training": 3}'), "its configuration has no sections"),
        (put("@config", "[" * 5000), "recursion"),
        (put("@ranks", "four"), "its ranks is no int"),
        (put("@host", np.zeros(3)), "its host is no str"),
        (put("@format", "oktopk run 9"), "its format is 'oktopk run 9', not 'oktopk run 1'"),
        (put("status", np.array([b"over"])), "its status is 'over'"),
        (put("steps"), "steps"),
        (put("steps/loss"), "no column steps/loss"),
        (put("steps/loss", np.zeros((8, 8))), r"its steps/loss is float64 of shape \(8, 8\)"),
        (put("steps/loss", np.array([b"a"] * 8)), r"its steps/loss is \|S1, not f8"),
        (put("steps/step", np.arange(8)[::-1]), "its steps do not ascend"),
        (put("segments/host", np.zeros(1)), "its segments/host is float64, not S64"),
        (put("stages/names", np.array([b"\xff"])), "can't decode byte 0xff"),
        (put("stages/seconds", np.zeros(8)), "its stages/seconds is float64 of shape"),
        (huge, r"its steps/loss is float64 of shape \(1099511627776,\)"),
    ],
)
def test_a_run_file_with_other_content_is_refused_by_name(
    tmp_path: Path, damage: Callable[[h5py.File], None], said: str
) -> None:
    path, _ = write_run(tmp_path)
    with h5py.File(path, "r+", libver="latest") as file:
        damage(file)
    with pytest.raises(RunFileError) as refused:
        check_readable(path)
    found = str(refused.value)
    assert found.startswith(f"{path} is not a ") and "\n" not in found
    assert re.search(said, found)


@pytest.mark.parametrize("place", [1, 2])
def test_a_run_file_whose_end_is_missing_is_refused(tmp_path: Path, place: int) -> None:
    for path in write_run(tmp_path):
        whole = path.read_bytes()
        path.write_bytes(whole[: len(whole) * place // 3])
        with pytest.raises(RunFileError, match="is not a (whole )?run file"):
            check_readable(path)


def break_disk(file: RunFile) -> None:
    """From here on the file can be read, and every write to it fails."""
    with open(file.path, "rb") as readable:
        os.dup2(readable.fileno(), file._file.id.get_vfd_handle())


def test_a_broken_disk_does_not_crash_the_writer(tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from pathlib import Path\n"
        "import numpy as np\n"
        "from jobs.run.file import RunFile, RunFileError\n"
        "from tests.jobs.run.test_file import INFO, columns\n"
        "from tests.jobs.run.test_damage import break_disk\n"
        "try:\n"
        "    with RunFile(Path(sys.argv[1]), INFO) as file:\n"
        "        file.append_steps(columns(1, 3), {})\n"
        "        break_disk(file)\n"
        "        file.append_steps(columns(4, 3000), {})\n"
        "except RunFileError as error:\n"
        "    print(error)\n"
    )
    path = tmp_path / "run.h5"
    child = subprocess.run(
        [sys.executable, "-c", script, str(path)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert (child.returncode, child.stderr) == (0, "")
    assert child.stdout == f"run file {path} cannot be written: Bad file descriptor\n"
