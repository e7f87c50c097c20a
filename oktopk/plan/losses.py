"""Losses that were measured with updates, for densities, methods and numbers of replicas."""

from __future__ import annotations

import math
from dataclasses import dataclass

SOURCE = "docs/results/updates.md, text that is read once, 17.1 M parameters, int4"


@dataclass(frozen=True)
class Loss:
    """How far one training ended above dense training with tuned betas, in percent.

    Attributes:
        method, density, every: settings.
        replicas: that stepped on gradients of their own.
        percent: negative where it ended below.
        seeds: that it is the mean of.
    """

    method: str
    density: float
    every: int
    replicas: int
    percent: float
    seeds: int


LOSSES = (
    Loss("union", 0.0125, 1, 4, -1.1, 3),
    Loss("oktopk", 0.0125, 1, 4, -0.7, 3),
    Loss("oktopk", 0.0625, 1, 4, -1.0, 3),
    Loss("union", 0.0625, 1, 4, 0.7, 1),
    Loss("union", 0.0125, 1, 16, 5.1, 1),
    Loss("union", 0.0625, 1, 16, 5.6, 1),
    Loss("oktopk", 0.0125, 1, 16, 10.9, 1),
    Loss("oktopk", 0.0625, 1, 16, 1.0, 3),
)
"""All of SOURCE at one density throughout, with the share nearest to the library's after its first steps; simulated.

With 16 replicas second moments are each replica's own but in the last row, where they are averaged.
"""


def loss_of(method: str, density: float, every: int, replicas: int) -> str:
    """The loss with these settings and the nearest number of replicas, by their ratio.

    "-" where none is known, and beyond twice the replicas of the nearest.
    """
    known = [
        loss
        for loss in LOSSES
        if (loss.method, loss.every) == (method, every) and abs(loss.density / density - 1) < 0.01
    ]
    if not known:
        return "-"
    nearest = min(known, key=lambda loss: (abs(math.log(loss.replicas / replicas)), -loss.replicas))
    if replicas > 2 * nearest.replicas:
        return "-"
    return f"{nearest.percent:+.1f}%({nearest.replicas})"
