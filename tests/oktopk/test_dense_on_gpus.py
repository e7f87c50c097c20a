"""Dense steps through peer memory: windows that reducers share, a rank without room for them, gradients that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from oktopk import GradientAllreduce, NonFiniteGradientError
from oktopk.buckets import BucketedAllreduce
from tests.devices import get, gpus, put, use

pytestmark = [pytest.mark.mpi(min_size=2, max_size=8), pytest.mark.skipif(not gpus(), reason="no GPU")]
LENGTHS = (4099, 1, 700)


def gradients(rank: int, step: int) -> list[Any]:
    rng = np.random.default_rng((rank, step))
    return [rng.standard_normal(length).astype(np.float32) for length in LENGTHS]


def check_steps(comm: MPI.Intracomm, buckets: BucketedAllreduce) -> None:
    on_cpu = BucketedAllreduce(comm, LENGTHS, "dense")
    for step in range(3):
        mine = gradients(comm.rank, step)
        buckets.step([put("cuda", each) for each in mine])
        on_cpu.step(mine)
        for update, want in zip(buckets.updates, on_cpu.updates, strict=True):
            assert np.array_equal(get(update), want)
    on_cpu.close()


def test_buckets_share_one_window_and_the_last_one_closes_it(comm: MPI.Intracomm) -> None:
    use("cuda", comm)
    buckets = BucketedAllreduce(comm, LENGTHS, "dense", device="cuda")
    check_steps(comm, buckets)
    shared = buckets.transport.shared
    assert [users for _, users in shared.values()] == [len(LENGTHS)]
    assert not any(reducer.p2p_unavailable_reason for reducer in buckets.buckets)
    buckets.buckets[0].reset()  # gives its part back; the others go on
    assert [users for _, users in shared.values()] == [len(LENGTHS) - 1]
    check_steps(comm, buckets)
    buckets.close()
    assert not shared


@pytest.mark.parametrize("error", [MemoryError("no room here"), OSError("no driver here")])
def test_a_rank_without_room_for_windows_sends_all_to_messages(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    use("cuda", comm)
    from collectives import symmetric_memory

    reducer = GradientAllreduce(comm, LENGTHS[0], "dense", device="cuda")
    assert not reducer.p2p_unavailable_reason
    allocate = symmetric_memory.device_memory

    def refuse(nbytes: int) -> Any:
        if comm.rank == 1 and nbytes > 10 << 20:
            raise error
        return allocate(nbytes)

    monkeypatch.setattr(symmetric_memory, "device_memory", refuse)
    array = put("cuda", np.full(LENGTHS[0], comm.rank, np.float32))
    if comm.rank:
        reducer.step(array)
    else:
        with pytest.warns(UserWarning, match=f"dense sums go by messages: .*rank 1: {error}"):
            reducer.step(array)
    assert f"rank 1: {error}" in reducer.p2p_unavailable_reason
    assert (get(reducer.update) == (comm.size - 1) / 2).all()
    reducer.close()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_a_rank_whose_gradient_is_not_finite_is_named_and_the_next_step_goes_on(
    comm: MPI.Intracomm, bad: float
) -> None:
    use("cuda", comm)
    reducer = GradientAllreduce(comm, LENGTHS[0], "dense", device="cuda")
    gradient = np.ones(LENGTHS[0], np.float32)
    wrong = gradient.copy()
    if comm.rank == 1:
        wrong[77] = bad
    with pytest.raises(NonFiniteGradientError) as raised:
        reducer.step(put("cuda", wrong))
    assert raised.value.ranks == [1]
    with pytest.raises(ValueError, match="rank 1: a problem of its own"):
        reducer.step(put("cuda", gradient), problem="a problem of its own" if comm.rank == 1 else "")
    reducer.step(put("cuda", gradient))
    assert (get(reducer.update) == 1).all()
    with pytest.raises(NonFiniteGradientError) as raised:
        reducer.step(put("cuda", np.full(LENGTHS[0], 3e38, np.float32)))
    assert raised.value.ranks == []
    reducer.close()
