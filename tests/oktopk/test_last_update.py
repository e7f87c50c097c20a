"""The last update is gone when the next step ends, however that one ends and whichever way the update is written."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from oktopk import METHODS, GradientAllreduce, backend
from oktopk.cpu.update import SparseUpdate
from oktopk.methods.topka import TopkA
from oktopk.selection import Selection
from oktopk.step import Plan, StepResult

pytestmark = pytest.mark.mpi
LENGTH = 5003
WHOLE_LINES, ENTRIES = 0, 1 << 40
"""Bytes from which whole lines are written: all vectors, none."""


def gradient(comm: MPI.Intracomm, step: int) -> NDArray[np.float32]:
    return np.random.default_rng((comm.rank, step)).standard_normal(LENGTH).astype(np.float32)


def updates_of_all_kinds_of_steps(comm: MPI.Intracomm, method: str) -> list[NDArray[np.float32]]:
    """Of dense and sparse steps, one that is skipped, one of a state, one after other writes, one that is taken back."""
    settings: dict[str, Any] = {
        "density": 0.02,
        "dense_warmup_steps": 2,
        "nonfinite": "skip",
        "threshold_interval": 3,
    }
    reducer = GradientAllreduce(comm, LENGTH, method, **settings)
    updates = []
    for step in range(14):
        mine = gradient(comm, step)
        if step == 6:
            mine[7] = np.nan
        report = reducer.step(mine)
        assert report.skipped == (step == 6)
        assert np.count_nonzero(reducer.update) == report.global_nnz
        updates.append(reducer.update.copy())
        if step == 8:
            reducer.load_state_dict(reducer.state_dict())
        if step == 9:
            reducer.writable_update[:] = 7
            reducer.forget_support()
        if step == 11:
            reducer.take_back()
            assert not reducer.update.any()
    return updates


@pytest.mark.parametrize("method", ["oktopk", "topkdsa"])  # the latter may write to the update itself
def test_whole_lines_give_the_bits_of_single_entries(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    calls = []

    class Counted(SparseUpdate):
        def replace(self, *arguments: Any) -> None:
            calls.append(len(arguments))
            super().replace(*arguments)

    monkeypatch.setattr(backend, "SparseUpdate", Counted)
    monkeypatch.setattr(backend, "STREAMED", ENTRIES)
    expected = updates_of_all_kinds_of_steps(comm, method)
    assert not calls
    monkeypatch.setattr(backend, "STREAMED", WHOLE_LINES)
    found = updates_of_all_kinds_of_steps(comm, method)
    assert calls
    assert [update.tobytes() for update in found] == [update.tobytes() for update in expected]


HOSTS: dict[str, Any] = {"levels": "hosts", "ranks_per_host": 1}


@pytest.mark.parametrize("streamed", [WHOLE_LINES, ENTRIES])
@pytest.mark.parametrize(
    ("method", "lost_in", "settings", "error"),
    [
        ("topka", "allgatherv", {}, MemoryError),
        ("topka", "allgatherv", {}, KeyboardInterrupt),
        ("oktopk", "split_and_reduce", {}, MemoryError),
        ("oktopk", "balance_and_allgatherv", {}, RuntimeError),
        ("oktopk", "split_and_reduce", HOSTS, RuntimeError),
        ("oktopk", "balance_and_allgatherv", HOSTS, MemoryError),
    ],
)
def test_a_step_that_fails_leaves_no_update(
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
    streamed: int,
    method: str,
    lost_in: str,
    settings: dict[str, Any],
    error: type[BaseException],
) -> None:
    """Whether it has cleared the last one by then or not."""

    def lost(*arguments: Any, **more: Any) -> None:
        raise error

    monkeypatch.setattr(backend, "STREAMED", streamed)
    reducer = GradientAllreduce(comm, LENGTH, method, density=0.02, **settings)
    reducer.step(gradient(comm, 0))
    assert reducer.update.any()
    with monkeypatch.context() as failing:
        failing.setattr(f"oktopk.methods.{method}.{lost_in}", lost)
        with pytest.raises(error):
            reducer.step(gradient(comm, 1))
    assert not reducer.update.any()
    before = reducer.gathered_residual()
    reducer.take_back()
    assert np.array_equal(reducer.gathered_residual(), before)
    report = reducer.step(gradient(comm, 2))
    assert np.count_nonzero(reducer.update) == report.global_nnz


class Writer(TopkA):
    """Writes the number of the step to its element, and no entries; TopkA, which it is derived from, writes to no `out`."""

    name = "writer"
    steps = 0

    def exchange(self, selection: Selection, out: NDArray[np.float32] | None, plan: Plan) -> StepResult:
        out[self.steps] = self.steps + 1  # type: ignore[index]
        self.steps += 1
        return self.result(selection, None)


class DeclaredWriter(Writer):
    writes_out = True


class Nothing(TopkA):
    name = "nothing"

    def exchange(self, selection: Selection, out: NDArray[np.float32] | None, plan: Plan) -> StepResult:
        return self.result(selection, None)


@pytest.mark.parametrize("streamed", [WHOLE_LINES, ENTRIES])
def test_a_method_that_writes_the_update_finds_zeros(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, streamed: int
) -> None:
    monkeypatch.setattr(backend, "STREAMED", streamed)
    refused = {Writer: "NoneType", Nothing: "nothing returned no update, and its writes_out is False"}
    for method, problem in refused.items():
        monkeypatch.setitem(METHODS, method.name, method)
        reducer = GradientAllreduce(comm, LENGTH, method.name, density=0.02)
        with pytest.raises(TypeError, match=problem):
            reducer.step(gradient(comm, 0))
    monkeypatch.setitem(METHODS, "writer", DeclaredWriter)
    reducer = GradientAllreduce(comm, LENGTH, "writer", density=0.02)
    for step in range(3):
        reducer.step(gradient(comm, step))
        assert np.flatnonzero(reducer.update).tolist() == [step]
        assert reducer.update[step] == step + 1
