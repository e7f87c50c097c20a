"""The residual of a replica over all parameters: the reducer's own, or that of a whole host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from oktopk.allreduce import GradientAllreduce
from oktopk.step import Spans
from oktopk.torch.gradients import missing_spans
from oktopk.torch.interop import TensorMemory


class ReplicaResidual:
    """The sum over a replica of what is not sent: here of one rank, the reducer's own.

    Args:
        reducer: whose residual it is.
        memory: of it.
        sizes: of the parameters.
    """

    def __init__(self, reducer: GradientAllreduce, memory: TensorMemory, sizes: Sequence[int]) -> None:
        self._reducer, self._memory, self._sizes = reducer, memory, list(sizes)
        self._known: tuple[Any, Tensor] | None = None  # the reducer's array, and the tensor over it

    @property
    def vector(self) -> Tensor:
        """float32[n]."""
        own = self._carried
        assert own is not None
        return own

    @property
    def array(self) -> Any:
        """The same, as kernels take it."""
        return self._reducer.residual

    def gather(self) -> None:
        """Make `vector` what the reducers of the replica have. Collective among its ranks."""

    def put(self) -> None:
        """Give the reducer what was written to `vector`."""

    def bound(self) -> None:
        """After an exchange whose sum may have overflowed: cut residuals to what the next one can sum. On every rank.

        Else each later exchange would overflow, too. A training that has come there has diverged.
        """
        if (own := self._carried) is not None:
            most = torch.finfo(torch.float32).max / 4 / self._reducer.transport.size
            own.clamp_(-most, most)

    def scale(self, factor: float, moving: Iterable[bool]) -> None:
        """Multiply by a factor what the reducer carries, before `gather`.

        Args:
            factor: 1: nothing is done.
            moving: of each parameter, whether its residual is scaled; not asked for by a factor of 1.

        Memory traffic: 8n bytes, in two levels of the shard.
        """
        if factor == 1.0 or (own := self._carried) is None:
            return
        moving = list(moving)
        if all(moving):
            own.mul_(factor)
            return
        for begin, end in self._own(missing_spans(self._sizes, [not each for each in moving])):
            own[begin:end].mul_(factor)

    @property
    def _carried(self) -> Tensor | None:
        """What the reducer of this rank carries; None for a rank of a host that has no shard."""
        array: Any = self._reducer.residual
        if not len(array):
            return None
        if self._known is None or self._known[0] is not array:
            self._known = array, self._memory.tensor(array)
        return self._known[1]

    def _own(self, spans: Spans) -> Spans:
        """Where the reducer carries spans of the vector."""
        return spans


class HostResidual(ReplicaResidual):
    """That of a host: each rank has a shard of it in the reducer, and a copy of all.

    Args:
        device: of the parameters.

    Memory: 4n bytes.
    Traffic: that of `gather` alone.
    """

    def __init__(
        self, reducer: GradientAllreduce, memory: TensorMemory, sizes: Sequence[int], device: torch.device
    ) -> None:
        super().__init__(reducer, memory, sizes)
        assert reducer.group is not None
        self._group = reducer.group
        self._whole = torch.zeros(reducer.length, dtype=torch.float32, device=device)
        self._array = memory.array(self._whole)

    @property
    def vector(self) -> Tensor:
        """float32[n], as `gather` left it."""
        return self._whole

    @property
    def array(self) -> Any:
        return self._array

    def gather(self) -> None:
        """As the base class.

        Traffic: that of `HostGroup.share_shards`.
        """
        with self._memory.stream_scope():
            self._group.share_shards(self._reducer.residual, self._array)

    def put(self) -> None:
        """Write this rank's shard to the reducer's."""
        if self._group.shard is not None:
            with self._memory.stream_scope():
                self._group.layout.extract(self._array, self._group.shard, self._reducer.residual)

    def _own(self, spans: Spans) -> Spans:
        shard = self._group.shard
        return () if shard is None else self._group.layout.spans_of_shard(spans, shard)
