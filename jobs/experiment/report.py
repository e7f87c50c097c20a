"""Compares an experiment's targets with what was measured, and writes its report: page, CSV files, tables as Markdown.

A figure that was not measured is NaN, and a target that needs one is open. A figure that was no number fails its target.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from data.durable import replaced
from jobs.experiment.experiments import Experiment, Target, Value
from jobs.render.table import Column, Table, table
from jobs.report.groups import Group, divided, timed_by_stage
from jobs.report.write import PAGE, facts, report
from jobs.run.file import RunFileError

_OPERATORS: dict[str, Callable[[float, float], float]] = {"/": np.divide, "-": operator.sub}


class Claim(NamedTuple):
    """Something that the runs were to show: "held", "failed", or "open" where it was not measured."""

    text: str
    verdict: Literal["held", "failed", "open"]
    measured: str


class Figures:
    """The figures of one group as attributes, for a target's value and texts: those of methods.csv, and those of FIGURES.

    Args:
        group: None where there is none, whose figures were not measured.
        own: figures that replace its own.
    """

    def __init__(self, group: Group | None, **own: float) -> None:
        self._group, self._own = group, own

    def __getattr__(self, name: str) -> float:
        if name in self._own:
            return self._own[name]
        if self._group is not None and name in FIGURES:
            return FIGURES[name](self._group)
        return _figure(self._group, name)

    def __str__(self) -> str:
        return "" if self._group is None else self._group.label


Names = Mapping[str, Figures | str]
"""What a target's value and texts may name: figures by method, and words."""


def verdicts(experiment: Experiment, trained: Sequence[Group], fast: Sequence[Group]) -> list[Claim]:
    """Each target with its verdict and what was measured, in the experiment's order, those of speed by size of batches.

    Args:
        experiment: whose targets.
        trained: groups that were trained to the end; fast: those that are compared by speed.
    """
    methods = [*dict.fromkeys((*experiment.methods, *experiment.fast, "nccl", "ddp"))]
    names: dict[str, Figures | str] = {method: Figures(_only(trained, method)) for method in methods}
    waiting = [_waiting_share(group) for group in trained if group.counted[0].complete]
    names["largest"] = Figures(None, waiting_share=max(waiting, default=math.nan))
    claims = [
        _verdict(target, own)
        for target in experiment.targets
        if target.of == "train"
        for own in _of_training(target, trained, names)
    ]
    batches = divided(fast, "batch_size") or {0: []}
    for batch, groups in batches.items():
        widest = next(reversed(divided(groups, "ranks").values()), [])
        names = {method: Figures(_only(widest, method)) for method in methods}
        named = batch and (experiment.speed_batches or len(batches) > 1)
        names["where"] = f", batches of {batch}" if named else ""
        nccl = _only(widest, "nccl")
        kind = "" if nccl is None else nccl.runs[0].config["reduction"].get("gradient_type") or "float32"
        names["of_type"] = kind and f" of {kind}"
        claims += [_verdict(target, names) for target in experiment.targets if target.of == "speed"]
    return claims


def _of_training(target: Target, groups: Sequence[Group], names: Names) -> Iterator[Names]:
    """The names of a target, once for each time that it is compared with runs."""
    if target.each:
        for group in groups:
            if group.method != "dense" and group.counted[0].complete:
                yield {**names, "each": Figures(group)}
    elif target.in_equal_time:
        pair = {method: _only(groups, method) for method in target.in_equal_time}
        seconds = min(_figure(group, "training_seconds") for group in pair.values())
        yield dict(names) | {
            method: Figures(group, seconds=seconds, held_out_loss=_loss_after(group, seconds))
            for method, group in pair.items()
        }
    else:
        yield names


def _verdict(target: Target, names: Names) -> Claim:
    text = target.text.format_map(names)
    value, operands = _value(target, names)
    finite = not any(map(math.isinf, operands))
    if finite and math.isnan(value):
        return Claim(text, "open", "not measured")
    also = ""
    if target.also is not None and not math.isnan(besides := _value(target.also, names)[0]):
        also = target.also.measured.format_map({**names, "value": besides})
    measured = target.measured.format_map({**names, "value": value, "also": also})
    return Claim(text, "held" if finite and target.holds(value) else "failed", measured)


def _value(of: Value, names: Names) -> tuple[float, list[float]]:
    """The value, and the figures it is made of."""
    first, *rest = of.value.split()
    operands = [_operand(word, names) for word in (first, *rest[1::2])]
    value = operands[0]
    with np.errstate(all="ignore"):
        for sign, operand in zip(rest[::2], operands[1:], strict=True):
            value = float(_OPERATORS[sign](value, operand))
    return value, operands


def _operand(word: str, names: Names) -> float:
    method, point, name = word.partition(".")
    return float(getattr(names[method], name)) if point and method in names else float(word)


def _only(groups: Sequence[Group], method: str) -> Group | None:
    """The method's first group, if it has a complete run; none that was timed by stage."""
    complete = [group for group in groups if group.method == method and group.counted[0].complete]
    return next((group for group in complete if not timed_by_stage(group)), None)


def _figure(group: Group | None, name: str) -> float:
    """A figure as Group.total; NaN where it was not measured, and infinite where it was no number."""
    value = None if group is None else group.total(name)
    return math.nan if value is None else math.inf if math.isnan(value) else value


def _waiting_share(group: Group) -> float:
    return _figure(group, "part_data_seconds") / _figure(group, "step_seconds")


def _loss_after(group: Group | None, seconds: float) -> float:
    """The held-out loss after some training time, on a straight line between two evaluations; mean over the runs."""
    runs = () if group is None else group.counted
    if not runs or not all(len(run.evaluations["step"]) for run in runs):
        return math.nan
    losses = []
    for run in runs:
        times = run.at_steps(run.training_seconds, run.evaluations["step"])
        losses.append(np.interp(seconds, times, run.evaluations["loss"]))
    return float(np.mean(losses))


FIGURES: dict[str, Callable[[Group], float]] = {
    "ranks": lambda group: group.ranks,
    "word_error_rate": lambda group: 1 - _figure(group, "held_out_accuracy"),
    "accuracy_points": lambda group: 100 * _figure(group, "held_out_accuracy"),
    "waiting_share": _waiting_share,
    "reduction_ms": lambda group: 1e3 * _figure(group, "reduction_seconds"),
}
"""Figures of a group besides those of methods.csv."""


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
