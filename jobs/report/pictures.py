"""Selects the data of each picture of the report."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.dense_allreduce import dense_words
from collectives.traffic import lower_bound, upper_bound
from jobs.render.chart import Axis, Bar, Bars, Chart, Level, Line
from jobs.render.style import OURS
from jobs.report.groups import Group
from jobs.report.lines import FEW_POINTS, binned, line_of, stepwise
from jobs.report.summary import Run

_MARKED = 12
"""Most points of a line that are marked one by one."""
_HELD_OUT = {"accuracy": "accuracy", "loss": "held-out-loss"}
"""Column of an evaluation -> the name of its file."""
SELECTION = {
    "global_nnz": (
        "Entries applied, over k",
        "entries of the update; a method that prunes nothing exceeds k by its fill-in",
    ),
    "local_nnz": (
        "Entries selected, over k",
        "selected by a rank before anything is sent, mean over the ranks",
    ),
    "global_threshold": ("Global threshold", "magnitude that an entry must reach to be applied"),
    "local_threshold": (
        "Local threshold",
        "magnitude that an entry must reach to be sent, mean over the ranks",
    ),
}
"""Column of a step -> title and note of its picture."""
Values = Callable[[Run], NDArray[Any]]


def _step(run: Run) -> NDArray[Any]:
    return np.asarray(run.steps["step"])


class Over(NamedTuple):
    """The x of a curve: in the picture's name, in its title, on the axis; and its value at each step."""

    name: str
    title: str
    axis: Axis
    values: Values


STEPS = Over("steps", "steps", Axis("step", "step"), _step)
TIME = Over(
    "time",
    "time",
    Axis("training time, s (without evaluations)", "training_seconds"),
    lambda run: run.training_seconds,
)
BYTES = Over(
    "bytes",
    "bytes sent",
    Axis("bytes sent per rank, control messages included", "bytes_sent", log=10, prefixes=True),
    lambda run: run.bytes_sent,
)
TOKENS = Over("tokens", "tokens", Axis("tokens trained on", "tokens"), lambda run: run.tokens)


def _curves(groups: Sequence[Group], over: Values, values: Values, **how: Any) -> tuple[Line, ...]:
    """A line of one value per step for each group that has any; how: as `stepwise`."""
    lines = (stepwise(group, over, values, **how) for group in groups)
    return tuple(line for line in lines if line is not None)


def _over(
    over: Over, file: str, note: str, y: Axis, lines: Sequence[Line], levels: Sequence[Level] = ()
) -> Chart:
    # bytes of a rank alone are zero: there is no such axis
    drawn = tuple(line for line in lines if over is not BYTES or line.x[-1] > 0)
    title = f"{y.label.capitalize()} over {over.title}"
    return Chart(f"{file}-over-{over.name}", title, note, over.axis, y, drawn, tuple(levels))


def _by_step(
    file: str, title: str, note: str, y: Axis, lines: Sequence[Line], levels: Sequence[Level] = ()
) -> Chart:
    return Chart(file, title, note, STEPS.axis, y, tuple(lines), tuple(levels))


def loss(groups: Sequence[Group], over: Over) -> Chart:
    """Training loss over steps or tokens, time or bytes."""
    lines = _curves(groups, over.values, lambda run: run.steps["loss"])
    lines = tuple(line for line in lines if over is not BYTES or line.x[-1] > 0)
    least = min((line.y[line.y > 0].min(initial=np.inf) for line in lines), default=1.0)
    largest = max((line.y.max(initial=0.0) for line in lines), default=1.0)
    # near its end a good run is a hair above zero: a linear axis would show nothing of it
    steep = bool(largest > 20 * least)
    note = "; ".join(["mean over the ranks", *_band(groups)])
    return _over(over, "loss", note, Axis("training loss", "loss", log=10 * steep), lines)


def _band(groups: Sequence[Group]) -> list[str]:
    """The note on bands, where there are any."""
    return ["a band spans the seeds"] * any(len(group.runs) > 1 for group in groups)


def held_out(groups: Sequence[Group], over: Over, column: str, target: float | None = None) -> Chart:
    """Held-out "accuracy" or "loss", a point for each evaluation, over steps or tokens, time or bytes."""
    lines = []
    for group in groups:
        runs = [run for run in group.runs if len(run.evaluations["step"]) and run.count]
        count = max((len(run.evaluations["step"]) for run in runs), default=0)
        x, y = np.full((len(runs), count), np.nan), np.full((len(runs), count), np.nan)
        for row, run in enumerate(runs):
            steps = run.evaluations["step"]
            x[row, : len(steps)] = run.at_steps(over.values(run), steps)
            y[row, : len(steps)] = run.evaluations[column]
        if count and (line := line_of(group, x, y)) is not None:
            lines.append(replace(line, marker="o" if len(line.x) <= _MARKED else ""))
    note = "; ".join(["of samples that no rank trains on", *_band(groups)])
    axis = Axis(f"held-out {column}", column, percent=column == "accuracy")
    levels = () if target is None else (Level(target, f"target {100 * target:.4g}%"),)
    return _over(over, _HELD_OUT[column], note, axis, lines, levels)


def words(groups: Sequence[Group]) -> Chart:
    """Words of each step against the bounds."""
    lines = _curves(groups, _step, lambda run: np.where(run.steps["words"] > 0, run.steps["words"], np.nan))
    levels: dict[float, str] = {}
    drawn = {line.label for line in lines}
    for run in (group.runs[0] for group in groups if group.label in drawn):
        size, k = run.info.ranks, run.info.k
        levels[dense_words(run.info.length, size)] = "2n(P−1)/P" if not size & (size - 1) else "dense"
        if run.sparse.any():
            levels[upper_bound(k, size)] = "6k(P−1)/P"
            levels[lower_bound(k, size)] = "2k(P−1)/P"
    return _by_step(
        "words-over-steps",
        "Words per step against the bounds",
        "payload words a rank sends, mean over the ranks",
        Axis("words per rank and step", "words", log=10, prefixes=True),
        lines,
        [Level(value, label) for value, label in levels.items()],
    )


def selection(groups: Sequence[Group], column: str) -> Chart:
    """One of SELECTION over the steps in which a sparse method did its work; entries as multiples of k."""
    title, note = SELECTION[column]
    entries = column.endswith("_nnz")

    def values(run: Run) -> NDArray[Any]:
        found = np.where(run.sparse, run.steps[column], np.nan)
        return found / run.steps["k"] if entries else found

    if entries:
        lines, axis = _curves(groups, _step, values, points=FEW_POINTS), Axis("nnz / k", f"{column}_over_k")
        return _by_step(column.replace("_", "-"), title, note, axis, lines, [Level(1.0, "k")])
    lines = tuple(line for line in _curves(groups, _step, values) if line.y.max() > 0)
    return _by_step(column.replace("_", "-"), title, note, Axis("magnitude", column, log=10), lines)


def measure(groups: Sequence[Group], column: str) -> Chart:
    """xi or fill_in over the measured steps."""
    lines, sizes = [], set()
    for group in groups:
        steps = [run.measures["step"].astype(np.float64) for run in group.runs]
        values = [run.measures[column].astype(np.float64) for run in group.runs]
        if (line := binned(group, FEW_POINTS, steps, steps, values)) is not None:
            lines.append(line)
            sizes.add(group.ranks)
    title, unit = "ξ, the error that the paper assumes bounded", "ξ"
    note = "‖top k of the mean accumulated gradient − applied update‖ / ‖mean gradient‖; the paper saw ξ < P"
    if column == "fill_in":
        title, unit = "Fill-in", "union of supports / k"
        note = "entries that any rank selected, counted once, over k: 1 where all supports coincide, P where none meet"
    levels = [Level(float(size), f"P = {size}") for size in sorted(sizes)]
    return _by_step(column.replace("_", "-"), title, note, Axis(unit, column), lines, levels)


def step_bars(here: Sequence[Group], slow: Sequence[Group], rate: str) -> Bars | None:
    """A bar of a step's mean time for each method and place; None where no run over slow links is complete.

    Args:
        here: groups of runs on this host; slow: between hosts on links of `rate`.
        rate: with its unit.
    """
    bars = []
    for where, groups in (("one host", here), (rate, slow)):
        for group in groups:
            if group.method in ("dense", OURS) and group.counted[0].complete:
                step, reduction = (group.mean(f"{name}_seconds") or 0.0 for name in ("step", "reduction"))
                bars.append(
                    (where, Bar(f"{group.label}, {where}", group.method, step - reduction, reduction))
                )
    if not any(where == rate for where, _ in bars):
        return None
    title, note = f"Time of a step on one host and over {rate}", "pale: computation; dark: reduction; means"
    return Bars("step-times", title, note, tuple(bar for _, bar in bars))
