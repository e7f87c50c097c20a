"""Host arrays over any library: what is counted, how long ranks are waited for, and how ranks are grouped."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cpu import kernels as host_kernels
from collectives.dense_allreduce import DenseAllreduce
from collectives.errors import EVERY_RANK_CALLS, MissingRanksError
from collectives.limit import (
    MOST_BYTES,
    PAUSE,
    GivenUp,
    Limit,
    Notes,
    call_of,
    missing_ranks,
    other_calls,
    others_gave_up,
    wait_within,
)
from collectives.traffic import WORD_BYTES, Traffic
from collectives.transport import Transport
from collectives.workspace import Workspace

CALL = np.dtype(f"S{MOST_BYTES}")
"""A call of a rank, as `call_of` gives it."""


class HostTransport(Transport):
    """What the transports of all libraries share.

    A subclass is made of a communicator of its library, and any further arguments that `_like_this` passes on.

    Args:
        rank, size: this rank, and how many there are.
        notes: of ranks that give up.

    Attributes:
        comm: the library's communicator, this transport's own.
        by_nccl: whether arrays on GPUs of their own go by NCCL between these ranks.
    """

    comm: Any
    by_nccl: bool = False

    def __init__(self, rank: int, size: int, notes: Notes) -> None:
        self.rank, self.size = rank, size
        self.kernels: Any = host_kernels
        self.workspace = Workspace()
        self.traffic = Traffic()
        self.hosts = [0] * size
        self.ranks = list(range(size))
        self.shared: dict[Any, Any] = {}
        # what the next control operation begins, and the seconds that ranks may come late to it
        self._expected: Limit | None = None
        self._given_up = GivenUp(notes)
        self._last_collected = time.monotonic()  # when an expected operation ended
        # once this rank has announced that it closes: whether nothing of that is under way any more
        self._closing: Callable[[], bool] | None = None

    def dense_allreduce(self, vector: NDArray[np.float32], timeout: float) -> Any:
        return DenseAllreduce(vector, self)

    def allocate(self, length: int) -> NDArray[np.float32]:
        return np.empty(length, np.float32)

    def _count(self, nbytes: int, dest: int, messages: int = 1) -> None:
        """Add payload that goes to a rank."""
        self.traffic.count(nbytes, messages, between=self.hosts[dest] != self.hosts[self.rank])

    def alltoall_control(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.token is not None:
            rows = np.concatenate([rows, np.full((self.size, 1), self.token)], axis=1)
        received = np.empty_like(rows)
        self._collect("alltoall", rows, received)
        self.traffic.count_control((self.size - 1) * rows[0].nbytes)
        return self._without_tokens(received)

    def allgather_control(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.token is not None:
            row = np.append(row, self.token)
        received = np.empty((self.size, *row.shape), row.dtype)
        self._collect("allgather", row, received)
        self.traffic.count_control((self.size - 1) * row.nbytes)
        return self._without_tokens(received)

    def _without_tokens(self, received: NDArray[np.int64]) -> NDArray[np.int64]:
        if self.token is None:
            return received
        self.token, self.tokens = None, tuple(received[:, -1].tolist())
        return received[:, :-1]

    def allreduce_control(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        total = np.empty_like(array)
        self._collect("allreduce", array, total)
        self._count_allreduce(array.nbytes)
        return total

    def any_control(self, flag: bool) -> bool:
        flags = np.array([flag], np.int64)
        if self.size > 1:
            done = self._start_any(flags)
            if self._expected is not None:
                self._wait_expected(done)
            else:
                while not done(PAUSE):
                    pass
        self._count_allreduce(flags.nbytes)
        return bool(flags[0])

    def _count_allreduce(self, nbytes: int) -> None:
        words = 2 * nbytes // WORD_BYTES * (self.size - 1)
        self.traffic.count_control(WORD_BYTES * -(-words // self.size))

    def barrier(self) -> None:
        limit = self._expected
        if limit is None:
            self._collect("barrier")
            return
        # ranks that begin different calls with one may meet here; others may be in a collective operation of a step
        calls = np.zeros(self.size, CALL)
        calls[self.rank] = call_of(limit)
        self._wait_expected(self._start_telling(calls))
        self._given_up.error = other_calls(limit, [call.decode() for call in calls.tolist()])
        if self._given_up.error is not None:
            raise self._given_up.error

    def allgather_objects(self, value: Any) -> list[Any]:
        if self._expected is not None:
            self.barrier()
        return self._allgather_objects(value)

    def expect_all(self, what: str, seconds: float, advice: str = EVERY_RANK_CALLS) -> None:
        if self._given_up.error is not None:
            raise self._given_up.error
        if self.size > 1:
            self._expected = self._given_up.limit = Limit(what, seconds, advice)

    def expect_none(self) -> None:
        self._expected = None

    def share_limit(self, other: HostTransport) -> None:
        """Let ranks that give up here tell so to those of another transport, where others may wait for them, and the reverse.

        A third one does not hear of it.
        """
        here, there = self._given_up, other._given_up
        here.others.append(there.notes)
        there.others.append(here.notes)

    @property
    def gave_up(self) -> bool:
        return self._given_up.error is not None

    def announce_close(self) -> Callable[[], bool] | None:
        if self.gave_up or self._closing is not None:
            return None
        self._closing = self._given_up.notes.close()
        return self._closing

    def _collect(self, operation: str, *arrays: NDArray[Any]) -> None:
        """Run a collective operation, with a limit on the time that ranks may come late where one is expected."""
        if self._expected is None:
            self._run(operation, *arrays)
            return
        self._wait_expected(self._start(operation, *arrays))

    def _wait_expected(self, done: Callable[[float], bool]) -> None:
        """Wait for what is expected of all ranks, until `done`; see `wait_within`."""
        limit, self._expected = self._expected, None
        assert limit is not None
        try:
            self._look_for_notes(limit)  # a rank that waits first would count as one that came in time
            wait_within(limit, done, self._given_up)
            self._look_for_notes(limit)
            self._last_collected = time.monotonic()
        except MissingRanksError as error:
            self._given_up.error = error
            raise

    def _look_for_notes(self, limit: Limit) -> None:
        """Raise if the others have given up, as they can only so long after the last operation: looking costs progress."""
        late = time.monotonic() - self._last_collected > limit.seconds / 2
        if late and others_gave_up(self._given_up.notes):
            raise missing_ranks(limit, self._given_up)

    def ranks_on_this_host(self) -> int:
        firsts = self._first_ranks_of_hosts()
        return firsts.count(firsts[self.rank])

    def group_by_host(self, ranks_per_host: int) -> None:
        firsts = self._first_ranks_of_hosts()
        if not ranks_per_host:
            # hosts are numbered in the order of their first ranks
            numbers = {first: number for number, first in enumerate(sorted(set(firsts)))}
            self.hosts = [numbers[first] for first in firsts]
            return
        hosts = [rank // ranks_per_host for rank in range(self.size)]
        for host_number in range(hosts[-1] + 1):
            members = [rank for rank in range(self.size) if hosts[rank] == host_number]
            if len({firsts[rank] for rank in members}) > 1:
                raise ValueError(
                    f"ranks_per_host {ranks_per_host}: ranks {members[0]} to {members[-1]} do not share memory"
                )
        self.hosts = hosts

    def split(self, color: int | None) -> HostTransport | None:
        colors = self.allgather_objects(color)
        members = [rank for rank, color_of_rank in enumerate(colors) if color_of_rank == color]
        part = self._among(members, color)
        if part is not None:
            part.hosts = [self.hosts[rank] for rank in members]
            part._given_up = self._given_up
            part.ranks = [self.ranks[rank] for rank in members]
        return part

    def _like_this(self, comm: Any) -> HostTransport:
        """A transport of this kind on another communicator, which is duplicated."""
        make: Any = type(self)
        return make(comm)

    # the library's part

    @abstractmethod
    def _run(self, operation: str, *arrays: NDArray[Any]) -> None:
        """Run "barrier", or "alltoall", "allgather" or "allreduce" of (sent, received) contiguous host arrays."""

    @abstractmethod
    def _start(self, operation: str, *arrays: NDArray[Any]) -> Callable[[float], bool]:
        """Start the same; returns what tells whether it is over, see `wait_within`."""

    @abstractmethod
    def _start_any(self, flags: NDArray[np.int64]) -> Callable[[float], bool]:
        """As `_start`, of the bitwise or of int64[1] in place, as `any_control`."""

    @abstractmethod
    def _start_telling(self, calls: NDArray[Any]) -> Callable[[float], bool]:
        """As `_start`, of an allgather of CALL[P], by messages that no collective operation of another rank takes for its own.

        Args:
            calls: this rank's is there; the others' are filled in.
        """

    @abstractmethod
    def _allgather_objects(self, value: Any) -> list[Any]:
        """As `allgather_objects`, without a limit."""

    @abstractmethod
    def _first_ranks_of_hosts(self) -> list[int]:
        """The first rank that shares its host with rank r, for each r. Collective."""

    @abstractmethod
    def _among(self, members: list[int], color: int | None) -> HostTransport | None:
        """A transport of this kind among the ranks of this rank's color; None for None. Collective."""
