"""Machine, software, checkout, job and command of a result.

Without torch, which takes every rank seconds to import.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

from oktopk.doctor.machine import environment, host, machine, now, versions  # noqa: F401 - of a result, too


def mpi_library() -> str:
    """The MPI library in its own words. Starts MPI."""
    from mpi4py import MPI

    # MPICH ends it with a NUL and several lines of how it was configured.
    return " ".join(MPI.Get_library_version().rstrip("\0").splitlines()[0].split())


def checkout() -> dict[str, Any]:
    """The commit of the checkout, and whether files differ from it; None where this is no checkout."""
    commit = _git("rev-parse", "HEAD")
    state = _git("status", "--porcelain", "--untracked-files=no")
    return {"commit": commit, "dirty": None if state is None else bool(state)}


def commit() -> str:
    """The checkout's commit, with "-dirty" where files differ from it; "" where this is no checkout."""
    state = checkout()
    return f"{state['commit'] or ''}{'-dirty' if state['dirty'] else ''}"


def job() -> str:
    """The Slurm job that this process is of, "" for none."""
    return os.environ.get("SLURM_JOB_ID", "")


def command() -> str:
    """The command line of this process, as it would be typed after `mpiexec -n RANKS python -m mpi4py -m`."""
    program = sys.modules["__main__"].__spec__
    name = Path(sys.argv[0]).name if program is None else program.name.removesuffix(".__main__")
    return shlex.join([name, *sys.argv[1:]])


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
