"""Draws step time over link bandwidth, and bytes between hosts over ranks per host: `python -m jobs.bench.bandwidth`."""

from __future__ import annotations

import io
import math
import re
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, FuncFormatter, NullFormatter, NullLocator

from data.command import command_parser, show
from data.durable import replaced
from jobs.bench.document import HOST_ROWS, UNSHAPED, BenchError, bits_per_second, read
from jobs.bench.figures import TITLES
from jobs.render.style import COLOURS, DASHES, GREY, OURS, STYLE, colour_of, title_of
from jobs.report.panels import DrawnPanel

Lines = dict[str, list[tuple[float, float]]]
"""Method -> points."""

_RATE = re.compile(r"(\S+) links")
_HOSTS = re.compile(r"([0-9]+) hosts")
_WIRES = {
    "plain": COLOURS[5],
    "float32": COLOURS[0],
    "bfloat16": COLOURS[2],
    "int8": COLOURS[4],
    "int4": COLOURS[3],
}
_UNSHAPED = 3.0  # times the fastest shaped links, on the axis


def bandwidth(run: dict[str, Any]) -> float:
    """Gb/s of the links that a run was measured over, infinity for unshaped ones. Raises BenchError: the run names none."""
    found = _RATE.search(run["network"])
    if found is None:
        raise BenchError(f"network {run['network']!r} names no rate of links, as make bench-net writes it")
    rate = bits_per_second(UNSHAPED if found[1] == "unshaped" else found[1])
    return math.inf if rate is None else rate / 1e9


def rate_of(network: str) -> str:
    """The rate of the links as an axis names it; "one host" where a run was not between hosts."""
    found = _RATE.search(network)
    if found is None:
        return "one host"
    return (
        "unshaped links" if found[1] == "unshaped" else f"links of {bandwidth({'network': network}):g} Gb/s"
    )


def ranks_per_host(run: dict[str, Any]) -> float:
    """Raises BenchError: the run names no hosts."""
    found = _HOSTS.search(run["network"])
    if found is None:
        raise BenchError(f"network {run['network']!r} names no hosts, as make bench-net writes it")
    return float(run["ranks"] / int(found[1]))


def lines(documents: Sequence[dict[str, Any]], length: int | None = None) -> Lines:
    """Method -> (Gb/s, mean seconds of a step) in the order of the rates.

    Args:
        length: of the runs that are taken; None: the documents have one.

    Raises:
        BenchError: there is no run of that length, or of several; or a run names no links.
    """
    return _sorted(
        (bandwidth(run), at["seconds"]["all"]["mean"], at["name"]) for run, at in _all(documents, length)
    )


def byte_lines(documents: Sequence[dict[str, Any]], length: int | None = None) -> Lines:
    """Method -> (ranks per host, bytes that a host sends to others in a step), as `lines`; those that are counted."""
    return _sorted(
        (ranks_per_host(run), ranks_per_host(run) * at["bytes_between"]["mean"], at["name"])
        for run, at in _all(documents, length)
        if at["counted"] and "bytes_between" in at  # not in the oldest documents
    )


def _all(
    documents: Sequence[dict[str, Any]], length: int | None
) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    runs = [run for document in documents for run in document["runs"]]
    lengths = list(dict.fromkeys(run["length"] for run in runs))
    if length is None and len(lengths) > 1:
        raise BenchError(f"the documents have runs of several lengths: choose one of {lengths} by --length")
    if length not in (None, *lengths):
        raise BenchError(f"length {length} is in none of the documents: {lengths}")
    for run in runs:
        if length in (None, run["length"]):
            yield from ((run, method) for method in run["methods"])


def _sorted(points: Iterator[tuple[float, float, str]]) -> Lines:
    found: Lines = {}
    for x, y, name in points:
        found.setdefault(name, []).append((x, y))
    return {name: sorted(of_method) for name, of_method in found.items()}


def look(name: str) -> dict[str, Any]:
    """How a method's line is drawn, and its label."""
    if name in HOST_ROWS:
        levels, wire = HOST_ROWS[name]["levels"], HOST_ROWS[name]["wire"]
        label = f"{'two levels' if levels == 'hosts' else 'flat'}, {wire}"
        return {"color": _WIRES[str(wire)], "linestyle": DASHES[levels == "flat"], "label": label}
    colour = colour_of("dense" if name.startswith("mpi") else name.removesuffix("-bf16"))
    label = TITLES.get(name) or title_of(name)
    width = 3 if name == OURS else 1.5
    return {"color": colour, "linestyle": DASHES[name == "nccl-bf16"], "label": label, "linewidth": width}


def draw(
    documents: Sequence[dict[str, Any]],
    methods: Sequence[str],
    output: Path,
    length: int | None = None,
    bytes_sent: bool = False,
) -> None:
    """Draw one line a method into a picture whose format is the file's suffix.

    Args:
        length: as `lines`.
        bytes_sent: bytes over ranks per host, in place of time over bandwidth.

    Raises:
        BenchError: a method was not measured, a run names no links or hosts, lengths differ, or the file cannot be written.
    """
    measured = (byte_lines if bytes_sent else lines)(documents, length)
    for name in methods:
        if name not in measured:
            raise BenchError(f"method {name!r} is in none of the documents: {', '.join(measured)}")
    run, _ = next(_all(documents, length))
    with mpl.rc_context(STYLE):
        figure = _figure({name: measured[name] for name in methods}, run, bytes_sent)
        try:
            form = output.suffix.removeprefix(".")
            with replaced(output) as draft:
                figure.savefig(draft, format=form, metadata={"Date": None} if form == "svg" else None)
        except (OSError, ValueError) as error:
            raise BenchError(f"{output} cannot be written: {error}") from error


def panels(documents: Sequence[dict[str, Any]]) -> list[DrawnPanel]:
    """Pictures for the report's page: of each length time over bandwidth, and bytes between hosts over ranks per host.

    Left out are tables of hooks, rows and dense sums, runs that name no links or hosts, and pictures with fewer than two places
    on the axis.
    """
    # what the axis does not tell -> pictures: place on the axis -> document
    alike: dict[tuple[Any, ...], list[dict[float, dict[str, Any]]]] = {}
    for document in documents:
        if document["kind"] not in ("bench", "ablation"):
            continue
        for run in document["runs"]:
            network = run.get("network") or ""
            hosts = _HOSTS.search(network)
            if hosts is None or _RATE.search(network) is None:
                continue
            same = [document["kind"], document["commit"], _RATE.sub("", network), run["gradients"]["name"]]
            same += [str(run.get(name)) for name in ("density", "device", "gradient_type", "settings")]
            rate, ranks = bandwidth(run), ranks_per_host(run)
            for bytes_sent, x, fixed in ((False, rate, run["ranks"]), (True, ranks, rate)):
                pictures = alike.setdefault((run["length"], int(hosts[1]), bytes_sent, fixed, *same), [])
                # what was measured twice at one place is no line
                picture = next((each for each in pictures if x not in each), None)
                if picture is None:
                    pictures.append(picture := {})
                picture[x] = {**document, "runs": [run]}
    drawn, count = [], Counter[str]()
    for key in sorted(alike, key=lambda key: key[:4]):
        for panel in (panel for picture in alike[key] for panel in _panel(list(picture.values()), *key[:4])):
            count[panel.name] += 1
            number = count[panel.name]
            drawn.append(panel if number == 1 else replace(panel, name=f"{panel.name}-{number}"))
    return drawn


def _panel(
    documents: Sequence[dict[str, Any]], length: int, hosts: int, bytes_sent: bool, fixed: float
) -> list[DrawnPanel]:
    """The picture of documents alike in all that its axis does not tell; none with fewer than two places on the axis.

    Args:
        documents: with one run each.
        fixed: ranks, or with `bytes_sent` the bandwidth in Gb/s.
    """
    measured = (byte_lines if bytes_sent else lines)(documents)
    if len({x for points in measured.values() for x, _ in points}) < 2:
        return []
    (run,) = documents[0]["runs"]
    text = io.StringIO()
    with mpl.rc_context(STYLE):
        _figure(measured, run, bytes_sent).savefig(text, format="svg", metadata={"Date": None})
    name, x, y = "time-over-bandwidth", "gigabits_per_second", "seconds"
    title = f"Time of a step between {hosts} hosts"
    if bytes_sent:
        name, x, y = "bytes-over-ranks", "ranks_per_host", "bytes"
        title = f"Bytes that one of {hosts} hosts sends in a step"
    points = (
        {"series": look(row)["label"], x: at, y: value} for row in measured for at, value in measured[row]
    )
    commit = (documents[0]["commit"] or "unknown")[:10]
    return [
        DrawnPanel(
            f"{name}-{length}-{hosts}-{fixed:g}",
            title,
            f"jobs.bench, {run['gradients']['name']} gradients, commit {commit}",
            text.getvalue(),
            tuple(points),
        )
    ]


def _figure(shown: Lines, run: dict[str, Any], bytes_sent: bool) -> Figure:
    """The lines, under a title that says what the run was."""
    figure = Figure(figsize=(7.2, 3.6), layout="constrained")
    axes = figure.subplots()
    what = f"n = {run['length'] / 1e6:.1f} M, density {100 * run['density']:g} %"
    if bytes_sent:
        _draw_bytes(axes, shown)
    else:
        _draw_times(axes, shown)
        what = f"{run['ranks']} ranks, {what}"
    beside: dict[str, Any] = {"loc": "center left", "bbox_to_anchor": (1.0, 0.5)} if len(shown) > 3 else {}
    axes.legend(frameon=False, handlelength=4.0, **beside)  # long enough to show dashes
    axes.set_title(what, color=GREY, fontsize=10)
    return figure


def _draw_times(axes: Axes, shown: Lines) -> None:
    rates = sorted({rate for points in shown.values() for rate, _ in points})
    finite = [rate for rate in rates if rate < math.inf]
    places = {rate: rate if rate < math.inf else _UNSHAPED * max(finite, default=1.0) for rate in rates}
    for name, points in shown.items():
        at = [(places[rate], seconds) for rate, seconds in points]
        _draw_line(axes, name, at, [_milliseconds(seconds) for _, seconds in at], numbered=len(shown) <= 3)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(list(places.values())))
    axes.xaxis.set_major_formatter(
        FixedFormatter([f"{rate:g}" if rate < math.inf else "unshaped" for rate in rates])
    )
    axes.xaxis.set_minor_locator(NullLocator())
    milliseconds = FuncFormatter(lambda seconds, _: f"{1e3 * seconds:g}")
    axes.yaxis.set_major_formatter(milliseconds)
    low, high = axes.get_ylim()
    axes.yaxis.set_minor_formatter(milliseconds if high < 10 * low else NullFormatter())
    axes.set_xlabel("bandwidth of each link, Gb/s")
    axes.set_ylabel("step, ms")


def _draw_bytes(axes: Axes, shown: Lines) -> None:
    for name, points in shown.items():
        _draw_line(axes, name, points, [f"{sent / 1e6:.2f}" for _, sent in points], numbered=len(shown) <= 3)
    axes.xaxis.set_major_locator(
        FixedLocator(sorted({ranks for points in shown.values() for ranks, _ in points}))
    )
    axes.xaxis.set_major_formatter(FuncFormatter(lambda ranks, _: f"{ranks:g}"))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda sent, _: f"{sent / 1e6:g}"))
    axes.set_ylim(bottom=0)
    axes.set_xlabel("ranks per host")
    axes.set_ylabel("MB that a host sends in a step")


def _draw_line(
    axes: Axes, name: str, points: list[tuple[float, float]], texts: list[str], numbered: bool
) -> None:
    style = look(name)
    axes.plot(*zip(*points, strict=True), marker="o", **{"linewidth": 1.5, **style})
    for at, text in zip(points, texts, strict=True):
        if numbered:
            axes.annotate(text, at, (5, 7), textcoords="offset points", color=style["color"], fontsize=9)


def _milliseconds(seconds: float) -> str:
    return f"{1e3 * seconds:,.0f}" if seconds >= 0.01 else f"{1e3 * seconds:.2f}"


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
        draw(documents, options.methods, options.output, options.length, options.bytes)
    except BenchError as error:
        show(f"jobs.bench.bandwidth: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
