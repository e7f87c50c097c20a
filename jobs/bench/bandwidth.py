"""Charts of the bench's documents: step time over bandwidth, bytes over ranks per host, words over ranks."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from data.command import command_parser, show
from jobs.bench.document import BENCHES, HOST_ROWS, UNSHAPED, BenchError, Run, bits_per_second, read
from jobs.render.chart import COLOURS, DASHES, OURS, Axis, Chart, Line, colour_of, title_of
from jobs.render.draw import save

TITLES = {
    "mpi": "MPI's own",
    "mpi-ring": "MPI's ring",
    "mpi-rabenseifner": "MPI's Rabenseifner",
    "nccl": "NCCL fp32",
    "nccl-bf16": "NCCL bf16",
    "oktopk-mpi": "Ok-Topk, MPI alone",
}
"""Of rows that are no method; those of methods are in jobs.render.chart."""
_WIRES = dict(
    zip(("plain", "float32", "bfloat16", "int8", "int4"), (COLOURS[i] for i in (5, 0, 2, 4, 3)), strict=True)
)
_MARKERS = "osD^vXP"
_NUMBERED = 3  # lines, at most, whose points have their values beside them
_BUSIER = 1.1  # times the mean: the busiest rank has a line of its own


def look(name: str) -> dict[str, Any]:
    """Label, colour, dashes of a row's line, and whether it is Ok-Topk's, as `Line` takes them."""
    if name in HOST_ROWS:
        levels, wire = HOST_ROWS[name]["levels"], HOST_ROWS[name]["wire"]
        label = f"{'two levels' if levels == 'hosts' else 'flat'}, {wire}"
        return {"label": label, "colour": _WIRES[str(wire)], "dashes": DASHES[levels == "flat"]}
    colour = colour_of("dense" if name.startswith("mpi") else name.removesuffix("-bf16"))
    label = TITLES.get(name) or title_of(name)
    return {"label": label, "colour": colour, "dashes": DASHES[name == "nccl-bf16"], "ours": name == OURS}


def bandwidth(run: Run) -> float:
    """Gb/s of the links that a run was measured over, infinity for unshaped ones. Raises BenchError: the run names none."""
    found = re.search(r"(\S+) links", run["network"])
    if found is None:
        raise BenchError(f"network {run['network']!r} names no rate of links, as make bench-net writes it")
    rate = bits_per_second(UNSHAPED if found[1] == "unshaped" else found[1])
    return math.inf if rate is None else rate / 1e9


def ranks_per_host(run: Run) -> float:
    """Raises BenchError: the run names no hosts."""
    found = re.search(r"([0-9]+) hosts", run["network"])
    if found is None:
        raise BenchError(f"network {run['network']!r} names no hosts, as make bench-net writes it")
    return float(run["ranks"] / int(found[1]))


def _host_bytes(run: Run, method: Run) -> float | None:
    """Bytes that a host sends to others in a step; None where they are not counted, as in the oldest documents."""
    counted = method["counted"] and "bytes_between" in method
    return ranks_per_host(run) * method["bytes_between"]["mean"] if counted else None


@dataclass(frozen=True)
class Kind:
    """A chart of documents: what its points are, by run and method, and how they are shown."""

    name: str
    title: str
    x: Axis
    y: Axis
    at: Callable[[Run], float]
    value: Callable[[Run, Run], float | None]
    point: Callable[[float], str] | None


KINDS = {
    "times": Kind(
        "times",
        "Time of a step between hosts",
        Axis(
            "bandwidth of each link, Gb/s",
            "gigabits_per_second",
            log=10,
            form=lambda rate: f"{rate:g}" if math.isfinite(rate) else "unshaped",
            each=True,
        ),
        Axis("step, ms", "seconds", log=10, form=lambda seconds: f"{1e3 * seconds:g}"),
        bandwidth,
        lambda run, method: method["seconds"]["all"]["mean"],
        lambda seconds: f"{1e3 * seconds:,.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.2f}",
    ),
    "bytes": Kind(
        "bytes",
        "Bytes that a host sends in a step",
        Axis("ranks per host", "ranks_per_host", each=True),
        Axis("MB that a host sends in a step", "bytes", form=lambda sent: f"{sent / 1e6:g}", zero=True),
        ranks_per_host,
        _host_bytes,
        lambda sent: f"{sent / 1e6:.2f}",
    ),
    "words": Kind(
        "words-over-ranks",
        "Words that a rank sends in a step, against the number of ranks",
        Axis("ranks", "ranks", log=2, each=True),
        Axis("words per rank and step", "words", log=10, prefixes=True),
        lambda run: run["ranks"],
        lambda run, method: method["words"]["mean"],
        None,
    ),
}
"""What a chart shows -> the chart."""


def _runs(documents: Sequence[Run], length: int | None) -> list[Run]:
    """The runs of the length.

    Raises:
        BenchError: there is none, None was given and they have several, or a document is not of the bench itself.
    """
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


def points(
    runs: Sequence[Run], at: Callable[[Run], float], value: Callable[[Run, Run], float | None]
) -> dict[str, list[tuple[float, float]]]:
    """Method -> its points from left to right, of the runs that have its value."""
    found: dict[str, list[tuple[float, float]]] = {}
    for run in runs:
        for method in run["methods"]:
            if (y := value(run, method)) is not None:
                found.setdefault(method["name"], []).append((at(run), y))
    return {name: sorted(of_method) for name, of_method in found.items()}


def chart(
    documents: Sequence[Run],
    methods: Sequence[str] | None = None,
    length: int | None = None,
    kind: str = "times",
) -> Chart:
    """A line for each method.

    Args:
        methods: those that are drawn; None: all that were measured.
        length: of the runs that are taken; None: the documents have one.
        kind: one of KINDS.

    Raises:
        BenchError: there is no run, or one of another kind; no method was measured, or not a named one; a run names no links or
            hosts; lengths differ.
    """
    shown, runs = KINDS[kind], _runs(documents, length)
    measured = points(runs, shown.at, shown.value)
    if not measured:
        raise BenchError(f"no method has this figure: {shown.title}")
    for name in methods or ():
        if name not in measured:
            raise BenchError(f"method {name!r} is in none of the documents: {', '.join(measured)}")
    lines = []
    busiest = points(runs, shown.at, lambda run, method: method["words"]["busiest"])
    for number, name in enumerate(methods or measured):
        x, y = np.array(measured[name], np.float64).T
        marker = _MARKERS[number % len(_MARKERS)] if kind == "words" else "o"
        lines.append(line := Line(x=x, y=y, marker=marker, **look(name)))
        most = np.array(busiest[name], np.float64)[:, 1] if kind == "words" else y
        if np.any(most > _BUSIER * y):
            label = f"{line.label}, busiest rank"
            lines.append(Line(label, x, most, colour=line.colour, dashes=":", marker=marker))
    if kind == "words":
        for label, bound in (("2k(P−1)/P", "lower"), ("6k(P−1)/P", "upper")):
            x, y = np.array(sorted((run["ranks"], run["bounds"][bound]) for run in runs), np.float64).T
            lines.append(Line(label, x, y, dashes=":"))
    run = runs[0]
    note = f"{run['ranks']} ranks, " if kind == "times" else ""
    note += f"n = {run['length'] / 1e6:.1f} M, density {100 * run['density']:g} %, {run['gradients']['name']} gradients"
    commits = dict.fromkeys((document.get("commit") or "unknown")[:10] for document in documents)
    note += f", commit {', '.join(commits)}"
    few = len(lines) <= _NUMBERED
    return Chart(
        shown.name, shown.title, note, shown.x, shown.y, tuple(lines), points=shown.point if few else None
    )


def draw(drawn: Chart, output: Path) -> None:
    """As `jobs.render.draw.save`. Raises BenchError: the file cannot be written."""
    try:
        save(drawn, output)
    except (OSError, ValueError) as error:
        raise BenchError(f"{output} cannot be written: {error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the documents named on the command line."""
    parser = command_parser(
        "jobs.bench.bandwidth",
        "Draw the time of a step over the bandwidth of the links, the bytes that a host sends over the ranks per host, or the "
        "words that a rank sends over the ranks, from documents of jobs.bench.",
        "100mbit.json 1gbit.json --output bandwidth.svg",
        "2ranks.json 4ranks.json --bytes --length 14728266 --methods oktopk-flat-plain oktopk-hosts-int4 --output bytes.svg",
        "2.json 4.json 8.json --words --output words.png",
    )
    add = parser.add_argument
    text = "Documents that jobs.bench wrote, one for each rate or number of ranks."
    add("documents", nargs="+", type=Path, metavar="JSON", help=text)
    text = "Methods to draw, as the bench names them; default: mpi-ring oktopk, with --words all."
    add("--methods", nargs="+", metavar="NAME", help=text)
    text = "Length of the gradient of the runs to draw; default: the one that the documents have."
    add("--length", type=int, metavar="N", help=text)
    kind = parser.add_mutually_exclusive_group()
    text = "Draw the bytes that a host sends to others in a step over the ranks per host."
    kind.add_argument("--bytes", dest="kind", action="store_const", const="bytes", default="times", help=text)
    text = "Draw the words that a rank sends in a step over the ranks, between Ok-Topk's bounds."
    kind.add_argument("--words", dest="kind", action="store_const", const="words", help=text)
    add("--output", type=Path, required=True, metavar="FILE", help="Picture to write, SVG or PNG.")
    options = parser.parse_args(arguments)
    methods = options.methods or (None if options.kind == "words" else ["mpi-ring", "oktopk"])
    try:
        documents = [read(path) for path in options.documents]
        draw(chart(documents, methods, options.length, options.kind), options.output)
    except BenchError as error:
        show(f"jobs.bench.bandwidth: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
