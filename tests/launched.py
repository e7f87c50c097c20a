"""Runs on several ranks: in jobs started as a user starts them, or on ranks that are up."""

from __future__ import annotations

import contextlib
import io
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from oktopk.launch import launch_environment, mpiexec_command

if TYPE_CHECKING:  # a process that started MPI must not start an mpiexec
    from mpi4py import MPI

ROOT = Path(__file__).parent.parent
# Seconds for a job of several ranks that takes some 10 on two free cores: it ends what hangs.
PATIENCE = 300


def run_ranks(ranks: int, *module_args: str) -> subprocess.CompletedProcess[str]:
    """`mpiexec -n ranks python -m mpi4py module_args` to its end, in the checkout's root."""
    return _finished(*mpiexec_command(ranks, module_args))


def run_torchrun(ranks: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    """`torchrun --nproc-per-node ranks arguments` to its end, in the checkout's root."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return _finished([sys.executable, *launcher, *arguments], launch_environment(ranks, "unknown"))


def run_alone(*arguments: str) -> subprocess.CompletedProcess[str]:
    """`python arguments` to its end, in the checkout's root."""
    return _finished([sys.executable, *arguments], launch_environment(1, "unknown"))


def _finished(argv: list[str], environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        argv,
        env=environment,
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE - 5,
        check=False,
    )


def outcome(comm: MPI.Intracomm, run: Callable[[], int]) -> tuple[int, str]:
    """The exit status of a run, the same on all ranks, and what rank 0 printed to standard error; collective."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed):
        status = run()
    said: str = comm.bcast(printed.getvalue())
    assert "Traceback" not in said
    assert comm.allgather(status) == [status] * comm.size
    return status, said
