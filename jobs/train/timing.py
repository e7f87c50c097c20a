"""Times each phase with device events, read once per flush, so that steps never stall; writes the trace of a run for Perfetto.

With run.timeline=true the file RUN-timeline.json has Chrome's trace events, to be opened at ui.perfetto.dev or in
chrome://tracing: a process for each rank, with threads for its steps, for the work between them, for stages, and for each
bucket, with what of it is exposed after the backward pass. A stretch that is selected there has the sums of its spans: a rank
that the others wait for has the longest forward and backward passes, and the shortest reduction. The steps are 10 after the
first 10, or what run.timeline_after and run.timeline_steps say; a job that continues a run begins the file anew.

Phases are measured by device events on a GPU; stages and buckets by the host's clock, where it begins them and waits for them.
With run.time_stages stages of a GPU have the lengths that its events give. Clocks of ranks are compared once, when training
begins.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from mpi4py import MPI

from data.durable import create
from jobs.run.columns import PHASES, Span, Step
from jobs.run.file import RunFileError
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


BUCKET = "bucket"
"""All of the reduction of one bucket, as the host saw it: behind the backward pass, after it, or both."""
THREADS = ("steps", "between steps", "stages")
"""Of a rank; those of its buckets follow."""
ROUND_TRIPS = 16

Event = dict[str, Any]


def clock_ahead(comm: MPI.Intracomm) -> float:
    """Seconds that this rank's time.perf_counter() is ahead of rank 0's. Collective.

    It is right to half of the fastest of ROUND_TRIPS messages to rank 0 and back. Clocks of unequal speed drift apart later.
    """
    trips = [(0.0, 0.0)] if comm.rank == 0 else []
    for rank in range(1, comm.size):
        for _ in range(ROUND_TRIPS):
            if comm.rank == 0:
                comm.recv(source=rank)
                comm.send(time.perf_counter(), rank)
            elif comm.rank == rank:
                sent = time.perf_counter()
                comm.send(None, 0)
                there = comm.recv(source=0)
                back = time.perf_counter()
                trips.append((back - sent, (sent + back) / 2 - there))
    return min(trips)[1]


def events(
    steps: Sequence[Step], between: Sequence[tuple[int, Span]], rank: int, began: float
) -> list[Event]:
    """One rank's spans as complete events ("X") in microseconds, from the beginning of training on.

    Args:
        steps: as it measured them.
        between: step before -> what was done then: "between" is all of it, checkpoints and waiting for others included; of that
            "evaluation" measures held-out samples and "record" writes the run file.
        rank: its number.
        began: when training began on rank 0, by this rank's clock.

    Source: "Trace Event Format".
    """
    traced: list[Event] = []

    def add(step: int, thread: int, span: Span, **more: float) -> None:
        times = {"ts": 1e6 * (span.start - began), "dur": 1e6 * span.seconds}
        what = {"ph": "X", "pid": rank, "tid": thread, "name": span.name, "args": {"step": step, **more}}
        traced.append(what | times)

    for number, span in between:
        add(number, 1, span)
    for step in steps:
        number = step.report.step + 1
        for span in step.phases:
            add(number, 0, span)
        for timed in step.report.spans:
            add(number, 2, Span(*timed))
        for bucket, report in enumerate(step.report.buckets):
            stages = [Span(*timed) for timed in report.spans]
            if stages:
                whole = Span(BUCKET, stages[0].start, stages[-1].end - stages[0].start)
                add(number, len(THREADS) + bucket, whole, **{"exposed ms": 1e3 * exposed(step.phases, whole)})
            for stage in stages:
                add(number, len(THREADS) + bucket, stage)
    return traced


def exposed(phases: Sequence[Span], bucket: Span) -> float:
    """Seconds of a bucket after the last backward pass of its step; the rest is hidden behind it."""
    backward = max((span.end for span in phases if span.name == "backward"), default=math.inf)
    return max(0.0, bucket.end - max(bucket.start, backward))


class Trace:
    """The file of a run's events: an array that lacks its end, as readers allow, so that it is whole at any time. On rank 0."""

    def __init__(self, run_file: Path) -> None:
        self.path = run_file.with_name(f"{run_file.stem}-timeline.json")
        self._named: set[tuple[int, int]] = set()

    def append(self, ranks: Sequence[Sequence[Event]]) -> None:
        """Append the events of all ranks. Raises RunFileError: the file cannot be written."""
        every = [event for own in ranks for event in own]
        begins, named = not self._named, {(event["pid"], event["tid"]): None for event in every}
        for rank, thread in named.keys() - self._named:
            name = (*THREADS, f"bucket {thread - len(THREADS)}")[min(thread, len(THREADS))]
            process = {"ph": "M", "pid": rank, "name": "process_name", "args": {"name": f"rank {rank}"}}
            every += [process, process | {"tid": thread, "name": "thread_name", "args": {"name": name}}]
        self._named |= named.keys()
        try:
            with open(create(self.path) if begins else self.path, "w" if begins else "a") as file:
                file.write("[\n" * begins + "".join(f"{json.dumps(event)},\n" for event in every))
        except OSError as error:
            raise RunFileError(f"timeline {self.path} cannot be written: {error}") from None
