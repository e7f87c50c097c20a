"""Deferred steps: what the host learns a step later, and what becomes of those that the device cannot end by itself."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.sparse import ENTRY, SparseVector
from collectives.transport import FlaggedRanksError
from oktopk import METHODS, GradientAllreduce, NonFiniteGradientError, StepReport
from oktopk.methods.base import Deferred, Method, Plan, Reduction

pytestmark = pytest.mark.mpi

LENGTH = 64
TRUSTED = 8


class Late(Method):
    """Sums densely, and tells how it went when it is asked; as the script says, one word a step after the first ones."""

    name = "late"
    script: ClassVar[list[str]] = []
    plans: ClassVar[list[Plan]] = []

    def reduce(
        self,
        gradient: NDArray[np.float32],
        residual: NDArray[np.float32] | None,
        out: NDArray[np.float32],
        plan: Plan,
    ) -> Reduction | Deferred:
        self.plans.append(plan)
        plan.clear_out()
        outcome = self.script[len(self.plans) - 1]
        if outcome == "done":
            self.transport.comm.Allreduce(gradient, out)  # type: ignore[attr-defined]
            self.transport.traffic.count(28, 0)
        everything = np.zeros(self.length, ENTRY)
        everything["index"], everything["value"] = np.arange(self.length), out
        update = SparseVector(everything, self.length)
        reduction = Reduction(update, update, (), exact=False, local_nnz=3, global_nnz=5, finish=lambda: None)

        def settle() -> Reduction | None:
            if outcome == "flagged":
                raise FlaggedRanksError([0])
            return reduction if outcome == "done" else None

        return Deferred(settle) if plan.deferrable else reduction


@pytest.fixture
def late(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Callable[..., GradientAllreduce]:
    def make(script: str, **settings: Any) -> GradientAllreduce:
        monkeypatch.setitem(METHODS, "late", Late)
        monkeypatch.setattr(Late, "plans", [])
        monkeypatch.setattr(Late, "script", [*["done"] * TRUSTED, *script.split()])
        chosen: dict[str, Any] = {"average": False, "deferred": True} | settings
        reducer = GradientAllreduce(comm, LENGTH, "late", **chosen)
        assert all(reducer.step(GRADIENT).complete for _ in range(TRUSTED))
        return reducer

    return make


GRADIENT = np.ones(LENGTH, np.float32)


def known(*reports: StepReport) -> list[bool]:
    return [report.complete for report in reports]


def test_a_report_is_complete_when_the_next_step_begins(late: Callable[..., GradientAllreduce]) -> None:
    reducer = late("done done done")
    first = reducer.step(GRADIENT)
    assert known(first) == [False] and (first.step, first.k, first.global_nnz) == (TRUSTED, 1, 0)
    assert (reducer.update == reducer.transport.size).all()
    second = reducer.step(GRADIENT)
    assert known(first, second) == [True, False]
    assert (first.local_nnz, first.global_nnz, first.words) == (3, 5, 7)
    reducer.complete()
    reducer.complete()
    assert known(second) == [True] and (second.step, second.words, second.skipped) == (TRUSTED + 1, 7, False)


def test_a_state_knows_how_the_last_step_went(late: Callable[..., GradientAllreduce]) -> None:
    reducer = late("done stopped")
    reducer.step(GRADIENT)
    assert reducer.state_dict()["unaided"] == TRUSTED
    report = reducer.step(GRADIENT)
    assert reducer.state_dict()["unaided"] == 0
    assert report.complete


@pytest.mark.parametrize("resumed", [False, True])
def test_after_a_step_that_stopped_the_host_waits_for_some(
    late: Callable[..., GradientAllreduce], comm: MPI.Intracomm, resumed: bool
) -> None:
    reducer = late(" ".join(["done", "stopped", *["done"] * (TRUSTED + 2)]))
    reports = []
    for step in range(TRUSTED + 4):
        reports.append(reducer.step(GRADIENT))
        assert reducer.update.any() == (step != 1)
        if resumed and step == 1:
            state = reducer.state_dict()
            reducer = GradientAllreduce(comm, LENGTH, "late", average=False, deferred=True)
            reducer.load_state_dict(state)
    waited = [False] * TRUSTED
    assert [plan.deferrable for plan in Late.plans] == [*waited, True, True, *waited, True, True]
    stopped = reports[1]
    assert stopped.complete and not stopped.skipped and (stopped.global_nnz, stopped.words) == (0, 0)
    assert known(*reports) == [True] * (TRUSTED + 3) + [False]


def test_a_gradient_that_is_not_finite_raises_before_the_next_one_is_taken(
    late: Callable[..., GradientAllreduce],
) -> None:
    reducer = late("done flagged done")
    reducer.step(GRADIENT)
    reducer.step(GRADIENT)
    with pytest.raises(NonFiniteGradientError, match=r"step 9: .* rank\(s\) 0$"):
        reducer.step(GRADIENT)
    assert reducer.steps == len(Late.plans) == 10
    report = reducer.step(GRADIENT)
    assert report.step == 10 and Late.plans[10].exact and Late.plans[10].new_boundaries


def test_a_skipped_step_is_known_as_such_a_step_later(late: Callable[..., GradientAllreduce]) -> None:
    reducer = late("done flagged done", nonfinite="skip")
    reducer.step(GRADIENT)
    report = reducer.step(GRADIENT)
    assert (report.skipped, report.complete) == (False, False)
    reducer.step(GRADIENT)
    assert (report.skipped, report.complete) == (True, True)
    assert Late.plans[10].exact and Late.plans[10].support.nnz == 0


def test_a_state_may_be_loaded_over_a_step_whose_end_is_not_known(
    late: Callable[..., GradientAllreduce],
) -> None:
    reducer = late("done done done")
    state = reducer.state_dict()
    assert known(reducer.step(GRADIENT)) == [False]
    reducer.load_state_dict(state)
    assert reducer.step(GRADIENT).step == TRUSTED
    assert Late.plans[TRUSTED + 1].support is None  # of the update nothing is known


def test_a_state_of_older_steps_is_waited_for(late: Callable[..., GradientAllreduce]) -> None:
    reducer = late("done done")
    state = reducer.state_dict()
    del state["unaided"]
    reducer.load_state_dict(state)
    assert known(reducer.step(GRADIENT)) == [True]


@pytest.mark.parametrize("outcome", ["done", "stopped"])
def test_an_update_that_was_written_to_is_cleared_as_a_whole(
    late: Callable[..., GradientAllreduce], outcome: str
) -> None:
    reducer = late(f"{outcome} done")
    reducer.step(GRADIENT)
    reducer.forget_support()
    reducer.step(GRADIENT)
    assert Late.plans[TRUSTED + 1].support is None


@pytest.mark.parametrize(
    "settings", [{"deferred": False}, {"momentum_correction": 0.5}, {"dense_warmup_steps": TRUSTED}], ids=str
)
def test_other_steps_are_known_at_once(
    late: Callable[..., GradientAllreduce], settings: dict[str, Any]
) -> None:
    reducer = late("done done", **settings)
    for _ in range(2):
        assert reducer.step(GRADIENT).complete
    assert Late.plans and not any(plan.deferrable for plan in Late.plans)


def test_the_host_defers_nothing(comm: MPI.Intracomm) -> None:
    reducer = GradientAllreduce(comm, 1000, "oktopk", deferred=True)
    rng = np.random.default_rng(comm.rank)
    for _ in range(TRUSTED + 2):
        report = reducer.step(rng.standard_normal(1000).astype(np.float32))
        assert report.complete and report.global_nnz > 0
