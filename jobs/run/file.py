"""Writes the record of a run: an HDF5 file in SWMR mode, readable while it grows and after its writer was killed.

Layout:
    attributes            format, config (JSON), versions (JSON), method, ranks, length, k, batch_size, seed,
                          host, commit, started (UTC, ISO 8601), hardware (JSON), command, job, data
    status                one of STATUSES
    steps/<column>        one value per step: STEP_COLUMNS
    stages/names          what the columns of stages/seconds are, "" where unused
    stages/seconds        [steps, STAGE_SLOTS]: seconds of each stage of the reduction, mean over the ranks
    evaluations/<column>  one value per evaluation: EVALUATION_COLUMNS
    measures/<column>     one value per measured step: MEASURE_COLUMNS
    segments/<column>     one value per job that the run took: SEGMENT_COLUMNS

The attributes are those of the last job, except `started`. A run that continues from a checkpoint gets a new file with the
steps up to it, which replaces the old one.

The columns are those of jobs.run.columns. A file of another FORMAT, or without one of them, is not read.

A killed writer leaves a file that HDF5 opens in SWMR mode only, so read it with jobs.run.reader.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partialmethod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from data.command import escaped_values
from data.durable import obstacle, replaced
from jobs.run.columns import GROUPS, SEGMENT_COLUMNS, Column, Columns

FORMAT = "oktopk run 1"
STATUSES = ("running", "complete", "failed", "interrupted")
STAGE_SLOTS = 16
_STAGE_NAME = "S32"
_CHUNK = 1024
_ROOM = 1 << 20  # bytes: twice those of a file with some steps


class RunFileError(RuntimeError):
    """A run file that cannot be created or written, or is none."""


@dataclass(frozen=True)
class RunInfo:
    """Facts known before the first step; stored as attributes.

    length is n, the elements of the gradient; k the entries asked for after any density warm-up.
    config, versions and hardware are JSON; job is the Slurm job's number, data the checksum of the prepared data (see
    data.prepared_file), "" for none.
    """

    config: str
    versions: str
    method: str
    ranks: int
    length: int
    k: int
    batch_size: int
    seed: int
    host: str
    commit: str
    started: str
    hardware: str = "{}"
    command: str = ""
    job: str = ""
    data: str = ""


@dataclass(frozen=True, eq=False)
class RunRecord:
    """Content of a run file when it was read, as RunReader gives it."""

    info: RunInfo
    status: str
    steps: Columns
    stages: Columns
    evaluations: Columns
    measures: Columns
    segments: Columns


class RunFile:
    """The writer; one process, rank 0, holds it. A context manager that notes how its block ended."""

    def __init__(
        self, path: str | Path, info: RunInfo, *, overwrite: bool = False, earlier: RunRecord | None = None
    ) -> None:
        """Create the file, with what earlier jobs of the run recorded.

        Raises:
            RunFileError: it exists and overwrite is False, or it cannot be written.
        """
        self.path = Path(path)
        check_creatable(self.path, overwrite=overwrite)
        # Built beside and renamed: no reader meets half a file, and one that a run still writes is safe.
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with ExitStack() as on_error:
                with replaced(self.path) as draft:
                    _check_room(draft, _ROOM + (self.path.stat().st_size if self.path.exists() else 0))
                    self._file = h5py.File(draft, "w", libver="latest", locking="best-effort")
                    on_error.callback(self._abandon)
                    self._create(info if earlier is None else replace(info, started=earlier.info.started))
                    self._begin(info, earlier)
                on_error.pop_all()
        except (OSError, RuntimeError) as error:
            raise RunFileError(f"run file {self.path} cannot be created: {_reason(error)}") from error

    def _create(self, info: RunInfo) -> None:
        file = self._file
        file.attrs["format"] = FORMAT
        for name, value in asdict(info).items():
            file.attrs[name] = escaped_values(value)  # a command line may have bytes that are no UTF-8
        self._status = file.create_dataset("status", data=np.array([b"running"], "S16"), chunks=(1,))
        self._groups = {group: self._create_columns(group, known) for group, known in GROUPS.items()}
        stages = file.create_group("stages")
        self._stage_names = stages.create_dataset(
            "names", shape=(STAGE_SLOTS,), dtype=_STAGE_NAME, chunks=(STAGE_SLOTS,)
        )
        self._stage_seconds = stages.create_dataset(
            "seconds",
            shape=(0, STAGE_SLOTS),
            maxshape=(None, STAGE_SLOTS),
            dtype="f8",
            chunks=(_CHUNK, STAGE_SLOTS),
        )
        self._slots: dict[str, int] = {}
        # From here on nothing new can be created: hence a table of stages whose names come later.
        file.swmr_mode = True

    def _begin(self, info: RunInfo, earlier: RunRecord | None) -> None:
        if earlier is not None:
            for group in ("segments", "evaluations", "measures"):
                _append(self._groups[group], getattr(earlier, group))
            self.append_steps(earlier.steps, earlier.stages)
        job = {"step": self.done, "ranks": info.ranks, "host": info.host, "started": info.started}
        _append(
            self._groups["segments"],
            {name: np.array([job[name]], dtype) for name, (dtype, *_) in SEGMENT_COLUMNS.items()},
        )
        self._file.flush()

    @property
    def done(self) -> int:
        return int(self._groups["steps"]["step"].shape[0])

    @property
    def elapsed(self) -> float:
        """Seconds on record, the last evaluation included."""
        if not self.done:
            return 0.0
        after_last = self._groups["evaluations"]["step"][...] == self.done
        return float(self._groups["steps"]["elapsed"][-1]) + float(
            self._groups["evaluations"]["seconds"][...][after_last].sum()
        )

    def _create_columns(self, group: str, columns: Mapping[str, Column]) -> dict[str, h5py.Dataset]:
        datasets = {}
        for name, column in columns.items():
            datasets[name] = self._file.create_dataset(
                f"{group}/{name}", shape=(0,), maxshape=(None,), dtype=column.dtype, chunks=(_CHUNK,)
            )
            datasets[name].attrs["unit"] = column.unit
            datasets[name].attrs["over_ranks"] = column.over
        return datasets

    def append_steps(
        self, columns: Mapping[str, NDArray[Any]], stages: Mapping[str, NDArray[np.float64]]
    ) -> None:
        """Append some steps and flush: a reader sees them from here on, whatever happens to this process.

        Args:
            columns: every name of STEP_COLUMNS, each [steps].
            stages: stage name -> seconds[steps].

        Raises:
            ValueError: a column is missing, unknown or of another length.
            RunFileError: the disk is full or broken.
        """
        with self._writing():
            count = _append(self._groups["steps"], columns)
            seconds = np.zeros((count, STAGE_SLOTS))
            for name, values in stages.items():
                seconds[:, self._slot(name)] += values
            done = self._stage_seconds.shape[0]
            self._stage_seconds.resize(done + count, axis=0)
            self._stage_seconds[done:] = seconds
            self._file.flush()

    def append(self, group: str, columns: Mapping[str, NDArray[Any]]) -> None:
        """Append some rows of a group of GROUPS, every column of it, and flush. Raises as append_steps."""
        with self._writing():
            _append(self._groups[group], columns)
            self._file.flush()

    append_measures = partialmethod(append, "measures")

    def append_evaluation(self, **values: float) -> None:
        """Append one evaluation, every name of EVALUATION_COLUMNS, as append."""
        self.append("evaluations", {name: np.array([value]) for name, value in values.items()})

    @contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except (OSError, RuntimeError) as error:
            self._abandon()
            raise RunFileError(f"run file {self.path} cannot be written: {_reason(error)}") from None

    def _abandon(self) -> None:
        """Leave the file as a killed writer does.

        What HDF5 still has to write would fail again, and crash the process at its end: it goes to a copy in memory.
        """
        handle = self._file.id.get_vfd_handle()
        with os.fdopen(os.memfd_create("abandoned"), "wb") as copy:
            os.sendfile(copy.fileno(), handle, 0, os.fstat(handle).st_size)
            os.dup2(copy.fileno(), handle)
        for _ in range(2):  # where a flush has failed, the first one fails as well
            with suppress(OSError, RuntimeError):
                self._file.close()

    def _slot(self, stage: str) -> int:
        if stage not in self._slots:
            # More stages than slots: the last slot collects the rest.
            slot = min(len(self._slots), STAGE_SLOTS - 1)
            self._slots[stage] = slot
            self._stage_names[slot] = "other" if len(self._slots) > STAGE_SLOTS else stage
        return self._slots[stage]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close("complete")
        else:
            # SystemExit is how a SIGTERM arrives here, see jobs.train.
            status = "interrupted" if issubclass(kind, (KeyboardInterrupt, SystemExit)) else "failed"
            with suppress(RunFileError):  # the block's own error is the one to tell
                self.close(status)

    def close(self, status: str) -> None:
        """Write how the run ended ("complete", "failed" or "interrupted") and close; again is allowed.

        Raises:
            RunFileError: the disk is full or broken.
        """
        if status not in STATUSES:
            raise ValueError(f"status {status!r} is not one of {', '.join(STATUSES)}")
        if self._file:
            with self._writing():
                self._status[0] = status
                self._file.flush()
                self._file.close()


def _check_room(path: Path, nbytes: int) -> None:
    """Raise OSError unless a file there can have that many bytes: HDF5 may crash when it creates one on a full disk."""
    with open(path, "wb") as file:
        os.posix_fallocate(file.fileno(), 0, nbytes)


def _reason(error: Exception) -> str:
    """The system's message within HDF5's."""
    match = re.search(r"error message = '([^']*)'", str(error))
    return match[1] if match else str(getattr(error, "strerror", None) or error)


def _append(datasets: Mapping[str, h5py.Dataset], columns: Mapping[str, NDArray[Any]]) -> int:
    if columns.keys() != datasets.keys():
        raise ValueError(f"columns {sorted(columns)} are not {sorted(datasets)}")
    counts = {len(values) for values in columns.values()}
    if len(counts) != 1:
        raise ValueError(f"columns of different lengths: {sorted(counts)}")
    count = counts.pop()
    for name, values in columns.items():
        done = datasets[name].shape[0]
        datasets[name].resize(done + count, axis=0)
        datasets[name][done:] = values
    return count


def check_creatable(path: str | Path, *, overwrite: bool) -> None:
    """Raise RunFileError when a run file could not be created there; creates nothing."""
    path = Path(path)
    if in_the_way := obstacle(path):
        raise RunFileError(f"run file {path} {in_the_way}")
    if path.exists() and not overwrite:
        raise RunFileError(
            f"run file {path} exists: choose another name (run.file) "
            "or allow it to be replaced (run.overwrite=true)"
        )
