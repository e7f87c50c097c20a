"""Buckets that begin one after the other among peers and end together; where there are GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from oktopk import GradientAllreduce, NonFiniteGradientError
from oktopk.buckets import BucketedAllreduce
from tests.devices import get, gpus, put, use

pytestmark = [pytest.mark.mpi, pytest.mark.skipif(not gpus(), reason="no GPU")]

LENGTHS = [20_011, 9_000, 3_001]
SETTINGS: dict[str, Any] = {
    "density": 0.05, "average": False, "threshold_interval": 6, "boundary_interval": 4,
}  # fmt: skip
TRUSTED = 8


@pytest.fixture
def device(comm: MPI.Intracomm) -> str:
    use("cuda", comm)
    return "cuda"


@pytest.fixture
def made(comm: MPI.Intracomm) -> Iterator[list[Any]]:
    """Reducers that are closed after the test."""
    reducers: list[Any] = []
    yield reducers
    for reducer in reducers:
        reducer.close()


def buckets(device: str, comm: MPI.Intracomm, made: list[Any], **settings: Any) -> BucketedAllreduce:
    reducer = BucketedAllreduce(comm, LENGTHS, device=device, peer_memory=True, **{**SETTINGS, **settings})
    made.append(reducer)
    return reducer


def gradients(comm: MPI.Intracomm, step: int, factor: float = 1.0) -> list[NDArray[np.float32]]:
    """Whole numbers with a heavy tail, so that sums are exact."""
    drawn = [np.random.default_rng((comm.rank, step, number)) for number in range(len(LENGTHS))]
    return [
        np.rint(factor * 1024 * rng.standard_normal(n) ** 3).astype(np.float32)
        for rng, n in zip(drawn, LENGTHS, strict=True)
    ]


def left(comm: MPI.Intracomm, reducer: BucketedAllreduce) -> NDArray[np.float64]:
    return np.asarray(comm.allreduce(reducer.gathered_residual().astype(np.float64)))


def _always(kept: int, density: float) -> int:
    return kept


@pytest.mark.parametrize("deferred", [False, True])
def test_buckets_that_end_together_have_the_bits_of_steps_one_after_the_other(
    device: str, comm: MPI.Intracomm, made: list[Any], deferred: bool
) -> None:
    """Also where a bucket needs the host: its elements become 40 times larger from one step to the next."""
    together = buckets(device, comm, made, deferred=deferred)
    alone = [
        GradientAllreduce(comm, n, device=device, peer_memory=True, deferred=deferred, **SETTINGS)
        for n in LENGTHS
    ]
    made += alone
    open_reports, needed_host = 0, 0
    for step in range(26):
        given = gradients(comm, step)
        if step >= 15:
            given[1] *= 40
        futures = [together.start(put(device, vector)) for vector in given]
        assert deferred or not any(future.done() for future in futures)
        report = together.finish()
        assert all(future.done() for future in futures)
        open_reports += not report.complete
        for number, (vector, single) in enumerate(zip(given, alone, strict=True)):
            kept = report.buckets[number].k
            if not step:
                single.keep_entries(partial(_always, kept))
            single.step(put(device, vector))
            assert np.array_equal(get(single.update), get(together.updates[number]))
            assert np.array_equal(get(single.residual), get(together.buckets[number].residual))
        together.complete()
        assert report.complete
        needed_host += together.buckets[1].state_dict()["unaided"] == 0
        for single in alone:
            single.complete()
        assert report.words == sum(each.words for each in report.buckets) > 0 or comm.size == 1
    assert (open_reports > 3) == deferred
    assert needed_host


def test_a_bucket_that_is_not_finite_undoes_the_others_that_were_begun(
    device: str, comm: MPI.Intracomm, made: list[Any]
) -> None:
    reducer = buckets(device, comm, made, nonfinite="skip")
    reducer.step([put(device, vector) for vector in gradients(comm, 0)])
    before = left(comm, reducer)
    broken = gradients(comm, 1)
    if comm.rank == comm.size - 1:
        broken[1][5] = np.nan
    assert reducer.step([put(device, vector) for vector in broken]).skipped
    assert not any(get(update).any() for update in reducer.updates)
    assert np.array_equal(left(comm, reducer), before)
    assert not reducer.step([put(device, vector) for vector in gradients(comm, 2)]).skipped


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_deferred_bucket_that_is_not_finite_is_known_before_another_bucket_starts(
    device: str, comm: MPI.Intracomm, made: list[Any], nonfinite: str
) -> None:
    if comm.size == 1:
        pytest.skip("the smaller buckets of one rank's gradients need the host, which is no deferred step")
    reducer = buckets(device, comm, made, deferred=True, nonfinite=nonfinite)
    for step in range(TRUSTED + 1):
        report = reducer.step([put(device, vector) for vector in gradients(comm, step)])
    assert not any(bucket.complete for bucket in report.buckets)
    broken = gradients(comm, 20)
    if comm.rank == 0:
        broken[2][:] = np.inf
    report = reducer.step([put(device, vector) for vector in broken])
    known = [report.complete]
    assert [get(update).any() for update in reducer.updates] == [True, True, False]
    given = [put(device, vector) for vector in gradients(comm, 21)]
    if nonfinite == "raise":
        mass = [get(bucket.residual) for bucket in reducer.buckets]
        with pytest.raises(NonFiniteGradientError, match=rf"step {TRUSTED + 1}: .* rank\(s\) 0") as caught:
            reducer.step(given)
        assert caught.value.step == TRUSTED + 1
        assert all(
            np.array_equal(get(bucket.residual), was)
            for bucket, was in zip(reducer.buckets, mass, strict=True)
        )
    last = reducer.step(given)
    reducer.complete()
    assert last.step == TRUSTED + 2 and not last.skipped
    assert len({bucket.steps for bucket in reducer.buckets}) == 1
    known.append(report.complete)
    assert known == [False, nonfinite == "skip"]
    assert report.skipped == (nonfinite == "skip")


def test_buckets_that_were_begun_can_be_abandoned(device: str, comm: MPI.Intracomm, made: list[Any]) -> None:
    reducer = buckets(device, comm, made)
    reducer.step([put(device, vector) for vector in gradients(comm, 0)])
    before = left(comm, reducer)
    given = gradients(comm, 1)
    reducer.start(put(device, given[0]))
    reducer.start(put(device, given[1]))
    reducer.abandon()
    begun = comm.allreduce(np.concatenate([np.zeros(LENGTHS[2]), *given[1::-1]]).astype(np.float64))
    assert np.array_equal(left(comm, reducer), before + begun)
    assert reducer.step([put(device, vector) for vector in gradients(comm, 2)]).step == 2
