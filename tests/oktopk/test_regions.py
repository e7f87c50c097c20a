"""Region boundaries: they tile the gradient, balance the selections, and are the same on all ranks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.cpu.kernels import equal_count_splits
from collectives.mpi import MpiTransport
from collectives.sparse import ENTRY
from collectives.traffic import Traffic
from oktopk import GradientAllreduce
from oktopk.regions import Regions, equal_boundaries, region_boundaries
from tests.oracle import top_k

pytestmark = pytest.mark.also(ranks=8)

HUGE = 2**31 - 1
RANKS = 8  # as many as a test may have; fewer take the first of what was drawn
INDICES = st.lists(st.integers(0, 299), unique=True, max_size=60).map(sorted)


def cuts_of(indices: list[int] | NDArray[np.int32], length: int, ranks: int) -> NDArray[np.int64]:
    entries = np.zeros(len(indices), ENTRY)
    entries["index"] = indices
    return equal_count_splits(entries, length, ranks)


def oracle_cuts(indices: list[int], length: int, ranks: int) -> list[int]:
    """The first index of every share but the first, in plain Python."""
    if not indices:
        return [length * i // ranks for i in range(1, ranks)]
    return [indices[len(indices) * i // ranks] for i in range(1, ranks)]


@given(st.integers(1, HUGE), st.integers(1, 9))
def test_equal_boundaries_tile_the_gradient_evenly(length: int, ranks: int) -> None:
    boundaries = equal_boundaries(length, ranks).tolist()
    assert boundaries[0] == 0
    assert boundaries[-1] == length
    lengths = np.diff(boundaries)
    assert len(lengths) == ranks
    assert lengths.min() >= 0
    assert lengths.max() - lengths.min() <= 1


@given(INDICES, st.integers(1, 9))
def test_a_proposal_splits_its_selection_into_equal_counts(indices: list[int], ranks: int) -> None:
    cuts = cuts_of(indices, 300, ranks)
    assert cuts.dtype == np.int64
    edges = [0, *cuts.tolist(), 300]
    assert len(edges) == ranks + 1
    assert edges == sorted(edges)
    counts = [sum(a <= i < b for i in indices) for a, b in itertools.pairwise(edges)]
    assert max(counts) - min(counts) <= 1


def agreed(indices: NDArray[np.int32], length: int, transport: MpiTransport) -> NDArray[np.int64]:
    """region_boundaries, checked for what always holds."""
    transport.take_traffic()
    boundaries = region_boundaries(cuts_of(indices, length, transport.size), length, transport)
    size = transport.size
    sent = transport.take_traffic()
    everyone = transport.comm.allgather((indices.tolist(), boundaries.tolist()))
    proposals = [oracle_cuts(theirs, length, size) for theirs, _ in everyone]
    assert boundaries.dtype == np.int64
    assert [theirs for _, theirs in everyone] == [boundaries.tolist()] * size
    assert boundaries.tolist() == [0, *(sum(cuts) // size for cuts in zip(*proposals, strict=True)), length]
    assert boundaries.tolist() == sorted(boundaries.tolist())
    # an allreduce of P - 1 integers of two words
    assert sent == Traffic(0, 0, 4 * -(-4 * (size - 1) * (size - 1) // size), 1)
    return boundaries


@pytest.mark.mpi
@settings(max_examples=20)
@given(selections=st.lists(INDICES, min_size=RANKS, max_size=RANKS))
def test_boundaries_are_the_mean_of_the_proposals(
    transport: MpiTransport, selections: list[list[int]]
) -> None:
    agreed(np.array(selections[transport.rank], np.int32), 300, transport)


@pytest.mark.mpi
@pytest.mark.parametrize("length", [1, 2, 3, 1000, HUGE])
def test_boundaries_are_equal_cuts_when_nobody_selects(transport: MpiTransport, length: int) -> None:
    boundaries = agreed(np.empty(0, np.int32), length, transport)
    assert np.array_equal(boundaries, equal_boundaries(length, transport.size))


@pytest.mark.mpi
def test_boundaries_of_the_longest_gradient_do_not_overflow(transport: MpiTransport) -> None:
    boundaries = agreed(np.arange(HUGE - 9, HUGE, dtype=np.int32), HUGE, transport)
    assert transport.size == 1 or boundaries[1] >= HUGE - 9


@pytest.mark.mpi
def test_renewals_follow_the_selections_of_the_step_before(comm: MPI.Intracomm) -> None:
    """In steps 1, 2, 4 and 8, and each interval; the first step has equal regions, and one with a NaN none of its own."""
    length, interval, skipped = 3000, 12, 7
    reducer = GradientAllreduce(
        comm, length, density=0.05, boundary_interval=interval, threshold_interval=1, nonfinite="skip"
    )
    rng = np.random.default_rng(comm.rank)
    boundaries, proposed = equal_boundaries(length, comm.size), equal_boundaries(length, comm.size)[1:-1]
    for step in range(30):
        gradient = rng.standard_t(3, length).astype(np.float32)
        gradient[step * 100 :][:300] *= 20  # what is selected moves
        if step in (1, 2, 4, 8) or (step and step % interval == 0):
            boundaries = np.array([0, *comm.allreduce(proposed) // comm.size, length])
        accumulated = gradient + reducer.residual
        if step == skipped and comm.rank == 0:
            gradient[0] = np.nan
        report = reducer.step(gradient)
        assert report.skipped == (step == skipped)
        assert reducer._methods["oktopk"].boundaries.tolist() == boundaries.tolist(), step  # type: ignore[union-attr]
        if not report.skipped:
            selected = top_k(accumulated, report.k)
            proposed = selected[len(selected) * np.arange(1, comm.size) // comm.size]


@pytest.mark.mpi
def test_a_rank_that_selects_nothing_proposes_what_it_did_before(transport: MpiTransport) -> None:
    size, rank = transport.size, transport.rank
    regions = Regions(100, transport)
    assert not regions.are_due(planned=True)
    if rank:
        regions.learn(None)  # before the first selection equal lengths
    else:
        regions.learn(cuts_of([7], 100, size))
    assert regions.are_due(planned=False)
    regions.renew()
    equal = equal_boundaries(100, size)
    assert regions.boundaries[1:-1].tolist() == [
        (7 + (size - 1) * cut) // size for cut in equal[1:-1].tolist()
    ]
    assert regions.are_due(planned=True) and not regions.are_due(planned=False)
    before = regions.boundaries
    regions.learn(None)
    regions.renew()
    assert regions.boundaries.tolist() == before.tolist()


@pytest.mark.mpi
def test_regions_of_a_state_are_kept_unless_they_were_stale(
    transport: MpiTransport,
) -> None:
    size = transport.size
    regions, loaded = Regions(100, transport), Regions(100, transport)
    regions.learn(cuts_of([3, 5, 9, 40], 100, size))
    regions.renew()
    for stale in (False, True):
        regions.stale = stale  # as after a region that got too much
        loaded.load_state_dict(regions.state_dict())
        assert loaded.are_due(planned=False) == stale
        loaded.renew()
        assert loaded.boundaries.tolist() == regions.boundaries.tolist()
    # of one rank more
    more = {"boundaries": equal_boundaries(100, size + 1), "splits": equal_boundaries(100, size + 1)[1:-1]}
    loaded.load_state_dict(more)
    assert loaded.boundaries.tolist() == equal_boundaries(100, size).tolist()
    assert not loaded.are_due(planned=True)
    loaded.learn(cuts_of([3, 5, 9, 40], 100, size))
    assert loaded.are_due(planned=False)
