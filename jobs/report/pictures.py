"""The pictures of the report: which figures of the groups each shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.dense_allreduce import dense_words
from collectives.traffic import lower_bound, upper_bound
from jobs.report.groups import Group
from jobs.report.panels import FEW_POINTS, DotPanel, Level, Line, LinePanel, binned, line_of, stepwise
from jobs.report.summary import Run


def _step(run: Run) -> NDArray[Any]:
    return np.asarray(run.steps["step"])


# over what a curve is drawn: (name, x_label, column, values of a run's steps)
Over = tuple[str, str, str, Callable[[Run], NDArray[Any]]]
STEPS: Over = ("steps", "step", "step", _step)
TIME: Over = (
    "time",
    "training time, s (without evaluations)",
    "training_seconds",
    lambda run: run.training_seconds,
)
WORDS: Over = (
    "words",
    "payload words sent per rank (4 bytes each)",
    "words_sent",
    lambda run: run.words_sent,
)


def loss(groups: Sequence[Group], over: Over) -> LinePanel:
    """Training loss over steps, time or words."""
    name, x_label, column, of = over
    lines = tuple(
        line for group in groups if (line := stepwise(group, of, lambda run: run.steps["loss"])) is not None
    )
    # words of a rank alone are zero: there is no such axis
    lines = tuple(line for line in lines if over is not WORDS or line.x[-1] > 0)
    least = min((line.y[line.y > 0].min(initial=np.inf) for line in lines), default=1.0)
    largest = max((line.y.max(initial=0.0) for line in lines), default=1.0)
    return LinePanel(
        f"loss-over-{name}",
        f"Training loss over {_short(name)}",
        "mean over the ranks; a band spans the seeds",
        x_label,
        "training loss",
        (column, "loss"),
        lines,
        # near its end a good run is a hair above zero: a linear axis would show nothing of it
        log_y=bool(largest > 20 * least),
        log_x=over is WORDS,
    )


def accuracy(groups: Sequence[Group], over: Over, target: float | None = None) -> LinePanel:
    """Held-out accuracy over steps, time or words."""
    name, x_label, column, _ = over
    return LinePanel(
        f"accuracy-over-{name}",
        f"Held-out accuracy over {_short(name)}",
        "a band spans the seeds",
        x_label,
        "held-out accuracy",
        (column, "accuracy"),
        _evaluated(groups, over, "accuracy"),
        levels=() if target is None else (Level(target, f"target {100 * target:.4g}%"),),
        log_x=over is WORDS,
        percent=True,
        marks=True,
    )


def held_out_loss(groups: Sequence[Group], over: Over) -> LinePanel:
    """Held-out loss over steps, time or words."""
    name, x_label, column, _ = over
    return LinePanel(
        f"held-out-loss-over-{name}",
        f"Held-out loss over {_short(name)}",
        "a band spans the seeds",
        x_label,
        "held-out loss",
        (column, "loss"),
        _evaluated(groups, over, "loss"),
        log_x=over is WORDS,
        marks=True,
    )


def _evaluated(groups: Sequence[Group], over: Over, of: str) -> tuple[Line, ...]:
    """A line of each group's evaluations, by their column `of`."""
    lines = []
    for group in groups:
        runs = [run for run in group.runs if len(run.evaluations["step"]) and run.count]
        count = max((len(run.evaluations["step"]) for run in runs), default=0)
        if not count:
            continue
        x, y = np.full((len(runs), count), np.nan), np.full((len(runs), count), np.nan)
        for row, run in enumerate(runs):
            steps = run.evaluations["step"]
            x[row, : len(steps)] = run.at_steps(over[3](run), steps)
            y[row, : len(steps)] = run.evaluations[of]
        if (line := line_of(group, x, y)) is not None:
            lines.append(line)
    # words of a rank alone are zero: there is no such axis
    return tuple(line for line in lines if over is not WORDS or line.x[-1] > 0)


def final_accuracy(groups: Sequence[Group]) -> DotPanel:
    """The last held-out accuracy of each complete run."""
    shown = [
        group
        for group in groups
        if group.counted[0].complete and len(group.values("held_out_accuracy")) == len(group.counted)
    ]
    return DotPanel(
        "accuracy-at-the-end",
        "Held-out accuracy at the end",
        "a dot for each seed, a line at their mean",
        "held-out accuracy",
        tuple(shown),
        tuple(tuple(group.values("held_out_accuracy")) for group in shown),
    )


def learning_rate(groups: Sequence[Group]) -> LinePanel:
    """The schedule."""
    found = [stepwise(group, _step, lambda run: run.steps["learning_rate"], first=True) for group in groups]
    return LinePanel(
        "learning-rate",
        "Learning rate",
        "the schedule, one for all methods unless lines part",
        "step",
        "learning rate",
        ("step", "learning_rate"),
        tuple(line for line in found if line is not None),
    )


def words(groups: Sequence[Group]) -> LinePanel:
    """Words of each step against the bounds."""
    lines = [line for group in groups if (line := stepwise(group, _step, _sent)) is not None]
    levels: dict[float, str] = {}
    for line in lines:
        run = line.group.runs[0]
        size, k = run.info.ranks, run.info.k
        levels[dense_words(run.info.length, size)] = "2n(P−1)/P" if not size & (size - 1) else "dense"
        if line.group.runs[0].sparse.any():
            levels[upper_bound(k, size)] = "6k(P−1)/P"
            levels[lower_bound(k, size)] = "2k(P−1)/P"
    return LinePanel(
        "words-over-steps",
        "Words per step against the bounds",
        "payload words a rank sends, mean over the ranks",
        "step",
        "words per rank and step",
        ("step", "words"),
        tuple(lines),
        tuple(Level(value, label) for value, label in levels.items()),
        log_y=True,
    )


def threshold(groups: Sequence[Group], which: str) -> LinePanel:
    """The local or global threshold over the steps."""
    found = [stepwise(group, _step, lambda run: _sparse(run, f"{which}_threshold")) for group in groups]
    return LinePanel(
        f"{which}-threshold",
        f"{which.capitalize()} threshold",
        "magnitude that an entry must reach to be "
        + ("sent, mean over the ranks" if which == "local" else "applied"),
        "step",
        "magnitude",
        ("step", f"{which}_threshold"),
        tuple(line for line in found if line is not None and line.y.max() > 0),
        log_y=True,
    )


def entries(groups: Sequence[Group], which: str) -> LinePanel:
    """Entries selected locally or applied globally, over k."""
    found = [
        stepwise(group, _step, lambda run: _sparse(run, f"{which}_nnz") / run.steps["k"], FEW_POINTS)
        for group in groups
    ]
    return LinePanel(
        f"{which}-nnz",
        "Entries selected, over k" if which == "local" else "Entries applied, over k",
        "selected by a rank before anything is sent, mean over the ranks"
        if which == "local"
        else "entries of the update: fill-in makes those of a method that prunes nothing more than k",
        "step",
        "nnz / k",
        ("step", f"{which}_nnz_over_k"),
        tuple(line for line in found if line is not None),
        levels=(Level(1.0, "k"),),
    )


def measure(groups: Sequence[Group], column: str) -> LinePanel:
    """xi or fill_in over the measured steps."""
    lines = []
    for group in groups:
        line = binned(
            group,
            FEW_POINTS,
            [run.measures["step"].astype(np.float64) for run in group.runs],
            [run.measures["step"].astype(np.float64) for run in group.runs],
            [run.measures[column].astype(np.float64) for run in group.runs],
        )
        if line is not None:
            lines.append(line)
    sizes = sorted({line.group.ranks for line in lines})
    is_xi = column == "xi"
    return LinePanel(
        column.replace("_", "-"),
        "ξ, the error that the paper assumes bounded" if is_xi else "Fill-in",
        "‖top k of the mean accumulated gradient − applied update‖ / ‖mean gradient‖; the paper saw ξ < P"
        if is_xi
        else "entries that any rank selected, counted once, over k: 1 where all supports coincide, P where none meet",
        "step",
        "ξ" if is_xi else "union of supports / k",
        ("step", column),
        tuple(lines),
        tuple(Level(float(size), f"P = {size}") for size in sizes),
    )


def _short(name: str) -> str:
    return {"steps": "steps", "time": "time", "words": "words sent"}[name]


def _sent(run: Run) -> NDArray[Any]:
    return np.where(run.steps["words"] > 0, run.steps["words"], np.nan)


def _sparse(run: Run, column: str) -> NDArray[Any]:
    """A column in the steps in which a sparse method did its work, NaN in the others."""
    return np.where(run.sparse, run.steps[column], np.nan)
