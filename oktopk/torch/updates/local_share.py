"""What share of its residual a replica's own parameters hold: more of it at first and as the learning rate falls."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from oktopk.damage import StateError

_GROWS = 6.0
"""How far a share grows as the rate falls, at most."""

_BEGINS = 5.0
"""How many times as large it begins, where it does."""

_SMALL_FROM = 500
"""Exchanges after which nothing of that is left."""


class LocalShare:
    """A share that begins large, and grows as the learning rate falls.

        share = first · max(min(5, 500 / exchanges), min(6, the largest rate so far / the rate of now))

    The first of these factors is 1 where it does not begin large.

    A share lets a replica see what it has not sent, so that it does not overshoot, and moves it by its
    own noise. In the first hundreds of exchanges small weights grow by that noise, as in dense training:
    with a share of 0.05 from the first one position embeddings and the first layer of a small language
    model over bytes stayed small, and it ended 4 to 6 % above dense training. Residuals fall with the
    rate, and so does what the noise does: at a lower rate a larger share is better. With one that stayed
    at 0.05 some runs of that model became unstable at the end.

    Args:
        first: at the largest rate, once 500 exchanges are over, in [0, 1].
        varies: whether it may be larger than `first`; False: it stays `first`.
        large: whether one that varies begins large.

    Attributes:
        now: the share.

    Source: own, docs/results/updates.md.
    """

    now: float
    _top: float  # the largest rate so far

    def __init__(self, first: float, varies: bool, large: bool = True) -> None:
        self._first, self._varies = float(first), varies
        self._begins = _BEGINS if large else 1.0
        self.begin()

    def renew(self, groups: Sequence[Mapping[str, Any]], exchanges: int) -> float:
        """The share by the largest learning rate of the groups as they are now; a rate on a GPU is waited for.

        Where no rate is above 0 and finite it stays. Equal on ranks whose groups are.

        Args:
            exchanges: that have moved parameters, with this one.
        """
        rate = max((float(group["lr"]) for group in groups if group.get("lr") is not None), default=0.0)
        if 0 < rate < math.inf:
            self._top = max(self._top, rate)
            if self._varies:
                begun = min(self._begins, max(1.0, _SMALL_FROM / max(1, exchanges)))
                self.now = min(1.0, self._first * max(begun, min(_GROWS, self._top / rate)))
        return self.now

    def state(self) -> list[float]:
        """What `load` takes."""
        return [self._first, self.now, self._top]

    def load(self, state: Sequence[float]) -> None:
        """Go on from a state that was checked; one that does not vary stays, one of another `first` has grown as far."""
        first, now, self._top = state
        grown = now / first if first else 1.0
        if self._varies:
            self.now = now if first == self._first else min(1.0, self._first * grown)

    def begin(self) -> None:
        """As when it was built."""
        self.now = min(1.0, self._first * self._begins) if self._varies else self._first
        self._top = 0.0

    @staticmethod
    def check_state(state: Any) -> None:
        """Raise StateError for what `load` does not take."""
        first, now, top = map(float, state)
        if not (0 <= first <= now <= 1 and 0 <= top < math.inf):
            raise StateError(f"the share of the state is {now} of first {first}, at a largest rate of {top}")
