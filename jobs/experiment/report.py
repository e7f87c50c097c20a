"""Writes an experiment's report: page, CSV files, tables as Markdown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from data.durable import replaced
from jobs.experiment.experiments import Experiment
from jobs.experiment.targets import verdicts
from jobs.experiment.trials import KINDS
from jobs.render.table import Column, Table, table
from jobs.report.groups import group_runs
from jobs.report.page import Claim, hardware, short_commit, task
from jobs.report.summary import Run, read_readable
from jobs.report.write import PAGE, report, tables
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
    # what cannot be read, the report names
    runs = {kind: read_readable(files[kind])[0] for kind in KINDS}
    claims = verdicts(experiment, *(group_runs(runs[kind]) for kind in ("train", "speed")))
    report(
        files["train"],
        folder,
        sweep=files["sweep"],
        throughput=files["speed"],
        target=experiment.accuracy,
        title=experiment.title,
        claims=claims,
        notes_besides=notes,
    )
    every = [*tables(runs, experiment.accuracy), claims_table(claims)]
    all_runs = [run for kind in KINDS for run in runs[kind]]
    text = [f"# {experiment.title}", "", *_provenance(all_runs, command), ""]
    text += [line for note in notes for line in (note, "")]
    for each in every:
        text += [f"## {each.title}", "", each.markdown(), "", *([each.note, ""] if each.note else [])]
    try:
        with replaced(folder / TABLES) as draft:
            draft.write_text("\n".join(text).rstrip() + "\n", encoding="utf-8")
    except OSError as error:
        raise RunFileError(f"{folder / TABLES} cannot be written: {error}") from error
    texts = [each.markdown() + "\n" for each in every]
    return "\n".join([*texts, f"page: {folder / PAGE}"])


def claims_table(claims: Sequence[Claim]) -> Table:
    """The claims with their verdicts."""
    columns = [
        Column("Claim", lambda claim: claim.text),
        Column("Verdict", lambda claim: claim.verdict),
        Column("Measured", lambda claim: claim.measured),
    ]
    return table(columns, claims, "Claims", align=("left", "left"))


def _provenance(runs: Sequence[Run], command: str) -> list[str]:
    seeds = sorted({run.info.seed for run in runs})
    commits = dict.fromkeys(map(short_commit, runs))
    dates = sorted({run.info.started[:10] for run in runs})
    return [
        f"- Command: `{command}`",
        f"- Task: {'; '.join(dict.fromkeys(task(run) for run in runs))}",
        f"- Hardware: {'; '.join(dict.fromkeys(map(hardware, runs)))}",
        f"- Commit: {', '.join(commits)}; date: {', '.join(dates)}; seeds: {', '.join(map(str, seeds))}",
    ]
