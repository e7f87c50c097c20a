"""Reads a run file, also one whose writer is at work or was killed.

python -m jobs.run.reader FILE      tries to, as HDF5 may hang or crash on a damaged one: status 0; else 1, with what is wrong
"""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from typing import Any, NoReturn, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from data.command import escaped_values
from jobs.run.columns import GROUPS, Columns
from jobs.run.file import FORMAT, STATUSES, RunFileError, RunInfo, RunRecord

PATIENCE = 20  # tenths of a second
_SLACK = 1 << 26  # bytes that a writer at work may be ahead of the size of its file
DAMAGE = (AttributeError, KeyError, OSError, RuntimeError, TypeError, ValueError)
"""What reading from a damaged file raises, as h5py has no error of its own."""


def _in_use(path: Path) -> bool:
    """Whether a writer has the file open, or was killed with it open.

    Superblock 3: eight bytes of signature, version, size of offsets, size of lengths, flags (0 when it was closed), then the
    base address, that of the extension and the end of the file, eight bytes each.

    Raises:
        RunFileError: the file is shorter than its superblock says: HDF5 in SWMR mode would wait for the rest.
    """
    for attempt in range(PATIENCE):
        with open(path, "rb") as file:
            head = file.read(36)
            size = file.seek(0, os.SEEK_END)
        if head[:8] != b"\x89HDF\r\n\x1a\n" or (len(head) > 8 and head[8] != 3):
            return False
        if len(head) == 36 and int.from_bytes(head[28:36], "little") <= size:
            return bool(head[11])
        # A writer at work may have written the superblock and not yet the rest.
        time.sleep(0.1 * (attempt + 1 < PATIENCE))
    raise RunFileError(f"{path} is not a run file: truncated, {size} bytes of it are left")


class RunReader:
    """A run file opened for reading, whatever state its writer is in. A context manager.

    Raises:
        RunFileError: no such file, or not a run file.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        try:
            # in SWMR mode HDF5 reads again, for minutes, what does not have its checksum
            swmr = _in_use(self.path)
            try:
                self._file = self._open(swmr)
            except OSError:
                # a run that is continued may have put its file there meanwhile
                if swmr or not _in_use(self.path):
                    raise
                self._file = self._open(swmr=True)
        except FileNotFoundError:
            raise RunFileError(f"{self.path}: no such file") from None
        except RunFileError:
            raise
        except (OSError, RuntimeError) as error:  # h5py's, of a damaged file
            raise RunFileError(f"{self.path} is not a run file: {error}") from error
        if self._file.attrs.get("format") != FORMAT:
            written = self._file.attrs.get("format", "none")
            self._file.close()
            raise RunFileError(f"{self.path} is not a run file: its format is {written!r}, not {FORMAT!r}")

    def _open(self, swmr: bool) -> h5py.File:
        return h5py.File(self.path, "r", swmr=swmr, libver="latest", locking="best-effort")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *raised: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    @property
    def info(self) -> RunInfo:
        values: dict[str, Any] = {}
        for name, field in RunInfo.__dataclass_fields__.items():
            value = self._file.attrs[name]
            values[name] = value.item() if isinstance(value, np.generic) else escaped_values(value)
            if type(values[name]).__name__ != field.type:
                raise TypeError(f"its {name} is no {field.type}")
        return RunInfo(**values)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration, section by section."""
        return dict(escaped_values(json.loads(self.info.config)))

    @property
    def status(self) -> str:
        """One of STATUSES. "running" is also what a killed run says. Raises ValueError: it is none of them."""
        self._file["status"].refresh()
        status = bytes(self._file["status"][0]).decode()
        if status not in STATUSES:
            raise ValueError(f"its status is {status!r}")
        return status

    def stages(self) -> dict[str, NDArray[np.float64]]:
        """Stage of the reduction -> seconds[steps], mean over the ranks."""
        for name in ("stages/names", "stages/seconds"):
            self._file[name].refresh()
        names = [bytes(name).decode() for name in self._values("stages/names", 1)]
        slots = self._values("stages/seconds", 2).T
        return {name: seconds for name, seconds in zip(names, slots, strict=False) if name}

    def columns(self, group: str) -> Columns:
        """Every column of a group of GROUPS as of now, all of one length.

        Raises:
            RunFileError: a column is missing.
        """
        columns = {}
        for name in GROUPS[group]:
            if f"{group}/{name}" not in self._file:
                raise RunFileError(f"{self.path} is not a whole run file: no column {group}/{name}")
            self._file[f"{group}/{name}"].refresh()
            columns[name] = self._values(f"{group}/{name}", 1)
        # The writer extends one column after another: a row that some columns lack is not there yet.
        shortest = min(map(len, columns.values()))
        return {name: values[:shortest] for name, values in columns.items()}

    steps = partialmethod(columns, "steps")
    evaluations = partialmethod(columns, "evaluations")
    measures = partialmethod(columns, "measures")
    segments = partialmethod(columns, "segments")

    def record(self) -> RunRecord:
        """All of it."""
        status = self.status  # before the steps: what says that it is complete has all of them
        groups = {group: self.columns(group) for group in GROUPS}
        # read after the steps, hence longer where the writer is at work, and shorter where it was killed in between
        return RunRecord(info=self.info, status=status, stages=self.stages(), **groups)

    def _values(self, name: str, dimensions: int) -> NDArray[Any]:
        dataset = self._file[name]
        # a damaged shape could ask for all memory there is
        most = self.path.stat().st_size + _SLACK
        if dataset.ndim != dimensions or dataset.dtype.kind not in "iufS" or dataset.nbytes > most:
            raise ValueError(f"its {name} is {dataset.dtype} of shape {dataset.shape}")
        return np.asarray(dataset[...])


def read_record(path: str | Path, done: int) -> RunRecord:
    """Read the first `done` steps of a run file, in whatever state its writer is.

    Raises:
        RunFileError: no such file, or not a run file.
        ValueError: a column is of another type, the steps do not ascend, or the status is none.
    """
    with RunReader(path) as reader:
        record = reader.record()
    for group, known in GROUPS.items():
        for name, column in known.items():
            dtype = getattr(record, group)[name].dtype
            if (dtype.kind == "S") != (np.dtype(column.dtype).kind == "S"):
                raise ValueError(f"its {group}/{name} is {dtype}, not {column.dtype}")
    steps, stages = record.steps, record.stages
    if np.any(steps["step"][1:] <= steps["step"][:-1]):
        raise ValueError("its steps do not ascend")
    count = int(np.searchsorted(steps["step"], done, side="right"))
    count = min(count, *map(len, stages.values())) if stages else count
    kept: dict[str, Any] = {"steps": {name: values[:count] for name, values in steps.items()}}
    kept["stages"] = {name: seconds[:count] for name, seconds in stages.items()}
    for group in GROUPS.keys() - {"steps"}:
        columns = getattr(record, group)
        kept[group] = {name: values[columns["step"] <= done] for name, values in columns.items()}
    return replace(record, **kept)


SECONDS = 3
"""That reading may take, and one more for every 20 MB; 0.05 s are usual."""
_ROOT = Path(__file__).parents[2]


def check_readable(path: Path) -> None:
    """Read a run file to its end in a child process.

    Raises:
        RunFileError: no run file, a damaged one, or one that HDF5 crashes on or does not finish in time.
    """
    child = subprocess.run(
        [sys.executable, "-m", "jobs.run.reader", str(path.absolute())],
        cwd=_ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if child.returncode < 0:
        ending = signal.Signals(-child.returncode).name
        why = "HDF5 does not come to its end" if ending == "SIGALRM" else f"HDF5 crashed on it ({ending})"
        raise RunFileError(f"{path} is not a whole run file: {why}")
    if child.returncode:
        raise RunFileError(child.stderr.strip())


def problem(path: Path) -> str:
    """What is wrong with a run file, in this process: a line that names it, "" for nothing."""
    try:
        with RunReader(path) as reader:
            if not all(isinstance(section, dict) for section in reader.config.values()):
                raise ValueError("its configuration has no sections")
        read_record(path, 0)
    except RunFileError as error:
        return str(error)
    except Exception as error:
        return f"{path} is not a whole run file: {' '.join(str(error).split()) or type(error).__name__}"
    return ""


def main(path: Path) -> NoReturn:
    """Look at a run file; the process ends when the time is up."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(SECONDS + (path.stat().st_size if path.exists() else 0) // 20_000_000)
    sys.exit(problem(path) or 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
