"""What links between hosts carry by TCP itself, beside MPI: a ring of ranks, one a host, after pauses.

    jobs/bench/net.sh --hosts 4 --rate 1gbit --module docs.results.tcp 1178624 4712040

Bytes, then milliseconds until the last rank has received all, by MPI and by TCP, medians of 9. Ranks poll, as in an MPI.
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
        if comm.rank == 0:
            print(f"{nbytes:12,} {by_mpi:8.3f} {by_tcp:8.3f}", flush=True)
    for each in ring:
        each.close()


if __name__ == "__main__":
    main()
