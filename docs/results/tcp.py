"""What links between hosts carry by TCP itself, beside MPI: rings and pairs of ranks, one a host, after pauses.

    jobs/bench/net.sh --hosts 4 --rate 1gbit --module docs.results.tcp 1178624 4712040

Bytes, then milliseconds until the last rank has received all, medians of 9: around a ring by MPI and by TCP; with an even number
of ranks between two that send to each other, by MPI and by one connection of TCP; from all to all by MPI, over P - 1. Ranks poll,
as in an MPI.
"""

import socket
import sys
import time
from contextlib import suppress
from statistics import median

import numpy as np
from mpi4py import MPI

PIECE, PAUSE, TRIES = 1 << 20, 0.02, 9


def ring_exchange(comm, outgoing, incoming):
    """Send to the right and receive from the left."""
    right, left = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    return lambda: comm.Sendrecv(outgoing, right, recvbuf=incoming, source=left)


def with_others(comm, ranks, outgoing):
    """Send to some ranks and receive from them, all at once."""
    incoming = [np.empty_like(outgoing) for _ in ranks]

    def exchange():
        received = [comm.Irecv(each, rank) for each, rank in zip(incoming, ranks, strict=True)]
        MPI.Request.Waitall(received + [comm.Isend(outgoing, rank) for rank in ranks])

    return exchange


def connect(comm):
    """A connection to the next rank, and one from the rank before."""
    server = socket.create_server((socket.gethostbyname(socket.gethostname()), 0))
    addresses = comm.allgather(server.getsockname())
    after = socket.create_connection(addresses[(comm.rank + 1) % comm.size], 10)
    before = server.accept()[0]
    server.close()
    for each in (after, before):
        each.setblocking(False)
        each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return after, before


def exchange(after, before, outgoing, incoming):
    """Send bytes to the next rank while as many from the rank before arrive."""
    out, into = memoryview(outgoing), memoryview(incoming)
    sent = got = 0
    while sent < len(out) or got < len(into):
        with suppress(BlockingIOError):
            got += before.recv_into(into[got : got + PIECE]) if got < len(into) else 0
        with suppress(BlockingIOError):
            sent += after.send(out[sent : sent + PIECE]) if sent < len(out) else 0


def after_pauses(comm, send):
    """Milliseconds until the last rank has done its part, the median over tries."""
    spent = []
    for _ in range(TRIES):
        time.sleep(PAUSE)
        comm.Barrier()
        began = time.perf_counter()
        send()
        spent.append(comm.allreduce(time.perf_counter() - began, MPI.MAX))
    return 1e3 * median(spent)


def main(comm=MPI.COMM_WORLD):
    """Time the transfers that the command line names, in bytes; collective."""
    ring = connect(comm)
    for nbytes in map(int, sys.argv[1:] or ("1178624",)):
        outgoing, incoming = np.full(nbytes, comm.rank, np.uint8), np.empty(nbytes, np.uint8)
        by_mpi = after_pauses(comm, ring_exchange(comm, outgoing, incoming))
        incoming[:] = 255
        by_tcp = after_pauses(comm, lambda out=outgoing, into=incoming: exchange(*ring, out, into))
        assert (incoming == (comm.rank - 1) % comm.size).all()
        found = [by_mpi, by_tcp]
        if comm.size % 2 == 0:
            found.append(after_pauses(comm, with_others(comm, [comm.rank ^ 1], outgoing)))
            incoming[:] = 255
            other = ring[comm.rank % 2]  # the next rank of an even one, else the one before
            found.append(
                after_pauses(
                    comm, lambda out=outgoing, into=incoming, end=other: exchange(end, end, out, into)
                )
            )
            assert (incoming == comm.rank ^ 1).all()
        others = [(comm.rank + i) % comm.size for i in range(1, comm.size)]
        found.append(after_pauses(comm, with_others(comm, others, outgoing)) / len(others))
        if comm.rank == 0:
            print(f"{nbytes:12,}", *(f"{each:8.3f}" for each in found), flush=True)
    for each in ring:
        each.close()


if __name__ == "__main__":
    main()
