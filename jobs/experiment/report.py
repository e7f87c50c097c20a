"""Writes an experiment's report: page, CSV files, tables as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from data.durable import replaced
from jobs.experiment.experiments import Experiment
from jobs.experiment.targets import Claim, verdicts
from jobs.render.table import Column, Table, table
from jobs.report.page import facts
from jobs.report.write import PAGE, report
from jobs.run.file import RunFileError

TABLES = "results.md"


def write_report(
    experiment: Experiment,
    files: Mapping[str, Sequence[Path]],
    folder: Path,
    command: str,
    notes: Sequence[str],
) -> str:
    """Write the page, the CSV files and results.md.

    Args:
        experiment: what was run.
        files: kind of run -> run files, of all KINDS.
        folder: where to.
        command: that made them.
        notes: what a reader must know first.

    Returns:
        The tables and claims for the terminal, and where the page is.

    Raises:
        RunFileError: the folder cannot be written.
    """
    if not any(files.values()):
        return "no run has begun: there is nothing to report yet"
    written = report(
        files["train"],
        folder,
        sweep=files["sweep"],
        throughput=files["speed"],
        target=experiment.accuracy,
        title=experiment.title,
        first=lambda groups: [claims_table(verdicts(experiment, groups["train"], groups["speed"]))],
        notes_besides=notes,
    )
    seeds = sorted({run.info.seed for run in written.runs})
    about = [("Command", f"`{command}`"), *facts(written.runs), ("Seeds", ", ".join(map(str, seeds)))]
    text = [f"# {experiment.title}", "", *(f"- {name}: {value}" for name, value in about), ""]
    text += [line for note in notes for line in (note, "")]
    for each in written.tables:
        text += [f"## {each.title}", "", each.markdown(), "", *([each.note, ""] if each.note else [])]
    try:
        with replaced(folder / TABLES) as draft:
            draft.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    except OSError as error:
        raise RunFileError(f"{folder / TABLES} cannot be written: {error}") from error
    return "\n".join([*(each.markdown() + "\n" for each in written.tables), f"page: {folder / PAGE}"])


def claims_table(claims: Sequence[Claim]) -> Table:
    """The claims with their verdicts."""
    columns = [
        Column("Claim", lambda claim: claim.text),
        Column("Verdict", lambda claim: claim.verdict),
        Column("Measured", lambda claim: claim.measured),
    ]
    return table(columns, claims, "Claims", align=("left", "left"))
