"""Tables of speed: samples per second over the ranks, phases and stages of a step."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from jobs.config.modes import OVERLAPPED_MODES
from jobs.render.table import MISSING, Cell, Column, Table, beside, figure, milliseconds, shown
from jobs.report.groups import (
    Group,
    by_batch,
    by_ranks,
    is_captured,
    on_most_ranks,
    ordered_stages,
    timed_by_stage,
)
from jobs.report.summary import REST
from jobs.report.tables import METHOD, STEP, groups_table
from jobs.run.columns import PHASES

_PHASES = (*PHASES[1:], PHASES[0])
_STAGE_TITLES = {"step": "One stream"}
_REDUCTION = (
    "Reduction: from the gradients that backward left to the mean that the optimizer sees, selection, exact thresholds and "
    "conversions included"
)
_EXPLAINED = {
    "step": "One stream: selection to applying by kernels, as the host sees it, which does not wait for all of them; the other "
    "stages where they were timed one by one, which costs a little.",
    REST: "Rest: what no stage timed; negative where the host waited in a stage for the backward pass.",
}
"""Stage -> the note on its column."""


def speed_tables(groups: Sequence[Group]) -> list[Table]:
    """Tables of runs that are compared by their speed, for each size of batches."""
    tables = []
    batches = by_batch(groups)
    for batch, alike in batches.items():
        where = f", batches of {batch}" if len(batches) > 1 else ""
        if len({group.ranks for group in alike}) > 1:
            quick = [group for group in alike if not timed_by_stage(group)]
            tables.append(throughput_table(quick, where))
        widest = on_most_ranks(alike)
        tables += [steps_table(widest, where), stages_table(widest, where)]
    return [each for each in tables if each.rows]


def throughput_table(groups: Sequence[Group], where: str = "") -> Table:
    """Samples per second and step time of each method on each number of ranks; where: what the groups have in common."""
    sizes = by_ranks(groups)
    by_place = {(group.label, size): group for size, members in sizes.items() for group in members}
    firsts = {label: group for (label, _), group in reversed(by_place.items())}
    cell = beside(figure("samples_per_second"), figure("step_seconds", "{:.2f} ms", 1e3))

    def on(size: int, group: Group) -> Cell:
        there = by_place.get((group.label, size))
        return Cell(MISSING) if there is None else cell(there)

    columns = [METHOD]
    for size in sizes:
        columns.append(Column(_ranks(size), partial(on, size), "samples / s"))
    note = "By the mean step, exact steps included; no evaluations in between."
    return groups_table(columns, list(firsts.values())[::-1], f"Throughput{where}", note)


def steps_table(groups: Sequence[Group], where: str = "") -> Table:
    """Phases of a step, and what of them stands beside NCCL's where that was measured.

    Args:
        groups: on one number of ranks, one or more.
        where: what they have in common, in words.
    """
    nccl = next((group for group in groups if group.method == "nccl"), None)

    def beside_nccl(what: str, group: Group) -> str:
        nccls, own = nccl and nccl.mean(f"{what}_seconds"), group.mean(f"{what}_seconds")
        hidden = what == "reduction" and group.method in OVERLAPPED_MODES
        return f"{nccls / own:.2f}" if nccls and own and not hidden else MISSING

    columns = [METHOD, Column("Samples / s", figure("samples_per_second")), STEP]
    columns += [
        Column(phase.capitalize(), figure(f"{phase}_seconds", milliseconds), "ms") for phase in _PHASES
    ]
    if nccl is not None:
        columns += [Column("× NCCL", partial(beside_nccl, what), what) for what in ("step", "reduction")]
    captured = [is_captured(group) for group in groups]
    eager = ", ".join(group.label for group, is_one in zip(groups, captured, strict=True) if not is_one)
    hidden = {group.label: None for group in groups if group.method in OVERLAPPED_MODES}
    behind = (
        f"; what {', '.join(hidden)} do{'es' * (len(hidden) == 1)} behind backward is in backward"
        if hidden
        else ""
    )
    beside = " × NCCL: how many times faster than one flat allreduce by NCCL in the same type."
    replayed = f" Steps are replayed as CUDA graphs{f', but for {eager}' if eager else ''}."
    return groups_table(
        columns,
        groups,
        f"A step on {_ranks(groups[0].ranks)}{where}",
        f"{_REDUCTION}{behind}.{beside if nccl is not None else ''}{replayed if any(captured) else ''}",
    )


def stages_table(groups: Sequence[Group], where: str = "") -> Table:
    """Stages of the reduction's time for each group; groups, where: as steps_table."""

    def seconds(group: Group, stage: str) -> float | None:
        found = group.mean(f"stage_{stage}_seconds") or 0.0
        return found if round(1e3 * found, 2) else None  # it would be shown as 0

    def cell(stage: str, group: Group) -> str:
        return shown(seconds(group, stage), milliseconds)

    stages = [stage for stage in ordered_stages(groups) if any(seconds(group, stage) for group in groups)]
    columns = [METHOD]
    for stage in stages:
        columns.append(Column(_STAGE_TITLES.get(stage, stage.capitalize()), partial(cell, stage), "ms"))
    explained = [text for stage, text in _EXPLAINED.items() if stage in stages]
    if any(group.method in OVERLAPPED_MODES or _overlaps(group) for group in groups):
        explained.append("Of a reduction behind the backward pass only what is waited for after it.")
    return groups_table(
        columns,
        [group for group in groups if any(seconds(group, stage) for stage in stages)],
        f"The reduction by stage on {_ranks(groups[0].ranks)}{where}",
        " ".join(["Mean over the steps, exact ones included, and the ranks.", *explained]),
    )


def _overlaps(group: Group) -> bool:
    return bool(group.runs[0].config.get("reduction", {}).get("overlap"))


def _ranks(count: int) -> str:
    return f"{count} rank{'' if count == 1 else 's'}"
