"""Dense steps through peer memory: windows that reducers share, a rank without room for them, gradients that are not finite."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from oktopk import GradientAllreduce
from oktopk.buckets import BucketedAllreduce
from tests.devices import get, need_gpus, on_gpus, put, staged_transport, use

pytestmark = [pytest.mark.mpi(min_size=2, max_size=8), on_gpus, pytest.mark.host_cuda(ranks=3)]
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
    need_gpus(comm.size)
    use("cuda", comm)
    buckets = BucketedAllreduce(comm, LENGTHS, "dense", device="cuda")
    check_steps(comm, buckets)
    shared = buckets.transport.shared

    def users() -> list[int]:
        return [each.users for (what, *_), each in shared.items() if what == "dense"]

    assert users() == [len(LENGTHS)]
    assert not any(reducer.p2p_unavailable_reason for reducer in buckets.reducers)
    buckets.reducers[0].reset()  # gives its part back; the others go on
    assert users() == [len(LENGTHS) - 1]
    check_steps(comm, buckets)
    buckets.close()
    assert not users()


def test_buckets_of_one_connection_try_peer_memory_once(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_gpus(comm.size)
    use("cuda", comm)
    from collectives import device_transport

    tried, window = [], device_transport.SymmetricMemory

    def counted(*arguments: Any) -> Any:
        tried.append(arguments)
        return window(*arguments)

    monkeypatch.setattr(device_transport, "SymmetricMemory", counted)
    buckets = BucketedAllreduce(comm, LENGTHS, device="cuda", density=0.01)
    assert [reducer.p2p_unavailable_reason for reducer in buckets.reducers] == [""] * len(LENGTHS)
    assert len(tried) == 1
    buckets.close()
    GradientAllreduce(comm, LENGTHS[0], device="cuda", density=0.01).close()
    assert len(tried) == 2  # of another connection


@pytest.mark.parametrize("error", [MemoryError("no room here"), OSError("no driver here")])
def test_a_rank_without_room_for_windows_sends_all_to_messages(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    need_gpus(comm.size)
    use("cuda", comm)
    from collectives import symmetric_memory

    reducer = GradientAllreduce(comm, LENGTHS[0], "dense", device="cuda")
    assert not reducer.p2p_unavailable_reason
    allocate = symmetric_memory.device_memory

    def refuse(nbytes: int) -> Any:
        if comm.rank == 1 and nbytes > 10 << 20:
            raise error
        return allocate(nbytes)

    array = put("cuda", np.full(LENGTHS[0], comm.rank, np.float32))
    with monkeypatch.context() as patch:
        patch.setattr(symmetric_memory, "device_memory", refuse)
        if comm.rank:
            reducer.step(array)
        else:
            with pytest.warns(UserWarning, match=f"dense sums go by messages: .*rank 1: {error}"):
                reducer.step(array)
    assert f"rank 1: {error}" in reducer.p2p_unavailable_reason
    assert (get(reducer.update) == (comm.size - 1) / 2).all()
    reducer.reset()
    for _ in range(2):  # windows are asked for again
        assert not reducer.p2p_unavailable_reason
        reducer.step(array)
        assert (get(reducer.update) == (comm.size - 1) / 2).all()


def summed(transport: Any, timeout: float = 600.0, stream: Any = None) -> Any:
    """A sum through peer memory, and its vector."""
    from collectives.cuda.dense_vector import P2PDenseAllreduce
    from collectives.cuda.device import Device

    vector = put("cuda", np.full(700, transport.rank + 1, np.float32))
    device = transport.device if stream is None else Device(stream)
    return P2PDenseAllreduce(vector, transport, device, timeout), vector


def check_sum(comm: MPI.Intracomm, made: tuple[Any, Any]) -> None:
    allreduce, vector = made
    vector.set(np.full(700, comm.rank + 1, np.float32))
    assert allreduce.run()
    assert (get(vector) == comm.size * (comm.size + 1) / 2).all()


def test_vectors_share_windows_only_where_all_ranks_can_and_with_one_limit(comm: MPI.Intracomm) -> None:
    transport = staged_transport(comm)
    import cupy

    first, same, hasty = summed(transport), summed(transport), summed(transport, timeout=5.0)
    # only one rank's stream is another one
    apart = summed(transport, stream=cupy.cuda.Stream(non_blocking=True) if comm.rank == 1 else None)
    windows = [allreduce._windows for allreduce, _ in (first, same, hasty, apart)]
    assert windows[0] is windows[1]
    assert len({id(each) for each in windows}) == 3
    for each in (first, same, hasty, apart):
        check_sum(comm, each)
    hasty[0].check()
    comm.Barrier()
    if comm.rank == 0:
        hasty[0].abort()
    comm.Barrier()
    with pytest.raises(RuntimeError, match="rank 0 raised an error of its own"):
        hasty[0].check()  # before the state is saved, whether or not a sum met it
    again = summed(transport, timeout=5.0)  # not in the windows that were aborted
    for each in (again, first):
        check_sum(comm, each)
    for each in (first, same, hasty, apart, again):
        each[0].free()
    assert not transport.shared


def test_a_callers_error_is_raised_by_all_before_the_next_step(
    comm: MPI.Intracomm,
) -> None:
    use("cuda", comm)
    reducer = GradientAllreduce(comm, LENGTHS[0], "dense", device="cuda")
    gradient = put("cuda", np.ones(LENGTHS[0], np.float32))
    with pytest.raises(ValueError, match="rank 1: a problem of its own"):
        reducer.step(gradient, problem="a problem of its own" if comm.rank == 1 else "")
    reducer.step(gradient)
    assert (get(reducer.update) == 1).all()
