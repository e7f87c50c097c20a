"""Columns of a run file: name, type, unit, source, and reduction over the ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:  # a reader needs no MPI
    from mpi4py import MPI

    from oktopk import StepReport


PHASES = ("data", "forward", "backward", "reduction", "optimizer")
"""The phases of a step, in order."""

Columns = dict[str, NDArray[Any]]


class Span(NamedTuple):
    """A span of a rank's time.

    Attributes:
        name: a phase of PHASES, a stage of the reduction, or what jobs.train.timing names.
        start: seconds, by time.perf_counter() of this rank.
        seconds: that it took.
    """

    name: str
    start: float
    seconds: float

    @property
    def end(self) -> float:
        return self.start + self.seconds


@dataclass(frozen=True)
class Step:
    """One step as one rank measured it.

    Attributes:
        report: of its reduction.
        loss: mean over its batches.
        learning_rate: that the optimizer used.
        elapsed: seconds since training began, at its end.
        seconds: phase -> seconds, every phase of PHASES, on the device's clock.
        phases: each phase as it came, several of a kind where gradients are accumulated; what lies between two is in none only
            where their starts were marked.
    """

    report: StepReport
    loss: float
    learning_rate: float
    elapsed: float
    seconds: dict[str, float]
    phases: tuple[Span, ...] = ()

    @property
    def reduction(self) -> float:
        """Seconds of the reduction, without what the paper's measures took in it."""
        measures = self.report.measures
        return self.seconds["reduction"] - (measures.seconds if measures else 0.0)


class Column(NamedTuple):
    """One column.

    Attributes:
        dtype: in the file.
        unit: of its values, or what they are.
        over: "mean" or "max" over the ranks, or "rank 0": its value, where all ranks have the same or only its own counts.
        source: step -> value on this rank; None: the attribute of that name of the step's report or of its measures.
    """

    dtype: str
    unit: str
    over: str = "rank 0"
    source: Callable[[Any], float] | None = None


def _of_phase(phase: str, unit: str = "seconds") -> Column:
    return Column("f8", unit, "mean", lambda step: step.seconds[phase])


# A word is one 4-byte value or one 4-byte index.
STEP_COLUMNS: dict[str, Column] = {
    "step": Column("i8", "1 for the first", source=lambda step: step.report.step + 1),
    "elapsed": Column("f8", "seconds since training began", source=lambda step: step.elapsed),
    "learning_rate": Column("f8", "", source=lambda step: step.learning_rate),
    "loss": Column("f8", "", "mean", lambda step: step.loss),
    "words": Column("f8", "payload words sent", "mean"),
    "words_busiest": Column("f8", "payload words sent", "max", lambda step: step.report.words),
    "row_bytes": Column("f8", "payload bytes sent for tables with sparse gradients", "mean"),
    "bytes_between": Column("f8", "payload bytes sent to other hosts", "mean"),
    "messages": Column("f8", "payload messages sent", "mean"),
    "rounded": Column("f8", "share of the sent magnitudes that was rounded away", "mean"),
    "control_words": Column("f8", "words sent: sizes, splits, histograms, flags", "mean"),
    "control_messages": Column("f8", "messages sent", "mean"),
    "k": Column("i8", "entries asked for"),
    "local_nnz": Column("f8", "entries selected", "mean"),
    "global_nnz": Column("f8", "entries of the update"),
    "local_threshold": Column("f8", "magnitude", "mean"),
    "global_threshold": Column("f8", "magnitude"),
    "local_exact": Column("f8", "1: selected the exact top k, 0: reused a threshold", "mean"),
    "global_exact": Column("f8", "1: exact global threshold, 0: reused or none"),
    "skipped": Column("i1", "1: a gradient was not finite and the step was skipped"),
    "dense": Column(
        "i1",
        "1: the whole gradient was summed (method, warm-up or high density); of updates steps without an exchange",
        source=lambda step: step.report.method == "dense",
    ),
    "seconds_data": _of_phase("data"),
    "seconds_forward": _of_phase("forward"),
    "seconds_backward": _of_phase("backward"),
    "seconds_reduction": Column(
        "f8", "seconds: selection and communication", "mean", lambda step: step.reduction
    ),
    "seconds_optimizer": _of_phase("optimizer", "seconds: the rest of optimizer.step()"),
    "seconds_rest": Column(
        "f8",
        "seconds_reduction less all stages; negative where a stage waited on the host for the backward pass of a GPU",
        "mean",
        lambda step: step.reduction - step.report.total_seconds,
    ),
}
# NaN where xi has no meaning.
MEASURE_COLUMNS: dict[str, Column] = {
    "step": STEP_COLUMNS["step"],
    "xi": Column("f8", "missed / gradient_norm, the paper's assumption 1", "mean"),
    "missed": Column(
        "f8", "norm of the exact top k of the mean accumulated gradient minus the applied update", "mean"
    ),
    "gradient_norm": Column("f8", "norm of the mean gradient", "mean"),
    "fill_in": Column("f8", "entries that any rank selected, counted once, over k", "mean"),
    "region_balance": Column(
        "f8", "entries selected in the busiest region over the mean region; NaN without regions", "mean"
    ),
    "update_norm": Column("f8", "norm of the mean update that was applied", "mean"),
    "residual_norm": Column("f8", "norm of the mean residual that the step left", "mean"),
    "residual_over_update": Column(
        "f8", "residual_norm / update_norm; NaN where nothing was applied", "mean"
    ),
    "seconds": Column("f8", "seconds that measuring took, in no phase of the step", "mean"),
}
EVALUATION_COLUMNS: dict[str, Column] = {
    "step": Column("i8", "steps done"),
    "epoch": Column("f8", "epochs done"),
    "loss": Column("f8", "mean over the held-out samples; of speech, per word"),
    "accuracy": Column("f8", "fraction of the held-out samples; of speech, 1 - word error rate"),
    "samples": Column("i8", "of speech, words"),
    "character_error_rate": Column("f8", "of speech, wrong characters over those said; NaN elsewhere"),
    "seconds": Column("f8", ""),
}
SEGMENT_COLUMNS: dict[str, Column] = {
    "step": Column("i8", "steps done when the job began"),
    "ranks": Column("i8", ""),
    "host": Column("S64", ""),
    "started": Column("S32", "UTC, ISO 8601"),
}


GROUPS = {
    "steps": STEP_COLUMNS,
    "evaluations": EVALUATION_COLUMNS,
    "measures": MEASURE_COLUMNS,
    "segments": SEGMENT_COLUMNS,
}
"""Groups of a run file: a value per step, evaluation, measured step, and job that the run took."""


def rows(columns: dict[str, Column], steps: Sequence[Step], part: str) -> NDArray[np.float64]:
    """float64[steps, columns]: the steps of one rank; part: of a step, which has what no source gives."""
    sources = [column.source or attrgetter(f"{part}.{name}") for name, column in columns.items()]
    values = [[source(step) for source in sources] for step in steps]
    return np.array(values, np.float64).reshape(len(steps), len(sources))


def reduced(columns: dict[str, Column], ranks: Sequence[NDArray[np.float64]]) -> Columns:
    """Name -> value[steps], from the rows of all ranks."""
    every = dict(zip(columns, np.moveaxis(np.stack(ranks), 2, 0), strict=True))
    over: dict[str, Callable[..., Any]] = {
        "mean": np.mean,
        "max": np.max,
        "rank 0": lambda values, axis: values[0],
    }
    return {name: over[column.over](every[name], axis=0) for name, column in columns.items()}


class Gathered(NamedTuple):
    """Some steps, reduced over the ranks.

    Attributes:
        steps: every name of STEP_COLUMNS, each [steps].
        stages: stage -> seconds[steps], mean over the ranks; 0 in a step without it.
        measures: every name of MEASURE_COLUMNS, each [measured steps].
    """

    steps: Columns
    stages: dict[str, NDArray[np.float64]]
    measures: Columns


def gather(comm: MPI.Intracomm, steps: Sequence[Step]) -> Gathered | None:
    """Reduce the steps over the ranks. Collective.

    Args:
        comm: every rank calls with the same steps, as it measured them.
        steps: at least one.

    Returns:
        On rank 0; None elsewhere.

    Traffic: one gather of float64[steps, columns + stages].
    """
    measured = [step for step in steps if step.report.measures is not None]
    names = dict.fromkeys(name for step in steps for name in step.report.seconds)
    stages = {name: np.array([step.report.seconds.get(name, 0.0) for step in steps]) for name in names}
    own = rows(STEP_COLUMNS, steps, "report"), stages, rows(MEASURE_COLUMNS, measured, "report.measures")
    gathered = comm.gather(own)
    if gathered is None:
        return None
    of_steps, of_stages, of_measures = zip(*gathered, strict=True)
    nothing = np.zeros(len(steps))
    return Gathered(
        reduced(STEP_COLUMNS, of_steps),
        {
            name: np.mean([each.get(name, nothing) for each in of_stages], axis=0)
            for name in dict.fromkeys(name for each in of_stages for name in each)
        },
        reduced(MEASURE_COLUMNS, of_measures),
    )
