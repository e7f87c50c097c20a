"""The functional form: settings, faults, state, several instances."""

from __future__ import annotations

import tracemalloc
import warnings

import numpy as np
import pytest
from mpi4py import MPI

from oktopk import METHODS, GradientAllreduce
from oktopk.settings import entries_kept
from tests.inputs import GRADIENTS

pytestmark = pytest.mark.mpi

SPARSE = [name for name, method in METHODS.items() if method.sparse]


def gradients(comm: MPI.Intracomm, length: int, steps: int) -> list[np.ndarray]:
    rng = np.random.default_rng((3, comm.rank))
    return [GRADIENTS["iid"](rng, length, comm.rank, comm.size) for _ in range(steps)]


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_update_is_the_mean_or_the_sum(comm: MPI.Intracomm, method: str, average: bool) -> None:
    reducer = GradientAllreduce(comm, 64, method, density=0.25, average=average)
    gradient = np.zeros(64, np.float32)
    gradient[:2] = 8, 7  # as many as each of 8 ranks of a union chooses
    reducer.step(gradient)
    expected = gradient.astype(np.float64) * (1 if average else comm.size)
    assert np.allclose(reducer.update, expected, rtol=1e-6)
    assert np.count_nonzero(reducer.update) == 2


def test_a_default_spelled_out_on_one_rank_is_no_disagreement(comm: MPI.Intracomm) -> None:
    GradientAllreduce(comm, 100, "oktopk", **({"density": 0.01} if comm.rank == 0 else {}))


@pytest.mark.parametrize("method", SPARSE)
def test_a_density_above_a_quarter_runs_dense_and_says_so_once(comm: MPI.Intracomm, method: str) -> None:
    reducer = GradientAllreduce(comm, 100, method, density=0.26)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reports = [reducer.step(gradient) for gradient in gradients(comm, 100, 3)]
    assert [report.method for report in reports] == ["dense"] * 3
    assert len(caught) == (1 if comm.rank == 0 else 0)
    assert reducer.residual is None
    at_the_limit = GradientAllreduce(comm, 100, method, density=0.25)
    assert at_the_limit.step(gradients(comm, 100, 1)[0]).method == method


@pytest.mark.parametrize("method", SPARSE)
def test_warmups_run_dense_then_ever_sparser(comm: MPI.Intracomm, method: str) -> None:
    length = 1000
    settings = {"density": 0.01, "dense_warmup_steps": 2, "density_warmup_steps": 8}
    reducer = GradientAllreduce(comm, length, method, average=False, **settings)
    drawn = gradients(comm, length, 12)
    reports, applied = [], np.zeros(length)
    for gradient in drawn:
        reports.append(reducer.step(gradient))
        applied += reducer.update
    assert [report.method for report in reports] == ["dense"] * 2 + [method] * 10
    ks = [report.k for report in reports[2:]]
    assert ks[0] == entries_kept(0.25, length)
    assert ks[-1] == entries_kept(0.01, length)
    assert ks == sorted(ks, reverse=True)
    assert len(set(ks)) == 5
    put_in = np.sum(comm.allgather(np.sum(drawn, axis=0, dtype=np.float64)), axis=0)
    assert reducer.residual is not None
    left = np.sum(comm.allgather(reducer.residual.astype(np.float64)), axis=0)
    assert np.array_equal(put_in, left + applied)


@pytest.mark.parametrize("method", ["oktopk", "union"])
def test_a_density_falls_over_a_run_and_on_from_a_state(comm: MPI.Intracomm, method: str) -> None:
    """It falls every `threshold_interval` steps, in which thresholds are exact."""
    settings = {"density": 0.01, "first_density": 0.16, "density_warmup_steps": 12, "threshold_interval": 3}
    reducer = GradientAllreduce(comm, 2000, method, **settings)
    again = GradientAllreduce(comm, 2000, method, **settings)
    reports = []
    for step, gradient in enumerate(gradients(comm, 2000, 15)):
        if step == 7:
            again.load_state_dict(reducer.state_dict())
        reports.append((again if step > 6 else reducer).step(gradient))
    stages = [0.16, 0.08, 0.04, 0.02, 0.01]
    assert [report.k for report in reports] == [entries_kept(each, 2000) for each in stages for _ in range(3)]
    assert all(report.exact for report in reports[::3])


def test_a_skipped_exact_step_is_made_up_for_at_once(comm: MPI.Intracomm) -> None:
    intervals = {"threshold_interval": 3, "boundary_interval": 3}
    reducer = GradientAllreduce(comm, 3000, "oktopk", density=0.02, nonfinite="skip", **intervals)
    broken = 0, 6
    for step, gradient in enumerate(gradients(comm, 3000, 9)):
        if comm.rank == 0 and step in broken:
            gradient[3] = np.nan
        report = reducer.step(gradient)
        assert report.skipped == (step in broken)
        if step - 1 in broken:
            assert report.exact
        # nothing was selected before step 1
        assert ("boundaries" in report.seconds) == (step in (2, 3, 6, 7))


def test_no_step_allocates_anything_as_long_as_the_gradient(comm: MPI.Intracomm) -> None:
    length = 400_000
    reducer = GradientAllreduce(comm, length, "oktopk", density=0.01, threshold_interval=8)
    rng = np.random.default_rng(comm.rank)
    peaks: dict[bool, list[int]] = {True: [], False: []}
    for step in range(12):
        gradient = rng.standard_normal(length).astype(np.float32)
        tracemalloc.start()
        try:
            report = reducer.step(gradient)
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        if step >= 8:  # the buffers have grown
            peaks[report.local_exact or report.global_exact].append(peak)
    assert peaks[True]
    assert peaks[False]
    assert max(*peaks[True], *peaks[False]) < 4 * length / 4, peaks


@pytest.mark.parametrize("method", ["oktopk", "union"])
def test_scratch_of_a_density_that_fell_is_freed(comm: MPI.Intracomm, method: str) -> None:
    """A large density at the start of a run costs no memory in the rest of it."""
    length, scratch = 100_000, []
    for falls in (0, 4):
        reducer = GradientAllreduce(comm, length, method, density=0.005, density_warmup_steps=falls)
        each = []
        for gradient in gradients(comm, length, 6):
            reducer.step(gradient)
            each.append(reducer.transport.workspace.nbytes)
        scratch.append(each)
        reducer.close()
    never, fell = scratch
    assert fell[0] > 10 * never[-1] and fell[-1] <= 1.5 * never[-1]
