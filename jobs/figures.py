"""The report's picture: loss against step, loss against words, words per step against the bounds."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import EngFormatter
from numpy.typing import NDArray

from jobs.summary import Run

# Okabe and Ito's palette, told apart with any colour vision; the dashes tell apart in print.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#000000")
DASHES = ("solid", (0, (6, 2)), (0, (2, 1.5)), (0, (6, 2, 1, 2)))
GREY = "#555555"
LEGEND_CHARACTERS = 180  # fit into one of its lines
STYLE: dict[Any, Any] = {
    "font.size": 11,
    "axes.titlesize": 12,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.labelpad": 7,
    "grid.color": "#dddddd",
    "grid.linewidth": 0.6,
}


def draw(runs: Sequence[Run], path: str | Path) -> None:
    """Draw three panels and a legend below them into a PNG file.

    Args:
        runs: any number, of any lengths; those without a step yet are left out.
        path: of the PNG.
    """
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(15.5, 5.6), layout="constrained")
        over_steps, over_words, volume = figure.subplots(1, 3)
        drawn = [(run, COLOURS[i % len(COLOURS)], DASHES[i % len(DASHES)]) for i, run in enumerate(runs)]
        drawn = [entry for entry in drawn if entry[0].count]
        _draw_loss(over_steps, drawn, against_words=False)
        _draw_loss(over_words, drawn, against_words=True)
        _draw_volume(volume, drawn)
        handles, labels = over_steps.get_legend_handles_labels()
        if handles:
            handles.append(Line2D([], [], color=GREY, alpha=0.5, linewidth=0.8))
            labels.append("faint: single steps (loss), busiest rank (words)")
            columns = max(1, min(len(labels), LEGEND_CHARACTERS // max(map(len, labels))))
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False)
        figure.savefig(path, dpi=120)


def smoothed(values: NDArray[Any]) -> NDArray[np.float64]:
    """Mean over a centred window of about a twentieth of the run, cut off at its ends.

    Args:
        values: [steps]; entries that are not finite are left out of the means.

    Returns:
        float64[steps]; NaN where nothing in the window is finite.
    """
    reach = len(values) // 40
    finite = np.isfinite(values)
    sums = np.concatenate([[0.0], np.cumsum(np.where(finite, values, 0.0))])
    counts = np.concatenate([[0], np.cumsum(finite)])
    low = np.maximum(np.arange(len(values)) - reach, 0)
    high = np.minimum(np.arange(len(values)) + reach + 1, len(values))
    with np.errstate(invalid="ignore"):
        return (sums[high] - sums[low]) / (counts[high] - counts[low])


def _draw_loss(axes: Axes, drawn: Sequence[tuple[Run, str, Any]], *, against_words: bool) -> None:
    axes.set_title("Loss against words sent" if against_words else "Loss against step")
    axes.set_ylabel("training loss, mean over the ranks")
    axes.set_xlabel("payload words sent per rank (4 bytes each)" if against_words else "step")
    smallest, largest = np.inf, 0.0
    for run, colour, dashes in drawn:
        loss = run.steps["loss"]
        position = run.words_sent if against_words else run.steps["step"]
        shown = position > 0
        if not shown.any():
            continue
        mean = smoothed(loss)
        axes.plot(position[shown], loss[shown], color=colour, alpha=0.25, linewidth=0.8)
        axes.plot(
            position[shown],
            mean[shown],
            color=colour,
            linestyle=dashes,
            linewidth=2,
            label=_legend_label(run),
        )
        positive = mean[np.isfinite(mean) & (mean > 0)]
        if len(positive):
            smallest, largest = min(smallest, positive.min()), max(largest, positive.max())
    # Near its end a good run is a hair above zero: a linear axis would show nothing of it.
    if largest > 20 * smallest:
        axes.set_yscale("log")
    if against_words and axes.lines:
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
    if not axes.lines:
        _say(axes, "no words were sent" if drawn else "no steps on record yet")


def _draw_volume(axes: Axes, drawn: Sequence[tuple[Run, str, Any]]) -> None:
    axes.set_title("Words per step against the bounds")
    axes.set_xlabel("step")
    axes.set_ylabel("payload words sent per rank and step")
    drawn = [entry for entry in drawn if entry[0].steps["words"].any()]
    if not drawn:
        _say(axes, "no words were sent")
        return
    for run, colour, _ in drawn:
        words = np.where(run.steps["words"] > 0, run.steps["words"], np.nan)
        busiest = np.where(run.steps["words_busiest"] > 0, run.steps["words_busiest"], np.nan)
        axes.plot(run.steps["step"], busiest, color=colour, alpha=0.3, linewidth=0.8)
        axes.plot(run.steps["step"], words, color=colour, linewidth=1.6)
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(EngFormatter(sep=""))
    # Where each label stands relative to its line: out of the way of curves, which run between the bounds.
    levels: dict[float, tuple[str, float, str]] = {}
    for run, _, _ in drawn:
        bounds = (
            (run.dense_words, ("2n(P−1)/P", 1.0, "bottom")),
            (run.upper_bound, ("6k(P−1)/P", 0.6, "bottom")),
            (run.lower_bound, ("2k(P−1)/P", 1.0, "top")),
        )
        levels.update({level: label for level, label in bounds if level})
    for level, (name, place, side) in levels.items():
        axes.axhline(level, color=GREY, linestyle=":", linewidth=1.4)
        axes.annotate(
            f"{name} = {EngFormatter(places=1, sep='')(level)}",
            (place, level),
            xycoords=("axes fraction", "data"),
            xytext=(0, 4 if side == "bottom" else -4),
            textcoords="offset points",
            ha="right",
            va=side,
            color=GREY,
            fontsize=10,
        )
    axes.set_ylim(min(levels) / 2, max(levels) * 2.5)


def _legend_label(run: Run) -> str:
    ending = "" if run.status == "complete" else f", unfinished after {run.count} steps"
    plural = "s" if run.info.ranks > 1 else ""
    return f"{run.label} ({run.info.ranks} rank{plural}{ending})"


def _say(axes: Axes, text: str) -> None:
    axes.set_xticks([])
    axes.set_yticks([])
    axes.text(0.5, 0.5, text, transform=axes.transAxes, ha="center", va="center", color=GREY)
