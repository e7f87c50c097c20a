"""The residual of a replica over all parameters: the reducer's own, or that of a whole host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from oktopk.allreduce import GradientAllreduce
from oktopk.torch.gradients import missing_spans
from oktopk.torch.interop import TensorMemory


class ReplicaResidual:
    """The sum over a replica of what is not sent.

    In two levels each rank has a shard of it in the reducer, and a copy of all.

    Args:
        reducer: whose residual it is.
        memory: of it.
        sizes: of the parameters.
        device: of the parameters.

    Memory: in two levels 4n bytes.
    Traffic: that of `gather` alone.
    """

    def __init__(
        self, reducer: GradientAllreduce, memory: TensorMemory, sizes: Sequence[int], device: torch.device
    ) -> None:
        self._reducer, self._memory, self._sizes = reducer, memory, list(sizes)
        self._whole: Tensor | None = None  # of the host, in two levels
        if reducer.group is not None:
            self._whole = torch.zeros(reducer.length, dtype=torch.float32, device=device)
            self._whole_array = memory.array(self._whole)
        self._own: tuple[Any, Tensor] | None = None  # the reducer's array, and the tensor over it

    @property
    def vector(self) -> Tensor:
        """float32[n], in two levels as `gather` left it."""
        if self._whole is not None:
            return self._whole
        array = self._reducer.residual
        if self._own is None or self._own[0] is not array:
            self._own = array, self._memory.tensor(array)
        return self._own[1]

    @property
    def array(self) -> Any:
        """The same, as kernels take it."""
        return self._reducer.residual if self._whole is None else self._whole_array

    def gather(self) -> None:
        """In two levels copy what the reducers have. Collective among the ranks of the host.

        Traffic: in two levels that of `HostGroup.share_shards`; in flat steps none.
        """
        if (group := self._reducer.group) is not None:
            with self._memory.stream_scope():
                group.share_shards(self._reducer.residual, self._whole_array)

    def put(self) -> None:
        """After a write to `vector`: in two levels write this rank's shard to the reducer's."""
        group = self._reducer.group
        if group is not None and group.shard is not None:
            with self._memory.stream_scope():
                group.layout.extract(self._whole_array, group.shard, self._reducer.residual)

    def bound(self) -> None:
        """After an exchange whose sum may have overflowed: cut residuals to what the next one can sum. On every rank.

        Else each later exchange would overflow, too. A training that has come there has diverged.
        """
        if (own := self._carried()) is not None:
            most = torch.finfo(torch.float32).max / 4 / self._reducer.transport.size
            own.clamp_(-most, most)

    def scale(self, factor: float, moving: Iterable[bool]) -> None:
        """Multiply by a factor, in the reducer: in two levels this rank's shard, before `gather`.

        Args:
            factor: 1: nothing is done.
            moving: of each parameter, whether its residual is scaled; not asked for by a factor of 1.

        Memory traffic: 8n bytes, in two levels of the shard.
        """
        if factor == 1.0 or (own := self._carried()) is None:
            return
        moving = list(moving)
        if all(moving):
            own.mul_(factor)
            return
        spans = missing_spans(self._sizes, [not each for each in moving])
        group = self._reducer.group
        if group is not None and group.shard is not None:
            spans = group.layout.spans_of_shard(spans, group.shard)
        for begin, end in spans:
            own[begin:end].mul_(factor)

    def _carried(self) -> Tensor | None:
        """What the reducer of this rank carries; None for a rank of a host that has no shard."""
        group = self._reducer.group
        no_shard = group is not None and group.shard is None
        return None if no_shard else self._memory.tensor(self._reducer.residual)
