"""The batches of a run, epoch after epoch, from wherever an earlier job left off."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from jobs.restart.state import Position
from jobs.train.tasks.task import Workload


class BatchStream:
    """This rank's batches from a position on, epoch after epoch.

    Args:
        workload: whose batches.
        samples_per_batch: of all ranks together.
        start: where; the first batch that begins there or after.
        per_epoch: batches of an epoch, at most the workload's: with several to a step some may be left over.
    """

    def __init__(
        self, workload: Workload[Any], samples_per_batch: int, start: Position, per_epoch: int
    ) -> None:
        self._workload, self._samples, self._per_epoch = workload, samples_per_batch, per_epoch
        self._epoch, self._taken = start.epoch, -(-start.samples // samples_per_batch)
        self._batches = self._rest_of_epoch()

    def _rest_of_epoch(self) -> Iterator[Any]:
        left = max(0, self._per_epoch - self._taken)
        return islice(self._workload.batches(self._epoch, self._taken), left)

    @property
    def position(self) -> Position:
        return Position(self._epoch, self._taken * self._samples)

    @property
    def count(self) -> int:
        """Batches from the first epoch's first to here, had all been as large."""
        return self._epoch * self._per_epoch + self._taken

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            for batch in self._batches:
                self._taken += 1
                return batch
            self._epoch, self._taken = self._epoch + 1, 0
            self._batches = self._rest_of_epoch()
