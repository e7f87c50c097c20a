"""Starting ranks: the command and the environment."""

from __future__ import annotations

import os
import sys

import pytest

from jobs.launch import LaunchError, find_mpiexec, launch_environment, mpiexec_command


def test_a_command_goes_through_the_runner() -> None:
    argv, environment = mpiexec_command(3, ["-m", "jobs.train", "x.toml"])
    assert argv == [find_mpiexec(), "-n", "3", sys.executable, "-m", "mpi4py", "-m", "jobs.train", "x.toml"]
    assert environment["OMP_NUM_THREADS"] == os.environ.get("OMP_NUM_THREADS", "1")
    with pytest.raises(LaunchError, match="ranks 0 is not at least 1"):
        mpiexec_command(0, [])
    with pytest.raises(LaunchError, match="does not run"):
        mpiexec_command(1, [], mpiexec="/nonexistent/mpiexec")


def test_the_environment_has_what_is_needed_and_no_more() -> None:
    base = {"PATH": "/bin", "OMPI_COMM_WORLD_SIZE": "4", "PMIX_RANK": "1", "PMI_SIZE": "4"}
    plain = {"PATH": "/bin", "OMP_NUM_THREADS": "1"}
    root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    free = {"PRTE_MCA_hwloc_default_binding_policy": "none"}
    full = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    crowded = free | full | {"PRTE_MCA_rmaps_default_mapping_policy": ":OVERSUBSCRIBE"}
    assert launch_environment(4, "mpich", cores=2, root=True, base=base) == plain
    assert launch_environment(1, "openmpi", cores=2, root=False, base=base) == plain | free
    assert launch_environment(1, "openmpi", cores=2, root=True, base=base) == plain | free | root
    assert launch_environment(1, "openmpi4", cores=2, root=False, base=base) == plain
    assert launch_environment(2, "openmpi", cores=2, root=False, base=base) == plain | free | full
    assert launch_environment(2, "openmpi4", cores=2, root=False, base=base) == plain | full
    assert launch_environment(4, "openmpi", cores=2, root=False, base=base) == plain | crowded
    bound = {"PATH": "/bin", "PRTE_MCA_hwloc_default_binding_policy": "core"}
    assert launch_environment(1, "openmpi", cores=2, root=False, base=bound) == plain | bound
    own = {"OMP_NUM_THREADS": "2", "OMPI_MCA_mpi_yield_when_idle": "0", "PMIX_MCA_gds": "hash"}
    assert launch_environment(4, "openmpi", cores=2, root=False, base=own) == crowded | own
