"""`oktopk.reference`: the bits of exact steps of the library, and updates. test_contract.py holds it to the contract."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI

from oktopk import GradientAllreduce
from oktopk.reference import equal_splits, step_of_gradients, step_of_updates
from oktopk.settings import entries_kept

pytestmark = pytest.mark.mpi

SHAPES = ((1, 1.0), (5, 0.2), (4001, 0.02))


@pytest.mark.parametrize(("length", "density"), SHAPES[1:])
def test_its_gradients_have_the_bits_of_the_library_where_thresholds_are_exact(
    comm: MPI.Intracomm, length: int, density: float
) -> None:
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


@pytest.mark.parametrize(("length", "density"), SHAPES)
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
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


@pytest.mark.also(ranks=8)
def test_references_are_equal_on_any_number_of_ranks(
    comm: MPI.Intracomm,
) -> None:
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
            step_of_updates(part, parameters, reference, residual, splits, 9, decay=0.5)
            equal &= len(set(part.allgather(reference.tobytes()))) == 1
            equal &= np.count_nonzero(reference != before / 2) == 9
        part.Free()
    assert comm.allreduce(equal, MPI.LAND)
