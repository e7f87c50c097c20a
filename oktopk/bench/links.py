"""Times of messages: between two ranks of a host, and between hosts, all pairs in rounds."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from collectives.transport import Transport

SMALLEST = 8
SIZES = tuple(SMALLEST * 4**i for i in range(12))
"""Bytes of messages, up to 32 MB."""

_TRIES, _FEW = 20, 5
_BURST = 32  # messages
_LARGE = 1 << 16  # bytes; larger messages are sent fewer times
_BURSTS = 8

ASSUMED = {"O": 0.0, "S": 65536.0}
"""Parameters of a level that are not measured: no time of a processor for a byte, and Open MPI's
limit of eager messages over TCP."""


@dataclass(frozen=True)
class Sweep:
    """What messages of one level take.

    Attributes:
        latency: seconds of the smallest message, one way.
        overhead: seconds that a processor takes to send one.
        gap: seconds between two of them, many in a row.
        sizes: bytes -> seconds of one message in each direction, both busy.
        alone: bytes -> seconds of one message where no two ranks send to each other; empty where
            that was not measured.
        paired: bytes -> seconds of one message where two ranks send to each other; in a ring each
            does so with both of its neighbours, one message after the other on a link.
    """

    latency: float
    overhead: float
    gap: float
    sizes: dict[int, float]
    alone: dict[int, float]
    paired: dict[int, float]

    def model(self) -> dict[str, float]:
        """Parameters of `oktopk.replay.network.Level`."""
        o = min(self.overhead, self.latency / 4)
        return {
            "L": self.latency - 2 * o,
            "o": o,
            "g": self.gap,
            "G": slope(self.alone or self.sizes),
            "D": hindrance(self.alone, self.paired, ASSUMED["S"]),
        } | ASSUMED


def rows_of(sizes: dict[int, float]) -> list[dict[str, float]]:
    """Columns as nccl-tests prints them, for each size; GB/s, of one direction."""
    rows = []
    for nbytes, seconds in sizes.items():
        rate = nbytes / seconds / 1e9
        # of sends and receives both are the same
        rows.append({"bytes": nbytes, "seconds": seconds, "algbw": rate, "busbw": rate})
    return rows


def slope(sizes: dict[int, float]) -> float:
    """Seconds of a byte: what the two largest sizes grow by, at least 0.8 of the largest's mean.

    A link that lets some bytes through unshaped has a mean that is too short. A slope may be too
    small where other processes took part of the time.
    """
    largest = sorted(sizes)[-2:]
    nbytes = largest[-1]
    mean = sizes[nbytes] / nbytes
    if len(largest) < 2:
        return mean
    grown = (sizes[nbytes] - sizes[largest[0]]) / (nbytes - largest[0])
    return max(grown, 0.8 * mean)


def hindrance(alone: dict[int, float], paired: dict[int, float], eager: float) -> float:
    """Seconds that a byte of a message beyond the eager ones takes longer where two ranks send to each other.

    Of the largest message that was sent both ways; 0 where none is longer than `eager`.

    Args:
        alone, paired: as of `Sweep`.
        eager: bytes that are sent before the receiver is ready, which wait for nothing.
    """
    largest = max(alone.keys() & paired.keys(), default=0)
    if largest <= eager:
        return 0.0
    return max(0.0, paired[largest] - alone[largest]) / (largest - eager)


def rounds(count: int) -> list[list[tuple[int, int]]]:
    """All pairs of so many, in rounds in which each has one partner at most."""
    players: list[int | None] = [*range(count), *([None] if count % 2 else [])]
    turns = []
    for _ in range(len(players) - 1):
        pairs = zip(players[: len(players) // 2], reversed(players), strict=False)
        turns.append([(min(a, b), max(a, b)) for a, b in pairs if a is not None and b is not None])
        players = [players[0], players[-1], *players[1:-1]]
    return [each for each in turns if each]


class Messages:
    """Times messages between this rank and a partner, while others do so. Collective.

    Args:
        partner: another rank; None: this rank only waits for the others.
        limit: seconds of one message above which no larger one is sent.
        rings: ranks pass messages around in rings of three and more, too, so that no two send to
            each other, then both ways around; equal on all ranks.
        ring: (rank to send to, rank to receive from) in this rank's ring; None: it is in none.
        seconds: that a sweep takes at most, equal on all ranks: where messages take long, fewer of them are timed, and
            larger ones are left out.
    """

    def __init__(
        self,
        transport: Transport,
        partner: int | None,
        limit: float,
        rings: bool = False,
        ring: tuple[int, int] | None = None,
        seconds: float = math.inf,
    ) -> None:
        self._transport, self._partner, self._limit = transport, partner, limit
        self._seconds, self._began = seconds, time.perf_counter()
        self._first = partner is not None and transport.rank < partner
        self._rings, self._ring = rings, ring

    def sweep(self) -> Sweep | None:
        """All sizes, until one takes longer than the limit on any rank; None for a rank alone."""
        has_partner, rings = self._partner is not None, self._rings
        sizes: dict[int, float] = {}
        alone: dict[int, float] = {}
        paired: dict[int, float] = {}
        smallest = longest = began = 0.0
        many = math.inf  # messages' times that a size took, the fewest
        for nbytes in SIZES:
            spent = self._agreed()[1]
            if sizes:
                many = min(many, (spent - began) / longest)
                grown = longest + 4 * (longest - smallest)  # at most, of messages four times as long
                if many * grown > (self._seconds - spent) / 2:
                    break
            began = spent
            tries = _TRIES if nbytes <= _LARGE else _FEW
            if rings:
                both = self._time(self._both_ways_around, nbytes, tries, self._ring is not None)
                paired[nbytes] = both / 2
            else:
                both = paired[nbytes] = self._time(self._both_ways, nbytes, tries, has_partner)
            longest = self._agreed(both)[0]
            smallest = min(smallest or longest, longest)
            if rings:
                alone[nbytes] = self._time(self._around, nbytes, tries, self._ring is not None)
            else:
                alone[nbytes] = self._time(self._there_and_back, nbytes, tries, has_partner) / 2
            sizes[nbytes] = alone[nbytes] if rings else paired[nbytes]
            if longest > self._limit * (2 if rings else 1):
                break
        # at last: the first messages of a job take longer
        latency = self._latency()
        overhead, gap = self._burst(latency)
        if not has_partner and self._ring is None:
            return None
        return Sweep(latency, overhead, gap, sizes, alone, paired)

    def pair(self, nbytes: int) -> tuple[float, float]:
        """Latency, and bytes a second in each direction, both busy; zeros without a partner."""
        latency = self._latency()
        both, takes_part = (nbytes // 4, nbytes), self._partner is not None
        few = {each: self._time(self._both_ways, each, _FEW, takes_part) for each in both}
        return (0.0, 0.0) if self._partner is None else (latency, 1 / slope(few))

    def _latency(self) -> float:
        has_partner = self._partner is not None
        return self._time(self._there_and_back, SMALLEST, _TRIES, has_partner) / 2

    def _agreed(self, seconds: float = 0.0) -> tuple[float, float]:
        """The largest of the ranks' times, and the seconds since they began; all wait for it."""
        spent = time.perf_counter() - self._began
        own_times = np.array([round(1e9 * seconds), round(1e9 * spent)], np.int64)
        largest, most = self._transport.allgather_control(own_times).max(axis=0).tolist()
        return largest / 1e9, most / 1e9

    def _time(
        self,
        exchange: Callable[[Any, Any], None],
        nbytes: int,
        tries: int,
        takes_part: bool,
    ) -> float:
        """Seconds of an exchange, after a first one; 0 where it takes no part. Collective.

        Of small messages the lower quartile of the tries: processors that other work takes are not
        the link's. Of large ones the mean: what a link does only now and then counts, too.
        """
        outgoing, incoming = np.zeros(nbytes, np.uint8), np.zeros((2, nbytes), np.uint8)

        def timed() -> float:
            start = time.perf_counter()
            if takes_part:
                exchange(outgoing, incoming)
            return time.perf_counter() - start

        longest, spent = self._agreed(timed())  # all begin now
        small = nbytes <= _LARGE
        share = (self._seconds - spent) / (32 if small else 8)
        times = [timed() for _ in range(max(1, int(min(tries, share / max(longest, 1e-9)))))]
        if not takes_part:
            return 0.0
        return max(float(np.quantile(times, 0.25) if small else np.mean(times)), 1e-9)

    def _there_and_back(self, outgoing: Any, incoming: Any) -> None:
        transport, partner = self._transport, self._partner
        assert partner is not None
        for sends in (self._first, not self._first):
            if sends:
                transport.wait(transport.send(outgoing, partner))
            else:
                transport.wait(transport.receive(incoming[0], partner))

    def _both_ways(self, outgoing: Any, incoming: Any) -> None:
        transport, partner = self._transport, self._partner
        assert partner is not None
        requests = transport.receive(incoming[0], partner)
        transport.wait(requests + transport.send(outgoing, partner))

    def _around(self, outgoing: Any, incoming: Any) -> None:
        assert self._ring is not None
        dest, source = self._ring
        requests = self._transport.receive(incoming[0], source)
        self._transport.wait(requests + self._transport.send(outgoing, dest))

    def _both_ways_around(self, outgoing: Any, incoming: Any) -> None:
        transport, ring = self._transport, self._ring
        assert ring is not None
        requests = [
            r for each, rank in zip(incoming, ring, strict=True) for r in transport.receive(each, rank)
        ]
        transport.wait(requests + [r for rank in ring for r in transport.send(outgoing, rank)])

    def _burst(self, latency: float) -> tuple[float, float]:
        """Seconds to send one of many small messages, and between two; zeros without a partner.

        By the lower quartile of bursts, as small messages. A burst ends when an answer has come:
        the first message and the answer take a latency each, which is not between two messages.
        """
        transport, partner = self._transport, self._partner
        small = [np.zeros(SMALLEST, np.uint8) for _ in range(_BURST)]
        longest, spent = self._agreed(latency)
        if partner is None:
            return 0.0, 0.0
        each = 2 * _BURST * max(longest, 1e-9)
        bursts = max(1, int(min(_BURSTS, (self._seconds - spent) / each)))
        sending, whole = [], []
        for _ in range(bursts):
            for sends in (self._first, not self._first):
                start = time.perf_counter()
                if sends:
                    requests = [r for each in small for r in transport.send(each, partner)]
                    sending.append(time.perf_counter() - start)
                    transport.wait(requests)
                    transport.wait(transport.receive(small[0], partner))  # all have come
                    whole.append(time.perf_counter() - start)
                else:
                    transport.wait([r for each in small for r in transport.receive(each, partner)])
                    transport.wait(transport.send(small[0], partner))
        return one_of_burst(sending, whole, latency)


def one_of_burst(
    sending: Sequence[float],
    whole: Sequence[float],
    latency: float,
) -> tuple[float, float]:
    """Seconds to send a message of a burst, and between two; see `Messages`.

    Args:
        sending, whole: seconds until bursts were sent, and until their answers had come.
        latency: of a message.
    """
    overhead = float(np.quantile(sending, 0.25)) / _BURST
    between = (float(np.quantile(whole, 0.25)) - 2 * latency) / (_BURST - 1)
    return overhead, max(between, overhead)


def partner_of(rank: int, pairs: Sequence[tuple[int, int]]) -> int | None:
    """The other one of a rank's pair; None where it has none."""
    for one, other in pairs:
        if rank in (one, other):
            return other if rank == one else one
    return None
