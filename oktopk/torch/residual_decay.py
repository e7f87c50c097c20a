"""What a residual forgets: old updates, as they are of parameters that have moved since."""

from __future__ import annotations

import math
from typing import Any

from oktopk.damage import StateError

ADAM_DECAY = 2.0
"""The power, by default, for Adam's kind where several replicas exchange in each step."""

_FROM = 29
"""Exchanges that count as over when the first one begins, so that it does not lose all."""

_LEAST = 0.03
"""A residual is multiplied where it is to lose so much since the last time, not in each exchange: that reads and writes it."""


class ResidualDecay:
    """Counts exchanges, and tells by what to multiply the residual.

    Behind exchange t what joined the residual before exchange s, and was not sent, has become itself times
    ((s + 29) / (t + 29))^power, to 3 %: the same after 100 exchanges of 200 as after 10,000 of 20,000. An entry of a residual is
    the sum of updates that no gradient has answered: those of long ago were made at parameters that
    are no more, and go too far together. At high densities, where entries wait a small part of the
    run, next to nothing is lost.

    Exchanges in which all learning rates are 0 do not count.

    Args:
        power: >= 0; 0: nothing is lost.

    Attributes:
        exchanges: that count, so far.
        last: of those, at the last multiplication.

    Source: own, docs/results/updates.md. Decays by a constant factor are in DeMo (Peng et al., 2024).
    """

    def __init__(self, power: float) -> None:
        self.power = power
        self.exchanges = self.last = 0

    def count(self, moves: bool) -> float:
        """Count an exchange; by what the residual is to be multiplied behind it. Equal on all ranks.

        Args:
            moves: whether a learning rate is not 0.
        """
        self.exchanges += moves
        factor = ((self.last + _FROM) / (self.exchanges + _FROM)) ** self.power
        if factor > 1 - _LEAST:
            return 1.0
        self.last = self.exchanges
        return factor

    def state(self) -> list[int]:
        """What `load` takes."""
        return [self.exchanges, self.last]

    def load(self, state: list[int]) -> None:
        """Go on from a state that was checked."""
        self.exchanges, self.last = state

    @staticmethod
    def check_state(state: Any) -> None:
        """Raise StateError for what `load` does not take."""
        exchanges, last = map(int, state)
        if not 0 <= last <= exchanges:
            raise StateError(f"the residual's decay of the state is of {last} exchanges of {exchanges}")


def check_power(power: Any) -> None:
    """Raise ValueError for what is no power of a decay."""
    number = isinstance(power, float | int) and not isinstance(power, bool)
    if not (number and 0 <= power < math.inf):
        raise ValueError(f"residual_decay {power!r} is not a number >= 0")
