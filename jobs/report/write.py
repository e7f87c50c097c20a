"""Writes a report: page and CSV files; returns its tables as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.command import escaped
from data.durable import replaced
from jobs.render.table import Table, write_columns, write_rows
from jobs.report.groups import Group, group_runs
from jobs.report.page import render
from jobs.report.pictures import sections
from jobs.report.summary import Run, figures, read_readable
from jobs.report.tables import method_figures, methods_table, speed_tables, steps_table
from jobs.run.file import RunFileError

Groups = Mapping[str, Sequence[Group]]
"""Kind of runs, "train", "speed" or "slow" -> its groups; see report()."""
PAGE = "index.html"
SERIES = "runs"


class Report(NamedTuple):
    """What was written: tables, a note on every run that is not what it seems, and the runs."""

    tables: Sequence[Table]
    notes: Sequence[str]
    runs: Sequence[Run]

    def __str__(self) -> str:
        return "\n".join([*(table.turned() for table in self.tables), *self.notes])


def report(
    paths: Sequence[str | Path],
    folder: str | Path,
    *,
    throughput: Sequence[str | Path] = (),
    slow: Sequence[str | Path] = (),
    target: float | None = None,
    title: str = "",
    first: Callable[[Groups], Sequence[Table]] = lambda groups: (),
    notes_besides: Sequence[str] = (),
) -> Report:
    """Write the page and the CSV files into folder, which is made if need be.

    Args:
        paths: run files; throughput: of runs that are compared by their speed alone; slow: of such runs over links of 1 Gb/s.
        folder: made if need be.
        target: an accuracy to which times are taken.
        title: the page's heading.
        first: further tables of the groups, above all others.
        notes_besides: what the files do not say, for the page.

    Raises:
        RunFileError: none of the files is a run; or the folder cannot be written.
    """
    runs: dict[str, list[Run]] = {}
    problems: list[str] = []
    for kind, files in {"train": paths, "speed": throughput, "slow": slow}.items():
        runs[kind], unread = read_readable(files)
        problems += unread
    if not (runs["train"] or runs["speed"]):
        raise RunFileError("; ".join(problems) or "no run file was named")
    groups = {kind: group_runs(found) for kind, found in runs.items()}
    shown = groups["train"] or groups["speed"]
    compared = [group for kind in ("train", "speed") for group in groups[kind]]
    remarks = [*notes(groups["train"]), *(f"left out: {problem}" for problem in problems)]
    pictures, folder = sections(groups["train"], target), Path(folder)
    shown_tables = [*first(groups), *tables(groups, target)]
    try:
        (folder / SERIES).mkdir(parents=True, exist_ok=True)
        for run in (run for found in runs.values() for run in found):
            _write_series(run, folder / SERIES)
        write_rows([figures(run) for found in runs.values() for run in found], folder / "summary.csv")
        write_rows([method_figures(group, target) for group in compared], folder / "methods.csv")
        for panel in (panel for panels in pictures.values() for panel in panels):
            write_rows(panel.rows(), folder / f"{panel.name}.csv")
        page = render(
            title or "Runs compared",
            groups=shown,
            besides=[group for found in groups.values() for group in found if group not in shown],
            tables=shown_tables,
            sections=pictures,
            notes=[*remarks, *notes_besides],
        )
        with replaced(folder / PAGE) as draft:
            draft.write_text(escaped(page), encoding="utf-8")
    except OSError as error:
        raise RunFileError(f"{folder} cannot be written: {error}") from error
    return Report(shown_tables, remarks, [run for found in runs.values() for run in found])


def tables(groups: Groups, target: float | None) -> list[Table]:
    """The tables of a report, those with nothing to show left out; target: an accuracy to which times are taken."""
    trained = groups["train"]
    found = [methods_table(trained, target)] if trained else []
    # where the time goes: of runs for that alone, else of those that were trained
    found += speed_tables(groups["speed"] or trained)
    if groups["slow"]:
        found.append(steps_table(groups["slow"], " over links of 1 Gb/s"))
    return found


def _write_series(run: Run, folder: Path) -> None:
    stages = {f"stage_{name}": values[: run.count] for name, values in run.stages.items()}
    further = {"words_sent": np.cumsum(run.steps["words"]), "training_seconds": run.training_seconds}
    write_columns(folder / f"{run.stem}-steps.csv", {**run.steps, **further, **stages})
    for name, series in (("evaluations", run.evaluations), ("measures", run.measures)):
        if len(series["step"]):
            write_columns(folder / f"{run.stem}-{name}.csv", series)


def notes(groups: Sequence[Group]) -> list[str]:
    """Notes below the table: unfinished runs, skipped steps, warm-ups."""
    lines = []
    for run in (run for group in groups for run in group.runs):
        figure = figures(run)
        if run.status == "running":
            lines.append(f"{run.stem}: unfinished after {run.count} steps: still running, or killed")
        elif not run.complete:
            lines.append(f"{run.stem}: unfinished after {run.count} steps: {run.status}")
        if figure["skipped_steps"]:
            lines.append(
                f"{run.stem}: {figure['skipped_steps']} steps skipped, their gradients were not finite"
            )
    warmed: dict[str, list[str]] = {}
    for group in groups:
        figure = figures(group.runs[0])
        dense, denser, words = (figure[n] for n in ("dense_steps", "denser_steps", "words_sparse_steps"))
        # all steps of a dense method are
        if denser or (dense and words is not None):
            share = f"{dense} of {group.runs[0].count} steps were dense"
            share += f", {denser} of a higher density" if denser else ""
            sent = "none" if words is None else f"{words:,.0f}"
            warmed.setdefault(share, []).append(f"{group.label} {sent}")
    return lines + [
        f"{share}; words per step in the others: {', '.join(each)}" for share, each in warmed.items()
    ]
