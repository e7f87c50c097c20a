"""Where the time of a step went, on the clock of the device, read when it may be waited for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from jobs.run.file import PHASES
from jobs.train.placement import Placement
from oktopk import StepReport

ON_THE_DEVICE = "gather and apply"
"""A stage that only a step has whose stages were timed on the device, one by one."""


@dataclass
class Laps:
    """When the phases of one step ended.

    Args:
        placement: whose clock it is.
    """

    placement: Placement
    phases: list[str] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.marks.append(self.placement.mark())

    def end(self, phase: str) -> None:
        """A phase ends here; what it did since the last end is added to it."""
        self.phases.append(phase)
        self.marks.append(self.placement.mark())


@dataclass
class TimedStep:
    """One step whose times and loss were not waited for yet.

    Attributes:
        report: of the reduction.
        losses: of its batches, on the device; their mean is the step's.
        laps: of PHASES.
        learning_rate: it was done with.
    """

    report: StepReport
    losses: list[torch.Tensor]
    laps: Laps
    learning_rate: float


@dataclass(frozen=True)
class MeasuredStep:
    """A step as it is recorded.

    Attributes:
        report: its stages' seconds sum up to those of the phase "reduction".
        loss: mean over its batches.
        seconds: of every phase of PHASES.
        ended: as time.perf_counter() counts.
        learning_rate: it was done with.
    """

    report: StepReport
    loss: float
    seconds: dict[str, float]
    ended: float
    learning_rate: float


def measure(steps: Sequence[TimedStep]) -> list[MeasuredStep]:
    """Wait for the steps, and read their clocks and losses in one go."""
    if not steps:
        return []
    placement = steps[0].laps.placement
    times = iter(placement.read([mark for step in steps for mark in step.laps.marks]))
    losses = iter(torch.stack([loss for step in steps for loss in step.losses]).tolist())
    measured = []
    for step in steps:
        started = last = next(times)
        spent = dict.fromkeys(PHASES, 0.0)
        for phase in step.laps.phases:
            now = next(times)
            spent[phase] += now - last
            last = now
        assert last >= started
        report = step.report
        if report.measures is None:  # measuring waits for the device, and its time is no stage's
            report = _on_the_devices_clock(report, spent["reduction"])
        mine = [next(losses) for _ in step.losses]
        measured.append(
            MeasuredStep(report, sum(mine) / len(mine), spent, ended=last, learning_rate=step.learning_rate)
        )
        spent["reduction"] = report.total_seconds
    return measured


def _on_the_devices_clock(report: StepReport, seconds: float) -> StepReport:
    """The report with stages that sum up to what the reduction took on the device.

    Its stages were timed on the host. There the first one also waits for a backward pass that a GPU has not finished, and
    the last one ends before the GPU has. Where they were timed on the device, all but `step` are what they are, and `step` is
    the rest.
    """
    stages = dict(report.seconds)
    if not stages:
        return report
    if ON_THE_DEVICE in stages:
        others = sum(taken for name, taken in stages.items() if name != "step")
        if others <= seconds:
            return replace(report, seconds=stages | {"step": seconds - others})
    names = list(stages)
    missing = seconds - report.total_seconds
    if missing >= 0:
        stages[names[-1]] += missing
        return replace(report, seconds=stages)
    for name in names:
        taken = min(stages[name], -missing)
        stages[name] -= taken
        missing += taken
    return replace(report, seconds=stages)
