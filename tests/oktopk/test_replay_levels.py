"""The replay's record of a step in two levels is that of a real one, over MPI."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives.mpi import MpiTransport
from oktopk import GradientAllreduce, Settings
from oktopk.replay.recording import Step, record_mean, record_step
from oktopk.replay.valueless import ALLGATHER, ALLREDUCE, ALLTOALL, COMPUTE, RECEIVE, SEND, WAIT, WORK, Op

pytestmark = [pytest.mark.mpi(min_size=4), pytest.mark.also(ranks=8)]


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What this rank sends, receives, waits for and agrees on, over whatever transport, with numbers among all ranks."""
    entries: list[tuple[Any, ...]] = []
    numbers: dict[int, int] = {}  # of requests that are not over: the entry that made each

    def messages(kind: int, name: str) -> None:
        original = getattr(MpiTransport, name)

        def counted(self: MpiTransport, array: Any, other: int, *more: Any) -> Any:
            requests = original(self, array, other, *more)
            for request in requests:
                numbers[id(request)] = len(entries)
                entries.append((kind, self.ranks[other], array.nbytes))
            return requests

        monkeypatch.setattr(MpiTransport, name, counted)

    def control(kind: int, name: str) -> None:
        original = getattr(MpiTransport, name)

        def counted(self: MpiTransport, array: Any) -> Any:
            if self.size > 1:
                row = array[0] if kind == ALLTOALL else array
                entries.append((kind, tuple(self.ranks), row.nbytes))
            return original(self, array)

        monkeypatch.setattr(MpiTransport, name, counted)

    wait = MpiTransport.wait

    def waited(self: MpiTransport, requests: Any) -> None:
        if requests:
            entries.append((WAIT, tuple(numbers[id(request)] for request in requests), 0))
        wait(self, requests)

    messages(SEND, "send")
    messages(RECEIVE, "receive")
    for kind, name in ((ALLTOALL, "alltoall"), (ALLGATHER, "allgather"), (ALLREDUCE, "allreduce")):
        control(kind, f"{name}_control")
    monkeypatch.setattr(MpiTransport, "wait", waited)
    return entries


def of_record(ops: list[Op], rank: int) -> list[tuple[Any, ...]]:
    """A record without its kernels, likewise."""
    kept = [number for number, op in enumerate(ops) if op.kind != COMPUTE]
    places = {number: place for place, number in enumerate(kept)}
    found: list[tuple[Any, ...]] = []
    for op in (ops[number] for number in kept):
        members = tuple(op.group.rank(place, rank) for place in range(op.group.size))
        if op.kind == WAIT:
            found.append((WAIT, tuple(places[number] for number in op.waits), 0))
        elif op.kind in (SEND, RECEIVE):
            found.append((op.kind, members[op.peer], op.amount))
        else:
            found.append((op.kind, members, op.amount))
    return found


@pytest.mark.parametrize(
    ("method", "wire", "updates", "exchange"),
    [
        ("oktopk", "float32", False, "direct"),
        ("oktopk", "float32", False, "grid"),
        ("union", "int4", False, "direct"),
        ("oktopk", "int4", True, "direct"),
    ],
)
def test_a_step_in_two_levels_is_recorded_as_it_runs(
    comm: MPI.Intracomm, recorded: list[tuple[Any, ...]], method: str, wire: str, updates: bool, exchange: str
) -> None:
    if comm.size % 2:
        pytest.skip("hosts of two ranks")
    length, density = 1 << 18, 0.02  # blocks that shards share equally
    chosen: dict[str, Any] = {"density": density, "wire": wire, "levels": "hosts", "exchange": exchange}
    reducer = GradientAllreduce(comm, length, method, ranks_per_host=2, **chosen)
    drawn = np.random.default_rng(comm.rank)
    whole = np.zeros(length, np.float32)
    moved: Any = reducer.displacement([length], "float32", whole, 0.5) if updates else None
    group: Any = reducer.group
    real: list[tuple[Any, ...]] = []
    for _ in range(8):
        gradient = (drawn.standard_normal(length) * np.exp(drawn.standard_normal(length))).astype(np.float32)
        recorded.clear()
        if updates:
            moved.vector[:] = gradient[: len(moved.vector)]
        report = reducer.step(moved if updates else gradient)
        if updates:
            group.share_shards(reducer.residual, whole)
        seen = [*recorded]
        if not any(comm.allgather(report.local_exact or (method == "oktopk" and report.global_exact))):
            real = seen
    reducer.close()
    assert real, "no step was regular on all ranks"
    hosts = comm.size // 2
    step = Step(method, length, hosts, 2, Settings(**chosen), updates=updates)
    ours = of_record(record_step(step, comm.rank).ops, comm.rank)

    def shape(entries: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        return [(kind, who, 0 if kind in (SEND, RECEIVE) else nbytes) for kind, who, nbytes in entries]

    assert shape(ours) == shape(real)
    sent = [sum(nbytes for kind, _, nbytes in each if kind == SEND) for each in (ours, real)]
    assert sent[0] == pytest.approx(sent[1], rel=0.15)


def test_the_mean_of_a_hosts_gradients_is_recorded_as_it_runs(
    comm: MPI.Intracomm, recorded: list[tuple[Any, ...]]
) -> None:
    if comm.size % 2:
        pytest.skip("hosts of two ranks")
    length = 1 << 18
    reducer = GradientAllreduce(comm, length, "oktopk", ranks_per_host=2, density=0.02)
    recorded.clear()
    reducer.mean_in_host()
    real = [*recorded]
    reducer.close()
    record = record_mean(Step("oktopk", length, comm.size // 2, 2), comm.rank)
    assert of_record(record.ops, comm.rank) == real
    # each rank reads half of the other's gradient, then the other half of the mean
    read = sum(op.amount for op in record.ops if op.kind == COMPUTE and WORK[op.peer] == "peer")
    assert read == length
