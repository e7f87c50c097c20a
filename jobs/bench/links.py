"""The links between hosts: their rate, whether their shaping holds at a step's size, and the floor that follows from both."""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from jobs.bench.document import BenchError, bits_per_second

TOLERANCE = 1.15
"""Shaping holds where a transfer after a pause runs at no more than this times the rate of `--link`."""

_PAUSE, _TRIES = 0.02, 5  # seconds; a bucket of 128 KB fills in 1 ms at 1 Gb/s
_MOST = 8 << 20  # bytes: beyond that the bucket no longer matters


def ring_exchange(comm: MPI.Intracomm, outgoing: Any, incoming: Any) -> Callable[[], None]:
    """Send to the right and receive from the left, anything that MPI takes as a buffer."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return lambda: comm.Sendrecv(outgoing, right, recvbuf=incoming, source=left)


class Links:
    """The links of several hosts, one each, all of one rate. Collective: every rank must construct.

    Args:
        link: rate of each, as `bits_per_second` takes it.

    Attributes:
        hosts: the host of each rank, numbered by their first ranks.
        rate: bits per second, None where they are unshaped.

    Raises:
        BenchError: `link` is no rate, or there is one host; on every rank alike.
    """

    def __init__(self, comm: MPI.Intracomm, link: str) -> None:
        self.rate = bits_per_second(link)
        names = comm.allgather(socket.gethostname())
        distinct = list(dict.fromkeys(names))
        if len(distinct) == 1:
            raise BenchError(f"--link is for links between hosts, and all ranks are on {names[0]}")
        self.hosts = [distinct.index(name) for name in names]
        self._comm = comm
        first = names.index(names[comm.rank]) == comm.rank
        ring = comm.Split(0 if first else MPI.UNDEFINED, comm.rank)
        self._ring = ring if isinstance(ring, MPI.Intracomm) and ring != MPI.COMM_NULL else None

    @property
    def count(self) -> int:
        """Hosts."""
        return max(self.hosts) + 1

    def host_bytes(self, between: NDArray[np.float64]) -> float:
        """What the busiest host sends in a step, on average.

        Args:
            between: float64[ranks, steps], bytes that each rank sent to other hosts.
        """
        by_host = np.zeros((self.count, between.shape[1]))
        np.add.at(by_host, self.hosts, between)
        return float(by_host.mean(axis=1).max())

    def least_dense_bytes(self, nbytes: int) -> float:
        """What each host must send at least in an allreduce of a vector of so many bytes."""
        return 2 * nbytes * (self.count - 1) / self.count

    def transfer(self, nbytes: float) -> dict[str, Any]:
        """Times a transfer of so many bytes, 8 MB at most, by all hosts at once in a ring, after a pause. Collective.

        Returns:
            bytes: those sent.
            seconds: by MPI, until the last host has received all, the median of some tries.
            share: its rate over that of the links; None where these are unshaped.
            holds: whether `share` is at most TOLERANCE, or links are unshaped.
        """
        sent = min(_MOST, max(1, round(nbytes)))
        outgoing, incoming = np.ones(sent, np.uint8), np.empty(sent, np.uint8)
        seconds = self._after_pauses(ring_exchange(self._ring, outgoing, incoming) if self._ring else None)
        share = None if self.rate is None else 8 * sent / seconds / self.rate
        return {"bytes": sent, "seconds": seconds, "share": share, "holds": (share or 0.0) <= TOLERANCE}

    def _after_pauses(self, send: Callable[[], None] | None) -> float:
        """Seconds until the last rank has done its part, after a pause; the median. Collective."""
        spent = []
        for _ in range(_TRIES + 1):
            time.sleep(_PAUSE)
            self._comm.Barrier()
            start = time.perf_counter()
            if send is not None:
                send()
            spent.append(self._comm.allreduce(time.perf_counter() - start, MPI.MAX))
        return statistics.median(spent[1:])

    def record(self, host_bytes: float, mean: float) -> dict[str, Any]:
        """Compares a contestant's step with the links. Collective.

        Args:
            host_bytes: that a host sends in a step.
            mean: seconds of a step.

        Returns:
            host_bytes.
            floor: seconds that these take at the rate of the links; None where they are unshaped.
            above: seconds that the mean step takes beyond that.
            transfer: as `transfer`, of as many bytes.
        """
        floor = None if self.rate is None else 8 * host_bytes / self.rate
        return {
            "host_bytes": host_bytes,
            "floor": floor,
            "above": None if floor is None else mean - floor,
            "transfer": self.transfer(host_bytes),
        }

    def close(self) -> None:
        """Give the communicator back."""
        if self._ring:
            self._ring.Free()
