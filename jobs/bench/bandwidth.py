"""Charts of step time over link bandwidth, and of bytes over ranks per host: `python -m jobs.bench.bandwidth`."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from data.command import command_parser, show
from jobs.bench.document import UNSHAPED, BenchError, Run, bits_per_second, read
from jobs.bench.figures import draw, look
from jobs.render.chart import Axis, Chart, Line

Points = dict[str, list[tuple[float, float]]]
"""Method -> points."""

_RATE = re.compile(r"(\S+) links")
_HOSTS = re.compile(r"([0-9]+) hosts")
_NUMBERED = 3  # lines, at most, whose points have their values beside them

_BANDWIDTH = Axis(
    "bandwidth of each link, Gb/s",
    "gigabits_per_second",
    log=10,
    form=lambda rate: f"{rate:g}" if math.isfinite(rate) else "unshaped",
    each=True,
)
_SECONDS = Axis("step, ms", "seconds", log=10, form=lambda seconds: f"{1e3 * seconds:g}")
_RANKS = Axis("ranks per host", "ranks_per_host", each=True)
_BYTES = Axis("MB that a host sends in a step", "bytes", form=lambda sent: f"{sent / 1e6:g}", zero=True)


def bandwidth(run: Run) -> float:
    """Gb/s of the links that a run was measured over, infinity for unshaped ones. Raises BenchError: the run names none."""
    found = _RATE.search(run["network"])
    if found is None:
        raise BenchError(f"network {run['network']!r} names no rate of links, as make bench-net writes it")
    rate = bits_per_second(UNSHAPED if found[1] == "unshaped" else found[1])
    return math.inf if rate is None else rate / 1e9


def rate_of(network: str) -> str:
    """The rate of the links in words; "one host" where a run was not between hosts."""
    if _RATE.search(network) is None:
        return "one host"
    rate = bandwidth({"network": network})
    return f"{rate:g} Gb/s" if math.isfinite(rate) else "unshaped links"


def ranks_per_host(run: Run) -> float:
    """Raises BenchError: the run names no hosts."""
    found = _HOSTS.search(run["network"])
    if found is None:
        raise BenchError(f"network {run['network']!r} names no hosts, as make bench-net writes it")
    return float(run["ranks"] / int(found[1]))


def points(documents: Sequence[Run], length: int | None = None, bytes_sent: bool = False) -> Points:
    """Method -> (Gb/s, mean seconds of a step), in the order of the rates.

    Args:
        length: of the runs that are taken; None: the documents have one.
        bytes_sent: in place of these (ranks per host, bytes that a host sends to others in a step), of methods
            that count them.

    Raises:
        BenchError: there is no run of that length, or of several; or a run names no links or hosts.
    """
    found: Points = {}
    for run, method in _chosen(documents, length):
        if not bytes_sent:
            point = bandwidth(run), method["seconds"]["all"]["mean"]
        elif method["counted"] and "bytes_between" in method:  # not in the oldest documents
            point = ranks_per_host(run), ranks_per_host(run) * method["bytes_between"]["mean"]
        else:
            continue
        found.setdefault(method["name"], []).append(point)
    return {name: sorted(of_method) for name, of_method in found.items()}


def _chosen(documents: Sequence[Run], length: int | None) -> Iterator[tuple[Run, Run]]:
    """(run, method) of each run of the length."""
    runs = [run for document in documents for run in document["runs"]]
    lengths = list(dict.fromkeys(run["length"] for run in runs))
    if length is None and len(lengths) > 1:
        raise BenchError(f"the documents have runs of several lengths: choose one of {lengths} by --length")
    if length not in (None, *lengths):
        raise BenchError(f"length {length} is in none of the documents: {lengths}")
    for run in runs:
        if length in (None, run["length"]):
            yield from ((run, method) for method in run["methods"])


def chart(
    documents: Sequence[Run],
    methods: Sequence[str] | None = None,
    length: int | None = None,
    bytes_sent: bool = False,
) -> Chart:
    """A line for each method; None: all that were measured. length, bytes_sent: as `points`.

    Raises:
        BenchError: a method was not measured, a run names no links or hosts, or lengths differ.
    """
    measured = points(documents, length, bytes_sent)
    for name in methods or ():
        if name not in measured:
            raise BenchError(f"method {name!r} is in none of the documents: {', '.join(measured)}")
    lines = []
    for name in methods or measured:
        x, y = np.array(measured[name], np.float64).T
        lines.append(Line(x=x, y=y, marker="o", **look(name)))
    run, _ = next(_chosen(documents, length))
    note = f"n = {run['length'] / 1e6:.1f} M, density {100 * run['density']:g} %, "
    note += f"{run['gradients']['name']} gradients"
    commits = dict.fromkeys((document.get("commit") or "unknown")[:10] for document in documents)
    note += f", commit {', '.join(commits)}"
    numbered, drawn = len(lines) <= _NUMBERED, tuple(lines)
    if bytes_sent:
        title, megabytes = "Bytes that a host sends in a step", _megabytes if numbered else None
        return Chart("bytes", title, note, _RANKS, _BYTES, drawn, points=megabytes)
    title, milliseconds = "Time of a step between hosts", _milliseconds if numbered else None
    return Chart(
        "times", title, f"{run['ranks']} ranks, {note}", _BANDWIDTH, _SECONDS, drawn, points=milliseconds
    )


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.2f}"


def _megabytes(sent: float) -> str:
    return f"{sent / 1e6:.2f}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the documents named on the command line."""
    title = "Draw the time of a step over the bandwidth of the links, or the bytes that a host sends over the ranks per host, "
    title += "from documents of make bench-net."
    times = "100mbit.json 1gbit.json --output bandwidth.svg"
    sent = "2ranks.json 4ranks.json --bytes --length 14728266 --methods oktopk-flat-plain oktopk-hosts-int4 --output bytes.svg"
    parser = command_parser("jobs.bench.bandwidth", title, times, sent)
    add = parser.add_argument
    text = "Documents that make bench-net wrote, one for each rate or number of ranks."
    add("documents", nargs="+", type=Path, metavar="JSON", help=text)
    text = "Methods to draw, as the bench names them; default: mpi-ring oktopk."
    add("--methods", nargs="+", default=["mpi-ring", "oktopk"], metavar="NAME", help=text)
    text = "Length of the gradient of the runs to draw; default: the one that the documents have."
    add("--length", type=int, metavar="N", help=text)
    text = "Draw the bytes that a host sends to others in a step over the ranks per host."
    add("--bytes", action="store_true", help=text)
    add("--output", type=Path, required=True, metavar="FILE", help="Picture to write, SVG or PNG.")
    options = parser.parse_args(arguments)
    try:
        documents = [read(path) for path in options.documents]
        draw(chart(documents, options.methods, options.length, options.bytes), options.output)
    except BenchError as error:
        show(f"jobs.bench.bandwidth: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
