"""Dense reduction as a mode of training: the mean of all gradients, whatever carries it and whenever it starts."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI
from torch import nn

from collectives.dense_allreduce import dense_words
from collectives.traffic import Traffic
from jobs.train.reduce.background import (
    MpiWire,
    TorchWire,
    WireError,
    ring_traffic,
    start_process_group,
    stop_process_group,
)
from jobs.train.reduce.baselines import BucketedTraining, DdpTraining, DenseTraining, bucket_slices
from oktopk.torch.gradients import FlatGradients

CPU = torch.device("cpu")


def network() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 40), nn.ReLU(), nn.Linear(40, 7))


def backward(module: nn.Module, rank: int, step: int, share: float = 1.0) -> None:
    drawn = torch.Generator().manual_seed(1000 * step + rank)
    x, y = torch.randn(8, 20, generator=drawn), torch.randint(0, 7, (8,), generator=drawn)
    nn.functional.cross_entropy(module(x), y).backward(torch.tensor(share))


def flat(module: nn.Module) -> np.ndarray:
    return torch.cat([p.detach().reshape(-1) for p in module.parameters()]).numpy().copy()


class Recorder:
    """A wire that only says what was asked of it."""

    def __init__(self) -> None:
        self.seen: list[int | str] = []

    def start(self, number: int) -> None:
        self.seen.append(number)

    def finish(self) -> Traffic:
        self.seen.append("finish")
        return Traffic()

    def close(self) -> None:
        self.seen.append("close")


def bucketed(
    model: nn.Module,
    wire: Callable[[list[torch.Tensor]], object],
    *,
    nbytes: float = 3000,
    overlapped: bool = True,
    clip_norm: float = 0.0,
) -> BucketedTraining:
    parameters = list(model.parameters())
    gradients = FlatGradients(parameters, torch.float32)
    buckets = bucket_slices(parameters, nbytes)
    pieces = [gradients.vector[bucket] for bucket in buckets]
    inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return BucketedTraining(inner, clip_norm, gradients, buckets, wire(pieces), overlapped=overlapped)


@given(sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12), nbytes=st.integers(1, 800))
def test_buckets_tile_the_gradient_from_its_end_in_whole_parameters(sizes: list[int], nbytes: int) -> None:
    buckets = bucket_slices([torch.zeros(size) for size in sizes], nbytes)
    stops = np.cumsum(sizes).tolist()
    assert [piece.stop for piece in buckets] == [stops[-1], *[piece.start for piece in buckets[:-1]]]
    assert buckets[-1].start == 0
    assert {piece.start for piece in buckets} <= {0, *stops}
    assert all(4 * (piece.stop - piece.start) >= nbytes for piece in buckets[:-1])


def test_buckets_start_in_the_backward_pass_as_they_fill() -> None:
    model, wire = network(), Recorder()
    training = bucketed(model, lambda pieces: wire, nbytes=1)
    before: list[int | str] = []
    model[0].weight.register_hook(
        lambda gradient: before.extend(wire.seen)
    )  # near the end of the backward pass
    for _ in range(2):
        wire.seen.clear()
        before.clear()
        training.zero_grad()
        backward(model, 0, 0)
        assert before[:4] == [0, 1, 2, 3]
        assert wire.seen == [0, 1, 2, 3, 4, 5]
        training.reduce()
        assert wire.seen == [0, 1, 2, 3, 4, 5, "finish"]
    training.close()
    backward(model, 0, 1)
    assert wire.seen[-1] == "close"


def test_nothing_starts_while_gradients_add_up_or_before_its_turn() -> None:
    model, wire = network(), Recorder()
    training = bucketed(model, lambda pieces: wire, nbytes=1)
    with training.no_sync():
        backward(model, 0, 0)
    assert not wire.seen
    model[4].weight.requires_grad_(False)  # bucket 1 gets no gradient in this step
    backward(model, 0, 1)
    assert wire.seen == [0]
    training.reduce()
    assert wire.seen == [0, 1, 2, 3, 4, 5, "finish"]
    model[4].weight.requires_grad_(True)
    backward(model, 0, 2)
    assert wire.seen[7:] == [0, 1, 2, 3, 4, 5]
    with pytest.raises(RuntimeError, match=r"put all but the last in no_sync\(\)"):
        backward(model, 0, 3)


def test_without_overlap_all_buckets_start_after_the_backward_pass() -> None:
    model, wire = network(), Recorder()
    training = bucketed(model, lambda pieces: wire, overlapped=False)
    backward(model, 0, 0)
    backward(model, 0, 1)
    assert not wire.seen
    training.reduce()
    assert wire.seen == [0, 1, "finish"]


def mpi_training(model: nn.Module, comm: MPI.Intracomm) -> DenseTraining:
    return bucketed(model, lambda pieces: MpiWire(comm, pieces))


def torch_training(model: nn.Module, comm: MPI.Intracomm) -> DenseTraining:
    start_process_group(comm, CPU, "gloo", "")
    return bucketed(model, lambda pieces: TorchWire(pieces, torch.float32))


def ddp_training(model: nn.Module, comm: MPI.Intracomm) -> DenseTraining:
    start_process_group(comm, CPU, "gloo", "")
    inner = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return DdpTraining(inner, 0.0, model, comm.size, bucket_mb=0.003, compressed=False)


MODES = {"mpi": mpi_training, "torch": torch_training, "ddp": ddp_training}


@pytest.fixture(params=MODES)
def mode(request: pytest.FixtureRequest) -> Iterator[Callable[[nn.Module, MPI.Intracomm], DenseTraining]]:
    if request.param != "mpi" and not dist.is_gloo_available():
        pytest.skip("torch has no gloo")
    yield MODES[request.param]
    stop_process_group()


@pytest.mark.mpi
def test_every_mode_steps_on_the_mean_of_all_gradients(
    comm: MPI.Intracomm, mode: Callable[[nn.Module, MPI.Intracomm], DenseTraining]
) -> None:
    model, plain = network(), network()
    training = mode(model, comm)
    module = training.network if isinstance(training, DdpTraining) else model
    reference = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    for step in range(4):
        training.zero_grad()
        with training.no_sync():
            backward(module, comm.rank, 2 * step, 0.5)
        backward(module, comm.rank, 2 * step + 1, 0.5)
        report = training.reduce()
        training.apply()
        reference.zero_grad()
        for rank in range(comm.size):
            for number in (2 * step, 2 * step + 1):
                backward(plain, rank, number, 0.5 / comm.size)
        reference.step()
        assert (report.step, report.method, report.local_nnz) == (step, "dense", training.length)
        assert list(report.seconds) == ["allreduce"]
        assert np.allclose(
            training.gradient, np.concatenate([p.grad.reshape(-1) for p in plain.parameters()]), atol=1e-6
        )
    assert np.allclose(flat(model), flat(plain), rtol=1e-4, atol=1e-5)
    assert len(set(comm.allgather(flat(model).tobytes()))) == 1
    training.close()


@pytest.mark.mpi
def test_the_wire_of_mpi_counts_its_words(comm: MPI.Intracomm) -> None:
    pieces = [torch.zeros(size) for size in (1000, 1, 513)]
    wire = MpiWire(comm, pieces)
    for step in range(3):
        for number, piece in enumerate(pieces):
            piece.fill_(comm.rank + step)
            wire.start(number)
        words = comm.allreduce(wire.finish().words) / comm.size
        assert words == pytest.approx(
            sum(dense_words(len(piece), comm.size) for piece in pieces), rel=0.01, abs=4
        )
        mean = (comm.size - 1) / 2 + step
        assert all(torch.allclose(piece, torch.full_like(piece, mean)) for piece in pieces)
    wire.close()


@pytest.mark.mpi
def test_what_fails_in_the_wires_thread_is_raised_by_finish(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    wire = MpiWire(comm, [torch.zeros(5)])

    def fail(scale: float) -> None:
        raise ArithmeticError(f"scale {scale}")

    monkeypatch.setattr(wire._allreduces[0], "run", fail)
    wire.start(0)
    with pytest.raises(ArithmeticError, match="scale"):
        wire.finish()
    wire.close()


@pytest.mark.mpi
def test_clipping_in_a_mode_bounds_the_norm_of_the_mean(comm: MPI.Intracomm) -> None:
    model = network()
    training = bucketed(model, lambda pieces: MpiWire(comm, pieces), clip_norm=0.125)
    backward(model, comm.rank, 0)
    training.reduce()
    assert np.linalg.norm(training.gradient) == pytest.approx(0.125, rel=1e-3)
    training.close()


@pytest.mark.mpi
def test_a_second_process_group_and_unknown_backends_are_refused(comm: MPI.Intracomm) -> None:
    start_process_group(comm, CPU, "gloo", "")
    try:
        with pytest.raises(WireError, match="there is a process group already"):
            start_process_group(comm, CPU, "gloo", "")
        assert (dist.get_rank(), dist.get_world_size()) == (comm.rank, comm.size)
    finally:
        stop_process_group()
    if not dist.is_nccl_available():
        with pytest.raises(WireError, match=r"torch .* has no nccl"):
            start_process_group(comm, CPU, "nccl", str(comm.rank))


def test_a_state_goes_on_where_it_was_taken() -> None:
    model, wire = network(), Recorder()
    training = bucketed(model, lambda pieces: wire)
    for step in range(3):
        training.zero_grad()
        backward(model, 0, step)
        training.reduce()
        training.apply()
    resumed = bucketed(network(), lambda pieces: wire)
    resumed.load_state_dict(training.state_dict())
    assert resumed.reduce().step == 3
    momenta = [state["momentum_buffer"] for state in resumed.inner.state_dict()["state"].values()]
    theirs = [state["momentum_buffer"] for state in training.inner.state_dict()["state"].values()]
    assert len(momenta) == 6
    assert all(torch.equal(one, other) for one, other in zip(momenta, theirs, strict=True))


def test_a_ring_sends_two_times_its_share() -> None:
    assert ring_traffic(1000, 4, 3) == Traffic(6000, 18)
    assert ring_traffic(1000, 1, 3) == Traffic()


@pytest.mark.mpi
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nccl_averages_in_either_type_or_says_that_it_needs_a_gpu_per_rank(
    comm: MPI.Intracomm, dtype: torch.dtype
) -> None:
    from jobs.train.placement import find_placement

    place = find_placement("cuda", comm)
    device = place.device
    if comm.size > torch.cuda.device_count():
        with pytest.raises(WireError, match="NCCL takes one rank per GPU"):
            start_process_group(comm, device, "nccl", place.unit)
        return
    start_process_group(comm, device, "nccl", place.unit)
    vector = torch.full((100_000,), float(comm.rank), device=device)
    pieces = [vector[60_000:], vector[:60_000]]
    wire = TorchWire(pieces, dtype)
    for number in range(2):
        wire.start(number)
    traffic = wire.finish()
    assert torch.allclose(vector, torch.full_like(vector, (comm.size - 1) / 2))
    assert traffic.words == ring_traffic(100_000 * dtype.itemsize // 4, comm.size, 2).words
    wire.close()
