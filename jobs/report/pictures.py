"""The pictures of the report: each is described by what it shows, and one function draws its lines from runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from collectives.dense_allreduce import dense_words
from collectives.traffic import lower_bound, upper_bound
from jobs.render.chart import OURS, Axis, Chart, Level, Line
from jobs.report.groups import Group, reads_text
from jobs.report.summary import Run

POINTS = 240
"""Most points of a line: each is the mean of the steps that fall into its piece of the run."""
STEPS_A_POINT = 8
"""Fewest steps of such a piece, unless that leaves fewer than FEWEST_POINTS."""
FEWEST_POINTS = 20
FEW_POINTS = 80
"""As POINTS, where single steps scatter."""
_MARKED = 12
"""Most points of a line that are marked one by one."""
_STEEP = 20.0
Values = Callable[[Run], NDArray[Any]]


class Over(NamedTuple):
    """The x of a curve: in the picture's name, in its title, on the axis; and its value at each step."""

    name: str
    title: str
    axis: Axis
    values: Values


STEPS = Over("steps", "steps", Axis("step", "step"), lambda run: np.asarray(run.steps["step"]))
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


@dataclass(frozen=True)
class Picture:
    """What a picture shows.

    Attributes:
        name: of its CSV file; of a curve that is drawn over several things the beginning.
        note: what else a reader must know.
        y: its axis.
        values: float[rows] of a run, NaN where there is none.
        title: of a curve over several things that of its axis.
        of: the columns of a run whose rows `values` has: "steps", "evaluations" or "measures".
        levels: of the groups that are drawn.
        points: most points of a line; each evaluation is one.
        steep: the axis is logarithmic where the values are.
    """

    name: str
    note: str
    y: Axis
    values: Values
    title: str = ""
    of: str = "steps"
    levels: Callable[[Sequence[Group]], dict[float, str]] = lambda groups: {}
    points: int = POINTS
    steep: bool = False


def _bounds(groups: Sequence[Group]) -> dict[float, str]:
    """Words of a dense allreduce, and the bounds on a sparse one's."""
    levels: dict[float, str] = {}
    for run in (group.runs[0] for group in groups):
        size, k = run.info.ranks, run.info.k
        levels[dense_words(run.info.length, size)] = "2n(P−1)/P" if not size & (size - 1) else "dense"
        if run.sparse.any():
            levels |= {upper_bound(k, size): "6k(P−1)/P", lower_bound(k, size): "2k(P−1)/P"}
    return levels


def _entries(column: str, title: str, note: str) -> Picture:
    return Picture(
        column.replace("_", "-"),
        note,
        Axis("nnz / k", f"{column}_over_k"),
        lambda run: np.where(run.sparse, run.steps[column], np.nan) / run.steps["k"],
        title,
        levels=lambda groups: {1.0: "k"},
        points=FEW_POINTS,
    )


def _measure(column: str, title: str, unit: str, note: str) -> Picture:
    return Picture(
        column.replace("_", "-"),
        note,
        Axis(unit, column),
        lambda run: run.measures[column],
        title,
        "measures",
        lambda groups: {float(size): f"P = {size}" for size in sorted({group.ranks for group in groups})},
        FEW_POINTS,
    )


def held_out(column: str, target: float | None = None) -> Picture:
    """Held-out "accuracy" or "loss", a point for each evaluation."""
    return Picture(
        "accuracy" if column == "accuracy" else "held-out-loss",
        "of samples that no rank trains on",
        Axis(f"held-out {column}", column, percent=column == "accuracy"),
        lambda run: run.evaluations[column],
        of="evaluations",
        levels=lambda groups: {} if target is None else {target: f"target {100 * target:.4g}%"},
    )


# near its end a good run's loss is a hair above zero: a linear axis would show nothing of it
LOSS = Picture(
    "loss", "mean over the ranks", Axis("training loss", "loss"), lambda run: run.steps["loss"], steep=True
)
WORDS = Picture(
    "words-over-steps",
    "payload words a rank sends, mean over the ranks",
    Axis("words per rank and step", "words", log=10, prefixes=True),
    lambda run: np.where(run.steps["words"] > 0, run.steps["words"], np.nan),
    "Words per step against the bounds",
    levels=_bounds,
)
APPLIED = _entries(
    "global_nnz",
    "Entries applied, over k",
    "entries of the update; a method that prunes nothing exceeds k by its fill-in",
)
SELECTED = _entries(
    "local_nnz",
    "Entries selected, over k",
    "selected by a rank before anything is sent, mean over the ranks",
)
XI = _measure(
    "xi",
    "ξ, the error that the paper assumes bounded",
    "ξ",
    "‖top k of the mean accumulated gradient − applied update‖ / ‖mean gradient‖; the paper saw ξ < P",
)
FILL_IN = _measure(
    "fill_in",
    "Fill-in",
    "union of supports / k",
    "entries that any rank selected, counted once, over k: 1 where all supports coincide, P where none meet",
)


def sections(groups: Sequence[Group], target: float | None) -> dict[str, list[Chart]]:
    """Heading -> the pictures of the page below it; those with nothing to show are left out."""
    counted = all(run.tokens.any() for group in groups for run in group.runs)
    over = (TOKENS if counted else STEPS, TIME, BYTES)
    curves = {"Held-out loss": held_out("loss")} if reads_text(groups) else {}
    curves |= {"Held-out accuracy": held_out("accuracy", target), "Training loss": LOSS}
    charts = {title: [chart(groups, picture, each) for each in over] for title, picture in curves.items()}
    charts["Volume and selection"] = [chart(groups, each) for each in (WORDS, APPLIED, SELECTED)]
    charts["The paper's assumption"] = [chart(groups, each) for each in (XI, FILL_IN)]
    drawn = {title: [panel for panel in panels if panel.lines] for title, panels in charts.items()}
    return {title: panels for title, panels in drawn.items() if panels}


def chart(groups: Sequence[Group], picture: Picture, over: Over = STEPS) -> Chart:
    """A line for each group that has any value."""
    lines = {group: line(group, picture, over) for group in groups}
    # bytes of a rank alone are zero: there is no such axis
    drawn = {group: one for group, one in lines.items() if one and (over is not BYTES or one.x[-1] > 0)}
    band = ["a band spans the seeds"] * any(len(group.runs) > 1 for group in groups)
    name, title = picture.name, picture.title
    if not title:
        name, title = f"{name}-over-{over.name}", f"{picture.y.label.capitalize()} over {over.title}"
    y = picture.y
    if picture.steep and drawn:
        least = min(one.y[one.y > 0].min(initial=np.inf) for one in drawn.values())
        if max(one.y.max() for one in drawn.values()) > _STEEP * least:
            y = Axis(y.label, y.column, log=10)
    levels = [Level(value, label) for value, label in picture.levels([*drawn]).items()] if drawn else []
    note = "; ".join([picture.note, *band])
    return Chart(name, title, note, over.axis, y, tuple(drawn.values()), tuple(levels))


def line(group: Group, picture: Picture, over: Over = STEPS) -> Line | None:
    """A group's runs, cut into the same pieces: the mean and the extremes of each piece; None where there is no value."""
    steps = [getattr(run, picture.of)["step"] for run in group.runs]
    if not any(map(len, steps)):
        return None
    every, points = np.unique(np.concatenate(steps)), picture.points
    if picture.of == "evaluations":
        points = len(every)
    elif picture.of == "steps":
        points = max(FEWEST_POINTS, min(points, max(map(len, steps)) // STEPS_A_POINT))
    edges = every[np.linspace(0, len(every), min(points, len(every)) + 1).astype(int)[:-1]]
    pieces = []
    for run, step in zip(group.runs, steps, strict=True):
        index = np.searchsorted(edges, step, side="right") - 1
        x = run.at_steps(np.asarray(over.values(run), np.float64), step)
        pieces.append([_means(index, each, len(edges)) for each in (x, picture.values(run))])
    x, y = np.moveaxis(np.array(pieces), 1, 0)
    known = np.isfinite(y).any(axis=0) & np.isfinite(x).any(axis=0)
    if not known.any():
        return None
    x, y = x[:, known], y[:, known]
    marker = "o" if picture.of == "evaluations" and known.sum() <= _MARKED else ""
    look: dict[str, Any] = {"colour": group.colour, "dashes": group.dashes, "ours": group.method == OURS}
    means = np.nanmean(x, axis=0), np.nanmean(y, axis=0)
    return Line(group.label, *means, np.nanmin(y, axis=0), np.nanmax(y, axis=0), marker=marker, **look)


def _means(index: NDArray[np.int64], values: NDArray[Any], count: int) -> NDArray[np.float64]:
    """float64[count]: the mean of the finite values of each index, NaN where there is none."""
    good = np.isfinite(values)
    total = np.bincount(index[good], np.asarray(values, np.float64)[good], minlength=count)
    many = np.bincount(index[good], minlength=count)
    return np.where(many > 0, total / np.maximum(many, 1), np.nan)
