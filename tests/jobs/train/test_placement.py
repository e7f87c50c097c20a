"""Where a rank computes, and how the time of a step is read off the device's clock afterwards."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import pytest
import torch
from mpi4py import MPI

import collectives
from jobs.cluster.agreement import Refused
from jobs.run.columns import PHASES, gather
from jobs.train.placement import Placement, find_placement
from jobs.train.timing import PhaseTimer, TimedStep, measure
from oktopk import StepReport
from oktopk.results import Measures


def report(**seconds: float) -> StepReport:
    return StepReport(0, "dense", 1, 1, seconds, local_exact=True, local_nnz=1, global_nnz=1)


class Clock(Placement):
    """A clock that is told the time."""

    def __init__(self, times: Sequence[float]) -> None:
        self._times = iter(times)

    def mark(self) -> float:
        return next(self._times)


def timed(times: Sequence[float], stages: dict[str, float], losses: Sequence[float]) -> TimedStep:
    timer = PhaseTimer(Clock(times))
    for phase in PHASES:
        with timer.phase(phase):
            pass
    return TimedStep(report(**stages), [torch.tensor(loss) for loss in losses], timer, 0.5)


def test_phases_and_stages_are_recorded_as_measured() -> None:
    steps = [
        timed([0, 1, 3, 6, 10, 15], {"select": 2.0, "apply": 1.0}, [1.0]),  # the GPU went on after the host
        timed(
            [20, 20, 21, 22, 23, 24], {"select": 2.0, "reduce": 0.5}, [1.0, 3.0]
        ),  # select waited for backward
    ]
    first, second = measured = measure(steps, began=-5.0)
    assert first.seconds == {"data": 1, "forward": 2, "backward": 3, "reduction": 4, "optimizer": 5}
    assert [step.report for step in measured] == [step.report for step in steps]
    assert first.report.seconds == {"select": 2.0, "apply": 1.0}
    assert (first.elapsed, second.elapsed) == (20, 29)
    found = gather(MPI.COMM_SELF, measured)
    assert found is not None
    assert {name: values.tolist() for name, values in found.stages.items()} == {
        "select": [2.0, 2.0],
        "apply": [1.0, 0.0],
        "reduce": [0.0, 0.5],
    }
    assert found.steps["seconds_reduction"].tolist() == [4.0, 1.0]
    assert found.steps["seconds_rest"].tolist() == [1.0, -1.5]
    assert found.steps["loss"].tolist() == [1.0, 2.0]
    assert measure([], 0.0) == []


def test_what_measuring_took_is_in_no_phase() -> None:
    step = timed([0, 0, 0, 0, 10, 10], {"select": 2.0}, [1.0])
    step.report.measures = Measures(1.0, 2.0, 1.0, 1.0, 4.0, 2.0, seconds=7.0)
    found = gather(MPI.COMM_SELF, measure([step], 0.0))
    assert found is not None
    assert found.steps["seconds_reduction"].tolist() == [3.0]
    assert found.steps["seconds_rest"].tolist() == [1.0]
    assert found.measures["seconds"].tolist() == [7.0]
    assert found.measures["xi"].tolist() == found.measures["residual_over_update"].tolist() == [0.5]


@pytest.mark.mpi
def test_columns_are_reduced_over_the_ranks_as_their_table_says(comm: MPI.Intracomm) -> None:
    mine = timed([0, 0, 0, 0, 1, 1], {f"of rank {comm.rank}": 1.0}, [float(comm.rank)])
    mine.report.words, mine.report.local_exact = 10 * comm.rank, comm.rank == comm.size - 1
    found = gather(comm, measure([mine], -float(comm.rank)))
    assert (found is None) == (comm.rank > 0)
    if found is None:
        return
    last = comm.size - 1
    assert found.steps["words"] == 10 * last / 2
    assert found.steps["words_busiest"] == 10 * last
    assert found.steps["loss"] == last / 2
    assert found.steps["elapsed"] == 1.0
    assert found.steps["local_exact"] == 1 / comm.size
    assert found.steps["global_exact"] == 0
    assert {name: values[0] for name, values in found.stages.items()} == {
        f"of rank {rank}": 1 / comm.size for rank in range(comm.size)
    }


def test_a_phase_that_comes_twice_counts_twice() -> None:
    timer = PhaseTimer(Clock([0, 1, 3, 6, 10, 15]))
    for phase in ("data", "forward", "data", "forward", "reduction"):
        with timer.phase(phase):
            pass
    (step,) = measure([TimedStep(report(), [torch.tensor(1.0)], timer, 0.1)], 0.0)
    assert step.seconds == {"data": 4, "forward": 6, "backward": 0, "reduction": 5, "optimizer": 0}


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_cuda_is_refused_and_auto_cpu() -> None:
    assert find_placement("auto", MPI.COMM_SELF).device.type == "cpu"
    with pytest.raises(Refused, match=r"training\.device is 'cuda', but torch .* sees no GPU"):
        find_placement("cuda", MPI.COMM_SELF)


def test_a_gpu_without_cupy_is_refused_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setitem(sys.modules, "cupy", None)
    # where an earlier test has imported it: `from collectives import` would find it in the package
    monkeypatch.delitem(sys.modules, "collectives.mpi_cuda", raising=False)
    monkeypatch.delattr(collectives, "mpi_cuda", raising=False)
    for wanted in ("auto", "cuda"):
        with pytest.raises(Refused, match="CuPy is not installed.* pip install '"):
            find_placement(wanted, MPI.COMM_SELF)
    assert find_placement("cpu", MPI.COMM_SELF).device.type == "cpu"


@pytest.mark.mpi(min_size=2)
def test_ranks_on_different_kinds_of_device_are_refused(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: comm.rank == 0)
    with pytest.raises(Refused, match=r"'auto' means different devices \(rank 0: cuda, rank 1: cpu"):
        find_placement("auto", comm)


@pytest.mark.mpi
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_ranks_take_the_gpus_of_their_host_in_turn(comm: MPI.Intracomm) -> None:
    place = find_placement("cuda", comm)
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    assert place.device.index == host.rank % torch.cuda.device_count() == torch.cuda.current_device()
    host.Free()
    start = place.mark()
    torch.cuda._sleep(100_000_000)
    end = place.mark()
    asked = time.perf_counter()
    began, ended = place.read([start, end])
    assert 0.01 < ended - began < 1
    assert ended >= asked  # the marks were not waited for when they were set
