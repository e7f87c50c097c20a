"""Shows a run in the terminal while it runs and across its restarts.

    python -m jobs.watch RUN.h5 [RUN.h5 ...]

Reads the run file alone, so it needs no connection to the job: any node that sees the file will do. Leaves with Ctrl-C, or
when all runs have ended; --once prints the view and leaves.

Exit status: 0; 2 when a file is no run file.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from collectives.dense_allreduce import dense_words
from data.command import command_parser
from jobs.run.columns import PHASES
from jobs.run.file import RunFileError
from jobs.run.reader import RunReader

RECENT = 50
"""Steps that the step time and the ETA are measured over."""
STALE = 60.0
"""Seconds without news after which a running job is called silent."""
_BARS = "▁▂▃▄▅▆▇█"
_STYLES = {
    "running": "green",
    "silent": "yellow",
    "complete": "bold green",
    "interrupted": "yellow",
    "failed": "red",
}


def view(path: Path, now: float, width: int) -> tuple[Panel, bool]:
    """The panel of a run, and whether it has ended.

    Args:
        path: of the run file.
        now: time.time().
        width: columns for the curve of the loss.

    Raises:
        RunFileError: there is no such file, or it is none.
    """
    with RunReader(path) as reader:
        info, status = reader.info, reader.status
        steps, evaluations, segments = reader.steps(), reader.evaluations(), reader.segments()
        config = reader.config
    done = len(steps["step"])
    age = now - path.stat().st_mtime
    if status == "running" and age > STALE:
        status = "silent"
    total = run_length(config, evaluations)
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column()
    news = f", last news {duration(age)} ago" if status in ("running", "silent") else ""
    what = f"  {info.method} on {info.ranks} ranks of {info.host}{news}"
    rows.add_row("state", Text.assemble((status, _STYLES[status]), what))
    rows.add_row("progress", progress(done, total))
    seconds = step_seconds(steps)
    left = f", {duration((total - done) * seconds)} left" if total and seconds and done < total else ""
    trained = float(steps["elapsed"][-1]) if done else 0.0
    rows.add_row("time", f"{duration(trained)} of training{left}")
    if seconds:
        rows.add_row("step", f"{seconds * 1e3:,.1f} ms: {phases(steps)}")
    if done:
        rows.add_row("loss", f"{mean(steps['loss']):.4f}  {curve(steps['loss'], width)}")
        rows.add_row("words", words(steps, info.length, info.ranks))
    if len(evaluations["step"]):
        best = float(evaluations["accuracy"].max())
        last = float(evaluations["accuracy"][-1])
        rows.add_row("held-out", f"{last:.2%} after step {evaluations['step'][-1]}, best {best:.2%}")
    if len(segments["step"]) > 1:
        rows.add_row("restarts", ", ".join(f"after step {step}" for step in segments["step"][1:]))
    return Panel(rows, title=str(path), title_align="left"), status not in ("running", "silent")


def run_length(config: dict[str, Any], evaluations: dict[str, NDArray[Any]]) -> int:
    """Steps of the whole run, 0 while that cannot be told: the file says no epoch's length before an evaluation."""
    training = config["training"]
    given, epochs = training.get("steps", 0), training.get("epochs", 0)
    if not epochs:
        return int(given)
    if not len(evaluations["step"]):
        return 0
    epoch = float(evaluations["step"][-1]) / float(evaluations["epoch"][-1])
    return min(given or sys.maxsize, round(epochs * epoch))


def progress(done: int, total: int) -> Table | str:
    """A bar, or the number of steps where the end is not known."""
    if not total:
        return f"{done:,} steps"
    bar = Table.grid(padding=(0, 1))
    text = f"{done:,} of {total:,} steps ({done / total:.1%})"
    bar.add_row(ProgressBar(total=total, completed=done, width=40), text)
    return bar


def step_seconds(steps: dict[str, NDArray[Any]]) -> float:
    """Mean over the last steps without what lies between them, evaluations and restarts; 0 without steps."""
    if not len(steps["step"]):
        return 0.0
    return sum(mean(steps[f"seconds_{phase}"]) for phase in PHASES)


def phases(steps: dict[str, NDArray[Any]]) -> str:
    """Shares of the phases in the last steps' time."""
    whole = step_seconds(steps)
    return ", ".join(f"{phase} {mean(steps[f'seconds_{phase}']) / whole:.0%}" for phase in PHASES)


def words(steps: dict[str, NDArray[Any]], length: int, ranks: int) -> str:
    """Payload of the last steps, and what part of the dense one it is."""
    sent, dense = mean(steps["words"]), dense_words(length, ranks)
    share = f", {sent / dense:.1%} of dense" if dense else ""
    return f"{sent:,.0f} a step and rank{share}"


def mean(values: NDArray[Any]) -> float:
    """Over the last RECENT steps."""
    return float(np.mean(values[-RECENT:]))


def curve(values: NDArray[Any], width: int) -> str:
    """The whole course in `width` characters, each the mean of its part; "x" where it is not finite."""
    parts = np.array_split(np.asarray(values, float), min(width, len(values)))
    means = np.array([part.mean() for part in parts])
    finite = means[np.isfinite(means)]
    if not len(finite):
        return "x" * len(means)
    low, span = finite.min(), max(float(np.ptp(finite)), 1e-30)
    levels = (means - low) / span * (len(_BARS) - 1)
    return "".join(_BARS[round(level)] if np.isfinite(level) else "x" for level in levels)


def duration(seconds: float) -> str:
    """Hours, minutes and seconds."""
    return str(timedelta(seconds=max(0, round(seconds))))


def follow(paths: Sequence[Path], console: Console, *, every: float, once: bool) -> None:
    """Show the runs until all have ended. Raises RunFileError: one is no run file, or `once` and it is not there."""

    def look() -> tuple[Group, bool]:
        panels: list[Panel] = []
        ended = True
        for path in paths:
            if not once and not path.exists():
                panels.append(Panel("not there yet", title=str(path), title_align="left"))
                ended = False
                continue
            panel, over = view(path, time.time(), max(10, console.width - 40))
            panels.append(panel)
            ended = ended and over
        return Group(*panels), ended

    shown, ended = look()
    if once:
        console.print(shown)
        return
    with Live(shown, console=console, auto_refresh=False) as live:
        while not ended:
            time.sleep(every)
            shown, ended = look()
            live.update(shown, refresh=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    parser = command_parser(
        "jobs.watch",
        "Show the progress of runs in the terminal until all of them have ended.",
        "runs/oktopk.h5",
        "--once runs/dense.h5 runs/oktopk.h5",
    )
    add = parser.add_argument
    add("runs", metavar="RUN.h5", nargs="+", type=Path, help="Run files that jobs.train writes")
    text = "Seconds between updates; default: %(default)s"
    add("--every", type=float, default=2.0, metavar="SECONDS", help=text)
    text = "Print the view once and exit, as where the output is no terminal"
    add("--once", action="store_true", help=text)
    options = parser.parse_args(argv)
    # a batch job's output is no terminal
    console = Console(width=None if sys.stdout.isatty() else int(os.environ.get("COLUMNS", "100")))
    try:
        follow(options.runs, console, every=options.every, once=options.once or not sys.stdout.isatty())
    except RunFileError as error:
        print(f"jobs.watch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
