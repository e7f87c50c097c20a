"""Builds the torch optimizer of a run, and computes its learning rates."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from jobs.config.sections import OptimizerConfig, ScheduleConfig

LONG_AGO = 2.0**60
"""A step count at which torch's bias corrections are 1, and which counting on leaves as it is."""


def build_optimizer(
    config: OptimizerConfig, parameters: Iterable[nn.Parameter], *, fused: bool = False
) -> torch.optim.Optimizer:
    """The torch optimizer that applies the reduced gradient.

    Args:
        config: of a run.
        parameters: where they are to stay.
        fused: in one kernel.
    """
    groups = _groups(config, parameters)
    common: dict[str, Any] = {"lr": config.lr, "weight_decay": config.weight_decay, "fused": fused or None}
    if config.name == "sgd":
        return torch.optim.SGD(groups, momentum=config.momentum, nesterov=config.nesterov, **common)
    kinds: dict[str, type[torch.optim.Adam]] = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
    kind = kinds[config.name] if config.bias_correction else UncorrectedAdam
    return kind(groups, betas=(config.beta1, config.beta2), eps=config.eps, **common)


def _groups(config: OptimizerConfig, parameters: Iterable[nn.Parameter]) -> list[dict[str, Any]]:
    every = list(parameters)
    if config.decay_vectors:
        return [{"params": every}]
    matrices = {"params": [p for p in every if p.ndim > 1]}
    vectors = {"params": [p for p in every if p.ndim <= 1], "weight_decay": 0.0}
    return [group for group in (matrices, vectors) if group["params"]]


class UncorrectedAdam(torch.optim.AdamW):
    """Adam without bias correction, with decoupled weight decay.

    p <- (1 - lr wd) p - lr m / (sqrt(v) + eps), m and v being the running means of the gradient and of its square, from
    zero. It is torch's, told that it began long ago.

    Args:
        As torch.optim.AdamW.

    Source: Devlin et al., NAACL 2019, and their published optimizer.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch.optim.Optimizer's; the state is there from the start."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for parameter in group["params"]:
            self.state[parameter] = {
                "step": torch.tensor(LONG_AGO, device=parameter.device if group["fused"] else "cpu"),
                "exp_avg": torch.zeros_like(parameter),
                "exp_avg_sq": torch.zeros_like(parameter),
            }


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
