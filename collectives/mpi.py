"""Host arrays over mpi4py: counted, non-blocking messages on a communicator of their own."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.cpu import kernels as host_kernels
from collectives.limit import Limit, missing_ranks, someone_gave_up, wait_for_all, wait_for_request
from collectives.sparse import ENTRY
from collectives.traffic import WORD_BYTES, Traffic
from collectives.transport import EVERY_RANK_CALLS, MissingRanksError, PersistentRound, Round, Transport
from collectives.workspace import Workspace

_PAYLOAD, _GAVE_UP = 0, 1  # tags

_LAUNCHERS = {
    "WORLD_SIZE": "torchrun",
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec",
    "PMI_SIZE": "MPICH's mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""Environment variable -> the launcher that puts the number of processes into it."""


class LauncherError(RuntimeError):
    """A launcher started several processes, but each is an MPI job of its own."""


def connect(comm: MPI.Intracomm | None, limit: Limit | None = None) -> MpiTransport:
    """The transport for host arrays among the ranks of a communicator, as `communicator`. Collective: every rank must call.

    Args:
        limit: on the time that ranks may come late to this call; None: they are waited for.

    Raises:
        MissingRanksError: they did not come in time, see `wait_for_all`.
    """
    comm = communicator(comm)
    if limit is not None:
        wait_for_all(comm, limit)  # duplicating the communicator would block
    return MpiTransport(comm)


def communicator(comm: MPI.Intracomm | None) -> MPI.Intracomm:
    """The communicator to use: the one given, or for None that of all ranks of the job.

    Raises:
        TypeError: it is something else.
        LauncherError: a launcher started several processes, and MPI knows only this one. `MPI.COMM_SELF` is not checked.
    """
    if comm is None:
        comm = MPI.COMM_WORLD
    if not isinstance(comm, MPI.Intracomm):
        raise TypeError(f"comm is a {type(comm).__name__}, not an mpi4py.MPI.Intracomm")
    if MPI.COMM_WORLD.Get_size() == 1 and MPI.Comm.Compare(comm, MPI.COMM_SELF) != MPI.IDENT:
        _check_launcher(os.environ)
    return comm


def _check_launcher(environment: Mapping[str, str]) -> None:
    for name, launcher in _LAUNCHERS.items():
        number = environment.get(name, "")
        if number.isdigit() and int(number) > 1:
            raise LauncherError(
                f"{name}={number}: {launcher} started {number} processes, but the MPI that mpi4py uses has size 1, so each would "
                f"train alone. Start them by that MPI's own launcher: mpiexec -n {number} python -m mpi4py my.py (under Slurm "
                "srun --mpi=pmix, or what the site's MPI needs). If each is to be alone, pass MPI.COMM_SELF"
            )


def on_this_host(comm: MPI.Intracomm) -> tuple[int, int]:
    """This rank's place among the ranks of its host, and their number. Collective."""
    host = comm.Split_type(MPI.COMM_TYPE_SHARED)
    try:
        return host.Get_rank(), host.Get_size()
    finally:
        host.Free()


class GivenUp:
    """What a transport and those that are split off it know of ranks that did not come.

    Args:
        comm: of the transport; carries the notes of ranks that give up, so that all hear of it wherever they wait.

    Attributes:
        error: that this rank has raised, None before.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.error: MissingRanksError | None = None


class MpiTransport(Transport):
    """Host arrays over MPI.

    Args:
        comm: intracommunicator; duplicated, so that several transports never see each other's messages. Collective.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm.Dup()
        self.rank = comm.Get_rank()
        self.size = comm.Get_size()
        self.kernels: Any = host_kernels
        self.workspace = Workspace()
        self.traffic = Traffic()
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            self.threads_problem = (
                "this MPI serves one thread only (MPI_THREAD_MULTIPLE is not provided), and buckets are reduced in a thread of "
                "their own: take an MPI that provides it, or let mpi4py ask for it (mpi4py.rc.thread_level)"
            )
        self.hosts = [0] * self.size
        self.ranks = list(range(self.size))
        # what the next control operation begins, and the seconds that ranks may come late to it
        self._expected: Limit | None = None
        self._given_up = GivenUp(self.comm)
        self._last_collected = time.monotonic()  # when an expected operation ended

    def close(self) -> None:
        # where an operation was given up, MPI may still be working on it
        if self.comm != MPI.COMM_NULL and not self.gave_up:
            self.comm.Free()

    def allocate(self, length: int) -> NDArray[np.float32]:
        return np.empty(length, np.float32)

    def send(self, array: NDArray[Any], dest: int, even_if_empty: bool = False) -> list[Any]:
        if not array.size and not even_if_empty:
            return []
        self.traffic.count(array.nbytes, between=self.hosts[dest] != self.hosts[self.rank])
        return [self.comm.Isend(self._mpi_buffer(array), dest, _PAYLOAD)]

    def receive(self, array: NDArray[Any], source: int) -> list[Any]:
        return [self.comm.Irecv(self._mpi_buffer(array), source, _PAYLOAD)] if array.size else []

    def receive_counted(self, array: NDArray[Any], source: int) -> int:
        status = MPI.Status()
        self.comm.Recv(self._mpi_buffer(array), source, _PAYLOAD, status)
        return status.Get_count(MPI.BYTE) // array.itemsize

    def wait(self, requests: list[Any]) -> None:
        MPI.Request.Waitall(requests)

    def persistent(self, exchange: Round) -> PersistentRound:
        return _PersistentRound(exchange, self)

    def alltoall_control(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        received = np.empty_like(rows)
        self._collect(self.comm.Alltoall, self.comm.Ialltoall, rows, received)
        self.traffic.count_control((self.size - 1) * rows[0].nbytes)
        return received

    def allgather_control(self, row: NDArray[np.int64]) -> NDArray[np.int64]:
        received = np.empty((self.size, *row.shape), row.dtype)
        self._collect(self.comm.Allgather, self.comm.Iallgather, row, received)
        self.traffic.count_control((self.size - 1) * row.nbytes)
        return received

    def allreduce_control(self, array: NDArray[np.int64]) -> NDArray[np.int64]:
        total = np.empty_like(array)
        self._collect(self.comm.Allreduce, self.comm.Iallreduce, array, total)
        words = 2 * array.nbytes // WORD_BYTES * (self.size - 1)
        self.traffic.count_control(WORD_BYTES * -(-words // self.size))
        return total

    def expect_all(self, what: str, seconds: float, advice: str = EVERY_RANK_CALLS) -> None:
        if self._given_up.error is not None:
            raise self._given_up.error
        if self.size > 1:
            self._expected = Limit(what, seconds, advice)

    def expect_none(self) -> None:
        self._expected = None

    @property
    def gave_up(self) -> bool:
        return self._given_up.error is not None

    def _collect(
        self, blocking: Callable[..., Any], nonblocking: Callable[..., MPI.Request], *arrays: NDArray[Any]
    ) -> None:
        """Run a collective operation, with a limit on the time that ranks may come late where one is expected."""
        if self._expected is None:
            blocking(*arrays)
            return
        limit, self._expected = self._expected, None
        notes = self._given_up.comm
        try:
            wait_for_request(nonblocking(*arrays), arrays, notes, _GAVE_UP, limit)
            # the others can have given up only about as long after the last operation; looking costs a round of MPI's progress
            since, self._last_collected = time.monotonic() - self._last_collected, time.monotonic()
            if since > limit.seconds / 2 and someone_gave_up(notes, _GAVE_UP):
                raise missing_ranks(notes, _GAVE_UP, limit)
        except MissingRanksError as error:
            self._given_up.error = error
            raise

    def barrier(self) -> None:
        self._collect(self.comm.Barrier, self.comm.Ibarrier)

    def allgather_objects(self, value: Any) -> list[Any]:
        if self._expected is not None:
            self.barrier()
        return self.comm.allgather(value)

    def allreduce_or(self, bits: NDArray[np.uint8]) -> None:
        self.comm.Allreduce(MPI.IN_PLACE, bits, MPI.BOR)

    def broadcast(self, array: NDArray[Any], root: int) -> None:
        """Fill a contiguous host array with that of rank `root`, in place."""
        self.comm.Bcast(array, root)

    def ranks_on_this_host(self) -> int:
        return on_this_host(self.comm)[1]

    def group_by_host(self, ranks_per_host: int) -> None:
        # a host is known by its first rank; hosts are numbered in the order of these
        host = self.comm.Split_type(MPI.COMM_TYPE_SHARED)
        first = host.bcast(self.rank)
        host.Free()
        firsts = self.comm.allgather(first)
        if not ranks_per_host:
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

    def split(self, color: int | None) -> MpiTransport | None:
        comm = self.comm.Split(MPI.UNDEFINED if color is None else color, self.rank)
        if not isinstance(comm, MPI.Intracomm) or comm == MPI.COMM_NULL:
            return None
        part = self._like_this(comm)
        members = comm.allgather(self.rank)
        comm.Free()
        part.hosts = [self.hosts[rank] for rank in members]
        part._given_up = self._given_up
        part.ranks = [self.ranks[rank] for rank in members]
        return part

    def _like_this(self, comm: MPI.Intracomm) -> MpiTransport:
        """A transport of this kind on another communicator, which is duplicated."""
        return MpiTransport(comm)

    def _mpi_buffer(self, array: NDArray[Any]) -> Any:
        """The array as MPI takes it. MPI has no type for a COO entry, which travels as one 64-bit integer."""
        return array.view(np.int64) if array.dtype == ENTRY else array

    def _synchronize(self) -> None:
        """Wait for work on a device that MPI cannot see, before it reads or writes arrays. Host arrays have none."""


class _PersistentRound:
    """A round of persistent requests."""

    def __init__(self, exchange: Round, transport: MpiTransport) -> None:
        self._transport = transport
        self._requests: list[MPI.Prequest] = []
        self._nbytes = exchange.outgoing.nbytes
        self._between = transport.hosts[exchange.dest] != transport.hosts[transport.rank]
        if exchange.incoming.size:
            buffer = transport._mpi_buffer(exchange.incoming)
            self._requests.append(transport.comm.Recv_init(buffer, exchange.source, _PAYLOAD))
        if exchange.outgoing.size:
            buffer = transport._mpi_buffer(exchange.outgoing)
            self._requests.append(transport.comm.Send_init(buffer, exchange.dest, _PAYLOAD))

    def run(self) -> None:
        if self._requests:
            self._transport._synchronize()
            self._transport.traffic.count(self._nbytes, self._nbytes > 0, self._between)
            MPI.Prequest.Startall(self._requests)
            MPI.Request.Waitall(self._requests)

    def free(self) -> None:
        for request in self._requests:
            request.Free()
        self._requests = []
