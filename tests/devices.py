"""Where a multi-rank test runs its reducer: on the host, and on a GPU where there is one."""

from __future__ import annotations

import functools
import importlib.util
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from tests import host_cuda

_NO_DEVICE = 100  # cudaErrorNoDevice

if os.environ.get(host_cuda.ASKED_FOR):
    host_cuda.install()


@functools.cache
def gpus() -> int:
    """GPUs that CuPy can use, those of `tests.host_cuda` among them."""
    if host_cuda.installed():
        return host_cuda.GPUS
    if importlib.util.find_spec("cupy") is None or not os.path.exists("/dev/nvidiactl"):
        return 0
    import cupy

    runtime = cupy.cuda.runtime
    try:
        return int(runtime.getDeviceCount())
    except runtime.CUDARuntimeError as error:
        if error.status != _NO_DEVICE:
            raise
        return 0  # CUDA_VISIBLE_DEVICES hides them


def asynchronous() -> bool:
    """Whether they run beside the host, and torch knows them too."""
    return gpus() > 0 and not host_cuda.installed()


on_gpus = pytest.mark.skipif(not gpus(), reason="no GPU")
"""The mark of tests that need one, or what stands in for it on the host."""
on_real_gpus = pytest.mark.skipif(not asynchronous(), reason="no GPU")


def on_torchs_gpu(*values: Any, id: str) -> Any:
    """Parameters of a test with tensors on a GPU; skipped where torch has none."""
    return pytest.param(*values, marks=on_real_gpus, id=id)


def need_gpus(number: int) -> None:
    """Skip the test where there are GPUs, but fewer: ranks that share one cannot read each other's memory, and wait in turns."""
    if asynchronous() and gpus() < number:
        pytest.skip(f"{number} GPUs")


def hold_up(cycles: int = 10_000_000) -> Callable[[], bool]:
    """Keep this rank's GPU busy for some milliseconds, on torch's current stream: what is put there next is late.

    Returns what says, without waiting, whether it still is; never where all is done at once.
    """
    if not asynchronous():
        return lambda: False
    import torch

    torch.cuda.init()
    torch.cuda._sleep(cycles)
    slept = torch.cuda.Event()
    slept.record()
    return lambda: not slept.query()


DEVICES = ["cpu", pytest.param("cuda", marks=on_gpus)]


def use(device: str, comm: MPI.Intracomm) -> None:
    """Make this rank's GPU the current one."""
    if device == "cuda":
        from collectives.mpi_cuda import select_device

        select_device(comm)


def staged_transport(comm: MPI.Intracomm) -> Any:
    """Messages of this rank's GPU, made the current one, through pinned memory."""
    use("cuda", comm)
    from collectives.cuda.device import Device
    from collectives.mpi_cuda import StagedCudaTransport

    return StagedCudaTransport(comm, Device())


def put(device: str, array: NDArray[Any]) -> Any:
    """A host array where the reducer wants it."""
    if device != "cuda":
        return array
    import cupy

    return cupy.asarray(array)


def get(array: Any) -> NDArray[Any]:
    """An array as a host array, copied."""
    if isinstance(array, np.ndarray):
        return array.copy()
    return np.asarray(array.get())


def narrowed(gradient: NDArray[np.float32], gradient_type: str) -> NDArray[Any]:
    """As it is given: bfloat16 by its bits, cut off."""
    if gradient_type == "float32":
        return gradient
    if gradient_type == "float16":
        return gradient.astype(np.float16)
    return (gradient.view(np.uint32) >> 16).astype(np.uint16)


def torch_device(device: str, comm: MPI.Intracomm) -> Any:
    """This rank's torch.device, made the current one."""
    import torch

    use(device, comm)
    if device == "cpu":
        return torch.device("cpu")
    import cupy

    number = cupy.cuda.Device().id
    torch.cuda.set_device(number)
    return torch.device("cuda", number)
