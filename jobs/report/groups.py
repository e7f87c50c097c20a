"""Groups runs that differ in their seed alone: a line of a picture, a row of a table."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from jobs.render.chart import colour_of, dashes_of, order_of, title_of
from jobs.report.summary import Run, figures

STAGED = "run.time_stages"  # which makes a run slower
# what may differ between runs of one group, besides everything else in [run] and [checkpoint]
_INCIDENTAL = ("training.seed", "data.path", "reduction.method")
_MOST_NAMED = 3  # settings in a label


@dataclass(frozen=True, eq=False)
class Group:
    """Runs of one method and configuration over several seeds.

    label tells it from the other groups of a report. All groups of a method have its colour; dashes tell them apart.
    """

    label: str
    method: str
    colour: str
    dashes: Any
    runs: tuple[Run, ...]

    @property
    def counted(self) -> tuple[Run, ...]:
        """The runs that figures are taken from: the complete ones, all where none is."""
        return tuple(run for run in self.runs if run.complete) or self.runs

    @property
    def ranks(self) -> int:
        return self.runs[0].info.ranks

    def values(self, figure: str) -> list[float]:
        """A figure of jobs.report.summary.figures, of each counted run that has it."""
        values = [every.get(figure) for every in self._figures]
        return [float(value) for value in values if isinstance(value, int | float)]

    @cached_property
    def _figures(self) -> list[dict[str, Any]]:
        return [figures(run) for run in self.counted]

    def mean(self, figure: str) -> float | None:
        """Mean of a figure over the counted runs; None where none has it."""
        values = self.values(figure)
        return float(np.mean(values)) if values else None

    def total(self, figure: str) -> float | None:
        """As mean, but the largest over the runs for a figure that is the largest over a run."""
        return max(self.values(figure), default=None) if figure.endswith("_largest") else self.mean(figure)

    get = total  # a group is a record of jobs.render.table

    @property
    def figure_names(self) -> list[str]:
        """All figures that are numbers, where they are there."""
        of_runs = {name: value for run in self._figures for name, value in run.items()}
        return [name for name, value in of_runs.items() if not isinstance(value, str)]

    def spread(self, figure: str) -> float | None:
        """Sample standard deviation over the counted runs; None for fewer than two."""
        values = self.values(figure)
        return float(np.std(values, ddof=1)) if len(values) > 1 else None

    def seconds_to(self, accuracy: float) -> list[float]:
        """Training seconds after which each counted run that got there first measured an accuracy."""
        return self._reached(accuracy, lambda run: run.training_seconds)

    def steps_to(self, accuracy: float) -> list[float]:
        """As seconds_to, in steps."""
        return self._reached(accuracy, lambda run: run.steps["step"])

    def _reached(self, accuracy: float, of: Callable[[Run], NDArray[Any]]) -> list[float]:
        values = []
        for run in self.counted:
            there = run.evaluations["step"][run.evaluations["accuracy"] >= accuracy][:1]
            values += run.at_steps(of(run), there).tolist()
        return values


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """Put runs together that differ in their seed alone, in the order of jobs.render.chart.METHODS."""
    grouped: dict[str, list[Run]] = {}
    for run in runs:
        key = json.dumps([run.info.method, run.info.ranks, settings_of(run)], sort_keys=True, default=str)
        grouped.setdefault(key, []).append(run)
    together = sorted(grouped.values(), key=lambda runs: (order_of(runs[0].info.method), runs[0].info.ranks))
    groups: list[Group] = []
    for label, members in zip(_labels(together), together, strict=True):
        method = members[0].info.method
        dashes = dashes_of(method, sum(group.method == method for group in groups))
        groups.append(Group(label, method, colour_of(method), dashes, tuple(members)))
    return groups


def divided(groups: Sequence[Group], attribute: str) -> dict[int, list[Group]]:
    """An attribute of RunInfo, such as "ranks" -> the groups that have it, labelled by what else tells them apart."""
    runs: dict[int, list[Run]] = {}
    for run in (run for group in groups for run in group.runs):
        runs.setdefault(getattr(run.info, attribute), []).append(run)
    return {value: group_runs(runs[value]) for value in sorted(runs)}


def timed_by_stage(group: Group) -> bool:
    """Whether its stages were timed one by one, which slows the steps."""
    return STAGED in settings_of(group.runs[0])


def reads_text(groups: Sequence[Group]) -> bool:
    """Whether all groups train on text, where the held-out loss is compared."""
    data = [run.config.get("data", {}).get("name") for group in groups for run in group.runs]
    return bool(data) and set(data) == {"text"}


def settings_of(run: Run) -> dict[str, Any]:
    """The configuration as "section.key" -> value, without what may differ within a group."""
    flat = {
        f"{section}.{key}": value
        for section, keys in run.config.items()
        for key, value in (keys.items() if isinstance(keys, dict) else {"": keys}.items())
    }
    return {
        name: value
        for name, value in flat.items()
        if name not in _INCIDENTAL
        and (not name.startswith(("run.", "checkpoint.")) or (name == STAGED and value))
    }


def differences(groups: Sequence[Group]) -> dict[str, list[Any]]:
    """Settings in which groups differ -> the value of each group, None where it has none; "ranks" among them."""
    each = [{"ranks": group.ranks, **settings_of(group.runs[0])} for group in groups]
    names = dict.fromkeys(name for settings in each for name in settings)
    of_groups = {name: [settings.get(name) for settings in each] for name in names}
    return {name: values for name, values in of_groups.items() if any(value != values[0] for value in values)}


def _labels(together: Sequence[Sequence[Run]]) -> list[str]:
    """The method's title; where several groups have it, with the settings in which they differ."""
    each = [Group("", runs[0].info.method, "", None, tuple(runs)) for runs in together]
    labels = []
    for group in each:
        rivals = [other for other in each if other.method == group.method]
        differing = {name: values[rivals.index(group)] for name, values in differences(rivals).items()}
        named = [_named(name, value) for name, value in differing.items() if value is not None]
        if len(named) > _MOST_NAMED:
            named = [group.runs[0].stem]
        labels.append(title_of(group.method) + (f" ({', '.join(named)})" if named else ""))
    return labels


def _named(name: str, value: Any) -> str:
    if name == "ranks":
        return in_words(value, "rank")
    return "timed by stage" if name == STAGED else f"{name.rpartition('.')[2]} {value}"


def in_words(count: int, noun: str) -> str:
    """A number of things."""
    return f"{count} {noun}{'' if count == 1 else 's'}"
