"""Processes that a launcher started together, and the library in use does not see. Imports no such library."""

from __future__ import annotations

import os

_LAUNCHERS = {
    "WORLD_SIZE": "torchrun",
    "OMPI_COMM_WORLD_SIZE": "Open MPI's mpiexec",
    "PMI_SIZE": "MPICH's mpiexec",
    "SLURM_STEP_NUM_TASKS": "srun",
}
"""Environment variable -> the launcher that puts the number of processes into it."""


class LauncherError(RuntimeError):
    """A launcher started several processes, but each is a job of its own."""


def check_launcher(alone: str) -> None:
    """Refuse to go on where a launcher started several processes.

    Args:
        alone: the library that knows this process only, for the message.

    Raises:
        LauncherError: it did; the message says how to start them.
    """
    for name, launcher in _LAUNCHERS.items():
        number = os.environ.get(name, "")
        if number.isdigit() and int(number) > 1:
            raise LauncherError(
                f"{name}={number}: {launcher} started {number} processes, but {alone} has size 1, so each would train alone. "
                'Under torchrun call torch.distributed.init_process_group("gloo") first. Else start them by the launcher of the '
                f"MPI that mpi4py uses: mpiexec -n {number} python -m mpi4py my.py (under Slurm srun --mpi=pmix, or what the "
                "site's MPI needs). If each is to be alone, pass MPI.COMM_SELF"
            )
