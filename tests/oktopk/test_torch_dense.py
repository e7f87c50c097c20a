"""Dense allreduce of torch tensors: what is refused, on a machine without a GPU too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from mpi4py import MPI

torch = pytest.importorskip("torch")

import oktopk.torch  # noqa: E402
from tests.devices import gpus, on_real_gpus, torch_device  # noqa: E402


class Enqueued:
    """In place of a DenseP2P: keeps what would be launched."""

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def enqueue(self, *given: Any, **named: Any) -> None:
        self.calls.append((given, named))


@pytest.fixture
def allreduce() -> Any:
    """A DenseAllreduce of GPU 0 that launches nothing."""
    made: Any = oktopk.torch.DenseAllreduce.__new__(oktopk.torch.DenseAllreduce)
    made._dense, made._transport, made._gpu = Enqueued(), SimpleNamespace(), torch.device("cuda", 0)
    yield made
    assert not made._dense.calls


@pytest.mark.skipif(gpus() > 0, reason="a GPU")
def test_without_a_gpu_the_construction_names_the_rank_and_the_reason() -> None:
    for _ in range(2):  # the first one has closed what it opened
        with pytest.raises(RuntimeError, match=r"^no dense allreduce through peer memory: rank 0: \w+"):
            oktopk.torch.DenseAllreduce()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_types_and_tensors_elsewhere_than_on_the_gpu_are_refused(allreduce: Any, dtype: Any) -> None:
    with pytest.raises(TypeError, match=f"tensor is {dtype}, not {dtype} of float32, bfloat16 and float16"):
        allreduce(torch.zeros(3, device="meta", dtype=dtype))
    for device in ("cpu", "meta"):
        with pytest.raises(
            ValueError, match=f"tensor of shape .2, 3. on {device} is not contiguous on cuda:0"
        ):
            allreduce(torch.zeros(2, 3, device=device))


class OnGpu:
    """What of a tensor is asked, as if it were on a GPU."""

    def __init__(self, tensor: Any, gpu: int = 0) -> None:
        self.device, self.dtype, self.shape = torch.device("cuda", gpu), tensor.dtype, tensor.shape
        self.is_cuda, self.nbytes = True, tensor.nbytes
        self.is_contiguous, self.numel, self.data_ptr = tensor.is_contiguous, tensor.numel, tensor.data_ptr


@pytest.mark.parametrize("name", ["out", "addend"])
def test_out_and_addend_must_fit_the_tensor(allreduce: Any, name: str) -> None:
    tensor = OnGpu(torch.zeros(12))
    with pytest.raises(TypeError, match=f"{name} is torch.float16, not torch.float32"):
        allreduce(tensor, **{name: OnGpu(torch.zeros(12, dtype=torch.float16))})
    for other in (torch.zeros(11), torch.zeros(4, 3).t()):
        with pytest.raises(ValueError, match=f"{name} of shape .* with the 12 elements of tensor"):
            allreduce(tensor, **{name: OnGpu(other)})
    with pytest.raises(ValueError, match=f"{name} of shape .12,. on cuda:1 is not contiguous on cuda:0"):
        allreduce(tensor, **{name: OnGpu(torch.zeros(12), gpu=1)})


def test_what_was_closed_refuses_every_call_and_waits_for_no_gpu(
    allreduce: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[str] = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waits.append("waited"))
    allreduce._dense.close = allreduce._transport.close = lambda: waits.append("closed")
    allreduce.close()
    assert waits == ["waited", "closed", "closed"]
    for call in (lambda: allreduce(OnGpu(torch.zeros(3))), lambda: allreduce.check()):  # noqa: PLW0108 - closing refuses the name already
        with pytest.raises(RuntimeError, match="^this DenseAllreduce was closed$"):
            call()
    allreduce.close()  # again is allowed
    assert len(waits) == 3


class Twice:
    """In place of a DenseAllreduce of two ranks that have the same values."""

    size = 2

    def __init__(self, unwritten: Any) -> None:
        self.unwritten, self.checked = unwritten, False

    def __call__(self, tensor: Any, *, scale: float) -> None:
        tensor.add_(tensor.clone()).mul_(scale)

    def check(self) -> None:
        assert (self.unwritten == 7).all()
        self.checked = True


def test_buffers_are_averaged_by_the_given_sums_and_written_after_a_check() -> None:
    model = torch.nn.BatchNorm1d(3)
    model.running_mean.fill_(7)
    model.running_var.copy_(torch.arange(3.0))
    twice: Any = Twice(model.running_mean)
    oktopk.average_buffers(model, allreduce=twice)
    assert twice.checked
    assert model.running_var.tolist() == [0, 1, 2]


@pytest.mark.mpi(min_size=2, max_size=8)
@on_real_gpus
def test_tensors_are_summed_captured_or_not_and_statistics_averaged(comm: MPI.Intracomm) -> None:
    gpu = torch_device("cuda", comm)
    shared = torch.cuda.device_count() < comm.size
    allreduce = oktopk.torch.DenseAllreduce(comm, shared_gpus=shared)
    total = comm.size * (comm.size + 1) // 2
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        tensor = torch.full((300, 7), comm.rank + 1, dtype=dtype, device=gpu)
        out = torch.empty_like(tensor)
        assert allreduce(tensor, out) is out
        allreduce.check()
        assert (out == total).all()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            allreduce(tensor, out)
        for replay in range(3):
            tensor.fill_(replay)
            graph.replay()
            allreduce.check()
            assert (out == replay * comm.size).all()
    model = torch.nn.BatchNorm1d(3).to(gpu)
    model.running_mean.fill_(comm.rank)
    oktopk.average_buffers(model, allreduce=allreduce)
    assert torch.equal(model.running_mean.cpu(), torch.full((3,), (comm.size - 1) / 2))
    allreduce.close()
