"""Steps of a method, one after the other: which method and k, what is renewed, and what became of it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from collectives.errors import EVERY_RANK_CALLS, FlaggedRanksError
from collectives.sparse import Vector
from collectives.traffic import Traffic
from oktopk.construction import Parts
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.displacement import Displacement
from oktopk.methods import METHODS, Method
from oktopk.metrics import Sampler
from oktopk.results import StageTimer, StepReport
from oktopk.settings import DENSE_ABOVE, entries_kept
from oktopk.step import CompletedStep, Executor, Gradient, Plan, Spans, StepHandle, StepResult

_SAME_STEPS = (
    "Every rank must take the same number of steps, with a gradient of zero where it has no batch left"
)
_Beside = tuple[str, Spans, int | None, bool]  # problem, absent, token, displaced
_TRUSTED = 8  # deferrable steps in a row before one is deferred


class NonFiniteGradientError(ArithmeticError):
    """Gradients held NaN or Inf, or their sum over the ranks did; raised on every rank alike.

    The gradient was taken back out of the residuals: they are as before the step, to the rounding of what was accumulated,
    but on the ranks named where an element of it is above half the largest float.

    Attributes:
        ranks: the ranks whose gradients were not finite; empty where only the sum over the ranks is not.
        step: the step, counted from 0.
    """

    def __init__(self, ranks: list[int], step: int) -> None:
        problem = "the sum over the ranks is not finite"
        if ranks:
            problem = f"gradient + residual is NaN or Inf on rank(s) {', '.join(map(str, ranks))}"
        super().__init__(f"step {step}: {problem}")
        self.ranks = ranks
        self.step = step


class Steps:
    """The steps of a `GradientAllreduce`.

    Args:
        parts: of it.
    """

    def __init__(self, parts: Parts) -> None:
        self.settings, self.backend, self.transport = parts.settings, parts.backend, parts.transport
        self.length, self.method = parts.length, parts.method
        self._placement, self._vectors = parts.placement, parts.vectors
        self.flat_reason = parts.flat_reason
        """Why steps are flat though levels is "auto", in a sentence; "" if they are not, or are meant to be."""
        self._p2p_problem = self.p2p_unavailable_reason = parts.p2p_unavailable_reason
        """Why this instance does not use peer memory, in a sentence; "" if it does."""
        self.advice = _SAME_STEPS
        """What a MissingRanksError of a step says to do, in a sentence."""
        self.steps = 0
        self.time_stages = False
        """Time the stages of steps through peer memory by device events, which takes some 50 us a step. Without it their
        report has one stage, `step`."""
        self.tokens: tuple[int, ...] | None = None
        """Equal on all ranks: the tokens that the ranks passed to the last step that has ended, in two levels one that they are
        combined to. None where none were passed or they are not known; a deferred step ends when the next one begins."""
        self._methods: dict[str, Method] = {}
        self._executors: dict[str, Executor] = {}
        self._final: tuple[Method, int] | None = None  # the method and its k, once neither changes any more
        self._entries: Callable[[float], int] = partial(entries_kept, length=self.length)
        self._sampler: Sampler | None = None
        self._sparse_steps = 0
        self._last_k: int | None = None
        self._said_dense = False
        # the step whose result is not known yet, and the caller's report of it
        self._open: tuple[Plan, StepHandle, StepReport] | None = None
        self._trust = 0  # deferrable steps in a row, up to _TRUSTED

    @property
    def carried(self) -> int:
        """Elements of `residual`: n, in two levels those of this rank's shard."""
        return self._placement.carried

    @property
    def hosts(self) -> list[int] | None:
        """int[P], the number of each rank's host, in two levels; None in flat steps."""
        return self._placement.hosts and list(self._placement.hosts)

    @property
    def can_read_tensors(self) -> bool:
        """Whether some steps read a tensor list: those of Ok-Topk through peer memory. Equal on all ranks."""
        settings = self.settings
        sparse = METHODS[self.method].sparse and settings.density <= DENSE_ABOVE
        return sparse and not self.p2p_unavailable_reason

    def reads_tensors(self, measure: bool = False) -> bool:
        """Whether the next step may be given a tensor list, see `gradient_tensors`: not where it is dense or measured."""
        sparse = self.settings.density_at(self.steps) <= DENSE_ABOVE
        return self.can_read_tensors and sparse and not measure

    @property
    def sparse_steps(self) -> int:
        """Steps so far in which a sparse method ran."""
        return self._sparse_steps

    def keep_entries(self, entries: Callable[[float], int]) -> None:
        """Choose k of the sparse steps to come, in place of density * n.

        Args:
            entries: density -> k, in [1, n]; equal on all ranks. A new k makes the next step exact.
        """
        self._entries, self._final = entries, None

    @property
    def awaited(self) -> bool:
        """Whether a step has begun whose update holds only after `complete`, which every rank must call; no deferred one."""
        return self._open is not None and not self._open[1].deferred

    def give_up(self) -> None:
        """Abort a step that is `awaited`, since this rank has failed; on this rank alone. Its report stays incomplete.

        The other ranks' kernels end, and their next step raises RuntimeError, as this one's does. A rank whose kernels had ended
        without the update waits for this one's messages until `timeout`.
        """
        if self._open is not None and self.awaited:
            with self.backend.stream_scope():
                self._open[1].abort()
            self._open, self._trust = None, 0
            self._vectors.support = None

    def _take(
        self, gradient: Gradient, problem: str, absent: Spans, token: int | None, *, measure: bool, wait: bool
    ) -> StepReport:
        displaced = isinstance(gradient, Displacement)
        if isinstance(gradient, GradientTensors) and not (displaced or self.reads_tensors(measure)):
            raise ValueError("this step reads no tensor list, see reads_tensors(): pass one vector")
        accepted = self.backend.validate(gradient, self.length)
        if self.backend.share_memory(accepted, self._vectors.update):
            raise ValueError(
                "the gradient is this reducer's own update, which the step overwrites: pass a copy"
            )
        with self.backend.stream_scope():
            self._complete()
            self._placement.withhold(self._vectors, absent)
            beside = problem, absent, token, displaced
            with self._expecting(f"step {self.steps}{' with measure=True' if measure else ''}", self.advice):
                earlier = None
                if displaced and isinstance(accepted, Displacement):
                    method = self._method_at(self.steps)[0]
                    earlier = self._earlier(accepted) if measure and method.sparse else None
                    readable = method.reads_displacements and not measure
                    accepted = self._placement.displaced(accepted, self._vectors, readable)
                if measure:
                    return self._measured_step(accepted, earlier, beside)
                report = self._begin(accepted, beside, may_defer=True)
                handle = None if self._open is None else self._open[1]
                if isinstance(handle, CompletedStep) or (wait and self.awaited):
                    self._complete()
                return report

    def skip_together(self, wanted: bool) -> StepReport | None:
        """Skip a step on all ranks if any of them wants to. Collective: every rank must call, in place of `step` or before it.

        Args:
            wanted: by this rank, whose gradient overflowed by its loss scale, for instance.

        Returns:
            The report of the step that is skipped, which counts as one; residual and thresholds stay as they are, bit
            for bit. None where no rank wants to: go on with `step`.

        Traffic: one control allreduce of a flag, by messages that no step takes for its own.
        """
        with self.backend.stream_scope():
            self._complete()
            with self._expecting(f"skip_together before step {self.steps}", self.advice):
                if not self.transport.any_control(wanted):
                    return None
            method, k = self._method_at(self.steps)
        self.steps += 1
        report = self._new_report(method, k, StageTimer())
        report.skipped = True
        self._complete_report(report, StepResult(None, None))
        return report

    def complete(self) -> None:
        """End the last step, if `begin` has started it, or complete its report, if it was deferred.

        Call it after the last step of a run. It waits for the decision of the ranks, and for the update only where stages are
        timed. After `begin` it is collective: a step that the kernels cannot end goes on by messages. After a deferred step ranks
        may call it alone, but a rank that catches the error must not go on alone.

        Raises:
            NonFiniteGradientError: as `step`, but of a deferred step on the ranks that called.
            RuntimeError, MissingRanksError: as `step`.
        """
        with self.backend.stream_scope():
            if not self.awaited:
                self._complete()
                return
            with self._expecting(f"step {self.steps - 1}", self.advice):
                self._complete()

    def meet(self, what: str) -> None:
        """Wait for all ranks to begin this call. Collective: a rank that does not come, or makes another call, is named."""
        with self._expecting(what):
            self.transport.barrier()

    def _expecting(self, what: str, advice: str = EVERY_RANK_CALLS) -> AbstractContextManager[None]:
        """Limit the time that ranks may come late to what begins in a `with` block."""
        return self._placement.expecting(what, self.settings.timeout, advice)

    def _complete(self) -> None:
        if self._open is None:
            return
        begun, self._open = self._open, None
        self._end(*begun)

    def _earlier(self, displacement: Displacement) -> Vector:
        """A copy of this rank's residual, to which a displacement is about to be added."""
        self._vectors.put_back()
        residual = self._placement.measured(displacement, self._vectors)[1]
        return self.backend.zeros(self.length) if residual is None else residual.copy()

    def _measured_step(self, gradient: Gradient, earlier: Vector | None, beside: _Beside) -> StepReport:
        """One step, which is waited for. earlier: the residual before a displacement was added to it; None for a gradient."""
        method, k = self._method_at(self.steps)
        if method.sparse:
            self.transport.barrier()  # the sampler's payload has no limit on the time that ranks come late
            if self._sampler is None:
                with self.transport.together():
                    sampler = Sampler(self.length, self.backend, self.transport)
                self._sampler = sampler
            added, residual = self._placement.measured(gradient, self._vectors)
            assert earlier is None or residual is not None  # a displacement is in it
            entered = added if earlier is None or residual is None else residual - earlier
            self._sampler.before(added, residual, entered)
        report = self._begin(gradient, beside, may_defer=False)
        self._complete()
        if method.sparse and self._sampler is not None and not report.skipped:
            to_sum = float(self.transport.size) if self.settings.average else 1.0
            selected, boundaries = self._placement.selected(self._vectors, method)
            assert selected is not None
            report.measures = self._sampler.after(self._vectors.update, selected, k, to_sum, boundaries)
        return report

    def _renews_boundaries(self) -> bool:
        """Whether the next step renews its regions: often at first, when what is selected changes most."""
        sparse, interval = self._sparse_steps, self.settings.boundary_interval
        return sparse % interval == 0 or (sparse < interval and sparse.bit_count() == 1)

    def _begin(self, gradient: Gradient, beside: _Beside, may_defer: bool) -> StepReport:
        settings, step = self.settings, self.steps
        problem, absent, token, displaced = beside
        timer = StageTimer(self.time_stages, self.backend.nvtx)
        method, k = self._method_at(step)
        changed = k != self._last_k
        if changed:
            self._trust = 0
        plan = Plan(
            k=k,
            exact=changed or self._sparse_steps % settings.threshold_interval == 0,
            new_boundaries=changed or self._renews_boundaries(),
            scale=1.0 / self.transport.size if settings.average else 1.0,
            timer=timer,
            displaced=displaced,
            may_defer=may_defer and settings.deferred and self._trust == _TRUSTED,
            problem=problem,
            absent=absent,
            token=token,
        )
        self.steps += 1
        self._last_k = None  # where the step fails, the next one computes exact thresholds
        self._sparse_steps += method.sparse
        self._vectors.save()
        try:
            handle = self._executors[method.name].begin(gradient, plan)
        except FlaggedRanksError as flagged:
            report = self._new_report(method, k, timer)
            self._skip(report, flagged.ranks)
            return report
        except ValueError:
            self.take_traffic()
            raise
        self._last_k = k
        report = self._new_report(method, k, timer)
        self._open = plan, handle, report
        return report

    def _end(self, plan: Plan, handle: StepHandle, report: StepReport) -> None:
        """Complete the report of a step that has begun; waits for its result."""
        overwritten = handle.deferred and self._vectors.support is None  # since the step began
        try:
            result = handle.result()
        except FlaggedRanksError as flagged:
            self._skip(report, flagged.ranks)
            return
        finally:
            if overwritten:
                self._vectors.support = None
        self._trust = min(self._trust + 1, _TRUSTED) if result.deferrable else 0
        if result.given_up and plan.exact:
            self._last_k = None  # the next step computes the exact thresholds
        self.tokens = result.tokens
        self._complete_report(report, result)

    def _method_at(self, step: int) -> tuple[Method, int]:
        """The method that runs, and its k."""
        if self._final is not None:
            return self._final
        settings = self.settings
        density, warmup = settings.density_at(step), settings.dense_warmup_steps
        if self.method == "dense" or density > DENSE_ABOVE:
            if self.method != "dense" and step >= warmup and not self._said_dense:
                self._said_dense = True
                if self.transport.rank == 0:
                    warnings.warn(
                        f"density {density} is above {DENSE_ABOVE}: COO entries cost more words than they save, "
                        "so the dense path runs",
                        stacklevel=3,
                    )
            return self._instance("dense"), self.length
        chosen = self._instance(self.method), self._entries(density)
        # that of the warm-up, whose windows take more memory than all else
        if self._methods.pop("dense", None) is not None:
            self._executors.pop("dense").close()
        if step >= warmup + settings.density_warmup_steps:
            self._final = chosen
            # by a k that has changed: launches through peer memory of the same k would keep their buffers
            if step and self._entries(settings.density_at(step - 1)) > chosen[1]:
                self._placement.forget_scratch()
        return chosen

    def _instance(self, name: str) -> Method:
        if name not in self._methods:
            method = self._placement.method(METHODS[name], self.settings)
            with self.transport.together():
                executor = self._executor(method)
            self._methods[name], self._executors[name] = method, executor
            if self.method == name == "dense":  # its windows are asked for when the first step begins
                self.p2p_unavailable_reason = self._p2p_problem or self.transport.dense_problem
        return self._methods[name]

    def _executor(self, method: Method) -> Executor:
        return self._placement.executor(method, self._vectors, self.settings)

    def _skip(self, report: StepReport, ranks: list[int]) -> None:
        """Complete the report of a step that no rank applied, or raise: these ranks' gradients, or the sum, are not finite."""
        self._last_k = None  # what this step was to renew, the next one renews
        self.tokens = None
        if self.settings.nonfinite == "raise":
            self.take_traffic()
            raise NonFiniteGradientError(ranks, report.step) from None
        self._vectors.restore()
        report.skipped = True
        self._complete_report(report, StepResult(None, None))

    def take_traffic(self) -> Traffic:
        """What this rank has sent since the last report, or the last call."""
        return self._placement.take_traffic()

    def _new_report(self, method: Method, k: int, timer: StageTimer) -> StepReport:
        """The report of the last step that was counted, of whose outcome nothing is known yet."""
        report = StepReport(self.steps - 1, method.name, k, self.length, timer.seconds, complete=False)
        report.spans = timer.spans
        place = self._placement
        report.levels, report.shards, report.wire = place.levels, place.shards, self.settings.wire
        return report

    def _complete_report(self, report: StepReport, result: StepResult) -> None:
        """Fill in what a step gave, and its traffic. The GPU has its next step only after this: it sets fields one by one."""
        report.local_exact, report.global_exact = result.local_exact, result.global_exact
        report.local_nnz, report.global_nnz = result.local_nnz, result.global_nnz
        report.local_threshold, report.global_threshold = result.local_threshold, result.global_threshold
        report.rounding = result.rounding
        report.add_traffic(self.take_traffic())
        report.complete = True
