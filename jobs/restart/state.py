"""Captures and restores everything that the next step of a run depends on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from torch import nn

from jobs.restart.resume import RESIDUALS, Found
from jobs.train.reduce.reduction import ReducingOptimizer
from jobs.train.tasks.task import Workload


@dataclass(frozen=True)
class Position:
    """A run's place in the data.

    samples counts those of all ranks in this epoch, so that another number of ranks finds the place too.
    """

    epoch: int = 0
    samples: int = 0


@dataclass(frozen=True)
class Progress:
    """Steps done, and the place in the data.

    Attributes:
        done: steps.
        position: in the data.
    """

    done: int = 0
    position: Position = field(default_factory=Position)


class BatchStream:
    """This rank's batches from a position on, epoch after epoch.

    Args:
        workload: whose batches.
        samples_per_batch: of all ranks together.
        start: where; the first batch that begins there or after.
        per_epoch: batches of an epoch, at most the workload's: with several to a step some may be left over.
    """

    def __init__(self, workload: Workload, samples_per_batch: int, start: Position, per_epoch: int) -> None:
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


def capture(
    model: nn.Module, optimizer: ReducingOptimizer, position: Position
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of a run between two steps.

    Returns:
        (common, own): what is equal on all ranks, and what is this rank's: residual, thresholds and boundaries, the buffers
        (batch norm), random-number generators, and the place in the data. Tensors are not copied.
    """
    state = dict(optimizer.state_dict())
    # each rank's own: what it has not sent
    residuals = {name: state.pop(name) for name in RESIDUALS if name in state}
    common = {"model": dict(model.named_parameters()), "optimizer": state}
    own = {
        "buffers": dict(model.named_buffers()),
        **residuals,
        "position": asdict(position),
        "random": _random_state(),
    }
    return common, own


def restore(
    found: Found, model: nn.Module, optimizer: ReducingOptimizer, *, rank: int, ranks: int, seed: int
) -> Progress:
    """Put a checkpoint into a run that was built as it was; collective.

    On as many ranks the run continues bit for bit. On another number a rank beyond those that there were takes the buffers
    of one of them, and random numbers of its own.

    Args:
        seed: of the run, for those.

    Returns:
        How far the run is.
    """
    common, own = found.common(), found.own(rank % found.ranks)
    with torch.no_grad():
        for kind, tensors in (("model", model.named_parameters()), ("buffers", model.named_buffers())):
            saved = common["model"] if kind == "model" else own["buffers"]
            for name, tensor in tensors:
                tensor.copy_(saved[name])
    residuals = found.residuals(rank, ranks, optimizer.hosts)
    optimizer.load_state_dict({**common["optimizer"], **residuals})
    if rank < found.ranks:
        _set_random_state(own["random"])
    else:
        torch.manual_seed(np.random.SeedSequence([seed, rank, found.step]).generate_state(1, np.uint64)[0])
    return Progress(found.step, Position(**own["position"]))


def model_digest(model: nn.Module) -> str:
    """Digest of the names, shapes and types of all parameters and buffers."""
    digest = hashlib.sha256()
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
    return digest.hexdigest()[:16]


def seed_generators(seed: int, rank: int) -> None:
    """Give NumPy's and Python's global generators a start that repeats; torch's is the workload's to seed."""
    words = np.random.SeedSequence([seed, rank]).generate_state(2)
    np.random.seed(words[:1])  # noqa: NPY002 - the one that a data set or a model may use
    random.seed(int(words[1]))


def _random_state() -> dict[str, Any]:
    state: dict[str, Any] = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),  # noqa: NPY002
        "python": random.getstate(),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Any]) -> None:
    torch.set_rng_state(state["torch"])
    np.random.set_state(state["numpy"])  # noqa: NPY002
    random.setstate(state["python"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
