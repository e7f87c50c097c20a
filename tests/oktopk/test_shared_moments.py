"""Second moments become the mean over the replicas, a slice at a time."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

from oktopk import GradientAllreduce
from oktopk.torch.interop import memory_of
from oktopk.torch.local_step import SHARED_BY
from oktopk.torch.replica import Replica
from oktopk.torch.updates.shared_moments import SLICES, SharedMoments
from tests.devices import on_torchs_gpu, torch_device
from tests.training import network, steady, train

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.also(ranks=6)]


FEW = 3


class Case:
    """An optimizer with second moments of this rank, over many octaves, and what averages them."""

    def __init__(self, comm: MPI.Intracomm, device: str = "cpu", **settings: Any) -> None:
        place = torch_device(device, comm)
        drawn = torch.Generator().manual_seed(comm.rank)
        shapes = [(40, 50), (7,), (3, 8, 5, 5), (0,), (1,)]
        self.parameters = [torch.zeros(shape, device=place, requires_grad=True) for shape in shapes]
        optimizer = torch.optim.Adam(self.parameters)
        for parameter in self.parameters:
            octaves = torch.rand(parameter.shape, generator=drawn) * 20 - 60
            optimizer.state[parameter] = {"exp_avg_sq": (2.0**octaves).to(place)}
        self.state = optimizer.state
        length = sum(each.numel() for each in self.parameters)
        settings = {"density": 0.1, "device": device, **settings}
        self.reducer = GradientAllreduce(comm, length, "union", **settings)
        self.shared = SharedMoments(optimizer, Replica(self.parameters), self.reducer, memory_of(place), FEW)

    def moments(self, number: int) -> torch.Tensor:
        return self.state[self.parameters[number]]["exp_avg_sq"]

    def average_all(self) -> None:
        for number in range(FEW):
            self.shared.average(number)


def means(comm: MPI.Intracomm, values: torch.Tensor, weight: float = 1.0) -> np.ndarray[Any, Any]:
    """The mean over the ranks, in float64. weight: of this rank's."""
    total = np.zeros(values.shape)
    comm.Allreduce(values.cpu().numpy().astype(np.float64) * weight, total)
    return total / comm.allreduce(weight)


def near(found: torch.Tensor, wanted: np.ndarray[Any, Any]) -> bool:
    """Whether values differ by the rounding of 8 bits, there and back, over blocks of at most 25 octaves."""
    return np.allclose(found.cpu().numpy(), wanted, rtol=2 * (2 ** (25 / 127 / 2) - 1), atol=0)


@pytest.mark.parametrize("device", ["cpu", on_torchs_gpu("cuda", id="cuda")])
def test_all_slices_become_the_mean_with_equal_bits(comm: MPI.Intracomm, device: str) -> None:
    case = Case(comm, device)
    case.moments(0)[3] = 0.0
    wanted = [means(comm, case.moments(number)) for number in range(5)]
    case.average_all()
    for number, mean in enumerate(wanted):
        assert near(case.moments(number), mean)
        assert len(set(comm.allgather(case.moments(number).cpu().numpy().tobytes()))) == 1
    assert not case.moments(0)[3].any()
    length, size = case.reducer.length, comm.size
    bits = comm.allreduce(case.reducer.take_traffic().bytes) * 8 / length / size
    assert 20 * (size - 1) / size < bits < 24 * (size - 1) / size  # of lists so short heads count, too


def test_one_slice_leaves_the_others_alone(comm: MPI.Intracomm) -> None:
    case = Case(comm)
    before = [case.moments(number).clone() for number in range(5)]
    case.shared.average(FEW + 1)
    size = -(-sum(each.numel() for each in before) // FEW)
    changed = case.moments(0).reshape(-1) != before[0].reshape(-1)
    assert changed[size : 2 * size].any()
    assert not (changed[:size].any() or changed[2 * size :].any())
    assert all(torch.equal(case.moments(number), before[number]) for number in range(1, 5))


def test_a_rank_that_has_not_stepped_keeps_its_moments(comm: MPI.Intracomm) -> None:
    case = Case(comm)
    own, wanted = case.moments(0).clone(), means(comm, case.moments(0))
    for number in range(FEW):
        case.shared.average(number, takes=comm.rank > 0)
    assert near(case.moments(0), wanted) if comm.rank else torch.equal(case.moments(0), own)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_the_mean_is_of_what_ranks_have_and_finite(comm: MPI.Intracomm, value: float) -> None:
    """Rank 0 has none of the first parameter, and the third one's in another memory format."""
    case = Case(comm)
    total = means(comm, case.moments(0) * float(comm.rank > 0)) * comm.size
    own = case.moments(1).clone()
    if comm.rank == comm.size - 1:
        case.moments(1)[2], own[2] = value, 0.0
    wanted = means(comm, own), means(comm, case.moments(2))
    if comm.rank == 0:
        del case.state[case.parameters[0]]
        state = case.state[case.parameters[2]]
        state["exp_avg_sq"] = state["exp_avg_sq"].contiguous(memory_format=torch.channels_last)
    case.average_all()
    if comm.rank:
        assert near(case.moments(0), total / (comm.size - 1))
    else:
        assert case.parameters[0] not in case.state
    assert near(case.moments(1), wanted[0]) and near(case.moments(2).contiguous(), wanted[1])


def test_moments_beside_a_largest_one_are_left_alone(comm: MPI.Intracomm) -> None:
    case = Case(comm)
    case.state[case.parameters[0]]["max_exp_avg_sq"] = case.moments(0).clone()
    before = case.moments(0).clone()
    case.average_all()
    assert torch.equal(case.moments(0), before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_small_moments_of_few_bits_become_no_zero(comm: MPI.Intracomm, dtype: torch.dtype) -> None:
    case = Case(comm)
    for parameter in case.parameters:
        case.state[parameter]["exp_avg_sq"] = torch.full(parameter.shape, 2.0**-24, dtype=dtype)
    if comm.rank:
        for number in range(5):
            case.moments(number).zero_()
    case.average_all()
    if comm.rank == 0:
        assert all(case.moments(number).all() for number in range(5))


def test_a_step_behind_an_average_applies_what_it_would_without(comm: MPI.Intracomm) -> None:
    case, alone = Case(comm), Case(comm)
    rng = np.random.default_rng(comm.rank)
    for _ in range(3):
        gradient = rng.standard_normal(case.reducer.length).astype(np.float32)
        for each in (case, alone):
            each.reducer.step(gradient)
        assert np.array_equal(case.reducer.update, alone.reducer.update)
        case.shared.average(1)


def test_a_nonfinite_mean_leaves_the_slice_as_it_is(comm: MPI.Intracomm) -> None:
    case = Case(comm)
    case.moments(4)[:] = torch.finfo(torch.float32).max
    before = case.moments(4).clone()
    case.average_all()
    assert torch.equal(case.moments(4), before)


@pytest.mark.mpi(min_size=3)
def test_hosts_count_by_their_ranks(comm: MPI.Intracomm) -> None:
    case = Case(comm, levels="hosts", ranks_per_host=2)
    host = comm.Split(comm.rank // 2, comm.rank)
    for number in (0, 2):  # the ranks of a host have equal ones
        host.Bcast(case.moments(number).numpy())
    wanted = means(comm, case.moments(0))
    case.average_all()
    assert near(case.moments(0), wanted)
    assert len(set(comm.allgather(case.moments(0).numpy().tobytes()))) == 1
    host.Free()


@pytest.mark.mpi(min_size=3)
def test_pieces_are_averaged_among_the_holders_of_a_shard(comm: MPI.Intracomm) -> None:
    """By the ranks of their hosts; a rank without a shard sends and changes nothing."""
    case = Case(comm, levels="hosts", ranks_per_host=2)
    group, begin, pieces = case.reducer.group, 0, []
    assert group is not None
    for parameter in case.parameters:
        end = begin + parameter.numel()
        shard = -1 if group.shard is None else group.shard
        own = [] if shard < 0 else group.layout.spans_of_shard(((begin, end),), shard)
        first, last = next(iter(own), (0, 0))
        pieces.append(case.state[parameter]["exp_avg_sq"].reshape(-1)[: last - first].clone())
        case.state[parameter]["exp_avg_sq"], begin = pieces[-1], end
    inner = torch.optim.Adam(case.parameters)
    sharded: Any = SimpleNamespace(pieces=pieces, state=case.state)
    shared = SharedMoments(
        inner, Replica(case.parameters), case.reducer, memory_of(torch.device("cpu")), FEW, sharded
    )
    mine, weight = torch.cat(pieces), group.host.size
    every = [] if group.between is None else group.between.allgather_objects((mine.double(), weight))
    for number in range(FEW):
        shared.average(number)
    found = torch.cat([case.moments(number) for number in range(5)])
    if every:
        total = sum(values * ranks for values, ranks in every) / sum(ranks for _, ranks in every)
        assert near(found, total.numpy()) and not torch.equal(found, mine)
    assert comm.allreduce(len(mine)) == case.reducer.length * len(set(case.reducer.hosts or []))
    assert bool(every) == bool(case.reducer.take_traffic().bytes)


@pytest.mark.parametrize("every", [1, 2])
def test_more_than_four_replicas_average_where_they_measure_the_ratio(
    comm: MPI.Intracomm, every: int
) -> None:
    model = network()
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = steady(inner, comm=comm, sends="updates", density=0.05, method="union", every=every)
    train(model, optimizer, comm.rank, range(31 * every))  # exchanges 1 to 20, 21 and 31 measure it
    moments = torch.cat([inner.state[each]["exp_avg_sq"].reshape(-1) for each in model.parameters()])
    size = -(-len(moments) // SLICES)
    alike = [
        len(set(comm.allgather(moments[at * size : (at + 1) * size].numpy().tobytes()))) == 1
        for at in (22, 31, 60)
    ]
    assert alike == [comm.size > SHARED_BY and every == 1, False, False]
