"""Times each phase of a step on the clock of the device; reads the clock once for many steps, so that none stalls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from jobs.run.columns import PHASES, Step
from jobs.train.placement import Placement
from oktopk import StepReport


@dataclass
class PhaseTimer:
    """When the phases of one step ended.

    Args:
        placement: whose clock it is.
    """

    placement: Placement
    phases: list[str] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.marks.append(self.placement.mark())

    def record(self, phase: str) -> None:
        """A phase ends here; what it did since the last end is added to it."""
        self.phases.append(phase)
        self.marks.append(self.placement.mark())


@dataclass
class TimedStep:
    """One step whose times and loss were not waited for yet.

    Attributes:
        report: of the reduction.
        losses: of its batches, on the device; their mean is the step's.
        timer: of PHASES.
        learning_rate: it was done with.
    """

    report: StepReport
    losses: list[torch.Tensor]
    timer: PhaseTimer
    learning_rate: float


def measure(steps: Sequence[TimedStep], began: float, ranks: int) -> list[Step]:
    """Wait for the steps, and read their clocks and losses in one go.

    Args:
        steps: in order.
        began: when training began, by time.perf_counter().
        ranks: in the run.
    """
    if not steps:
        return []
    placement = steps[0].timer.placement
    times = iter(placement.read([mark for step in steps for mark in step.timer.marks]))
    losses = iter(torch.stack([loss for step in steps for loss in step.losses]).tolist())
    measured = []
    for step in steps:
        last = next(times)
        seconds = dict.fromkeys(PHASES, 0.0)
        for phase in step.timer.phases:
            now = next(times)
            seconds[phase] += now - last
            last = now
        loss = sum(next(losses) for _ in step.losses) / len(step.losses)
        measured.append(Step(step.report, ranks, loss, step.learning_rate, last - began, seconds))
    return measured
