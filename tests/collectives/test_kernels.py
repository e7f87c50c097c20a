"""Kernels on sorted COO lists, against plain Python."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives.cpu.kernels import (
    TILE,
    bits_magnitude,
    count_at_least,
    magnitude_bits,
    region_offsets,
    sum_sorted_lists,
    take_at_least,
)
from collectives.sparse import ENTRY

Pairs = list[tuple[int, float]]
TINY = float(np.float32(1e-45))  # the smallest denormal, whose bits are 1
HUGE = 2**31 - 1
SENTINEL = (-7, -7.0)

FINITE = st.floats(width=32, allow_nan=False, allow_infinity=False)
SMALL = st.integers(-4, 4).map(float)
# Few magnitudes, so that ties are the rule; zeros of both signs and denormals among them.
LARGEST = float(np.finfo(np.float32).max)
TIED = st.sampled_from([0.0, -0.0, TINY, -TINY, 3 * TINY, 0.5, -0.5, 1.0, -1.0, 2.0, LARGEST])


def pack(pairs: Pairs) -> NDArray[np.void]:
    return np.array(pairs, ENTRY) if pairs else np.empty(0, ENTRY)


def bits_of(value: float) -> int:
    return int(np.abs(np.float32(value)).view(np.int32))


def oracle_sums(lists: list[Pairs], threshold_bits: int) -> Pairs:
    """Left-to-right float32 sums by index, through a dictionary."""
    sums: dict[int, np.float32] = {}
    with np.errstate(over="ignore"):
        for index, value in (pair for pairs in lists for pair in pairs):
            sums[index] = sums.get(index, np.float32(0)) + np.float32(value)
    return [(i, float(sums[i])) for i in sorted(sums) if bits_of(float(sums[i])) >= threshold_bits]


def kernel_sums(lists: list[Pairs], lower: int, upper: int, threshold_bits: int = 1) -> Pairs:
    """The kernel on a pool that also holds its output, which is as short as allowed, with guards around all."""
    stored = sum(map(len, lists))
    most = min(stored, upper - lower)
    pool = np.full(stored + 1 + most + 1, np.array(SENTINEL, ENTRY))
    ends = np.cumsum([len(pairs) for pairs in lists], dtype=np.int64)
    begins = ends - np.array([len(pairs) for pairs in lists], np.int64)
    for pairs, begin, end in zip(lists, begins, ends, strict=True):
        pool[begin:end] = pack(pairs)
    before = pool.copy()
    out = pool[stored + 1 : stored + 1 + most]
    written, _ = sum_sorted_lists(pool, begins, ends, lower, upper, threshold_bits, out)
    result = out[:written].tolist()
    out[:] = SENTINEL
    assert np.array_equal(pool, before), "wrote outside its output, or into the lists"
    return result


def sorted_lists(values: st.SearchStrategy[float]) -> st.SearchStrategy[tuple[int, int, list[Pairs]]]:
    """(lower, upper, lists) with indices crowded around the edges of tiles, up to the largest index."""

    def of_region(region: tuple[int, int]) -> st.SearchStrategy[tuple[int, int, list[Pairs]]]:
        lower, length = region
        edges = sorted({0, 1, length - 1, *(j * TILE + d for j in range(1, 6) for d in (-1, 0, 1))})
        inside = [lower + offset for offset in edges if 0 <= offset < length]
        index = st.one_of(st.sampled_from(inside), st.integers(lower, lower + length - 1))
        pairs = st.dictionaries(index, values, max_size=12).map(lambda chosen: sorted(chosen.items()))
        return st.tuples(st.just(lower), st.just(lower + length), st.lists(pairs, min_size=1, max_size=5))

    lengths = st.sampled_from([1, 2, TILE - 1, TILE, TILE + 1, 2 * TILE, 5 * TILE + 3])
    lowers = st.sampled_from([0, 1, TILE - 1, 10**6, HUGE - 5 * TILE - 3])
    return st.tuples(lowers, lengths).flatmap(of_region)


@given(sorted_lists(FINITE))
def test_sums_are_float32_left_to_right_across_tiles(case: tuple[int, int, list[Pairs]]) -> None:
    lower, upper, lists = case
    assert kernel_sums(lists, lower, upper) == oracle_sums(lists, 1)


@given(sorted_lists(SMALL), st.sampled_from([1, bits_of(1), bits_of(3), bits_of(4) + 1]))
def test_sums_below_the_threshold_and_cancelled_ones_are_dropped(
    case: tuple[int, int, list[Pairs]], threshold_bits: int
) -> None:
    lower, upper, lists = case
    assert kernel_sums(lists, lower, upper, threshold_bits) == oracle_sums(lists, threshold_bits)


@pytest.mark.parametrize("length", [7, 8, 9, TILE, TILE + 1, 3 * TILE + 5])
@pytest.mark.parametrize("density", [0.001, 0.2, 1.0])
def test_sums_of_many_entries_equal_numpy_float64(length: int, density: float) -> None:
    rng = np.random.default_rng(length)
    lower, total, lists = 50_000, np.zeros(length), []
    for _ in range(4):
        chosen = np.flatnonzero(rng.random(length) < density)
        values = rng.integers(-3, 4, len(chosen))
        total[chosen] += values
        lists.append([(int(lower + i), float(v)) for i, v in zip(chosen, values, strict=True) if v])
    expected = [(lower + int(i), total[i]) for i in np.flatnonzero(np.abs(total) >= 2)]
    assert kernel_sums(lists, lower, lower + length, bits_of(2)) == expected


def test_sums_of_no_lists_empty_lists_and_an_empty_region_are_empty() -> None:
    assert kernel_sums([], 0, 100) == []
    assert kernel_sums([[], []], 0, 3 * TILE) == []
    assert kernel_sums([[]], 5, 5) == []


def test_sums_of_denormals_survive_and_of_negative_zeros_do_not() -> None:
    lists: list[Pairs] = [[(0, TINY), (1, -0.0), (2, TINY)], [(0, TINY), (1, -0.0), (2, -TINY)]]
    assert kernel_sums(lists, 0, 3) == [(0, 2 * TINY)]


@given(st.lists(TIED, max_size=40), st.lists(st.one_of(TIED, FINITE), max_size=9))
def test_counts_at_several_magnitudes(values: list[float], edges: list[float]) -> None:
    ascending = np.array(sorted(map(bits_of, edges)), np.int32)
    counts = count_at_least(pack([(i, v) for i, v in enumerate(values)]), ascending)
    assert counts.dtype == np.int64
    assert counts.tolist() == [sum(bits_of(v) >= edge for v in values) for edge in ascending]


def oracle_take(pairs: Pairs, threshold_bits: int, ties: int) -> Pairs:
    taken = []
    for index, value in pairs:
        tied = bits_of(value) == threshold_bits
        if bits_of(value) > threshold_bits or (tied and ties > 0):
            taken.append((index, value))
            ties -= tied
    return taken


@given(st.lists(TIED, max_size=40), TIED.map(bits_of), st.integers(0, 8), st.booleans())
def test_taken_are_the_larger_ones_and_the_first_ties_in_order(
    values: list[float], threshold_bits: int, ties: int, in_place: bool
) -> None:
    pairs = [(3 * i, v) for i, v in enumerate(values)]
    entries, threshold = pack(pairs), max(1, threshold_bits)
    expected = oracle_take(pairs, threshold, ties)
    out = entries if in_place else np.full(len(expected) + 1, np.array(SENTINEL, ENTRY))
    taken = take_at_least(entries, threshold, ties, out)
    assert out[:taken].tolist() == expected
    if not in_place:
        assert out[taken].item() == SENTINEL
        assert entries.tolist() == pairs


@given(
    st.lists(st.integers(0, 60), unique=True).map(sorted),
    st.lists(st.integers(0, 61), max_size=7).map(sorted),
)
def test_split_points_slice_a_list_into_regions(indices: list[int], cuts: list[int]) -> None:
    entries = pack([(i, 1.0) for i in indices])
    boundaries = [0, *cuts, 61]
    points = region_offsets(entries, np.array(boundaries, np.int64))
    assert points.dtype == np.int64
    slices: list[Any] = [entries["index"][a:b].tolist() for a, b in itertools.pairwise(points)]
    expected = [[i for i in indices if a <= i < b] for a, b in itertools.pairwise(boundaries)]
    assert slices == expected


@given(FINITE, FINITE)
def test_bits_order_magnitudes_and_give_them_back(a: float, b: float) -> None:
    assert (magnitude_bits(a) < magnitude_bits(b)) == (abs(a) < abs(b))
    assert bits_magnitude(magnitude_bits(a)) == abs(a)


def test_bits_of_the_smallest_and_the_largest_magnitude() -> None:
    assert magnitude_bits(0.0) == magnitude_bits(-0.0) == 0
    assert magnitude_bits(-TINY) == 1
    assert magnitude_bits(float("-inf")) == 0x7F800000
