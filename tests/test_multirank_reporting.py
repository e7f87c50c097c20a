"""One failing rank must be seen, end in bounded time, and not put the ranks out of step."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from oktopk.launch import mpiexec_command
from tests.outcomes import read_outcomes

ROOT = Path(__file__).resolve().parent.parent
SECONDS = 240  # for what takes ten where nothing else runs
pytestmark = pytest.mark.timeout(SECONDS + 20)


def run_ranks(
    folder: Path, source: str, *options: str, ranks: int = 3
) -> tuple[subprocess.CompletedProcess[str], dict[str, str]]:
    """The finished job, and the state of each test by its function's name."""
    (folder / "pytest.ini").write_text(
        "[pytest]\naddopts = --import-mode=importlib\ntimeout_method = thread\n"
    )
    (folder / "test_sample.py").write_text(
        f"import time\nimport pytest\nfrom hypothesis import given, strategies\nfrom mpi4py import MPI\n"
        f"rank = MPI.COMM_WORLD.rank\npytestmark = pytest.mark.mpi\n{source}"
    )
    outcomes = folder / "outcomes"
    words = ["-m", "pytest", "--with-mpi", "-p", "no:cacheprovider", f"--outcomes={outcomes}"]
    command, environment = mpiexec_command(ranks, [*words, *options, str(folder)])
    environment["PYTHONPATH"] = str(ROOT)
    environment["PYTEST_ADDOPTS"] = "-p tests.conftest"
    try:
        job = subprocess.run(
            command, env=environment, cwd=folder, capture_output=True, text=True, timeout=SECONDS, check=False
        )
    except subprocess.TimeoutExpired as late:
        raise AssertionError(
            f"not over in {SECONDS} s; said so far: {late.stdout!r} {late.stderr!r}"
        ) from None
    states = {test.split("::")[-1]: state for test, state in read_outcomes(outcomes).items()}
    return job, states


def test_a_failure_on_one_rank_spares_the_next_test(tmp_path: Path) -> None:
    job, states = run_ranks(
        tmp_path,
        """
def test_one_rank_fails(comm):
    print(f"printed by {rank}")
    assert rank != 2, "only here"

@pytest.fixture
def broken_on_rank_1():
    if rank == 1:
        raise RuntimeError("set-up of rank 1")

def test_setup_fails(comm, broken_on_rank_1):
    comm.Barrier()

@pytest.fixture
def broken_afterwards():
    yield
    if rank == 2:
        raise RuntimeError("teardown of rank 2")

def test_teardown_fails(comm, broken_afterwards):
    comm.Barrier()

def test_all_ranks_fail(comm):
    assert comm.size == 0

def test_skipped(comm):
    pytest.skip("on all ranks")

def test_skipped_on_one_rank(comm):
    if rank == 1:
        pytest.skip("here alone")

@pytest.mark.mpi(min_size=4)
def test_of_more_ranks(comm):
    assert False

@given(strategies.integers(0, 10**6))
def test_one_example_fails(comm, number):
    assert comm.allgather(number) == [number] * 3
    assert rank != 1 or number < 1000

def test_still_in_step(comm):
    assert comm.allreduce(rank) == 3
""",
    )
    assert states == {
        "test_one_rank_fails": "failed",
        "test_setup_fails": "failed",
        "test_teardown_fails": "failed",
        "test_all_ranks_fail": "failed",
        "test_skipped": "skipped",
        "test_skipped_on_one_rank": "failed",
        "test_of_more_ranks": "skipped",
        "test_one_example_fails": "failed",
        "test_still_in_step": "passed",
    }
    assert job.returncode != 0
    assert "--- failed on rank 2 of 3 ---" in job.stdout
    assert "only here" in job.stdout
    assert "printed by 2" in job.stdout
    assert "printed by 1" not in job.stdout
    assert "set-up of rank 1" in job.stdout
    assert "teardown of rank 2" in job.stdout
    assert "--- failed on rank 0, 1, 2 of 3 ---" in job.stdout
    assert "skipped on ranks [1] only" in job.stdout
    assert "number=1000" in job.stdout  # all ranks shrank the same failure
    assert job.stdout.count("short test summary info") == 1  # rank 0 alone reports


def test_a_rank_that_fails_in_a_collective_ends_the_job(tmp_path: Path) -> None:
    job, states = run_ranks(
        tmp_path,
        """
def test_before(comm):
    pass

def test_stuck(comm):
    assert rank != 1, "alone"
    comm.Barrier()

def test_after(comm):
    pass
""",
        "--rank-patience=1",
        ranks=2,
    )
    assert job.returncode != 0
    assert states == {"test_before": "passed", "test_stuck": "started"}
    assert "[rank 1]" in job.stderr
    assert 'assert rank != 1, "alone"' in job.stderr
    assert "The other ranks did not come here in 1 s." in job.stderr


def test_where_a_rank_hangs_every_rank_says_where_it_is(tmp_path: Path) -> None:
    job, states = run_ranks(
        tmp_path,
        """
def test_hangs(comm):
    try:
        if rank == 1:
            raise RuntimeError("of rank 1 alone")
        comm.Barrier()
    finally:
        if rank == 1:
            time.sleep(1000)
""",
        "--timeout=1",
        ranks=2,
    )
    assert job.returncode != 0
    assert states == {"test_hangs": "started"}
    assert "time.sleep(1000)" in job.stderr and "RuntimeError: of rank 1 alone" in job.stderr
    assert "comm.Barrier()" in job.stderr and job.stderr.count("while it handles") == 1
    assert {f"[rank {rank}] " in job.stderr for rank in range(2)} == {True}


@pytest.mark.long("starts ranks; `make test` has one that fails and one that hangs")
def test_ranks_that_collect_other_tests_end_the_job(tmp_path: Path) -> None:
    job, states = run_ranks(
        tmp_path,
        """
if rank == 2:
    raise ImportError("no such module on rank 2")

def test_one(comm):
    comm.Barrier()
""",
    )
    assert job.returncode != 0
    assert not states
    assert "no such module on rank 2" in job.stderr
