"""Steps of a method, one after the other: flat gradient in, flat update out."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.closing import announce, closes
from collectives.traffic import Traffic
from collectives.transport import EVERY_RANK_CALLS, FlaggedRanksError, Transport
from oktopk.construction import Parts, make_together
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.devices import GRADIENT_TYPES
from oktopk.displacement import AdamWDisplacement, Displacement, ParameterDisplacement
from oktopk.host_group import HostGroup
from oktopk.methods import METHODS, Method
from oktopk.metrics import Sampler
from oktopk.results import StageTimer, StepReport
from oktopk.settings import DENSE_ABOVE, entries_kept, unknown_setting
from oktopk.state import state_problem
from oktopk.step import CompletedStep, Executor, Plan, Spans, StepHandle, StepResult

if TYPE_CHECKING:
    from collectives.connect import Communicator

_SAME_STEPS = (
    "Every rank must take the same number of steps, with a gradient of zero where it has no batch left"
)
_Displacement = TypeVar("_Displacement", bound=Displacement)
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


class GradientAllreduce:
    """Reduces one flat gradient per step over all ranks of a communicator.

    Several instances may live side by side, one per bucket, parameter group or communicator: they share nothing.

    Args:
        comm: an `MPI.Intracomm` or a `torch.distributed.ProcessGroup`; duplicated; None: torch's default process group where
            there is one, else all ranks of the MPI job. Collective: every rank must construct, with the same arguments.
        length: elements of the gradient (n).
        method: a name in `oktopk.METHODS`.
        device: "cpu" for NumPy arrays, "cuda" for CuPy arrays on the current GPU.
        gradient_type: "float32"; on a GPU also "bfloat16" or "float16". The update is float32.
        stream: on a GPU, the cupy stream that gradients are produced on; None: the current one.
        peer_memory: on GPUs of one host, let kernels read each other's memory in steps of Ok-Topk. None: where every
            rank has a GPU of its own; True: also where they share one, which is slow; False: MPI alone.
        update: float32[n] on the device, zero, to be taken for `update`; None: memory of its own.
        problem: an error that the caller found on this rank alone; every rank then raises it.
        settings: keywords of `oktopk.Settings`.

    Raises:
        RuntimeError: a launcher started several processes, and MPI has only this one; the message says how to start them.
        ValueError: an argument is out of range, the device cannot be used, or ranks disagree; on every rank alike.
        MissingRanksError: ranks did not come within `Settings.timeout`; on the others, and on a missing rank when it comes.

    Memory: n words of update; n of residual where the method is sparse, as many again with
        nonfinite="skip"; n/2 of scratch from the first dense step on; 3n/2 from the first measured step on; the lists
        of the method, O(k) for Ok-Topk where regions balance. In two levels n elements of gradient, n/G words of residual and
        of sums, n words of scratch in each dense step, and on GPUs a window of a shard's entries.
    Traffic: that of the method, see `oktopk.methods`; a barrier and one allgather of the settings at construction.
    Source: Li & Hoefler, PPoPP 2022, algorithm 2.

    Example:
        >>> reducer = GradientAllreduce(MPI.COMM_WORLD, length=len(gradient), method="oktopk", density=0.01)
        >>> report = reducer.step(gradient)
        >>> parameters -= learning_rate * reducer.update
    """

    def __init__(
        self,
        comm: Communicator | None,
        length: int,
        method: str = "oktopk",
        *,
        device: str = "cpu",
        gradient_type: str = "float32",
        stream: Any = None,
        peer_memory: bool | None = None,
        update: Any = None,
        problem: str = "",
        **settings: Any,
    ) -> None:
        problem = problem or unknown_setting(settings, GradientAllreduce)
        parts = Parts(
            comm, length, method, device, gradient_type, stream, peer_memory, update, problem, settings
        )
        self.settings, self.backend = parts.settings, parts.backend
        self.transport: Transport = parts.transport
        self._placement, self._vectors = parts.placement, parts.vectors
        self.flat_reason = parts.flat_reason
        """Why steps are flat though levels is "auto", in a sentence; "" if they are not, or are meant to be."""
        self._p2p_problem = self.p2p_unavailable_reason = parts.p2p_unavailable_reason
        """Why this instance does not use peer memory, in a sentence; "" if it does."""
        self.length = length
        self.method = method
        self.time_stages = False
        """Time the stages of steps through peer memory by device events, which takes some 50 us a step. Without it their
        report has one stage, `step`."""
        self.advice = _SAME_STEPS
        """What a MissingRanksError of a step says to do, in a sentence."""
        self.steps = 0
        self.tokens: tuple[int, ...] | None = None
        """Equal on all ranks: the tokens that the ranks passed to the last step that has ended, in two levels one that they are
        combined to. None where none were passed or they are not known; a deferred step ends when the next one begins."""
        self._methods: dict[str, Method] = {}
        self._executors: dict[str, Executor] = {}
        self._final: tuple[Method, int] | None = None  # the method and its k, once neither changes any more
        self._entries: Callable[[float], int] = partial(entries_kept, length=length)
        self._sampler: Sampler | None = None
        self._sparse_steps = 0
        self._moved = False  # the step adds a displacement
        self._last_k: int | None = None
        self._said_dense = False
        # the step whose result is not known yet, and the caller's report of it
        self._open: tuple[Plan, StepHandle, StepReport] | None = None
        self._trust = 0  # deferrable steps in a row, up to _TRUSTED

    @property
    def update(self) -> NDArray[np.float32]:
        """float32[n], the last step's result: the mean over the ranks, or the sum. Valid until the next step.

        Read-only on the CPU. To change it in place, on a GPU too, take `writable_update`.
        """
        return self.backend.read_only(self._vectors.update)

    @property
    def writable_update(self) -> NDArray[np.float32]:
        """float32[n], the memory of `update`. Call `forget_support` after writing to it, or old entries stay in later updates."""
        return self._vectors.update

    @property
    def residual(self) -> NDArray[np.float32] | None:
        """float32[n], what was not applied; None where no step leaves anything behind.

        In two levels float32[shard], of the host's sum; `gathered_residual` puts the shards together.
        """
        with self.backend.stream_scope():
            self._vectors.put_back()
        return self._vectors.residual

    @property
    def transports(self) -> list[Transport]:
        """Where ranks wait for each other."""
        return [self.transport]

    @property
    def carried(self) -> int:
        """Elements of `residual`: n, in two levels those of this rank's shard."""
        return self._placement.carried

    @property
    def levels(self) -> str:
        """What steps do: "flat" or "hosts", see `Settings.levels`."""
        return self._placement.levels

    @property
    def group(self) -> HostGroup | None:
        """The ranks of this host, in two levels; None in flat steps."""
        return self._placement.group

    @property
    def hosts(self) -> list[int] | None:
        """int[P], the number of each rank's host, in two levels; None in flat steps."""
        return self._placement.hosts

    @property
    def shards(self) -> int:
        """Shards that a host holds its residual in; 1 in flat steps."""
        return self._placement.shards

    @property
    def gradient_buffer(self) -> NDArray[np.float32] | None:
        """[n] of the gradient type, to be filled and given to `step`, which then copies nothing. None in flat steps.

        After `close` an array that was taken before still has its memory, which no step reads.
        """
        return self._placement.gradient_buffer

    def mean_in_host(self, flag: bool = False, token: int | None = None) -> tuple[int, ...] | None:
        """Make `gradient_buffer` the mean of what all ranks of this host have filled it with, equal bit for bit. For two levels.

        No step, and no message to another host. Collective: every rank of the host must call.

        Args:
            flag: of this rank; where any rank of the host raises it, nothing is summed.
            token: a word that all ranks of the host are to see; on every rank or on none.

        Returns:
            The tokens of the host's ranks, () where they gave none; None where any raised its flag.

        Raises:
            RuntimeError: steps are flat, or gradients are not float32; on every rank alike.
            MissingRanksError: ranks of the host did not come within `Settings.timeout`.

        Traffic: a control allgather and two control allreduces of one int64 in the host. Memory traffic: each rank reads a shard
            of all gradients, and the others' shards of the mean, from each other's memory.
        """
        group = self._placement.group_of_means()
        with self.backend.stream_scope():
            self._complete()
            self._expect_step(self.steps)
            try:
                return group.mean(flag, token)
            finally:
                self._placement.expect_none()

    def gathered_residual(self) -> NDArray[np.float32]:
        """float32[n] in CPU memory, whose sum over the ranks is all that was not applied. Collective.

        In flat steps this rank's residual. In two levels that of the whole host on its first rank, and zero on the others.
        A step that `begin` has started is ended first, and may raise as `complete`.
        """
        if self.awaited:
            self.complete()
        self.meet("gathered_residual")
        with self.backend.stream_scope():
            gathered = self._placement.whole_residual(self._vectors)
        if gathered is None or not self._placement.first:
            return np.zeros(self.length, np.float32)
        return gathered

    @property
    def sparse_steps(self) -> int:
        """Steps so far in which a sparse method ran."""
        return self._sparse_steps

    @property
    def can_read_tensors(self) -> bool:
        """Whether some steps read a tensor list: those of Ok-Topk through peer memory. Equal on all ranks."""
        settings = self.settings
        sparse = METHODS[self.method].sparse and settings.density <= DENSE_ABOVE
        return sparse and not self.p2p_unavailable_reason

    def reads_tensors(self, measure: bool = False) -> bool:
        """Whether the next step may be given a tensor list, see `gradient_tensors`: not where it is dense or measured."""
        settings, step = self.settings, self.steps
        dense = step < settings.dense_warmup_steps or settings.density_at(step) > DENSE_ABOVE
        return self.can_read_tensors and not (dense or measure)

    def gradient_tensors(self, sizes: Sequence[int], element_type: str) -> GradientTensors:
        """A gradient in several arrays on the GPU, which steps read where they lie. Collective.

        Steps round its elements to the gradient type as they read them, to nearest even. `set_pointers` tells where the arrays
        lie, which may change in every step.

        Args:
            sizes: elements of the arrays, in the order of the vector; `length` in all.
            element_type: of the arrays: "float32", "bfloat16" or "float16".

        Raises:
            RuntimeError: no step reads a tensor list here, see `can_read_tensors`; on every rank alike.
            ValueError: another type, or sizes that do not add up to `length`, on some rank, or its GPU has no memory for it; on
                every rank alike.

        Memory: n/512 bytes, and 16 bytes an array.
        """
        if not self.can_read_tensors:
            raise RuntimeError("no step of this reducer reads a tensor list: pass one vector")
        self.meet("gradient_tensors")
        with self.backend.stream_scope():
            return make_together(
                self.transport,
                partial(self.backend.gradient_tensors, sizes, element_type),
                self._sizes_problem(sizes, element_type),
            )

    def displacement(
        self, sizes: Sequence[int], element_type: str, reference: Any, share: float
    ) -> ParameterDisplacement:
        """What parameters move from round(reference - share · residual), as the gradient of all steps to come. Collective.

        Steps keep no copy of the residual to undo by: a finite displacement stays in it, whatever becomes of the step.

        In two levels it is a `ShardDisplacement`: the caller fills its vector, of this rank's shard, before each step, and
        `show` takes the residual of the whole host.

        Args:
            sizes, element_type: of the parameters, as `gradient_tensors`.
            reference: float32[n] on the device, its memory; read.
            share: of the residual that parameters hold.

        Raises:
            ValueError: as `gradient_tensors`; or steps have no residual, or are deferred.

        Memory: on a GPU n/512 bytes, and 16 bytes a parameter. In steps that are dense or measured, and of methods that select in
            a way of their own, n words. In two levels n/G words.
        """

        def make() -> ParameterDisplacement:
            whole = self.backend.displacement(sizes, element_type, reference, share)
            return self._placement.displacement(whole)

        return self._new_displacement(make, self._sizes_problem(sizes, element_type))

    def adamw_displacement(self, sizes: Sequence[int], element_type: str) -> AdamWDisplacement:
        """What AdamW moves parameters by, computed in the pass that selects, for flat steps. Collective.

        A step may take it or the `displacement`, each rank as it likes. Steps keep no copy of the residual to undo by.

        Args:
            sizes, element_type: of the parameters, as `gradient_tensors`; gradients and moments are of that type.

        Raises:
            ValueError: as `displacement`; or steps are in two levels.

        Memory: on a GPU n/512 bytes, and 64 bytes a parameter. In steps that are dense or measured, and of methods that select in
            a way of their own, n words.
        """
        problem = self._sizes_problem(sizes, element_type) or self._placement.adamw_problem
        return self._new_displacement(partial(self.backend.adamw_displacement, sizes, element_type), problem)

    def _new_displacement(self, make: Callable[[], _Displacement], problem: str) -> _Displacement:
        if self._vectors.residual is None:
            problem = problem or "a displacement needs a residual: steps of a sparse method"
        if self.settings.deferred:
            problem = problem or "a displacement is not for deferred steps"
        self.meet("displacement")
        with self.backend.stream_scope():
            made = make_together(self.transport, make, problem)
            self._vectors.keep_no_copies()
        return made

    def _sizes_problem(self, sizes: Sequence[int], element_type: str) -> str:
        """Why there is no gradient of such parts, in a sentence; "" if there is."""
        known = GRADIENT_TYPES["cuda"]
        if element_type not in known:
            return f"element_type {element_type!r} is not one of {', '.join(known)}"
        if min(sizes, default=0) < 0:
            return f"size {min(sizes)} is negative"
        if sum(sizes) != self.length:
            return f"sizes add up to {sum(sizes)}, not to {self.length}"
        return ""

    def step(
        self,
        gradient: NDArray[np.float32] | GradientTensors | Displacement,
        *,
        measure: bool = False,
        problem: str = "",
        absent: Spans = (),
        token: int | None = None,
    ) -> StepReport:
        """Reduce one gradient; the result is in `update`. Collective: every rank must call.

        With `Settings.deferred` a step of Ok-Topk through peer memory is still running when this returns. Work that is put on
        the stream next sees `update`. The report is complete when the next step begins, or after `complete`. The host does not
        help such a step, which differs from one that is waited for:

        - Regions are renewed by the selections of the step before.
        - A global threshold that missed moves to the best candidate that keeps between k/2 and 5k/4.
        - A selection that should be exact, but packs less than k by its guess, is exact in the next step.
        - A step that needs the host is given up: `update` is zero, and the gradient stays in the residual. That is rare: a
          selection of more than 2k, no such candidate, a region that got far too much, kept entries far from balanced. The
          following steps are waited for until eight in a row did not need the host, as at the beginning.
        - A gradient that is not finite is found a step later.

        Args:
            gradient: [n] of the gradient type, C-contiguous, on the device; unchanged. bfloat16 is passed as uint16. Or a tensor
                list, where `reads_tensors` allows it, or a `displacement`.
            measure: take the paper's measures of a sparse step, see `oktopk.metrics`. They cost two dense allreduces, which the
                report's traffic and seconds leave out. Equal on all ranks. The update does not depend on it.
            problem: an error that the caller found on this rank alone; every rank then raises it, and nothing is applied.
            absent: spans (begin, end) of elements of which this rank has no gradient, ascending: what its residual
                holds there stays, until a step does not name them. Of `gradient` zero there. In two levels where no rank of the
                host has one, and only with a token.
            token: a word that `tokens` shows on all ranks, as `collectives.tokens.token_of` makes it, the first checksum of what
                `absent` names. On every rank or on none.

        Raises:
            NonFiniteGradientError: gradient + residual is NaN or Inf on some rank, or the sum over the ranks is, and the settings
                ask to raise; on every rank alike. For a deferred step, when the next one begins.
            TypeError, ValueError: the gradient has another type or length, is not contiguous, or is this reducer's update; on
                this rank alone. Start jobs so that they end when a rank raises (`python -m mpi4py`).
            ValueError: a rank has a problem, or no memory for the first step of a method or the first measured one; on every rank
                alike. (Through peer memory the others raise a RuntimeError that names the rank, a deferred step's in the next.)
            MissingRanksError: ranks did not come within `Settings.timeout`; on the others, and on a missing rank when it comes.
            RuntimeError: there is no peer memory for a new k, on every rank alike; or a kernel failed, on this rank alone.
        """
        return self._take(gradient, problem, absent, token, measure=measure, wait=True)

    def begin(
        self,
        gradient: NDArray[np.float32] | GradientTensors,
        *,
        problem: str = "",
        absent: Spans = (),
        token: int | None = None,
    ) -> StepReport:
        """Start a step, which `complete` ends. Collective: every rank must call, and then `complete`, before the next step.

        A step whose kernels do all of it (`reads_tensors`) is put on the stream, and nothing is waited for but where it computes
        new regions, or knows no threshold to select by. `awaited` tells whether its outcome is still open; the report is then
        incomplete. Other steps run as `step`, and have ended when this returns. The bits are those of `step`.

        Until `complete` has returned, `update` and `residual` do not hold; the report's last stage lasts until then.

        Args:
            gradient, problem, absent, token: as `step`; the gradient is unchanged until `complete` returns.

        Raises:
            NonFiniteGradientError, TypeError, ValueError, MissingRanksError, RuntimeError: as `step`.
        """
        return self._take(gradient, problem, absent, token, measure=False, wait=False)

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
            self.forget_support()

    def _take(
        self, gradient: Any, problem: str, absent: Spans, token: int | None, *, measure: bool, wait: bool
    ) -> StepReport:
        self._moved = moved = isinstance(gradient, Displacement)
        if isinstance(gradient, GradientTensors) and not (moved or self.reads_tensors(measure)):
            raise ValueError("this step reads no tensor list, see reads_tensors(): pass one vector")
        accepted = self.backend.validate(gradient, self.length)
        if self.backend.share_memory(accepted, self._vectors.update):
            raise ValueError(
                "the gradient is this reducer's own update, which the step overwrites: pass a copy"
            )
        with self.backend.stream_scope():
            self._complete()
            self._placement.withhold(self._vectors, absent)
            self._expect_step(self.steps, measure)
            beside = problem, absent, token
            try:
                if moved:
                    readable = self._method_at(self.steps)[0].reads_displacements and not measure
                    accepted = self._placement.displaced(accepted, self._vectors, readable)
                if measure:
                    return self._measured_step(accepted, *beside)
                report = self._begin(accepted, *beside, may_defer=True)
                handle = None if self._open is None else self._open[1]
                if isinstance(handle, CompletedStep) or (wait and self.awaited):
                    self._complete()
                return report
            finally:
                self._placement.expect_none()  # through peer memory there was no control operation

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
            self._expect_all(f"skip_together before step {self.steps}", self.advice)
            try:
                if not self.transport.any_control(wanted):
                    return None
            finally:
                self._placement.expect_none()
            method, k = self._method_at(self.steps)
        plan = Plan(k, exact=False, new_boundaries=False, scale=1.0, timer=StageTimer())
        self.steps += 1
        report = self._new_report(method, plan)
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
            self._expect_step(self.steps - 1)
            try:
                self._complete()
            finally:
                self._placement.expect_none()

    def meet(self, what: str) -> None:
        """Wait for all ranks to begin this call. Collective: a rank that does not come, or makes another call, is named."""
        self._expect_all(what)
        self.transport.barrier()
        self._placement.expect_none()

    def _expect_all(self, what: str, advice: str = EVERY_RANK_CALLS) -> None:
        """Limit the time that ranks may come late to what begins now."""
        self._placement.expect_all(what, self.settings.timeout, advice)

    def _expect_step(self, step: int, measure: bool = False) -> None:
        """Limit the time that ranks may come late to what begins now of a step."""
        self._expect_all(f"step {step}{' with measure=True' if measure else ''}", self.advice)

    def _complete(self) -> None:
        if self._open is None:
            return
        begun, self._open = self._open, None
        self._end(*begun)

    def _measured_step(self, gradient: Any, problem: str, absent: Spans, token: int | None) -> StepReport:
        method, k = self._method_at(self.steps)
        if not method.sparse:
            return self._step(gradient, problem, absent, token)
        self.transport.barrier()  # the sampler's payload has no limit on the time that ranks come late
        if self._sampler is None:
            self._sampler = make_together(
                self.transport, partial(Sampler, self.length, self.backend, self.transport)
            )
        self._sampler.before(*self._placement.measured(gradient, self._vectors))
        report = self._step(gradient, problem, absent, token)
        if report.skipped:
            return report
        to_sum = float(self.transport.size) if self.settings.average else 1.0
        selected, boundaries = self._placement.selected(self._vectors, method)
        report.measures = self._sampler.after(self.update, selected, k, to_sum, boundaries)
        return report

    def _step(self, gradient: Any, problem: str, absent: Spans, token: int | None) -> StepReport:
        """One step, which is waited for."""
        report = self._begin(gradient, problem, absent, token, may_defer=False)
        self._complete()
        return report

    def _renews_boundaries(self) -> bool:
        """Whether the next step computes new regions.

        What an optimizer of Adam's kind moves by first is as large everywhere: its selection says nothing of later ones.
        """
        sparse, interval = self._sparse_steps, self.settings.boundary_interval
        return sparse % interval == 0 or (self._moved and sparse < interval and sparse.bit_count() == 1)

    def _begin(
        self, gradient: Any, problem: str, absent: Spans, token: int | None, may_defer: bool
    ) -> StepReport:
        settings, step = self.settings, self.steps
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
            report = self._new_report(method, plan)
            self._skip(report, flagged.ranks)
            return report
        except ValueError:
            self.take_traffic()
            raise
        self._last_k = k
        report = self._new_report(method, plan)
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

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next step depends on, copied: plain numbers and arrays.

        Raises:
            NonFiniteGradientError: of the last step, where it was deferred.
            RuntimeError: a step through peer memory was aborted, and what this rank holds may not fit the others'; or entries
                that the last step gathered did not decode.
        """
        self.complete()
        with self.backend.stream_scope():
            vectors = self._vectors.state_dict()
            for executor in self._executors.values():  # after the copies, which wait for the device
                executor.check()
        return {
            "length": self.length,
            "method": self.method,
            "rank": self.transport.rank,
            "ranks": self.transport.size,
            "hosts": self.hosts,
            "wire": self.settings.wire,
            "steps": self.steps,
            "sparse_steps": self._sparse_steps,
            "last_k": self._last_k,
            "unaided": self._trust,
            "methods": {name: method.state_dict() for name, method in self._methods.items()},
            **vectors,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the `state_dict` of this rank was taken, bit for bit. Collective.

        Raises:
            ValueError: the state is damaged, or of another length, method, rank or number of ranks (see `oktopk.elastic`), or of
                another wire where one of the two rounds, or the ranks' states are not of one moment; on every rank alike,
                before anything is changed.
        """
        self.agree_on_state(state)
        with self.backend.stream_scope():
            self._load(state)

    def agree_on_state(self, state: dict[str, Any]) -> None:
        """Raise what `load_state_dict` would; nothing is changed. Collective."""
        problem = state_problem(state, self)
        common: dict[str, Any] = {}
        agreed: dict[str, Any] = {}
        learned: dict[str, Any] = {}
        if not problem:
            common = {name: state[name] for name in ("steps", "sparse_steps", "last_k", "unaided")}
            common |= {f"saved {name}": value for name, value in state.get("saved", {}).items()}
            agreed = {name: METHODS[name].agreed_state(theirs) for name, theirs in state["methods"].items()}
            learned = {
                name: [theirs.get("selection"), theirs.get("threshold")]
                for name, theirs in state["methods"].items()
            }
            # of the ranks that hold a shard: all of them together
            held = {"whether there is a residual": state["residual"] is not None}
            agreed, learned = agreed | held, learned | held
        self._expect_all("load_state_dict")
        self._placement.agree_on_state(common, agreed, learned, problem)

    def whole_residual(self) -> NDArray[np.float32] | None:
        """float32[n] on the host: the residual, in two levels of the host, equal on all its ranks; None where it is zero.

        Every rank must call. Traffic: none; in two levels an allgatherv inside the host.
        """
        with self.backend.stream_scope():
            self._complete()
            return self._placement.whole_residual(self._vectors)

    def continue_from(self, residual: Any, steps: int, sparse_steps: int) -> None:
        """Start with a residual as `whole_residual` gives it, thresholds and regions anew. Collective.

        Traffic: one control allgather.
        """
        if residual is not None:
            residual = self._placement.own_part(residual)
        anew: dict[str, Any] = {"last_k": None, "unaided": 0, "methods": {}, "residual": residual}
        with self.backend.stream_scope():
            self._load({"steps": steps, "sparse_steps": sparse_steps, **anew})

    def reset(self) -> None:
        """Forget residual, thresholds, regions and the number of steps, as if newly constructed. Collective."""
        none: dict[str, Any] = {"steps": 0, "sparse_steps": 0, "unaided": 0, "methods": {}}
        none |= dict.fromkeys(("last_k", "residual"))
        self.meet("reset")
        with self.backend.stream_scope():
            self._load(none)

    def _load(self, state: dict[str, Any]) -> None:
        for executor in self._executors.values():
            executor.close()
        self._methods, self._executors, self._final = {}, {}, None
        self.p2p_unavailable_reason = self._p2p_problem  # windows are asked for again
        self.steps = state["steps"]
        self._sparse_steps = state["sparse_steps"]
        self._last_k = state["last_k"]
        self._trust = state["unaided"]
        self._open = None
        self.take_traffic()
        make_together(self.transport, partial(self._vectors.load_state_dict, state))
        for name, method_state in state["methods"].items():
            self._instance(name).load_state_dict(method_state)

    def keep_entries(self, entries: Callable[[float], int]) -> None:
        """Choose k of the sparse steps to come, in place of density * n.

        Args:
            entries: density -> k, in [1, n]; equal on all ranks. A new k makes the next step exact.
        """
        self._entries, self._final = entries, None

    def renumber(self, steps: int, sparse_steps: int) -> None:
        """Go on as after so many steps, equal on all ranks; the next one computes exact thresholds."""
        self.steps, self._sparse_steps, self._last_k = steps, sparse_steps, None

    def take_back(self) -> None:
        """Undo the last step, which was applied nowhere; the update becomes zero. Every rank must call. No traffic.

        With nonfinite="skip" the residual becomes what it was before, bit for bit. Else, or after a displacement,
        the sum that was applied, of the step's gradients too, goes to the residual of rank 0, in two levels to those of the first
        host: nothing is lost, and the next steps apply it. A dense step without a residual is lost.
        """
        self.complete()
        with self.backend.stream_scope():
            vectors = self._vectors
            vectors.put_back()
            if vectors.restores:
                vectors.restore()
            elif vectors.residual is not None:
                if self._placement.in_first:
                    part = self._placement.own_part(vectors.update)
                    vectors.residual += part * (self.transport.size if self.settings.average else 1)
                vectors.pending = True  # on all ranks: states have residuals on all, or on none
            vectors.drop_update()

    def add_to_residual(self, vector: Any) -> None:
        """Add what is still to be sent to the residual, in flat steps. Every rank must call. No traffic.

        Args:
            vector: float32[n] on the device, finite.
        """
        self.complete()
        with self.backend.stream_scope():
            self._vectors.put_back()
            self._vectors.residual += vector
            self._vectors.pending = True

    def subtract_update(self, vector: Any) -> None:
        """vector -= update, of a step that has ended. No traffic.

        Args:
            vector: float32[n] on the device.

        Memory traffic: some 40 bytes an entry of the update, where the step knows them; else 12n bytes.
        """
        support = self._vectors.support
        with self.backend.stream_scope():
            if support is None:
                vector -= self._vectors.update
            elif support.nnz:
                scale = 1.0 / self.transport.size if self.settings.average else 1.0
                self.backend.kernels.add_entries(vector, support.entries, -scale)

    def forget_support(self) -> None:
        """Tell that `writable_update` was written to: the next step zeroes all of it, not only the applied entries."""
        self._vectors.support = None

    @closes
    def close(self) -> None:
        """Free what the library and the device hold. Collective. The report of a deferred step stays incomplete.

        Every public call raises RuntimeError from then on, but `close`, which does nothing. Ranks that call `step` in place of it
        name this rank, and the call.
        """
        announce(self.transports)
        if self._sampler is not None:
            self._sampler.close()
        with self.backend.stream_scope():
            for executor in self._executors.values():
                executor.close()
            self._placement.close()
        self.transport.close()

    def _method_at(self, step: int) -> tuple[Method, int]:
        """The method that runs, and its k."""
        if self._final is not None:
            return self._final
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
        chosen = self._instance(self.method), self._entries(density)
        if step >= self.settings.dense_warmup_steps + self.settings.density_warmup_steps:
            self._final = chosen
            self._forget("dense")  # of the warm-up: its windows take more memory than all else
        return chosen

    def _forget(self, name: str) -> None:
        """Free what a method holds that runs no more. Every rank must call."""
        if self._methods.pop(name, None) is not None:
            self._executors.pop(name).close()

    def _instance(self, name: str) -> Method:
        if name not in self._methods:
            place = self._placement
            method = METHODS[name](place.carried, place.among, self.backend.kernels, self.settings)
            self._executors[name] = make_together(self.transport, partial(self._executor, method))
            self._methods[name] = method
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

    def _new_report(self, method: Method, plan: Plan) -> StepReport:
        """The report of the last step that was counted, of whose outcome nothing is known yet."""
        report = StepReport(
            self.steps - 1, method.name, plan.k, self.length, plan.timer.seconds, complete=False
        )
        report.spans = plan.timer.spans
        report.levels, report.shards, report.wire = self.levels, self.shards, self.settings.wire
        return report

    def _complete_report(self, report: StepReport, result: StepResult) -> None:
        """Fill in what a step gave, and its traffic. The GPU has its next step only after this: it sets fields one by one."""
        report.local_exact, report.global_exact = result.local_exact, result.global_exact
        report.local_nnz, report.global_nnz = result.local_nnz, result.global_nnz
        report.local_threshold, report.global_threshold = result.local_threshold, result.global_threshold
        report.rounding = result.rounding
        traffic = self.take_traffic()
        report.words, report.messages = traffic.words, traffic.messages
        report.bytes, report.bytes_between = traffic.bytes, traffic.bytes_between
        report.control_words, report.control_messages = traffic.control_words, traffic.control_messages
        report.complete = True
