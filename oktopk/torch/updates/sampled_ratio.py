"""How much smaller the mean gradient is than the ranks' own, measured on a sample."""

from __future__ import annotations

import math
from itertools import accumulate
from typing import Any

import numpy as np
import torch

from collectives.transport import Transport
from oktopk.allreduce import GradientAllreduce
from oktopk.torch.interop import TensorMemory
from oktopk.torch.replica import Replica

_SHARE, _LEAST, _MOST = 1000, 4096, 65536  # one element in so many; elements at least and at most
_FOLLOWED = 0.2  # weight of a new measurement


class SampledRatio:
    """The squared norm of the mean gradient over the mean of the replicas' squared norms, in [1/R, 1] for R replicas.

    A replica is a rank or, in two levels, a host, whose ranks have equal gradients; means are over the ranks. The ratio is 1/R
    where the replicas' gradients are noise alone, and 1 where they are equal. An optimizer that divides by the size of a
    replica's own gradient takes steps that are too short by the root of it: the mean of R steps is as short as the mean gradient,
    and what it was divided by is not.

    Args:
        replica: whose gradients are sampled: every m-th element of this rank's tensors, other ones in each measurement. Where it
            is sharded, the norms are those of its whole gradient.
        reducer: of the ranks. Collective.
        memory: of both.

    Memory and traffic: 4 bytes for each of a thousandth of the elements, 4,096 to 65,536; `measure` sums them densely, in two
        levels between the first ranks of the hosts, which tell the others of their host, and as `Replica.sums` of it.
    """

    def __init__(
        self,
        replica: Replica,
        reducer: GradientAllreduce,
        memory: TensorMemory,
    ) -> None:
        self._replica, self._memory = replica, memory
        parameters = replica.tensors
        # of noise alone, also where hosts have unlike numbers of ranks
        self._least = 1 / len(set(reducer.hosts or range(reducer.transport.size)))
        self._host: Transport | None = None
        self._ranks, among = 1, reducer.transport
        if (group := reducer.group) is not None:
            self._host, self._ranks, among = group.host, group.host.size, group.between or among
        sizes = [parameter.numel() for parameter in parameters]
        self._starts = [0, *accumulate(sizes)][:-1]
        length = sum(sizes)
        self._stride = max(1, length // min(max(length // _SHARE, _LEAST), _MOST))
        # the sample, then its squared norm and 1 for a rank that has one; of a host times its ranks
        self._sample = torch.zeros(
            -(-length // self._stride) + 2, dtype=torch.float32, device=parameters[0].device
        )
        self._sum: Any = None
        if self._host is None or self._host.rank == 0:
            with memory.stream_scope():
                timeout = reducer.settings.timeout
                self._sum = among.dense_allreduce(memory.array(self._sample), timeout)
        self.measured = 0
        self.squares: tuple[float, float] = (0.0, 0.0)
        """Of the mean gradient and of the ranks', averaged over the measurements."""

    @property
    def scale(self) -> float:
        """One over the root of the ratio; 1 before the first measurement."""
        of_mean, mean = self.squares
        if not mean > 0:
            return 1.0
        return 1 / math.sqrt(min(max(of_mean / mean, self._least), 1.0))

    @torch.no_grad()
    def measure(self) -> None:
        """Measure the gradients as they are now. Collective. A replica whose gradient is not finite, or missing, is left out."""
        if self._sum is not None:
            self._measure_between()
        if self._host is not None:
            own = np.array(self.squares, np.float64).view(np.int64)
            self.squares = tuple(self._host.allgather_control(own)[0].view(np.float64).tolist())
        self.measured += 1

    def _measure_between(self) -> None:
        """Sum the samples of those that take part. Collective among them."""
        sample, offset = self._sample, self.measured * 7919 % self._stride
        pieces = []
        for parameter, start in zip(self._replica.tensors, self._starts, strict=True):
            first, size = (offset - start) % self._stride, parameter.numel()
            if first >= size:
                continue
            if parameter.grad is not None:
                pieces.append(parameter.grad.reshape(-1)[first :: self._stride])
            else:
                pieces.append(sample.new_zeros(-(-(size - first) // self._stride)))
        own = torch.cat(pieces).float()
        square = own.square().sum()
        here = torch.isfinite(square)
        if not self._replica.sharded:
            # with no gradient a replica steps as little as with one that is not finite
            here &= any(parameter.grad is not None for parameter in self._replica.tensors)
        sample.zero_()
        sample[: len(own)] = torch.where(here, own, 0.0)
        sample[-2], sample[-1] = torch.where(here, square, 0.0), here
        if self._ranks > 1:
            sample *= self._ranks
        with self._memory.stream_scope():
            self._sum.run()
        total, ranks = sample[-2:].tolist()
        of_sum = float(sample[:-2].square().sum())
        if self._replica.sharded:
            # each sample stands for as many elements of its shard
            parts = [of_sum * self._stride, total * self._stride, ranks]
            (of_sum, total), alike = self._replica.sums(parts, f"measurement {self.measured}")
            if not alike:  # a shard of some replica is not finite
                return
        if not ranks or not math.isfinite(total):
            return
        new = of_sum / ranks**2, total / ranks
        weight = _FOLLOWED if self.squares[1] else 1.0
        of_mean, mean = (old + weight * (now - old) for old, now in zip(self.squares, new, strict=True))
        self.squares = of_mean, mean

    def state(self) -> dict[str, Any]:
        """What `load` continues from."""
        return {"measured": self.measured, "squares": list(self.squares)}

    def load(self, state: dict[str, Any]) -> None:
        """Continue from a `state`."""
        self.measured, self.squares = state["measured"], tuple(state["squares"])

    def close(self) -> None:
        """Free what the library holds. Collective."""
        if self._sum is not None:
            self._sum.free()
