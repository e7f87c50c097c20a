"""The document of measured links, which `oktopk.replay.links` reads."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from collectives.host_transport import HostTransport
from oktopk.bench.links import ASSUMED, Messages, Sweep, partner_of, rounds, rows_of
from oktopk.replay.links import KIND, VERSION


def links_document(
    transport: HostTransport, limit: float, seconds: float = math.inf, all_pairs: bool = True
) -> dict[str, Any]:
    """Measure the links inside hosts and between them. Collective.

    Args:
        transport: of two ranks at least, grouped by host.
        limit: seconds of one message above which no larger one is sent.
        seconds: that messages inside hosts and between them take at most, see `Messages`.
        all_pairs: measure all pairs of hosts, too, which takes longer the more there are.

    Returns:
        The document, equal on all ranks but for its date, without kernels and steps.
    """
    began = time.perf_counter()
    names = _host_names(transport)
    numbered = [*enumerate(transport.hosts)]
    places = [[rank for rank, host in numbered if host == number] for number in range(len(names))]
    many = min(map(len, places))
    first = [ranks[0] for ranks in places]
    inside = [pair for ranks in places for pair in zip(ranks[::2], ranks[1::2], strict=False)]
    inside = inside if many > 1 else []
    between = [(first[a], first[b]) for a, b in rounds(len(names))[0]] if len(names) > 1 else []
    within = _level(transport, inside, limit, seconds / 3)
    left = min(transport.allgather_objects(seconds - (time.perf_counter() - began)))
    beyond = _level(transport, between, limit, left, first if len(first) > 2 else ())
    pairs: list[dict[str, Any]] = []
    if beyond is not None and all_pairs:
        pairs = _pairs(transport, names, first, int(beyond["sizes"][-1]["bytes"]), limit)
    return {
        "kind": KIND,
        "version": VERSION,
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "library": transport.library,
        "device": "cpu",
        "hosts": names,
        "ranks_per_host": many,
        "inside": within,
        "between": beyond,
        "pairs": pairs,
        "kernels": None,
        "steps": [],
    }


def _host_names(transport: HostTransport) -> list[str]:
    """A name for each host: its own; where several have one, with a number."""
    own: list[str] = transport.allgather_objects(socket.gethostname())
    count = max(transport.hosts) + 1
    names = [own[transport.hosts.index(host)] for host in range(count)]
    if len({*names}) == count:
        return names
    return [f"{name}#{number}" for number, name in enumerate(names)]


def _level(
    transport: HostTransport,
    pairs: Sequence[tuple[int, int]],
    limit: float,
    seconds: float,
    ring: Sequence[int] = (),
) -> dict[str, Any] | None:
    """The sweep over the sizes of a level, by the mean of the ranks. Collective.

    Args:
        pairs: whose latency is measured.
        limit, seconds: as `Messages`.
        ring: ranks that send to the next one and receive from the one before; none: pairs do both.
    """
    if not pairs:
        return None
    neighbours = None
    if transport.rank in ring:
        at, many = ring.index(transport.rank), len(ring)
        neighbours = ring[(at + 1) % many], ring[at - 1]
    partner = partner_of(transport.rank, pairs)
    own = Messages(transport, partner, limit, bool(ring), neighbours, seconds).sweep()
    sweeps: list[Sweep] = [each for each in transport.allgather_objects(own) if each is not None]

    def mean(values: Sequence[float]) -> float:
        return sum(values) / len(values)

    def of_sizes(name: str) -> dict[int, float]:
        # a rank that takes no part has zeros
        times = [getattr(each, name) for each in sweeps]
        sizes = times[0].keys()
        return {nbytes: mean([each[nbytes] for each in times if each[nbytes]]) for nbytes in sizes}

    latency, overhead, gap = (
        mean([getattr(each, name) for each in sweeps if each.latency])
        for name in ("latency", "overhead", "gap")
    )
    times = (of_sizes(name) for name in ("sizes", "alone", "paired"))
    whole = Sweep(latency, overhead, gap, *times)
    document: dict[str, Any] = {"latency": whole.latency, "model": whole.model()}
    document["assumed"] = [*ASSUMED]  # parameters of the model
    document |= {"sizes": rows_of(whole.sizes), "alone": rows_of(whole.alone)}
    return document | {"paired": rows_of(whole.paired)}


def _pairs(
    transport: HostTransport, names: Sequence[str], first: Sequence[int], nbytes: int, limit: float
) -> list[dict[str, Any]]:
    """All pairs of hosts, in rounds. Collective."""
    measured = []
    for pairs in rounds(len(names)):
        among = [(first[a], first[b]) for a, b in pairs]
        own_pair = Messages(transport, partner_of(transport.rank, among), limit).pair(nbytes)
        everyone = transport.allgather_objects(own_pair)
        for (a, b), (one, other) in zip(pairs, among, strict=True):
            latency = (everyone[one][0] + everyone[other][0]) / 2
            rate = min(everyone[one][1], everyone[other][1])
            pair = {"hosts": [names[a], names[b]], "latency": latency}
            measured.append(pair | {"bytes_per_second": rate})
    return measured
