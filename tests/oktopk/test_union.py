"""The union of the ranks' choices: what is cleared, what each wire does, what damaged bytes and cancelled sums lead to."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from collectives.codec import CodedEntries
from collectives.sparse import ENTRY, MAX_LENGTH
from collectives.sum_values import CodedValues
from oktopk import GradientAllreduce, NonFiniteGradientError
from oktopk.methods.union import SharedSupport, union_words
from tests.devices import get, put, use

LENGTH = 4000


def reducer(comm: MPI.Intracomm, device: str, wire: str = "plain", **settings: Any) -> GradientAllreduce:
    use(device, comm)
    chosen = {"density": 0.05, "threshold_interval": 3, "average": False, "wire": wire} | settings
    return GradientAllreduce(comm, LENGTH, "union", device=device, **chosen)


def gradient_of(comm: MPI.Intracomm, step: int) -> np.ndarray:
    drawn = np.random.default_rng((comm.rank, step)).standard_t(3, LENGTH)
    return drawn.astype(np.float32)


def test_words_by_formula() -> None:
    assert union_words([32] * 4, 1000) == (3 / 4 * (4 * 8 + 64), 3 / 4 * (4 * 8 + 256))
    assert union_words([0, 300], MAX_LENGTH)[1] <= 150 * (2 + np.log2(MAX_LENGTH / 300)) / 32 + 300 + 2
    assert [SharedSupport.local_k(k, 3) for k in (1, 3, 4)] == [1, 1, 2]


def test_one_rank_rounds_nothing() -> None:
    coded, plain = (reducer(MPI.COMM_SELF, "cpu", wire) for wire in ("int4", "plain"))
    for step in range(3):
        for each in (coded, plain):
            each.step(gradient_of(MPI.COMM_SELF, step))
        assert np.array_equal(coded.update, plain.update)
        assert np.array_equal(coded.residual, plain.residual)


@pytest.mark.mpi(min_size=2)
def test_what_cancels_over_the_ranks_is_cleared_on_all(comm: MPI.Intracomm, device: str) -> None:
    """All ranks choose indices 0 and 1, the last rank with other signs; at index 0 the sum is 0."""
    reduced = reducer(comm, device, density=2 * comm.size / LENGTH)
    gradient = np.full(LENGTH, 1.0, np.float32)
    gradient[:2] = [100, 101 + comm.rank]
    if comm.rank == comm.size - 1:
        gradient[:2] = [-100 * (comm.size - 1), -50]
    reduced.step(put(device, gradient))
    update, left = get(reduced.update), get(reduced.residual)
    expected = sum(101 + rank for rank in range(comm.size - 1)) - 50
    assert update[:2].tolist() == [0, expected]
    assert not left[:2].any()


@pytest.mark.mpi
@pytest.mark.parametrize("wire", ["plain", "int4"])
def test_chosen_indices_travel_in_the_bytes_of_indices_alone(
    comm: MPI.Intracomm, device: str, wire: str
) -> None:
    """The even ranks choose the same indices; the odd ones choose nothing, and send zeros."""
    reduced = reducer(comm, device, wire, density=100 * comm.size / LENGTH)
    gradient = np.zeros(LENGTH, np.float32)
    at = 7 * np.arange(1, 101)
    gradient[at] = 0.0 if comm.rank % 2 else 1.0 + at
    report = reduced.step(put(device, gradient))
    even, odd = -(-comm.size // 2), comm.size // 2
    assert report.local_nnz == (0 if comm.rank % 2 else 100)
    assert np.array_equal(get(reduced.update).nonzero()[0], at)
    if wire == "plain":
        assert np.array_equal(get(reduced.update)[at], even * (1.0 + at))
        assert comm.allreduce(report.words) / comm.size <= union_words([100] * even + [0] * odd, LENGTH)[0]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("fails", ["support", "sent", "gathered"])
def test_damage_raises_on_all_ranks_and_names_its_rank(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    reduced = reducer(comm, "cpu", "int8")
    reduced.step(gradient_of(comm, 0))
    before = reduced.residual.copy()
    name, at = {
        "support": ("encode", 1),
        "sent": ("encode_values", 1),
        "gathered": ("encode_values", comm.size),
    }[fails]
    encode, calls = getattr(CodedValues, name), []

    def damaging(codec: Any, *arguments: Any) -> None:
        encode(codec, *arguments)
        calls.append(name)
        if comm.rank == 1 and len(calls) == at:
            wire = arguments[-2]
            wire[:] = np.full(len(wire), -1, np.int64).view(ENTRY)

    monkeypatch.setattr(CodedEntries if fails == "support" else CodedValues, name, damaging)
    # a sum that is not finite may be no damage
    message = "not finite" if fails == "gathered" else "int8 entries are damaged that came from rank 1"
    with pytest.raises((ValueError, NonFiniteGradientError), match=message):
        reduced.step(gradient_of(comm, 1))
    assert not reduced.update.any()
    assert np.allclose(reduced.residual, before, atol=1e-5)
    monkeypatch.undo()
    reduced.step(gradient_of(comm, 2))
    assert reduced.update.any()
