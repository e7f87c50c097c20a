"""Draws training steps with communication hooks, one group of bars for each document: `python -m jobs.bench.hook_figure`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from data.command import command_parser, show
from jobs.bench.bandwidth import rate_of
from jobs.bench.document import BenchError, read
from jobs.render.style import COLOURS, GREY, STYLE

TITLES = {"ddp": "DDP", "bf16": "DDP, bfloat16", "powersgd": "PowerSGD, rank 1", "oktopk": "Ok-Topk"}
"""Contestant -> its title, in the order of the bars."""
_LOOK = dict(zip(TITLES, (COLOURS[6], GREY, "#117733", COLOURS[1]), strict=True))
_BAR = 0.26  # of the distance between groups


def bars(run: dict[str, Any]) -> dict[str, tuple[float, float, float]]:
    """Contestant -> least, median and largest seconds of a training step, of those in TITLES that were measured.

    Raises:
        BenchError: the run has no steps of computation alone.
    """
    found = {method["name"]: method for method in run.get("methods", [])}
    if "compute" not in found:
        raise BenchError("a document has no steps under no_sync: it is not one of jobs.bench --table hook")
    shown = [name for name in ("compute", *TITLES) if name in found]
    return {
        name: (min(found[name]["series"]), found[name]["seconds"]["median"], max(found[name]["series"]))
        for name in shown
    }


def draw(documents: Sequence[dict[str, Any]], output: Path) -> None:
    """Draw all documents, side by side, into a picture whose format is the file's suffix.

    Raises:
        BenchError: a document is none of hooks, or the file cannot be written.
    """
    groups = [(document["runs"][0], bars(document["runs"][0])) for document in documents]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.4), layout="constrained")
        axes = figure.subplots()
        for place, (_, steps) in enumerate(groups):
            names = [name for name in TITLES if name in steps]
            first = place - _BAR * (len(names) - 1) / 2
            for number, name in enumerate(names):
                least, median, most = (1e3 * seconds for seconds in steps[name])
                at, label = first + _BAR * number, TITLES[name] if place == 0 else None
                axes.bar(at, median, 0.9 * _BAR, color=_LOOK[name], label=label)
                spread = [[median - least], [most - median]]
                axes.errorbar(at, median, spread, color="#999999", capsize=3, linewidth=1.2)
                axes.annotate(
                    f"{median:.0f}",
                    (at, most),
                    (0, 3),
                    textcoords="offset points",
                    ha="center",
                    color=_LOOK[name],
                )
            alone = 1e3 * steps["compute"][1]
            span = (first - 0.6 * _BAR, first + _BAR * (len(names) - 0.4))
            label = "computation alone" if place == 0 else "_"
            axes.hlines(alone, *span, color="white", linewidth=3.5)
            axes.hlines(alone, *span, color=COLOURS[0], linewidth=1.8, linestyle=(0, (4, 1.5)), label=label)
        axes.set_xticks(range(len(groups)), [rate_of(run["network"]) for run, _ in groups])
        axes.grid(axis="x", visible=False)
        axes.set_ylabel("training step, ms")
        axes.legend(frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        run = groups[0][0]
        what = f"{run['ranks']} ranks, n = {run['length'] / 1e6:.1f} M, density {100 * run['density']:g} %"
        axes.set_title(
            f"{what}, {run['device'].upper()}; bars: median; whiskers: least and most",
            color=GREY,
            fontsize=10,
        )
        try:
            figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)
        except (OSError, ValueError) as error:
            raise BenchError(f"{output} cannot be written: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the documents named on the command line."""
    title = (
        "Draw the time of training steps with communication hooks, from documents of jobs.bench --table hook."
    )
    parser = command_parser("jobs.bench.hook_figure", title, "hook-1gbit.json hook-4.json --output hook.svg")
    add = parser.add_argument
    add(
        "documents",
        nargs="+",
        type=Path,
        metavar="JSON",
        help="Documents, one for each network, from left to right.",
    )
    add("--output", type=Path, required=True, metavar="FILE", help="Picture to write, SVG or PNG.")
    options = parser.parse_args(arguments)
    try:
        draw([read(path) for path in options.documents], options.output)
    except BenchError as error:
        show(f"jobs.bench.hook_figure: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
