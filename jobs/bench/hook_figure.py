"""Draws training steps with communication hooks, a bar for each: `python -m jobs.bench.hook_figure`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from data.command import command_parser, show
from jobs.bench.bandwidth import rate_of
from jobs.bench.document import BenchError, Run, read
from jobs.bench.figures import draw
from jobs.render.chart import Bar, Bars

TITLES = {
    "ddp": ("DDP", "ddp"),
    "bf16": ("DDP, bfloat16", "ddp"),
    "powersgd": ("PowerSGD, rank 1", "powersgd"),
    "oktopk": ("Ok-Topk", "oktopk"),
}
"""Contestant -> its title, and the method whose colour it has, in the order of the bars."""


def bars(documents: Sequence[Run]) -> Bars:
    """A bar for each of TITLES that was measured: its median step, of which as much is pale as a step under no_sync takes.

    Raises:
        BenchError: a document has no steps of computation alone.
    """
    found: list[Bar] = []
    for run in (document["runs"][0] for document in documents):
        steps = {method["name"]: method for method in run.get("methods", [])}
        if "compute" not in steps:
            raise BenchError(
                "a document has no steps under no_sync: it is not one of jobs.bench --table hook"
            )
        alone = steps["compute"]["seconds"]["median"]
        for name, (title, method) in TITLES.items():
            if name in steps:
                median, series = steps[name]["seconds"]["median"], steps[name]["series"]
                label = f"{title}, {rate_of(run['network'])}"
                found.append(Bar(label, method, alone, median - alone, min(series), max(series)))
    run = documents[0]["runs"][0]
    what = f"{run['ranks']} ranks, n = {run['length'] / 1e6:.1f} M, density {100 * run['density']:g} %"
    note = f"{what}, {run['device'].upper()}; pale: computation alone; dark: exposed; "
    note += "bars: median; whiskers: least and most"
    return Bars("hook-steps", "Training steps with communication hooks", note, tuple(found))


def main(arguments: Sequence[str] | None = None) -> int:
    """Draw the documents named on the command line."""
    title = (
        "Draw the time of training steps with communication hooks, from documents of jobs.bench --table hook."
    )
    parser = command_parser("jobs.bench.hook_figure", title, "hook-1gbit.json hook-4.json --output hook.svg")
    add = parser.add_argument
    text = "Documents, one for each network, from top to bottom."
    add("documents", nargs="+", type=Path, metavar="JSON", help=text)
    add("--output", type=Path, required=True, metavar="FILE", help="Picture to write, SVG or PNG.")
    options = parser.parse_args(arguments)
    try:
        draw([bars([read(path) for path in options.documents])], options.output)
    except BenchError as error:
        show(f"jobs.bench.hook_figure: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
