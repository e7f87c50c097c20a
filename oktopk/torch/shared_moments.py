"""Second moments of Adam's kind, averaged over the replicas, a slice at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from collectives.allgatherv import balance_and_allgatherv
from collectives.codec import make_codec
from collectives.sparse import SparseVector
from collectives.split_and_reduce import split_and_reduce
from collectives.transport import Transport
from oktopk.allreduce import GradientAllreduce
from oktopk.regions import equal_boundaries
from oktopk.torch.interop import TensorMemory
from oktopk.torch.replica import Replica
from oktopk.torch.shards import local_tensor

SLICES = 100
"""Slices of the elements: each is averaged once in a thousand exchanges, see `updates`."""

_WIRE = "int8"  # nearly logarithmic: second moments of one slice span many octaves


class SharedMoments:
    """The mean of `exp_avg_sq` over the replicas, in place of each one's own, one slice of the elements after the other.

    A replica's second moments are of its own batches. With sixteen replicas, each with a sixteenth of the batch, they differ so
    much from those of other replicas that training without any selection ends above dense training. Averages that are rare do
    nearly as well as the second moments of the mean gradient.

    Args:
        inner: the wrapped optimizer. Parameters that it has no second moments of count as zero.
        replica: whose moments they are.
        reducer: of the ranks.
        memory: of both.
        slices: of the elements.

    Memory: 16 bytes for each element of a slice, and what the lists of an exchange take.
    Traffic: of each `average` a barrier; then, for each of the slice's elements that is not zero, 10.25 bits sent to its owner
        and 10.25 bits received from it, each times (P-1)/P, in P + log2 P messages, and 2 control operations. With hosts so
        between the first ranks of the hosts, which tell the others of their host 4 bytes an element.
    Source: own, docs/results/updates.md.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        replica: Replica,
        reducer: GradientAllreduce,
        memory: TensorMemory,
        slices: int = SLICES,
    ) -> None:
        self._slices = slices
        self._inner, self._replica, self._reducer, self._memory = inner, replica, reducer, memory
        self._host: Transport | None = None
        self._ranks, self._among = 1, reducer.transport
        if (group := reducer.group) is not None:
            self._host, self._ranks = group.host, group.host.size
            self._among = group.between or self._among
        self._ends = list(accumulate(tensor.numel() for tensor in replica.tensors))
        self._size = -(-self._ends[-1] // slices)
        self._own, self._mean = torch.zeros(2, self._size, device=replica.tensors[0].device)
        among = self._among
        self._codec = make_codec(_WIRE, among.kernels, among.workspace, among.size, among.ranks)

    @torch.no_grad()
    def average(self, number: int, takes: bool = True) -> None:
        """Average one slice. Collective. Nothing changes where a mean would not be finite.

        Args:
            number: of the slice, counted on and on; equal on all ranks.
            takes: whether this rank's moments become the mean. Those of a replica that has not stepped stay as they are.
        """
        self._reducer.meet("an average of second moments")
        begin = number % self._slices * self._size
        pieces = list(self._pieces(begin, min(begin + self._size, self._ends[-1])))
        own, mean = self._own.zero_(), self._mean.zero_()
        for moments, here, there in pieces:
            own[there].copy_(moments.reshape(-1)[here])
        own.copy_(torch.where(torch.isfinite(own), own * self._ranks, 0.0))
        if self._host is None or self._host.rank == 0:
            with self._memory.stream_scope():
                self._average_between()
        if self._host is not None:
            told = mean.cpu().numpy()
            self._host.broadcast(told, 0)
            mean.copy_(torch.from_numpy(told))
        for moments, here, there in pieces if takes else ():
            flat = moments.reshape(-1)
            flat[here] = torch.where(mean[there] > 0, mean[there].to(flat.dtype), flat[here])
            if flat.data_ptr() != moments.data_ptr():  # laid out in another order, as channels_last
                moments.copy_(flat.view_as(moments))

    def _pieces(self, begin: int, end: int) -> Iterator[tuple[Tensor, slice, slice]]:
        """The second moments that lie in a slice: (those of a parameter, which of them, where in the slice)."""
        number = bisect_right(self._ends, begin)
        while number < len(self._ends) and begin < end:
            first, last = self._ends[number] - self._replica.tensors[number].numel(), self._ends[number]
            state = self._inner.state.get(self._replica.parameters[number]) or {}
            if last > first and "exp_avg_sq" in state:
                here = slice(max(begin, first) - first, min(end, last) - first)
                there = slice(here.start + first - begin, here.stop + first - begin)
                yield local_tensor(state["exp_avg_sq"]), here, there
            number += 1
            if last >= end:
                return

    def _average_between(self) -> None:
        """Fill in the means over the replicas, where they are not zero. Collective among those that take part."""
        among, codec, kernels, reducer = (
            self._among,
            self._codec,
            self._reducer.backend.kernels,
            self._reducer,
        )
        entries = among.workspace.entries("second moments", self._size)
        count = kernels.select_at_least(self._memory.array(self._own), 1, self._size, entries)
        boundaries = equal_boundaries(self._size, among.size)
        lists = split_and_reduce(SparseVector(entries[:count], self._size), boundaries, among, codec=codec)
        sums, nonfinite = lists.checked_sums()
        counts, flags = among.allgather_control(np.array([len(sums), nonfinite + lists.damaged], np.int64)).T
        if not flags.any():
            means = balance_and_allgatherv(
                sums, counts, self._size, among, float(among.size), codec, boundaries
            )
            kernels.write_scaled(self._memory.array(self._mean), means.entries, 1 / reducer.transport.size)
        reducer.forget_support()  # the entries of the last update lay where these do
