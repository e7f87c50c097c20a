"""What a residual forgets: old updates, as they are of parameters that have moved since."""

from __future__ import annotations

from collections.abc import Sequence
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
    ((s + 29) / (t + 29))^power: the same after 100 exchanges of 200 as after 10,000 of 20,000. An
    entry of a residual is the sum of updates that no gradient has answered: those of long ago were
    made at parameters that are no more, and go too far together. At high densities, where entries
    wait a small part of the run, next to nothing is lost.

    The residual is multiplied where it is to lose 3 % since the last time, so that up to 3 % are
    still to be lost.

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

    def count(self, moved: bool) -> float:
        """Count an exchange; by what the residual is to be multiplied behind it. Equal on all ranks.

        Args:
            moved: whether the exchange may have moved a parameter; else it does not count.
        """
        self.exchanges += moved
        factor = ((self.last + _FROM) / (self.exchanges + _FROM)) ** self.power
        if 1 - _LEAST < factor < 1:
            return 1.0
        self.last = self.exchanges
        return factor

    def state(self) -> list[float]:
        """What `load` takes."""
        return [self.exchanges, self.last, self.power]

    def load(self, state: Sequence[float]) -> None:
        """Go on from a state that was checked; from one of another power what is left is kept whole."""
        self.exchanges, self.last = int(state[0]), int(state[1])
        if state[2] != self.power:
            self.last = self.exchanges

    @staticmethod
    def check_state(state: Any) -> None:
        """Raise StateError for what `load` does not take."""
        exchanges, last, power = map(float, state)
        if not 0 <= last <= exchanges or not power >= 0:
            raise StateError(
                f"the decay of the state's residual is of {last} exchanges of {exchanges}, power {power}"
            )
