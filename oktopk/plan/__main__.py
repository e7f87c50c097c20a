"""Which settings pay on a network: a table of predicted steps, best first, and the line to paste.

    oktopk-plan links.json --parameters 1.3e9 --compute-ms 180 --hosts 64 --gpus 8

`links.json` is what `oktopk-bench` measured. Exit status: 0, or 2 where nothing can be predicted.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from collectives.sparse import MAX_LENGTH
from oktopk.plan.losses import BEFORE, SOURCE
from oktopk.plan.picture import Curve, check_picture, draw
from oktopk.plan.rows import (
    DENSITIES,
    EVERY,
    METHODS,
    MOST_FLAT,
    MOST_HOSTS,
    WIRES,
    Job,
    Row,
    best_first,
    dense_rows,
    line_of,
    sparse_rows,
)
from oktopk.plan.table import paragraph, table
from oktopk.replay.links import DEVICES, Links, LinksError, assumed, read
from oktopk.replay.prediction import Kernels
from oktopk.replay.program import RECORDED

_HEADS = (
    "step: mean of a training step, predicted. gain: of the faster dense row over it. select, "
    "exchange, wait: parts of it; wait is in exchange. hides: of the exchange, behind the backward "
    "pass (dense sums in buckets, at most 2/3 of the computation). GB: a rank's memory beside "
    "parameters, gradients and the optimizer's state."
)
TOO_SHORT = (
    "Sparse steps were predicted too short in 76 of 93 comparisons with measured ones, "
    "by up to 72 %: docs/plan.md and docs/results/cpu.md have all of them."
)
_SHOWN = 16
_MOST_HOSTS = 512  # of a picture
_MOST_GPUS = 16  # of a plan
_PATIENCE = 2.5e-6  # seconds that the replay of a message takes


def main(argv: Sequence[str] | None = None, prog: str = "oktopk-plan") -> int:
    """The command `oktopk-plan`."""
    options = _parser(prog).parse_args(argv)
    try:
        print(plan(options), flush=True)
    except BrokenPipeError:  # a reader such as head has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (LinksError, ValueError) as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return 2
    return 0


def plan(options: argparse.Namespace) -> str:
    """What the command prints. Draws the picture, where one is wanted.

    Raises:
        LinksError, ValueError: nothing can be predicted; one sentence.
    """
    if options.picture is not None:
        check_picture(options.picture)
    links = _links(options)
    hosts, many = options.hosts, options.gpus
    if hosts * many < 2:
        raise LinksError("one rank exchanges nothing: give several --hosts or several --gpus")
    for value, most, name in ((hosts, MOST_HOSTS, "--hosts"), (many, _MOST_GPUS, "--gpus")):
        if value > most:
            raise LinksError(f"{name} {value} is above {most}, the most that a plan takes")
    job = Job(parameters_of(options.parameters), compute_of(options.compute_ms), hosts, many)
    network = links.network(hosts, many)
    kernels = _kernels(options, links)
    _announce(job, options)
    asked = options.methods, options.densities, options.wires, options.levels, options.every
    dense = dense_rows(job, network)
    sparse = best_first(sparse_rows(job, network, kernels, *asked))
    shown = best_first([*dense, *(sparse if options.all else sparse[:_SHOWN])])
    parts = [
        paragraph(f"{job}."),
        table(shown, min(row.seconds for row in dense)),
        *(paragraph(note) for note in _notes(options, job, links, kernels.source, sparse, shown)),
        advice(sparse, min(dense, key=lambda row: row.seconds)),
    ]
    if options.picture is not None:
        curves = _curves(options, job, links, sparse[0])
        title = f"predicted step, {job.parameters / 1e6:,.0f} M parameters, {many} rank(s) a host"
        draw(curves, title, options.picture)
        parts.append(paragraph(f"{options.picture}: the step over 1 to {_MOST_HOSTS} hosts."))
    return "\n\n".join(parts)


def _announce(job: Job, options: argparse.Namespace) -> None:
    """Say how long it takes, where that is long."""
    if job.ranks_per_host == 1 and job.ranks <= MOST_FLAT and "gtopk" not in options.methods:
        return  # one rank is replayed for all
    flat = job.ranks <= MOST_FLAT or "flat" in options.levels or job.hosts == 1
    each = _PATIENCE * job.ranks * (job.ranks if flat else job.hosts)
    steps = len(options.methods) * len(options.densities) * len(options.wires)
    if each * steps > 60:
        print(f"oktopk-plan: {steps} steps are replayed, some {each:.0f} s each", file=sys.stderr)


def _links(options: argparse.Namespace) -> Links:
    without_document = options.link is not None or options.latency is not None
    if options.links is None:
        if options.link is None or options.latency is None:
            raise LinksError(
                "give the document of oktopk-bench, or --link and --latency of links between hosts"
            )
        if options.on is not None or options.accept_slow:
            name = "--accept-slow" if options.on is None else "--on"
            raise LinksError(f"{name} is about a document of oktopk-bench, and none is given")
        return assumed(options.link, options.latency, options.device or "cuda")
    if without_document:
        raise LinksError("give the document of oktopk-bench or --link and --latency, not both")
    links = read(options.links)
    chosen = links if options.on is None else links.among(options.on.split(","))
    slow = [pair for pair in links.slow_pairs() if pair in chosen.pairs]
    if not slow:
        return chosen
    if options.accept_slow:
        return chosen.as_slow_as(slow[0])
    raise LinksError(f"{slow[0].too_slow()}: mend it, choose hosts by --on, or pass --accept-slow")


def _kernels(options: argparse.Namespace, links: Links) -> Kernels:
    """Those of the document, unless another device is wanted."""
    if links.kernels is not None and options.device in (None, links.device):
        return links.kernels
    return DEVICES[options.device or links.device]


def parameters_of(text: str) -> int:
    """Elements of a model. Raises LinksError where they are no number, or too many."""
    try:
        value = float(text)
        number = int(value)
    except (ValueError, OverflowError):
        raise LinksError(f"--parameters {text!r} is not a number such as 1.3e9") from None
    if not 1 <= number <= MAX_LENGTH:
        most = f"[1, {MAX_LENGTH}], which one exchange takes"
        raise LinksError(f"--parameters {text} is not in {most}")
    return number


def compute_of(milliseconds: float) -> float:
    """Seconds of computation. Raises LinksError where they are none."""
    if not 0 <= milliseconds < 1e9:
        raise LinksError(f"--compute-ms {milliseconds:g} is not a time in [0, 1e9)")
    return milliseconds / 1e3


def _notes(
    options: argparse.Namespace,
    job: Job,
    links: Links,
    kernels: str,
    sparse: Sequence[Row],
    shown: Sequence[Row],
) -> list[str]:
    """What readers must know of the table."""
    notes = [
        _HEADS,
        f"loss: measured, not predicted: above dense training, in brackets with how many replicas; "
        f"{SOURCE}. A minus is below dense training; - was not measured, or with fewer than half "
        "of the replicas.",
        *_notes_of_losses(shown),
        TOO_SHORT,
        f"Links: {links.text}.",
        f"Kernels: {kernels}.",
    ]
    if options.links is not None and links.device == "cpu" and options.device is None:
        notes.append(
            "Kernels are those of CPUs, as the document is of host memory: on GPUs pass --device cuda."
        )
    if links.hosts and job.hosts > len(links.hosts):
        count = len(links.hosts)
        measured = f"{count} hosts were" if count > 1 else "1 host was"
        notes.append(f"Extrapolated: {measured} measured, and {job.hosts} are taken to have such links.")
    if links.hosts and job.ranks_per_host > links.ranks_per_host:
        notes.append(
            f"Extrapolated: {links.ranks_per_host} rank(s) a host were measured, and "
            f"{job.ranks_per_host} are taken to share such links."
        )
    if any(row.extrapolated for row in shown):
        notes.append(
            f"Extrapolated: more than {RECORDED} exchange; how far their entries coincide is known "
            f"to {RECORDED}."
        )
    if any(row.grid for row in shown):
        notes.append('grid: oktopk with exchange="grid", whose entries go over a grid of ranks.')
    if not options.levels and job.ranks > MOST_FLAT and job.hosts > 1 and job.ranks_per_host > 1:
        notes.append(
            f"Flat steps of {job.ranks} ranks are left out; --levels flat replays them, "
            "a minute or more each."
        )
    left = len(sparse) + 2 - len(shown)
    if left:
        notes.append(f"{left} slower rows are left out; --all shows them.")
    return notes


def _notes_of_losses(shown: Sequence[Row]) -> list[str]:
    """Where losses of several steps between exchanges are from, and those nearest to what was not measured."""
    notes = [f"Losses with every above 1: {BEFORE}."] if any(row.every > 1 for row in shown) else []
    near = {
        f"{row.method} {100 * row.density:g} % every {row.every}, not measured: {row.nearest}": None
        for row in shown
        if row.nearest
    }
    return notes + ([f"The nearest losses: {'; '.join(near)}."] if near else [])


def advice(sparse: Sequence[Row], dense: Row) -> str:
    """Whether sparse steps pay, in a sentence, and the line to paste where they do.

    Args:
        sparse: best first.
        dense: the fastest dense row.
    """
    best = sparse[0]
    gain = dense.seconds / best.seconds
    if gain <= 1:
        times = f"{1 / gain:.2f}"
        as_fast = "as fast" if times == "1.00" else f"{times} times as fast"
        of_dense = f"dense {dense.wire} is {as_fast} as the fastest sparse row"
        return paragraph(f"Sparse steps do not pay here: {of_dense}.")
    of_best = f"the fastest row is {gain:.2f} times as fast as dense {dense.wire}"
    verdict = f"Sparse steps pay here: {of_best}."
    if best.loss != "-":
        how = "as measured above dense training, in brackets with how many replicas"
        return _pasted(f"{verdict} Its loss, {how}: {best.loss}.", best)
    verdict += " Its loss was not measured" + (f"; the nearest: {best.nearest}." if best.nearest else ".")
    known = next((row for row in sparse if row.loss != "-"), None)
    if known is None:
        return _pasted(f"{verdict} Nor was that of another row.", best)
    gain = dense.seconds / known.seconds
    of_known = f"The fastest row whose loss was measured, {known.loss}, is {gain:.2f} times as fast"
    if gain <= 1:
        return _pasted(f"{verdict} {of_known}, which does not pay.", best)
    return _pasted(verdict, best) + "\n\n" + _pasted(f"{of_known} as dense {dense.wire}.", known)


def _pasted(text: str, row: Row) -> str:
    """A paragraph above the lines of Python of a row."""
    lines = "from oktopk import DistributedOptimizer", line_of(row)
    return "\n    ".join([paragraph(text) + "\n", *lines])


def _curves(options: argparse.Namespace, job: Job, links: Links, best: Row) -> list[Curve]:
    """The dense rows and the best one over the number of hosts."""
    kernels = _kernels(options, links)
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    for hosts in (1 << i for i in range(_MOST_HOSTS.bit_length())):
        there = replace(job, hosts=hosts)
        if there.ranks < 2:
            for key in (("dense", "float32"), ("dense", "bfloat16"), (best.method, best.wire)):
                lines.setdefault(key, []).append((hosts, job.compute))
            continue
        network = links.network(hosts, job.ranks_per_host)
        rows = dense_rows(there, network)
        if best.levels == "hosts" or there.ranks <= MOST_FLAT:
            exchange = "grid" if best.grid else "direct"
            settings = [best.method], [best.density], [best.wire], [best.levels], [best.every]
            rows += sparse_rows(there, network, kernels, *settings, exchange=exchange)
        for row in rows:
            lines.setdefault((row.method, row.wire), []).append((hosts, row.seconds))
    label = f"{best.method}, {100 * best.density:g} %, {best.wire}, {best.levels}"
    label += f", every {best.every}" + ", over a grid" * best.grid
    return [
        Curve(
            label if method != "dense" else f"dense, {wire}",
            [hosts for hosts, _ in points],
            [seconds for _, seconds in points],
            method == "dense",
        )
        for (method, wire), points in lines.items()
    ]


def _parser(prog: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Predict training steps of methods, densities, wires and levels, best first.",
        epilog="examples:\n"
        f"  {prog} links.json --parameters 1.3e9 --compute-ms 180 --hosts 64 --gpus 8\n"
        f"  {prog} --link 25gbit --latency 20us --parameters 98e6 --compute-ms 90 --hosts 4",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    text = "Document of links that oktopk-bench wrote."
    add("links", nargs="?", type=Path, metavar="LINKS.json", help=text)
    text = "Rate of a host's link where none was measured, such as 25gbit or 12GB/s."
    add("--link", metavar="RATE", help=text)
    text = "Time of the smallest message between hosts where none was measured, such as 20us."
    add("--latency", metavar="TIME", help=text)
    text = "Hosts of the document that you will train on, by commas; default: all."
    add("--on", metavar="HOST,...", help=text)
    text = "Predict although a link between two hosts is slow, as if all were as slow."
    add("--accept-slow", action="store_true", help=text)
    add("--parameters", required=True, metavar="N", help="Parameters of the model, such as 1.3e9.")
    text = "Milliseconds of a dense step on one rank, optimizer included, without communication."
    add("--compute-ms", required=True, type=float, metavar="MS", help=text)
    add("--hosts", required=True, type=_count, help="Hosts of the cluster, at least 1.")
    add("--gpus", type=_count, default=1, help="Ranks on each host, one a GPU; default: 1.")
    text = "Where gradients lie, whose kernels are taken; default: as in the document, else cuda."
    add("--device", choices=tuple(DEVICES), help=text)
    text = f"Methods of the rows; default: {' '.join(METHODS)}."
    add("--methods", nargs="+", choices=METHODS, default=METHODS, help=text)
    text = "Densities of the rows, in (0, 0.25]; default: those whose loss was measured."
    add("--densities", nargs="+", type=float, default=DENSITIES, metavar="DENSITY", help=text)
    wires = ("float32", "bfloat16", "int8", "int4")
    text = f"Wires of the rows; default: {' '.join(WIRES)}."
    add("--wires", nargs="+", choices=wires, default=WIRES, help=text)
    text = "Whether a host is one replica, or each rank; default: both where they differ."
    add("--levels", nargs="+", choices=("hosts", "flat"), default=(), help=text)
    text = "Steps between two exchanges, of the rows; default: 1 4."
    add("--every", nargs="+", type=_count, default=EVERY, metavar="STEPS", help=text)
    text = f"Show all rows, not the {_SHOWN} fastest sparse ones alone."
    add("--all", action="store_true", help=text)
    text = "Draw the step over 1 to 512 hosts into this file, SVG or PNG; needs matplotlib."
    add("--picture", type=Path, metavar="FILE", help=text)
    return parser


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or len(text) > 9 or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer from 1 on")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
