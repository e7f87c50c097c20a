"""Jobs of several ranks, started as a user starts them."""

from __future__ import annotations

import subprocess
from pathlib import Path

from jobs.launch import mpiexec_command

ROOT = Path(__file__).parent.parent
# Seconds for a job of several ranks that takes some 10 on two free cores.
PATIENCE = 120


def run_ranks(ranks: int, *module_args: str) -> subprocess.CompletedProcess[str]:
    """`mpiexec -n ranks python -m mpi4py module_args` to its end, in the checkout's root."""
    argv, environment = mpiexec_command(ranks, module_args)
    return subprocess.run(
        argv, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE - 5, check=False
    )
