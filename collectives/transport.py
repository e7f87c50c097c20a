"""The interface between communication patterns and a communication library, MPI or gloo. Imports no such library."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.errors import EVERY_RANK_CALLS, AgreeingRanks
from collectives.sparse import Array, Kernels, Vector
from collectives.traffic import Traffic
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
    outgoing: Array
    source: int
    incoming: Array


class PersistentRound:
    """A Round whose arrays never move, run every step.

    Here nothing is set up for it: what it needs is borrowed while it runs, so that many rounds share it.
    """

    def __init__(self, exchange: Round, transport: Transport) -> None:
        self._exchange, self._transport = exchange, transport

    def run(self) -> None:
        """Exchange and wait: the outgoing array is free and the incoming one filled on return."""
        exchange, transport = self._exchange, self._transport
        receives = transport.receive(exchange.incoming, exchange.source)
        transport.wait(receives + transport.send(exchange.outgoing, exchange.dest))

    def free(self) -> None:
        """Free what the library holds for it."""


class Transport(AgreeingRanks):
    """One rank's connection to the others: messages, control collectives, scratch and kernels.

    Messages travel point to point, in contiguous arrays that lie where this transport's arrays do.
    Control (sizes, splits, histograms, flags) is small host arrays: it uses collectives of the
    library and is counted apart. Requests are opaque to callers. Subclasses inherit `send_all`,
    `exchange` and `persistent`, and from `AgreeingRanks` how ranks agree on errors.

    Attributes:
        library: that carries messages, "MPI", "gloo" or "nccl".
        rank, size: this rank, and how many there are (P).
        kernels: the kernels that fit this transport's arrays, as `collectives.cpu.kernels`.
        workspace: scratch for whoever communicates through this transport.
        traffic: what this rank has sent since `take_traffic`.
        threads_problem: why only one thread may communicate, in a sentence; "" if several transports may, each in its own.
        p2p: whether kernels of the ranks may read each other's memory; see `open_p2p`.
        dense_problem: why dense sums of device arrays go by messages though `p2p` is set, in a sentence; "" if they do not.
        hosts: int[P], the number of each rank's host, as `group_by_host` found; all 0 before.
        ranks: int[P], each rank's number where this transport was split off, for messages to users.
        shared: what transports of the same ranks share that come from one connection, by name; see `connect`.
        grid: of the ranks, a `collectives.grid.Grid`; None where nothing asked for one, and for few ranks.
        token: a word that the next `alltoall_control` or `allgather_control` takes along; None on all ranks for none.
        tokens: the ranks' words, once one has taken them along; see `collectives.tokens`.
    """

    library: str
    rank: int
    size: int
    kernels: Kernels
    workspace: Workspace
    traffic: Traffic
    p2p: bool = False
    threads_problem: str = ""
    dense_problem: str = ""
    hosts: list[int]
    ranks: list[int]
    shared: dict[Any, Any]
    grid: Any = None
    token: int | None = None
    tokens: tuple[int, ...] | None = None

    @abstractmethod
    def close(self) -> None:
        """Free what the library holds. Collective."""

    def open_p2p(self, wanted: bool | None) -> str:
        """Check whether the ranks can use peer memory, and set `p2p`. Collective; transports of one connection try it once.

        Args:
            wanted: True: also where it is slow; None: where it is fast; False: nowhere.

        Returns:
            Why they cannot; "" if they can.
        """
        return "gradients are on the host"

    @abstractmethod
    def dense_allreduce(self, vector: Vector, timeout: float) -> Any:
        """What sums one fixed vector over the ranks in place, as `collectives.dense_allreduce.DenseAllreduce`. Collective.

        Args:
            vector: float32[n] where this transport's arrays live; must not move.
            timeout: seconds that a kernel which reads other ranks' memory waits for one.
        """

    @abstractmethod
    def allocate(self, length: int) -> Vector:
        """float32[length] where this transport's arrays live, contents undefined."""

    def take_traffic(self) -> Traffic:
        """The traffic since the last call; the counters restart at zero."""
        traffic, self.traffic = self.traffic, Traffic()
        return traffic

    # messages, counted

    @abstractmethod
    def send(self, array: Array, dest: int, even_if_empty: bool = False) -> list[Any]:
        """Start a counted send; returns its requests. The array must not change until they were waited for.

        An empty array is sent only with `even_if_empty`, for a receiver that cannot know that it is empty.
        """

    def send_all(self, messages: Sequence[tuple[Array, int]]) -> list[Any]:
        """Start a send for each (array, dest), as `send`."""
        return [request for array, dest in messages for request in self.send(array, dest)]

    def prepare_sends(self, arrays: Sequence[Array]) -> None:
        """Begin what sends of these arrays need beforehand, so that it goes on behind what comes between.

        The very arrays may then be given to `send` or `send_all` before anything else is prepared, and must not change until that
        is waited for.
        """

    @abstractmethod
    def receive(self, array: Array, source: int) -> list[Any]:
        """Start a receive of exactly `array`; returns its requests, none for an empty array."""

    @abstractmethod
    def receive_counted(self, array: Array, source: int) -> int:
        """Receive at most `array`; returns the number of its elements that arrived."""

    @abstractmethod
    def wait(self, requests: list[Any]) -> None:
        """Block until all requests have completed."""

    def exchange(self, rounds: Sequence[Round], in_flight: int) -> Iterator[range]:
        """Run rounds in batches of `in_flight`, one batch ahead of the caller. The first is posted at once.

        Yields the range of rounds that has arrived while the next batch is on the wire, so that a caller's work on one
        hides the transfer of the other. All sends have completed when the iterator ends.
        """
        batches = [range(i, min(i + in_flight, len(rounds))) for i in range(0, len(rounds), in_flight)]

        def post(batch: range) -> tuple[list[Any], list[Any]]:
            receives = [r for i in batch for r in self.receive(rounds[i].incoming, rounds[i].source)]
            return receives, self.send_all([(rounds[i].outgoing, rounds[i].dest) for i in batch])

        first = post(batches[0]) if batches else ([], [])

        def arrivals() -> Iterator[range]:
            receives, sends = first
            for number, batch in enumerate(batches):
                following = post(batches[number + 1]) if number + 1 < len(batches) else ([], [])
                self.wait(receives)
                yield batch
                # before the next batch but one is posted, so that no more than two are ever in flight
                self.wait(sends)
                receives, sends = following

        return arrivals()

    def persistent(self, exchange: Round) -> PersistentRound:
        """Set up a round whose arrays stay where they are."""
        return PersistentRound(exchange, self)

    # control, counted

    @contextmanager
    def carrying(self, token: int | None) -> Iterator[None]:
        """Within, the first control operation that can takes a word along; `tokens` then has every rank's.

        Args:
            token: as the attribute.
        """
        self.token, self.tokens = token, None
        try:
            yield
        finally:
            self.token = None

    @abstractmethod
    def alltoall_control(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Row q of int64[P, m] goes to rank q; returns int64[P, m], row q from rank q."""

    @abstractmethod
    def allgather_control(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        """int64[m] of every rank as int64[P, m]."""

    @abstractmethod
    def allreduce_control(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        """Elementwise sum of int64[m] over the ranks."""

    @abstractmethod
    def any_control(self, flag: bool) -> bool:
        """Whether any rank's flag is up; by messages that no other operation of a rank, in another call, takes for its own."""

    # control outside steps, not counted

    @abstractmethod
    def barrier(self) -> None:
        """Wait until every rank has called."""

    @abstractmethod
    def allreduce_or(self, bits: NDArray[np.uint8]) -> None:
        """Bitwise or of uint8[m] over the ranks, in place."""

    @abstractmethod
    def broadcast(self, array: Array, root: int) -> None:
        """Fill a contiguous host array with that of rank `root`, in place."""

    # how long ranks wait for each other

    def expect_all(self, what: str, seconds: float, advice: str = EVERY_RANK_CALLS) -> None:
        """Let the next control operation or agreement raise MissingRanksError if ranks come later.

        Args:
            what: begins, for the message.
            seconds: that the first rank to come waits. A rank under a debugger waits for ever.
            advice: a sentence that ends the message.
        """

    def expect_none(self) -> None:
        """What `expect_all` announced is over: later operations have no limit."""

    @property
    def gave_up(self) -> bool:
        """Whether this rank has raised MissingRanksError.

        The ranks are apart then, and a collective operation would hang.
        """
        return False

    def announce_close(self) -> Callable[[], bool] | None:
        """Let ranks that wait for this one name `close`; see `collectives.closing.announce`.

        Talks to none that does not look.

        Returns:
            What tells whether nothing of that is under way any more; None where it was announced
            already.
        """
        return None

    # parts of the ranks

    @abstractmethod
    def ranks_on_this_host(self) -> int:
        """How many of the ranks share this rank's host. Collective."""

    @abstractmethod
    def group_by_host(self, ranks_per_host: int) -> None:
        """Set `hosts`. Collective.

        Args:
            ranks_per_host: ranks 0 to ranks_per_host - 1 count as one host, and so on; 0: those that share memory.

        Raises:
            ValueError: ranks that are to count as one host do not share memory; on every rank alike.
        """

    @abstractmethod
    def split(self, color: int | None) -> Transport | None:
        """A transport of the same kind among the ranks of one color, in the order of their ranks; None for None. Collective."""
