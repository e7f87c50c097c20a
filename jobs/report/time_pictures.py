"""The pictures of what time goes into, and of speed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from jobs.report.groups import Group, by_batch, on_most_ranks, timed_by_stage
from jobs.report.panels import BarPanel, Line, LinePanel, Panel
from jobs.report.style import PARTS, STAGES, title_of
from jobs.report.summary import REST

OTHER_STAGE = "#DDDDDD"


def speed(groups: Sequence[Group]) -> list[Panel]:
    """Of runs that are compared by their speed: over the ranks where there are several numbers of them, and on the most."""
    panels: list[Panel] = []
    batches = by_batch(groups)
    for batch, alike in batches.items():
        place = f"-batch-{batch}" if len(batches) > 1 else ""
        where = f", batches of {batch}" if len(batches) > 1 else ""
        if len({group.ranks for group in alike}) > 1:
            quick = [group for group in alike if not timed_by_stage(group)]
            panels.append(scaling(quick, f"throughput{place}", where))
        widest = on_most_ranks(alike)
        panels.append(time_parts(widest, f"speed-by-part{place}", where))
        panels.append(time_stages(widest, f"speed-by-stage{place}", where))
    return panels


def time_parts(groups: Sequence[Group], name: str = "time-by-part", where: str = "") -> BarPanel:
    """What a step of each group spends its time on; where: in words, what the groups have in common."""
    shown = [group for group in groups if group.mean("step_seconds")]
    parts = {part: [group.mean(f"part_{part}_seconds") or 0.0 for group in shown] for part in PARTS}
    return BarPanel(
        name,
        f"Time of a step{where}",
        "compute: forward, backward, optimizer; selection: what the reduction does in a rank's own memory; "
        "communication: the rest of it; combined: both in one stream of kernels; data: waiting for a batch",
        "ms",
        tuple(shown),
        {part: values for part, values in parts.items() if any(values)},
        PARTS,
    )


def time_stages(groups: Sequence[Group], name: str = "time-by-stage", where: str = "") -> BarPanel:
    """What the reduction of each group spends its time on; where: as time_parts."""
    ordered = ordered_stages(groups)
    shown = [group for group in groups if any(group.mean(f"stage_{stage}_seconds") for stage in ordered)]
    return BarPanel(
        name,
        f"Time of the reduction, by stage{where}",
        "mean over the steps and the ranks; rest: what no stage timed",
        "ms",
        tuple(shown),
        {
            stage: [max(group.mean(f"stage_{stage}_seconds") or 0.0, 0.0) for group in shown]
            for stage in ordered
        },
        {stage: STAGES.get(stage, OTHER_STAGE) for stage in ordered},
    )


def ordered_stages(groups: Sequence[Group]) -> list[str]:
    """The stages of all runs, in the order of STAGES, and the rest."""
    stages = dict.fromkeys(stage for group in groups for run in group.runs for stage in run.stages)
    return [stage for stage in STAGES if stage in stages] + [s for s in stages if s not in STAGES] + [REST]


def scaling(groups: Sequence[Group], name: str = "throughput", where: str = "") -> LinePanel:
    """Samples per second over the number of ranks, a line for each method; where: as time_parts."""
    methods: dict[str, list[Group]] = {}
    for group in groups:
        if group.mean("samples_per_second"):
            methods.setdefault(group.method, []).append(group)
    lines = []
    for members in methods.values():
        x = np.array([float(group.ranks) for group in members])
        rates = [group.values("samples_per_second") for group in members]
        y, low, high = (np.array([of(values) for values in rates]) for of in (np.mean, np.min, np.max))
        lines.append(Line(members[0], title_of(members[0].method), x, y, low, high))
    return LinePanel(
        name,
        f"Throughput{where}",
        "samples per second of all ranks together, by the mean step, exact steps included",
        "ranks",
        "samples / s",
        ("ranks", "samples_per_second"),
        tuple(lines),
        marks=True,
    )
