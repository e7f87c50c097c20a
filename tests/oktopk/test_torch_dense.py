"""Dense allreduce of torch tensors: what is refused, on a machine without a GPU too."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

import oktopk.torch  # noqa: E402
from tests.devices import gpus  # noqa: E402


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
    made._dense, made._gpu = Enqueued(), torch.device("cuda", 0)
    yield made
    assert not made._dense.calls


@pytest.mark.skipif(gpus() > 0, reason="a GPU")
def test_without_a_gpu_the_construction_names_the_rank_and_the_reason() -> None:
    for _ in range(2):  # the first one has closed what it opened
        with pytest.raises(RuntimeError, match=r"^no dense allreduce through peer memory: rank 0: \w+"):
            oktopk.torch.DenseAllreduce()


@pytest.mark.parametrize("dtype", [torch.float64, torch.int32, torch.float8_e4m3fn])
def test_other_types_are_refused(allreduce: Any, dtype: Any) -> None:
    with pytest.raises(TypeError, match=f"tensor is {dtype}, not {dtype} of float32, bfloat16 and float16"):
        allreduce(torch.zeros(3, device="meta", dtype=dtype))


def test_tensors_elsewhere_than_on_the_gpu_are_refused(allreduce: Any) -> None:
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
