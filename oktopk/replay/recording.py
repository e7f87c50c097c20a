"""One rank's step on arrays without values, by the library's own executors and methods."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import SimpleNamespace
from typing import Any, cast

from collectives.grid import Grid, place_in_grid, rows_of_grid
from oktopk.backend import Backend
from oktopk.cpu.histograms import LEVELS
from oktopk.displacement import ShardDisplacement
from oktopk.error_feedback import ErrorFeedback
from oktopk.host_executor import HostExecutor
from oktopk.host_group import HostGroup
from oktopk.levels import Layout, levels_taken
from oktopk.message_executor import MessageExecutor
from oktopk.methods import METHODS
from oktopk.regions import equal_boundaries
from oktopk.replay.valueless import (
    HIGH,
    Extent,
    Group,
    Record,
    ValuelessBackend,
    ValuelessKernels,
    ValuelessTransport,
    Workload,
)
from oktopk.results import StageTimer
from oktopk.settings import DENSE_ABOVE, Settings, entries_kept, wire_taken
from oktopk.shard_group import WHOLE
from oktopk.step import Plan

_THRESHOLD = HIGH << LEVELS[0][0]
"""Bits of thresholds that earlier steps left: the larger of the two magnitudes that values have."""


@dataclass(frozen=True)
class Step:
    """A step that is to be replayed.

    Attributes:
        method: a name in METHODS.
        length: elements of the gradient (n).
        hosts: that the ranks are on.
        ranks_per_host: equal on all hosts; consecutive ranks share one.
        settings: of which density, wire, levels, exchange, bucket_rounds, rotate and
            balance_trigger act here.
        exact: it computes exact thresholds and new region boundaries; else it is a regular one.
        updates: it sends what the optimizer changed; else gradients. In two levels hosts sum
            nothing of it, and gather their residual afterwards.
    """

    method: str
    length: int
    hosts: int
    ranks_per_host: int = 1
    settings: Settings = field(default_factory=Settings)
    exact: bool = False
    updates: bool = False

    @property
    def ranks(self) -> int:
        """Of all hosts."""
        return self.hosts * self.ranks_per_host

    @cached_property
    def layout(self) -> Layout:
        """Of the gradient over the ranks."""
        hosts = tuple(rank // self.ranks_per_host for rank in range(self.ranks))
        return Layout(hosts, self.length)

    @cached_property
    def two_levels(self) -> bool:
        """Whether a host's ranks sum their gradients first.

        Raises:
            ValueError: the settings ask for it, and the method cannot.
        """
        if self.hosts < 2 or self.ranks_per_host < 2:
            return False
        flat_reason = METHODS[self.method].flat_reason()
        return levels_taken(self.settings.levels, self.layout, flat_reason)[0] == "hosts"

    @property
    def among(self) -> int:
        """Ranks that reduce a part with each other."""
        return self.hosts if self.two_levels else self.ranks

    @property
    def wire(self) -> str:
        """The settings' wire; of "auto" what `GradientAllreduce` takes."""
        return wire_taken(self.settings.wire, self.hosts, METHODS[self.method].coded)

    def problem(self) -> str:
        """Why it cannot be replayed, in a sentence; "" if it can."""
        if self.ranks < 2:
            return "one rank exchanges nothing: give several hosts or several ranks a host"
        density, exchange = self.settings.density, self.settings.exchange
        if exchange == "grid" and not METHODS[self.method].over_grid:
            return f"exchange 'grid' is not for {self.method}: it is a way of oktopk"
        if not METHODS[self.method].sparse:
            return ""
        if entries_kept(density, self.length) < self.ranks:
            return (
                f"density {density:g} of {self.length} elements are fewer entries than "
                f"{self.ranks} ranks: regions without entries cannot be replayed"
            )
        if density > DENSE_ABOVE:
            return f"density {density:g} is above {DENSE_ABOVE}: steps are dense"
        return ""


def _nothing(gradient: object) -> None:
    """Gradients have no values that would be copied."""


class _OfPeer(Extent):
    """A shard in the memory of another rank of the host."""


class _Layout(Layout):
    """A layout that records what is copied."""

    record: Record

    def insert(self, part: Any, shard: int, whole: object) -> None:
        self.record.compute("peer" if isinstance(part, _OfPeer) else "vector", len(part))


class _Group(HostGroup):
    """The ranks of a host, without values."""

    def __init__(
        self,
        step: Step,
        rank: int,
        connect: Callable[[Group], ValuelessTransport],
        backend: ValuelessBackend,
        record: Record,
    ) -> None:
        many = step.ranks_per_host
        self.layout = _Layout(step.layout.hosts, step.length)
        object.__setattr__(self.layout, "record", record)  # it is frozen
        self.host = connect(Group(1, many))
        self.holders = connect(Group(1, many))
        self.between = connect(Group(many, step.hosts))
        self.shard = rank % many
        self.gradient = cast(Any, Extent(step.length, 4))
        self._windows, self._limit = None, None
        self._backend = cast(Any, backend)
        self._shared: Any = SimpleNamespace(publish=_nothing, shard_of=self._shard_of)
        self._part = cast(Any, self._shard_of(self.shard, self.shard_length))
        self._being_read = False
        self._sum = cast(Any, self._part)
        self._record, self._ranks = record, many

    def sum(self, at_once: bool) -> Any:
        """The sum reads this shard of every rank's gradient, of the others from their memory."""
        self._record.compute("vector", self.shard_length)
        self._record.compute("peer", self.shard_length * (self._ranks - 1))
        return self._part

    def _shard_of(self, number: int, length: int) -> Extent:
        return (Extent if number == self.shard else _OfPeer)(length, 4)


def record_step(step: Step, rank: int) -> Record:
    """What a rank does in a step. Runs the executors and methods of the library.

    Raises:
        ValueError: the step cannot be replayed.
    """
    return _recorded(step, rank)[0]


def _recorded(step: Step, rank: int) -> tuple[Record, Grid | None]:
    """As `record_step`, and the rank's connections in the grid."""
    if problem := step.problem():
        raise ValueError(problem)
    kind, among = METHODS[step.method], step.among
    shards = step.ranks_per_host if step.two_levels else 1
    # the same on all ranks: whole entries for each region of each shard
    each = among * shards
    k = max(each, round(entries_kept(step.settings.density, step.length) / each) * each)
    length = -(-step.length // shards)

    selected = kind.local_k(k, among) // shards if kind.sparse else length
    kept = k if kind.name == "gtopk" else k // each
    record = Record()
    kernels = ValuelessKernels(record, Workload(selected, kept))
    backend = ValuelessBackend(kernels)
    settings = replace(step.settings, wire=cast(Any, step.wire))
    connect = _connecting(step, rank, record, kernels)
    whole = connect(Group(1, step.ranks))
    host = _Group(step, rank, connect, backend, record) if step.two_levels else None
    transport = whole if host is None else host.between
    assert transport is not None
    if settings.exchange == "grid" and rows_of_grid(among) > 1:
        transport.grid = _grid(step, rank, shards, connect)
    shard_group = WHOLE if host is None else host.shard_group
    method = kind(length, transport, cast(Any, kernels), settings, shard_group)
    carried = None if host is None else length
    vectors = ErrorFeedback(cast(Backend, backend), step.length, settings, kind.sparse, carried)
    executor: MessageExecutor | HostExecutor = MessageExecutor(method, vectors)
    if host is not None:
        executor = HostExecutor(method, vectors, host, whole)
    method.load_state_dict(_used(method.state_dict(), length, among))
    record.ops.clear()
    plan = Plan(k, step.exact, step.exact, 1 / step.ranks, StageTimer())
    gradient: Any = Extent(step.length, 4)
    if step.updates and host is not None:
        gradient = ShardDisplacement(cast(Any, SimpleNamespace(length=step.length)), host.new_shard())
    executor.begin(gradient, plan)
    if step.updates and host is not None:  # as `HostResidual.gather`
        record.compute("vector", host.shard_length)  # to where the others read it
        host.share_shards(host.new_shard(), gradient)
    return record, transport.grid


def _grid(step: Step, rank: int, shards: int, connect: Callable[[Group], ValuelessTransport]) -> Grid:
    """The connections of a rank in the grid; there is one for each of a host's shards."""
    place = place_in_grid(rank // shards, step.among)

    def joined(places: Iterable[int]) -> ValuelessTransport:
        return connect(Group.of([shards * other + rank % shards for other in places]))

    row, column = joined(place.members), joined(range(place.first, place.stop))
    if column.size > rows_of_grid(step.among):  # its last rank has summed nothing that it could send
        column.silent = column.size - 1
        if column.rank == column.silent:
            column.like = cast(Grid, _recorded(step, rank - shards)[1]).column
    return Grid(place, row, column)


def record_mean(step: Step, rank: int) -> Record:
    """What a rank does for the mean of its host's gradients, as `HostReplica` takes it.

    Gradients are copied into what the other ranks read, and back.
    """
    record = Record()
    kernels = ValuelessKernels(record, Workload(0, 0))
    connect = _connecting(step, rank, record, kernels)
    host = _Group(step, rank, connect, ValuelessBackend(kernels), record)
    record.compute("vector", step.length)
    host.mean(False)
    record.compute("vector", step.length)
    return record


def _connecting(
    step: Step, rank: int, record: Record, kernels: ValuelessKernels
) -> Callable[[Group], ValuelessTransport]:
    """What makes the transports of a rank to groups of ranks."""

    def connect(group: Group) -> ValuelessTransport:
        return ValuelessTransport(rank, group, record, kernels, step.ranks_per_host)

    return connect


def _used(state: dict[str, Any], length: int, ranks: int) -> dict[str, Any]:
    """The state of a method that has taken steps."""
    if "selection" in state:
        state["selection"] |= {"bits": _THRESHOLD, "needs_exact": False}
    if "threshold" in state:
        state["threshold"] |= {"bits": _THRESHOLD}
    if "boundaries" in state:
        boundaries = equal_boundaries(length, ranks)
        state |= {"boundaries": boundaries, "splits": boundaries[1:-1]}
    return state
