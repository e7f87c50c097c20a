"""What share of its residual a replica's own parameters hold: more of it as the learning rate falls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oktopk.damage import StateError

_GROWS = 6.0
"""How far a share grows, at most."""


class LocalShare:
    """A share that grows as the learning rate falls.

        share = first · min(6, the largest rate so far / the rate of now)

    A share lets a replica see what it has not sent, so that it does not overshoot, and moves it by its own noise. Residuals fall
    with the rate, and so does what the noise does: at a lower rate a larger share is better. With a share that stays at 0.05 some
    runs of a small language model over bytes became unstable at the end.

    Args:
        first: at the largest rate, in [0, 1].
        grows: whether it grows; False: it stays `first`.

    Attributes:
        now: the share.

    Source: own, docs/results/updates.md.
    """

    def __init__(self, first: float, grows: bool) -> None:
        self._first, self._grows = float(first), grows
        self.now, self._top = self._first, 0.0

    def renew(self, groups: Sequence[Mapping[str, Any]]) -> float:
        """The share by the largest learning rate of the groups as they are now; a rate on a GPU is waited for.

        Where none is above 0 and finite it stays. Equal on ranks whose groups are.
        """
        rate = max((float(group["lr"]) for group in groups if group.get("lr") is not None), default=0.0)
        if 0 < rate < math.inf:
            self._top = max(self._top, rate)
            if self._grows:
                self.now = min(1.0, self._first * min(_GROWS, self._top / rate))
        return self.now

    def state(self) -> list[float]:
        """What `load` takes."""
        return [self._first, self.now, self._top]

    def load(self, state: Sequence[float]) -> None:
        """Go on from a state that was checked; a share that does not grow stays, one that began elsewhere has grown as far."""
        first, now, self._top = state
        grown = now / first if first else 1.0
        if self._grows:
            self.now = now if first == self._first else min(1.0, self._first * grown)

    def begin(self) -> None:
        """As when it was built."""
        self.now, self._top = self._first, 0.0

    @staticmethod
    def check_state(state: Any) -> None:
        """Raise StateError for what `load` does not take."""
        first, now, top = map(float, state)
        if not (0 <= first <= now <= 1 and 0 <= top < math.inf):
            raise StateError(f"the share of the state is {now} of first {first}, at a largest rate of {top}")
