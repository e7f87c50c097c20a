"""Ranks that are threads of one process, whose transports record what they send, wait for and agree on."""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.host_transport import HostTransport
from oktopk.replay.valueless import ALLGATHER, ALLREDUCE, ALLTOALL, RECEIVE, SEND, WAIT, Group, Op

_PATIENCE = 60.0  # seconds


class Meeting:
    """What the ranks share: a queue for each pair of them, and a place to meet."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.queues: dict[tuple[int, int], SimpleQueue[NDArray[Any]]] = defaultdict(SimpleQueue)
        self.barrier = threading.Barrier(size, timeout=_PATIENCE)
        self.rows: list[Any] = [None] * size
        self._parts: dict[tuple[int, ...], Meeting] = {}
        self._lock = threading.Lock()
        for source in range(size):
            for dest in range(size):
                self.queues[source, dest] = SimpleQueue()

    def part(self, members: list[int]) -> Meeting:
        """Where some of the ranks meet."""
        with self._lock:
            return self._parts.setdefault(tuple(members), Meeting(len(members)))

    def abort(self) -> None:
        """Let all ranks that wait raise."""
        for meeting in (self, *self._parts.values()):
            meeting.barrier.abort()


class ThreadTransport(HostTransport):
    """One rank's connection to the others of a meeting, or to those of a part of it."""

    library = "threads"

    def __init__(
        self, rank: int, meeting: Meeting, whole: ThreadTransport | None = None, group: Group | None = None
    ) -> None:
        super().__init__(rank, meeting.size, None)  # type: ignore[arg-type]
        self._ops: list[Op] = []
        self._meeting, self._whole = meeting, whole or self
        self._group = group or Group(1, meeting.size)
        # receives that wait for a message, by their source and in their order
        self._posted: dict[int, deque[tuple[int, NDArray[Any]]]] = defaultdict(deque)

    @property
    def ops(self) -> list[Op]:
        """The record of the rank, parts included, as `oktopk.replay.valueless.Record` has it."""
        return self._whole._ops

    @ops.setter
    def ops(self, ops: list[Op]) -> None:
        self._ops = ops

    def close(self) -> None: ...

    def _add(self, op: Op) -> int:
        self.ops.append(op)
        return len(self.ops) - 1

    def send(self, array: NDArray[Any], dest: int, even_if_empty: bool = False) -> list[Any]:
        if not array.size and not even_if_empty:
            return []
        self._count(array.nbytes, dest)
        self._meeting.queues[self.rank, dest].put(array.copy())
        return [self._add(Op(SEND, dest, array.nbytes, self._group))]

    def receive(self, array: NDArray[Any], source: int) -> list[Any]:
        if not array.size:
            return []
        number = self._add(Op(RECEIVE, source, array.nbytes, self._group))
        self._posted[source].append((number, array))
        return [number]

    def receive_counted(self, array: NDArray[Any], source: int) -> int:
        came = self._meeting.queues[source, self.rank].get(timeout=_PATIENCE)
        array[: len(came)] = came
        number = self._add(Op(RECEIVE, source, came.nbytes, self._group))
        self._add(Op(WAIT, 0, 0, waits=(number,)))
        return len(came)

    def wait(self, requests: list[Any]) -> None:
        if not requests:
            return
        self._add(Op(WAIT, 0, 0, waits=tuple(requests)))
        for number in requests:
            if self.ops[number].kind == RECEIVE:
                self._fill(number, self.ops[number].peer)

    def _fill(self, number: int, source: int) -> None:
        """Take messages until this receive has its own."""
        posted = self._posted[source]
        while posted and posted[0][0] <= number:
            _, array = posted.popleft()
            came = self._meeting.queues[source, self.rank].get(timeout=_PATIENCE)
            assert came.nbytes == array.nbytes, "a message has another length than its receiver expects"
            array[:] = came

    def _run(self, operation: str, *arrays: NDArray[Any]) -> None:
        sent, received = arrays
        kind = {"alltoall": ALLTOALL, "allgather": ALLGATHER, "allreduce": ALLREDUCE}[operation]
        if self.size > 1:
            self._add(Op(kind, 0, (sent[0] if operation == "alltoall" else sent).nbytes, self._group))
        meeting = self._meeting
        meeting.rows[self.rank] = sent
        meeting.barrier.wait()
        if operation == "alltoall":
            received[:] = [row[self.rank] for row in meeting.rows]
        elif operation == "allgather":
            received[:] = meeting.rows
        else:
            received[:] = np.sum(meeting.rows, axis=0)
        meeting.barrier.wait()

    def _outside(self, *arguments: Any) -> Any:
        raise AssertionError("a step does not call this")

    allreduce_or: Any = _outside
    broadcast: Any = _outside
    _start: Any = _outside
    _start_any: Any = _outside
    _start_telling: Any = _outside

    def _allgather_objects(self, value: Any) -> list[Any]:
        meeting = self._meeting
        meeting.rows[self.rank] = value
        meeting.barrier.wait()
        values = [*meeting.rows]
        meeting.barrier.wait()
        return values

    def _first_ranks_of_hosts(self) -> list[int]:
        return [0] * self.size

    def _among(self, members: list[int], color: int | None) -> ThreadTransport:
        group = Group.of(members)
        assert [group.rank(place, self.rank) for place in range(len(members))] == members
        return type(self)(group.place(self.rank), self._meeting.part(members), self, group)


def on_threads(
    size: int, run: Callable[[ThreadTransport], Any], kind: type[ThreadTransport] = ThreadTransport
) -> list[Any]:
    """What `run` returns on each of so many ranks. One that raises ends all."""
    meeting = Meeting(size)
    results: list[Any] = [None] * size
    errors: list[BaseException] = []

    def work(rank: int) -> None:
        try:
            results[rank] = run(kind(rank, meeting))
        except BaseException as error:
            errors.append(error)
            meeting.abort()

    threads = [threading.Thread(target=work, args=(rank,)) for rank in range(size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return results
