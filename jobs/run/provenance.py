"""Where a result comes from: versions, machine, commit."""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import shlex
import socket
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path

import numpy
import torch
from mpi4py import MPI

from jobs.run.machine import machine


def versions() -> dict[str, str]:
    """What the run's numbers depend on: name -> version. "mpi" is the MPI library's own words."""
    try:
        own = importlib.metadata.version("oktopk")
    except importlib.metadata.PackageNotFoundError:
        own = "not installed"
    return {
        "oktopk": own,
        "python": platform.python_version(),
        "numpy": numpy.__version__,
        "torch": torch.__version__,
        "mpi4py": importlib.metadata.version("mpi4py"),
        "numba": importlib.metadata.version("numba"),
        "h5py": importlib.metadata.version("h5py"),
        # MPICH ends it with a NUL and several lines of how it was configured.
        "mpi": MPI.Get_library_version().rstrip("\0").splitlines()[0].strip(),
    }


def versions_json(**more: str) -> str:
    """versions(), and more of the kind, as JSON."""
    return json.dumps(versions() | more)


def commit() -> str:
    """The checkout's commit, with "-dirty" where files differ from it; "" where this is no checkout."""
    try:
        answer = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout.strip() if answer.returncode == 0 else ""


def host() -> str:
    """This machine's name."""
    return socket.gethostname()


def job() -> str:
    """The Slurm job that this process is of, "" for none."""
    return os.environ.get("SLURM_JOB_ID", "")


def hardware_json() -> str:
    """This machine's processor, cores, memory and GPUs as JSON."""
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    # mpiexec may have bound this rank to one of the cores
    return json.dumps({**machine(), "cores": os.cpu_count(), "gpus": gpus})


def command() -> str:
    """The command line of this process, as it would be typed after `mpiexec -n RANKS python -m mpi4py -m`."""
    program = sys.modules["__main__"].__spec__
    name = Path(sys.argv[0]).name if program is None else program.name.removesuffix(".__main__")
    return shlex.join([name, *sys.argv[1:]])


def now() -> str:
    """UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")
