"""Split and reduce: every region's sums on its owner, in a fixed order, counted, and stopped by a flag."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.errors import FlaggedRanksError
from collectives.mpi import MpiTransport
from collectives.sparse import SparseVector
from collectives.split_and_reduce import split_and_reduce
from collectives.traffic import Traffic

pytestmark = [pytest.mark.mpi, pytest.mark.also(ranks=8)]

RANKS = 8  # as many as a test may have; fewer take the first of what was drawn
BATCHES = [1, 2, 8]
Pairs = dict[int, float]


def sparse(pairs: Pairs, length: int) -> SparseVector:
    indices = np.array(sorted(pairs), np.int64)
    return SparseVector.from_pairs(indices, np.array([pairs[int(i)] for i in indices], np.float32), length)


def draw_pairs(seed: Any, length: int, density: float, integers: bool) -> Pairs:
    rng = np.random.default_rng(seed)
    chosen = np.flatnonzero(rng.random(length) < density)
    values = rng.standard_normal(len(chosen)) * 10.0 ** rng.integers(-3, 4, len(chosen))
    values = np.ceil(values) if integers else values.astype(np.float32)
    return {int(i): float(v) for i, v in zip(chosen, values, strict=True) if v}


def owned_sums(everyone: list[Pairs], rank: int, lower: int, upper: int) -> list[tuple[int, float]]:
    """float32 sums over [lower, upper) in the order own, rank - 1, rank - 2, ...; zeros left out."""
    sums: dict[int, np.float32] = {}
    for i in range(len(everyone)):
        for index, value in everyone[(rank - i) % len(everyone)].items():
            if lower <= index < upper:
                sums[index] = sums.get(index, np.float32(0)) + np.float32(value)
    return [(i, float(sums[i])) for i in sorted(sums) if sums[i] != 0]


def check_sums(
    pairs: Pairs, boundaries: NDArray[np.int64], transport: MpiTransport, **options: Any
) -> Traffic:
    """One call, its sums against plain Python bit for bit; returns what this rank sent."""
    rank, size, length = transport.rank, transport.size, int(boundaries[-1])
    packed = sparse(pairs, length)
    before = packed.entries.copy()
    transport.take_traffic()
    lists = split_and_reduce(packed, boundaries, transport, **options)
    sent = transport.take_traffic()
    sums = lists.sums().tolist()
    again = lists.sums(int(np.float32(2).view(np.int32))).tolist()
    everyone = transport.comm.allgather(pairs)
    expected = owned_sums(everyone, rank, int(boundaries[rank]), int(boundaries[rank + 1]))
    assert sums == expected
    assert again == [(i, v) for i, v in expected if abs(v) >= 2], (
        "the lists did not stay for a second threshold"
    )
    assert len(sums) <= lists.most_sums
    assert np.array_equal(packed.entries, before), "the selection was changed"
    # counted: what is outside the own region, one message per region that is not empty
    regions = [r for r in range(size) if r != rank]
    nnz = [sum(int(boundaries[r]) <= i < int(boundaries[r + 1]) for i in pairs) for r in regions]
    # two int64 of control for every peer
    assert sent == Traffic(8 * sum(nnz), sum(n > 0 for n in nnz), 16 * (size - 1), 1)
    return sent


def equal_cuts(length: int, size: int) -> NDArray[np.int64]:
    return length * np.arange(size + 1, dtype=np.int64) // size


@pytest.mark.parametrize("length", [3, 500, 20_000])
def test_sums_are_taken_in_rotation_order_whatever_the_batches(transport: MpiTransport, length: int) -> None:
    density = 0.3 if length < 1000 else 0.02
    boundaries = equal_cuts(length, transport.size)
    for bucket_rounds, rotate in itertools.product(BATCHES, [True, False]):
        # other values each time: what an earlier call left in the workspace must not pass for what arrived
        seed = (length, transport.rank, bucket_rounds, rotate)
        pairs = draw_pairs(seed, length, density, integers=False)
        check_sums(pairs, boundaries, transport, bucket_rounds=bucket_rounds, rotate=rotate)


@settings(max_examples=25)
@given(
    supports=st.lists(
        st.dictionaries(st.integers(0, 59), st.integers(-2, 2).filter(bool), max_size=9),
        min_size=RANKS,
        max_size=RANKS,
    ),
    cuts=st.lists(st.integers(0, 60), min_size=RANKS - 1, max_size=RANKS - 1),
    bucket_rounds=st.integers(1, 8),
)
def test_sums_for_any_supports_and_boundaries(
    transport: MpiTransport, supports: list[dict[int, int]], cuts: list[int], bucket_rounds: int
) -> None:
    size = transport.size
    boundaries = np.array([0, *sorted(cuts[: size - 1]), 60], np.int64)
    pairs = {index: float(value) for index, value in supports[transport.rank].items()}
    check_sums(pairs, boundaries, transport, bucket_rounds=bucket_rounds)


def test_a_long_region_needs_no_buffer_of_its_length(comm: MPI.Intracomm) -> None:
    transport, length = MpiTransport(comm), 2**31 - 1
    boundaries = np.array([0] * transport.size + [length], np.int64)
    check_sums({0: 1.0, 5000: 2.0, length - 1: 3.0}, boundaries, transport, bucket_rounds=1)
    held = transport.workspace.nbytes
    transport.close()
    assert held < 10_000


@pytest.mark.parametrize("rotate", [True, False])
def test_flags_of_some_ranks_stop_all_ranks_before_any_payload(transport: MpiTransport, rotate: bool) -> None:
    size = transport.size
    packed = sparse(dict.fromkeys(range(50), 1.0), 50)
    boundaries = equal_cuts(50, size)
    for flagged in ([0], [size - 1], sorted({0, size // 2, size - 1}), list(range(size))):
        transport.take_traffic()
        with pytest.raises(FlaggedRanksError, match=rf"\[{', '.join(map(str, flagged))}\]") as caught:
            split_and_reduce(packed, boundaries, transport, flag=transport.rank in flagged, rotate=rotate)
        assert caught.value.ranks == flagged
        assert transport.take_traffic() == Traffic(0, 0, 16 * (size - 1), 1)
    # and the next step goes through
    lists = split_and_reduce(packed, boundaries, transport, rotate=rotate)
    assert lists.sums()["value"].tolist() == [size] * (lists.upper - lists.lower)
