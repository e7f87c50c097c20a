"""Thresholds: exact by radix histogram, reused in between with drift control.

A threshold is kept as the bits of a float32 magnitude. It is at least 1, the smallest denormal, so that a zero is never
selected; 1 selects every nonzero.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass
from operator import neg
from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.cpu import kernels as host_kernels
from collectives.cpu.kernels import bits_magnitude
from collectives.errors import FlaggedRanksError
from collectives.sparse import Kernels
from collectives.split_and_reduce import RegionLists
from oktopk.cpu.histograms import INFINITE_DIGIT, LEVELS
from oktopk.damage import StateError
from oktopk.settings import selection_cap
from oktopk.shard_group import WHOLE, ShardGroup

NOTHING = 0x7F800000
"""Bits that no finite magnitude reaches."""

OCTAVE = 1 << 23
"""Bits between a magnitude and its double."""

_REACH, _STEP = host_kernels.CANDIDATE_REACH, host_kernels.CANDIDATE_STEP
# counts exchanged per step: finest near the reused threshold, where gradients may crowd
_SIDE = np.geomspace(1, _REACH // _STEP, 32).astype(np.int64) * _STEP
CANDIDATES = np.concatenate([-_SIDE[::-1], [0], _SIDE])
"""int64[65], ascending: distance of each candidate threshold from the expected one, in bits of a magnitude."""
MISS = 0.05
"""Share of k by which the nearest candidate's count may be off before the step computes the exact threshold."""


_STEADY = 0.2  # share of a miss that counts as trend
_STEEPEST = OCTAVE // 32  # bits a step: about 2 %


def learned_trend(trend: int, missed: int) -> int:
    """The trend of a threshold, bits a step, after one more step was off by so many bits."""
    return min(max(trend + int(_STEADY * missed), -_STEEPEST), _STEEPEST)


def check_threshold(name: str, state: dict[str, Any]) -> None:
    """Raise StateError where the bits and the trend of a saved threshold cannot be loaded."""
    bits, trend = state["bits"], state["trend"]
    if bits is not None and not (type(bits) is int and 1 <= bits < 2**31):
        raise StateError(f"the {name} threshold of the state is not the bits of a magnitude: {bits!r}")
    if type(trend) is not int:
        raise StateError(f"the trend of the {name} threshold of the state is not an integer: {trend!r}")


def kth_magnitude(histogram: Callable[[int, int], NDArray[np.int64]], k: int) -> tuple[int, int, int]:
    """The k-th largest magnitude, digit by digit.

    Args:
        histogram: (level, prefix) -> counts by digit, as `magnitude_histogram`; may sum over ranks.
        k: >= 1.

    Returns:
        (bits, larger, equal): bits of the k-th largest nonzero magnitude, how many are strictly larger, and how many equal it;
        (1, 0, 0) when fewer than k are nonzero.
    """
    prefix, wanted, equal = 0, k, 0
    for level, (_, width) in enumerate(LEVELS):
        counts = histogram(level, prefix)
        reached = np.cumsum(counts[::-1])
        if reached[-1] < wanted:
            return 1, 0, 0
        place = int(np.searchsorted(reached, wanted))
        digit = len(counts) - 1 - place
        equal = int(counts[digit])
        wanted -= int(reached[place]) - equal
        prefix = prefix << width | digit
    return prefix, k - wanted, equal


@dataclass(frozen=True, slots=True)
class Choice:
    """Which candidate threshold a step keeps by.

    Attributes:
        candidate: an index into `CANDIDATES`.
        nearest: the candidate whose count is nearest k.
        needs_exact: no candidate fits: the step computes the exact threshold, or is given up where it may not.
    """

    candidate: int
    nearest: int
    needs_exact: bool


def choose_candidate(
    totals: NDArray[np.int64], expected: int, k: int, tolerance: float, *, may_go_exact_now: bool
) -> Choice:
    """The one rule by which a step between exact ones picks its global threshold; `decide.cu` is the same rule in CUDA.

    The expected threshold is kept while its count is within the tolerance. Else the step takes the candidate whose count is
    nearest k, if that is within MISS, or every nonzero sum where those are at most k. A candidate that misses makes the step
    exact. A deferred step may not go exact: it takes the lowest threshold from there on that keeps at most 5k/4, and is given
    up where that keeps less than k/2.

    Args:
        totals: int64[65], descending: sums of all ranks that reach each candidate threshold.
        expected: bits of the expected threshold, the middle of the candidates.
        k: entries wanted.
        tolerance: share of k.
        may_go_exact_now: the step may compute the exact threshold; false for a deferred step.
    """
    counts: list[int] = totals.tolist()  # NumPy would take longer
    middle, nearest = len(counts) // 2, _nearest(counts, k)
    if abs(counts[middle] - k) <= tolerance * k:
        return Choice(middle, nearest, False)
    all_kept = expected + CANDIDATES[0] <= 1 and counts[0] <= k
    if abs(counts[nearest] - k) <= MISS * k or all_kept:
        return Choice(nearest, nearest, False)
    if may_go_exact_now:
        return Choice(nearest, nearest, True)
    candidate = nearest
    while candidate < len(counts) - 1 and counts[candidate] > selection_cap(k):
        candidate += 1
    return Choice(candidate, nearest, not keeps_enough(counts[candidate], k))


def _nearest(counts: list[int], k: int) -> int:
    """The first of descending counts that is as near k as any."""
    at = bisect_left(counts, -k, key=neg)  # the first that is at most k
    if at == 0 or (at < len(counts) and k - counts[at] < counts[at - 1] - k):
        return at
    return bisect_left(counts, -counts[at - 1], key=neg)


def keeps_enough(count: int, k: int) -> bool:
    """Whether a deferred step may keep so many sums: from k/2 to 5k/4."""
    return k / 2 <= count <= selection_cap(k)


def candidate_bits(expected: int, candidate: int) -> int:
    """Bits of a candidate threshold, within the finite nonzero magnitudes."""
    return min(max(expected + int(CANDIDATES[candidate]), 1), NOTHING - 1)


class GlobalThreshold:
    """The magnitude that a reduced sum must reach to be applied.

    An exact step computes the k-th largest sum. A step between exact ones expects the last threshold, moved by its trend. The
    exchange of sizes before the allgatherv carries the counts of 65 candidate thresholds around that, and `choose_candidate`
    picks one. So the threshold follows drift within the step, and the cap holds.

    Attributes:
        bits: the last threshold, None before the first step.
        trend: bits by which it moves from step to step.
        exact: the last step computed the exact threshold.
    """

    def __init__(
        self,
        kernels: Kernels,
        drift_tolerance: float,
        shard_group: ShardGroup = WHOLE,
    ) -> None:
        self.bits: int | None = None
        self.trend = 0
        self.exact = False
        self._kernels = kernels
        self._tolerance = drift_tolerance
        self._shard_group = shard_group

    @property
    def value(self) -> float:
        """The last threshold as a magnitude, NaN before the first step."""
        return math.nan if self.bits is None else bits_magnitude(self.bits)

    def keep(
        self, lists: RegionLists, k: int, exact: bool, record: Callable[[str], object] = lambda stage: None
    ) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        """Sum this rank's region and keep what reaches the threshold.

        Args:
            lists: contributions to the region. Collective: every rank must call.
            k: entries wanted over all ranks.
            exact: compute the exact threshold.
            record: called when a stage ends: "reduce", what this rank sums, or "threshold", what all ranks agree on.

        Returns:
            (ENTRY[counts[r]], int64[P]): this rank's kept sums, ascending, and how many each rank keeps. The counts add up to
            at most 5k/4, over all shards where there are several. An exact threshold keeps k, or every nonzero where those are
            fewer; of equal sums the lowest indices, shard by shard.

        Raises:
            FlaggedRanksError: a sum is not finite, or a list did not decode; on every rank alike. It names no rank, and nothing
                was learnt.

        Traffic: control only: one allgather of 66 int64, or for an exact threshold three allreduces of a histogram and one
            allgather of 2 int64. With shards each of these takes a control operation over them, too.
        """
        if exact or self.bits is None:
            return self._keep_exact(lists, k, record)
        expected = self.expected
        sums = lists.counted(expected, CANDIDATES)
        sums.counts[-1] += lists.damaged
        record("reduce")
        counts = lists.transport.allgather_control(sums.counts)
        record("threshold")
        totals = self._shard_group.sum(counts.sum(axis=0))
        if totals[-1]:
            raise FlaggedRanksError([])
        choice = choose_candidate(totals[:-1], expected, k, self._tolerance, may_go_exact_now=True)
        if choice.needs_exact:
            return self._keep_exact(lists, k, record)
        bits = candidate_bits(expected, choice.candidate)
        self.follow(bits, int(CANDIDATES[choice.nearest]))
        chosen = counts[:, choice.candidate]
        return sums.take(bits, int(chosen[lists.transport.rank])), chosen

    @property
    def expected(self) -> int:
        """Bits of the threshold that the next regular step tries first."""
        assert self.bits is not None
        return min(max(self.bits + self.trend, 1), NOTHING - 1)

    def follow(self, bits: int, missed: int) -> None:
        """A regular step kept what reaches `bits`; the threshold expected was so many bits below the best one."""
        self.trend = learned_trend(self.trend, missed)
        self.bits, self.exact = bits, False

    @property
    def lowest(self) -> int:
        """Bits that a sum must reach to be considered when the exact threshold is computed."""
        return 1 if self.bits is None else max(1, self.expected + int(CANDIDATES[0]))

    def learn_exact(self, bits: int) -> None:
        """Learn from an exact step: `bits` is the k-th largest sum."""
        if self.bits is not None:
            self.trend = learned_trend(self.trend, bits - self.expected)
        self.bits, self.exact = bits, True

    def state_dict(self) -> dict[str, Any]:
        return {"bits": self.bits, "trend": self.trend}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.bits = state["bits"]
        self.trend = state["trend"]

    def _keep_exact(
        self, lists: RegionLists, k: int, record: Callable[[str], object]
    ) -> tuple[NDArray[np.void], NDArray[np.int64]]:
        transport = lists.transport
        lowest = self.lowest
        while True:
            sums = lists.sums(lowest)
            record("reduce")

            def histogram(level: int, prefix: int, sums: NDArray[np.void] = sums) -> NDArray[np.int64]:
                own = self._kernels.magnitude_histogram(sums, level, prefix)
                if level == 0:
                    own[INFINITE_DIGIT] += lists.damaged
                counts = self._shard_group.sum(transport.allreduce_control(own))
                if level == 0 and counts[INFINITE_DIGIT:].any():
                    raise FlaggedRanksError([])
                return counts

            bits, larger, _ = kth_magnitude(histogram, k)
            record("threshold")
            if bits >= lowest or lowest == 1:
                break
            lowest = 1  # fewer than k sums reach the lowest candidate
        self.learn_exact(bits)
        kernels = transport.kernels
        own = kernels.count_at_least(sums, np.array([bits, bits + 1], np.int32))
        at_least, above = transport.allgather_control(own).T
        record("threshold")
        ties = at_least - above
        before = np.cumsum(ties) - ties + self._shard_group.below(int(ties.sum()))
        ties = np.clip(k - larger - before, 0, ties)
        return sums[: kernels.take_at_least(sums, bits, int(ties[transport.rank]), sums)], above + ties
