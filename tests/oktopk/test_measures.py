"""The paper's measures against a float64 oracle, and that measuring changes nothing."""

from __future__ import annotations

import math

import numpy as np
import pytest
from mpi4py import MPI

from collectives.traffic import Traffic
from oktopk import METHODS, GradientAllreduce
from oktopk.regions import equal_boundaries
from oktopk.settings import entries_kept
from tests.inputs import GRADIENTS, SHAPES
from tests.oracle import masked, top_k

pytestmark = pytest.mark.mpi

SPARSE = [name for name, method in METHODS.items() if method.sparse]


def draw(comm: MPI.Intracomm, kind: str, length: int, step: int) -> np.ndarray:
    return GRADIENTS[kind](np.random.default_rng((5, step, comm.rank)), length, comm.rank, comm.size)


def everyones(comm: MPI.Intracomm, vector: np.ndarray | None, length: int) -> np.ndarray:
    mine = np.zeros(length) if vector is None else vector.astype(np.float64)
    return np.array(comm.allgather(mine))


def missed_by(update: np.ndarray, accumulated: np.ndarray, k: int) -> float:
    """Norm of the exact top k of the mean minus the applied mean."""
    mean = accumulated.sum(axis=0) / len(accumulated)
    return float(np.linalg.norm(masked(mean, top_k(mean, k)) - update))


@pytest.mark.parametrize("method", SPARSE)
def test_norms_xi_and_fill_in_are_those_of_a_float64_oracle(comm: MPI.Intracomm, method: str) -> None:
    for at, kind in enumerate(GRADIENTS):
        # each shape with one method; of every kind and of every shape sums and means
        methods = len(SPARSE)
        for number, (length, density) in enumerate(SHAPES[(at + SPARSE.index(method)) % methods :: methods]):
            average = (at // 3 + number) % 2 == 0
            k = entries_kept(density, length)
            reducer = GradientAllreduce(
                comm, length, method, density=density, threshold_interval=1, average=average
            )
            for step in range(2):
                gradient = draw(comm, kind, length, step)
                gradients = everyones(comm, gradient, length)
                accumulated = gradients + everyones(comm, reducer.residual, length)
                measures = reducer.step(gradient, measure=True).measures
                mean = reducer.update.astype(np.float64) / (1 if average else comm.size)
                norm = float(np.linalg.norm(gradients.sum(axis=0) / comm.size))
                expected = missed_by(mean, accumulated, k)
                rounding = 1e-6 * float(np.linalg.norm(accumulated)) + 2e-45 * length
                assert measures.gradient_norm == pytest.approx(norm, rel=1e-5)
                assert measures.missed == pytest.approx(expected, rel=1e-5, abs=rounding)
                left = everyones(comm, reducer.residual, length).sum(axis=0) / comm.size
                for length_of, vector in ((measures.update_norm, mean), (measures.residual_norm, left)):
                    assert length_of == pytest.approx(np.linalg.norm(vector), rel=1e-5, abs=rounding)
                assert math.isnan(measures.residual_over_update) == (not mean.any())
                if norm == 0:
                    assert math.isnan(measures.xi)
                else:
                    assert measures.xi == pytest.approx(measures.missed / norm, rel=1e-5)
                if method != "gaussiank":  # its selection is not the exact top k
                    chosen = METHODS[method].local_k(k, comm.size)
                    selected = {int(i) for row in accumulated for i in top_k(row, chosen)}
                    assert measures.fill_in == len(selected) / k
            reducer.close()


@pytest.mark.parametrize("method", SPARSE)
def test_measuring_changes_neither_the_update_nor_the_traffic(comm: MPI.Intracomm, method: str) -> None:
    length = 2000
    plain, measured = (GradientAllreduce(comm, length, method, density=0.02) for _ in range(2))
    for step in range(6):
        gradient = draw(comm, "heavy tailed", length, step)
        residual = everyones(comm, measured.residual, length)
        entering = everyones(comm, gradient, length)
        expected, found = plain.step(gradient), measured.step(gradient, measure=step % 2 == 0)
        assert (found.measures is not None) == (step % 2 == 0)
        assert np.array_equal(plain.update, measured.update)
        assert np.array_equal(plain.residual, measured.residual)
        assert (found.words, found.control_words) == (expected.words, expected.control_words)
        assert measured.transport.traffic == Traffic()
        if found.measures is not None:
            norm = float(np.linalg.norm(entering.sum(axis=0))) / comm.size
            missed = missed_by(measured.update.astype(np.float64), entering + residual, found.k)
            assert found.measures.gradient_norm == pytest.approx(norm, rel=1e-5)
            assert found.measures.missed == pytest.approx(missed, rel=1e-4)


@pytest.mark.parametrize("method", SPARSE)
def test_the_balance_of_regions_is_counted_over_all_ranks(comm: MPI.Intracomm, method: str) -> None:
    length = 4000
    k = entries_kept(0.02, length)
    gradient = draw(comm, "heavy tailed", length, 0)
    gradient[length // 5 :] *= 1e-6  # what is large lies in the first fifth, on some ranks in less
    gradient[: comm.rank * length // 50] = 0
    reducer = GradientAllreduce(comm, length, method, density=0.02, balanced_regions=False)
    found = reducer.step(gradient, measure=True).measures.region_balance
    if method != "oktopk":
        assert math.isnan(found)
        return
    rows = everyones(comm, gradient, length)
    cuts = equal_boundaries(length, comm.size)
    counts = sum(np.histogram(np.sort(top_k(row, k)), cuts)[0] for row in rows)
    assert found == pytest.approx(counts.max() / counts.mean())
    balanced = GradientAllreduce(comm, length, method, density=0.02)
    balanced.step(gradient)
    # the cuts are a mean over ranks that differ
    assert balanced.step(gradient, measure=True).measures.region_balance <= max(1.0, 0.8 * found)
    assert comm.allreduce(found, MPI.MAX) == comm.allreduce(found, MPI.MIN) == found


def test_dense_and_skipped_steps_have_no_measures(comm: MPI.Intracomm) -> None:
    gradient = np.ones(100, np.float32)
    dense = GradientAllreduce(comm, 100, "dense")
    assert dense.step(gradient, measure=True).measures is None
    reducer = GradientAllreduce(comm, 100, "oktopk", dense_warmup_steps=1, nonfinite="skip")
    assert reducer.step(gradient, measure=True).measures is None
    assert reducer.step(gradient, measure=True).measures is not None
    gradient[comm.rank] = np.nan
    report = reducer.step(gradient, measure=True)
    assert report.skipped
    assert report.measures is None
    gradient[comm.rank] = 1.0
    assert math.isfinite(reducer.step(gradient, measure=True).measures.xi)
