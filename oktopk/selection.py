"""Local selection: accumulate, select and pack in one pass, under a threshold that follows its own count."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from collectives.cpu.kernels import bits_magnitude, magnitude_bits
from collectives.sparse import Entries, Kernels, SparseVector, Vector
from collectives.transport import Transport
from oktopk.cpu.accumulate import TIED, Packing
from oktopk.damage import StateError
from oktopk.settings import selection_cap
from oktopk.shard_group import WHOLE, ShardGroup
from oktopk.step import Addend
from oktopk.thresholds import MISS, NOTHING, OCTAVE, check_threshold, kth_magnitude, learned_trend

_MARGIN = 1.3  # an exact step packs about this times k and finds the k-th largest among them
_SLOPES = (0.5, 32.0)  # plausible range of -d log(nnz) / d log(threshold)
_FARTHEST = OCTAVE // 3  # bits that the threshold moves after one step, at most: a quarter of its magnitude
_FOLLOWED = 0.7  # share of a miss that the next threshold makes up for: misses are partly noise
_ALL = 2**31 - 1


def most_equal(k: int) -> int:
    """Entries that may equal the k-th largest magnitude, itself among them, for a threshold to be reused."""
    return max(1, int(MISS * k))


@dataclass(slots=True)
class Selection:
    """What one rank selected in one step.

    Attributes:
        packed: the selected entries of the accumulated gradient, in ascending order, at most 5k/4.
        nonfinite: elements whose sum was NaN or Inf; they are not packed and their residual is unchanged.
        exact: the threshold was the k-th largest magnitude of this very step.
        threshold: the least magnitude that was selected.
        offsets: P + 1 integers, where each region begins in `packed`, if the pass computed them.
        splits: int64[P - 1], the indices that split a list that is not empty into equal counts, likewise.
        flag: nothing of this step may be applied for another reason; with shards also where another shard has such elements.
    """

    packed: SparseVector
    nonfinite: int
    exact: bool
    threshold: float
    offsets: Sequence[int] | NDArray[np.int64] | None = None
    splits: NDArray[np.int64] | None = None
    flag: bool = False

    @property
    def flagged(self) -> bool:
        """Whether this rank has a reason that nothing of the step may be applied."""
        return self.flag or self.nonfinite > 0


class LocalSelection:
    """Selects about k of n accumulated entries per step.

    An exact step packs a little more than k by a lower threshold, and finds the k-th largest magnitude in the packed list. Only
    when the guess misses it reads the vector again. Between exact steps the threshold moves by two terms. One is the ratio of
    the last count to k, divided by the slope of the tail that the last exact step measured. The other is the threshold's own
    trend: residuals grow for many steps, and without it every step would select too much. No threshold selects about k where many
    entries equal the k-th magnitude: then the next step is exact again.

    Where the vector is held in shards the ranks that hold them select together (`shard_group`): k,
    the caps and the threshold are those of the whole vector. Of equal magnitudes the lowest indices
    are selected, shard by shard.

    Args:
        length: elements of the gradient (n).
        kernels: the module of kernels that fits the arrays.
        transport: whose workspace holds the packed list: 2k entries and one block.
        shard_group: the ranks that hold the vector's shards.

    Traffic: none; with shards one control allreduce of 2 int64 over them, and in exact steps three of a histogram.

    Attributes:
        length, kernels, transport: as given, for the `select` of a class that is derived.
        bits: the threshold of the next step, None before the first.
        slope: -d log(nnz) / d log(threshold).
        trend: bits by which the threshold moves from step to step.
        needs_exact: the next step must be exact.
        kept: names of the attributes that the next step depends on, which a state has. A class that is derived adds its own.
    """

    kept: ClassVar[tuple[str, ...]] = ("bits", "slope", "trend", "needs_exact")

    def __init__(
        self,
        length: int,
        kernels: Kernels,
        transport: Transport,
        shard_group: ShardGroup = WHOLE,
    ) -> None:
        self.bits: int | None = None
        self.slope = 4.0
        self.trend = 0
        self.needs_exact = True
        self.length = length
        self.kernels = kernels
        self.transport = transport
        self.shard_group = shard_group

    def select(
        self,
        gradient: Addend,
        residual: Vector,
        k: int,
        exact: bool,
        boundaries: NDArray[np.int64] | None = None,
    ) -> Selection:
        """Accumulate `gradient` into `residual`, both float32[n], and pack the largest of it.

        Args:
            k: entries wanted.
            exact: pack the exact top k; else reuse the threshold.
            boundaries: int64[P + 1], the regions that the list will be split by, where they are known already.

        Returns:
            The selection; its entries lie in the workspace until the next call.
        """
        exact = exact or self.needs_exact or self.bits is None
        bits = self.lower_threshold() if exact or self.bits is None else self.bits
        packing = self.kernels.accumulate_select(gradient, residual, bits, self.buffer(k), boundaries)
        return self.finish(packing, residual, k, bits, exact)

    def buffer(self, k: int) -> Entries:
        """ENTRY[2k + a block], where what is selected is packed."""
        return self.transport.workspace.entries("packed", 2 * k + self.kernels.BLOCK)

    def finish(
        self,
        packing: Packing,
        residual: Vector,
        k: int,
        bits: int,
        exact: bool,
    ) -> Selection:
        """Repack or tighten what the pass packed where the count asks for it, and learn the next threshold.

        Args:
            packing: the outcome of the pass, into `buffer`.
            residual: float32[n], accumulated.
            bits: the threshold that was packed by.
            exact: cut the list down to the exact top k.
        """
        own_nnz, buffer, layout = packing.nnz, self.buffer(k), (packing.offsets, packing.splits)
        nnz, flag = self.shard_group.sum_flagged(own_nnz, packing.nonfinite > 0)
        if flag:  # nobody applies this step: learn nothing from it, but start afresh
            self.force_exact()
            nothing = SparseVector(buffer[:0], self.length)
            return Selection(nothing, packing.nonfinite, False, bits_magnitude(bits), flag=True)
        if nnz > 2 * k or (exact and nnz < k and bits > 1):
            own_nnz, bits = self._repack(residual, k, buffer)
            nnz, _ = self.shard_group.sum_flagged(own_nnz, False)
            exact, layout = True, (None, None)
        packed, threshold_bits = buffer[:own_nnz], bits
        if packing.candidates:
            exact, threshold_bits = True, packing.cut_bits
            self.learn_exact(packing.candidates, k, bits, threshold_bits)
        elif exact and nnz < k:  # all that is not zero
            self.learn_exact(nnz, k, bits, bits)
        elif exact or nnz > selection_cap(k):
            packed, threshold_bits = self._tighten(packed, nnz, k, bits)
            exact, layout = True, (None, None)
        else:
            self._follow(nnz, k, bits)
        return Selection(SparseVector(packed, self.length), 0, exact, bits_magnitude(threshold_bits), *layout)

    def force_exact(self) -> None:
        """Make the next step exact. The last pass is not used."""
        self.needs_exact = True

    @classmethod
    def check_state(cls, state: dict[str, Any]) -> None:
        """Raise StateError, or what `state_errors` takes for one, where a `state_dict` cannot be loaded."""
        learned = {name: state[name] for name in cls.kept}
        if not (0 < learned["slope"] < math.inf):
            raise StateError(f"slope {learned['slope']!r} of the state is not a positive number")
        if not isinstance(learned["needs_exact"], bool):
            raise StateError(f"needs_exact {learned['needs_exact']!r} of the state is not True or False")
        check_threshold("local", state)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.kept}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        for name in self.kept:
            setattr(self, name, state[name])

    def lower_threshold(self) -> int:
        """Bits that an exact step packs by: a little more than k should reach them."""
        if self.bits is None:
            return NOTHING
        return max(1, magnitude_bits(bits_magnitude(self.bits) * _MARGIN ** (-1 / self.slope)))

    def learn_exact(self, candidates: int, k: int, lowest: int, bits: int) -> None:
        """Learn from an exact step.

        Args:
            candidates: entries that reached `lowest`; TIED where more than `most_equal(k)` equal `bits`: then the next step is
                exact.
            bits: the k-th largest magnitude of them.
        """
        self.needs_exact = candidates == TIED
        if self.needs_exact:
            self.bits = bits
            return
        if candidates > k and lowest < bits:
            octaves = math.log(bits_magnitude(bits) / bits_magnitude(lowest))
            self.slope = min(max(math.log(candidates / k) / octaves, _SLOPES[0]), _SLOPES[1])
        if self.bits is not None:
            self.trend = learned_trend(self.trend, bits - self.bits)
        self.bits = max(1, min(bits + self.trend, NOTHING - 1))

    def _kth(self, values: Vector | Entries, k: int) -> tuple[int, int, int, int]:
        """As `kth_magnitude` over all shards, and how many of this rank's own equal the k-th magnitude."""
        own = np.zeros(1, np.int64)

        def histogram(level: int, prefix: int) -> NDArray[np.int64]:
            nonlocal own
            own = self.kernels.magnitude_histogram(values, level, prefix)
            return self.shard_group.sum(own)

        bits, larger, equal = kth_magnitude(histogram, k)
        return bits, larger, equal, int(own[bits & (len(own) - 1)]) if equal else 0

    def _ties(self, wanted: int, equal: int) -> int:
        """How many of this rank's `equal` ties to take so that all shards take `wanted`, the lowest shards first."""
        return max(0, wanted - self.shard_group.below(equal))

    def _repack(self, residual: Vector, k: int, buffer: Entries) -> tuple[int, int]:
        """Pack a superset of the top k that fits the buffer, by a histogram of the whole vector.

        Returns (nnz, bits): entries packed here, and the threshold they reach.
        """
        kernels = self.kernels
        coarse = self.shard_group.sum(kernels.top_histogram(residual, k))
        reached = np.cumsum(coarse[::-1])
        if reached[-1] <= 2 * k:
            return kernels.select_at_least(residual, 1, _ALL, buffer), 1
        place = int(np.searchsorted(reached, k))
        if reached[place] <= 2 * k:
            shift, _ = kernels.LEVELS[0]
            edge = max(1, (len(coarse) - 1 - place) << shift)
            return kernels.select_at_least(residual, edge, _ALL, buffer), edge
        bits, larger, _, equal_here = self._kth(residual, k)
        return kernels.select_at_least(residual, bits, self._ties(2 * k - larger, equal_here), buffer), bits

    def _tighten(self, candidates: Entries, nnz: int, k: int, lowest: int) -> tuple[Entries, int]:
        """Cut a list that holds the top k down to it, in O(nnz); of equal magnitudes the lowest indices stay.

        Args:
            nnz: candidates in all shards.
        """
        bits, larger, equal, equal_here = self._kth(candidates, k)
        self.learn_exact(TIED if equal > most_equal(k) else nnz, k, lowest, bits)
        ties = self._ties(k - larger, equal_here)
        count = self.transport.kernels.take_at_least(candidates, bits, ties, candidates)
        return candidates[:count], bits

    def _follow(self, nnz: int, k: int, bits: int) -> None:
        """Move the threshold to where this step's count would have been k."""
        self.needs_exact = bool(2 * nnz < k and bits > 1)
        missed = int(math.log2(max(nnz, 1) / k) / self.slope * OCTAVE)
        self.trend = learned_trend(self.trend, missed)
        wanted = int(_FOLLOWED * missed) + self.trend
        moved = min(max(wanted, -_FARTHEST), _FARTHEST)
        self.bits = max(1, min(bits + moved, NOTHING - 1))
