"""Thresholds: the k-th magnitude by digits, and a global one that is exact when asked and follows drift."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives.cpu.kernels import bits_magnitude
from collectives.mpi import MpiTransport
from collectives.sparse import ENTRY
from collectives.split_and_reduce import RegionLists
from collectives.traffic import Traffic
from oktopk.cpu import kernels as host_kernels
from oktopk.cpu.histograms import LEVELS, magnitude_histogram
from oktopk.thresholds import (
    CANDIDATES,
    MISS,
    GlobalThreshold,
    candidate_bits,
    choose_candidate,
    kth_magnitude,
)
from tests import oracle

RANKS = 8  # as many as a test may have; fewer take the first of what was drawn
WIDTH = 1000  # elements of every region
TINY = float(np.float32(1e-45))  # the smallest denormal, whose bits are 1
LARGEST = float(np.finfo(np.float32).max)

TIED = st.sampled_from([0.0, -0.0, TINY, -TINY, 5 * TINY, 1.0, -1.0, 1.5, 2.0, -2.0, LARGEST])
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)


@given(st.lists(st.one_of(TIED, FLOATS), max_size=60), st.integers(1, 70), st.integers(1, 5))
def test_the_kth_magnitude_is_that_of_a_sort(values: list[float], k: int, ranks: int) -> None:
    vector = np.array(values, np.float32)
    parts = np.array_split(vector, ranks)
    bits, larger, equal = kth_magnitude(
        lambda level, prefix: np.sum([magnitude_histogram(part, level, prefix) for part in parts], axis=0), k
    )
    nonzero = sorted((abs(value) for value in vector.tolist() if value), reverse=True)
    if len(nonzero) < k:
        assert (bits, larger, equal) == (1, 0, 0)
    else:
        assert bits_magnitude(bits) == nonzero[k - 1]
        assert larger == sum(value > nonzero[k - 1] for value in nonzero)
        assert equal == nonzero.count(nonzero[k - 1])


@st.composite
def counts_of_candidates(draw: st.DrawFn) -> tuple[NDArray[np.int64], int]:
    """Descending counts of all candidates, on few levels at the edges of the rule; and k."""
    k = draw(st.integers(1, 50) | st.sampled_from([100, 200]))
    shares = 0.6 * k, 0.7 * k, 0.94 * k, 0.96 * k, k, 1.04 * k, 1.06 * k, 1.4 * k, 3 * k
    edges = 0, k // 2 - 1, k // 2, k // 2 + 1, 5 * k // 4, 5 * k // 4 + 1, *map(int, shares)
    level = st.sampled_from([max(0, edge) for edge in edges])
    levels = draw(st.lists(level, min_size=1, max_size=4))
    place = st.integers(30, 36) | st.integers(0, len(CANDIDATES))
    begins = sorted(draw(st.lists(place, min_size=len(levels) - 1, max_size=len(levels) - 1)))
    return np.repeat(sorted(levels, reverse=True), np.diff([0, *begins, len(CANDIDATES)])), k


@settings(max_examples=1000)
@given(counts_of_candidates(), st.sampled_from([1, 1 << 20, 0x3F800000]), st.booleans())
def test_a_step_keeps_by_the_candidate_of_the_oracle(
    drawn: tuple[NDArray[np.int64], int], expected: int, deferred: bool
) -> None:
    counts, k = drawn
    all_kept = candidate_bits(expected, 0) == 1 and counts[0] <= k
    choice = choose_candidate(counts, expected, k, 0.01, may_go_exact_now=not deferred)
    wanted = oracle.candidate(counts, k, 0.01, MISS, all_kept, deferred)
    assert (choice.candidate, choice.needs_exact) == wanted
    assert choice.nearest == np.argmin(np.abs(counts - k))


def region(values: list[float] | NDArray[Any], transport: MpiTransport) -> RegionLists:
    """This rank's region with these values as its sums, each brought by two lists; zeros cancel."""
    total = np.asarray(values, np.float32)
    lower = WIDTH * transport.rank
    pool = np.zeros(2 * len(total), ENTRY)
    pool["index"] = np.tile(lower + np.arange(len(total)), 2)
    # halves are exact but for denormals, which the first list brings alone
    first = np.where((np.abs(total) > 1e-30) & (np.arange(len(total)) % 2 == 1), total / 2, total)
    pool["value"] = np.concatenate([first, total - first])
    begins, ends = np.array([0, len(total)], np.int64), np.array([len(total), 2 * len(total)], np.int64)
    return RegionLists(pool, begins, ends, lower, lower + WIDTH, transport)


def top(sums: list[tuple[int, float]], k: int) -> list[tuple[int, float]]:
    """The k largest of all ranks' sums; of equal ones the lowest indices."""
    return sorted(sorted(((i, v) for i, v in sums if v), key=lambda pair: -abs(pair[1]))[:k])


def keep(
    threshold: GlobalThreshold,
    values: list[float] | NDArray[Any],
    k: int,
    exact: bool,
    transport: MpiTransport,
) -> tuple[int, Traffic]:
    """One step, checked for what always holds; returns how many are kept and what this rank sent."""
    transport.take_traffic()
    kept, counts = threshold.keep(region(values, transport), k, exact)
    sent = transport.take_traffic()
    mine = kept.tolist()
    sums = [
        (WIDTH * transport.rank + i, v) for i, v in enumerate(np.asarray(values, np.float32).tolist()) if v
    ]
    everyone = transport.comm.allgather((mine, sums, counts.tolist(), threshold.bits))
    kept_by_all = [pair for theirs, _, _, _ in everyone for pair in theirs]
    sums_of_all = [pair for _, theirs, _, _ in everyone for pair in theirs]
    assert [theirs for _, _, theirs, _ in everyone] == [[len(theirs) for theirs, _, _, _ in everyone]] * len(
        everyone
    )
    assert len({bits for _, _, _, bits in everyone}) == 1
    assert len(kept_by_all) <= 5 * k // 4
    assert sent.words == sent.messages == 0
    wanted = top(sums_of_all, k)
    if exact:
        assert kept_by_all == wanted
        assert threshold.value == (min(abs(v) for _, v in wanted) if len(sums_of_all) >= k else TINY)
    elif kept_by_all != wanted:
        assert kept_by_all == [(i, v) for i, v in sums_of_all if abs(v) >= threshold.value]
        assert abs(len(kept_by_all) - k) <= 0.05 * k
    return len(kept_by_all), sent


def new_threshold(drift_tolerance: float = 0.01) -> GlobalThreshold:
    return GlobalThreshold(host_kernels, drift_tolerance)


def exact_control_words(size: int) -> int:
    """Three allreduces of a histogram, and two counts from every rank; two words a number."""
    histograms = sum(-(-2 * 2 * 2**width * (size - 1) // size) for _, width in LEVELS)
    return histograms + 4 * (size - 1)


@pytest.mark.mpi
@settings(max_examples=12)
@given(
    steps=st.lists(
        st.lists(st.lists(st.one_of(TIED, FLOATS), max_size=12), min_size=RANKS, max_size=RANKS),
        min_size=1,
        max_size=3,
    ),
    k=st.integers(1, 60),
    exact=st.lists(st.booleans(), min_size=3, max_size=3),
)
def test_any_sums_are_kept_by_the_rules(
    transport: MpiTransport, steps: list[list[list[float]]], k: int, exact: list[bool]
) -> None:
    threshold = new_threshold()
    for step, (values, asked) in enumerate(zip(steps, exact, strict=False)):
        keep(threshold, values[transport.rank], k, asked or step == 0, transport)


def lognormal(seed: int, rank: int, count: int = 300) -> NDArray[np.float64]:
    rng = np.random.default_rng((seed, rank))
    return rng.lognormal(0, 2, count) * rng.choice([-1, 1], count)


@pytest.mark.mpi
def test_an_exact_step_costs_three_histograms_and_one_exchange_of_counts(transport: MpiTransport) -> None:
    size = transport.size
    threshold = new_threshold()
    for step in range(3):
        values = lognormal(0, transport.rank) * 1.05**step
        kept, sent = keep(threshold, values, 40 * size, True, transport)
        assert kept == 40 * size
        assert sent == Traffic(0, 0, 4 * exact_control_words(size), 4)


@pytest.mark.mpi
@pytest.mark.parametrize("growth", [1.0, 1.03, 0.97])
def test_a_reused_threshold_follows_drift_for_one_exchange_of_counts(
    transport: MpiTransport, growth: float
) -> None:
    size = transport.size
    k = 60 * size
    threshold = new_threshold()
    values = lognormal(0, transport.rank)
    keep(threshold, values, k, True, transport)
    first = threshold.value
    for step in range(1, 11):
        kept, sent = keep(threshold, values * growth**step, k, False, transport)
        assert abs(kept - k) <= 0.05 * k
        assert sent == Traffic(0, 0, 8 * 66 * (size - 1), 1), "the ladder missed"
    assert threshold.value == pytest.approx(first * growth**10, rel=0.05)


@pytest.mark.mpi
def test_a_threshold_that_is_near_enough_stays(transport: MpiTransport) -> None:
    size = transport.size
    k = 60 * size
    threshold = new_threshold(drift_tolerance=0.25)
    values = lognormal(0, transport.rank)
    keep(threshold, values, k, True, transport)
    first = threshold.value
    # a fifth of what was kept sinks below the threshold
    kept_here = np.flatnonzero(np.abs(values) >= first)
    values[kept_here[: len(kept_here) // 5]] = 0
    transport.take_traffic()
    kept, counts = threshold.keep(region(values, transport), k, False)
    sent = transport.take_traffic()
    total = transport.comm.allreduce(len(kept))
    assert threshold.value == first
    assert total == counts.sum()
    assert 0.75 * k <= total < k
    assert sent.control_messages == 1


@pytest.mark.mpi
@pytest.mark.parametrize("jump", [100.0, 1e30, 0.01, 1e-30, 1e-42])
@pytest.mark.parametrize("exact", [False, True])
def test_a_change_of_regime_is_met_by_an_exact_threshold_at_once(
    transport: MpiTransport, jump: float, exact: bool
) -> None:
    k = 60 * transport.size
    threshold = new_threshold()
    keep(threshold, lognormal(0, transport.rank), k, True, transport)
    kept, _ = keep(threshold, np.float32(lognormal(1, transport.rank) * jump), k, exact, transport)
    assert abs(kept - k) <= 0.05 * k or jump == 1e-42
    _, sent = keep(threshold, np.float32(lognormal(1, transport.rank) * jump), k, False, transport)
    assert sent.control_messages == 1 or jump == 1e-42  # few denormals differ: every step may be one of ties


@pytest.mark.mpi
@pytest.mark.parametrize("holders", ["one rank", "all ranks", "nobody"])
def test_fewer_sums_than_k_are_all_kept_without_a_search(transport: MpiTransport, holders: str) -> None:
    rank, size = transport.rank, transport.size
    k = 5 * size
    count = {"one rank": 3 * (rank == size - 1), "all ranks": 3, "nobody": 0}[holders]
    total = {"one rank": 3, "all ranks": 3 * size, "nobody": 0}[holders]
    threshold = new_threshold()
    kept, _ = keep(threshold, lognormal(0, rank, count), k, True, transport)
    assert kept == total
    for seed in range(1, 4):
        kept, sent = keep(threshold, lognormal(seed, rank, count), k, False, transport)
        assert kept == total
        assert sent.control_messages == 1
    # and when there are enough again, k of them
    kept, _ = keep(threshold, lognormal(9, rank, 40), k, False, transport)
    assert abs(kept - k) <= 0.05 * k


@pytest.mark.mpi
@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("value", [3.0, TINY, LARGEST])
def test_of_equal_sums_the_lowest_indices_are_kept_k_in_all(
    transport: MpiTransport, value: float, exact: bool
) -> None:
    k = 8 * transport.size
    threshold = new_threshold()
    for _ in range(3):
        kept, _ = keep(threshold, np.full(20, -value), k, exact or threshold.bits is None, transport)
        assert kept == k
