"""What happened in one step."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collectives.traffic import Traffic


@dataclass(frozen=True)
class Measures:
    """One measured step; all but `seconds` is equal on all ranks.

    Attributes:
        missed: norm of (top k of the mean accumulated gradient) - (the update that was applied, as a mean).
        gradient_norm: norm of the mean of what entered the residuals: gradients, or what optimizers changed since the last
            exchange.
        fill_in: entries that any rank selected, counted once, over k: 1 where all supports coincide, P where none meet.
        region_balance: entries that all ranks together selected in the busiest region, over the mean of the regions. 1 where
            regions balance, P where one has all entries; NaN without regions.
        update_norm: norm of the update that was applied, as a mean.
        residual_norm: norm of the mean of the residuals that the step left, before `residual_decay`: what is still to be applied.
        seconds: time that measuring took on this rank, apart from the step's own stages.
    """

    missed: float
    gradient_norm: float
    fill_in: float
    region_balance: float
    update_norm: float
    residual_norm: float
    seconds: float

    @property
    def xi(self) -> float:
        """missed / gradient_norm; NaN where the mean gradient is zero. Convergence assumes a bound; the paper measured xi < P."""
        return self.missed / self.gradient_norm if self.gradient_norm else math.nan

    @property
    def residual_over_update(self) -> float:
        """residual_norm / update_norm: how many such updates the ranks still hold; NaN where nothing was applied."""
        return self.residual_norm / self.update_norm if self.update_norm else math.nan


@dataclass(slots=True)
class StepReport:
    """One step on one rank. `print` shows one line of it; `repr` shows all.

    Attributes:
        step: counted from 0.
        method: the method that ran; "dense" during a dense warm-up or above a density of 0.25.
        local_exact: this rank selected the exact top k of gradient plus residual, as planned or because a count missed; true for
            dense. False where it reused a threshold.
        global_exact: all ranks applied the exact top k of the sums. False where they reused a threshold or the method has none.
        skipped: a gradient was not finite, the settings ask to skip, and nothing was applied. After a deferred step the
            optimizer then saw an update of zero. Of a step in buckets: so it was in one of them at least. The others were undone,
            but those of a deferred step and of `ddp_hook` were applied: see `buckets`.
        complete: whether the outcome is known. A deferred step's report is incomplete until the next step begins or
            `GradientAllreduce.complete` returns, and for good if that raised, a state was loaded or the instance was closed.
            Until then entries, words and messages are 0 and thresholds NaN.
        k: entries wanted.
        length: elements of the gradient (n).
        local_nnz: entries this rank selected, in two levels its host; n for dense. Wanted are k, of a union `Method.local_k`.
        global_nnz: entries applied; n for dense; 0 of a deferred step that stopped, whose gradient is in the residual.
        local_threshold, global_threshold: magnitudes selected by; NaN where the method has none.
        words, messages: payload this rank sent.
        bytes: payload bytes this rank sent, as coded; bytes_between: those of them that went to other hosts.
        row_bytes: payload bytes this rank sent for tables with sparse gradients, which are in none of the figures above.
        wire: how entries travel, one of `collectives.codec.WIRES`.
        rounding: sums of magnitudes: of the rounding errors in what this rank encoded, to send it, and of what it encoded; zeros
            for a wire that does not round.
        control_words, control_messages: sizes, splits, histograms, flags; see `collectives.Traffic`.
        seconds: time by stage, in the order in which the stages ran; of a deferred step what the host took to launch it,
            and where stages are timed (`GradientAllreduce.time_stages`) theirs beside it. The last stage of a bucket that was put
            on the stream lasts until the host has ended it, with what the caller computed meanwhile.
        spans: (stage, start, seconds) of each part of these, as they came; `start` by `time.perf_counter()`. Stages that a GPU
            timed follow one another from where the host had launched them.
        levels: "flat" or "hosts", see `Settings.levels`.
        shards: that a host holds its residual in; 1 in flat steps.
        buckets: the reports of the buckets, in the order in which they started, where the gradient is reduced in several; the
            thresholds above are then NaN unless all agree, and `seconds` has what the step waited for them.
        measures: the paper's measures, where they were asked for and the step was sparse and applied; else None.
        replicas: that step on gradients of their own, with sends="updates"; 0 where gradients are summed.
        every: steps of the optimizer that this one exchange is for; `step` then counts exchanges.
    """

    step: int
    method: str
    k: int
    length: int
    seconds: dict[str, float]
    local_exact: bool = False
    global_exact: bool = False
    skipped: bool = False
    local_nnz: int = 0
    global_nnz: int = 0
    local_threshold: float = math.nan
    global_threshold: float = math.nan
    words: int = 0
    messages: int = 0
    control_words: int = 0
    control_messages: int = 0
    measures: Measures | None = None
    complete: bool = True
    bytes: int = 0
    bytes_between: int = 0
    row_bytes: int = 0
    levels: str = "flat"
    shards: int = 1
    wire: str = "plain"
    rounding: tuple[float, float] = (0.0, 0.0)
    buckets: tuple[StepReport, ...] = ()
    spans: Sequence[tuple[str, float, float]] = ()
    replicas: int = 0
    every: int = 1

    def __str__(self) -> str:
        """The step, the entries applied, the bytes that this rank sent, and the milliseconds of all stages and buckets.

        Where it sent to other hosts, the bytes of that; of updates the replicas as well. Where an
        exchange is for several steps it is named in place of the step, with the bytes by step.
        """
        applied = f"{self.global_nnz:,} of {self.length:,} entries applied"
        outcome = "skipped" if self.skipped else applied if self.complete else "not complete"
        sent = f"{self.bytes + self.row_bytes:,} bytes sent"
        if self.every > 1:
            sent += f" ({self.bytes_by_step:,.0f} by step)"
        if self.bytes_between or self.levels == "hosts":
            sent += f", {self.bytes_between:,} of them to other hosts"
        seconds = sum(each.total_seconds for each in self.buckets or (self,))
        replicas = f", {self.replicas} replica{'s' * (self.replicas > 1)}" if self.replicas else ""
        what = "step" if self.every == 1 else "exchange"
        return f"{what} {self.step}: {outcome}, {sent}, {1e3 * seconds:.1f} ms{replicas}"

    @property
    def bytes_by_step(self) -> float:
        """Payload bytes this rank sent, those for tables too, over the steps of the optimizer that they were for."""
        return (self.bytes + self.row_bytes) / self.every

    def add_traffic(self, sent: Traffic) -> None:
        """Add what this rank has sent for the step."""
        self.words += sent.words
        self.messages += sent.messages
        self.bytes += sent.bytes
        self.bytes_between += sent.bytes_between
        self.control_words += sent.control_words
        self.control_messages += sent.control_messages

    def bytes_per_token(self, tokens: int) -> float:
        """`bytes_by_step` over the tokens, or samples, that this rank reads in one of these steps."""
        return self.bytes_by_step / tokens

    @property
    def rounded(self) -> float:
        """Of the magnitudes that this rank encoded, the share that was rounded away; 0 for a wire that does not round."""
        error, mass = self.rounding
        return error / mass if mass else 0.0

    @property
    def exact(self) -> bool:
        """Every threshold of this step was exact here. Where it is so on all ranks, the update is what exact thresholds give."""
        return self.local_exact and (self.global_exact or math.isnan(self.global_threshold))

    @property
    def total_seconds(self) -> float:
        """Time of all stages."""
        return sum(self.seconds.values())


_TOTALS = (
    "k", "length", "local_nnz", "global_nnz", "words", "bytes", "bytes_between", "messages", "control_words", "control_messages",
)  # fmt: skip


def report_of_buckets(reports: Sequence[StepReport], timer: StageTimer) -> StepReport:
    """The report of a step in buckets, whose reports these are; `timer`: of what it waited for them."""
    first = reports[0]
    report = StepReport(
        first.step,
        first.method,
        first.k,
        first.length,
        timer.seconds,
        levels=first.levels,
        shards=first.shards,
        wire=first.wire,
        buckets=tuple(reports),
        spans=timer.spans,
    )
    add_up(report)
    return report


def add_up(report: StepReport) -> None:
    """Fill in what the reports of its buckets add up to."""
    reports = report.buckets

    def common(name: str) -> float:
        values = {getattr(each, name) for each in reports}
        return values.pop() if len(values) == 1 else math.nan

    for name in _TOTALS:
        setattr(report, name, sum(getattr(each, name) for each in reports))
    report.local_exact = all(each.local_exact for each in reports)
    report.global_exact = all(each.global_exact for each in reports)
    report.skipped = any(each.skipped for each in reports)
    report.complete = all(each.complete for each in reports)
    report.local_threshold, report.global_threshold = common("local_threshold"), common("global_threshold")
    errors, masses = zip(*(each.rounding for each in reports), strict=True)
    report.rounding = sum(errors), sum(masses)


class _Stage:
    """See `StageTimer.stage`; a generator would take 1 us more."""

    __slots__ = ("_ends", "_name", "_nvtx", "_timer")

    def __init__(self, timer: StageTimer, nvtx: ModuleType | None, name: str, ends: bool) -> None:
        self._timer, self._nvtx, self._name, self._ends = timer, nvtx, name, ends

    def __enter__(self) -> None:
        if self._nvtx is not None:
            self._nvtx.RangePush(self._name)

    def __exit__(self, kind: type[BaseException] | None, *ignored: object) -> None:
        if self._nvtx is not None:
            self._nvtx.RangePop()
        if self._ends and kind is None:
            self._timer.record(self._name)


class StageTimer:
    """Times the stages of a step: each `record` ends the stage that it names.

    Args:
        detailed: time the stages of steps that run as one graph on a device, too.
        nvtx: `cupy.cuda.nvtx`, for ranges that a profiler sees; None: there is none.

    Attributes:
        seconds: stage -> time so far.
        spans: see `StepReport.spans`.
    """

    __slots__ = ("_last", "_nvtx", "detailed", "seconds", "spans")

    def __init__(self, detailed: bool = False, nvtx: ModuleType | None = None) -> None:
        self.detailed = detailed
        self.seconds: dict[str, float] = {}
        self.spans: list[tuple[str, float, float]] = []
        self._nvtx = nvtx
        self._last = time.perf_counter()

    def stage(self, name: str, ends: bool = True) -> _Stage:
        """A range of this name in a profiler; then, unless an error ends it or it `ends` later, `record`."""
        return _Stage(self, self._nvtx, name, ends)

    def record(self, stage: str) -> None:
        """Add the time since the last record to `stage`."""
        self.add(stage, time.perf_counter() - self._last)

    def add(self, stage: str, seconds: float) -> None:
        """Add seconds measured elsewhere, a part of the time since the last record, to `stage`."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self.spans.append((stage, self._last, seconds))
        self._last += seconds
