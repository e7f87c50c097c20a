"""Drawn gradients have the tails, the scales and the correlations that their profile says, and cost one pass."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
from numpy.typing import NDArray

from jobs.bench.device import BLOCK, PROFILES, DrawnGradients

LENGTH = 300_000


def drawn(
    name: str, steps: int = 30, rank: int = 0, seed: int = 1, length: int = LENGTH
) -> NDArray[np.float32]:
    """float32[2, n]: the last two of some steps."""
    source = DrawnGradients(name, length, rank, seed)
    for _ in range(steps - 1):
        before = source.next().copy()
    return np.stack([before, source.next()])


def correlation(a: NDArray[np.float32], b: NDArray[np.float32]) -> float:
    return float(np.corrcoef(a, b)[0, 1])


@pytest.mark.parametrize("name", PROFILES)
@pytest.mark.parametrize("length", [1, BLOCK, BLOCK + 1, 10_000])
def test_gradients_are_the_same_from_run_to_run_and_finite(name: str, length: int) -> None:
    first, second = drawn(name, 3, length=length), drawn(name, 3, length=length)
    assert first.tobytes() == second.tobytes()
    assert first.dtype == np.float32
    assert np.isfinite(first).all()
    assert not np.array_equal(first[0], first[1])


@pytest.mark.parametrize("name", PROFILES)
def test_draws_are_as_their_profile_says(name: str) -> None:
    profile = PROFILES[name]
    before, after = drawn(name)
    other = drawn(name, rank=1)[1]
    assert not np.array_equal(after, drawn(name, seed=2)[1]) and not np.array_equal(after, other)
    assert correlation(before, after) == pytest.approx(profile.memory, abs=0.05)
    blocks = after[: LENGTH // BLOCK * BLOCK].reshape(-1, BLOCK).astype(np.float64)
    scales = np.sqrt((blocks**2).mean(axis=1))
    kurtosis = ((blocks / scales[:, None]) ** 4).mean()
    assert kurtosis > 5 if profile.tail else kurtosis == pytest.approx(3, abs=0.2)
    if not profile.hot:
        assert correlation(after, other) == pytest.approx(profile.shared, abs=0.05)
        assert np.log(scales).std() == pytest.approx(profile.spread, abs=0.2 if profile.spread else 0.05)


def test_clustered_has_its_large_entries_in_a_sixteenth() -> None:
    ranks = [drawn("clustered", rank=rank)[1] for rank in range(4)]
    k = LENGTH // 100
    top = np.argpartition(np.abs(ranks[0]), -k)[-k:]
    summed = np.argpartition(np.abs(np.sum(ranks, axis=0)), -k)[-k:]
    first = len(range(0, LENGTH, BLOCK)) // 3 * BLOCK
    assert np.mean((top >= first) & (top < first + LENGTH // 15)) > 0.9
    inside = np.mean((summed >= first) & (summed < first + BLOCK))  # the shared eighth is one block here
    assert inside > 1.5 * np.mean((top >= first) & (top < first + BLOCK))


def test_drawing_allocates_nothing_as_long_as_the_gradient() -> None:
    source = DrawnGradients("heavy", LENGTH, 0, 1)
    source.next()
    tracemalloc.start()
    try:
        source.next()
        assert tracemalloc.get_traced_memory()[1] < LENGTH
    finally:
        tracemalloc.stop()
