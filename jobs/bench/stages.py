"""Where the time of a step goes that runs on a device as a whole: its stages by events there, beside their floors."""

from __future__ import annotations

import statistics
from typing import Any

from jobs.bench.device import Device
from jobs.bench.gradients import GradientSource
from oktopk import GradientAllreduce

_STEPS = 24  # after all others: an event between two kernels, and launches one by one, make a step slower
_LAST = "gather and apply"
_CLEARED = 4 / 28  # of the bytes of `apply`: one element an entry


def stages_on_device(reducer: GradientAllreduce, source: GradientSource, device: Device) -> dict[str, float]:
    """Seconds on this rank's device by stage, the median of some regular steps. Collective.

    Empty where the reducer cannot tell.
    """
    reducer.time_stages = True
    found: dict[str, list[float]] = {}
    for _ in range(_STEPS):
        report = reducer.step(device.place(source.next()))
        device.finish()
        if report.local_exact or report.global_exact or _LAST not in report.seconds:
            continue
        for stage, seconds in report.seconds.items():
            if stage != "step":
                found.setdefault(stage, []).append(seconds)
    reducer.time_stages = False
    return {stage: statistics.median(seconds) for stage, seconds in found.items()}


def device_stages(
    on_device: dict[str, list[float]], floors: dict[str, dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """stage -> seconds (the mean over the ranks), slowest (of any rank), floor.

    Args:
        on_device: stage -> seconds of each rank.
        floors: of the stages as `bench_floors` has them, whose `apply` also clears; what is gathered is applied at once.
    """
    known = {stage: floor["seconds"] for stage, floor in floors.items()}
    if _LAST in on_device:
        apply = known.get("apply", 0.0)
        known["clear"] = _CLEARED * apply
        known[_LAST] = known.get("allgather", 0.0) + (1 - _CLEARED) * apply
    return {
        stage: {"seconds": statistics.fmean(ranks), "slowest": max(ranks), "floor": known.get(stage)}
        for stage, ranks in on_device.items()
    }
