"""Writes a report: page and CSV files; returns its tables as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from data.command import escaped
from data.durable import own_folder, replaced
from jobs.render.table import Table, write_columns, write_rows
from jobs.report import pictures
from jobs.report.groups import Group, group_runs, reads_text
from jobs.report.headline import SlowLinks, headline, sentence, xi_sentence
from jobs.report.headline import notes as headline_notes
from jobs.report.page import Claim, Section, render
from jobs.report.speed_tables import speed_tables
from jobs.report.summary import Run, figures, read_readable
from jobs.report.tables import method_figures, methods_table, sweep_table, swept
from jobs.run.file import RunFileError

PAGE = "index.html"
SERIES = "runs"


def report(
    paths: Sequence[str | Path],
    folder: str | Path,
    *,
    throughput: Sequence[str | Path] = (),
    sweep: Sequence[str | Path] = (),
    target: float | None = None,
    title: str = "",
    claims: Sequence[Claim] = (),
    notes_besides: Sequence[str] = (),
    links: SlowLinks | None = None,
) -> str:
    """Write the page and the CSV files into folder, which is made if need be.

    Args:
        paths: run files; sweep: of Ok-Topk with other settings than in paths; throughput: of runs that are compared by their
            speed alone.
        folder: made if need be.
        target: an accuracy to which times are taken.
        title: the page's heading.
        claims: what the runs were to show; notes_besides: what the files do not say. For the page.
        links: adds a headline that compares Ok-Topk with Dense, also over these links.

    Returns:
        The headline if there is one, and the tables, with a note below it on every run that is not what it seems.

    Raises:
        RunFileError: none of the files is a run; or the folder cannot be written.
    """
    given = {"train": paths, "sweep": sweep, "speed": throughput}
    given["slow"] = links.paths if links else ()
    runs: dict[str, list[Run]] = {}
    problems: list[str] = []
    for kind, files in given.items():
        runs[kind], unread = read_readable(files)
        problems += unread
    if not (runs["train"] or runs["speed"]):
        raise RunFileError("; ".join(problems) or "no run file was named")
    groups = {kind: group_runs(found) for kind, found in runs.items()}
    shown = groups["train"] or groups["speed"]
    remarks = [*notes(groups["train"]), *(f"left out: {problem}" for problem in problems)]
    sections = _sections(groups["train"], target, xi_sentence(groups["train"]) if links else "")
    if links and (bars := pictures.step_bars(groups["train"], groups["slow"], links.rate)):
        sections.insert(0, Section(f"A step here and over {links.rate}", [bars]))
    figures_on_top = headline(groups["train"], groups["slow"], links) if links else []
    if links:
        remarks += headline_notes(figures_on_top, links, groups["train"], groups["slow"])
    compared = [group for kind in ("train", "speed") for group in groups[kind]]
    folder, every = Path(folder), [run for found in runs.values() for run in found]
    shown_tables = tables(runs, target, xi=links is None)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with own_folder(folder / SERIES) as series:
            for run in every:
                _write_series(run, series)
        write_rows([figures(run) for run in every], folder / "summary.csv")
        write_rows([method_figures(group, target) for group in compared], folder / "methods.csv")
        if rows := swept(runs["train"], runs["sweep"]):
            settings = [settings | method_figures(group) for group, settings in rows.items()]
            write_rows(settings, folder / "sweep.csv")
        for panel in (panel for section in sections for panel in section.panels):
            write_rows(panel.rows(), folder / f"{panel.name}.csv")
        page = render(
            title or "Runs compared",
            groups=shown,
            besides=[*groups["sweep"], *(group for group in compared if group not in shown), *groups["slow"]],
            tables=shown_tables,
            sections=sections,
            notes=[*remarks, *notes_besides],
            claims=claims,
            headline=figures_on_top,
        )
        with replaced(folder / PAGE) as draft:
            draft.write_text(escaped(page), encoding="utf-8")
    except OSError as error:
        raise RunFileError(f"{folder} cannot be written: {error}") from error
    top = [f"Ok-Topk: {sentence(figures_on_top)}", ""] if figures_on_top else []
    return "\n".join([*top, *(table.turned() for table in shown_tables), *remarks])


def tables(runs: Mapping[str, Sequence[Run]], target: float | None, xi: bool = True) -> list[Table]:
    """The tables of a report, those with nothing to show left out.

    Args:
        runs: "train", "sweep" and "speed" -> runs of that kind, see report(); others are not looked at.
        target: an accuracy to which times are taken.
        xi: in the table of methods.
    """
    groups, found = group_runs(runs["train"]), []
    if groups:
        found.append(methods_table(groups, target, xi))
    if rows := swept(runs["train"], runs["sweep"]):
        dense = next((group for group in groups if group.method == "dense"), None)
        found.append(sweep_table(rows, dense))
    # where the time goes: of runs for that alone, else of those that were trained
    return found + speed_tables(group_runs(runs["speed"] or runs["train"]))


def _sections(groups: Sequence[Group], target: float | None, folded: str = "") -> list[Section]:
    """The pictures of the page; those with nothing to show are left out. folded: see Section, of the paper's measures."""
    counted = all(run.tokens.any() for group in groups for run in group.runs)
    over = (pictures.TOKENS if counted else pictures.STEPS, pictures.TIME, pictures.BYTES)
    losses = [pictures.held_out(groups, each, "loss") for each in over] if reads_text(groups) else []
    accuracies = [pictures.held_out(groups, each, "accuracy", target) for each in over]
    selection = [pictures.selection(groups, column) for column in pictures.SELECTION]
    sections = [
        Section("Held-out loss", losses),
        Section("Held-out accuracy", accuracies),
        Section("Training loss", [pictures.loss(groups, each) for each in over]),
        Section("Volume and selection", [pictures.words(groups), *selection]),
        Section(
            "The paper's assumption",
            [pictures.measure(groups, column) for column in ("xi", "fill_in")],
            folded,
        ),
    ]
    return [replace(each, panels=[panel for panel in each.panels if panel.rows()]) for each in sections]


def _write_series(run: Run, folder: Path) -> None:
    stages = {f"stage_{name}": values[: run.count] for name, values in run.stages.items()}
    further = {"words_sent": run.words_sent, "training_seconds": run.training_seconds}
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
