"""The reference of a host: its ranks step as one replica, and each displaces a shard."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from oktopk.allreduce import GradientAllreduce
from oktopk.displacement import Displacement, ShardDisplacement
from oktopk.torch.gradients import missing_spans
from oktopk.torch.updates.reference_parameters import ReferenceParameters
from oktopk.torch.updates.replica_residual import HostResidual, ReplicaResidual


class HostReference(ReferenceParameters):
    """The reference of steps in two levels.

    The residual is that of the whole host, equal on its ranks, and so are the parameters that
    follow from it. Each rank displaces its shard alone: of what its own optimizer made of other
    shards nothing is taken. The displacement is multiplied by the ranks of the host, so that
    residual and update are sums over ranks as in flat steps.

    Args:
        parameters, reducer, more: as those of the base class.

    Attributes:
        stepped: (this rank's shard before the last step, after it), of the parameters' type, where
            an optimizer steps on a shard alone; else None, as the parameters hold what steps made.

    Memory: 4n bytes more, for the residual of the host. In each exchange some 20 bytes an element
        of the shard, and the parameters once more where the optimizer steps on all of them.
    """

    def __init__(self, parameters: Sequence[Tensor], reducer: GradientAllreduce, *more: Any) -> None:
        assert reducer.group is not None
        self._group, self._ranks = reducer.group, reducer.group.host.size
        self.stepped: tuple[Tensor, Tensor] | None = None
        super().__init__(parameters, reducer, *more)

    def _new_residual(self, sizes: Sequence[int]) -> ReplicaResidual:
        return HostResidual(self._reducer, self._memory, sizes, self.vector.device)

    def displacement(self, present: Sequence[int | bool], flagged: bool) -> Displacement:
        """As the base class: this rank's shard of it, times the ranks of the host.

        Each operation is rounded by itself, as in kernels.

        Memory traffic: twice the parameters where the optimizer steps on all of them, and some 60
            bytes an element of the shard.
        """
        displacement = self._displacement
        assert isinstance(displacement, ShardDisplacement)
        displacement.flagged = flagged
        group, stepped, self.stepped = self._group, self.stepped, None
        if group.shard is None or not any(present):  # the vector is zero
            return displacement
        shown, current = stepped or (self.shown_shard(), self.of_shard(self.flat()))
        vector = self._memory.tensor(displacement.vector)
        torch.sub(shown.float(), current.float(), out=vector)
        vector.mul_(self._ranks)
        absent = missing_spans([view.numel() for view in self.views], present)
        for begin, end in group.layout.spans_of_shard(absent, group.shard):
            vector[begin:end] = 0
        return displacement

    def watch(self) -> None:
        self.stepped = None
        super().watch()

    def shown_shard(self) -> Tensor:
        """round(reference - share · residual) of this rank's shard, of the parameters' type."""
        share = self.of_shard(self.residual.vector).mul_(self.share)
        return self.of_shard(self.vector).sub_(share).to(self._tensors[0].dtype)

    def of_shard(self, whole: Tensor) -> Tensor:
        """A copy of this rank's shard; empty for a rank that has none."""
        group, part = self._group, whole.new_empty(self._group.shard_length)
        return part if group.shard is None else group.layout.extract(whole, group.shard, part)
