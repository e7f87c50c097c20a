"""Captures and restores everything that the next step of a run depends on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from torch import Tensor, nn

from jobs.cluster.agreement import decide_together
from jobs.restart import files
from jobs.restart.files import BadCheckpointError
from jobs.restart.resume import MOMENTS, RESIDUALS, Found
from jobs.train.optimizers import kept_by
from jobs.train.reduce.reduction import ReducingOptimizer, agreed, steps_alone
from jobs.train.tasks.task import Workload
from oktopk import MissingRanksError
from oktopk.elastic import check_read
from oktopk.torch.states import check_groups


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
        (batch norm), random-number generators, and the place in the data; where ranks step alone also their optimizers' state.
        Tensors are not copied, but parameters that all ranks agree on where they hold their own.
    """
    state, alone = dict(optimizer.state_dict()), steps_alone(optimizer)
    # each rank's own: what it has not sent
    residuals = {name: state.pop(name) for name in (*RESIDUALS, *[MOMENTS] * alone) if name in state}
    if "updates" in residuals:
        del residuals[MOMENTS]  # it has them, and `redistribute` puts them back
    with agreed(optimizer):
        parameters = {name: p.detach().clone() if alone else p for name, p in model.named_parameters()}
    common = {"model": parameters, "optimizer": state}
    own = {
        "buffers": dict(model.named_buffers()),
        **residuals,
        "position": asdict(position),
        "random": _random_state(),
    }
    return common, own


def restore(
    found: Found, model: nn.Module, optimizer: ReducingOptimizer, comm: MPI.Intracomm, seed: int
) -> Progress:
    """Put a checkpoint into a run that was built as it was; collective.

    On as many ranks the run continues bit for bit. On another number a rank beyond those that there were takes the buffers
    of one of them, and random numbers of its own.

    Args:
        seed: of the run, for those.

    Returns:
        How far the run is.

    Raises:
        BadCheckpointError: the checkpoint does not hold the state of this run; on every rank alike. Another one must be restored
            then, as parts of it may be in the run already.
    """
    rank = comm.rank
    name = files.rank_file(rank % found.ranks)

    def take() -> tuple[dict[str, Any], Position]:
        """What this rank can do by itself."""
        try:
            return taken()
        except (RuntimeError, *_DAMAGED) as error:
            text = f"{files.COMMON} and {name} hold no state of this run: {type(error).__name__} {error}"
            raise BadCheckpointError(text) from error

    def taken() -> tuple[dict[str, Any], Position]:
        common, own = found.common(), found.own(rank % found.ranks)
        _copy(files.COMMON, "model", common["model"], model.named_parameters())
        _copy(name, "buffers", own["buffers"], model.named_buffers())
        residuals = found.residuals(rank, comm.size, optimizer.hosts)
        try:
            check_read(residuals)
        except ValueError as error:
            raise BadCheckpointError(str(error)) from error
        state = {**common["optimizer"], **residuals}
        _check_optimizer(name if MOMENTS in residuals else files.COMMON, state, optimizer.inner)
        if not isinstance(residuals["reducer"], dict):
            raise BadCheckpointError(f"{name} holds no state of this run: reducer is none")
        if rank < found.ranks:
            _set_random_state(own["random"])
        else:
            torch.manual_seed(
                np.random.SeedSequence([seed, rank, found.step]).generate_state(1, np.uint64)[0]
            )
        return state, _position(own["position"])

    state, position = decide_together(comm, take, (BadCheckpointError,), _refused)
    positions = comm.allgather(position)
    if positions.count(position) < comm.size:
        raise BadCheckpointError(f"the ranks have different positions in the data: {positions}")

    def load() -> None:
        try:
            optimizer.load_state_dict(state)
        except MissingRanksError:  # the ranks are apart
            raise
        except RuntimeError as error:
            raise ValueError(str(error)) from error

    decide_together(comm, load, _DAMAGED, _refused)
    return Progress(found.step, position)


_DAMAGED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
"""What a state that is none raises where it is loaded."""


def _refused(message: str) -> BadCheckpointError:
    return BadCheckpointError("; ".join(message.splitlines()))


def _copy(part: str, kind: str, saved: Any, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy saved tensors into those of a model, once it is known that all fit."""
    tensors = list(tensors)
    for name, tensor in tensors:
        given = saved.get(name)
        if not isinstance(given, Tensor) or (given.shape, given.dtype) != (tensor.shape, tensor.dtype):
            what = f"{given.dtype}{list(given.shape)}" if isinstance(given, Tensor) else repr(given)[:40]
            wanted = f"{tensor.dtype}{list(tensor.shape)}"
            raise BadCheckpointError(
                f"{part} holds no state of this run: {kind} has {name} {what}, not {wanted}"
            )
    with torch.no_grad():
        for name, tensor in tensors:
            tensor.copy_(saved[name])


def _check_optimizer(part: str, state: Any, optimizer: torch.optim.Optimizer) -> None:
    """Raise BadCheckpointError where a state would end a step of the optimizer, which torch does not see when it loads it."""
    problem = ""
    try:
        check_groups(optimizer, state)
    except ValueError as error:
        problem = str(error)
    for own, theirs in zip(optimizer.param_groups, [] if problem else state["param_groups"], strict=False):
        for name, value in own.items():
            if name != "params" and not _like(theirs.get(name, ...), value):
                problem = f"a group has {name} {theirs.get(name)!r}, not one like {value!r}"
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    numbers = [] if problem else [number for group in state["param_groups"] for number in group["params"]]
    places = dict(zip(numbers, parameters, strict=True)) if not problem else {}
    kept = kept_by(optimizer)
    for number, held in state["state"].items() if not problem else ():
        if number not in places:
            problem = f"a parameter {number!r} that is in no group"
        elif {name for name, value in held.items() if value is not None} != kept.keys():
            problem = f"parameter {number} has {', '.join(map(str, held))}, not {', '.join(kept)}"
        else:
            for name, scalar in kept.items():
                shape, value = torch.Size() if scalar else places[number].shape, held[name]
                if not isinstance(value, Tensor) or value.shape != shape or not value.is_floating_point():
                    problem = f"parameter {number} has a {name} that is no float{list(shape)}"
    if problem:
        raise BadCheckpointError(f"{part} holds no state of this optimizer: {problem}")


def _like(given: Any, own: Any) -> bool:
    """Whether a setting of a group is of the kind that the optimizer has: a switch, a finite number, or several of them."""
    if own is None or isinstance(own, bool):
        return given is None or isinstance(given, bool)
    if isinstance(own, tuple):
        return isinstance(given, tuple) and len(given) == len(own) and all(map(_like, given, own))
    return type(given) is type(own) and bool(np.isfinite(given))


def _position(saved: Any) -> Position:
    for name in ("epoch", "samples"):
        if type(saved[name]) is not int or not 0 <= saved[name] < 2**53:
            raise BadCheckpointError(f"the position in the data has {name} {saved[name]!r}")
    return Position(**saved)


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
