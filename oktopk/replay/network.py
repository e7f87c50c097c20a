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
        D: what a byte takes longer on a link, beyond the first S of a message, while as many come
            back from its receiver. 0 where both directions of a connection are independent; near G
            where a library sends one after the other. Not of LogGOPS.
    """

    L: float
    o: float
    g: float
    G: float
    O: float = 0.0  # noqa: E741 - the names of the model
    S: float = 65536.0
    D: float = 0.0

    def __post_init__(self) -> None:
        for name in ("o", "g", "O", "S", "D"):
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

    def message(self, nbytes: float, back: float = 0.0) -> float:
        """Seconds that one message takes, from one process to the other.

        Args:
            back: bytes that the other one sends at the same time.
        """
        meet = 2 * self.L if nbytes > self.S else 0.0
        hindered = self.D * max(0.0, min(nbytes, back) - self.S)
        return meet + 2 * (self.o + self.O * nbytes) + self.L + self.G * nbytes + hindered

    def rounds(self, count: int, nbytes: float, back: float = 0.0, before: float = 0.0) -> float:
        """Seconds of messages of which each is sent when the one before has arrived.

        Args:
            back: as of `message`.
            before: seconds that the link takes for messages of others before each.
        """
        one = self.message(nbytes, back) + before
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
        """float64[2, 7], L, o, g, G, O, S, D of both levels."""
        both = self.inside, self.between
        return np.array([[x.L, x.o, x.g, x.G, x.O, x.S, x.D] for x in both])
