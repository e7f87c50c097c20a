"""What a `GradientAllreduce` is made of, found and agreed on by all ranks."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import asdict, replace
from typing import Any

from collectives.connect import Communicator, communicator, connect
from collectives.limit import Limit
from collectives.sparse import Vector, check_length
from collectives.transport import Transport
from oktopk.backend import Stream
from oktopk.devices import make_backend
from oktopk.host_group import HostGroup
from oktopk.levels import Layout, levels_taken
from oktopk.methods import METHODS, Method
from oktopk.placement import Placement, TwoLevels
from oktopk.settings import DENSE_ABOVE, Settings, check_names, exchange_taken, timeout_of, wire_taken


class Parts:
    """The parts of a `GradientAllreduce`, which has these arguments, errors and attributes. Collective: every rank must call.

    Args:
        taker: of `keywords`, which are those of `Settings`.

    Attributes:
        length, method: as given; settings: with the wire and the exchange that are used.
        placement: flat or in two levels.
        vectors: of this rank.
    """

    def __init__(
        self,
        comm: Communicator | None,
        length: int,
        method: str,
        device: str,
        gradient_type: str,
        stream: Stream | None,
        peer_memory: bool | None,
        update: Vector | None,
        taker: Callable[..., object],
        keywords: Mapping[str, Any],
    ) -> None:
        self.length, self.method = length, method
        with ExitStack() as opened:  # closed where this raises
            host = connect(communicator(comm), Limit("GradientAllreduce(...)", timeout_of(keywords)))
            opened.callback(host.close)
            with host.together(TypeError, ValueError) as alike:
                check_names(keywords, taker)
                self.settings = Settings(**keywords)
                check_length(length)
                if method not in METHODS:
                    raise ValueError(f"method {method!r} is not one of {', '.join(METHODS)}")
                kind = METHODS[method]
                if self.settings.wire not in ("auto", "plain") and not kind.coded:
                    raise ValueError(
                        f"wire {self.settings.wire!r} is not for {method}, which sends plain entries"
                    )
                if self.settings.exchange == "grid" and not kind.over_grid:
                    raise ValueError(f"exchange 'grid' is not for {method}: it is a way of oktopk")
                self.backend = make_backend(device, gradient_type, stream)
                alike |= {"length": length, "method": method, "device": device}
                alike |= {"gradient_type": gradient_type, "peer_memory": peer_memory}
                alike |= asdict(self.settings)
            with host.together():
                self.transport: Transport = self.backend.connect(host)
                opened.callback(self.transport.close)
            self.placement = self._placed(length, kind, peer_memory)
            opened.callback(self.placement.close)
            # now, when a rank without room for them can still tell the others
            sparse = kind.sparse and self.settings.density <= DENSE_ABOVE
            with self.transport.together():
                self.vectors = self.placement.vectors(self.settings, sparse, update)
            wire = wire_taken(self.settings.wire, len(set(self.transport.hosts)), kind.coded)
            self.settings = replace(self.settings, wire=wire, exchange=exchange_taken(self.settings.exchange))
            if self.settings.exchange == "grid":
                self.placement.open_grid()
            unavailable = kind.p2p_unavailable_reason(self.settings) or self.placement.p2p_problem
            self.p2p_unavailable_reason = unavailable or self.transport.open_p2p(peer_memory)
            if self.transport is not host:
                host.close()
            opened.pop_all()

    def _placed(self, length: int, method: type[Method], peer_memory: bool | None) -> Placement:
        """In two levels where the settings and the hosts allow it, else flat. Collective."""
        transport, backend, wanted = self.transport, self.backend, self.settings.levels
        transport.group_by_host(self.settings.ranks_per_host)
        layout = Layout(tuple(transport.hosts), length)
        levels, self.flat_reason = levels_taken(wanted, layout, method.flat_reason())
        if levels == "hosts":
            try:
                return TwoLevels(transport, backend, HostGroup(transport, layout, backend, peer_memory))
            except ValueError as error:
                if wanted == "hosts":
                    raise
                self.flat_reason = str(error)
                if transport.rank == 0:
                    warnings.warn(f"steps are flat, not in two levels: {error}", stacklevel=5)
        return Placement(transport, backend, length)
