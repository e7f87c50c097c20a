"""Steps through peer memory that a rank does not take part in: every rank raises, and none waits for ever."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from oktopk import GradientAllreduce, MissingRanksError
from tests.devices import get, on_gpus, put, use
from tests.peers import may_defer

pytestmark = [pytest.mark.mpi(min_size=2), on_gpus, pytest.mark.host_cuda(ranks=3)]
LENGTH = 20_000
TIMEOUT = 3.0
"""Seconds: longer than ranks that share two cores are apart."""


def reducer_of(comm: MPI.Intracomm, method: str = "oktopk", **settings: Any) -> GradientAllreduce:
    use("cuda", comm)
    chosen: dict[str, Any] = {"density": 0.02, "threshold_interval": 4, "timeout": 600.0} | settings
    reducer = GradientAllreduce(comm, LENGTH, method, device="cuda", peer_memory=True, **chosen)
    assert reducer.p2p_unavailable_reason == ""
    return reducer


def gradients(comm: MPI.Intracomm) -> Any:
    rng = np.random.default_rng((comm.rank, 5))
    while True:
        yield put("cuda", rng.standard_normal(LENGTH).astype(np.float32) ** 3)


class BrokenError(Exception):
    """What one rank raises."""


def raise_in_launch(reducer: GradientAllreduce, monkeypatch: pytest.MonkeyPatch, exact: bool) -> None:
    """This rank's next launch fails; of a step that goes exact, after its selection was signalled."""
    from oktopk.cuda.p2p_launches import P2PLaunches
    from oktopk.cuda.step_graphs import StepGraphs

    def broken(*_: Any, **__: Any) -> None:
        raise BrokenError

    if reducer.method == "dense":
        monkeypatch.setattr(reducer._methods["dense"].kernels, "start_accumulate", broken)
        return
    for executor in reducer._executors.values():  # a captured step fails as a whole
        if executor._launches is not None:  # type: ignore[attr-defined]
            executor.launches._graphs.clear()  # type: ignore[attr-defined]
    monkeypatch.setattr(StepGraphs, "_second", lambda graphs, key, enqueue: None)
    monkeypatch.setattr(P2PLaunches, "_enqueue_exact_sums" if exact else "_set_step", broken)


@pytest.mark.parametrize(
    ("method", "steps", "exact"),
    [
        *(("oktopk", *given) for given in ((0, False), (1, True), (3, False), (3, True))),
        ("dense", 2, False),
    ],
)
def test_a_rank_that_raises_before_its_launch_is_named_at_once(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, method: str, steps: int, exact: bool
) -> None:
    """In the first step, one that is waited for and a deferred one; halfway, where a step goes exact."""
    culprit = comm.size - 1
    # in the last step the exact global threshold is computed, where `exact` asks for it
    interval = steps if exact and steps else 100
    reducer = reducer_of(comm, method, deferred=steps == 3, threshold_interval=interval)
    gradient = gradients(comm)
    for _ in range(steps):
        may_defer(reducer)
        last = reducer.step(next(gradient))
    assert not steps or last.complete == (steps < 3)
    may_defer(reducer)
    state = reducer.state_dict()
    comm.Barrier()
    if comm.rank == culprit:
        raise_in_launch(reducer, monkeypatch, exact)
    begun = time.monotonic()
    with pytest.raises(BrokenError if comm.rank == culprit else RuntimeError) as caught:
        reducer.step(next(gradient))
        reducer.complete()
    if comm.rank != culprit:
        assert f"rank {culprit} raised an error of its own" in str(caught.value)
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match=f"rank {culprit} raised"):  # nothing goes on after that
        reducer.step(next(gradient))
        reducer.complete()
    with pytest.raises(RuntimeError, match=f"rank {culprit} raised"):
        reducer.state_dict()
    comm.Barrier()
    reducer.load_state_dict(state)  # which all ranks can go on from
    report = reducer.step(next(gradient))
    reducer.complete()
    assert report.global_nnz > 0
    assert len(set(comm.allgather(get(reducer.update).tobytes()))) == 1
    reducer.close()
    assert time.monotonic() - begun < 60
    comm.Barrier()


def test_a_rank_that_raises_before_a_second_launch_is_named_by_all(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    from oktopk.cuda.p2p_launches import P2PLaunches

    launch = P2PLaunches.launch

    def broken(launches: Any, *arguments: Any, selected: int | None, **more: Any) -> int:
        if selected is not None:
            raise BrokenError
        return launch(launches, *arguments, selected=selected, **more)

    reducer = reducer_of(comm, threshold_interval=100)
    gradient = gradients(comm)
    for _ in range(3):
        reducer.step(next(gradient))
    # all that is not zero reaches this: more than the host lets pass
    reducer._methods["oktopk"].selection.bits = 2  # type: ignore[attr-defined]
    culprit = comm.size - 1
    if comm.rank == culprit:
        monkeypatch.setattr(P2PLaunches, "launch", broken)
    with pytest.raises(BrokenError if comm.rank == culprit else RuntimeError) as caught:
        reducer.step(next(gradient))
        reducer.step(next(gradient))
    if comm.rank != culprit:
        assert f"rank {culprit} raised an error of its own" in str(caught.value)
    monkeypatch.undo()
    reducer.close()
    comm.Barrier()


@pytest.mark.parametrize("error", [TypeError("no such field"), MemoryError("GPU 0 is out of memory")])
def test_an_error_of_laying_out_a_step_keeps_its_words(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    from oktopk.cuda.p2p_launches import P2PLaunches

    def broken(*_: Any, **__: Any) -> None:
        raise error

    reducer, culprit = reducer_of(comm), comm.size - 1
    if comm.rank == culprit:
        monkeypatch.setattr(P2PLaunches, "_lay_out", broken)
    wanted = f"^steps over symmetric memory cannot be laid out: rank {culprit}: {error}$"
    with pytest.raises(RuntimeError, match=wanted):
        reducer.step(next(gradients(comm)))
    reducer.close()
    comm.Barrier()


def test_a_callers_error_on_one_rank_ends_the_step_on_all(comm: MPI.Intracomm) -> None:
    reducer = reducer_of(comm, deferred=True)
    gradient = gradients(comm)
    for _ in range(2):
        reducer.step(next(gradient))
    may_defer(reducer)
    culprit = comm.size - 1
    if comm.rank == culprit:
        with pytest.raises(ValueError, match="^unfrozen$"):
            reducer.step(next(gradient), problem="unfrozen")
    else:
        with pytest.raises(RuntimeError, match=f"rank {culprit} raised an error of its own"):
            reducer.step(next(gradient))
            reducer.complete()
    reducer.close()
    comm.Barrier()


@pytest.mark.parametrize("settings", [{}, {"density_warmup_steps": 8}], ids=["", "k changes"])
def test_an_unmet_abort_stops_the_next_step_and_the_state(
    comm: MPI.Intracomm, settings: dict[str, Any]
) -> None:
    reducer = reducer_of(comm, **settings)
    gradient = gradients(comm)
    for _ in range(2):
        reducer.step(next(gradient))
    comm.Barrier()
    if comm.rank == 0:  # as a kernel that waited too long, after this rank's host had read the decision
        reducer._executors["oktopk"].launches.abort(reducer.transport.device.epoch)  # type: ignore[attr-defined]
    comm.Barrier()
    if not settings:
        with pytest.raises(RuntimeError, match="cannot go on"):
            reducer.state_dict()
    with pytest.raises(RuntimeError, match="a rank did not finish its step" if settings else "cannot go on"):
        reducer.step(next(gradient))
    reducer.close()
    comm.Barrier()


def test_all_others_name_a_rank_that_does_not_come_in_time(comm: MPI.Intracomm) -> None:
    reducer = reducer_of(comm, timeout=TIMEOUT)
    gradient = gradients(comm)
    for _ in range(5):
        reducer.step(next(gradient))
    comm.Barrier()
    begun = time.monotonic()
    if comm.rank:
        with pytest.raises(RuntimeError, match=f"rank 0 did not come within {TIMEOUT:g} s"):
            reducer.step(next(gradient))
        assert TIMEOUT <= time.monotonic() - begun < 60
    comm.Barrier()
    if comm.rank == 0:  # which comes too late
        with pytest.raises(RuntimeError, match=f"rank 0 did not come within {TIMEOUT:g} s"):
            reducer.step(next(gradient))
    reducer.close()
    comm.Barrier()


@pytest.mark.parametrize("steps", [2, 3], ids=["renews regions", "renews none"])
def test_a_rank_that_alone_skips_a_step_raises_as_the_others_do(comm: MPI.Intracomm, steps: int) -> None:
    reducer = reducer_of(comm, timeout=TIMEOUT)
    gradient = gradients(comm)
    for _ in range(steps):
        reducer.step(next(gradient))
    comm.Barrier()
    missing = ", ".join(str(rank) for rank in range(1, comm.size))
    # over messages the rank that gives up first tells all; a kernel names who is behind
    others = r"^step 2: rank\(s\) 0 called skip_together before step 2 instead"
    own = rf"^skip_together before step {steps}: rank\(s\) {missing} "
    if steps == 2:
        others = own = f"{others}|{own}called step 2 instead"
    else:  # the others close once they have raised, perhaps before this rank gives up
        others, own = (
            f"rank 0 did not come within {TIMEOUT:g} s",
            own + "(called close instead, and )?did not come",
        )
    if comm.rank:
        with pytest.raises(RuntimeError, match=others):
            reducer.step(next(gradient))
    else:
        with pytest.raises(MissingRanksError, match=own):
            reducer.skip_together(False)
    reducer.close()
    comm.Barrier()


def test_a_rank_missed_over_messages_does_not_hold_the_others_in_close(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.limit.ANSWER", 1.5)
    reducer = reducer_of(comm, timeout=0.5)
    comm.Barrier()
    if comm.rank == 0:  # it comes when the others have closed
        end = time.monotonic() + 60
        while not all(comm.iprobe(source) for source in range(1, comm.size)):
            assert time.monotonic() < end, "the others wait in close"
            time.sleep(0.01)
        for source in range(1, comm.size):
            comm.recv(source=source)
    with pytest.raises(
        MissingRanksError, match=r"^skip_together before step 0: rank\(s\) 0.* did not come within 0\.5 s"
    ):
        reducer.skip_together(False)
    reducer.close()
    if comm.rank:
        comm.send("closed", 0)
    comm.Barrier()
