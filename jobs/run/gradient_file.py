"""Recorded gradients: what one rank computed in training, to be reduced again by the bench.

A recording is a folder with one HDF5 file per rank, rank-0.h5, rank-1.h5, ...:

    attributes   format, rank, ranks, length, source (what was trained, in words)
    gradients    float32[steps, n], one row per step, before any error feedback

The rows of a recording that was cut short, by `kill -9` as well, can be read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import h5py
import numpy as np
from numpy.typing import NDArray

from data.durable import replaced

FORMAT = "oktopk gradients 1"
_CHUNK = 1 << 20  # elements: a row is read and written in pieces of 4 MB


class GradientFileError(RuntimeError):
    """A recording that cannot be made, or does not fit what is asked of it."""


def gradient_path(folder: str | Path, rank: int) -> Path:
    """Where a recording keeps the gradients of one rank."""
    return Path(folder) / f"rank-{rank}.h5"


def check_recordable(folder: str | Path, rank: int) -> None:
    """Raise GradientFileError when there is a recording already; creates nothing."""
    path = gradient_path(folder, rank)
    if path.exists():
        raise GradientFileError(f"{path} exists: choose another folder, or allow it to be replaced")


def steps_recorded(folder: str | Path, rank: int, ranks: int, length: int) -> int:
    """Steps in this rank's part of a recording, 0 unless it is one of such a run."""
    try:
        with h5py.File(gradient_path(folder, rank), "r", libver="latest", swmr=True) as file:
            mine = {"format": FORMAT, "rank": rank, "ranks": ranks, "length": length}
            fits = all(file.attrs.get(name) == value for name, value in mine.items())
            return int(file["gradients"].shape[0]) if fits else 0
    except (OSError, KeyError):
        return 0


class GradientRecorder:
    """Writes the gradients of one rank, up to a number of steps; a context manager.

    Args:
        folder: of the recording; made if need be.
        rank, ranks: of the training run.
        length: elements of a gradient (n).
        steps: rows to keep, >= 1: a row is 4n bytes. Later ones are let pass.
        source: what is trained, in words.
        overwrite: replace a recording that is there.
        kept: its first rows that stay, as many as it has and `steps` at most; of the same run, see steps_recorded.

    Raises:
        GradientFileError: there is a recording and overwrite is False, or it cannot be written.
    """

    def __init__(
        self,
        folder: str | Path,
        rank: int,
        ranks: int,
        length: int,
        *,
        steps: int,
        source: str = "",
        overwrite: bool = False,
        kept: int = 0,
    ) -> None:
        if steps < 1:
            raise GradientFileError(f"{steps} steps to record are not at least 1")
        self.path = gradient_path(folder, rank)
        self._left = steps
        if not overwrite:
            check_recordable(folder, rank)
        attributes = {"format": FORMAT, "rank": rank, "ranks": ranks, "length": length, "source": source}
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            # beside: who reads the old one may go on, and a killed writer's cannot be opened to be written
            with replaced(self.path) as draft:
                self._file = h5py.File(draft, "w", libver="latest", locking="best-effort")
                self._create(attributes, length, kept)
        except OSError as error:
            raise GradientFileError(f"{self.path} cannot be written: {error}") from error

    def _create(self, attributes: Mapping[str, Any], length: int, kept: int) -> None:
        self._file.attrs.update(attributes)
        self._rows = self._file.create_dataset(
            "gradients",
            shape=(0, length),
            maxshape=(None, length),
            dtype="f4",
            chunks=(1, min(length, _CHUNK)),
        )
        self._file.swmr_mode = True
        if kept:
            with h5py.File(self.path, "r", libver="latest", swmr=True) as earlier:
                for row in range(kept):
                    self.add(earlier["gradients"][row])

    @property
    def full(self) -> bool:
        """Whether all rows that were asked for are there."""
        return self._left == 0

    def add(self, gradient: NDArray[np.float32]) -> None:
        """Append one row, float32[n], unless all are there."""
        if self.full:
            return
        done = self._rows.shape[0]
        self._rows.resize(done + 1, axis=0)
        self._rows[done] = gradient
        self._file.flush()
        self._left -= 1

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RecordedGradients:
    """A recording as a source of gradients, see `jobs.bench.gradients.GradientSource`; starts over at its end.

    Args:
        folder: of the recording.
        rank, ranks: of those who replay it; at most as many as recorded it.

    Raises:
        GradientFileError: there is none, it is of fewer ranks, or it holds no step.

    Memory: n words.
    """

    def __init__(self, folder: str | Path, rank: int, ranks: int) -> None:
        path = gradient_path(folder, rank)
        if not path.exists() and rank and gradient_path(folder, 0).exists():
            raise GradientFileError(f"{folder} has no {path.name}: recorded on fewer than {ranks} ranks")
        try:
            self._file = h5py.File(path, "r", libver="latest", swmr=True)
        except FileNotFoundError:
            raise GradientFileError(f"{folder} is no recording: there is no {path.name} in it") from None
        except OSError as error:
            raise GradientFileError(f"{path} cannot be read: {error}") from error
        attributes = dict(self._file.attrs)
        if attributes.get("format") != FORMAT:
            raise GradientFileError(f"{path}: its format is {attributes.get('format')!r}, not {FORMAT!r}")
        self._rows = self._file["gradients"]
        self.length = int(attributes["length"])
        self.steps = int(self._rows.shape[0])
        if not self.steps:
            raise GradientFileError(f"{path} holds no gradient")
        self._recorded = {name: attributes[name] for name in ("ranks", "source")}
        self._folder = str(folder)
        self._vector = np.empty(self.length, np.float32)
        self._step = 0

    def next(self) -> NDArray[np.float32]:
        """float32[n]: the next row, the first one again after the last; valid until the next call."""
        self._rows.read_direct(self._vector, np.s_[self._step % self.steps])
        self._step += 1
        return self._vector

    def describe(self) -> dict[str, Any]:
        """Plain values that say what was recorded."""
        return {
            "name": "recorded",
            "folder": self._folder,
            "recorded_steps": self.steps,
            "recorded_ranks": int(self._recorded["ranks"]),
            "source": str(self._recorded["source"]),
        }

    def close(self) -> None:
        self._file.close()
