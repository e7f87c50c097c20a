"""Damaged run files are refused by name within seconds, or can be continued; one that cannot be written is one error."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import h5py
import numpy as np
import pytest

from jobs.run.file import RunFile, RunFileError
from jobs.run.reader import check_readable, problem, read_record
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


def damaged(whole: bytes, number: int) -> bytes:
    """A copy with bits flipped, a block of up to 4 KiB zeroed, overwritten or cut out, or its end cut off."""
    random, content = np.random.default_rng(number), bytearray(whole)
    # every third begins among what the file opens with
    first = int(random.integers(len(whole) if number % 3 else 4096))
    block = slice(first, min(len(whole), first + int(2 ** random.uniform(3, 12))))
    match number % 5:
        case 0:
            for place in random.integers(len(whole), size=random.integers(1, 200)):
                content[place] ^= 1 << int(random.integers(8))
        case 1:
            content[block] = bytes(block.stop - first)
        case 2:
            content[block] = random.bytes(block.stop - first)
        case 3:
            del content[block]
        case 4:
            del content[first:]
    return bytes(content)


@pytest.mark.timeout(240)  # 45 s of computing in all
@pytest.mark.parametrize("count", [10, pytest.param(300, marks=pytest.mark.long("`make test` has 10 files"))])
def test_a_damaged_run_file_is_refused_or_continues(tmp_path: Path, count: int) -> None:
    closed, killed = (path.read_bytes() for path in write_run(tmp_path))

    def refusal(number: int) -> str:
        path = tmp_path / f"{number}.h5"
        path.write_bytes(damaged(killed if number // 5 % 2 else closed, number))
        try:
            check_readable(path)
        except RunFileError as error:
            assert str(error).startswith(f"{path} is not a ")
            assert "\n" not in str(error)
            return str(error)
        RunFile(tmp_path / f"{number}-continued.h5", INFO, earlier=read_record(path, 8)).close("failed")
        return ""

    # those that take long wait for HDF5
    with ThreadPoolExecutor(16) as workers:
        refusals = list(workers.map(refusal, range(count)))
    assert 0.4 * count < sum(map(bool, refusals)) < 0.9 * count
    assert any("HDF5 does not come to its end" in text for text in refusals)


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
    found = problem(path)
    assert found.startswith(f"{path} is not a ")
    assert re.search(said, found)


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
