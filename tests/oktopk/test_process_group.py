"""Ranks of a torch process group: what they compute, send and refuse is what ranks of MPI do."""

from __future__ import annotations

import ctypes
import dataclasses
import time
from contextlib import nullcontext
from datetime import timedelta
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn

import oktopk
from collectives.transport import MissingRanksError
from oktopk import DistributedOptimizer, GradientAllreduce, StepReport, average_buffers
from oktopk.buckets import BucketedAllreduce
from tests import oracle as reference
from tests.devices import DEVICES, asynchronous, get, gpus, put, use
from tests.inputs import SHAPES
from tests.oktopk.test_contract import check_caps, run

pytestmark = pytest.mark.mpi

LENGTH = 5000


def counted(report: StepReport) -> str:
    """A report without times, and for gTopk without what a message of unknown length counts as, which differs."""
    left = {**dataclasses.asdict(report), "seconds": None}
    if left["measures"]:
        left["measures"]["seconds"] = None
    if report.method == "gtopk":
        left |= dict.fromkeys(("messages", "control_words", "control_messages"))
    return repr(left)  # NaN equals itself


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dense", {}),
        ("gtopk", {}),
        ("topkdsa", {"momentum_correction": 0.5}),
        ("oktopk", {"wire": "plain", "bucket_rounds": 1}),
        ("oktopk", {"wire": "float32", "momentum_correction": 0.5}),
        ("oktopk", {"wire": "int8"}),
        ("oktopk", {"levels": "hosts", "ranks_per_host": 2}),
    ],
    ids=str,
)
def test_gloo_gives_the_bits_and_counts_the_words_of_mpi(
    comm: MPI.Intracomm, group: Any, method: str, settings: dict[str, Any]
) -> None:
    settings = {"density": 0.02, "threshold_interval": 3, "boundary_interval": 2} | settings
    both = [GradientAllreduce(over, LENGTH, method, **settings) for over in (comm, group)]
    assert [reducer.transport.library for reducer in both] == ["MPI", "gloo"]
    rng = np.random.default_rng(comm.rank)
    for step in range(7):
        gradient = rng.standard_normal(LENGTH).astype(np.float32)
        if step % 2:
            gradient[: LENGTH // 20] *= 50  # one region has most of it: balancing moves entries
        reports = [counted(reducer.step(gradient, measure=step == 5)) for reducer in both]
        assert reports[0] == reports[1]
        assert both[0].update.tobytes() == both[1].update.tobytes()
        if both[0].residual is not None:
            assert both[0].residual.tobytes() == both[1].residual.tobytes()
    states = [reducer.state_dict() for reducer in both]
    both[1].load_state_dict(states[0])
    for reducer in both:
        reducer.close()


@pytest.mark.parametrize("method", ["dense", "gtopk", "oktopk"])
def test_over_gloo_exact_steps_are_the_oracles_and_nothing_is_lost(
    comm: MPI.Intracomm, group: Any, method: str
) -> None:
    for length, density in SHAPES:
        for step in run(comm, "cpu", method, "clustered", length, density, over=group, threshold_interval=1):
            gradients, before = step.gradients.astype(np.float64), step.before.astype(np.float64)
            expected = reference.ORACLES[method](gradients, before, step.report.k)
            assert np.array_equal(step.update, expected.update), (length, density)
            assert np.array_equal((gradients + before).sum(axis=0), step.after.sum(axis=0) + step.update)
            check_caps(comm, method, length, step)


@pytest.mark.parametrize("peer_memory", [False, True])
@pytest.mark.parametrize("device", DEVICES[1:])
def test_on_gpus_gloo_gives_the_bits_of_mpi(
    comm: MPI.Intracomm, group: Any, device: str, peer_memory: bool
) -> None:
    use(device, comm)
    settings = {"density": 0.02, "threshold_interval": 3, "peer_memory": peer_memory, "device": device}
    both = [GradientAllreduce(over, LENGTH, **settings) for over in (comm, group)]
    assert both[0].p2p_unavailable_reason == both[1].p2p_unavailable_reason
    rng = np.random.default_rng(comm.rank)
    for _ in range(5):
        gradient = put(device, rng.standard_normal(LENGTH).astype(np.float32))
        words = [reducer.step(gradient).words for reducer in both]
        assert words[0] == words[1]
        assert get(both[0].update).tobytes() == get(both[1].update).tobytes()
    for reducer in both:
        reducer.close()


class GlooMessages:
    """In place of `NcclMessages` where GPUs are on the host: a batch is over before the next one starts, as on NCCL's stream."""

    def __init__(self, whole: Any, device: Any) -> None:
        self.users = 0
        store = dist.PrefixStore("gloo messages", whole.store)
        self._gloo = dist.ProcessGroupGloo(store, whole.rank, whole.size, timedelta(seconds=30))

    def exchange(self, operations: Any, stream: int) -> Any:
        assert operations
        works = [getattr(self._gloo, operation)([tensor], rank, 0) for operation, tensor, rank in operations]
        for work in works:
            work.wait()
        return object()

    def wait(self, work: Any, stream: int) -> None:
        assert work is not None

    def close(self) -> None:
        """Nothing is shared with other processes."""


@pytest.fixture
def nccl_group(comm: MPI.Intracomm, group: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process group that moves device arrays by NCCL; where GPUs are on the host, by what stands for it."""
    if asynchronous():
        if gpus() < comm.size:
            pytest.skip("a GPU a rank")
        use("cuda", comm)
        return dist.new_group(backend="nccl")
    from collectives import process_group_cuda

    def tensor(array: Any, gpu: int) -> torch.Tensor:
        memory = (ctypes.c_uint8 * array.nbytes).from_address(process_group_cuda.address_of(array))
        return torch.frombuffer(memory, dtype=torch.uint8)

    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(process_group_cuda, "NcclMessages", GlooMessages)
    monkeypatch.setattr(process_group_cuda, "_tensor", tensor)
    return group


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("dense", {}),
        ("gtopk", {}),
        ("topkdsa", {"momentum_correction": 0.5}),
        ("oktopk", {"wire": "plain", "bucket_rounds": 1}),
        ("oktopk", {"wire": "int8"}),
        ("oktopk", {"levels": "hosts", "ranks_per_host": 1, "peer_memory": None}),
    ],
    ids=str,
)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_by_nccl_messages_give_the_bits_and_count_the_words_of_mpi(
    comm: MPI.Intracomm, nccl_group: Any, device: str, method: str, settings: dict[str, Any]
) -> None:
    use(device, comm)
    settings = {"density": 0.02, "threshold_interval": 3, "peer_memory": False, "device": device} | settings
    both = [GradientAllreduce(over, LENGTH, method, **settings) for over in (comm, nccl_group)]
    assert [reducer.transport.library for reducer in both] == ["MPI", "nccl"]
    rng = np.random.default_rng(comm.rank)
    for step in range(5):
        gradient = rng.standard_normal(LENGTH).astype(np.float32)
        if step % 2:
            gradient[: LENGTH // 20] *= 50  # one region has most of it: balancing moves entries
        reports = [counted(reducer.step(put(device, gradient))) for reducer in both]
        assert reports[0] == reports[1]
        assert get(both[0].update).tobytes() == get(both[1].update).tobytes()
    for reducer in both:
        reducer.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_all_buckets_share_one_nccl_communicator(comm: MPI.Intracomm, nccl_group: Any, device: str) -> None:
    use(device, comm)
    lengths, settings = [700, 300, 1500], {"density": 0.05, "peer_memory": False, "device": device}
    both = [BucketedAllreduce(over, lengths, **settings) for over in (comm, nccl_group)]
    assert both[1].transport.library == "nccl"
    transports: list[Any] = [bucket.transport for bucket in both[1].buckets]
    whole = transports[0].comm.whole
    assert all(transport.comm.whole is whole for transport in transports)
    rng = np.random.default_rng(comm.rank)
    for _ in range(4):
        gradients = [put(device, rng.standard_normal(length).astype(np.float32)) for length in lengths]
        for reducer in both:
            reducer.step(gradients)
        for one, other in zip(both[0].updates, both[1].updates, strict=True):
            assert get(one).tobytes() == get(other).tobytes()
    for reducer in both:
        reducer.close()
    assert whole.messages is None


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device", DEVICES[1:])
def test_nccl_is_not_ended_where_ranks_did_not_come(
    comm: MPI.Intracomm, nccl_group: Any, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(device, comm)
    monkeypatch.setattr("collectives.limit._ANSWER", 1.5)
    settings = {"density": 0.05, "peer_memory": False, "device": device, "timeout": 2.0}
    reducer = BucketedAllreduce(nccl_group, [700, 300], **settings)
    transport: Any = reducer.buckets[-1].transport  # the first one gives up
    ended: list[bool] = []
    monkeypatch.setattr(transport.comm.whole.messages, "close", lambda: ended.append(True))
    gradients = [put(device, np.ones(length, np.float32)) for length in reducer.lengths]
    reducer.step(gradients)
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(4.5)
    with pytest.raises(MissingRanksError):
        reducer.step(gradients)
    assert not transport.gave_up
    reducer.close()
    assert not ended
    comm.Barrier()


def test_no_communicator_is_the_default_process_group_where_there_is_one(
    comm: MPI.Intracomm, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    reducer = GradientAllreduce(None, 10)
    assert (reducer.transport.library, reducer.transport.size) == ("gloo", comm.size)
    reducer.close()
    with pytest.raises(
        TypeError,
        match=r"comm is a int, not an mpi4py\.MPI\.Intracomm or a torch\.distributed\.ProcessGroup",
    ):
        GradientAllreduce(3, 10)  # type: ignore[arg-type]
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
    whole.close()


def network(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.BatchNorm1d(30), nn.ReLU(), nn.Linear(30, 7))


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
            drawn = torch.Generator().manual_seed(1000 * step + comm.rank)
            model(torch.randn(8, 20, generator=drawn)).square().sum().backward()
            optimizer.step()
        average_buffers(model, over)
        optimizer.load_state_dict(optimizer.state_dict())
        optimizer.close()
        trained.append(b"".join(v.numpy().tobytes() for v in model.state_dict().values()))
    assert trained[0] == trained[1]
    assert len(set(comm.allgather(trained[0]))) == 1


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_comes_within_the_limit_is_waited_for(comm: MPI.Intracomm, group: Any) -> None:
    late = comm.size - 1
    comm.Barrier()
    if comm.rank == late:
        time.sleep(1.3)  # longer than others wait without looking
    reducer = GradientAllreduce(group, 100, density=0.1, timeout=20.0)
    if comm.rank == late:
        time.sleep(1.3)
    for _ in range(2):
        assert reducer.step(np.arange(100, dtype=np.float32)).global_nnz
    reducer.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("levels", ["flat", "hosts"])
def test_ranks_that_do_not_come_to_a_step_are_named_by_all(
    comm: MPI.Intracomm, group: Any, levels: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.limit._ANSWER", 1.5)
    reducer = GradientAllreduce(group, 100, density=0.1, timeout=0.5, levels=levels, ranks_per_host=2)
    gradient = np.arange(100, dtype=np.float32)
    for _ in range(2):
        reducer.step(gradient)
    comm.Barrier()
    if comm.rank == 0:
        time.sleep(2.5)
    began = time.monotonic()
    with pytest.raises(MissingRanksError, match=r"step 2: rank\(s\) 0 did not come within 0\.5 s") as caught:
        reducer.step(gradient)
    assert caught.value.ranks == [0]
    with pytest.raises(MissingRanksError):  # nothing goes on after that
        reducer.step(gradient)
    assert time.monotonic() - began < 60
    reducer.close()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("what", "comes"),
    [("GradientAllreduce", "late"), ("GradientAllreduce", "never"), ("DistributedOptimizer", "late")],
)
def test_ranks_that_do_not_come_to_a_construction_are_named_by_all(
    comm: MPI.Intracomm, group: Any, what: str, comes: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("collectives.limit._ANSWER", 1.5)
    own = dist.new_group()  # not to be used after that
    first: Any = 10 if what == "GradientAllreduce" else torch.optim.SGD(network(0).parameters(), lr=0.1)
    arguments = (own, first) if what == "GradientAllreduce" else (first, own)
    missing = comm.size - 1
    comm.Barrier()
    if comm.rank == missing:
        time.sleep(2.5)
    if comm.rank != missing or comes == "late":
        began = time.monotonic()
        with pytest.raises(
            MissingRanksError, match=rf"^{what}\(\.\.\.\): rank\(s\) {missing} did not come within 0\.5 s"
        ):
            getattr(oktopk, what)(*arguments, timeout=0.5)
        assert time.monotonic() - began < 60
    comm.Barrier()
