"""Allgatherv: every block everywhere, received once, in the fewest rounds; evened out before only where that is asked for."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.allgatherv import allgatherv, balance_and_allgatherv, even_order, needs_balancing
from collectives.mpi import MpiTransport
from collectives.sparse import ENTRY
from collectives.traffic import Traffic

pytestmark = pytest.mark.also(ranks=8)

SKEWED: dict[str, Callable[[int], list[int]]] = {
    "equal": lambda size: [30] * size,
    "all on the first": lambda size: [240] + [0] * (size - 1),
    "all on the last": lambda size: [0] * (size - 1) + [240],
    "one entry": lambda size: [0] * (size - 1) + [1],
    "fewer than ranks": lambda size: ([2, 0, 0, 1] + [0] * size)[:size],
    "nothing": lambda size: [0] * size,
    "a slope": lambda size: list(range(0, 10 * size, 10)),
}
RANKS = 8  # as many as a test may have; fewer take the first of what was drawn
counts_of_ranks = st.lists(
    st.one_of(st.just(0), st.integers(0, 9), st.integers(0, 300)), min_size=RANKS, max_size=RANKS
)


@pytest.mark.parametrize(
    ("counts", "trigger", "needed"),
    [
        ([4, 0, 0, 0], 4.0, False),
        ([4, 0, 0, 0], 3.99, True),
        ([5, 0, 0, 0, 0], 4.0, True),
        ([4, 1, 0, 0, 0], 4.0, False),
        ([2, 2], 1.0, False),
        ([3, 2], 1.0, False),
        ([3, 2, 2], 1.0, True),
        ([0, 0, 0], 1.0, False),
        ([7], 1.0, False),
    ],
)
def test_balancing_is_for_more_than_the_trigger_times_the_mean(
    counts: list[int], trigger: float, needed: bool
) -> None:
    assert needs_balancing(np.array(counts, np.int64), trigger) is needed


def blocks_of(counts: list[int]) -> NDArray[np.void]:
    """The blocks of all ranks in rank order: a count of entries each."""
    blocks = np.zeros(sum(counts), ENTRY)
    blocks["index"] = 3 * np.arange(len(blocks))
    blocks["value"] = np.repeat(np.arange(len(counts)) + 0.5, counts)
    return blocks


def own(counts: list[int], rank: int) -> slice:
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def gather(counts: list[int], transport: MpiTransport, order: list[int] | None = None) -> Traffic:
    """Gather blocks of these sizes; what this rank sent."""
    expected, mine = blocks_of(counts), own(counts, transport.rank)
    gathered = np.zeros_like(expected)
    gathered[mine] = expected[mine]
    transport.take_traffic()
    allgatherv(gathered, np.array(counts, np.int64), transport, order=order)
    assert np.array_equal(gathered, expected)
    return transport.take_traffic()


@pytest.mark.mpi
@settings(max_examples=30)
@given(
    counts=st.lists(st.integers(0, 40), min_size=RANKS, max_size=RANKS),
    order=st.one_of(st.none(), st.permutations(range(RANKS))),
)
def test_every_block_arrives_once_in_any_order_of_ranks(
    transport: MpiTransport, counts: list[int], order: list[int] | None
) -> None:
    size = transport.size
    sent = gather(counts[:size], transport, order and [rank for rank in order if rank < size])
    # each rank receives everything but its own block
    assert transport.comm.allreduce(sent.words) == 2 * sum(counts[:size]) * (size - 1)
    messages = transport.comm.allgather(sent.messages)
    assert max(messages) <= 2 * (size - 1)
    assert order or sum(messages) <= size * 2 * (size - 1).bit_length()


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
def test_an_even_order_has_every_rank_and_sends_less_where_neighbours_agree(
    bits: int, data: st.DataObject
) -> None:
    size = 1 << bits
    counts = np.sort(data.draw(st.lists(st.integers(0, 99), min_size=size, max_size=size)))
    order = even_order(counts)
    assert sorted(order) == list(range(size))
    assert _busiest(counts, order) <= _busiest(counts, list(range(size)))


@pytest.mark.mpi
@pytest.mark.parametrize("holder", [0, 1, -1])
def test_one_full_block_reaches_all_and_an_empty_one_stays(transport: MpiTransport, holder: int) -> None:
    counts = [0] * transport.size
    assert gather(counts, transport) == Traffic()
    counts[holder % transport.size] = 1000
    assert transport.comm.allreduce(gather(counts, transport).messages) == transport.size - 1


@pytest.mark.mpi
def test_words_and_messages_of_equal_blocks_are_the_formulas(transport: MpiTransport) -> None:
    size = transport.size
    sent = gather([25] * size, transport)
    messages = transport.comm.allreduce(sent.messages)
    rounds = (size - 1).bit_length()
    assert sent.words == 2 * 25 * (size - 1)
    assert sent.control_words == sent.control_messages == 0
    if size & (size - 1) == 0:
        assert sent.messages == rounds
    else:
        # of the ranks that pass on b blocks, b - 1 pass on a range that wraps around the end, in two messages;
        # the blocks of all rounds add up to P - 1
        assert messages == rounds * size + (size - 1) - rounds


def balance_and_gather(
    counts: list[int], transport: MpiTransport, trigger: float | None
) -> tuple[NDArray[np.void], Traffic]:
    """What arrived, checked against the blocks in rank order, and what this rank sent."""
    expected = blocks_of(counts)
    kept = expected[own(counts, transport.rank)].copy()
    before = kept.copy()
    options = {} if trigger is None else {"trigger": trigger}
    transport.take_traffic()
    vector = balance_and_allgatherv(kept, np.array(counts, np.int64), 10_000, transport, **options)
    sent = transport.take_traffic()
    result = vector.entries.copy()
    everyone = transport.comm.allgather(result.tobytes())
    assert vector.length == 10_000
    assert everyone == [expected.tobytes()] * transport.size
    assert np.array_equal(kept, before)
    assert sent.control_words == sent.control_messages == 0
    return result, sent


def moved_by(rank: int, counts: list[int]) -> list[int]:
    """Entries that one rank must hand to each other so that all hold an equal share, counted one by one."""
    total, size = sum(counts), len(counts)
    cuts = [total * i // size for i in range(size + 1)]
    begin = sum(counts[:rank])
    targets = [sum(place >= cut for cut in cuts[1:]) for place in range(begin, begin + counts[rank])]
    return [sum(target == other for target in targets) for other in range(size) if other != rank]


@pytest.mark.mpi
@pytest.mark.parametrize("kind", SKEWED)
def test_all_ranks_get_all_blocks_in_order_with_and_without_balancing(
    transport: MpiTransport, kind: str
) -> None:
    for trigger in (None, 4.0, 1.0, float("inf")):
        balance_and_gather(SKEWED[kind](transport.size), transport, trigger)


@pytest.mark.mpi(min_size=6)
def test_five_ranks_get_all_blocks_in_order(comm: MPI.Intracomm) -> None:
    """On three ranks, or on a power of two, the order in which blocks are passed on does not show."""
    part = comm.Split(comm.rank // 5)
    transport = MpiTransport(part)
    for kind in SKEWED.values():
        balance_and_gather(kind(part.size), transport, None)
    transport.close()
    part.Free()


@pytest.mark.mpi
@settings(max_examples=20)
@given(counts=counts_of_ranks, trigger=st.sampled_from([1.0, 1.5, 4.0]))
def test_words_are_the_allgatherv_and_what_balancing_moves(
    transport: MpiTransport, counts: list[int], trigger: float
) -> None:
    size, rank = transport.size, transport.rank
    counts = counts[:size]
    _, sent = balance_and_gather(counts, transport, trigger)
    words = transport.comm.allreduce(sent.words)
    moved = sum(moved_by(rank, counts)) if needs_balancing(np.array(counts), trigger) else 0
    moved_by_all = transport.comm.allreduce(moved)
    gathered = 2 * sum(counts) * (size - 1)
    assert words == gathered + 2 * moved_by_all
    # the bound that the volume rests on; a share that does not divide moves one entry more
    assert moved_by_all * size <= sum(counts) * (size - 1) + size


@pytest.mark.mpi
def test_entries_of_one_rank_are_moved_out_equally_and_passed_round(
    transport: MpiTransport,
) -> None:
    size, rank = transport.size, transport.rank
    counts = [0] * size
    counts[size // 2] = 100 * size
    plain, sent_plain = balance_and_gather(counts, transport, float(size))
    balanced, sent = balance_and_gather(counts, transport, 1.0)
    assert plain.tobytes() == balanced.tobytes()
    holder = rank == size // 2
    if size > 2:
        # shares of 100 entries: moved by the holder, then the allgatherv of equal blocks
        assert sent.words == 2 * 100 * (size - 1) * (1 + holder)
    else:
        assert sent.words == sent_plain.words == 2 * 100 * size * (size - 1) * holder
    words_plain = transport.comm.allreduce(sent_plain.words)
    assert words_plain == 2 * 100 * size * (size - 1)
