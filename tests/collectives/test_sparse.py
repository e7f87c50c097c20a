"""The COO vector: its layout on the wire, and what it refuses."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from collectives.sparse import ENTRY, MAX_LENGTH, SparseVector, check_length
from collectives.traffic import WORD_BYTES

FLOATS = st.floats(width=32, allow_nan=False)


def test_an_entry_is_two_words_on_the_wire_index_first() -> None:
    vector = SparseVector.from_pairs(np.array([7, 2**31 - 2]), np.array([1.5, -0.25]), MAX_LENGTH)
    assert vector.entries.tobytes() == struct.pack("<ifif", 7, 1.5, 2**31 - 2, -0.25)
    assert ENTRY.itemsize == 2 * WORD_BYTES == 8


@given(
    st.integers(1, 300).flatmap(
        lambda n: st.tuples(st.just(n), st.dictionaries(st.integers(0, n - 1), FLOATS))
    )
)
def test_a_vector_holds_exactly_the_pairs_it_was_made_from(case: tuple[int, dict[int, float]]) -> None:
    length, pairs = case
    indices = np.array(sorted(pairs), np.int64)
    values = np.array([pairs[int(i)] for i in indices], np.float32)
    vector = SparseVector.from_pairs(indices, values, length)
    assert vector.nnz == len(pairs)
    assert vector.indices.tolist() == sorted(pairs)
    assert vector.values.tobytes() == values.tobytes()


def test_indices_and_values_are_views() -> None:
    vector = SparseVector.from_pairs(np.array([1, 2]), np.array([1.0, 2.0]), 3)
    vector.values[:] = 9
    vector.indices[0] = 0
    assert vector.entries.tolist() == [(0, 9.0), (2, 9.0)]


@pytest.mark.parametrize(
    ("indices", "values", "message"),
    [
        ([1, 2], [1.0], r"indices \(2,\) and values \(1,\)"),
        ([[1], [2]], [[1.0], [2.0]], r"indices \(2, 1\)"),
        ([-1, 2], [1.0, 1.0], r"indices -1\.\.2 are not within \[0, 5\)"),
        ([1, 5], [1.0, 1.0], r"indices 1\.\.5 are not within \[0, 5\)"),
        ([0, 3, 2], [1.0, 1.0, 1.0], "indices do not ascend strictly"),
        ([0, 2, 2], [1.0, 1.0, 1.0], "indices do not ascend strictly"),
        (np.array([0, 3, 2], np.uint32), [1.0, 1.0, 1.0], "indices do not ascend strictly"),
    ],
)
def test_pairs_that_are_no_sparse_vector_are_refused(indices: Any, values: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseVector.from_pairs(np.asarray(indices), np.asarray(values, np.float32), 5)


@pytest.mark.parametrize("length", [1, 2**31 - 1])
def test_every_length_that_int32_addresses_is_accepted(length: int) -> None:
    check_length(length)


@pytest.mark.parametrize("length", [0, -1, 2**31, 2**40])
def test_a_length_beyond_int32_is_refused_by_name(length: int) -> None:
    with pytest.raises(ValueError, match=rf"length {length} is not in \[1, 2147483647\]"):
        check_length(length)
