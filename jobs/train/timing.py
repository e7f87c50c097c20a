"""Times each phase with device events; reads them once per flush, so steps never stall."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from jobs.run.columns import PHASES, Span, Step
from jobs.train.placement import Placement
from oktopk import StepReport


@dataclass
class PhaseTimer:
    """Marks the end of each phase of a step, and gives it an NVTX range on a GPU.

    Args:
        placement: whose clock it is.
        starts: mark starts, too: for a timeline, which tells the time between two phases.
    """

    placement: Placement
    starts: bool = False
    phases: list[str] = field(default_factory=list)
    marks: list[Any] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.marks.append(self.placement.mark())

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """A phase; in sums it has the time since the one before ended."""
        if self.starts:
            self._mark("")
        with self.placement.range(name):
            yield
        self._mark(name)

    def _mark(self, phase: str) -> None:
        """A phase ends here, or with no name the time between two."""
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


def measure(steps: Sequence[TimedStep], began: float) -> list[Step]:
    """Wait for the steps, and read their clocks and losses in one go.

    Args:
        steps: in order.
        began: when training began, by time.perf_counter().
    """
    if not steps:
        return []
    placement = steps[0].timer.placement
    times = iter(placement.read([mark for step in steps for mark in step.timer.marks]))
    losses = iter(torch.stack([loss for step in steps for loss in step.losses]).tolist())
    measured = []
    for step in steps:
        last = start = next(times)
        seconds = dict.fromkeys(PHASES, 0.0)
        phases = []
        for phase in step.timer.phases:
            now = next(times)
            if phase:
                seconds[phase] += now - last
                phases.append(Span(phase, start, now - start))
                last = now
            start = now
        loss = sum(next(losses) for _ in step.losses) / len(step.losses)
        measured.append(Step(step.report, loss, step.learning_rate, last - began, seconds, tuple(phases)))
    return measured
