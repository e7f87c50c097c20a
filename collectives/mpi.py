"""Host arrays over mpi4py: counted, non-blocking messages on a communicator of their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.closing import closes
from collectives.host_transport import HostTransport
from collectives.launchers import check_launcher
from collectives.limit import MOST_BYTES, GivenUp, Limit, Note, missing_ranks, wait_within
from collectives.sparse import ENTRY, Array
from collectives.transport import PersistentRound, Round

_PAYLOAD, _GAVE_UP, _CALLED, _ANY, _CLOSED = 0, 1, 2, 3, 4  # tags

_CALLERS_TAG = 32_749
"""Of the notes on a caller's communicator, which carries the caller's messages too."""

_NOTE = np.dtype([("waited", np.int64), ("what", f"S{MOST_BYTES}")])


def connect(comm: MPI.Intracomm, limit: Limit | None = None) -> MpiTransport:
    """The transport for host arrays among the ranks of a communicator. Collective: every rank must call.

    Args:
        limit: on the time that ranks may come late to this call; None: they are waited for.

    Raises:
        MissingRanksError: they did not come in time; on the others, and on a missing one when it comes. The communicator must
            not be used after that.

    Traffic: one nonblocking barrier, with a limit.
    """
    if limit is not None and comm.Get_size() > 1:  # duplicating the communicator would block
        given_up = GivenUp(MpiNotes(comm, _CALLERS_TAG))
        request = comm.Ibarrier()
        wait_within(limit, lambda seconds: request.Test(), given_up)
        if given_up.notes.any_left():
            raise missing_ranks(limit, given_up)
    return MpiTransport(comm)


def communicator(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """The communicator to use: the one given, or for None that of all ranks of the job.

    Raises:
        RuntimeError: MPI is not initialized, or was finalized.
        LauncherError: a launcher started several processes, and MPI knows only this one. `MPI.COMM_SELF` is not checked.
    """
    if not MPI.Is_initialized() or MPI.Is_finalized():
        when = "after MPI.Finalize()" if MPI.Is_initialized() else "before MPI.Init_thread()"
        raise RuntimeError(
            f"MPI is to be used {when}: where mpi4py.rc.initialize is False, call MPI.Init_thread(MPI.THREAD_MULTIPLE) first"
        )
    if comm is None:
        comm = MPI.COMM_WORLD
    if MPI.COMM_WORLD.Get_size() == 1 and MPI.Comm.Compare(comm, MPI.COMM_SELF) != MPI.IDENT:
        check_launcher("the MPI that mpi4py uses")
    return comm


def on_this_host(comm: MPI.Intracomm) -> tuple[int, int]:
    """This rank's place among the ranks of its host, and their number. Collective."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return host.Get_rank(), host.Get_size()
    finally:
        host.Free()


class MpiNotes:
    """As `collectives.limit.Notes`, by messages."""

    def __init__(self, comm: MPI.Intracomm, tag: int) -> None:
        self.rank, self.size = comm.Get_rank(), comm.Get_size()
        self._comm, self._tag = comm, tag
        self._left: list[object] = []  # MPI may still read them

    def leave(self, note: Note) -> None:
        packed = np.array([note], _NOTE)
        others = [rank for rank in range(self.size) if rank != self.rank]
        sent = [self._comm.Isend(packed.view(np.uint8), rank, self._tag) for rank in others]
        self._left.append((packed, sent))

    def any_left(self) -> bool:
        return self._comm.Iprobe(MPI.ANY_SOURCE, self._tag)

    def collect(self) -> dict[int, Note]:
        came = {}
        status, note = MPI.Status(), np.empty(1, _NOTE)
        while self.any_left():
            self._comm.Recv(note.view(np.uint8), MPI.ANY_SOURCE, self._tag, status)
            came[status.Get_source()] = Note(int(note["waited"][0]), note["what"][0].decode())
        return came

    def close(self) -> Callable[[], bool]:
        nothing, others = np.zeros(1, np.uint8), [rank for rank in range(self.size) if rank != self.rank]
        requests = [self._comm.Irecv(nothing[:0], rank, _CLOSED) for rank in others]
        requests += [self._comm.Isend(nothing[:0], rank, _CLOSED) for rank in others]
        return lambda: MPI.Request.Testall(requests)

    def closed(self) -> set[int]:
        return {rank for rank in range(self.size) if rank != self.rank and self._comm.Iprobe(rank, _CLOSED)}


class MpiTransport(HostTransport):
    """Host arrays over MPI.

    Args:
        comm: intracommunicator; duplicated, so that several transports never see each other's messages. Collective.
    """

    library = "MPI"

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        super().__init__(comm.Get_rank(), comm.Get_size(), MpiNotes(self.comm, _GAVE_UP))
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            self.threads_problem = (
                "this MPI serves one thread only (MPI_THREAD_MULTIPLE is not provided), and buckets are reduced in a thread of "
                "their own: take an MPI that provides it, or let mpi4py ask for it (mpi4py.rc.thread_level)"
            )

    @closes
    def close(self) -> None:
        # where an operation was given up, or others have not closed yet, MPI may still be working on it
        if not self.gave_up and (self._closing is None or self._closing()):
            self.comm.Free()

    def send(self, array: Array, dest: int, even_if_empty: bool = False) -> list[Any]:
        if not array.size and not even_if_empty:
            return []
        self._count(array.nbytes, dest)
        return [self.comm.Isend(self._mpi_buffer(array), dest, _PAYLOAD)]

    def receive(self, array: Array, source: int) -> list[MPI.Request]:
        return [self.comm.Irecv(self._mpi_buffer(array), source, _PAYLOAD)] if array.size else []

    def receive_counted(self, array: Array, source: int) -> int:
        status = MPI.Status()
        self.comm.Recv(self._mpi_buffer(array), source, _PAYLOAD, status)
        return status.Get_count(MPI.BYTE) // array.itemsize

    def wait(self, requests: list[MPI.Request]) -> None:
        MPI.Request.Waitall(requests)

    def persistent(self, exchange: Round) -> PersistentRound:
        return _PersistentRound(exchange, self)

    def _run(self, operation: str, *arrays: NDArray[Any]) -> None:
        getattr(self.comm, operation.capitalize())(*arrays)

    def _start(self, operation: str, *arrays: NDArray[Any]) -> Callable[[float], bool]:
        request = getattr(self.comm, f"I{operation}")(*arrays)
        kept = request, arrays
        return lambda seconds: kept[0].Test()

    def _start_any(self, flags: NDArray[np.int64]) -> Callable[[float], bool]:
        # in round j a rank hears of the 2^j ranks before it
        distances = [1 << j for j in range((self.size - 1).bit_length())]
        heard, sent = np.zeros_like(flags), flags.copy()
        requests: list[MPI.Request] = []

        def done(seconds: float) -> bool:
            while MPI.Request.Testall(requests):
                np.bitwise_or(flags, heard, out=flags)
                if not distances:
                    return True
                distance = distances.pop(0)
                sent[:] = flags
                source, dest = (self.rank - distance) % self.size, (self.rank + distance) % self.size
                requests[:] = self.comm.Irecv(heard, source, _ANY), self.comm.Isend(sent, dest, _ANY)
            return False

        return done

    def _start_telling(self, calls: NDArray[Any]) -> Callable[[float], bool]:
        rows = calls.view(np.uint8).reshape(self.size, -1)
        others = [rank for rank in range(self.size) if rank != self.rank]
        requests = [self.comm.Irecv(rows[rank], rank, _CALLED) for rank in others]
        requests += [self.comm.Isend(rows[self.rank], rank, _CALLED) for rank in others]
        kept = requests, calls
        return lambda seconds: MPI.Request.Testall(kept[0])

    def _allgather_objects(self, value: object) -> list[Any]:
        return self.comm.allgather(value)

    def allreduce_or(self, bits: NDArray[np.uint8]) -> None:
        self.comm.Allreduce(MPI.IN_PLACE, bits, MPI.BOR)

    def broadcast(self, array: NDArray[Any], root: int) -> None:
        self.comm.Bcast(array, root)

    def _first_ranks_of_hosts(self) -> list[int]:
        host = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        first = host.bcast(self.rank)
        host.Free()
        return self.comm.allgather(first)

    def _among(self, members: list[int], color: int | None) -> HostTransport | None:
        comm = self.comm.Split(MPI.UNDEFINED if color is None else color, self.rank)
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            return None
        part = self._like_this(comm)
        comm.Free()
        return part

    def _mpi_buffer(self, array: Array) -> Any:
        """The array as MPI takes it. MPI has no type for a COO entry, which travels as one 64-bit integer."""
        return array.view(np.int64) if array.dtype == ENTRY else array

    def _synchronize(self) -> None:
        """Wait for work on a device that MPI cannot see, before it reads or writes arrays. Host arrays have none."""


class _PersistentRound(PersistentRound):
    """A round of persistent requests."""

    _transport: MpiTransport

    def __init__(self, exchange: Round, transport: MpiTransport) -> None:
        super().__init__(exchange, transport)
        self._requests: list[MPI.Prequest] = []
        self._nbytes, self._dest = exchange.outgoing.nbytes, exchange.dest
        if exchange.incoming.size:
            buffer = transport._mpi_buffer(exchange.incoming)
            self._requests.append(transport.comm.Recv_init(buffer, exchange.source, _PAYLOAD))
        if exchange.outgoing.size:
            buffer = transport._mpi_buffer(exchange.outgoing)
            self._requests.append(transport.comm.Send_init(buffer, exchange.dest, _PAYLOAD))

    def run(self) -> None:
        if self._requests:
            self._transport._synchronize()
            self._transport._count(self._nbytes, self._dest, self._nbytes > 0)
            MPI.Prequest.Startall(self._requests)
            MPI.Request.Waitall(self._requests)

    def free(self) -> None:
        for request in self._requests:
            request.Free()
        self._requests = []
