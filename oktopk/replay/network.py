"""What the network of a cluster is: the parameters of LogGOPS inside a host and between hosts.

Source: Hoefler, Schneider, Lumsdaine, "LogGOPSim - Simulating Large-Scale Applications in the
LogGOPS Model", LSAP 2010.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True)
class Level:
    """Links of one level, in seconds and bytes.

    Attributes:
        L: latency: from when a message's first byte leaves until it arrives.
        o: overhead: time of a processor for each message, at each end.
        g: least time between two messages on a link.
        G: time of a byte on a link.
        O: time of a processor for each byte, at each end.
        S: bytes of the largest message that is sent before its receiver is ready.
    """

    L: float
    o: float
    g: float
    G: float
    O: float = 0.0  # noqa: E741 - the names of the model
    S: float = 65536.0

    def __post_init__(self) -> None:
        for name in ("o", "g", "O", "S"):
            if not 0 <= getattr(self, name) < float("inf"):
                value = f"{name} {getattr(self, name)!r} of a link"
                raise ValueError(f"{value} is not a finite number >= 0")
        for name, what in (("L", "a latency"), ("G", "a time of a byte")):
            if not 0 < getattr(self, name) < float("inf"):
                raise ValueError(f"{what} of {getattr(self, name)!r} s is not above 0")

    @classmethod
    def of_rate(cls, bytes_per_second: float, latency: float) -> Level:
        """Of a rate, and the time of the smallest message, half of which its two ends take."""
        return cls(latency / 2, latency / 4, latency / 4, 1 / bytes_per_second)

    def message(self, nbytes: float) -> float:
        """Seconds that one message takes alone, from one process to the other."""
        meet = 2 * self.L if nbytes > self.S else 0.0
        return meet + 2 * (self.o + self.O * nbytes) + self.L + self.G * nbytes

    def rounds(self, count: int, nbytes: float, before: float = 0.0) -> float:
        """Seconds of messages of which each is sent when the one before has arrived.

        Args:
            before: seconds that the link takes for messages of others before each.
        """
        one = self.message(nbytes) + before
        return one + (count - 1) * max(one, self.g + before)


@dataclass(frozen=True)
class Network:
    """A cluster. Consecutive ranks share a host, equally many on each.

    Attributes:
        inside: a rank's link to the others of its host; between: a host's, which its ranks share.
        ranks_per_host: equal on all hosts.
    """

    inside: Level
    between: Level
    ranks_per_host: int = 1

    @property
    def levels(self) -> NDArray[np.float64]:
        """float64[2, 6], L, o, g, G, O, S of both levels."""
        both = self.inside, self.between
        return np.array([[x.L, x.o, x.g, x.G, x.O, x.S] for x in both])
