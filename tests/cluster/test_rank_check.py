"""A job that is not as large as what was started says so."""

from __future__ import annotations

from typing import Any

import pytest
from mpi4py import MPI

from jobs.cluster.rank_check import launch_problem, main


@pytest.mark.parametrize("name", ["OKTOPK_RANKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS"])
def test_every_witness_is_heard(name: str) -> None:
    assert launch_problem(4, {name: "4"}) == ""
    assert "started 4 ranks, but mpi4py's MPI sees 1: they belong to different MPI" in launch_problem(
        1, {name: "4"}
    )
    assert f"sees 2: start the job with as many, or unset {name}" in launch_problem(2, {name: "4"})


def test_without_a_witness_there_is_no_problem() -> None:
    assert launch_problem(1, {}) == ""
    assert launch_problem(3, {"SLURM_NTASKS": ""}) == ""


def test_the_batch_scripts_count_goes_before_slurms() -> None:
    assert launch_problem(8, {"OKTOPK_RANKS": "8", "SLURM_NTASKS": "2"}) == ""
    assert launch_problem(8, {"OMPI_COMM_WORLD_SIZE": "8", "SLURM_NTASKS": "2"}) == ""
    assert "the batch script started 8 ranks" in launch_problem(2, {"OKTOPK_RANKS": "8", "SLURM_NTASKS": "2"})


class WrongOnTheLast(MPI.Intracomm):
    """A communicator that loses an element on its way to one rank."""

    def Allreduce(self, send: Any, receive: Any, op: MPI.Op = MPI.SUM) -> None:  # noqa: N802
        super().Allreduce(send, receive, op)
        if self.rank == self.size - 1:
            receive[12345] = -7


@pytest.mark.mpi
def test_all_ranks_tell_of_a_sum_wrong_on_one(comm: MPI.Intracomm, capfd: pytest.CaptureFixture[str]) -> None:
    assert main(comm) == 0
    assert main(WrongOnTheLast(comm)) == 2
    if comm.rank == 0:
        right = comm.size * (comm.size + 1) // 2
        assert f"gave -7 at 12345 on rank {comm.size - 1}: {right} is right" in capfd.readouterr().err
