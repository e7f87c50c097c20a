"""A gradient in buckets: the contract of one vector, in threads or through peer memory, whatever becomes of one of them."""

from __future__ import annotations

import threading
from functools import partial
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives.traffic import upper_bound
from oktopk import GradientAllreduce, NonFiniteGradientError
from oktopk.buckets import BucketedAllreduce, bucket_ranges
from oktopk.results import StageTimer, StepReport, report_of_buckets
from oktopk.step import StepHandle, StepResult
from tests.devices import get, gpus, hold_up, put, use
from tests.inputs import GRADIENTS, Vector

pytestmark = [pytest.mark.mpi, pytest.mark.host_cuda(ranks=3)]

LENGTHS = [700, 1, 3000, 64, 1235]
DENSITY = 0.02
K = 100  # of 5000
on_gpus = pytest.mark.skipif(not gpus(), reason="no GPU")


def gradients(comm: MPI.Intracomm, step: int, kind: str = "heavy tailed") -> list[Vector]:
    drawn = [np.random.default_rng((comm.rank, step, number)) for number in range(len(LENGTHS))]
    return [GRADIENTS[kind](rng, n, comm.rank, comm.size) for rng, n in zip(drawn, LENGTHS, strict=True)]


def bucketed(comm: MPI.Intracomm, device: str = "cpu", **settings: Any) -> BucketedAllreduce:
    use(device, comm)
    chosen = {"density": DENSITY, "average": False, "threshold_interval": 4, "device": device}
    return BucketedAllreduce(comm, LENGTHS, **chosen | {"peer_memory": device == "cuda" or None} | settings)


def left(comm: MPI.Intracomm, reducer: BucketedAllreduce) -> np.ndarray:
    return comm.allreduce(reducer.gathered_residual().astype(np.float64))


def _always(kept: int, density: float) -> int:
    return kept


def total(comm: MPI.Intracomm, vectors: list[Vector]) -> np.ndarray:
    return comm.allreduce(np.concatenate(vectors).astype(np.float64))


class Alone:
    """A reducer a bucket, each of which keeps as many entries as the bucket."""

    def __init__(self, comm: MPI.Intracomm, lengths: list[int], **settings: Any) -> None:
        self.reducers = [GradientAllreduce(comm, n, **settings) for n in lengths]

    def check(self, buckets: BucketedAllreduce, report: StepReport, given: list[Any]) -> None:
        """Of this step's gradients updates and residuals are those of the buckets."""
        for reducer, bucket, part, vector in zip(
            self.reducers, buckets.reducers, report.buckets, given, strict=True
        ):
            if not report.step:
                reducer.keep_entries(partial(_always, part.k))
            reducer.step(vector)
            assert np.array_equal(get(reducer.update), get(bucket.update))
            assert np.array_equal(get(reducer.residual), get(bucket.residual))


@pytest.fixture
def reducer(comm: MPI.Intracomm) -> BucketedAllreduce:
    return bucketed(comm)


def test_buckets_are_reduced_as_vectors_within_the_caps_of_one(
    comm: MPI.Intracomm, reducer: BucketedAllreduce
) -> None:
    alone = Alone(comm, LENGTHS, density=DENSITY, average=False, threshold_interval=4)
    for step in range(9):
        given = gradients(comm, step)
        report = reducer.step(given)
        alone.check(reducer, report, given)
        assert 0.95 * K <= report.k <= K  # a bucket of few elements keeps no more than it has
        assert report.local_nnz <= 5 * K // 4 + len(LENGTHS)
        assert report.words <= upper_bound(5 * K // 4 + len(LENGTHS), comm.size)
        assert report.words == sum(bucket.words for bucket in report.buckets)
        assert report.bytes == sum(bucket.bytes for bucket in report.buckets)


@on_gpus
@pytest.mark.mpi(min_size=2)
def test_over_messages_between_gpus_three_buckets_are_reduced_at_once(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert len(bucketed(comm)._threads) == len(bucketed(comm, "cuda")._threads) == 1
    two = BucketedAllreduce(comm, [9, 9], device="cuda", peer_memory=False)
    assert len(two._threads) == 2
    reducer = bucketed(comm, "cuda", peer_memory=False)
    streams = [bucket.backend.stream for bucket in reducer.reducers]
    assert [streams.index(stream) for stream in streams] == [0, 1, 2, 0, 1]
    settings: dict[str, Any] = {"density": DENSITY, "average": False, "threshold_interval": 4}
    alone = Alone(comm, LENGTHS, device="cuda", peer_memory=False, **settings)
    begun = [threading.Event() for _ in LENGTHS]
    for number, bucket in enumerate(reducer.reducers):

        def step(*given: Any, number: int = number, own: Any = bucket.step, **more: Any) -> StepReport:
            begun[number].set()
            if number < 2:
                assert begun[2].wait(30), "another bucket waits for this one"
            return own(*given, **more)

        monkeypatch.setattr(bucket, "step", step)
    for index in range(4):
        hold_up()  # what a bucket's stream does not wait for comes late
        given = [put("cuda", vector) for vector in gradients(comm, index)]
        alone.check(reducer, reducer.step(given), given)
        for event in begun:
            event.clear()


@on_gpus
@pytest.mark.mpi(min_size=2)
def test_an_error_in_one_of_several_threads_ends_the_reducer(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer = bucketed(comm, "cuda", peer_memory=False)
    given = [put("cuda", vector) for vector in gradients(comm, 0)]
    reducer.step(given)

    def fails(*given: object) -> StepHandle:
        raise MemoryError("a bucket")

    monkeypatch.setattr(reducer.reducers[1]._executors["oktopk"], "begin", fails)
    futures = [reducer.start(each) for each in given]
    with pytest.raises(MemoryError):
        reducer.finish()
    assert [type(future.exception()) for future in futures] == [
        type(None),
        MemoryError,
        type(None),
        type(None),
        MemoryError,
    ]
    with pytest.raises(MemoryError):
        reducer.step(given)
    reducer.close()


@pytest.mark.parametrize(
    ("device", "settings"),
    [
        ("cpu", {"nonfinite": "raise"}),
        ("cpu", {"nonfinite": "skip"}),
        pytest.param("cuda", {"nonfinite": "skip"}, marks=on_gpus),
        pytest.param("cuda", {"nonfinite": "raise", "peer_memory": False}, marks=on_gpus),
    ],
)
def test_where_a_bucket_is_not_finite_nothing_of_the_others_is_lost(
    comm: MPI.Intracomm, device: str, settings: dict[str, Any]
) -> None:
    reducer, nonfinite = bucketed(comm, device, **settings), settings["nonfinite"]

    def step(vectors: list[Vector]) -> StepReport:
        return reducer.step([put(device, vector) for vector in vectors])

    step(gradients(comm, 0))
    before = left(comm, reducer)
    broken = gradients(comm, 1)
    guilty = comm.size - 1
    if comm.rank == guilty:
        broken[2][5] = np.nan
    if nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError) as caught:
            step(broken)
        assert caught.value.ranks == [guilty]
        assert caught.value.step == 1
    else:
        assert step(broken).skipped
    assert not any(get(update).any() for update in reducer.updates)
    after = left(comm, reducer)
    if nonfinite == "skip":
        assert np.array_equal(after, before)
    else:
        others = total(comm, [np.where(np.isfinite(vector), vector, 0) for vector in reversed(broken)])
        skipped = slice(LENGTHS[4] + LENGTHS[3], LENGTHS[4] + LENGTHS[3] + LENGTHS[2])
        others[skipped] = 0  # the broken bucket's gradient is dropped
        assert np.allclose(after, before + others)
    last = step(gradients(comm, 2))
    assert not last.skipped and last.step == 2


def test_buckets_start_while_the_caller_goes_on(comm: MPI.Intracomm, reducer: BucketedAllreduce) -> None:
    given = gradients(comm, 0)
    futures = [reducer.start(vector) for vector in given[:-1]]
    assert reducer.started == len(LENGTHS) - 1
    assert futures[0].result(timeout=60).k == K * 700 // 5000
    report = reducer.step(given[-1:])
    assert report.k == K
    assert reducer.started == 0
    assert list(report.seconds) == ["wait"]


def test_what_does_not_fit_into_a_step_raises_before_it_begins(
    comm: MPI.Intracomm, reducer: BucketedAllreduce
) -> None:
    given = gradients(comm, 0)
    with pytest.raises(RuntimeError, match="0 of 5 buckets were started"):
        reducer.finish()
    with pytest.raises(ValueError, match=r"shape \(701,\) is not \(700,\)"):
        reducer.start(np.zeros(701, np.float32))
    for vector in given:
        reducer.start(vector)
    with pytest.raises(RuntimeError, match="all 5 buckets were started"):
        reducer.start(given[0])
    for call in (reducer.state_dict, reducer.reset, reducer.gathered_residual):
        with pytest.raises(RuntimeError, match="while 5 buckets are reduced: end the step first"):
            call()
    reducer.finish()


@pytest.mark.parametrize("settings", [{}, pytest.param({"peer_memory": False}, marks=on_gpus)])
def test_an_abandoned_step_leaves_nothing_behind(
    comm: MPI.Intracomm, device: str, settings: dict[str, Any]
) -> None:
    reducer = bucketed(comm, device, **settings)
    reducer.step([put(device, vector) for vector in gradients(comm, 0)])
    before = left(comm, reducer)
    given = gradients(comm, 1)
    reducer.start(put(device, given[0]))
    reducer.start(put(device, given[1]))
    reducer.abandon()
    begun = total(comm, [np.zeros_like(vector) for vector in given[:1:-1]] + given[1::-1])
    assert np.array_equal(left(comm, reducer), before + begun)
    assert reducer.step([put(device, vector) for vector in gradients(comm, 2)]).step == 2
    assert len({bucket.steps for bucket in reducer.reducers}) == 1


def test_the_share_rounded_away_is_one_of_magnitudes() -> None:
    small = StepReport(0, "oktopk", 9, 100, {}, words=9, rounding=(1.0, 2.0))
    large = StepReport(0, "oktopk", 1, 100, {}, words=1, rounding=(0.0, 98.0))
    plain = StepReport(0, "oktopk", 1, 100, {}, words=1)
    assert report_of_buckets([small, large, plain], StageTimer()).rounded == 0.01
    assert report_of_buckets([plain, plain], StageTimer()).rounded == 0.0


def test_a_report_prints_as_one_line() -> None:
    report = StepReport(
        3, "oktopk", 10, 1000, {"select": 0.001, "apply": 0.0002}, global_nnz=11, bytes=4080, row_bytes=20
    )
    assert str(report) == "step 3: 11 of 1,000 entries applied, 4,100 bytes sent, 1.2 ms"
    assert str(report_of_buckets([report, report], StageTimer())).endswith(
        "22 of 2,000 entries applied, 8,160 bytes sent, 2.4 ms"
    )
    report.every, report.replicas = 4, 8
    assert str(report) == (
        "exchange 3: 11 of 1,000 entries applied, 4,100 bytes sent (1,025 by step), 1.2 ms, 8 replicas"
    )
    assert report.bytes_per_token(41) == 25
    report.bytes_between = 4000
    assert str(report).endswith("(1,025 by step), 4,000 of them to other hosts, 1.2 ms, 8 replicas")
    report.every, report.bytes_between, report.levels = 1, 0, "hosts"
    assert "4,100 bytes sent, 0 of them to other hosts, " in str(report)
    report.complete = False
    assert str(report).startswith("step 3: not complete, ")
    report.skipped = True
    assert str(report).startswith("step 3: skipped, ")


def test_buckets_of_tensors_end_with_the_first_ones() -> None:
    assert list(bucket_ranges([4, 4, 4, 9, 1], 8)) == [range(3, 5), range(1, 3), range(0, 1)]
    assert list(bucket_ranges([4], 8)) == [range(0, 1)]
    assert list(bucket_ranges([], 8)) == []


def test_a_step_that_begins_over_messages_has_ended(comm: MPI.Intracomm) -> None:
    begun, stepped = (GradientAllreduce(comm, 700, density=DENSITY) for _ in range(2))
    for step in range(3):
        gradient = gradients(comm, step)[0]
        report = begun.begin(gradient)
        stepped.step(gradient)
        assert report.complete and not begun.awaited
        assert np.array_equal(begun.update, stepped.update)


class OnTheStream:
    """As a step that the kernels of GPUs are doing."""

    deferred, aborted = False, False

    def abort(self) -> None:
        self.aborted = True

    def result(self) -> StepResult:
        raise AssertionError("its end would wait for other ranks")


def test_an_error_of_one_bucket_gives_up_those_that_were_begun(
    comm: MPI.Intracomm, reducer: BucketedAllreduce, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer.step(gradients(comm, 0))
    monkeypatch.setattr(reducer, "reads_tensors", lambda number: True)
    handles = [OnTheStream(), OnTheStream()]
    for bucket, handle in zip(reducer.reducers, handles, strict=False):
        monkeypatch.setattr(bucket._executors["oktopk"], "begin", lambda *given, handle=handle: handle)

    def fails(*given: object) -> StepHandle:
        raise MemoryError("a bucket")

    monkeypatch.setattr(reducer.reducers[2]._executors["oktopk"], "begin", fails)
    given = gradients(comm, 1)
    futures = [reducer.start(each) for each in given]
    assert [future.done() for future in futures] == [False, False, True, True, True]
    with pytest.raises(MemoryError):
        reducer.finish()
    assert all(handle.aborted for handle in handles)
    assert all(isinstance(future.exception(), MemoryError) for future in futures)
    assert not any(bucket.awaited for bucket in reducer.reducers)
    for call in (reducer.complete, reducer.state_dict, reducer.gathered_residual):
        with pytest.raises(MemoryError):
            call()


# Through peer memory

LONG = [20_011, 9_000, 3_001]  # by few entries thresholds do not settle
SETTINGS: dict[str, Any] = {
    "density": 0.05, "average": False, "threshold_interval": 6, "boundary_interval": 4, "peer_memory": True,
}  # fmt: skip
TRUSTED = 9
"""Steps that are waited for: the first one needs the host, and eight more do not."""


def cubes(comm: MPI.Intracomm, step: int) -> list[Vector]:
    """Whole numbers with a heavy tail, so that sums are exact."""
    drawn = [np.random.default_rng((comm.rank, step, number)) for number in range(len(LONG))]
    return [
        np.rint(1024 * rng.standard_normal(n) ** 3).astype(np.float32)
        for rng, n in zip(drawn, LONG, strict=True)
    ]


@pytest.mark.parametrize("deferred", [False, True])
def test_buckets_that_end_together_have_the_bits_of_single_steps(
    comm: MPI.Intracomm, cuda: str, deferred: bool
) -> None:
    """Also where a bucket needs the host: its elements become 40 times larger from one step to the next."""
    together = BucketedAllreduce(comm, LONG, device=cuda, deferred=deferred, **SETTINGS)
    alone = Alone(comm, LONG, device=cuda, deferred=deferred, **SETTINGS)
    open_reports, needed_host = 0, 0
    for step in range(18):
        given = cubes(comm, step)
        if step >= 14:
            given[1] *= 40
        futures = [together.start(put(cuda, vector)) for vector in given]
        assert deferred or not any(future.done() for future in futures)
        report = together.finish()
        assert all(future.done() for future in futures)
        open_reports += not report.complete
        alone.check(together, report, [put(cuda, vector) for vector in given])
        together.complete()
        assert report.complete
        needed_host += together.reducers[1].state_dict()["unaided"] == 0
        for single in alone.reducers:
            single.complete()
        assert report.words == sum(each.words for each in report.buckets) > 0 or comm.size == 1
    assert (open_reports > 3) == deferred
    assert needed_host


@pytest.mark.parametrize("nonfinite", ["raise", "skip"])
def test_a_nonfinite_deferred_bucket_is_known_before_another_starts(
    comm: MPI.Intracomm, cuda: str, nonfinite: str
) -> None:
    if comm.size == 1:
        pytest.skip("the smaller buckets of one rank's gradients need the host, which is no deferred step")
    reducer = BucketedAllreduce(comm, LONG, device=cuda, deferred=True, nonfinite=nonfinite, **SETTINGS)
    for step in range(TRUSTED + 1):
        report = reducer.step([put(cuda, vector) for vector in cubes(comm, step)])
    assert not any(bucket.complete for bucket in report.buckets)
    broken = cubes(comm, 20)
    if comm.rank == 0:
        broken[2][:] = np.inf
    report = reducer.step([put(cuda, vector) for vector in broken])
    known = [report.complete]
    assert [get(update).any() for update in reducer.updates] == [True, True, False]
    given = [put(cuda, vector) for vector in cubes(comm, 21)]
    if nonfinite == "raise":
        mass = [get(bucket.residual) for bucket in reducer.reducers]
        with pytest.raises(NonFiniteGradientError, match=rf"step {TRUSTED + 1}: .* rank\(s\) 0") as caught:
            reducer.step(given)
        assert caught.value.step == TRUSTED + 1
        assert all(
            np.array_equal(get(bucket.residual), was)
            for bucket, was in zip(reducer.reducers, mass, strict=True)
        )
    last = reducer.step(given)
    reducer.complete()
    assert last.step == TRUSTED + 2 and not last.skipped
    assert len({bucket.steps for bucket in reducer.reducers}) == 1
    known.append(report.complete)
    assert known == [False, nonfinite == "skip"]
    assert report.skipped == (nonfinite == "skip")
