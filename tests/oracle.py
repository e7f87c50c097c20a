"""The oracle: Ok-Topk in one process, in float64, as the paper states it.

Slow, short and obvious; the library is held against it. Thresholds are exact in every step.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]


def top_k(x: Vector, k: int) -> NDArray[np.int64]:
    """Ascending indices of the k largest magnitudes of float64[n].

    Of equal magnitudes the lowest indices belong to it. Zeros never do.
    """
    magnitude = np.abs(x)
    largest = np.sort(np.argsort(-magnitude, kind="stable")[:k])
    return largest[magnitude[largest] > 0]


def masked(x: Vector, indices: NDArray[np.int64]) -> Vector:
    """float64[n]: x at the indices, zero elsewhere."""
    kept = np.zeros_like(x)
    kept[indices] = x[indices]
    return kept


@dataclass
class Step:
    """What one step gave, over all ranks.

    Attributes:
        accumulated: float64[P, n], gradient + residual.
        selected: per rank, the indices it sent.
        update: float64[n], the sum that is applied (u).
        applied: indices of `update`.
        residuals: float64[P, n], what stays behind.
    """

    accumulated: Vector
    selected: list[NDArray[np.int64]]
    update: Vector
    applied: NDArray[np.int64]
    residuals: Vector


def ok_topk(gradients: Vector, residuals: Vector, k: int) -> Step:
    """One step of algorithm 2 with algorithm 1 inside: the top k of the sum of the local top ks.

    Args:
        gradients, residuals: float64[P, n], one row per rank.
        k: entries to apply.

    Source: Li & Hoefler, PPoPP 2022, algorithms 1 and 2.
    """
    accumulated = gradients + residuals
    selected = [top_k(row, k) for row in accumulated]
    total = np.sum([masked(row, mine) for row, mine in zip(accumulated, selected, strict=True)], axis=0)
    applied = top_k(total, k)
    left = accumulated.copy()
    for row, mine in zip(left, selected, strict=True):
        row[np.intersect1d(mine, applied)] = 0
    return Step(accumulated, selected, masked(total, applied), applied, left)


def candidate(
    counts: NDArray[np.int64], k: int, tolerance: float, miss: float, all_kept: bool, deferred: bool
) -> tuple[int, bool]:
    """Which candidate threshold a step between exact ones keeps by, and whether none fits.

    Args:
        counts: sums that reach each candidate, from the lowest one on; the middle one is expected.
        k: entries to apply.
        tolerance, miss: shares of k by which the expected, and the nearest candidate may be off.
        all_kept: the lowest candidate takes every nonzero sum, at most k.
        deferred: the step may not compute the exact threshold.
    """
    off = np.abs(counts.astype(np.float64) - k)
    expected, nearest = len(counts) // 2, int(np.argmin(off))  # the lowest of equals
    if off[expected] <= tolerance * k:
        return expected, False
    if off[nearest] <= miss * k or all_kept:
        return nearest, False
    if not deferred:
        return nearest, True
    # the lowest from there on that keeps at most 5k/4; given up where that keeps less than k/2
    fitting = [at for at in range(nearest, len(counts)) if counts[at] <= 5 * k / 4]
    lowest = fitting[0] if fitting else len(counts) - 1
    return lowest, not k / 2 <= counts[lowest] <= 5 * k / 4


def dense(gradients: Vector, residuals: Vector, k: int) -> Step:
    """The exact sum, whatever k; nothing stays behind."""
    accumulated = gradients + residuals
    everything = np.arange(gradients.shape[1])
    selected = [everything] * len(gradients)
    return Step(accumulated, selected, accumulated.sum(axis=0), everything, np.zeros_like(accumulated))


def sum_of_top_ks(gradients: Vector, residuals: Vector, k: int) -> Step:
    """One step of TopkA, TopkDSA and Gaussiank: the whole sum of the local top ks."""
    accumulated = gradients + residuals
    selected = [top_k(row, k) for row in accumulated]
    update = np.sum([masked(row, mine) for row, mine in zip(accumulated, selected, strict=True)], axis=0)
    left = accumulated.copy()
    for row, mine in zip(left, selected, strict=True):
        row[mine] = 0
    return Step(accumulated, selected, update, np.flatnonzero(update), left)


def gtopk(gradients: Vector, residuals: Vector, k: int) -> Step:
    """One step of gTopk: pairs of ranks merge and keep k, again and again; what a merge prunes stays where it was merged."""
    accumulated = gradients + residuals
    selected = [top_k(row, k) for row in accumulated]
    held = [masked(row, mine) for row, mine in zip(accumulated, selected, strict=True)]
    left = accumulated - np.array(held)
    distance = 1
    while distance < len(held):
        for rank in range(0, len(held) - distance, 2 * distance):
            merged = held[rank] + held[rank + distance]
            order = np.argsort(-np.abs(merged), kind="stable")  # ties by lowest index
            held[rank] = masked(merged, order[:k])
            left[rank] += merged - held[rank]
        distance *= 2
    return Step(accumulated, selected, held[0], np.flatnonzero(held[0]), left)


def union(gradients: Vector, residuals: Vector, k: int) -> Step:
    """All ranks send what any of them chose of its top ceil(k / P); every sum is applied."""
    accumulated = gradients + residuals
    share = -(-k // len(accumulated))
    support = np.unique(np.concatenate([top_k(row, share) for row in accumulated]))
    update = masked(accumulated.sum(axis=0), support)
    left = accumulated.copy()
    left[:, support] = 0
    return Step(accumulated, [support] * len(accumulated), update, support, left)


ORACLES = {
    "dense": dense,
    "oktopk": ok_topk,
    "topka": sum_of_top_ks,
    "topkdsa": sum_of_top_ks,
    "gaussiank": sum_of_top_ks,
    "gtopk": gtopk,
    "union": union,
}
"""One step of each method, by its name in the registry."""
