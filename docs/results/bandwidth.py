"""Charts of the bench's documents: step time over bandwidth, bytes over ranks per host, words over ranks.

python -m docs.results.bandwidth 100mbit.json 1gbit.json --output bandwidth.svg
python -m docs.results.bandwidth 2ranks.json 4ranks.json --bytes --methods oktopk-flat-plain oktopk-hosts-int4 --output bytes.svg
python -m docs.results.bandwidth 2.json 4.json 8.json --words --output words.png
"""

import argparse
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from data.command import show
from jobs.bench.document import BENCHES, HOST_ROWS, BenchError, read
from jobs.render.chart import COLOURS, DASHES, OURS, Axis, Chart, Line, colour_of, title_of
from jobs.render.draw import FILE_WIDTH, PAGE, plotted, write

TITLES = {
    "mpi": "MPI's own",
    "mpi-ring": "MPI's ring",
    "mpi-rabenseifner": "MPI's Rabenseifner",
    "nccl": "NCCL fp32",
    "nccl-bf16": "NCCL bf16",
    "oktopk-mpi": "Ok-Topk, MPI alone",
}
"""Of rows that are no method; those of methods are in jobs.render.chart."""
WIRES = {"plain": 5, "float32": 0, "bfloat16": 2, "int8": 4, "int4": 3}  # numbers in COLOURS
MARKERS = "osD^vXP"
INFINITE = 3.0  # times the largest finite x
NUMBERED = 3  # lines, at most, whose points have their values beside them
BUSIER = 1.1  # times the mean: the busiest rank has a line of its own


def look(name):
    """Label, colour, dashes of a row's line, and whether it is Ok-Topk's, as `Line` takes them."""
    if name in HOST_ROWS:
        levels, wire = HOST_ROWS[name]["levels"], HOST_ROWS[name]["wire"]
        label = f"{'two levels' if levels == 'hosts' else 'flat'}, {wire}"
        return {"label": label, "colour": COLOURS[WIRES[wire]], "dashes": DASHES[levels == "flat"]}
    colour = colour_of("dense" if name.startswith("mpi") else name.removesuffix("-bf16"))
    label = TITLES.get(name) or title_of(name)
    return {"label": label, "colour": colour, "dashes": DASHES[name == "nccl-bf16"], "ours": name == OURS}


def from_network(run, pattern, what):
    """What a pattern finds in the words on a run's network, which `make bench-net` writes."""
    found = re.search(pattern, run["network"])
    if found is None:
        raise BenchError(f"network {run['network']!r} names no {what}, as make bench-net writes it")
    return found[1]


def bandwidth(run):
    """Gb/s of the links that a run was measured over, infinity for unshaped ones."""
    rate = from_network(run, r"([0-9.]+[kmg]bit|unshaped) links", "rate of links")
    units = {"k": 1e-6, "m": 1e-3, "g": 1.0}
    return math.inf if rate == "unshaped" else float(rate[:-4]) * units[rate[-4]]


def ranks_per_host(run):
    """Ranks of a run on each of its hosts."""
    hosts = int(from_network(run, r"([0-9]+) hosts", "hosts"))
    return run["ranks"] / hosts


def host_bytes(run, method):
    """Bytes that a host sends to others in a step; None where they are not counted, as in the oldest documents."""
    counted = method["counted"] and "bytes_between" in method
    return ranks_per_host(run) * method["bytes_between"]["mean"] if counted else None


class Kind(NamedTuple):
    """A chart: where its points are, by run and by run and method, and how they are shown."""

    name: str
    title: str
    x: Axis
    y: Axis
    at: Any
    value: Any
    point: Any
    tick: Any = "{:g}".format
    scale: float = 0.0  # of the y axis, 0: as it is


KINDS = {
    "times": Kind(
        "times",
        "Time of a step between hosts",
        Axis("bandwidth of each link, Gb/s", "gigabits_per_second", log=10),
        Axis("step, ms", "seconds", log=10),
        bandwidth,
        lambda run, method: method["seconds"]["all"]["mean"],
        lambda seconds: f"{1e3 * seconds:,.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.2f}",
        lambda rate: f"{rate:g}" if math.isfinite(rate) else "unshaped",
        1e3,
    ),
    "bytes": Kind(
        "bytes",
        "Bytes that a host sends in a step",
        Axis("ranks per host", "ranks_per_host"),
        Axis("MB that a host sends in a step", "bytes"),
        ranks_per_host,
        host_bytes,
        lambda sent: f"{sent / 1e6:.2f}",
        scale=1e-6,
    ),
    "words": Kind(
        "words-over-ranks",
        "Words that a rank sends in a step, against the number of ranks",
        Axis("ranks", "ranks", log=2),
        Axis("words per rank and step", "words", log=10, prefixes=True),
        lambda run: run["ranks"],
        lambda run, method: method["words"]["mean"],
        None,
    ),
}


def runs_of(documents, length):
    """The runs of the length; of None, where they have one alone."""
    for document in documents:
        if document["kind"] not in BENCHES:
            raise BenchError(f"documents of the kind {document['kind']!r} cannot be drawn here")
    runs = [run for document in documents for run in document["runs"]]
    if not runs:
        raise BenchError("the documents have no runs")
    lengths = list(dict.fromkeys(run["length"] for run in runs))
    if length is None and len(lengths) > 1:
        raise BenchError(f"the documents have runs of several lengths: choose one of {lengths} by --length")
    if length not in (None, *lengths):
        raise BenchError(f"length {length} is in none of the documents: {lengths}")
    return [run for run in runs if length in (None, run["length"])]


def points(runs, at, value):
    """Method -> x and y of its points from left to right, of the runs that have its value."""
    found = {}
    for run in runs:
        for method in run["methods"]:
            if (y := value(run, method)) is not None:
                found.setdefault(method["name"], []).append((at(run), y))
    return {name: np.array(sorted(of_method), np.float64).T for name, of_method in found.items()}


def chart(documents, methods=None, length=None, kind="times"):
    """A line for each method: the named ones, or all that were measured. Raises BenchError: there is nothing to draw."""
    shown, runs = KINDS[kind], runs_of(documents, length)
    measured = points(runs, shown.at, shown.value)
    if not measured:
        raise BenchError(f"no method has this figure: {shown.title}")
    for name in methods or ():
        if name not in measured:
            raise BenchError(f"method {name!r} is in none of the documents: {', '.join(measured)}")
    lines = []
    busiest = points(runs, shown.at, lambda run, method: method["words"]["busiest"])
    for number, name in enumerate(methods or measured):
        x, y = measured[name]
        marker = MARKERS[number % len(MARKERS)] if kind == "words" else "o"
        lines.append(line := Line(x=x, y=y, marker=marker, **look(name)))
        if kind == "words" and np.any(busiest[name][1] > BUSIER * y):
            label = f"{line.label}, busiest rank"
            lines.append(Line(label, x, busiest[name][1], colour=line.colour, dashes=":", marker=marker))
    if kind == "words":
        for label, bound in (("2k(P−1)/P", "lower"), ("6k(P−1)/P", "upper")):
            x, y = np.array(sorted((run["ranks"], run["bounds"][bound]) for run in runs), np.float64).T
            lines.append(Line(label, x, y, dashes=":"))
    run = runs[0]
    note = f"{run['ranks']} ranks, " if kind == "times" else ""
    note += f"n = {run['length'] / 1e6:.1f} M, density {100 * run['density']:g} %, {run['gradients']['name']} gradients"
    commits = dict.fromkeys((document.get("commit") or "unknown")[:10] for document in documents)
    note += f", commit {', '.join(commits)}"
    return Chart(shown.name, shown.title, note, shown.x, shown.y, tuple(lines))


def save(content, kind, output):
    """Draw a chart with a tick at each x and, where its lines are few, values beside their points; infinity is beyond all others.

    Raises:
        OSError, ValueError: the file cannot be written, or has another suffix than a picture's.
    """
    shown, values = KINDS[kind], sorted({float(x) for line in content.lines for x in line.x})
    beyond = INFINITE * max(filter(math.isfinite, values), default=1.0)
    lines = tuple(replace(line, x=np.minimum(line.x, beyond)) for line in content.lines)
    with mpl.rc_context(PAGE):
        figure, axes = plotted(replace(content, lines=lines), FILE_WIDTH)
        axes.set_xticks([min(value, beyond) for value in values], map(shown.tick, values))
        axes.xaxis.set_minor_locator(NullLocator())
        if shown.scale:
            scaled = FuncFormatter(lambda value, _: f"{shown.scale * value:g}")
            axes.yaxis.set_major_formatter(scaled)
            if not isinstance(axes.yaxis.get_minor_formatter(), NullFormatter):
                axes.yaxis.set_minor_formatter(scaled)
        if kind == "bytes":
            axes.set_ylim(bottom=0)
        for line in lines if shown.point and len(lines) <= NUMBERED else ():
            look = {"textcoords": "offset points", "color": line.colour, "fontsize": 9}
            for x, y in zip(line.x, line.y, strict=True):
                axes.annotate(shown.point(y), (x, y), (5, 7), **look)
        write(figure, axes, content.title, content.note, output)


def main(arguments=None):
    """Draw the documents named on the command line."""
    parser = argparse.ArgumentParser(prog="docs.results.bandwidth", description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add(
        "documents",
        nargs="+",
        type=Path,
        help="Documents of jobs.bench, one for each rate or number of ranks",
    )
    add(
        "--methods",
        nargs="+",
        help="Methods, as the bench names them; default: mpi-ring oktopk, with --words all",
    )
    add("--length", type=int, help="Length of the gradient of the runs; default: the one that they have")
    kind = parser.add_mutually_exclusive_group()
    kind.add_argument("--bytes", dest="kind", action="store_const", const="bytes", default="times")
    kind.add_argument("--words", dest="kind", action="store_const", const="words")
    add("--output", type=Path, required=True, help="Picture to write, SVG or PNG")
    options = parser.parse_args(arguments)
    methods = options.methods or (None if options.kind == "words" else ["mpi-ring", "oktopk"])
    try:
        documents = [read(path) for path in options.documents]
        save(chart(documents, methods, options.length, options.kind), options.kind, options.output)
    except (BenchError, OSError, ValueError) as error:
        problem = error if isinstance(error, BenchError) else f"{options.output} cannot be written: {error}"
        show(f"docs.results.bandwidth: {problem}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
