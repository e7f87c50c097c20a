"""A ring of ranks joined by TCP itself: what links carry without an MPI."""

from __future__ import annotations

import socket
from contextlib import suppress
from typing import Any

from mpi4py import MPI

_PIECE = 1 << 20
_PATIENCE = 10.0  # seconds


class TcpRing:
    """A connection to the next rank and one from the rank before. Collective: every rank must construct.

    Attributes:
        usable: whether all ranks reach each other by the names of their hosts.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._sockets: list[socket.socket] = []
        server, place = None, None
        try:
            server = socket.create_server(("", 0))
            server.settimeout(_PATIENCE)
            place = socket.gethostbyname(socket.gethostname()), server.getsockname()[1]
        except OSError:
            pass
        places = comm.allgather(place)
        self.usable = all(places)
        if self.usable:
            try:
                # the next rank's server takes the connection before it is accepted
                self._sockets.append(socket.create_connection(places[(comm.rank + 1) % comm.size], _PATIENCE))
                assert server is not None
                self._sockets.append(server.accept()[0])
                for each in self._sockets:
                    each.setblocking(False)
                    each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            except OSError:
                self.usable = False
        if server is not None:
            server.close()
        self.usable = all(comm.allgather(self.usable))

    def exchange(self, outgoing: Any, incoming: Any) -> None:
        """Send bytes to the next rank while as many from the rank before arrive. Does not sleep, as an MPI does not."""
        after, before = self._sockets
        out, into = memoryview(outgoing).cast("B"), memoryview(incoming).cast("B")
        sent = got = 0
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

    def close(self) -> None:
        """Close both connections."""
        for each in self._sockets:
            each.close()
