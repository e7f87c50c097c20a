"""What `settings="auto"` takes: links are measured, steps predicted, and all ranks agree on the fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any

from collectives.host_transport import HostTransport
from oktopk.bench.document import links_document
from oktopk.levels import Layout, levels_taken
from oktopk.methods import METHODS
from oktopk.plan.rows import (
    EVERY,
    MOST_FLAT,
    MOST_HOSTS,
    Job,
    Row,
    best_first,
    is_soon_replayed,
    least_seconds,
    rows_of,
    steps_of,
)
from oktopk.replay.links import DEVICES, LinksError, links_of
from oktopk.replay.network import Level, Network
from oktopk.replay.prediction import Kernels
from oktopk.replay.program import is_shared
from oktopk.replay.recording import Step
from oktopk.settings import Settings

SECONDS = 2.0
"""That links are measured for, at most."""

WORTH = 1.25
"""Several steps between exchanges are taken where steps are predicted to be so many times as fast."""

_SHARE = 0.9  # of SECONDS, for messages


@dataclass(frozen=True)
class Choice:
    """What was chosen, equal on all ranks.

    Attributes:
        text: what, and why, in a sentence.
        settings: keywords of `Settings`; empty: the defaults.
        every: steps between two exchanges.
    """

    text: str
    settings: dict[str, Any] = field(default_factory=dict)
    every: int = 1


@dataclass(frozen=True)
class Wanted:
    """What is to be exchanged, and what of it may be chosen.

    Attributes:
        length: elements (n).
        method: a name in METHODS.
        settings: density and ranks_per_host are taken as they are, wire, levels and exchange where
            they are not "auto".
        device: "cpu" or "cuda".
        updates: whether updates are sent, whose levels are not chosen: they decide what is a
            replica, which changes the loss.
        compute: seconds of a dense step without communication, where `every` may be chosen; else
            None.
    """

    length: int
    method: str
    settings: Settings
    device: str
    updates: bool
    compute: float | None = None


def choose(transport: HostTransport, wanted: Wanted) -> Choice:
    """Measure the links, and take what is predicted to be fastest. Collective.

    Rank 0 predicts, as `oktopk-plan` does, and tells the others. No wire that rounds is taken, and
    `every` is above 1 only where `compute` is known.

    Args:
        transport: of all ranks.
        wanted: equal on all ranks.

    Raises:
        ValueError: `ranks_per_host` cannot be; on every rank alike.

    Traffic: messages of at most 32 MB between pairs of ranks, for at most SECONDS in all.
    """
    if transport.size < 2:
        return _default("one rank has no links")
    transport.group_by_host(wanted.settings.ranks_per_host)
    if max(transport.hosts) == 0:
        return _default("all ranks share a host, and only links between hosts are measured")
    if wanted.device == "cuda" and transport.by_nccl:
        return _default("gradients travel by NCCL, whose links are not measured")
    if wanted.method not in METHODS or not METHODS[wanted.method].sparse:
        return _default("dense steps have no such settings")
    if problem := Step(wanted.method, wanted.length, transport.size, 1, wanted.settings).problem():
        return _default(problem)
    seconds = _SHARE * SECONDS
    document = links_document(transport, seconds / 40, seconds, all_pairs=False)
    prediction = None
    with transport.together():
        if transport.rank == 0:
            try:
                prediction = predicted(document, [*transport.hosts], wanted)
            except (LinksError, ValueError) as error:
                prediction = _default(str(error))
    return transport.allgather_objects(prediction)[0]


def predicted(document: dict[str, Any], hosts: list[int], wanted: Wanted) -> Choice:
    """What is predicted to be fastest over the links of a document. Not collective.

    Args:
        document: as `links_document` returns it.
        hosts: the number of each rank's host.

    Raises:
        LinksError, ValueError: nothing can be predicted; one sentence.
    """
    links = links_of(document, "measured")
    between = document["between"]
    assert links.between is not None
    if between["alone"][-1]["seconds"] < 2 * between["latency"]:
        raise LinksError(f"bandwidth is not known within {SECONDS:g} s where messages take so long")
    job = Job(wanted.length, wanted.compute or 0.0, len(links.hosts), links.ranks_per_host)
    levels = _levels(hosts, wanted)
    most = MOST_FLAT if job.ranks_per_host > 1 else MOST_HOSTS
    if job.ranks > most and "flat" in levels:
        levels.remove("flat")
    if not levels:
        raise LinksError(f"flat steps of more than {most} ranks take long to predict")
    exchange = wanted.settings.exchange
    for among in (job.ranks if level == "flat" else job.hosts for level in levels):
        if exchange == "grid" and not is_soon_replayed(among):
            raise LinksError(f"a grid of {among}, whose columns differ, takes long to predict")
    network = links.network(job.hosts, job.ranks_per_host)
    wires = [wanted.settings.wire]
    if wires == ["auto"]:
        wires = ["plain", "float32"] if METHODS[wanted.method].coded else ["plain"]
    method, density = [wanted.method], [wanted.settings.density]
    steps = [*steps_of(job, method, density, wires, levels, wanted.updates, exchange)]
    if job.ranks > MOST_FLAT and job.ranks_per_host == 1 and not all(map(is_shared, steps)):
        raise LinksError(f"steps of {job.ranks} ranks that send unlike many entries take long to predict")
    rows = _fastest(job, network, DEVICES[wanted.device], steps, [1] if wanted.compute is None else EVERY)
    best = best_first([row for row in rows if row.every == 1])[0]
    seldom = best_first(rows)[0]
    if best.seconds > WORTH * seldom.seconds:
        best = seldom
    chosen = {"wire": best.wire}
    if best.grid:  # "auto" is direct
        chosen["exchange"] = "grid"
    if best.levels == "flat":  # "auto" is hosts, and flat where a host's ranks share no memory
        chosen["levels"] = "flat"
    chosen = {name: value for name, value in chosen.items() if getattr(wanted.settings, name) == "auto"}
    return Choice(_sentence(best, job, between["latency"], links.between), chosen, best.every)


def _fastest(
    job: Job, network: Network, kernels: Kernels, steps: list[Step], every: Sequence[int]
) -> list[Row]:
    """Rows of steps, the fastest one among them: those that cannot be faster are left out, as whole replays take long."""
    bounds = [job.compute + least_seconds(step, network, kernels) for step in steps]
    rows: list[Row] = []
    for bound, step in sorted(zip(bounds, steps, strict=True), key=itemgetter(0)):
        if any(row.seconds < bound for row in rows if row.every == 1):
            break
        rows += rows_of(job, network, kernels, step, every)
    return rows


def _levels(hosts: list[int], wanted: Wanted) -> list[str]:
    """Those that may be chosen."""
    asked = wanted.settings.levels
    flat_reason = METHODS[wanted.method].flat_reason()
    default = levels_taken(asked, Layout(tuple(hosts), wanted.length), flat_reason)[0]
    free = asked == "auto" and default == "hosts" and not wanted.updates
    return ["hosts", "flat"] if free else [default]


def _default(reason: str) -> Choice:
    return Choice(f"the defaults, as {reason}")


def _sentence(row: Row, job: Job, latency: float, link: Level) -> str:
    names = f"wire={row.wire!r}, levels={row.levels!r}" + ", exchange='grid'" * row.grid
    what = "an exchange"
    if job.compute:
        names += f", every={row.every}"
        what = "a step"
    return (
        f"{names}, as {what} is predicted to take {1e3 * row.seconds:,.2f} ms over links between "
        f"hosts of {1e6 * latency:,.1f} us and {1 / link.G / 1e9:.3g} GB/s, measured"
    )


SHARDED = _default("parameters are sharded, whose exchanges are not predicted")
