"""A ring of ranks joined by TCP itself: what links carry without an MPI."""

from __future__ import annotations

import socket
import time
from contextlib import suppress
from typing import Any

from mpi4py import MPI

_PIECE = 1 << 20
_PATIENCE = 10.0  # seconds without a byte


class TcpRing:
    """A connection to the next rank and one from the rank before. Collective: every rank must construct.

    Attributes:
        usable: whether all ranks reach each other by the names of their hosts.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._sockets: list[socket.socket] = []
        server, address = None, None
        try:
            server = socket.create_server((socket.gethostbyname(socket.gethostname()), 0))
            server.settimeout(_PATIENCE)
            address = server.getsockname()
        except OSError:
            pass
        addresses = comm.allgather(address)
        self.usable = all(addresses)
        if self.usable:
            try:
                # the next rank's server takes the connection before it is accepted
                after = socket.create_connection(addresses[(comm.rank + 1) % comm.size], _PATIENCE)
                self._sockets.append(after)
                assert server is not None
                before = server.accept()[0]
                self._sockets.append(before)
                before.settimeout(_PATIENCE)
                after.sendall(comm.rank.to_bytes(8, "little"))
                # a name may lead to this machine itself, where another one was meant
                greeting = before.recv(8, socket.MSG_WAITALL)
                self.usable = int.from_bytes(greeting, "little") == (comm.rank - 1) % comm.size
                for each in self._sockets:
                    each.setblocking(False)
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                self.usable = False
        if server is not None:
            server.close()
        self.usable = all(comm.allgather(self.usable))

    def exchange(self, outgoing: Any, incoming: Any) -> None:
        """Send bytes to the next rank while as many from the rank before arrive. Does not sleep, as an MPI does not.

        Raises:
            OSError: a connection is closed, or nothing moves for 10 s; on this rank alone.
        """
        after, before = self._sockets
        out, into = memoryview(outgoing).cast("B"), memoryview(incoming).cast("B")
        sent = got = moved = 0
        deadline = time.monotonic() + _PATIENCE
        while sent < len(out) or got < len(into):
            if got < len(into):
                with suppress(BlockingIOError):
                    received = before.recv_into(into[got : got + _PIECE])
                    if not received:
                        raise ConnectionError("the rank before closed its connection")
                    got += received
            if sent < len(out):
                with suppress(BlockingIOError):
                    sent += after.send(out[sent : sent + _PIECE])
            if sent + got > moved:
                moved, deadline = sent + got, time.monotonic() + _PATIENCE
            elif time.monotonic() > deadline:
                raise TimeoutError(f"{sent} of {len(out)} bytes sent, {got} received, and then none")

    def close(self) -> None:
        """Close both connections."""
        for each in self._sockets:
            each.close()
