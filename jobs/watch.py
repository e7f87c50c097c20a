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
from rich.table import Table
from rich.text import Text

from data.command import command_parser, escaped, show
from jobs.report.summary import Run, read_runs
from jobs.run.columns import PHASES
from jobs.run.file import RunFileError

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
    (run,) = read_runs([path])
    done, total, age = run.count, run_length(run), now - path.stat().st_mtime
    ended = run.status != "running"
    status = "silent" if not ended and age > STALE else run.status
    rows = Table.grid(padding=(0, 2))
    rows.add_column(style="dim")
    rows.add_column()
    news = "" if ended else f", last news {duration(age)} ago"
    what = f"  {run.info.method} on {run.info.ranks} ranks of {run.info.host}{news}"
    rows.add_row("state", Text.assemble((status, _STYLES[status]), what))
    rows.add_row(
        "progress", f"{done:,} of {total:,} steps ({done / total:.1%})" if total else f"{done:,} steps"
    )
    if done:
        seconds = recent(run.step_seconds)
        left = f", {duration((total - done) * seconds)} left" if done < total else ""
        rows.add_row("time", f"{duration(run.steps['elapsed'][-1])} of training{left}")
        shares = (f"{phase} {recent(run.steps[f'seconds_{phase}']) / seconds:.0%}" for phase in PHASES)
        rows.add_row("step", f"{seconds * 1e3:,.1f} ms: {', '.join(shares)}")
        loss, words = run.steps["loss"], recent(run.steps["words"])
        rows.add_row("loss", f"{recent(loss):.4f}  {curve(loss, width)}")
        share = f", {words / run.dense_words:.1%} of dense" if run.dense_words else ""
        rows.add_row("words", f"{words:,.0f} a step and rank{share}")
    accuracy, after = run.evaluations["accuracy"], run.evaluations["step"]
    if len(accuracy):
        rows.add_row("held-out", f"{accuracy[-1]:.2%} after step {after[-1]}, best {accuracy.max():.2%}")
    if len(run.segments["step"]) > 1:
        rows.add_row("restarts", ", ".join(f"after step {step}" for step in run.segments["step"][1:]))
    return _panel(path, rows), ended


def _panel(path: Path, content: Table | str) -> Panel:
    # brackets of a name are no markup
    return Panel(content, title=Text(escaped(str(path))), title_align="left")


def run_length(run: Run) -> int:
    """Steps of the whole run, 0 while that cannot be told: the file says no epoch's length before an evaluation."""
    steps, epochs = (run.config["training"].get(unit, 0) for unit in ("steps", "epochs"))
    if not epochs:
        return int(steps)
    if not len(run.evaluations["step"]):
        return 0
    epoch = float(run.evaluations["step"][-1]) / float(run.evaluations["epoch"][-1])
    return min(steps or sys.maxsize, round(epochs * epoch))


def recent(values: NDArray[Any]) -> float:
    """Mean over the last RECENT steps."""
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
                panels.append(_panel(path, "not there yet"))
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
        show(f"jobs.watch: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 0
    return 0


if __name__ == "__main__":
    sys.exit(main())
