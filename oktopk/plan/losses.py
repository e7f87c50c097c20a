"""Losses that were measured with updates, for densities, methods, `every` and numbers of replicas."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

SOURCE = "docs/results/updates.md, text that is read once, 17.1 M parameters, int4"
BEFORE = (
    "docs/results/history-updates.md, an older rule, int4, 5.0 M parameters, text that is read five "
    "times, but union at 5 %: 17.1 M, text that is read once"
)
"""Of exchanges that are several steps apart."""


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

    def __str__(self) -> str:
        return f"{self.percent:+.1f}%({self.replicas})"


LOSSES = (
    Loss("union", 0.0125, 1, 4, -1.1, 3),
    Loss("oktopk", 0.0125, 1, 4, -0.7, 3),
    Loss("oktopk", 0.0625, 1, 4, -1.0, 3),
    Loss("union", 0.0625, 1, 4, 0.7, 1),
    Loss("union", 0.0125, 1, 16, 5.1, 1),
    Loss("union", 0.0625, 1, 16, 5.6, 1),
    Loss("oktopk", 0.0125, 1, 16, 10.9, 1),
    Loss("oktopk", 0.0625, 1, 16, 1.0, 3),
    Loss("oktopk", 0.0125, 4, 4, 4.4, 1),
    Loss("union", 0.0154, 4, 4, 3.1, 3),
    Loss("union", 0.009, 4, 4, 4.0, 3),
    Loss("union", 0.05, 4, 4, 8.0, 1),
)
"""All of SOURCE at one density throughout, with the share nearest to the library's after its first steps, and of BEFORE
every 4 steps with share 1/4; simulated.

With 16 replicas second moments are each replica's own but in the last of these rows, where they are averaged. Dense
training of BEFORE has the beta2 of updates, as the tuned one of SOURCE has.
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
    return str(_of_replicas(known, replicas) or "-")


def nearest_loss(method: str, density: float, every: int, replicas: int) -> str:
    """The loss with the nearest density, by their ratio, for settings whose own is not known, and that density.

    Of the same method and `every`, and of replicas as `loss_of`; "" where there is none.
    """
    same = [loss for loss in LOSSES if (loss.method, loss.every) == (method, every)]
    densities = sorted({loss.density for loss in same}, key=lambda each: abs(math.log(each / density)))
    for each in densities:
        loss_there = _of_replicas([loss for loss in same if loss.density == each], replicas)
        if loss_there is not None:
            return f"{loss_there} with {100 * each:g} %"
    return ""


def _of_replicas(known: Sequence[Loss], replicas: int) -> Loss | None:
    """The one of the nearest number of replicas; None where these are more than twice as many."""
    nearest = min(
        known, key=lambda loss: (abs(math.log(loss.replicas / replicas)), -loss.replicas), default=None
    )
    return nearest if nearest is not None and replicas <= 2 * nearest.replicas else None
