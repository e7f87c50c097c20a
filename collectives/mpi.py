"""The one transport from arrays to MPI: counted, non-blocking, on a communicator of its own.

Payload is point to point and counted word by word. Small host control messages (sizes, cuts, histograms, flags) use MPI's
own collectives and are counted apart. A transport for device buffers has the same methods.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.cpu import kernels as host_kernels
from collectives.sparse import ENTRY
from collectives.traffic import WORD_BYTES, Traffic
from collectives.workspace import Workspace


@dataclass(frozen=True)
class Round:
    """One send and one receive that run at the same time; an empty side is skipped on both ends.

    Attributes:
        dest: rank that gets `outgoing`.
        outgoing: contiguous array to send.
        source: rank that `incoming` comes from.
        incoming: contiguous array to fill.
    """

    dest: int
    outgoing: NDArray[Any]
    source: int
    incoming: NDArray[Any]


class FlaggedRanksError(Exception):
    """Some ranks raised their flag: nothing was sent. Raised on all ranks alike, or on none."""

    def __init__(self, ranks: list[int]) -> None:
        super().__init__(f"flagged by ranks {ranks}")
        self.ranks = ranks


class PersistentRound:
    """A Round whose buffers never move: set up once, started every step."""

    def __init__(
        self, requests: list[MPI.Prequest], words: int, messages: int, traffic: Callable[[], Traffic]
    ) -> None:
        self._requests = requests
        self._words = words
        self._messages = messages
        self._traffic = traffic

    def run(self) -> None:
        """Exchange and wait: the outgoing buffer is free and the incoming one filled on return."""
        traffic = self._traffic()
        traffic.words += self._words
        traffic.messages += self._messages
        if self._requests:
            MPI.Prequest.Startall(self._requests)
            MPI.Request.Waitall(self._requests)

    def free(self) -> None:
        """Give the requests back to MPI."""
        for request in self._requests:
            request.Free()
        self._requests = []


class Transport:
    """Host arrays over MPI.

    Args:
        comm: intracommunicator; duplicated, so that several transports never see each other's messages.
            Collective: every rank must call.

    Attributes:
        kernels: the module of kernels that fits the arrays this transport moves.
        workspace: scratch for whoever communicates through it.
        traffic: what this rank has sent since `take_traffic`.
        peers: whether kernels of the ranks may read each other's memory; see `open_p2p`.
    """

    kernels: ModuleType = host_kernels

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.workspace = Workspace()
        self.traffic = Traffic()
        self.p2p = False

    def close(self) -> None:
        """Free the duplicated communicator. Collective."""
        if self.comm != MPI.COMM_NULL:
            self.comm.Free()

    def open_p2p(self, wanted: bool | None) -> str:
        """Find out whether the ranks can use peer memory, and set `peers`. Collective.

        Args:
            wanted: True: also where it is slow; None: where it is fast; False: nowhere.

        Returns:
            Why not, "" if they can.
        """
        return "gradients are on the host"

    def allocate(self, length: int) -> NDArray[np.float32]:
        """float32[length] where this transport's arrays live, contents undefined."""
        return np.empty(length, np.float32)

    def take_traffic(self) -> Traffic:
        """The traffic since the last call; the counters start again at zero."""
        taken, self.traffic = self.traffic, Traffic()
        return taken

    # payload

    def send(self, array: NDArray[Any], dest: int, even_if_empty: bool = False) -> list[MPI.Request]:
        """Start a counted send; the array must not change until waited for.

        Nothing is sent for an empty array, unless the other side cannot know that it is empty.
        """
        if not array.size and not even_if_empty:
            return []
        self.traffic.words += array.nbytes // WORD_BYTES
        self.traffic.messages += 1
        return [self.comm.Isend(self._wire(array), dest)]

    def send_all(self, messages: Sequence[tuple[NDArray[Any], int]]) -> list[MPI.Request]:
        """Start a send for each (array, dest), as `send` does."""
        return [request for array, dest in messages for request in self.send(array, dest)]

    def receive(self, array: NDArray[Any], source: int) -> list[MPI.Request]:
        """Start a receive of exactly `array`; nothing is posted for an empty one."""
        return [self.comm.Irecv(self._wire(array), source)] if array.size else []

    def receive_counted(self, array: NDArray[Any], source: int) -> int:
        """Receive at most `array`; returns how many of its elements came."""
        status = MPI.Status()
        self.comm.Recv(self._wire(array), source, status=status)
        return status.Get_count(MPI.BYTE) // array.itemsize

    def wait(self, requests: list[MPI.Request]) -> None:
        """Block until all have completed."""
        MPI.Request.Waitall(requests)

    def exchange(self, rounds: Sequence[Round], in_flight: int) -> Iterator[range]:
        """Run rounds in buckets of `in_flight`, one bucket ahead of the caller. The first is posted at once.

        Yields the range of rounds that has arrived while the next bucket is on the wire, so that a caller's work on one
        hides the transfer of the other. All sends have completed when the iterator ends.
        """
        buckets = [range(i, min(i + in_flight, len(rounds))) for i in range(0, len(rounds), in_flight)]

        def post(bucket: range) -> tuple[list[MPI.Request], list[MPI.Request]]:
            receives = [r for i in bucket for r in self.receive(rounds[i].incoming, rounds[i].source)]
            return receives, self.send_all([(rounds[i].outgoing, rounds[i].dest) for i in bucket])

        first = post(buckets[0]) if buckets else ([], [])

        def arrivals() -> Iterator[range]:
            receives, sends = first
            for number, bucket in enumerate(buckets):
                following = post(buckets[number + 1]) if number + 1 < len(buckets) else ([], [])
                self.wait(receives)
                yield bucket
                # before the next bucket but one is posted, so that no more than two are ever in flight
                self.wait(sends)
                receives, sends = following

        return arrivals()

    def persistent(self, exchange: Round) -> PersistentRound:
        """Set up a round whose buffers stay where they are."""
        requests: list[MPI.Prequest] = []
        words = messages = 0
        if exchange.incoming.size:
            requests.append(self.comm.Recv_init(self._wire(exchange.incoming), exchange.source))
        if exchange.outgoing.size:
            requests.append(self.comm.Send_init(self._wire(exchange.outgoing), exchange.dest))
            words, messages = exchange.outgoing.nbytes // WORD_BYTES, 1
        return PersistentRound(requests, words, messages, self._starting)

    def _starting(self) -> Traffic:
        """Called before every persistent round; returns where to count it."""
        return self.traffic

    # control

    def barrier(self) -> None:
        """Wait until all ranks are here. Collective."""
        self.comm.Barrier()

    def alltoall_control(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row q of int64[P, m] goes to rank q; returns int64[P, m], row q from rank q."""
        received = np.empty_like(rows)
        self.comm.Alltoall(rows, received)
        self._count_control((self.size - 1) * rows[0].nbytes)
        return received

    def allgather_control(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[m] of every rank as int64[P, m]."""
        received = np.empty((self.size, *row.shape), row.dtype)
        self.comm.Allgather(row, received)
        self._count_control((self.size - 1) * row.nbytes)
        return received

    def allreduce_control(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        """Elementwise sum of int64[m] over the ranks."""
        total = np.empty_like(array)
        self.comm.Allreduce(array, total)
        self._count_control(-(-2 * array.nbytes * (self.size - 1) // self.size))
        return total

    def agree(self, mine: dict[str, Any], problem: str = "") -> None:
        """Check at construction that all ranks mean the same. Collective.

        Args:
            mine: name -> plain value; must be equal on all ranks.
            problem: what is wrong with this rank's own arguments, empty if nothing is.

        Raises:
            ValueError: on every rank alike, naming the ranks that have a problem, or the name on which ranks disagree
                and each rank's value.
        """
        everyone = self.comm.allgather((problem, mine))
        holders: dict[str, list[int]] = {}  # a host without a GPU is said once, not by each of its ranks
        for rank, (text, _) in enumerate(everyone):
            if text:
                holders.setdefault(text, []).append(rank)
        if holders:
            raise ValueError(
                "; ".join(f"{_named(ranks, self.size)}: {text}" for text, ranks in holders.items())
            )
        # not rank 0's names alone: an argument that only another rank was given is a disagreement too
        for name in dict.fromkeys(name for _, theirs in everyone for name in theirs):
            given = [[theirs[name]] if name in theirs else [] for _, theirs in everyone]
            if any(values != given[0] for values in given):
                listed = ", ".join(
                    f"rank {rank}: {repr(values[0]) if values else 'not given'}"
                    for rank, values in enumerate(given)
                )
                raise ValueError(f"ranks disagree on {name}: {listed}")

    def _wire(self, array: NDArray[Any]) -> Any:
        """What MPI is given. It has no type for a COO entry: that travels as one 64-bit integer."""
        return array.view(np.int64) if array.dtype == ENTRY else array

    def _count_control(self, nbytes: int) -> None:
        self.traffic.control_words += -(-nbytes // WORD_BYTES)
        self.traffic.control_messages += 1


def _named(ranks: list[int], size: int) -> str:
    """Some of so many ranks, in words."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    return "all ranks" if len(ranks) == size else f"ranks {', '.join(map(str, ranks))}"
