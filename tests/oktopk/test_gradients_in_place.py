"""Gradients that are read where autograd left them: which can be, on any machine; and that training is the same, on GPUs."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

from oktopk import DistributedOptimizer
from oktopk.results import StepReport
from oktopk.torch.gradients import GradientsInPlace
from oktopk.torch.interop import TensorMemory
from oktopk.torch.overlap import BackwardBuckets, BucketLayout
from tests.devices import asynchronous, gpus, hold_up, on_gpus, on_real_gpus, use

pytestmark = pytest.mark.host_cuda(ranks=3)

# On the host


class Noted:
    """As GradientTensors: where the pieces are said to lie."""

    addresses: Sequence[int] = ()

    def set_pointers(self, addresses: Sequence[int]) -> None:
        self.addresses = addresses


def in_place(
    parameters: list[nn.Parameter], dtype: torch.dtype = torch.float32
) -> tuple[GradientsInPlace, Noted]:
    noted = Noted()
    gradients = GradientsInPlace(parameters, dtype, [noted])  # type: ignore[list-item]
    gradients.attach()
    return gradients, noted


def seen(address: int, parameter: Tensor) -> Tensor:
    """What lies there, in the parameter's type, shape and order in memory."""
    nbytes = parameter.numel() * parameter.element_size()
    flat = torch.frombuffer(bytearray(ctypes.string_at(address, nbytes)), dtype=parameter.dtype)
    return flat.as_strided(parameter.size(), parameter.stride())


def last(tensor: Tensor) -> Tensor:
    return tensor.contiguous(memory_format=torch.channels_last)


# shapes and layouts of a parameter, and of its gradient
AS_ITS_PARAMETER = {
    "ordinary": (torch.zeros(5, 7), torch.randn(5, 7)),
    "channels last": (last(torch.zeros(4, 3, 5, 5)), last(torch.randn(4, 3, 5, 5))),
    # a convolution of 1 x 1: the strides of both its orders differ, its memory does not
    "of size one": (torch.zeros(4, 3, 1, 1), torch.randn(4, 3, 1, 1).as_strided((4, 3, 1, 1), (3, 1, 3, 3))),
    "a slice": (torch.zeros(6), torch.randn(20)[3:9]),
    "without elements": (torch.zeros(0, 3), torch.randn(0, 3)),
}
OTHERWISE = {
    "transposed": (torch.zeros(5, 7), torch.randn(7, 5).t()),
    "expanded": (torch.zeros(5, 7), torch.randn(1, 1).expand(5, 7)),
    "with gaps": (torch.zeros(5, 7), torch.randn(5, 14)[:, ::2]),
    "contiguous for channels last": (last(torch.zeros(4, 3, 5, 5)), torch.randn(4, 3, 5, 5)),
}


@pytest.mark.parametrize("kind", AS_ITS_PARAMETER)
def test_a_gradient_that_lies_as_its_parameter_is_read_where_it_is(kind: str) -> None:
    data, gradient = AS_ITS_PARAMETER[kind]
    parameter = nn.Parameter(data)
    gradients, noted = in_place([parameter])
    parameter.grad = gradient
    gradients.tensors()
    assert noted.addresses == [gradient.data_ptr()]
    if gradient.numel():
        assert torch.equal(seen(noted.addresses[0], parameter), gradient)


@pytest.mark.parametrize("kind", OTHERWISE)
def test_any_other_gradient_is_copied_into_its_parameters_order(kind: str) -> None:
    data, gradient = OTHERWISE[kind]
    parameter = nn.Parameter(data)
    gradients, noted = in_place([parameter])
    parameter.grad = gradient
    gradients.tensors()
    (home,) = noted.addresses
    assert home != gradient.data_ptr()
    assert torch.equal(seen(home, parameter), gradient)
    gradient.untyped_storage().fill_(0)  # type: ignore[attr-defined]
    gradients.tensors()
    assert noted.addresses == [home]
    assert not seen(home, parameter).any()


def test_a_missing_gradient_is_zeros_and_a_sparse_one_is_refused() -> None:
    first, second = nn.Parameter(torch.zeros(3)), nn.Parameter(torch.zeros(4, 2))
    gradients, noted = in_place([first, second])
    second.grad = torch.ones(4, 2)
    gradients.tensors()
    assert noted.addresses == [0, second.grad.data_ptr()]
    assert gradients.collect().tolist() == [0, 0, 0, *[1] * 8]
    second.grad = torch.sparse_coo_tensor([[0], [0]], [1.0], (4, 2), check_invariants=True)
    for use_it in (gradients.tensors, gradients.collect):
        with pytest.raises(TypeError, match="a gradient is sparse"):
            use_it()


class Started:
    """As BucketedAllreduce: what was started."""

    def __init__(self) -> None:
        self.given: list[Any] = []

    @property
    def started(self) -> int:
        return len(self.given)

    def reads_tensors(self, number: int) -> bool:
        return True

    def start(self, gradient: Any, ready: Callable[[], None] | None = None, *, problem: str = "") -> None:
        assert not problem
        self.given.append(gradient)

    def abandon(self) -> None:
        self.given.clear()


def test_a_replay_is_read_where_it_has_written_though_gradients_were_cleared() -> None:
    parameters = [nn.Parameter(torch.ones(40)) for _ in range(2)]
    layout, lists, reducer = BucketLayout(parameters, 1e-5), [Noted(), Noted()], Started()
    gradients = GradientsInPlace(
        parameters,
        torch.float32,
        lists,  # type: ignore[arg-type]
        layout.ranges,
        layout.starts,
        layout.length,
    )
    buckets = BackwardBuckets(parameters, gradients, layout, reducer, TensorMemory(), True)
    gradients.zero()
    with buckets.recording() as recorded:
        (2 * parameters[0] + 3 * parameters[1]).sum().backward()
    written = [parameter.grad for parameter in parameters]
    assert len(recorded.marks) == 1 and not reducer.given
    for _ in range(2):  # as a loop does before each replay
        gradients.zero()
        assert not any(parameter.grad is not None for parameter in parameters)
        buckets.replayed(recorded)
        rest: object = buckets.rest()  # of the reducer that stands in, which gives back what it got
        assert reducer.given == [lists[0]] and rest == [(lists[1], {})]
        addresses = [each.data_ptr() for each in written if each is not None]
        assert [list(each.addresses) for each in lists] == [addresses[1:], addresses[:1]]
        reducer.given.clear()
    parameters[0].grad = torch.zeros(40)
    with pytest.raises(RuntimeError, match=r"call zero_grad\(\) before the replay"):
        buckets.replayed(recorded)
    assert not reducer.given


# On GPUs, and on the host that stands in for them


class SharedWithTheHost:
    """As CudaMemory, where the memory of a GPU is the host's and torch knows no GPU."""

    device, stream = "cuda", None

    def array(self, tensor: Tensor) -> Any:
        import cupy

        bits = (
            tensor.view(torch.int16).numpy().view(np.uint16)
            if tensor.dtype == torch.bfloat16
            else tensor.numpy()
        )
        return bits.view(cupy.ndarray)

    def tensor(self, array: Any) -> Tensor:
        return torch.from_numpy(array.view(np.ndarray))

    def stream_scope(self) -> AbstractContextManager[None]:
        return nullcontext()


@pytest.fixture
def place(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """Where parameters of this rank lie, and the same bits from run to run."""
    if comm.size > gpus():
        pytest.skip("peer memory is quick where each rank has a GPU")
    use("cuda", comm)
    if not asynchronous():
        monkeypatch.setattr(
            "oktopk.torch.optimizer.memory_of", lambda place, beside=False: SharedWithTheHost()
        )
        yield torch.device("cpu")
        return
    import cupy

    number = cupy.cuda.Device().id
    torch.cuda.set_device(number)
    before = torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = True, False
    yield torch.device("cuda", number)
    torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark = before


class Network(nn.Module):
    """Parameters whose gradients come in every way: in some steps only, never, and the same for all elements."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution = nn.Conv2d(3, 8, 3)
        self.pointwise = nn.Conv2d(8, 5, 1)
        self.unused = nn.Linear(11, 3)
        self.out = nn.Linear(180, 67)
        self.sometimes = nn.Parameter(torch.zeros(67, 67))
        self.equal = nn.Parameter(torch.zeros(67))

    def forward(self, images: Tensor, step: int) -> Tensor:
        features = self.pointwise(torch.relu(self.convolution(images))).flatten(1)
        scores = self.out(torch.tanh(features))
        if step % 3:
            scores = scores + scores @ self.sometimes
        return scores * (1 + self.equal.mean())


def all_deferred(patch: pytest.MonkeyPatch) -> None:
    """All steps that may be, from here on; not only those behind eight that needed no help."""
    patch.setattr("oktopk.steps._TRUSTED", 0)


class Loop:
    """Three parameters whose gradients lie in one tensor; whole numbers, so that sums are exact.

    Attributes:
        at: parameters before each step, and last after all of them.
        before, after: this rank's residual before and after each step, looked at by the stream alone.
    """

    SIZES = 20_001, 9, 10_003

    def __init__(self, comm: MPI.Intracomm, place: torch.device, steps: int, **settings: Any) -> None:
        self.parameters = [nn.Parameter(torch.zeros(size, device=place)) for size in self.SIZES]
        inner = torch.optim.SGD(self.parameters, lr=1.0)
        chosen: dict[str, Any] = {"density": 0.05, "threshold_interval": 8, "boundary_interval": 8}
        self.optimizer = DistributedOptimizer(inner, comm, average=False, **chosen | settings)
        assert isinstance(self.optimizer._gradients, GradientsInPlace)
        drawn = torch.Generator().manual_seed(comm.rank)
        cubes = torch.randn(steps, sum(self.SIZES), generator=drawn).pow(3).mul(256).round()
        # what any gradient type holds
        self.sources = cubes.bfloat16().float().to(place)
        self.residual = self.optimizer._memory.tensor(self.optimizer.reducer.residual)
        # now: memory that is new may wait for the GPU
        self.at = torch.zeros(steps + 1, sum(self.SIZES), device=place)
        self.before, self.after = torch.zeros(2, *self.sources.shape, device=place).unbind()
        self.deferred: list[bool] = []
        self.reports: list[StepReport] = []
        self.reused = self.overlapping = 0
        self._held = hold_up(0)

    def step(self, number: int) -> None:
        """One that is late; its gradients are forgotten at once, and their memory gets something else."""
        gradients = self.sources[number].clone()
        address = gradients.data_ptr()
        for parameter, piece in zip(self.parameters, gradients.split(self.SIZES), strict=True):
            parameter.grad = piece
        if number % 5 == 0:  # one that is not laid out as its parameter is copied first
            self.parameters[-1].grad = torch.stack([piece, piece], 1)[:, 0]
        del gradients, piece
        self.overlapping += self._held()
        self.before[number].copy_(self.residual)
        self._held = hold_up()
        self.optimizer.step()
        self.reports.append(self.optimizer.report)
        self.deferred.append(not self.reports[-1].complete)
        self.optimizer.zero_grad()
        assert self.parameters[0].grad is None
        spoilt = torch.full_like(self.sources[number], 2.0**30)
        self.reused += spoilt.data_ptr() == address
        self.after[number].copy_(self.residual)
        torch.cat([parameter.detach() for parameter in self.parameters], out=self.at[number + 1])

    def end(self, comm: MPI.Intracomm, unless: Sequence[int] = ()) -> None:
        """All is complete and as reported, and nothing was lost but the gradients of these steps."""
        self.optimizer.complete()
        moved = (self.at[1:] != self.at[:-1]).sum(1).tolist()
        assert moved == [report.global_nnz for report in self.reports]
        given = [number for number in range(len(self.sources)) if number not in unless]
        put_in = comm.allreduce(self.sources[given].double().sum(0).cpu().numpy())
        left = comm.allreduce(self.residual.double().cpu().numpy())
        assert np.array_equal(put_in, left - self.at[-1].double().cpu().numpy())
        # the allocator of a GPU gives the same block again, so that what is read too late is wrong
        assert (self.reused and (self.overlapping > 5 or not any(self.deferred))) or not asynchronous()
        self.optimizer.close()


@on_gpus
@pytest.mark.mpi
@pytest.mark.parametrize(
    "gradient_type",
    [
        pytest.param("float32", marks=pytest.mark.long("`make test` has it where what is read is narrowed")),
        "bfloat16",
    ],
)
def test_a_deferred_step_takes_back_a_gradient_freed_at_once(
    comm: MPI.Intracomm, place: torch.device, monkeypatch: pytest.MonkeyPatch, gradient_type: str
) -> None:
    """One rank's is not finite: the residual of all is as before, though the gradients' memory got something else."""
    all_deferred(monkeypatch)
    poisoned, steps = (4, 7, 12, 13), 16
    loop = Loop(comm, place, steps, deferred=True, nonfinite="skip", gradient_type=gradient_type)
    if comm.rank == comm.size - 1:
        loop.sources[list(poisoned), 25_000] = torch.nan
        loop.sources[list(poisoned), 20_005] = torch.inf
    for number in range(steps):
        loop.step(number)
    loop.end(comm, unless=poisoned)
    assert [report.step for report in loop.reports if report.skipped] == list(poisoned)
    assert sum(loop.deferred[number] for number in poisoned) > 2
    for number in range(steps):
        assert torch.equal(loop.before[number], loop.after[number]) == (number in poisoned)


@on_real_gpus
@pytest.mark.mpi
@pytest.mark.parametrize("deferred", [False, True])
def test_gradients_of_another_current_stream_are_waited_for(
    comm: MPI.Intracomm, place: torch.device, monkeypatch: pytest.MonkeyPatch, deferred: bool
) -> None:
    """And their memory, which goes back to that stream, is not written over before it was read."""
    all_deferred(monkeypatch)
    loop = Loop(comm, place, 24, deferred=deferred)
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        for number in range(24):
            loop.step(number)
        torch.cuda.synchronize()
    loop.end(comm)
    assert (sum(loop.deferred) > 10) == deferred


@on_gpus
@pytest.mark.mpi
def test_memory_for_one_vector_is_taken_only_by_steps_that_need_it(
    comm: MPI.Intracomm, place: torch.device
) -> None:
    parameter: Any = nn.Parameter(torch.zeros(1 << 16, device=place))
    parameter.grad = torch.ones_like(parameter)
    optimizer = DistributedOptimizer(torch.optim.SGD([parameter], lr=1.0), comm, density=0.01)
    assert parameter.grad is None  # of before it was wrapped
    gradients = optimizer._gradients
    assert isinstance(gradients, GradientsInPlace)
    for measure in (False, True):
        optimizer.zero_grad()
        assert parameter.grad is None
        parameter.grad = made = torch.ones_like(parameter)
        optimizer.reduce(measure=measure)
        assert parameter.grad is not made
        optimizer.apply()
        assert parameter.grad is made
        assert (gradients._vector is not None) == measure


@on_gpus
@pytest.mark.mpi
@pytest.mark.parametrize("deferred", [False, True])
@pytest.mark.parametrize("method", ["oktopk", "dense"])
def test_without_messages_unused_parameters_stay_and_unequal_rates_are_named(
    comm: MPI.Intracomm, place: torch.device, monkeypatch: pytest.MonkeyPatch, method: str, deferred: bool
) -> None:
    """Ranks on the GPUs of a host learn of each other through the memory of the host."""
    all_deferred(monkeypatch)
    model = Network().to(place)
    inner = torch.optim.AdamW(model.parameters(), lr=0.02, weight_decay=0.1)
    settings = {"density": 0.05, "deferred": deferred, "sends": "gradients"}
    optimizer = DistributedOptimizer(inner, comm, method, **settings)
    drawn = torch.Generator().manual_seed(comm.rank)
    unused = model.unused.weight.detach().clone()

    def step(number: int) -> None:
        optimizer.zero_grad()
        images = torch.randn(4, 3, 8, 8, generator=drawn).to(place)
        model(images, number).square().mean().backward()
        optimizer.step()

    for number in (1, 1, 1):
        step(number)
    assert torch.equal(model.unused.weight, unused)
    for number in (0, 0):
        sometimes = model.sometimes.detach().clone()
        step(number)  # without it; a deferred step knows that when the next one begins
    assert torch.equal(model.sometimes, sometimes)
    step(1 if comm.rank == 0 else 0)
    step(1)
    assert not torch.equal(model.sometimes, sometimes)
    parameters = torch.cat([p.detach().reshape(-1) for p in model.parameters()]).cpu().numpy()
    assert np.array_equal(parameters, comm.bcast(parameters))
    if comm.size > 1:
        optimizer.param_groups[0]["lr"] = 0.02 + 0.01 * comm.rank
        with pytest.raises(
            ValueError, match=r"'lr' of the optimizer's group 0 differs between ranks: 0\.02 on rank 0"
        ):
            for _ in range(1 + deferred):
                step(1)
