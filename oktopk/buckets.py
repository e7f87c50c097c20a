"""A gradient in buckets, each reduced in the background as soon as it is there."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import replace
from functools import partial
from itertools import accumulate
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from collectives.closing import announce, closes
from collectives.connect import Communicator, connect
from collectives.errors import EVERY_RANK_CALLS, refuse
from collectives.limit import Limit
from collectives.sparse import Array, Vector
from collectives.transport import Transport
from oktopk.allreduce import GradientAllreduce, NonFiniteGradientError
from oktopk.backend import Ready
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.damage import StateError, state_errors
from oktopk.elastic import check_redistributed
from oktopk.results import StageTimer, StepReport, add_up, report_of_buckets
from oktopk.settings import Settings, entries_kept, timeout_of
from oktopk.state import check_state
from oktopk.worker import CommunicationThread

_Result = TypeVar("_Result")

TOGETHER = (NonFiniteGradientError, ValueError)
"""Errors of a step that every rank raises, after which the ranks may go on."""

_AT_ONCE = 3
"""Buckets that are reduced at once over MPI between GPUs: one is selected, summed or written while another is on the wire."""


class BucketedAllreduce:
    """Reduces one gradient per step in buckets, behind what the caller computes, in one order on all ranks.

    A *bucket* is a part of the gradient that is reduced by itself, as in DistributedDataParallel.

    A bucket that the kernels of GPUs of one host reduce (`reads_tensors`) is put on the stream when it starts. The host waits for
    it in `finish`, with `deferred` not even there. But where a bucket renews its regions (`Settings.boundary_interval`, or after
    a new k) its start waits for the other ranks to come there. Any other bucket is reduced in a thread. In flat steps over MPI
    between GPUs three threads take buckets in turn, each on a stream of its own.

    Each bucket has a `GradientAllreduce` of its own: residual, thresholds, regions, communicator and messages. Together they keep
    k entries, one a bucket at least and the others in proportion to their lengths, so that caps and bounds of a step in words are
    those of one vector.

    Args:
        comm: as `GradientAllreduce`.
        lengths: elements of the buckets, in the order in which they start; each at least 1.
        method: as `GradientAllreduce`.
        updates: memory for the update of each bucket, see `GradientAllreduce`; None: its own.
        advice: what a MissingRanksError of a construction or a step says to do; "": as `GradientAllreduce`.
        options: further arguments of `GradientAllreduce`, and keywords of `oktopk.Settings`.

    Raises:
        RuntimeError: as `GradientAllreduce`, and where ranks do not come.
        ValueError: as that; no bucket; an MPI that serves one thread only. On every rank.

    Attributes:
        reducers: one a bucket.
        transport: for control operations beside the threads; its `library` is that of the buckets' messages.
        lengths, length: elements of the buckets, and of all.
        can_read_tensors: as `GradientAllreduce.can_read_tensors`, of every bucket.

    Traffic: that of the method for each bucket.
    """

    def __init__(
        self,
        comm: Communicator | None,
        lengths: Sequence[int],
        method: str = "oktopk",
        *,
        updates: Sequence[Vector | None] | None = None,
        advice: str = "",
        **options: Any,
    ) -> None:
        with ExitStack() as opened:  # closed where this raises
            limit = Limit("BucketedAllreduce(...)", timeout_of(options), advice or EVERY_RANK_CALLS)
            self.transport = connect(comm, limit)
            opened.callback(self.transport.close)
            with self.transport.together(ValueError) as alike:
                self.lengths = alike["lengths"] = _checked(lengths)
                refuse(self.transport.threads_problem)
            self.length, self.method = sum(self.lengths), method
            self.reducers: list[GradientAllreduce] = []
            streams = [options.pop("stream", None)]
            own = zip(self.lengths, updates or [None] * len(self.lengths), strict=True)
            for number, (length, update) in enumerate(own):
                stream = streams[number % len(streams)]
                # made of one transport, buckets share what must carry their messages one after the other, as NCCL's communicator
                reducer = GradientAllreduce(
                    self.transport, length, method, update=update, stream=stream, **options
                )
                self.reducers.append(reducer)
                opened.callback(reducer.close)
                if number == 0 and _carries_several(reducer):
                    at_once = min(_AT_ONCE, len(self.lengths))
                    streams += [reducer.backend.stream_beside(place) for place in range(1, at_once)]
            self.transport.library = self.reducers[0].transport.library
            opened.pop_all()
        for number, reducer in enumerate(self.reducers):
            reducer.advice = advice or reducer.advice
            reducer.keep_entries(partial(_entries_of, number, self.lengths))
        # all are put on the stream, or all reduced in threads
        self.can_read_tensors = all(reducer.can_read_tensors for reducer in self.reducers)
        # bucket i is reduced in thread i modulo their number; all in one thread where a later bucket is in two levels and the
        # first is not, as the host had no memory for its gradients
        threads = len(streams) if all(map(_carries_several, self.reducers)) else 1
        self._threads = [CommunicationThread("oktopk", together=TOGETHER) for _ in range(threads)]
        self._started: list[Future[StepReport]] = []
        # those of `_started` that are on the stream, and that the host must end
        self._awaited: list[tuple[Future[StepReport], GradientAllreduce, StepReport]] = []
        self._refused: BaseException | None = None  # why no bucket of this step starts
        self._incomplete: StepReport | None = None  # of the last step, some of whose buckets were deferred

    @property
    def settings(self) -> Settings:
        """Of all buckets."""
        return self.reducers[0].settings

    @property
    def steps(self) -> int:
        """Steps that were begun."""
        return self.reducers[0].steps

    @property
    def time_stages(self) -> bool:
        """As `GradientAllreduce.time_stages`, of all buckets."""
        return self.reducers[0].time_stages

    @time_stages.setter
    def time_stages(self, wanted: bool) -> None:
        for reducer in self.reducers:
            reducer.time_stages = wanted

    @property
    def hosts(self) -> list[int] | None:
        """As `GradientAllreduce.hosts`."""
        return self.reducers[0].hosts

    @property
    def transports(self) -> list[Transport]:
        """Of all buckets."""
        return [reducer.transport for reducer in self.reducers]

    @property
    def levels(self) -> str:
        """As `GradientAllreduce.levels`."""
        return self.reducers[0].levels

    @property
    def updates(self) -> list[Vector]:
        """As `GradientAllreduce.writable_update`, of each bucket."""
        return [reducer.writable_update for reducer in self.reducers]

    @property
    def started(self) -> int:
        """Buckets of this step that were started."""
        return len(self._started)

    def reads_tensors(self, number: int) -> bool:
        """Whether a bucket of the next step may be given a tensor list, see `GradientAllreduce.reads_tensors`."""
        return self.can_read_tensors and self.reducers[number].reads_tensors()

    def start(
        self, gradient: Array | GradientTensors, ready: Ready = None, **beside: Any
    ) -> Future[StepReport]:
        """Reduce the next bucket. Collective, in one order on all ranks; see `submit` for other calls.

        It returns at once, but where a bucket on the stream renews its regions: see the class.

        Args:
            gradient: as `GradientAllreduce.step`, a tensor list where `reads_tensors` allows it; unchanged until `finish`.
            ready: called before the gradient is read, with the stream that reads it, on a GPU: to order that after the one that
                filled it. None: it was filled on the stream that was given at construction.
            beside: problem, absent, token, as `GradientAllreduce.step`.

        Returns:
            The bucket's report, or its error; done after `finish` at the latest, in a thread earlier. Its update
            is then valid, on a GPU on the reducer's stream, until it starts again.

        Raises:
            TypeError, ValueError: as `GradientAllreduce.step`, on this rank alone.
            RuntimeError: all buckets were started already.
        """
        number = len(self._started)
        if number == len(self.reducers):
            raise RuntimeError(f"all {number} buckets were started: call finish() first")
        reducer = self.reducers[number]
        reducer.backend.validate(gradient, self.lengths[number])
        if not number:
            self._refused = self._completed()
        begun: Future[StepReport] = Future()
        if self._refused is not None:
            begun.set_exception(self._refused)
        elif not self.reads_tensors(number):
            if ready is None:
                self._follow(reducer, self.reducers[0])
            thread = self._threads[number % len(self._threads)]
            step = partial(reducer.step, gradient, **beside)
            begun = thread.submit(partial(self._reduce, reducer, step, ready))
        else:
            step = partial(reducer.begin, gradient, **beside)
            self._threads[0].run(begun, partial(self._take, reducer, step, ready))
            if reducer.awaited:
                report, begun = begun.result(), Future()
                self._awaited.append((begun, reducer, report))
        self._started.append(begun)
        return begun

    def submit(self, call: Callable[[], _Result]) -> Future[_Result]:
        """Run a call in the first bucket's thread, behind its buckets that were started: a collective operation on its stream.

        Every rank must call, if the call is collective, and no bucket may start before the future is done where buckets are put
        on the stream (`can_read_tensors`).
        """
        return self._threads[0].submit(call)

    def _end_started(self) -> None:
        """End the buckets that were put on the stream, in their order. Collective: every rank must call.

        It waits for the decisions of the ranks. The futures are then done, but for those of buckets in threads.
        """
        while self._awaited:
            future, reducer, report = self._awaited.pop(0)
            try:
                self._threads[0].run(future, partial(_ended, reducer, report))
            finally:
                if self._threads[0].failed is not None:  # nothing may end it later, on this rank alone
                    reducer.give_up()

    def _completed(self) -> BaseException | None:
        """Complete the reports of deferred buckets; the error of their step, where there is one. Equal on all ranks."""
        for thread in self._threads:
            if thread.failed is not None:
                return thread.failed
        errors: list[BaseException] = []
        for reducer in self.reducers:
            try:
                reducer.complete()
            except Exception as error:
                errors.append(error)
        if errors:
            self._incomplete = None
            return _one_error(errors)
        if self._incomplete is not None:
            add_up(self._incomplete)
            self._incomplete = None
        return None

    @staticmethod
    def _take(reducer: GradientAllreduce, step: Callable[[], StepReport], ready: Ready) -> StepReport:
        """Take or begin the step of a bucket, once the gradient is ready."""
        if ready is not None:
            with reducer.backend.stream_scope():  # a default stream is of the GPU that is the current one
                ready(reducer.backend.stream)
        return step()

    def _reduce(self, reducer: GradientAllreduce, step: Callable[[], StepReport], ready: Ready) -> StepReport:
        """Take the step of a bucket in its thread."""
        try:
            return self._take(reducer, step, ready)
        finally:
            self._follow(self.reducers[0], reducer)  # the caller knows the first one's stream

    def finish(self, all_or_none: bool = True) -> StepReport:
        """Wait for the step's buckets, all of which were started; its report. Collective: every rank must call.

        The report adds up those of the buckets, which are in its `buckets`; its time is what this call
        waited. Buckets that were put on the stream end here in their order: one that its kernels cannot
        end goes on by messages.

        With `deferred` the report is incomplete until the next step begins, or `complete`. Where a bucket is then given up, or is
        not finite, it alone has an update of zero; the updates of the others hold.

        Args:
            all_or_none: where a bucket is skipped, undo the others, see `GradientAllreduce.take_back`; else their updates hold.

        Raises:
            NonFiniteGradientError: as `GradientAllreduce.step`; the other buckets are undone. Of a deferred bucket in the next
                step, of which no bucket then starts.
            RuntimeError: a bucket was not started.
            TypeError, ValueError, RuntimeError: as `GradientAllreduce.step`, and where ranks do not come.
        """
        if len(self._started) < len(self.reducers):
            raise RuntimeError(
                f"{len(self._started)} of {len(self.reducers)} buckets were started: start the others first"
            )
        timer = StageTimer()
        futures, reports, errors = self._end()
        timer.record("wait")
        skipped = all_or_none and any(report.skipped for report in reports)
        if (errors or skipped) and all(isinstance(error, TOGETHER) for error in errors):
            self._take_back(futures)
        if errors:
            raise _one_error(errors)
        report = report_of_buckets(reports, timer)
        if not report.complete:
            self._incomplete = report
        return report

    def _end(self) -> tuple[list[Future[StepReport]], list[StepReport], list[BaseException]]:
        """Wait for the buckets that were started; their futures, and what those have: reports and errors. Collective."""
        self._end_started()
        futures, self._started = self._started, []
        outcomes = [(future, future.exception()) for future in futures]
        reports = [future.result() for future, error in outcomes if error is None]
        return futures, reports, [error for _, error in outcomes if error is not None]

    @property
    def tokens(self) -> tuple[int, ...] | None:
        """As `GradientAllreduce.tokens`, of the last bucket."""
        return self.reducers[-1].tokens

    def take_back(self) -> None:
        """As `GradientAllreduce.take_back`, of all buckets."""
        for reducer in self.reducers:
            reducer.take_back()
            self._follow(self.reducers[0], reducer)

    def _take_back(self, futures: Sequence[Future[StepReport]]) -> None:
        for reducer, future in zip(self.reducers, futures, strict=False):
            if future.exception() is None:
                with suppress(NonFiniteGradientError):  # of a deferred one, which is undone then
                    reducer.complete()
                    if not future.result().skipped:
                        reducer.take_back()
                    self._follow(self.reducers[0], reducer)

    @staticmethod
    def _follow(reducer: GradientAllreduce, other: GradientAllreduce) -> None:
        """Order the stream of a bucket after that of another one."""
        if reducer.backend.stream is not other.backend.stream:
            reducer.backend.follow(other.backend)

    def step(self, gradients: Sequence[Array | GradientTensors], problem: str = "") -> StepReport:
        """Start the buckets that were not started, and `finish`. Collective: every rank must call.

        Args:
            gradients: of these buckets.
            problem: as `GradientAllreduce.step`; known to the others where a bucket is left to start.
        """
        for gradient in gradients:
            self.start(gradient, problem=problem)
        return self.finish()

    def discard(self) -> StepReport:
        """Undo a step whose buckets have all started, since something else of it failed. Every rank must call.

        Returns:
            The report of the step, which is skipped.

        Raises:
            RuntimeError: as `finish`.
        """
        futures, reports, errors = self._end()
        self._take_back(futures)
        for error in errors:
            if not isinstance(error, TOGETHER):
                raise error
        if not reports:
            raise NonFiniteGradientError([], self.steps - 1)
        return replace(report_of_buckets(reports, StageTimer()), skipped=True)

    def abandon(self) -> None:
        """Undo a step of which some buckets were started and the others will not be. Collective: every rank must call."""
        self._take_back(self._end()[0])
        self.renumber(self.steps, self.reducers[0].sparse_steps)

    def renumber(self, steps: int, sparse_steps: int) -> None:
        """As `GradientAllreduce.renumber`, of all buckets."""
        for reducer in self.reducers:
            reducer.renumber(steps, sparse_steps)

    def skip_together(self, wanted: bool) -> StepReport | None:
        """As `GradientAllreduce.skip_together`, before any bucket was started."""
        self._check_idle("skip_together()")
        self.complete()
        first = self.reducers[0].skip_together(wanted)
        if first is None:
            return None
        others = [reducer.skip_together(True) for reducer in self.reducers[1:]]
        return report_of_buckets([first, *(report for report in others if report is not None)], StageTimer())

    def meet(self, what: str) -> None:
        """As `GradientAllreduce.meet`, where a step of the other ranks begins."""
        self.reducers[0].meet(what)

    def _check_idle(self, what: str) -> None:
        """Raise RuntimeError where buckets are being reduced."""
        if self._started:
            raise RuntimeError(f"{what} while {len(self._started)} buckets are reduced: end the step first")

    def complete(self) -> None:
        """As `GradientAllreduce.complete`, of the buckets that were deferred. Not collective.

        Raises:
            NonFiniteGradientError: as `step`, but on the ranks that called.
            Exception: the error that has left the ranks apart in an earlier step.
        """
        if self._started:
            return  # the first bucket has completed those of the last step
        error = self._completed()
        if error is not None:
            raise error

    def forget_support(self) -> None:
        """As `GradientAllreduce.forget_support`."""
        for reducer in self.reducers:
            reducer.forget_support()

    def gathered_residual(self) -> NDArray[np.float32]:
        """As `GradientAllreduce.gathered_residual`: those of the buckets, from the last to the first. Collective."""
        self._check_idle("gathered_residual()")
        self.complete()
        # the first one meets other ranks' steps
        parts = [reducer.gathered_residual() for reducer in self.reducers]
        return np.concatenate(parts[::-1])

    def state_dict(self) -> dict[str, Any]:
        """As `GradientAllreduce.state_dict`, of each bucket."""
        self._check_idle("state_dict()")
        self.complete()
        return {
            "length": self.length,
            "method": self.method,
            "buckets": {str(number): reducer.state_dict() for number, reducer in enumerate(self.reducers)},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where the `state_dict` of this rank was taken, bit for bit. Collective.

        Raises:
            ValueError: as `GradientAllreduce.load_state_dict`, or of other buckets; on every rank alike.
        """
        self._check_idle("load_state_dict()")
        self.meet("load_state_dict")
        with self.transport.together(ValueError):
            self.check_state(state)
        for number, reducer in enumerate(self.reducers):
            reducer.load_state_dict(state["buckets"][str(number)])
        self._incomplete = None

    def check_state(self, state: Any) -> None:
        """Raise StateError where `load_state_dict` would refuse a state on this rank."""
        check_redistributed(state)
        with state_errors(what="the state is not one of buckets: "):
            buckets = [state["buckets"][str(number)] for number in range(len(state["buckets"]))]
            lengths = [bucket["length"] for bucket in buckets]
        if lengths != self.lengths:
            raise StateError(f"the state has buckets of {lengths} elements, this reducer of {self.lengths}")
        for number, (bucket, reducer) in enumerate(zip(buckets, self.reducers, strict=True)):
            with state_errors(f"bucket {number}: "):
                check_state(bucket, reducer)

    def reset(self) -> None:
        """As `GradientAllreduce.reset`."""
        self._check_idle("reset()")
        for reducer in self.reducers:
            reducer.reset()
        self._incomplete = None

    @closes
    def close(self) -> None:
        """Free what MPI and the device hold, after what was started. Collective."""
        for thread in self._threads:
            thread.close()
        announce(self.transports)
        for reducer in self.reducers:
            reducer.close()
        self.transport.close()


def _checked(lengths: Sequence[int]) -> list[int]:
    """The lengths of buckets; raises ValueError."""
    try:
        checked = [operator.index(length) for length in lengths]
    except TypeError:
        raise ValueError(f"lengths {lengths!r} are not integers") from None
    if not checked or min(checked) < 1:
        raise ValueError(
            f"buckets of {checked} elements: there must be one at least, of one element at least each"
        )
    return checked


def _carries_several(reducer: GradientAllreduce) -> bool:
    """Whether buckets like this one may be reduced at once, each in a thread of its own. Equal on all ranks.

    On a CPU they would take cores from each other, and kernels that wait for other GPUs room on this one. Ranks must call NCCL in
    one order.
    """
    over_mpi = reducer.transport.library == "MPI" and reducer.transport.size > 1
    messages = bool(reducer.p2p_unavailable_reason) and reducer.levels == "flat"
    return over_mpi and messages and reducer.backend.stream is not None


def bucket_ranges(lengths: Sequence[int], least: float) -> Iterator[range]:
    """Group consecutive tensors into buckets, from the last one on, each as large as asked for but the one of the first tensors.

    Args:
        lengths: elements of the tensors.
        least: elements of a bucket.

    Yields:
        The numbers of the tensors of each bucket, ascending.
    """
    stop, elements = len(lengths), 0
    for number in range(len(lengths) - 1, -1, -1):
        elements += lengths[number]
        if elements >= least or number == 0:
            yield range(number, stop)
            stop, elements = number, 0


def _entries_of(number: int, lengths: Sequence[int], density: float) -> int:
    """The entries that a bucket keeps: one, and its part by length of those that remain of all."""
    remaining = max(0, entries_kept(density, sum(lengths)) - len(lengths))
    ends = [remaining * end // sum(lengths) for end in accumulate(lengths, initial=0)]
    return min(1 + ends[number + 1] - ends[number], lengths[number])


def _one_error(errors: Sequence[BaseException]) -> BaseException:
    """The error of a step whose buckets had these: one that leaves the ranks apart, else one that names all ranks."""
    other = next((error for error in errors if not isinstance(error, NonFiniteGradientError)), None)
    if other is not None:
        return other
    nonfinite = [error for error in errors if isinstance(error, NonFiniteGradientError)]
    ranks = sorted({rank for error in nonfinite for rank in error.ranks})
    return NonFiniteGradientError(ranks, nonfinite[0].step)


def _ended(reducer: GradientAllreduce, report: StepReport) -> StepReport:
    """The report of a step that has begun, once that has ended."""
    reducer.complete()
    return report
