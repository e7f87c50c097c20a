"""The allgatherv: every block everywhere, each received once, in the fewest rounds."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.allgatherv import allgatherv, even_order
from collectives.mpi import MpiTransport
from collectives.sparse import ENTRY
from collectives.traffic import Traffic

pytestmark = pytest.mark.mpi

RANKS = 8  # as many as a test may have; fewer take the first of what was drawn


@pytest.fixture(scope="module")
def transport(comm: MPI.Intracomm) -> Iterator[MpiTransport]:
    made = MpiTransport(comm)
    yield made
    made.close()


def gather(
    counts: list[int], transport: MpiTransport, order: list[int] | None = None
) -> tuple[NDArray[np.void], NDArray[np.void], Traffic]:
    """What arrived, what should have, and what this rank sent."""
    rank = transport.rank
    expected = np.zeros(sum(counts), ENTRY)
    expected["index"] = np.arange(len(expected))
    expected["value"] = np.repeat(np.arange(len(counts)) + 0.5, counts)
    own = slice(sum(counts[:rank]), sum(counts[: rank + 1]))
    gathered = np.zeros_like(expected)
    gathered[own] = expected[own]
    transport.take_traffic()
    allgatherv(gathered, np.array(counts, np.int64), transport, order=order)
    return gathered, expected, transport.take_traffic()


@settings(max_examples=20)
@given(st.lists(st.integers(0, 40), min_size=RANKS, max_size=RANKS))
def test_every_block_arrives_everywhere_once(transport: MpiTransport, counts: list[int]) -> None:
    size = transport.size
    gathered, expected, sent = gather(counts[:size], transport)
    words, messages = transport.comm.allreduce(sent.words), transport.comm.allreduce(sent.messages)
    assert np.array_equal(gathered, expected)
    # each rank receives everything but its own block
    assert words == 2 * sum(counts[:size]) * (size - 1)
    assert messages <= size * 2 * (size - 1).bit_length()


def _busiest(counts: NDArray[np.int64], order: list[int]) -> int:
    """Elements that the busiest of a power of two of ranks sends."""
    size = len(counts)
    rounds = range(size.bit_length() - 1)
    sent = [
        sum(counts[order[place >> j << j : (place >> j) + 1 << j]].sum() for j in rounds)
        for place in range(size)
    ]
    return max(sent)


@given(st.integers(1, 5), st.data())
def test_an_even_order_has_every_rank_and_sends_less_where_neighbours_are_alike(
    bits: int, data: st.DataObject
) -> None:
    size = 1 << bits
    counts = np.sort(data.draw(st.lists(st.integers(0, 99), min_size=size, max_size=size)))
    order = even_order(counts)
    assert sorted(order) == list(range(size))
    assert _busiest(counts, order) <= _busiest(counts, list(range(size)))


@settings(max_examples=20)
@given(st.lists(st.integers(0, 40), min_size=RANKS, max_size=RANKS), st.permutations(range(RANKS)))
def test_every_block_arrives_once_in_any_order_of_ranks(
    transport: MpiTransport, counts: list[int], order: list[int]
) -> None:
    size = transport.size
    order = [rank for rank in order if rank < size]
    gathered, expected, sent = gather(counts[:size], transport, order)
    assert np.array_equal(gathered, expected)
    assert transport.comm.allreduce(sent.words) == 2 * sum(counts[:size]) * (size - 1)
    assert sent.messages <= 2 * (size - 1)


@pytest.mark.parametrize("holder", [0, 1, -1])
def test_a_single_full_block_reaches_all(transport: MpiTransport, holder: int) -> None:
    counts = [0] * transport.size
    counts[holder % transport.size] = 1000
    gathered, expected, sent = gather(counts, transport)
    messages = transport.comm.allreduce(sent.messages)
    assert np.array_equal(gathered, expected)
    assert messages == transport.size - 1, "an empty block is not sent"


def test_nothing_is_sent_when_all_blocks_are_empty(transport: MpiTransport) -> None:
    _, _, sent = gather([0] * transport.size, transport)
    assert sent == Traffic()


def test_words_and_messages_of_equal_blocks_are_the_formulas(transport: MpiTransport) -> None:
    size = transport.size
    gathered, expected, sent = gather([25] * size, transport)
    messages = transport.comm.allreduce(sent.messages)
    rounds = (size - 1).bit_length()
    assert np.array_equal(gathered, expected)
    assert sent.words == 2 * 25 * (size - 1)
    assert sent.control_words == sent.control_messages == 0
    if size & (size - 1) == 0:
        assert sent.messages == rounds
    else:
        # of the ranks that pass on b blocks, b - 1 pass on a range that wraps around the end, in two messages;
        # the blocks of all rounds add up to P - 1
        assert messages == rounds * size + (size - 1) - rounds
