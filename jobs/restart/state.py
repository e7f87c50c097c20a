"""Captures and restores everything that the next step of a run depends on."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from mpi4py import MPI
from torch import nn

from jobs.cluster.agreement import decide_together
from jobs.restart import files
from jobs.restart.files import BadCheckpointError, Found
from jobs.train.reduce.reduction import ReducingOptimizer
from oktopk import MissingRanksError
from oktopk.elastic import check_redistributed, redistribute
from oktopk.torch.updates.optimizer import UpdatesOptimizer

RESIDUALS = ("reducer", "tables", "updates")
"""Parts of an optimizer's state that differ from rank to rank, see `oktopk.DistributedOptimizer`."""


class Position(NamedTuple):
    """A run's place in the data.

    samples counts those of all ranks in this epoch, so that another number of ranks finds the place too.
    """

    epoch: int = 0
    samples: int = 0


class Progress(NamedTuple):
    """Steps done, and the place in the data.

    Attributes:
        done: steps.
        position: in the data.
    """

    done: int = 0
    position: Position = Position()


def capture(
    model: nn.Module, optimizer: ReducingOptimizer, position: Position
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of a run between two steps.

    Returns:
        (common, own): what is equal on all ranks, and what is this rank's: residual, thresholds and boundaries, the buffers
        (batch norm), random-number generators, and the place in the data; of updates the moments are among the residuals.
        Tensors are not copied, but parameters that all ranks agree on where they hold their own.
    """
    state, alone = dict(optimizer.state_dict()), isinstance(optimizer, UpdatesOptimizer)
    # each rank's own: what it has not sent
    residuals = {name: state.pop(name) for name in RESIDUALS if name in state}
    if alone:
        del state["state"]  # the moments, which "updates" has; `redistribute` puts them back
    with optimizer.agreed():
        parameters = {name: p.detach().clone() if alone else p for name, p in model.named_parameters()}
    common = {"model": parameters, "optimizer": state}
    own = {
        "buffers": dict(model.named_buffers()),
        **residuals,
        "position": position._asdict(),
        "random": _random_state(),
    }
    return common, own


def restore(
    checkpoint: Found, model: nn.Module, optimizer: ReducingOptimizer, comm: MPI.Intracomm, seed: int
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
    rank, heir = comm.rank, comm.rank % checkpoint.ranks
    where = f"{files.COMMON} and {files.rank_file(heir)} hold no state of this run"

    def saved_residuals(saved_rank: int) -> dict[str, Any]:
        own = checkpoint.own(saved_rank)
        return {name: own[name] for name in RESIDUALS if name in own}

    def read() -> tuple[dict[str, Any], Position]:
        """What a rank can do by itself."""
        with _refusing_what_is_damaged(where):
            common, own = checkpoint.common(), checkpoint.own(heir)
            residuals = redistribute(saved_residuals, checkpoint.ranks, rank, comm.size, optimizer.hosts)
            check_redistributed(residuals)
            state = {**common["optimizer"], **residuals}
            position, saved = Position(**own["position"]), common["model"] | own["buffers"]
            if not all(0 <= number < 2**53 for number in position):
                raise ValueError(f"{position} is no place in the data")
            with torch.no_grad():
                for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                    tensor.copy_(saved[name])
            if rank < checkpoint.ranks:
                _set_random_state(own["random"])
            else:
                fresh = np.random.SeedSequence([seed, rank, checkpoint.step])
                torch.manual_seed(fresh.generate_state(1, np.uint64)[0])
            return state, position

    def load() -> None:
        with _refusing_what_is_damaged(where):
            optimizer.load_state_dict(state)

    state, position = decide_together(comm, read, (BadCheckpointError,), BadCheckpointError)
    positions = comm.allgather(position)
    if positions.count(position) < comm.size:
        raise BadCheckpointError(f"the ranks have different positions in the data: {positions}")
    decide_together(comm, load, (BadCheckpointError,), BadCheckpointError)
    return Progress(checkpoint.step, position)


@contextmanager
def _refusing_what_is_damaged(where: str) -> Iterator[None]:
    """Raise BadCheckpointError for what a state that is none raises where it is read or loaded."""
    try:
        yield
    except MissingRanksError:  # the ranks are apart
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise BadCheckpointError(f"{where}: {type(error).__name__} {error}") from error


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
