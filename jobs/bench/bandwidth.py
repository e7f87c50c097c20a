"""Draws step time over link bandwidth, from bench documents at several rates: `python -m jobs.bench.bandwidth`."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from data.command import command_parser
from jobs.bench.document import BenchError, read
from jobs.bench.figures import TITLES
from jobs.report.style import GREY, STYLE, colour_of, title_of

_GBIT = {"kbit": 1e-6, "mbit": 1e-3, "gbit": 1.0}
_RATE = re.compile(r"([0-9.]+)(kbit|mbit|gbit) links")


def bandwidth(run: dict[str, Any]) -> float:
    """Gb/s of the links that a run was measured over. Raises BenchError: the run names none."""
    found = _RATE.search(run["network"])
    if found is None:
        raise BenchError(f"network {run['network']!r} names no rate of links, as make bench-net writes it")
    return float(found[1]) * _GBIT[found[2]]


def lines(documents: Sequence[dict[str, Any]]) -> dict[str, list[tuple[float, float]]]:
    """Method -> (Gb/s, mean seconds of a step) in the order of the rates. Raises BenchError: no run names its links."""
    points: dict[str, list[tuple[float, float]]] = {}
    for document in documents:
        for run in document["runs"]:
            for method in run["methods"]:
                mean = method["seconds"]["all"]["mean"]
                points.setdefault(method["name"], []).append((bandwidth(run), mean))
    return {name: sorted(found) for name, found in points.items()}


def draw(documents: Sequence[dict[str, Any]], methods: Sequence[str], output: Path) -> None:
    """Draw one line a method, both axes logarithmic, into a picture whose format is the file's suffix.

    Raises:
        BenchError: a method was not measured, a run names no links, or the file cannot be written.
    """
    measured = lines(documents)
    run = documents[0]["runs"][0]
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 3.6), layout="constrained")
        axes = figure.subplots()
        for name in methods:
            if name not in measured:
                raise BenchError(f"method {name!r} is in none of the documents: {', '.join(measured)}")
            rates, seconds = zip(*measured[name], strict=True)
            ours = name == "oktopk"
            colour = colour_of("dense" if name.startswith("mpi") else name)
            title = TITLES.get(name) or title_of(name)
            axes.plot(rates, seconds, "o-", color=colour, linewidth=3 if ours else 1.5, label=title)
            for rate, mean in measured[name]:
                axes.annotate(
                    f"{1e3 * mean:,.0f}",
                    (rate, mean),
                    (5, 7),
                    textcoords="offset points",
                    color=colour,
                    fontsize=9,
                )
        every = sorted({rate for found in measured.values() for rate, _ in found})
        axes.legend(frameon=False)
        axes.set_xscale("log")
        axes.set_yscale("log")
        axes.xaxis.set_major_locator(FixedLocator(every))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter(FuncFormatter(lambda rate, _: f"{rate:g}"))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda seconds, _: f"{1e3 * seconds:g}"))
        axes.set_xlabel("bandwidth of each link, Gb/s")
        axes.set_ylabel("step, ms")
        what = f"{run['ranks']} ranks, n = {run['length'] / 1e6:.1f} M, density {100 * run['density']:g} %"
        axes.set_title(what, color=GREY, fontsize=10)
        try:
            figure.savefig(output, metadata={"Date": None} if output.suffix == ".svg" else None)
        except (OSError, ValueError) as error:
            raise BenchError(f"{output} cannot be written: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the documents named on the command line."""
    title = "Draw the time of a step over the bandwidth of the links, from documents of make bench-net."
    parser = command_parser("jobs.bench.bandwidth", title, "100mbit.json 1gbit.json --output bandwidth.svg")
    add = parser.add_argument
    text = "Documents that make bench-net wrote, one for each rate."
    add("documents", nargs="+", type=Path, metavar="JSON", help=text)
    text = "Methods to draw, as the bench names them; default: mpi-ring oktopk."
    add("--methods", nargs="+", default=["mpi-ring", "oktopk"], metavar="NAME", help=text)
    add("--output", type=Path, required=True, metavar="FILE", help="Picture to write, SVG or PNG.")
    options = parser.parse_args(arguments)
    try:
        draw([read(path) for path in options.documents], options.methods, options.output)
    except BenchError as error:
        print(f"jobs.bench.bandwidth: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
