"""Second moments of Adam's kind, averaged over the replicas, a slice at a time."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

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
from oktopk.torch.updates.shard_step import ShardStep

SLICES = 100
"""Slices of the elements: each is averaged once in a thousand exchanges, see `updates`."""

_WIRE = "int8"  # nearly logarithmic: second moments of one slice span many octaves


class _Piece(NamedTuple):
    """The part of a slice that is of one parameter.

    Attributes:
        moments: the parameter's second moments; None where the optimizer has none to be averaged.
        here: which of its elements; there: where they are in the slice.
    """

    moments: Tensor | None
    here: slice
    there: slice


class SharedMoments:
    """The mean of `exp_avg_sq` over the replicas in place of each one's own, slice by slice.

    A replica's second moments are of its own batches. With sixteen replicas, each with a sixteenth of
    the batch, training without any selection ends above dense training for that. Averages that are
    rare gain over half of what the second moments of the mean gradient gain.

    The mean is over the replicas that have moments of a parameter, by their ranks. With amsgrad
    nothing is averaged.

    Args:
        inner: the wrapped optimizer.
        replica: whose moments they are.
        reducer: of the ranks.
        memory: of both.
        slices: of the elements.
        sharded: what steps, where the ranks of a host step on a shard each: has the moments then.

    Memory: 16 bytes for each element of a slice, and what the lists of an exchange take.
    Traffic: of each `average` a barrier; for each of the slice's elements that is not zero 10.25 bits
        to its owner and 10.25 bits from it, each times (P-1)/P, in P - 1 + ceil(log2 P) messages;
        control: an alltoall of 2 int64, and an allgather of 2 and of one for each parameter in the
        slice. With hosts that is between the first ranks of the hosts, which send the others of
        their host 4 bytes an element; with `sharded`, where slices are of a shard, between the ranks
        that have the same shard.
    Source: own, docs/results/updates.md.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        replica: Replica,
        reducer: GradientAllreduce,
        memory: TensorMemory,
        slices: int = SLICES,
        sharded: ShardStep | None = None,
    ) -> None:
        self._slices = slices
        self._tensors = replica.tensors if sharded is None else sharded.pieces
        self._keeps = inner if sharded is None else sharded
        self._replica, self._reducer, self._memory = replica, reducer, memory
        self._host: Transport | None = None
        self._ranks, self._among = 1, reducer.transport
        if (group := reducer.group) is not None:
            self._host, self._ranks = group.host if sharded is None else None, group.host.size
            self._among = group.between or self._among
        self._ends = list(accumulate(tensor.numel() for tensor in self._tensors))
        self._size = -(-self._ends[-1] // slices)
        self._own, self._mean = torch.zeros(
            2, self._size, dtype=torch.float32, device=self._tensors[0].device
        )
        among = self._among
        self._codec = make_codec(_WIRE, among.kernels, among.workspace, among.size, among.ranks)

    @torch.no_grad()
    def average(self, number: int, takes: bool = True) -> None:
        """Average one slice. Collective. A slice with a mean that is not finite stays as it is.

        A moment that is not finite counts as zero, and becomes the mean.

        Args:
            number: of the average, from 1; the slice is number mod `slices`. Equal on all ranks.
            takes: whether this rank's moments become the mean. Those of a replica that has not stepped stay as they are.

        Raises:
            MissingRanksError: ranks did not come within `Settings.timeout`.
            ValueError: what was gathered did not decode; on every rank that takes part alike.
        """
        self._reducer.meet("an average of second moments")
        if not self._size:  # this rank has no shard
            return
        begin = number % self._slices * self._size
        pieces = list(self._pieces(begin, min(begin + self._size, self._ends[-1])))
        own, mean = self._own.zero_(), self._mean.zero_()
        for moments, here, there in pieces:
            if moments is not None:
                own[there].copy_(moments.reshape(-1)[here])
        own.copy_(torch.where(torch.isfinite(own), own * self._ranks, 0.0))
        if self._host is None or self._host.rank == 0:
            with self._memory.stream_scope():
                holders = self._sum_between([moments is not None for moments, *_ in pieces])
            for (_, _, there), ranks in zip(pieces, holders, strict=True):
                mean[there].div_(max(1, ranks))
        if self._host is not None:
            of_host = mean.cpu().numpy()
            self._host.broadcast(of_host, 0)
            mean.copy_(torch.from_numpy(of_host))
        for moments, here, there in pieces if takes else ():
            if moments is None:
                continue
            flat, new = moments.reshape(-1), mean[there].to(moments.dtype)
            flat[here] = torch.where(new > 0, new, flat[here])
            if flat.data_ptr() != moments.data_ptr():  # laid out in another order, as channels_last
                moments.copy_(flat.view_as(moments))

    def _pieces(self, begin: int, end: int) -> Iterator[_Piece]:
        """What lies in a slice of the elements; as many pieces on all ranks."""
        number = bisect_right(self._ends, begin)
        while number < len(self._ends) and begin < end:
            first, last = self._ends[number] - self._tensors[number].numel(), self._ends[number]
            if last > first:
                here = slice(max(begin, first) - first, min(end, last) - first)
                there = slice(here.start + first - begin, here.stop + first - begin)
                yield _Piece(self._moments_of(number), here, there)
            number += 1
            if last >= end:
                return

    def _moments_of(self, number: int) -> Tensor | None:
        """The second moments of a parameter, if the optimizer divides by them alone: with amsgrad it does not."""
        state = self._keeps.state.get(self._replica.parameters[number]) or {}
        if "max_exp_avg_sq" in state or "exp_avg_sq" not in state:
            return None
        return local_tensor(state["exp_avg_sq"])

    def _sum_between(self, has_moments: Sequence[bool]) -> list[int]:
        """Fill in the sums over the ranks where they are not zero. Collective among those that take part.

        Args:
            has_moments: whether this rank has moments of a piece.

        Returns:
            For each piece how many ranks have moments of it.
        """
        among, codec, reducer = self._among, self._codec, self._reducer
        kernels = reducer.backend.kernels
        entries = among.workspace.entries("second moments", self._size)
        count = kernels.select_at_least(self._memory.array(self._own), 1, self._size, entries)
        boundaries = equal_boundaries(self._size, among.size)
        lists = split_and_reduce(SparseVector(entries[:count], self._size), boundaries, among, codec=codec)
        sums, nonfinite = lists.checked_sums()
        holders = [self._ranks * each for each in has_moments]
        own = np.array([len(sums), nonfinite + lists.damaged, *holders], np.int64)
        counts, flags, *holders_of_pieces = among.allgather_control(own).T
        if not flags.any():
            total = balance_and_allgatherv(
                sums, counts, self._size, among, float(among.size), codec, boundaries
            )
            kernels.write_scaled(self._memory.array(self._mean), total.entries, 1.0)
        reducer.forget_support()  # the entries of the last update lay where these do
        return [int(each.sum()) for each in holders_of_pieces]
