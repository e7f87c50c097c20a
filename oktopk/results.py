"""What happened in one step."""

from __future__ import annotations

import time
from dataclasses import dataclass

from oktopk.metrics import Measures


@dataclass(slots=True)
class StepReport:
    """One step on one rank.

    Attributes:
        step: counted from 0.
        method: the method that ran; "dense" during a dense warm-up or above a density of 0.25.
        exact: a threshold was named exactly in this step, on this rank or by all, planned or because a count missed.
        skipped: a gradient was not finite and the settings say to skip: nothing was applied. If the step was deferred, what came
            behind it found an update of zero.
        complete: it is known how the step went; false of a deferred one until the next one begins, or
            `GradientAllreduce.complete`, and for good if that raised, a state was loaded or the instance closed. Until then
            entries, words and messages are zero, thresholds NaN.
        k: entries wanted.
        length: elements of the gradient (n).
        local_nnz: entries this rank selected; n for dense.
        global_nnz: entries applied; n for dense; 0 of a deferred step that stopped, whose gradient is in the residual.
        local_threshold, global_threshold: magnitudes selected by; NaN where the method has none.
        words, messages: payload this rank sent.
        bytes: payload bytes this rank sent.
        control_words, control_messages: sizes, cuts, histograms, flags; see `collectives.Traffic`.
        seconds: time by stage, in the order in which the stages ran; of a deferred step what the host took to launch it,
            and where stages are timed (`GradientAllreduce.time_stages`) theirs beside it.
        measures: the paper's measures, where they were asked for and the step was sparse and applied; else None.
    """

    step: int
    method: str
    exact: bool
    skipped: bool
    k: int
    length: int
    local_nnz: int
    global_nnz: int
    local_threshold: float
    global_threshold: float
    words: int
    messages: int
    control_words: int
    control_messages: int
    seconds: dict[str, float]
    measures: Measures | None = None
    complete: bool = True
    bytes: int = 0

    @property
    def total_seconds(self) -> float:
        """Time of all stages."""
        return sum(self.seconds.values())


class StageTimer:
    """Time by stage: each lap ends the stage that it names.

    Args:
        detailed: time what runs in one go on a device by stage too, where that is possible.

    Attributes:
        seconds: stage -> time so far.
    """

    __slots__ = ("_last", "detailed", "seconds")

    def __init__(self, detailed: bool = False) -> None:
        self.detailed = detailed
        self.seconds: dict[str, float] = {}
        self._last = time.perf_counter()

    def record(self, stage: str) -> None:
        """Book the time since the last lap on `stage`."""
        now = time.perf_counter()
        self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._last
        self._last = now

    def add(self, stage: str, seconds: float) -> None:
        """Book a part of the time since the last lap, measured elsewhere, on `stage`."""
        self.seconds[stage] = self.seconds.get(stage, 0.0) + seconds
        self._last += seconds
