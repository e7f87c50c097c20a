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
from oktopk.error_feedback import ErrorFeedback
from oktopk.methods.base import Method
from oktopk.step import Plan, StepResult

pytestmark = pytest.mark.mpi

Make = Callable[..., GradientAllreduce]
LENGTH = 64
TRUSTED = 8


class Late(Method):
    """A method whose steps only `LateExecutor` runs."""

    name = "late"

    def reduce(self, *arguments: Any) -> StepResult:
        raise AssertionError("no step goes by messages")


class LateStep:
    """The handle of a step that ends as the script says."""

    def __init__(self, executor: LateExecutor, outcome: str, deferred: bool) -> None:
        self._executor, self._outcome, self.deferred = executor, outcome, deferred

    def result(self) -> StepResult:
        assert not self._executor.closed
        if self._outcome == "flagged":
            raise FlaggedRanksError([0])
        nothing = SparseVector.empty(LENGTH)
        if self._outcome == "stopped":
            return StepResult(nothing, None, (), local_exact=False, local_nnz=0, global_nnz=0, given_up=True)
        everything = np.zeros(LENGTH, ENTRY)
        everything["index"], everything["value"] = np.arange(LENGTH), self._executor.vectors.update
        update = SparseVector(everything, LENGTH)
        result = StepResult(update, update, (), local_exact=False, local_nnz=3, global_nnz=5, deferrable=True)
        self._executor.vectors.applied(result)
        return result


class LateExecutor:
    """Sums densely, and tells how it went when it is asked; as the script says, one word a step after the first ones."""

    script: ClassVar[list[str]] = []
    plans: ClassVar[list[Plan]] = []
    supports: ClassVar[list[SparseVector | None]] = []

    def __init__(self, method: Method, vectors: ErrorFeedback) -> None:
        self.method, self.vectors, self.closed = method, vectors, False

    def begin(self, gradient: NDArray[np.float32], plan: Plan) -> LateStep:
        self.plans.append(plan)
        self.supports.append(self.vectors.support)
        self.vectors.clear_update()
        outcome = self.script[len(self.plans) - 1]
        if outcome == "done":
            self.method.transport.comm.Allreduce(gradient, self.vectors.update)  # type: ignore[attr-defined]
            self.method.transport.traffic.count(28, 0)
        return LateStep(self, outcome, plan.may_defer)

    def check(self) -> None:
        pass

    def close(self) -> None:
        self.closed = True


@pytest.fixture
def late(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(script: str, **settings: Any) -> GradientAllreduce:
        monkeypatch.setitem(METHODS, "late", Late)
        usual = GradientAllreduce._executor

        def executor(self: GradientAllreduce, method: Method) -> Any:
            return LateExecutor(method, self._vectors) if isinstance(method, Late) else usual(self, method)

        monkeypatch.setattr(GradientAllreduce, "_executor", executor)
        monkeypatch.setattr(LateExecutor, "plans", [])
        monkeypatch.setattr(LateExecutor, "supports", [])
        monkeypatch.setattr(LateExecutor, "script", [*["done"] * TRUSTED, *script.split()])
        chosen: dict[str, Any] = {"average": False, "deferred": True} | settings
        reducer = GradientAllreduce(comm, LENGTH, "late", **chosen)
        assert all(reducer.step(GRADIENT).complete for _ in range(TRUSTED))
        return reducer

    return make


GRADIENT = np.ones(LENGTH, np.float32)


def known(*reports: StepReport) -> list[bool]:
    return [report.complete for report in reports]


def test_a_report_is_complete_when_the_next_step_begins(late: Make) -> None:
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


def test_a_state_knows_how_the_last_step_went(late: Make) -> None:
    reducer = late("done stopped")
    reducer.step(GRADIENT)
    assert reducer.state_dict()["unaided"] == TRUSTED
    report = reducer.step(GRADIENT)
    assert reducer.state_dict()["unaided"] == 0
    assert report.complete


@pytest.mark.parametrize("resumed", [False, True])
def test_after_a_step_that_stopped_the_host_waits_for_some(
    late: Make, comm: MPI.Intracomm, resumed: bool
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
    assert [plan.may_defer for plan in LateExecutor.plans] == [*waited, True, True, *waited, True, True]
    stopped = reports[1]
    assert stopped.complete and not stopped.skipped and (stopped.global_nnz, stopped.words) == (0, 0)
    assert known(*reports) == [True] * (TRUSTED + 3) + [False]


def test_a_gradient_that_is_not_finite_raises_before_the_next_one_is_taken(late: Make) -> None:
    reducer = late("done flagged done")
    reducer.step(GRADIENT)
    reducer.step(GRADIENT)
    with pytest.raises(NonFiniteGradientError, match=r"step 9: .* rank\(s\) 0$"):
        reducer.step(GRADIENT)
    assert reducer.steps == len(LateExecutor.plans) == 10
    report = reducer.step(GRADIENT)
    assert report.step == 10 and LateExecutor.plans[10].exact and LateExecutor.plans[10].new_boundaries


def test_a_skipped_step_is_known_as_such_a_step_later(late: Make) -> None:
    reducer = late("done flagged done", nonfinite="skip")
    reducer.step(GRADIENT)
    report = reducer.step(GRADIENT)
    assert (report.skipped, report.complete) == (False, False)
    reducer.step(GRADIENT)
    assert (report.skipped, report.complete) == (True, True)
    assert LateExecutor.plans[10].exact and LateExecutor.supports[10].nnz == 0


def test_a_state_may_be_loaded_over_a_step_whose_end_is_not_known(late: Make) -> None:
    reducer = late("done done done")
    state = reducer.state_dict()
    assert known(reducer.step(GRADIENT)) == [False]
    reducer.load_state_dict(state)
    assert reducer.step(GRADIENT).step == TRUSTED
    assert LateExecutor.supports[TRUSTED + 1] is None  # of the update nothing is known


@pytest.mark.parametrize("outcome", ["done", "stopped"])
def test_an_update_that_was_written_to_is_cleared_as_a_whole(late: Make, outcome: str) -> None:
    reducer = late(f"{outcome} done")
    reducer.step(GRADIENT)
    reducer.forget_support()
    reducer.step(GRADIENT)
    assert LateExecutor.supports[TRUSTED + 1] is None


@pytest.mark.parametrize("settings", [{"deferred": False}, {"dense_warmup_steps": TRUSTED}], ids=str)
def test_other_steps_are_known_at_once(late: Make, settings: dict[str, Any]) -> None:
    reducer = late("done done", **settings)
    for _ in range(2):
        assert reducer.step(GRADIENT).complete
    assert LateExecutor.plans and not any(plan.may_defer for plan in LateExecutor.plans)


def test_the_host_defers_nothing(comm: MPI.Intracomm) -> None:
    reducer = GradientAllreduce(comm, 1000, "oktopk", deferred=True)
    rng = np.random.default_rng(comm.rank)
    for _ in range(TRUSTED + 2):
        report = reducer.step(rng.standard_normal(1000).astype(np.float32))
        assert report.complete and report.global_nnz > 0
