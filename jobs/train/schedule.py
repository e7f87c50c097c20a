"""Computes the learning rate of a step."""

from __future__ import annotations

import math

from jobs.config.sections import ScheduleConfig


def learning_rate_factor(
    schedule: ScheduleConfig, step: int, *, steps: int, steps_per_epoch: int, ranks: int
) -> float:
    """The factor on optimizer.lr in a step.

    Args:
        schedule: its `warmup` and `milestones` count in `schedule.unit`.
        step: 0 for the first.
        steps: length of the run.
        steps_per_epoch: length of an epoch, on any rank.
        ranks: comm.size, for a warm-up that starts at 1/ranks.

    Returns:
        A factor in [0, 1]. A warm-up reaches 1 with its last step.
    """
    scale = {"steps": 1, "epochs": steps_per_epoch, "run": steps}[schedule.unit]
    warmup = schedule.warmup * scale
    if step < warmup:
        start = 1.0 / ranks if isinstance(schedule.warmup_start, str) else schedule.warmup_start
        risen = min(1.0, (step + 1) / warmup)
        if schedule.name == "one-cycle":
            risen = 0.5 * (1.0 - math.cos(math.pi * risen))
        return start + (1.0 - start) * risen
    if schedule.name == "step":
        passed = sum(step >= milestone * scale for milestone in schedule.milestones)
        return float(schedule.gamma**passed)
    if schedule.name == "exponential":
        return float(schedule.gamma ** (step // scale))
    # The last step gets `final` itself; a decay of a single step stays at 1.
    progress = min(1.0, (step - warmup) / max(1.0, steps - 1 - warmup))
    if schedule.name in ("cosine", "one-cycle"):
        return schedule.final + (1.0 - schedule.final) * 0.5 * (1.0 + math.cos(math.pi * progress))
    if schedule.name == "linear":
        return 1.0 - (1.0 - schedule.final) * progress
    return 1.0
