"""Training batches of one rank, one at a time or cut in blocks on a device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, Self, TypedDict, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from data import DataError
from data.sharding import ShardedBatches, epoch_draws

Batch = TypeVar("Batch")


class HeldOutPlace(TypedDict):
    """What part of a held-out split a rank gets, this rank of `size`, and how many samples a batch has at most."""

    batch_size: int
    rank: int
    size: int


class Place(HeldOutPlace):
    """What a rank trains on: batches of so many samples, shuffled by a seed of at least 0 that is the same on all ranks."""

    seed: int


class Resident:
    """Tensors of a split that lie on one device together; on the host they may be mapped.

    Args:
        what: they are, for messages.
    """

    device = torch.device("cpu")

    def __init__(self, what: str) -> None:
        self._what = what

    def to(self, device: torch.device) -> None:
        """Move all of them. Raises DataError: they do not fit."""
        try:
            for name, value in vars(self).items():
                if isinstance(value, torch.Tensor):
                    setattr(self, name, value.to(device))
        except torch.OutOfMemoryError as error:
            raise DataError(f"{self._what} do not fit on {device}: {error}") from error
        self.device = device


class HeldOut(Generic[Batch]):
    """One rank's part of a held-out split, in batches.

    Ranks may have unequal numbers of samples and batches, or none; sum what was counted, never average averages.

    Args:
        source: what batches are cut from.
        cut: plan -> batch.
        plans: of all batches.
    """

    def __init__(self, source: Resident, cut: Callable[[Any], Batch], plans: Iterable[Any]) -> None:
        self.source, self._cut, self._plans = source, cut, list(plans)

    def to(self, device: torch.device) -> Self:
        """Cut batches there from now on. Raises DataError: the samples do not fit."""
        self.source.to(device)
        return self

    def __iter__(self) -> Iterator[Batch]:
        return map(self._cut, self._plans)


class EpochLoader(ABC, Generic[Batch]):
    """Training batches, shuffled anew in every epoch; each is a function of (seed, epoch, step, rank).

    So asking for a batch again, in another order, or after a restart gives the same bytes. What is drawn for a sample depends on
    (seed, epoch, sample) only: a run on another number of ranks with as many samples per step in total sees the same.

    Args:
        shards: which samples a batch has.
        stream: of the random numbers that samples get, see data.sharding.
    """

    def __init__(self, shards: ShardedBatches, stream: int) -> None:
        self.shards, self._stream = shards, stream
        self._drawn: tuple[int, NDArray[np.uint64]] | None = None

    @property
    def steps_per_epoch(self) -> int:
        """Steps of one epoch, equal on all ranks and at least 1."""
        return self.shards.steps_per_epoch

    def draws(self, epoch: int) -> NDArray[np.uint64]:
        """uint64[samples]: a random number for each of them in an epoch."""
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = (epoch, epoch_draws(self.shards.count, self.shards.seed, epoch, self._stream))
        return self._drawn[1]

    @abstractmethod
    def to(self, device: torch.device) -> object:
        """Cut batches there from now on. Raises DataError: the split does not fit."""

    @abstractmethod
    def batch(self, epoch: int, step: int) -> Batch:
        """The batch of one step, 0 <= step < steps_per_epoch."""

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Batch]:
        """The batches of an epoch, from first_step on: 0 for all of it, another to resume in its middle."""
        return (self.batch(epoch, step) for step in range(first_step, self.steps_per_epoch))


class BlockLoader(EpochLoader[Batch]):
    """Batches that are cut many at a time, so that all of a block share the launches of small kernels.

    Batches are pieces of the block, not to be changed.

    Args:
        shards, stream: as EpochLoader. `_begin` comes before the first batch.
    """

    def _begin(self, samples: int) -> None:
        """Forget what was cut; from here on so many samples are cut at a time, and those of one batch at least."""
        self._steps_per_block = max(1, samples // self.shards.batch_size)
        self._planned: tuple[int, torch.Tensor] | None = None
        self._block: tuple[tuple[int, int], tuple[torch.Tensor, ...]] | None = None

    @abstractmethod
    def _plan(self, epoch: int) -> torch.Tensor:
        """int64[rows, samples] on the device: what `_cut` needs of each sample, in this rank's order of the epoch."""

    @abstractmethod
    def _cut(self, plan: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The samples of some columns of the plan."""

    def _pieces(self, epoch: int, step: int) -> tuple[torch.Tensor, ...]:
        size, first = self.shards.batch_size, step - step % self._steps_per_block
        if self._block is None or self._block[0] != (epoch, first):
            self._block = None  # before the next one takes as much
            if self._planned is None or self._planned[0] != epoch:
                self._planned = (epoch, self._plan(epoch))
            stop = min(first + self._steps_per_block, self.steps_per_epoch)
            self._block = (epoch, first), self._cut(self._planned[1][:, first * size : stop * size])
        here = slice((step - first) * size, (step - first + 1) * size)
        return tuple(tensor[here] for tensor in self._block[1])
