"""A vector that lists of entries are written to, one after the other."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from collectives.sparse import ENTRY
from oktopk.cpu.update import SparseUpdate

UGLY = np.array([0x80000000, 1, 0x007FFFFF, 0x7F7FFFFF, 0x3F800000, 0xBF800001], np.uint32).view(np.float32)
"""-0.0, denormals, the largest float, and others."""


def list_of(rng: np.random.Generator, length: int, share: float) -> NDArray[np.void]:
    indices = np.flatnonzero(rng.random(length) < share)
    entries = np.zeros(len(indices), ENTRY)
    entries["index"], entries["value"] = indices, rng.choice(UGLY, len(indices))
    return entries


@given(
    length=st.one_of(st.integers(1, 40), st.integers(1000, 5000)),
    before=st.integers(0, 17),
    shares=st.lists(st.sampled_from([0.0, 0.001, 0.1, 1.0]), min_size=1, max_size=4),
    seed=st.integers(0, 2**32 - 1),
)
def test_a_vector_holds_the_last_list_and_zeros(
    length: int, before: int, shares: list[float], seed: int
) -> None:
    rng = np.random.default_rng(seed)
    # a vector may begin and end anywhere in a cache line, and what lies around it is not its own
    memory = np.full(before + length + 17, 7, np.float32)
    vector = memory[before : before + length]
    vector[:] = 0
    writer = SparseUpdate(vector)
    for share in shares:
        entries = list_of(rng, length, share)
        expected = memory.copy()
        expected[before : before + length] = 0
        expected[before + entries["index"]] = entries["value"] * np.float32(0.25)
        writer.replace(entries, 0.25)
        assert memory.tobytes() == expected.tobytes()
    writer.replace()
    assert not vector.view(np.uint32).any()


def test_a_list_out_of_order_writes_nothing_outside_the_vector() -> None:
    """All three come in the span of 2048 to 3071, where the last two land as far from its beginning as from that of theirs."""
    memory = np.zeros(7000, np.float32)
    entries = np.zeros(3, ENTRY)
    entries["index"], entries["value"] = [2900, 5, 2000], [1, 2, 3]
    writer = SparseUpdate(memory[1000:6000])
    writer.replace(entries)
    assert np.flatnonzero(memory).tolist() == [3053, 3900, 4024]
    assert memory[[3900, 3053, 4024]].tolist() == [1, 2, 3]
    writer.replace()
    assert not memory.any()
