"""The project's CUDA kernels on a machine without a GPU: compiled for the host, behind a CuPy of what the library uses.

Slow, and for tests alone: `install()` puts it in the place of `cupy`, before anything imports that. `tests.devices` does so where
the environment has OKTOPK_HOST_CUDA.
"""

from tests.host_cuda.cupy_on_host import GPUS, install, installed

ASKED_FOR = "OKTOPK_HOST_CUDA"

__all__ = ["ASKED_FOR", "GPUS", "install", "installed"]
