"""Steps of a method, one after the other: flat gradient in, flat update out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.cuda.environment import is_cuda_error
from collectives.mpi import connect
from collectives.sparse import check_length
from collectives.traffic import Traffic
from collectives.transport import FlaggedRanksError
from oktopk.backend import GRADIENT_TYPES, Backend, make_backend
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.error_feedback import ErrorFeedback
from oktopk.methods import METHODS, Deferred, Method, Plan, Reduction
from oktopk.metrics import Sampler
from oktopk.results import StageTimer, StepReport
from oktopk.settings import DENSE_ABOVE, Settings, entries_kept

_TRUSTED = 8  # steps in a row without the host's help, before one is deferred


class NonFiniteGradientError(ArithmeticError):
    """Gradients held NaN or Inf; raised on every rank alike.

    The gradient was taken back out of the residuals: they are as before the step, to the rounding of what was accumulated,
    but where an element of it is above half the largest float. Finite gradients whose sum over the ranks overflows are
    not found: that sum is applied as Inf.

    Attributes:
        ranks: the ranks whose gradients were not finite.
        step: the step, counted from 0.
    """

    def __init__(self, ranks: list[int], step: int) -> None:
        named = ", ".join(str(rank) for rank in ranks)
        super().__init__(f"step {step}: gradient + residual is NaN or Inf on rank(s) {named}")
        self.ranks = ranks
        self.step = step


@dataclass(slots=True)
class _OpenStep:
    """A deferred step that the host has not looked at.

    Attributes:
        report: the caller's, to be completed.
        method: that ran.
        settle: as Deferred's.
        timer: of the step.
        exact: thresholds were to be named exactly.
        overwritten: `update` was written to since.
    """

    report: StepReport
    method: Method
    settle: Callable[[], Reduction | None]
    timer: StageTimer
    exact: bool
    overwritten: bool = False


class GradientAllreduce:
    """Reduces one flat gradient per step over all ranks of a communicator.

    Several instances may live side by side, one per bucket, parameter group or communicator: they share nothing.

    Args:
        comm: intracommunicator; duplicated. Collective: every rank must construct, with the same arguments.
        length: elements of the gradient (n).
        method: a name in `oktopk.METHODS`.
        device: "cpu" for NumPy arrays, "cuda" for CuPy arrays on the current GPU.
        gradient_type: "float32"; on a GPU also "bfloat16" or "float16". The update is float32.
        stream: on a GPU, the cupy stream that gradients are produced on; None: the current one.
        peer_memory: on GPUs of one host, let kernels read each other's memory in steps of Ok-Topk. None: where every
            rank has a GPU of its own; True: also where they share one, which is slow; False: MPI alone.
        problem: what the caller found wrong on this rank alone; every rank then raises it.
        settings: keywords of `oktopk.Settings`.

    Raises:
        ValueError: an argument is out of range, the device cannot be used, or ranks disagree; on every rank alike.

    Memory: n words of update; n of residual where the method is sparse; n of velocity with momentum correction; n/2 of
        scratch from the first dense step on; 3n/2 from the first measured step on; the lists of the method, O(k) for Ok-Topk
        where regions balance.
    Traffic: that of the method, see `oktopk.methods`; one allgather of the settings at construction.
    Source: Li & Hoefler, PPoPP 2022, algorithm 2.

    Example:
        >>> reducer = GradientAllreduce(MPI.COMM_WORLD, length=len(gradient), method="oktopk", density=0.01)
        >>> report = reducer.step(gradient)
        >>> parameters -= learning_rate * reducer.update
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        length: int,
        method: str = "oktopk",
        *,
        device: str = "cpu",
        gradient_type: str = "float32",
        stream: Any = None,
        peer_memory: bool | None = None,
        problem: str = "",
        **settings: Any,
    ) -> None:
        host = connect(comm)
        backend: Backend | None = None
        vectors: ErrorFeedback | None = None
        try:
            self.settings = Settings(**settings)
            check_length(length)
            if method not in METHODS:
                raise ValueError(f"method {method!r} is not one of {', '.join(METHODS)}")
            backend = make_backend(device, gradient_type, stream)
            sparse = METHODS[method].sparse and self.settings.density <= DENSE_ABOVE
            # now, when a rank without room for them can still tell the others
            vectors = ErrorFeedback(backend, length, self.settings, sparse)
        except (TypeError, ValueError, RuntimeError, MemoryError) as error:
            problem = problem or str(error) or type(error).__name__
        resolved = settings if problem else asdict(self.settings)
        means = {"length": length, "method": method, "device": device, "gradient_type": gradient_type}
        means["peer_memory"] = peer_memory
        try:
            host.agree(means | resolved, problem)
        except ValueError:
            host.close()  # on every rank alike, as the error is
            raise
        assert backend is not None
        assert vectors is not None
        self.backend = backend
        self._vectors = vectors
        self.transport = backend.connect(host)
        self.p2p_unavailable_reason = METHODS[method].p2p_unavailable_reason(
            self.settings
        ) or self.transport.open_p2p(peer_memory)
        """Why this instance does not use peer memory, in a sentence; "" if it does."""
        self.length = length
        self.method = method
        self.time_stages = False
        """Time the stages of steps through peer memory by events on the device: some 50 us a step slower. Else the
        report has one stage, `step`."""
        self.steps = 0
        self._methods: dict[str, Method] = {}
        self._settled: tuple[Method, int] | None = None  # the method and its k, once neither changes any more
        self._sampler: Sampler | None = None
        self._sparse_steps = 0
        self._last_k: int | None = None
        self._said_dense = False
        self._open: _OpenStep | None = None  # the deferred step that the host has not looked at
        self._unaided = 0  # steps among peers in a row that needed no help from the host, up to _TRUSTED

    @property
    def update(self) -> NDArray[np.float32]:
        """float32[n], the last step's result: the mean over the ranks, or the sum. Valid until the next step."""
        return self._vectors.update

    @property
    def residual(self) -> NDArray[np.float32] | None:
        """float32[n], what was not applied; None where no step leaves anything behind."""
        return self._vectors.residual

    @property
    def velocity(self) -> NDArray[np.float32] | None:
        """float32[n] with momentum correction, else None."""
        return self._vectors.velocity

    @property
    def can_read_tensors(self) -> bool:
        """Whether there are steps that read a gradient in pieces: those of Ok-Topk through peer memory. Equal on all ranks."""
        settings = self.settings
        return not (
            self.p2p_unavailable_reason or settings.momentum_correction or settings.density > DENSE_ABOVE
        )

    def reads_tensors(self, measure: bool = False) -> bool:
        """Whether the next step may be given a gradient in pieces, see `tensors`: not where it is dense or measured."""
        settings, step = self.settings, self.steps
        dense = step < settings.dense_warmup_steps or settings.density_at(step) > DENSE_ABOVE
        return self.can_read_tensors and not (dense or measure)

    def gradient_tensors(self, sizes: Sequence[int], element_type: str) -> GradientTensors:
        """A gradient whose elements lie in several arrays on the GPU, for steps that read it where it lies. Collective.

        Its elements are rounded to the gradient type as they are read, to nearest even. Where they lie is said by its `place`,
        and may be another place in every step.

        Args:
            sizes: elements of the arrays, in the order of the vector; `length` in all.
            element_type: of the arrays: "float32", "bfloat16" or "float16".

        Raises:
            RuntimeError: no step reads pieces here, see `can_read_tensors`; on every rank alike.
            ValueError: another type, or sizes that do not add up to `length`, on some rank, or its GPU has no memory for it; on
                every rank alike.

        Memory: n/512 bytes, and 16 bytes an array.
        """
        if not self.can_read_tensors:
            raise RuntimeError("no step of this reducer reads a gradient in pieces: pass one vector")
        problem, tensors, known = "", None, GRADIENT_TYPES["cuda"]
        if element_type not in known:
            problem = f"element_type {element_type!r} is not one of {', '.join(known)}"
        elif min(sizes, default=0) < 0:
            problem = f"size {min(sizes)} is negative"
        elif sum(sizes) != self.length:
            problem = f"sizes add up to {sum(sizes)}, not to {self.length}"
        else:
            try:
                tensors = self.backend.gradient_tensors(sizes, element_type)
            except Exception as error:
                if not isinstance(error, MemoryError) and not is_cuda_error(error):
                    raise
                problem = str(error) or type(error).__name__
        self.transport.agree({}, problem)
        assert tensors is not None
        return tensors

    def step(self, gradient: NDArray[np.float32] | GradientTensors, *, measure: bool = False) -> StepReport:
        """Reduce one gradient; the result is in `update`. Collective: every rank must call.

        With `Settings.deferred` a step of Ok-Topk through peer memory is on its way on the stream when this returns: `update`
        will be there for whatever the stream is given next, and the report is complete when the next step begins, or by
        `complete`. Such a step has no help from the host. Regions are renewed by the selections of the step before; a global
        threshold that missed moves to the best rung that keeps between k/2 and 5k/4; a selection that is due to be exact, and
        finds less than k by its guess, is exact in the next step. Where help is needed, which is rare (a selection of more than
        2k, no such rung, a region that got far too much, or kept entries far from balanced), nothing is applied: `update` is
        zero, the gradient stays in the residual, and steps are waited for until eight in a row have needed none, as at the
        beginning. A gradient that is not finite is found a step later.

        Args:
            gradient: [n] of the gradient type, C-contiguous, on the device; unchanged. bfloat16 is given as uint16. Or one in
                pieces, where `reads_tensors` says so.
            measure: take the paper's measures of a sparse step, see `oktopk.metrics`: costs two dense allreduces, which
                neither the report's traffic nor its seconds include. Equal on all ranks; the update is the same either way.

        Raises:
            NonFiniteGradientError: a sum is NaN or Inf on some rank, and settings say to raise; on every rank alike. Of the last
                deferred step before anything is done with this gradient.
            TypeError, ValueError: not float32, of another length, or not contiguous; on this rank alone, so that the job must be
                one that ends when a rank raises (`python -m mpi4py`).
            MemoryError: the GPU has too little memory for what the step needs besides; on this rank alone, likewise.
            RuntimeError: peer memory for a new k could not be had, on every rank alike; or a kernel failed, on this one alone.
        """
        if isinstance(gradient, GradientTensors) and not self.reads_tensors(measure):
            raise ValueError("this step reads no gradient in pieces, see reads_tensors(): pass one vector")
        accepted = self.backend.validate(gradient, self.length)
        self.complete()
        with self.backend.stream_scope():
            return self._measured_step(accepted) if measure else self._step(accepted, self._deferrable)

    def complete(self) -> None:
        """Learn how the last step went, if it was deferred and that is not known yet: its report is complete afterwards.

        To be called after the last step, too. Waits for what the ranks decided, not for the update, but where stages are timed.
        No other rank need call, unless the error is caught: who goes on after it must not do so alone.

        Raises:
            NonFiniteGradientError: as `step`, but on the ranks that called.
        """
        if self._open is None:
            return
        opened, self._open = self._open, None
        report, method, timer = opened.report, opened.method, opened.timer
        self._vectors.nothing_applied()
        self._vectors.selected = None
        try:
            reduction = opened.settle()
            if reduction is None:
                self._unaided = 0
                if opened.exact:
                    self._last_k = None  # the next one names them
                known = self._report(report.step, method, report.k, None, timer)
            else:
                known = self._unaided_report(report.step, method, report.k, reduction, timer)
        except FlaggedRanksError as flagged:
            known = self._skipped_report(report.step, method, report.k, flagged.ranks, timer)
        finally:
            if opened.overwritten:
                self._vectors.support = None
        for field in fields(known):
            setattr(report, field.name, getattr(known, field.name))

    @property
    def _deferrable(self) -> bool:
        # momentum correction looks for what is not finite before anything is launched
        return self.settings.deferred and not self.settings.momentum_correction

    def _measured_step(self, gradient: NDArray[np.float32]) -> StepReport:
        method, k = self._method_at(self.steps)
        if not method.sparse:
            return self._step(gradient)
        if self._sampler is None:
            self._sampler = Sampler(self.length, self.backend, self.transport)
        self._sampler.before(gradient, self.residual, self.velocity, self.settings.momentum_correction)
        report = self._step(gradient)
        if report.skipped:
            return report
        selected = self._vectors.selected
        assert selected is not None
        to_sum = float(self.transport.size) if self.settings.average else 1.0
        measures = self._sampler.after(self.update, selected, k, to_sum, method.boundaries)
        return replace(report, measures=measures)

    def _step(self, gradient: NDArray[np.float32], deferrable: bool = False) -> StepReport:
        settings, transport, vectors = self.settings, self.transport, self._vectors
        timer = StageTimer(self.time_stages)
        step = self.steps
        method, k = self._method_at(step)
        scale = 1.0 / transport.size if settings.average else 1.0
        changed = k != self._last_k
        corrected, overflowed = vectors.correct(gradient)
        plan = Plan(
            support=vectors.support,
            clear_out=vectors.clear_update,
            velocity=vectors.velocity,
            k=k,
            exact=changed or self._sparse_steps % settings.threshold_interval == 0,
            new_boundaries=changed or self._sparse_steps % settings.boundary_interval == 0,
            scale=scale,
            timer=timer,
            nonfinite=overflowed,
        )
        if changed:
            self._unaided = 0
        plan.deferrable = deferrable and self._unaided == _TRUSTED
        self.steps += 1
        self._last_k = k
        self._sparse_steps += method.sparse
        residual = vectors.residual if method.sparse or vectors.pending else None
        try:
            reduction = method.reduce(corrected, residual, vectors.update, plan)
        except FlaggedRanksError as flagged:
            vectors.undo(gradient)
            return self._skipped_report(step, method, k, flagged.ranks, timer)
        if isinstance(reduction, Deferred):
            vectors.pending = True
            timer.record("step")
            report = self._report(step, method, k, None, timer, traffic=Traffic())
            report.complete = False
            self._open = _OpenStep(report, method, reduction.settle, timer, plan.exact)
            return report
        if reduction.finish is None:
            self._unaided = 0
            vectors.apply(reduction, scale)
            timer.record("apply")
            return self._report(step, method, k, reduction, timer)
        report = self._unaided_report(step, method, k, reduction, timer)
        timer.record("step")
        return report

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, copied: plain numbers and arrays.

        Raises:
            NonFiniteGradientError: of the last step, where it was deferred.
        """
        self.complete()
        return {
            "length": self.length,
            "method": self.method,
            "steps": self.steps,
            "sparse_steps": self._sparse_steps,
            "last_k": self._last_k,
            "unaided": self._unaided,
            "methods": {name: method.state_dict() for name, method in self._methods.items()},
            **self._vectors.state_dict(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the `state_dict` of this rank was taken, bit for bit. Collective.

        Raises:
            ValueError: the state is of another length or method, or the ranks' states are not of one moment; on every rank
                alike.
        """
        problem = ""
        for name in ("length", "method"):
            if state[name] != getattr(self, name):
                problem = f"state has {name} {state[name]!r}, this reducer {getattr(self, name)!r}"
        common = {name: state.get(name) for name in ("steps", "sparse_steps", "last_k", "unaided")}
        agreed = {name: METHODS[name].agreed_state(theirs) for name, theirs in state["methods"].items()}
        self.transport.agree(common | agreed, problem)
        for method in self._methods.values():
            method.close()
        self._methods, self._settled = {}, None
        self.steps = state["steps"]
        self._sparse_steps = state["sparse_steps"]
        self._last_k = state["last_k"]
        self._unaided = state.get("unaided", 0)
        self._open = None
        self.transport.take_traffic()
        self._vectors.load_state_dict(state)
        for name, method_state in state["methods"].items():
            self._instance(name).load_state_dict(method_state)

    def forget_support(self) -> None:
        """Say that `update` was written to: the next step zeroes all of it, not only where it was applied."""
        self._vectors.support = None
        if self._open is not None:
            self._open.overwritten = True

    def close(self) -> None:
        """Free what MPI holds. Collective. How a deferred step went that is not complete stays unknown."""
        if self._open is not None:
            self._open, self._unaided = None, 0
            self.forget_support()
        if self._sampler is not None:
            self._sampler.close()
        for method in self._methods.values():
            method.close()
        self.transport.close()

    def _method_at(self, step: int) -> tuple[Method, int]:
        """The method that runs, and its k."""
        if self._settled is not None:
            return self._settled
        density = self.settings.density_at(step)
        warming = step < self.settings.dense_warmup_steps
        if self.method == "dense" or warming:
            return self._instance("dense"), self.length
        if density > DENSE_ABOVE:
            if not self._said_dense and self.transport.rank == 0:
                warnings.warn(
                    f"density {density} is above {DENSE_ABOVE}: COO entries cost more words than they save, "
                    "so the dense path runs",
                    stacklevel=3,
                )
            self._said_dense = True
            return self._instance("dense"), self.length
        found = self._instance(self.method), entries_kept(density, self.length)
        if step >= self.settings.dense_warmup_steps + self.settings.density_warmup_steps:
            self._settled = found
        return found

    def _instance(self, name: str) -> Method:
        if name not in self._methods:
            self._methods[name] = METHODS[name](
                self.length, self.transport, self.backend.kernels, self.settings
            )
        return self._methods[name]

    def _unaided_report(
        self, step: int, method: Method, k: int, reduction: Reduction, timer: StageTimer
    ) -> StepReport:
        """Of a step that the device ended by itself."""
        assert reduction.finish is not None
        self._unaided = 0 if reduction.aided else min(self._unaided + 1, _TRUSTED)
        self._vectors.applied(reduction)
        report = self._report(step, method, k, reduction, timer)
        reduction.finish()
        return report

    def _skipped_report(
        self, step: int, method: Method, k: int, ranks: list[int], timer: StageTimer
    ) -> StepReport:
        """Of a step that nobody applied, since gradients of these ranks are not finite; or the error."""
        self._last_k = None  # what this step was to renew, the next one renews
        if self.settings.nonfinite == "raise":
            self.transport.take_traffic()
            raise NonFiniteGradientError(ranks, step) from None
        return self._report(step, method, k, None, timer, skipped=True)

    def _report(
        self,
        step: int,
        method: Method,
        k: int,
        reduction: Reduction | None,
        timer: StageTimer,
        skipped: bool = False,
        traffic: Traffic | None = None,
    ) -> StepReport:
        if traffic is None:
            traffic = self.transport.take_traffic()
        return StepReport(
            step=step,
            method=method.name,
            exact=reduction is not None and reduction.exact,
            skipped=skipped,
            k=k,
            length=self.length,
            local_nnz=reduction.local_nnz if reduction else 0,
            global_nnz=reduction.global_nnz if reduction else 0,
            local_threshold=reduction.local_threshold if reduction else float("nan"),
            global_threshold=reduction.global_threshold if reduction else float("nan"),
            words=traffic.words,
            messages=traffic.messages,
            control_words=traffic.control_words,
            control_messages=traffic.control_messages,
            seconds=timer.seconds,
        )
