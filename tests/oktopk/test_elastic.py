"""What `redistribute` reads is compared: residuals are neither lost nor doubled in silence."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from oktopk import GradientAllreduce
from oktopk.buckets import BucketedAllreduce
from oktopk.elastic import inherited_ranks, redistribute

LENGTH = 200
SAVED = 4

Read = Callable[[int], dict[str, Any]]


def flat_states(comm: MPI.Intracomm) -> list[dict[str, Any]]:
    """The states of four ranks, whose residuals are 1, 10, 100 and 1000."""
    reducer = GradientAllreduce(comm, LENGTH, density=0.05)
    reducer.step(np.random.default_rng(comm.rank).standard_normal(LENGTH).astype(np.float32))
    state = comm.bcast(reducer.state_dict())
    reducer.close()
    return [
        {**state, "rank": rank, "ranks": SAVED, "residual": np.full(LENGTH, 10.0**rank, np.float32)}
        for rank in range(SAVED)
    ]


def changed(states: list[dict[str, Any]], **values: Any) -> Read:
    """Reads the states, that of rank 3 with other values."""
    return lambda rank: states[rank] | (values if rank == 3 else {})


def without(state: dict[str, Any], name: str) -> dict[str, Any]:
    return {key: value for key, value in state.items() if key != name}


@pytest.mark.mpi
def test_states_that_do_not_belong_together_are_refused(comm: MPI.Intracomm) -> None:
    states = flat_states(comm)
    short, double = np.ones(1, np.float32), np.ones(LENGTH)
    cases: dict[str, tuple[Read, int]] = {
        r"rank \d: it is of rank \d of 4, not of rank \d of 3": (states.__getitem__, 3),
        r"rank \d: .* of 4, not of rank 0 of 2305843009213693952": (lambda _: states[0], 1 << 61),
        r"saved rank [1-3]: it is of rank 0 of 4": (lambda _: states[0], SAVED),
        "has steps 91, that of saved rank 0 1": (changed(states, steps=91), SAVED),
        "3 has method 'topka', that of saved rank 0 'oktopk'": (changed(states, method="topka"), SAVED),
        "saved rank 3 has wire 'int4', that of saved rank 0": (changed(states, wire="int4"), SAVED),
        r"saved rank 3 has hosts \[0, 0, 1, 1\]": (
            changed(states, hosts=[0, 0, 1, 1], residual=np.ones(LENGTH // 2, np.float32)),
            SAVED,
        ),
        r"its hosts \[0\] are not those of 4 ranks": (changed(states, hosts=[0]), SAVED),
        r"its residual is float32\[1\], not float32\[200\]": (changed(states, residual=short), SAVED),
        r"its residual is float64\[200\]": (changed(states, residual=double), SAVED),
        "saved rank 3 has residual None": (changed(states, residual=None), SAVED),
        "saved rank 3 is damaged: KeyError 'residual'": (
            lambda rank: without(states[3], "residual") if rank == 3 else states[rank],
            SAVED,
        ),
        "saved rank 3 cannot be read: TypeError": (lambda rank: None if rank == 3 else states[rank], SAVED),  # type: ignore[return-value, dict-item]
        "saved rank 3 cannot be read: IndexError": (states[:3].__getitem__, SAVED),
    }
    reducer = GradientAllreduce(comm, LENGTH, density=0.05)
    for problem, (read, saved) in cases.items():
        state = redistribute(read, saved, comm.rank, comm.size)
        # on as many ranks as saved or more each reads one state, and all are compared when they are loaded
        with pytest.raises(ValueError, match=problem if comm.size in (1, 3) else None):
            reducer.load_state_dict(state)
    assert reducer.steps == 0
    reducer.load_state_dict(redistribute(states.__getitem__, SAVED, comm.rank, comm.size))
    assert comm.allreduce(float(reducer.residual[0])) == 1111.0  # type: ignore[index]


@pytest.mark.mpi
def test_a_bucket_of_another_state_is_named(comm: MPI.Intracomm) -> None:
    made = BucketedAllreduce(comm, [30, 20], density=0.05)
    made.step([np.ones(30, np.float32), np.ones(20, np.float32)])
    saved = comm.allgather(made.state_dict())
    saved += [saved[0]] * 2
    ranks = len(saved)
    for rank, state in enumerate(saved):
        buckets = {n: bucket | {"rank": rank, "ranks": ranks} for n, bucket in state["buckets"].items()}
        saved[rank] = {**state, "buckets": buckets}
    made.load_state_dict(redistribute(saved.__getitem__, ranks, comm.rank, comm.size))
    saved[-1]["buckets"]["1"]["steps"] = 7
    with pytest.raises(ValueError, match=f"saved rank {ranks - 1} has bucket 1: steps 7, that of saved rank"):
        made.load_state_dict(redistribute(saved.__getitem__, ranks, comm.rank, comm.size))


@pytest.mark.parametrize(
    "numbers", [(0, 0, 1), (0, 1, 0), (1, 1, 1), (-1, 1, 1), (0, 1.5, 1), (0, 1, "4"), (True, 2, 2)]
)
def test_numbers_that_are_none_of_ranks_are_refused(numbers: tuple[Any, Any, Any]) -> None:
    with pytest.raises(ValueError, match="rank"):
        inherited_ranks(*numbers)


def test_every_saved_rank_is_inherited_once() -> None:
    for saved in range(1, 10):
        for ranks in range(1, 10):
            heirs = [list(inherited_ranks(rank, ranks, saved)) for rank in range(ranks)]
            assert sorted(rank for theirs in heirs for rank in theirs) == list(range(saved))


@pytest.mark.mpi
@pytest.mark.parametrize("method", ["oktopk", "topka", "gtopk"])
def test_another_number_of_ranks_keeps_the_sum_of_the_residuals(comm: MPI.Intracomm, method: str) -> None:
    """All ranks save; the first half of them continue, and then all again."""
    length = 1000
    # small integers, so that sums are exact
    random = np.random.default_rng(comm.rank)
    settings: dict[str, Any] = {"density": 0.05, "average": False}
    before = GradientAllreduce(comm, length, method, **settings)
    for _ in range(3):
        before.step(random.integers(-8, 9, length).astype(np.float32))
    saved = before.state_dict()
    total = comm.allreduce(saved["residual"])
    before.close()
    few = max(1, comm.size // 2)
    group = comm.Split(int(comm.rank < few), comm.rank)
    everyone = comm.allgather(saved)
    if comm.rank < few:
        middle = GradientAllreduce(group, length, method, **settings)
        middle.load_state_dict(moved(everyone, group))
        assert np.array_equal(group.allreduce(middle.state_dict()["residual"]), total)
        middle.step(np.zeros(length, np.float32))
        remaining = group.allreduce(middle.state_dict()["residual"])
        assert np.array_equal(remaining + middle.update, total)
        saved = middle.state_dict()
        middle.close()
    fewer = [state for state in comm.allgather(saved if comm.rank < few else None) if state is not None]
    after = GradientAllreduce(comm, length, method, **settings)
    after.load_state_dict(moved(fewer, comm))
    kept = after.state_dict()["residual"]
    kept = np.zeros(length, np.float32) if kept is None else kept
    assert np.array_equal(comm.allreduce(kept), sum(state["residual"] for state in fewer))
    report = after.step(np.ones(length, np.float32))
    assert report.exact or comm.size == 1  # where there is one rank as before, it goes on bit for bit
    after.close()
    group.Free()


def moved(saved: list[dict[str, Any]], comm: MPI.Intracomm) -> dict[str, Any]:
    return redistribute(saved.__getitem__, len(saved), comm.rank, comm.size)


def test_fewer_ranks_sum_residuals_and_more_ranks_begin_without() -> None:
    own = {"residual": np.full(5, 1.0, np.float32), "methods": {}, "last_k": 3}

    def read(rank: int) -> dict[str, Any]:
        return {"reducer": own}

    alone, beyond, as_before = (
        redistribute(read, 3, rank, ranks)["reducer"] for rank, ranks in ((0, 1), (3, 4), (1, 3))
    )
    assert alone["residual"].tolist() == [3.0] * 5
    assert (beyond["residual"].tolist(), beyond["last_k"]) == ([0.0] * 5, None)
    assert as_before["last_k"] == 3
