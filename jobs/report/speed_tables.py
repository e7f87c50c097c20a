"""The tables of speed: samples per second over the ranks, and what a step of each method is made of."""

from __future__ import annotations

from collections.abc import Sequence

from jobs.config.modes import OVERLAPPED_MODES
from jobs.report.groups import Group, by_batch, is_captured, on_most_ranks, timed_by_stage
from jobs.report.page import MISSING, Cell, Table
from jobs.report.style import title_of
from jobs.report.tables import Figures, milliseconds, step_cell
from jobs.report.time_pictures import ordered_stages
from jobs.run.columns import PHASES

_PHASES = (*PHASES[1:], PHASES[0])
_STAGE_TITLES = {"step": "One stream"}


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
    return [table for table in tables if table.rows]


def throughput_table(groups: Sequence[Group], where: str = "") -> Table:
    """Samples per second and step time of each method on each number of ranks; where: what the groups have in common."""
    sizes = sorted({group.ranks for group in groups})
    methods: dict[str, dict[int, Group]] = {}
    for group in groups:
        methods.setdefault(group.method, {})[group.ranks] = group
    rows = []
    for by_ranks in methods.values():
        first = next(iter(by_ranks.values()))
        row = [Cell(title_of(first.method), colour=first.colour)]
        for size in sizes:
            there = by_ranks.get(size)
            rate = there.mean("samples_per_second") if there else None
            step = there.mean("step_seconds") if there else None
            row.append(
                Cell(
                    MISSING if rate is None else f"{rate:,.0f}",
                    "" if step is None else f"{step * 1e3:.2f} ms",
                )
            )
        rows.append(row)
    heads = [
        Cell("Method"),
        *(Cell(f"{size} rank{'' if size == 1 else 's'}", "samples / s") for size in sizes),
    ]
    return Table(
        f"Throughput{where}",
        heads,
        rows,
        note="By the mean step, exact steps included; no evaluations in between.",
    )


def steps_table(groups: Sequence[Group], where: str = "") -> Table:
    """Phases of a step, and what of them stands beside NCCL's where that was measured.

    Args:
        groups: on one number of ranks, one or more.
        where: what they have in common, in words.
    """
    nccl = next((group for group in groups if group.method == "nccl"), None)
    heads = [
        Cell("Method"),
        Cell("Samples / s"),
        Cell("Step, ms", "mean; median"),
        *(Cell(phase.capitalize(), "ms") for phase in _PHASES),
    ]
    if nccl is not None:
        heads += [Cell("× NCCL", "step"), Cell("× NCCL", "reduction")]
    rows = [_steps_row(group, nccl) for group in groups]
    kinds = {group.label: is_captured(group) for group in groups}
    eager = ", ".join(title for title, captured in kinds.items() if not captured)
    replayed = f" Steps are replayed as CUDA graphs{f', but for {eager}' if eager else ''}."
    return Table(
        f"A step{_on_ranks(groups)}{where}",
        heads,
        rows,
        note="Reduction: from the gradients that backward left to the mean that the optimizer sees, selection, exact thresholds "
        "and conversions included; what DenseOvlp and DDP do behind backward is in backward. × NCCL: how many times "
        f"faster than one flat allreduce by NCCL in the same type.{replayed if any(kinds.values()) else ''}",
    )


def stages_table(groups: Sequence[Group], where: str = "") -> Table:
    """What the reduction of each group spends its time on; groups, where: as steps_table."""
    stages = [stage for stage in ordered_stages(groups) if any(_stage(group, stage) for group in groups)]
    rows = [
        [
            Cell(group.label, colour=group.colour),
            *(Cell(milliseconds(_stage(group, stage) or None)) for stage in stages),
        ]
        for group in groups
        if any(_stage(group, stage) for stage in stages)
    ]
    return Table(
        f"The reduction by stage{_on_ranks(groups)}{where}",
        [Cell("Method"), *(Cell(_STAGE_TITLES.get(stage, stage.capitalize()), "ms") for stage in stages)],
        rows,
        note="Mean over the steps, exact ones included, and the ranks. One stream: selection to applying by kernels, as the "
        "host sees it, which does not wait for all of them; the other stages where they were timed one by one, which costs a "
        "little. Rest: what no stage timed; negative where the host waited in a stage for the backward pass. Of a reduction "
        "behind the backward pass only what is waited for after it.",
    )


def _on_ranks(groups: Sequence[Group]) -> str:
    ranks = groups[0].ranks
    return f" on {ranks} rank{'' if ranks == 1 else 's'}"


def _stage(group: Group, stage: str) -> float:
    """Seconds; 0 for what would be shown as 0."""
    seconds = group.mean(f"stage_{stage}_seconds") or 0.0
    return seconds if round(1e3 * seconds, 2) else 0.0


def _steps_row(group: Group, nccl: Group | None) -> list[Cell]:
    figures: Figures = {
        name: group.mean(name)
        for name in (
            "samples_per_second",
            "step_seconds",
            "step_seconds_median",
            *(f"{p}_seconds" for p in _PHASES),
        )
    }
    rate = figures["samples_per_second"]
    row = [
        Cell(group.label, colour=group.colour),
        Cell(MISSING if rate is None else f"{rate:,.0f}"),
        step_cell(figures),
    ]
    row += [Cell(milliseconds(figures[f"{phase}_seconds"])) for phase in _PHASES]
    if nccl is not None:
        for name in ("step_seconds", "reduction_seconds"):
            theirs, own = nccl.mean(name), figures[name]
            hidden = name == "reduction_seconds" and group.method in OVERLAPPED_MODES
            row.append(Cell(f"{theirs / own:.2f}" if theirs and own and not hidden else MISSING))
    return row
