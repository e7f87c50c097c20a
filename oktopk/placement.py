"""Who holds which part of the vector, and who reduces it: flat, or in two levels."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.errors import Caught
from collectives.grid import Grid, connect_grid
from collectives.sparse import Array, SparseVector, Vector
from collectives.traffic import Traffic
from collectives.transport import Transport
from oktopk.backend import Backend
from oktopk.cuda.p2p_executor import P2PExecutor
from oktopk.displacement import AdamWDisplacement, Displacement, ParameterDisplacement, ShardDisplacement
from oktopk.error_feedback import ErrorFeedback
from oktopk.host_executor import HostExecutor
from oktopk.host_group import HostGroup
from oktopk.message_executor import MessageExecutor
from oktopk.methods import Method
from oktopk.methods.oktopk import OkTopk
from oktopk.settings import Settings
from oktopk.step import Executor, Gradient, Spans
from oktopk.thresholds import NOTHING


class Placement:
    """Flat: each rank holds a residual of the whole vector, and all ranks reduce it. `TwoLevels` overrides what differs.

    Args:
        transport: of all ranks.
        backend: of the vectors.
        length: elements of the vector (n).

    Attributes:
        among: the ranks that reduce the part that this rank holds.
        carried: elements of that part; shards: how many parts the vector has.
        first: whether this rank is the first of those that hold one residual together.
        in_first: whether this rank holds a part of the first residual.
        group, hosts, gradient_buffer: as those of `GradientAllreduce`.
        p2p_problem: why steps do not use peer memory, in a sentence; "" if they may.
    """

    levels = "flat"
    group: HostGroup | None = None
    hosts: list[int] | None = None
    gradient_buffer: Array | None = None
    p2p_problem = ""
    _grid: Grid | None = None

    def __init__(self, transport: Transport, backend: Backend, length: int) -> None:
        self.among = transport
        self.carried, self.shards = length, 1
        self.first, self.in_first = True, transport.rank == 0
        self._transport, self._backend, self._length = transport, backend, length
        self._parts: list[Transport | HostGroup] = [transport]

    def open_grid(self) -> None:
        """Connect the ranks that reduce what this rank holds for exchanges over a grid, once. Collective."""
        if self._grid is None:
            self._grid = self.among.grid = connect_grid(self.among)

    def forget_scratch(self) -> None:
        """Free what a step writes before it reads it; between steps, where the next one needs far less of it."""
        of_grid = [] if self._grid is None else [self._grid.row, self._grid.column]
        for transport in (self._transport, self.among, *of_grid):
            transport.workspace.forget()

    def vectors(self, settings: Settings, sparse: bool, update: Vector | None) -> ErrorFeedback:
        """The update of the whole vector, and the residual of what this rank holds. As `ErrorFeedback`."""
        return ErrorFeedback(self._backend, self._length, settings, sparse, update=update)

    def method(self, kind: type[Method], settings: Settings) -> Method:
        """A method that reduces what this rank holds."""
        return kind(self.carried, self.among, self._backend.kernels, settings)

    def executor(self, method: Method, vectors: ErrorFeedback, settings: Settings) -> Executor:
        """What runs the steps of a method that reduces what this rank holds."""
        if isinstance(method, OkTopk) and not method.p2p_unavailable_reason(settings):
            make_launches = self._backend.p2p_launches(self._transport, self._length, settings)
            if make_launches is not None:
                return P2PExecutor(method, vectors, make_launches)
        return MessageExecutor(method, vectors)

    def withhold(self, vectors: ErrorFeedback, absent: Spans) -> None:
        """Keep the residual out of the next step where this rank has no gradient; in two levels the executor does."""
        vectors.withhold(absent)

    def displacement(
        self, sizes: Sequence[int], element_type: str, reference: Vector, share: float
    ) -> ParameterDisplacement:
        """As `GradientAllreduce.displacement`."""
        return self._backend.kernels.displacement(sizes, element_type, reference, share)

    def adamw_displacement(self, sizes: Sequence[int], element_type: str) -> AdamWDisplacement:
        """As `GradientAllreduce.adamw_displacement`."""
        return self._backend.kernels.adamw_displacement(sizes, element_type)

    def displaced(self, displacement: Any, vectors: ErrorFeedback, readable: bool) -> Gradient:
        """What a step takes for a displacement: the displacement, if the step's kernels read it.

        Else it is added to the residual now, and the step takes zeros, the first of them NaN if the displacement is flagged.

        Args:
            readable: whether the step's kernels read a displacement.
        """
        vectors.pending = True
        if readable:
            return displacement
        nonfinite = self._add(displacement, vectors)
        zeros = self._backend.zeros(self._length)
        if nonfinite or displacement.flagged:
            zeros[:1] = np.nan
        return zeros

    def _add(self, displacement: Displacement | Vector, vectors: ErrorFeedback) -> bool:
        """Add to the residual what is finite; whether something was not."""
        kernels = self._backend.kernels
        nothing = self._transport.workspace.entries("nothing", 1 + kernels.BLOCK)
        return bool(kernels.accumulate_select(displacement, vectors.residual, NOTHING, nothing).nonfinite > 0)

    def measured(self, gradient: Any, vectors: ErrorFeedback) -> tuple[Array, Vector | None]:
        """What this rank adds to a step, as two vectors of n elements; None for a residual of zero."""
        return gradient, vectors.residual

    def selected(
        self, vectors: ErrorFeedback, method: Method
    ) -> tuple[SparseVector | None, NDArray[np.int64] | None]:
        """What this rank selected in the last step, in the whole vector, and its regions, or None. Call it once a step."""
        return vectors.selected, method.boundaries

    def whole_residual(self, vectors: ErrorFeedback) -> NDArray[np.float32] | None:
        """float32[n] on the host, the residual, in two levels of the host, equal on its ranks; None where it is zero."""
        return vectors.state_dict()["residual"]

    def own_part(self, whole: Vector) -> Vector:
        """The part that this rank holds of float32[n], on host or device; a copy where it is not all."""
        return whole

    @contextmanager
    def agreed(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
        """As `Transport.together`. Collective.

        Yields:
            Dicts of what must be equal on all ranks, on those that hold the same part, and on those that hold one residual.
        """
        with self._transport.together(ValueError) as common:
            yield common, common, {}

    def group_of_means(self) -> HostGroup:
        """The ranks of this host, which can sum their gradients in float32.

        Raises:
            RuntimeError: they cannot, on every rank alike.
        """
        raise RuntimeError("steps are flat: no rank sums its gradient with others of its host")

    @contextmanager
    def expecting(self, what: str, seconds: float, advice: str) -> Iterator[None]:
        """As `Transport.expect_all`, among all ranks and those of a part or host, until a `with` block ends."""
        try:
            for part in self._parts:
                part.expect_all(what, seconds, advice)
            yield
        finally:
            for part in self._parts:  # through peer memory there was no control operation
                part.expect_none()

    def take_traffic(self) -> Traffic:
        """What this rank has sent since the last call."""
        return sum((part.take_traffic() for part in self._parts), Traffic())

    def close(self) -> None:
        """Free what is held beside the transport of all ranks. Collective."""
        if self._grid is not None:
            self._grid.close()


class TwoLevels(Placement):
    """A host sums its gradients, each rank holds a shard of its residual, and ranks with the same shard reduce it between hosts.

    Args:
        transport, backend: as `Placement`.
        group: the ranks of this host.
    """

    levels = "hosts"
    group: HostGroup
    p2p_problem = "steps in two levels exchange messages between hosts"

    def __init__(self, transport: Transport, backend: Backend, group: HostGroup) -> None:
        layout = group.layout
        super().__init__(transport, backend, layout.length)
        self.group, self.gradient_buffer = group, group.gradient
        self.among = group.between or group.host
        self.carried, self.shards, self.hosts = group.shard_length, layout.shards, list(layout.hosts)
        self.first, self.in_first = group.host.rank == 0, layout.hosts[transport.rank] == layout.hosts[0]
        self._parts.append(group)

    def open_grid(self) -> None:
        if self.group.between is not None:
            super().open_grid()

    def forget_scratch(self) -> None:
        super().forget_scratch()
        for transport in (self.group.host, self.group.between, self.group.holders):
            if transport is not None:
                transport.workspace.forget()

    def vectors(self, settings: Settings, sparse: bool, update: Vector | None) -> ErrorFeedback:
        return ErrorFeedback(self._backend, self._length, settings, sparse, self.carried, update)

    def method(self, kind: type[Method], settings: Settings) -> Method:
        part = self.carried, self.among, self._backend.kernels
        return kind(*part, settings, self.group.shard_group)

    def executor(self, method: Method, vectors: ErrorFeedback, settings: Settings) -> Executor:
        return HostExecutor(method, vectors, self.group, self._transport)

    def withhold(self, vectors: ErrorFeedback, absent: Spans) -> None:
        pass

    def displacement(
        self, sizes: Sequence[int], element_type: str, reference: Vector, share: float
    ) -> ParameterDisplacement:
        whole = super().displacement(sizes, element_type, reference, share)
        return ShardDisplacement(whole, self.group.new_shard())

    def adamw_displacement(self, sizes: Sequence[int], element_type: str) -> AdamWDisplacement:
        raise ValueError("AdamW in the pass that selects is for flat steps")

    def displaced(self, displacement: Any, vectors: ErrorFeedback, readable: bool) -> Gradient:
        vectors.pending = True
        vectors.put_back()
        displacement.nonfinite = displacement.flagged
        if len(displacement.vector):
            displacement.nonfinite = self._add(displacement.vector, vectors) or displacement.flagged
            displacement.vector.fill(0)
        return displacement

    def measured(self, gradient: Any, vectors: ErrorFeedback) -> tuple[Array, Vector | None]:
        group, residual = self.group, None
        if vectors.residual is not None:
            residual = self._backend.zeros(self._length)
            if group.shard is not None:
                group.layout.insert(vectors.residual, group.shard, residual)
        if isinstance(gradient, ShardDisplacement):  # it is in the residual
            gradient = self._backend.zeros(self._length)
        return gradient, residual

    def selected(
        self, vectors: ErrorFeedback, method: Method
    ) -> tuple[SparseVector | None, NDArray[np.int64] | None]:
        selected = vectors.selected
        return None if selected is None else self.group.in_whole_indices(selected), None

    def whole_residual(self, vectors: ErrorFeedback) -> NDArray[np.float32] | None:
        vectors.put_back()
        if vectors.residual is None:
            return None
        whole = self._backend.zeros(self._length)
        self.group.share_values(vectors.residual, whole)
        return self._backend.to_host(whole)

    def own_part(self, whole: Vector) -> Vector:
        part = whole[: self.carried].copy()
        shard = self.group.shard
        return part if shard is None else self.group.layout.extract(whole, shard, part)

    @contextmanager
    def agreed(self) -> Iterator[tuple[dict[str, Any], dict[str, Any], dict[str, Any]]]:
        self._transport.barrier()  # names those that do not come
        group, number = self.group, self.group.layout.hosts[self._transport.rank]
        of_shard: dict[str, Any] = {}
        learned: dict[str, Any] = {}
        whom = (group.between, of_shard, f"shard {group.shard}"), (group.holders, learned, f"host {number}")
        with self._transport.together(ValueError) as common:
            with Caught() as caught:
                yield common, of_shard, learned
            failed = caught.error
            for transport, values, where in whom:
                try:
                    if transport is not None:
                        transport.agree(values)
                except ValueError as error:
                    failed = failed or ValueError(f"among the ranks of {where} {error}")
            if failed is not None:
                raise failed

    def group_of_means(self) -> HostGroup:
        if self.group.gradient.dtype != np.float32:
            raise RuntimeError("means of a host's gradients are float32: take gradient_type='float32'")
        return self.group

    def close(self) -> None:
        super().close()
        self.group.close()
