"""Ranks of a torch process group: what they compute, send and refuse is what ranks of MPI do."""

from __future__ import annotations

import re
import time
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

import oktopk
from collectives.errors import MissingRanksError
from oktopk import DistributedOptimizer, GradientAllreduce, average_buffers
from oktopk.buckets import BucketedAllreduce
from tests.devices import get, put
from tests.training import network, squares

pytestmark = [pytest.mark.mpi, pytest.mark.host_cuda(ranks=3)]

LENGTH = 5000


@pytest.mark.mpi(min_size=2)
def test_all_buckets_share_one_nccl_communicator(comm: MPI.Intracomm, nccl_group: Any, cuda: str) -> None:
    lengths, settings = [700, 300, 1500], {"density": 0.05, "peer_memory": False, "device": cuda}
    both = [BucketedAllreduce(over, lengths, **settings) for over in (comm, nccl_group)]
    assert both[1].transport.library == "nccl"
    transports: list[Any] = [bucket.transport for bucket in both[1].reducers]
    whole = transports[0].comm.whole
    assert all(transport.comm.whole is whole for transport in transports)
    rng = np.random.default_rng(comm.rank)
    for _ in range(4):
        gradients = [put(cuda, rng.standard_normal(length).astype(np.float32)) for length in lengths]
        for reducer in both:
            reducer.step(gradients)
        for one, other in zip(both[0].updates, both[1].updates, strict=True):
            assert get(one).tobytes() == get(other).tobytes()
    for reducer in both:
        reducer.close()
    assert whole.messages is None


@pytest.mark.mpi(min_size=2)
def test_nccl_is_not_ended_where_ranks_did_not_come(
    comm: MPI.Intracomm, nccl_group: Any, cuda: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"density": 0.05, "peer_memory": False, "device": cuda, "timeout": 2.0}
    reducer = BucketedAllreduce(nccl_group, [700, 300], **settings)
    transport: Any = reducer.reducers[-1].transport  # the first one gives up
    ended: list[bool] = []
    monkeypatch.setattr(transport.comm.whole.messages, "close", lambda: ended.append(True))
    gradients = [put(cuda, np.ones(length, np.float32)) for length in reducer.lengths]
    reducer.step(gradients)
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(3.0)  # the others have given up, and wait to hear of each other
    with pytest.raises(MissingRanksError):
        reducer.step(gradients)
    assert not transport.gave_up
    reducer.close()
    assert not ended
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_a_process_group_forgets_what_ranks_missed_earlier(
    comm: MPI.Intracomm, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its name is the same, and its store another."""
    monkeypatch.setattr("collectives.limit.ANSWER", 0.5)
    store = dist.distributed_c10d._get_default_store()
    first, second = dist.PrefixStore("first", store), dist.PrefixStore("second", store)
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: first)
    if comm.rank:
        with pytest.raises(MissingRanksError):
            GradientAllreduce(group, 10, timeout=0.5)
    comm.Barrier()
    monkeypatch.setattr("torch.distributed.distributed_c10d._get_default_store", lambda: second)
    reducer = GradientAllreduce(group, 10, timeout=20.0)
    assert reducer.step(np.ones(10, np.float32)).global_nnz


@pytest.mark.also(ranks=1)
def test_no_communicator_is_the_default_process_group_where_there_is_one(
    comm: MPI.Intracomm, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer = GradientAllreduce(None, 10)
    assert (reducer.transport.library, reducer.transport.size) == ("gloo", comm.size)
    reducer.close()
    if comm.size == 1:
        monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
        with pytest.raises(
            oktopk.LauncherError, match=r"4 processes, but torch's default process group has size 1"
        ):
            GradientAllreduce(None, 10)
        GradientAllreduce(group, 10).close()


@pytest.mark.mpi(min_size=2)
def test_ranks_in_different_numbers_of_groups_still_find_each_other(comm: MPI.Intracomm, group: Any) -> None:
    """Names that torch gives to groups count those of a process."""
    part = dist.new_group(list(range(comm.size - 1)))
    if comm.rank < comm.size - 1:
        inner = GradientAllreduce(part, 100, density=0.1)
    whole = GradientAllreduce(group, 100, density=0.1)
    gradient = np.arange(100, dtype=np.float32)
    assert whole.step(gradient).global_nnz
    if comm.rank < comm.size - 1:
        assert inner.step(gradient).global_nnz
        assert inner.transport.size == comm.size - 1
        inner.close()
    dist.all_reduce(torch.ones(1))  # the caller's group works as before


def test_an_optimizer_over_gloo_trains_to_the_parameters_of_one_over_mpi(
    comm: MPI.Intracomm, group: Any
) -> None:
    trained = []
    for over in (comm, None):
        model = network(comm.rank)
        with pytest.warns(UserWarning, match="differed") if comm.rank == 0 < comm.size - 1 else nullcontext():
            optimizer = DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9), over, density=0.1, clip_norm=1.0
            )
        assert f"library='{'gloo' if over is None else 'MPI'}'" in repr(optimizer)
        for step in range(4):
            optimizer.zero_grad()
            squares(model, comm.rank, step).backward()
            optimizer.step()
        average_buffers(model, over)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.close()
        trained.append(b"".join(v.numpy().tobytes() for v in model.state_dict().values()))
    assert trained[0] == trained[1]
    assert len(set(comm.allgather(trained[0]))) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("settings", [{}, {"levels": "hosts", "ranks_per_host": 1}])
def test_the_others_name_a_rank_that_ends_and_the_step(
    comm: MPI.Intracomm, group: Any, settings: dict[str, Any]
) -> None:
    reducer = GradientAllreduce(group, 100, density=0.1, **settings)
    gradient = np.arange(100, dtype=np.float32)
    for _ in range(3):  # step 3 renews no regions, where a rank waits for its neighbours alone
        reducer.step(gradient)
    comm.Barrier()
    if comm.rank < comm.size - 1:
        sentence = "step 3: a rank has closed its connections: it has ended or raised, and is among rank(s) "
        sentence += f"{comm.size - 1}, which do not answer; see its output"
        with pytest.raises(RuntimeError, match=f"^{re.escape(sentence)}$"):
            reducer.step(gradient)
    else:  # as the end of a process does
        inside: Any = [] if reducer.group is None else reducer.group._transports
        for transport in (reducer.transport, *inside):
            transport._gloo = None
            transport._recent.clear()
    comm.Barrier()
    reducer.close()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_comes_within_the_limit_is_waited_for(
    comm: MPI.Intracomm, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.limit._EARLY", 0.2)
    late = comm.size - 1
    comm.Barrier()
    if comm.rank == late:
        time.sleep(0.5)  # longer than others wait without looking
    reducer = GradientAllreduce(group, 100, density=0.1, timeout=20.0)
    if comm.rank == late:
        time.sleep(0.5)
    for _ in range(2):
        assert reducer.step(np.arange(100, dtype=np.float32)).global_nnz


@pytest.mark.also(ranks=1)
def test_ranks_of_one_host_listen_on_loopback(
    group: dist.ProcessGroup, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    gloo: Any = dist.ProcessGroupGloo
    names: list[str] = []
    create = gloo.create_device

    def created(hostname: str) -> Any:
        names.append(hostname)
        return create(hostname=hostname)

    monkeypatch.setattr(gloo, "create_device", created)
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    GradientAllreduce(group, 10).close()
    assert set(names) == {"127.0.0.1"}
    names.clear()
    monkeypatch.setattr("collectives.process_group.host_name", lambda: f"host {comm.rank}")
    GradientAllreduce(group, 10, levels="flat").close()
    assert bool(names) == (comm.size == 1)  # several hosts take the addresses of their names
