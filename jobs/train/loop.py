"""The training loop: steps and evaluations of every rank."""

from __future__ import annotations

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from itertools import islice
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from tqdm import tqdm

from collectives.dense_allreduce import dense_words
from jobs.cluster.agreement import decide_on_root, say
from jobs.config.config import Config
from jobs.restart.checkpoint import Checkpointer
from jobs.restart.state import Position, Progress, capture
from jobs.run import provenance
from jobs.run.columns import Gathered, Span, Step, gather
from jobs.run.file import RunFile, RunFileError
from jobs.train.agreement import NonFiniteLossError, check_same_parameters
from jobs.train.optimizers import learning_rate_factor
from jobs.train.passes import CapturedPasses, EagerPasses, Passes
from jobs.train.reduce.baselines import DdpTraining
from jobs.train.reduce.reduction import apply, reduce
from jobs.train.setup import Setup
from jobs.train.tasks.task import Workload
from jobs.train.timing import PhaseTimer, TimedStep, Trace, clock_ahead, events, measure
from oktopk import average_buffers


class BatchStream:
    """This rank's batches from a position on, epoch after epoch.

    Args:
        workload: whose batches.
        samples_per_batch: of all ranks together.
        start: where; the first batch that begins there or after.
        per_epoch: batches of an epoch, at most the workload's: with several to a step some may be left over.
    """

    def __init__(
        self, workload: Workload[Any], samples_per_batch: int, start: Position, per_epoch: int
    ) -> None:
        self._workload, self._samples, self._per_epoch = workload, samples_per_batch, per_epoch
        self._epoch, self._taken = start.epoch, -(-start.samples // samples_per_batch)
        self._batches = self._rest_of_epoch()

    def _rest_of_epoch(self) -> Iterator[Any]:
        left = max(0, self._per_epoch - self._taken)
        return islice(self._workload.batches(self._epoch, self._taken), left)

    @property
    def position(self) -> Position:
        return Position(self._epoch, self._taken * self._samples)

    @property
    def count(self) -> int:
        """Batches from the first epoch's first to here, had all been as large."""
        return self._epoch * self._per_epoch + self._taken

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        while True:
            for batch in self._batches:
                self._taken += 1
                return batch
            self._epoch, self._taken = self._epoch + 1, 0
            self._batches = self._rest_of_epoch()


def run_length(config: Config, steps_per_epoch: int, ahead: int = 0) -> int:
    """Steps of the run: training.steps or training.epochs, whichever ends first.

    Args:
        ahead: how many more steps than were done the epochs so far would have had at their present length.
    """
    training = config.training
    epochs = training.epochs * steps_per_epoch - ahead
    return min(
        limit for limit, asked in ((training.steps, training.steps), (epochs, training.epochs)) if asked
    )


class TrainingLoop:
    """The loop with what it carries from step to step; run() is collective.

    Args:
        setup: what is trained, with what; learning rates of its optimizer follow the schedule.
        file: where rank 0 records, None on the others.
        progress: what earlier jobs of the run have done.
        checkpointer: called after every step.
    """

    def __init__(
        self, setup: Setup, file: RunFile | None, progress: Progress, checkpointer: Checkpointer
    ) -> None:
        config, comm, workload = setup.config, setup.comm, setup.workload
        self.config, self.comm, self.workload = config, comm, workload
        self.optimizer, self.placement = setup.optimizer, setup.placement
        self.file = file
        self.steps_per_epoch = workload.steps_per_epoch // config.training.accumulate
        self.checkpointer = checkpointer
        self.batches = BatchStream(
            workload,
            config.training.batch_size * comm.size,
            progress.position,
            self.steps_per_epoch * config.training.accumulate,
        )
        self.done = progress.done
        # differs after a restart on other ranks, where an epoch has another number of steps
        self.ahead = self.batches.count // config.training.accumulate - self.done
        self.steps = run_length(config, self.steps_per_epoch, self.ahead)
        self.timed: list[TimedStep] = []
        self.began = 0.0
        self.began_on_root = 0.0  # by this rank's clock, of a timeline
        self.between: list[tuple[int, Span]] = []
        self.trace = Trace(file.path) if file is not None else None
        # of a batch in its step's loss
        share = torch.tensor(1.0 / config.training.accumulate, device=self.placement.device)
        self.passes: Passes = EagerPasses(workload, share)
        if config.training.cuda_graph:
            start = self.optimizer.eager_start if isinstance(self.optimizer, DdpTraining) else None
            self.passes = CapturedPasses(workload, share, self.optimizer.overlapped, start)
        self.figures: dict[str, str] = {}
        self.bar: tqdm[Any] = tqdm(
            total=self.steps,
            initial=self.done,
            desc=config.reduction.method,
            unit="step",
            disable=comm.rank != 0,
            # mpiexec puts a pipe between the ranks and the terminal, so its width is not to be asked for.
            bar_format="{desc} {percentage:3.0f}% |{bar:20}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
            # a batch job's output is a file, where every bar stays
            mininterval=30.0 if provenance.job() else 0.5,
        )

    def run(self) -> None:
        """Train to the end.

        Raises:
            NonFiniteGradientError: on every rank, when reduction.nonfinite is "raise".
            NonFiniteLossError: on every rank, likewise; a held-out loss is in the run file before.
            RanksDiverged: on every rank: their parameters are no longer the same.
            RunFileError: on every rank: the run file cannot be written.
        """
        self.began = time.perf_counter() - (self.file.elapsed if self.file is not None else 0.0)
        if self.config.run.timeline:
            self.began_on_root = self.comm.bcast(self.began) + clock_ahead(self.comm)
        self.workload.model.train()
        with self.bar, closing(self.passes):
            for step in range(self.done, self.steps):
                self._step(step)
                began = time.perf_counter()
                last = step + 1 == self.steps
                evaluate = last or (step + 1) % (self.config.training.eval_every or self.steps_per_epoch) == 0
                if len(self.timed) >= self.config.run.flush_every or evaluate:
                    self._write()
                if evaluate:
                    self.checkpointer.before_evaluation()
                    self._evaluate(step + 1)
                elif (step + 1 + self.ahead) % self.steps_per_epoch == 0:
                    self._check_same_parameters(step + 1)
                before = functools.partial(self._before_checkpoint, step + 1)
                state = functools.partial(capture, self.workload.model, self.optimizer, self.batches.position)
                self.checkpointer.after_step(step + 1, last=last, capture=state, before=before)
                if not self.timed:
                    # rank 0 wrote alone: the others would wait for it in the next step, and book that as reduction
                    self.comm.Barrier()
                self._note("between", step + 1, began)

    def _before_checkpoint(self, done: int) -> None:
        # a restart would take the common part of it for every rank's
        self._check_same_parameters(done)
        self._write()

    def _check_same_parameters(self, done: int) -> None:
        with self.optimizer.agreed():
            check_same_parameters(self.workload.model, self.comm, done, buffers=False)

    def _step(self, step: int) -> None:
        ahead = self.ahead if self.config.schedule.unit == "epochs" else 0
        rate = self.config.optimizer.lr * learning_rate_factor(
            self.config.schedule,
            step + ahead,
            steps=self.steps + ahead,
            steps_per_epoch=self.steps_per_epoch,
            ranks=self.comm.size,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        timer = PhaseTimer(self.placement, self.config.run.in_timeline(step + 1))
        losses = [self._accumulate(timer, number) for number in range(self.config.training.accumulate)]
        every = self.config.run.measure_every
        with timer.phase("reduction"):
            report = reduce(self.optimizer, step, measure=bool(every) and (step + 1) % every == 0)
        with timer.phase("optimizer"):
            apply(self.optimizer)
        # read when the run file is written: until then a GPU need not be waited for
        self.timed.append(TimedStep(report, losses, timer, rate))
        self.bar.update()

    def _accumulate(self, timer: PhaseTimer, number: int) -> torch.Tensor:
        """One backward pass of a step, on top of those before; returns the loss."""
        with timer.phase("data"):
            batch = next(self.batches)
        last = number + 1 == self.config.training.accumulate
        with nullcontext() if last else self.optimizer.no_sync():
            with timer.phase("forward"):
                if not number:
                    self.optimizer.zero_grad()
                loss = self.passes.forward(batch, last=last)
            with timer.phase("backward"):
                self.passes.backward()
        return loss

    def _write(self) -> None:
        began = time.perf_counter()
        self.optimizer.complete()
        measured = measure(self.timed, self.began)
        self.timed.clear()
        if not measured:
            return
        if self.config.reduction.nonfinite == "raise":
            self._check_losses(measured)
        gathered = gather(self.comm, measured)
        self._on_root(lambda file: self._record(file, gathered))
        shown = [step for step in measured if self.config.run.in_timeline(step.report.step + 1)]
        if shown or self.between:  # on all ranks alike
            own = events(shown, self.between, self.comm.rank, self.began_on_root)
            self.between.clear()
            every = self.comm.gather(own) or []
            self._on_root(lambda file: self.trace.append(every) if self.trace else None)
        self._note("record", measured[-1].report.step + 1, began)

    def _note(self, name: str, done: int, began: float) -> None:
        """Note work between two steps that ends now, for the timeline."""
        if self.config.run.in_timeline(done):
            self.between.append((done, Span(name, began, time.perf_counter() - began)))

    def _on_root(self, write: Callable[[RunFile], None]) -> None:
        """Write into the run file, on rank 0. Collective. Raises RunFileError, on every rank."""
        action = functools.partial(write, self.file) if self.file else lambda: None
        decide_on_root(self.comm, action, (RunFileError,), RunFileError)

    def _record(self, file: RunFile, gathered: Gathered | None) -> None:
        """Write what the ranks gathered into the run file and the progress bar; on rank 0."""
        assert gathered is not None
        file.append_steps(gathered.steps, gathered.stages)
        file.append_measures(gathered.measures)
        columns = gathered.steps
        words = float(columns["words"].mean())
        dense = dense_words(self.optimizer.length, self.comm.size)
        self.figures["loss"] = f"{columns['loss'].mean():.3f}"
        self.figures["words"] = f"{words / 1e3:,.1f}k" + (f" ({words / dense:.1%} of dense)" if dense else "")
        self.bar.set_postfix(self.figures, refresh=False)

    def _check_losses(self, measured: list[Step]) -> None:
        """Gradients may be finite where a loss is not, and training modes sum what is not finite like anything else."""
        diverged = next((step.report.step for step in measured if not math.isfinite(step.loss)), None)
        steps = {rank: step for rank, step in enumerate(self.comm.allgather(diverged)) if step is not None}
        if steps:
            named = ", ".join(map(str, steps))
            raise NonFiniteLossError(f"step {min(steps.values())}: the loss is NaN or Inf on rank(s) {named}")

    def _evaluate(self, done: int) -> None:
        # Each rank's batch norm has seen its own batches only; all must measure the same network.
        began = time.perf_counter()
        average_buffers(self.workload.model, self.comm)
        with self.optimizer.agreed():
            check_same_parameters(self.workload.model, self.comm, done)
            score = self.workload.score()
        sums = np.array(dataclasses.astuple(score), np.float64)
        self.comm.Allreduce(MPI.IN_PLACE, sums)
        loss, correct, samples, character_errors, characters = sums.tolist()
        evaluation = {
            "step": done,
            "epoch": (done + self.ahead) / self.steps_per_epoch,
            "loss": loss / max(1.0, samples),
            "accuracy": correct / max(1.0, samples),
            "samples": samples,
            "character_error_rate": character_errors / characters if characters else math.nan,
            "seconds": time.perf_counter() - began,
        }
        self._on_root(lambda file: file.append_evaluation(**evaluation))
        self._note("evaluation", done, began)
        if not math.isfinite(loss):
            problem = f"the held-out loss after step {done} is {loss}"
            if self.config.reduction.nonfinite == "raise":
                raise NonFiniteLossError(problem)
            say(self.comm, f"jobs.train: {problem}")
        self.figures["held-out"] = f"{correct / max(1.0, samples):.2%}"
        self.bar.set_postfix(self.figures)
