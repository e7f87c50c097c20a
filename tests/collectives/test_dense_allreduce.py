"""Rabenseifner's allreduce: the sum, its bits, and its words and messages to the last one."""

from __future__ import annotations

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from collectives.dense_allreduce import DenseAllreduce, dense_words
from collectives.mpi import MpiTransport

pytestmark = [pytest.mark.mpi, pytest.mark.also(ranks=8)]


def reduced(vector: NDArray[np.float32], transport: MpiTransport, scale: float = 1.0) -> NDArray[np.float32]:
    """The sum over the ranks of a vector that stays as it is."""
    result = vector.copy()
    allreduce = DenseAllreduce(result, transport)
    allreduce.run(scale)
    allreduce.free()
    return result


def test_integers_sum_exactly_for_any_length_and_are_scaled_once(transport: MpiTransport) -> None:
    for length in [*range(18), 31, 1000, 10_007]:
        vectors = [
            np.random.default_rng((length, rank)).integers(-1000, 1000, length)
            for rank in range(transport.size)
        ]
        result = reduced(vectors[transport.rank].astype(np.float32), transport, scale=0.25)
        assert result.tolist() == (0.25 * np.sum(vectors, axis=0)).tolist()


def test_floats_sum_to_rounding_with_the_same_bits_everywhere_and_every_time(transport: MpiTransport) -> None:
    rng = np.random.default_rng(transport.rank)
    vector = (rng.standard_normal(5003) * 10.0 ** rng.integers(-6, 6, 5003)).astype(np.float32)
    results = [reduced(vector, transport).tobytes() for _ in range(3)]
    everyone = transport.comm.allgather(results)
    vectors = np.array(transport.comm.allgather(vector), np.float64)
    assert len({result for theirs in everyone for result in theirs}) == 1
    error = np.abs(np.frombuffer(results[0], np.float32) - vectors.sum(axis=0))
    assert np.all(error <= 2.0**-23 * transport.size * np.abs(vectors).sum(axis=0))


def test_an_overflowing_sum_is_found_by_the_rank_that_took_it(transport: MpiTransport) -> None:
    vector = np.ones(64, np.float32)
    vector[10] = 3e38
    allreduce = DenseAllreduce(vector, transport)
    finite = transport.comm.allgather(allreduce.run())
    allreduce.free()
    assert finite.count(False) == (transport.size > 1)


def test_instances_on_one_transport_keep_to_themselves_step_after_step(transport: MpiTransport) -> None:
    first, second = np.zeros(10, np.float32), np.zeros(33, np.float32)
    one, two = DenseAllreduce(first, transport), DenseAllreduce(second, transport)
    results, size = [], transport.size
    for step in range(4):
        first[:], second[:] = step + transport.rank, 2
        two.run()
        one.run()
        results.append((first.tolist(), second.tolist()))
    one.free()
    two.free()
    assert results == [([step * size + size * (size - 1) / 2] * 10, [2 * size] * 33) for step in range(4)]


def expected_messages(ranks: int) -> int:
    """Over all ranks: two exchanges per halving, and four messages per surplus rank and its partner."""
    core = 2 ** (ranks.bit_length() - 1)
    return core * 2 * (ranks.bit_length() - 1) + 4 * (ranks - core)


def test_words_and_messages_are_the_formulas_when_the_length_divides(transport: MpiTransport) -> None:
    length = 64 * 15
    transport.take_traffic()
    reduced(np.ones(length, np.float32), transport)
    sent, size = transport.take_traffic(), transport.size
    words, messages = transport.comm.allreduce(sent.words), transport.comm.allreduce(sent.messages)
    busiest = transport.comm.allreduce(sent.words, MPI.MAX)
    assert words == pytest.approx(dense_words(length, size) * size, abs=1e-6)
    assert messages == expected_messages(size)
    if size & (size - 1) == 0:
        assert sent.words == busiest == 2 * length * (size - 1) // size
        assert sent.messages == 2 * (size.bit_length() - 1)
    assert sent.control_words == sent.control_messages == 0


def test_words_stay_near_the_formula_for_other_lengths(transport: MpiTransport) -> None:
    size = transport.size
    for length in (1, 2, 3, 5, 13, 997):
        transport.take_traffic()
        reduced(np.ones(length, np.float32), transport)
        sent = transport.take_traffic()
        words, messages = np.sum(transport.comm.allgather([sent.words, sent.messages]), axis=0)
        # a cut that does not divide moves one element more or less, each way, on each level
        assert abs(words - dense_words(length, size) * size) <= size * size.bit_length()
        assert messages <= expected_messages(size)
