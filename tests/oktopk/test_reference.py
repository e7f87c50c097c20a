"""`oktopk.reference`: the bits of exact steps of the library, and updates. test_contract.py holds it to the contract."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from oktopk import GradientAllreduce
from oktopk.reference import equal_splits, step_of_gradients, step_of_updates
from oktopk.settings import entries_kept
from tests.training import steady

pytestmark = pytest.mark.mpi

SHAPES = ((1, 1.0), (5, 0.2), (4001, 0.02))


def test_exact_thresholds_of_the_library_give_its_bits(comm: MPI.Intracomm) -> None:
    length, density = SHAPES[-1]
    exact = {"threshold_interval": 1, "boundary_interval": 1}
    reducer = GradientAllreduce(comm, length, "oktopk", density=density, average=False, **exact)
    rng = np.random.default_rng((comm.rank, 3))
    residual, splits = np.zeros(length, np.float32), equal_splits(comm.size, length)
    for _ in range(5):
        gradient = rng.standard_t(3, length).astype(np.float32)
        report = reducer.step(gradient)
        update = step_of_gradients(comm, gradient, residual, splits, report.k)
        assert update.tobytes() == (reducer.update / np.float32(comm.size)).tobytes()
        assert residual.tobytes() == reducer.residual.tobytes()


@pytest.mark.parametrize(
    ("length", "density", "share"),
    [(*SHAPES[0], 0.5), (*SHAPES[1], 1.0), (*SHAPES[2], 0.0), (*SHAPES[2], 0.5)],
)
def test_nothing_that_optimizers_move_is_lost_and_references_are_equal(
    comm: MPI.Intracomm, length: int, density: float, share: float
) -> None:
    rng = np.random.default_rng((comm.rank, 4))
    reference = np.arange(length, dtype=np.float32)
    parameters, residual, moved = reference.copy(), np.zeros(length, np.float32), np.zeros(length)
    splits = equal_splits(comm.size, length)
    for _ in range(5):
        # multiples of P: the mean of P ranks is an integer as well
        move = comm.size * rng.integers(-99, 100, length).astype(np.float32)
        parameters -= move
        moved += move
        step_of_updates(comm, parameters, reference, residual, splits, entries_kept(density, length), share)
        assert len(set(comm.allgather(reference.tobytes()))) == 1
        assert np.array_equal(parameters, reference - share * residual)
        applied = comm.size * (np.arange(length) - reference)
        assert np.array_equal(comm.allreduce(moved), comm.allreduce(residual) + applied)


@pytest.mark.parametrize("power", [0.0, 2.0])
def test_updates_of_the_library_are_the_same_bit_for_bit(comm: MPI.Intracomm, power: float) -> None:
    """Of steps by SGD, with residuals that forget and without."""
    import torch  # here, as eight ranks import this file for a test without it

    from tests import updates

    rng = np.random.default_rng((comm.rank, 7))
    weight = torch.nn.Parameter(torch.arange(300.0))
    reference, residual = weight.detach().numpy().copy(), np.zeros(300, np.float32)
    parameters, splits = reference.copy(), equal_splits(comm.size, 300)
    settings: dict[str, Any] = {"threshold_interval": 1, "boundary_interval": 1, "density": 0.03}
    settings |= {"sends": "updates", "residual_decay": power, "local_share": 0.5}
    optimizer: Any = steady(torch.optim.SGD([weight], lr=0.25), comm, "oktopk", **settings)
    for step in range(1, 7):
        gradient = rng.standard_normal(300, np.float32)
        weight.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        parameters -= np.float32(0.25) * gradient
        kept = ((28 + step) / (29 + step)) ** power
        step_of_updates(comm, parameters, reference, residual, splits, optimizer.report.k, 0.5, kept=kept)
        assert updates.reference(optimizer).numpy().tobytes() == reference.tobytes()
        assert optimizer.reducer.residual.tobytes() == residual.tobytes()
        assert weight.detach().numpy().tobytes() == parameters.tobytes()


@pytest.mark.also(ranks=8)
def test_references_are_equal_on_any_number_of_ranks(comm: MPI.Intracomm) -> None:
    equal = True
    for ranks in range(1, comm.size + 1):
        part = comm.Split(comm.rank < ranks)
        rng = np.random.default_rng((comm.rank, 5))
        reference = np.random.default_rng(6).standard_normal(300, np.float32)
        parameters, residual = reference.copy(), np.zeros(300, np.float32)
        splits = equal_splits(part.size, 300)
        for _ in range(3):
            parameters -= rng.standard_normal(300, np.float32) * 2.0**-comm.rank
            before = reference.copy()
            step_of_updates(part, parameters, reference, residual, splits, 9, 1 / part.size, decay=0.5)
            equal &= len(set(part.allgather(reference.tobytes()))) == 1
            equal &= np.count_nonzero(reference != before / 2) == 9
        part.Free()
    assert comm.allreduce(equal, MPI.LAND)
