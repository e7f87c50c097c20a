"""Everything that must hold, in one command with one closing line: `python -m tests.run`.

Four checks of the sources (lint, format, types, spelling, each counts as one), the single-process tests, then
the tests marked `mpi` on 1, 2, 3, 4, 5 and 8 ranks, and last the tests of GPUs on a host that stands in for them
(tests/host_cuda). A group that hangs is ended; a test that took its job down, a group that ran nothing and a job that
failed for no reported reason count as failed.

    python -m tests.run --ranks 2,4 -k regions --no-lint --no-single
    python -m tests.run --slurm                     the batch scripts, on a real Slurm that is started for them
    python -m tests.run --mpiexec /opt/mpich/bin/mpiexec

Another MPI than this environment's: run this module with the Python of an environment that has it, or name
its launcher with --mpiexec (and its library in MPI4PY_LIBMPI).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

from jobs.launch import end_on_sigterm, mpiexec_command
from tests import host_cuda
from tests.outcomes import read_outcomes
from tests.slurm.install import slurm_problem

ROOT = Path(__file__).resolve().parent.parent
RANKS = (1, 2, 3, 4, 5, 8)
# ranks -> which tests: alone, odd, and as many as a region needs to get three times its share; all of them take four too long
HOST_CUDA_RANKS = {1: "test", 3: "test", 4: "too_much"}
HOST_CUDA_TEST_SECONDS = 240  # more than a kernel on the host waits for other ranks
HOST_CUDA_SINGLE = ("tests/test_device_kernels.py",)
HOST_CUDA_RANKS_TESTS = (
    "tests/test_device.py",
    "tests/test_deferred_peers.py",
    "tests/test_gradient_tensors.py",
    "tests/test_gradients_in_place.py",
)
ALL_TESTS = ["tests"]
CHECK_SECONDS = 180
SINGLE_SECONDS = 1800
SLURM_SECONDS = 540
SLURM_LEAVING = 60  # to end its jobs and daemons: ten minutes in all
RANKS_SECONDS = 900


class Tally:
    """Passed, failed and skipped so far; what failed, by name."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []

    def add(self, state: str, name: str) -> None:
        self.counts[state] += 1
        if state == "failed":
            self.failures.append(name)

    def keep(self, file: Path) -> None:
        """Leave it to a later run, which begins with what is here."""
        file.write_text(json.dumps([self.counts, self.failures]), encoding="utf-8")

    def begin_with(self, file: Path) -> None:
        """Take over what an earlier run left, if there was one."""
        if file.exists() and file.stat().st_size:
            counts, failures = json.loads(file.read_text(encoding="utf-8"))
            self.counts.update(counts)
            self.failures += failures

    def closing_line(self, seconds: float) -> str:
        states = ", ".join(f"{self.counts[state]} {state}" for state in ("passed", "failed", "skipped"))
        return f"{states} in {seconds:.0f} s"


def run(
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    leaving: float = 10,
) -> int | None:
    """Exit status of a command that prints where we print; None if it had to be ended.

    Args:
        seconds: that it may take.
        leaving: that it then has to end what it started.
    """
    process = subprocess.Popen(
        command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        return process.wait(timeout=seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        if process.poll() is None:
            process.terminate()  # mpiexec passes it on to its ranks, which are in process groups of their own
            try:
                process.wait(timeout=leaving)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def announce(title: str) -> None:
    print(f"\n=== {title} ===", flush=True)


def run_checks(tally: Tally) -> None:
    """Lint, format, types and spelling."""
    tools = Path(sys.executable).parent
    checks = {
        "lint": [str(tools / "ruff"), "check", "--quiet", "."],
        "format": [str(tools / "ruff"), "format", "--check", "--quiet", "."],
        "types": [sys.executable, "-m", "mypy", "--no-error-summary"],
        "spelling": [str(tools / "codespell")],
    }
    announce("checks")
    for name, command in checks.items():
        started = time.monotonic()
        state = "passed" if run(command, CHECK_SECONDS) == 0 else "failed"
        print(f"{name}: {state} ({time.monotonic() - started:.1f} s)", flush=True)
        tally.add(state, f"check: {name}")


def run_group(
    tally: Tally,
    title: str,
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str],
    outcomes: Path,
    may_be_empty: bool,
    leaving: float = 10,
) -> None:
    """One pytest, on one or several ranks, and what became of each of its tests."""
    announce(title)
    status = run(command, seconds, environment, leaving)
    states = read_outcomes(outcomes)
    for test, state in states.items():
        if state == "started":
            tally.add("failed", f"{title}: {test} (took the job down)")
        else:
            tally.add(state, f"{title}: {test}")
    if status is None:
        tally.add("failed", f"{title}: did not end in {seconds:g} s")
    elif status == 5 and may_be_empty:
        pass  # pytest's status for "no tests selected"
    elif not any(state != "skipped" for state in states.values()) and not may_be_empty:
        tally.add("failed", f"{title}: ran no test (status {status})")
    elif status != 0 and not any(state in ("started", "failed") for state in states.values()):
        tally.add("failed", f"{title}: ended with status {status}")


def run_slurm(tally: Tally, pytest: Sequence[str], folder: Path) -> None:
    """The tests that need a Slurm, where there can be one."""
    problem = slurm_problem()
    if problem:
        announce("Slurm")
        print(f"The tests on Slurm are skipped: {problem}", flush=True)
        tally.add("skipped", "Slurm")
        return
    outcomes = folder / "slurm"
    marked = ["-m", "slurm", "--timeout-method=signal", f"--outcomes={outcomes}", "tests/slurm"]
    command = [sys.executable, *pytest, *marked]
    run_group(tally, "Slurm", command, SLURM_SECONDS, os.environ, outcomes, False, SLURM_LEAVING)


def run_host_cuda(tally: Tally, pytest: Sequence[str], folder: Path, options: argparse.Namespace) -> None:
    """The tests of GPUs where there is none: kernels compiled for the host."""
    alone, among = (
        [file for file in files if options.paths == ALL_TESTS or file in options.paths]
        for files in (HOST_CUDA_SINGLE, HOST_CUDA_RANKS_TESTS)
    )
    if not alone and not among:
        return
    title = "kernels on the host"
    if shutil.which("g++") is None and not os.environ.get("CI"):
        announce(title)
        print("The kernels are not run: there is no g++ to compile them for the host.", flush=True)
        tally.add("skipped", title)
        return
    asked = {host_cuda.ASKED_FOR: "1", "OKTOPK_CUDA_AWARE_MPI": "1"}
    may_be_empty = options.expression is not None
    slow = [f"--timeout={HOST_CUDA_TEST_SECONDS}"]
    if alone:
        outcomes = folder / "host-cuda"
        single = [*slow, "-m", "not mpi", "--timeout-method=signal", f"--outcomes={outcomes}", *alone]
        chosen = ["-k", options.expression] if options.expression else []
        command = [sys.executable, *pytest, *chosen, *single]
        run_group(tally, title, command, SINGLE_SECONDS, os.environ | asked, outcomes, may_be_empty)
    # what stands in for peers on the host is tested without
    wanted = f"({options.expression or 'test'}) and (test_device or cuda)"
    for ranks in sorted({*HOST_CUDA_RANKS} & {*options.ranks}) if among else ():
        outcomes = folder / f"host-cuda-{ranks}"
        expression = f"{wanted} and ({HOST_CUDA_RANKS[ranks]})"
        marked = [*slow, "--with-mpi", "-m", "mpi", "-k", expression, f"--outcomes={outcomes}", *among]
        command, environment = mpiexec_command(ranks, [*pytest, *marked], mpiexec=options.mpiexec)
        where = f"{title}, {ranks} rank{'s' if ranks > 1 else ''}"
        run_group(tally, where, command, RANKS_SECONDS, environment | asked, outcomes, may_be_empty)


def files_with_rank_tests(paths: Sequence[str]) -> list[str]:
    """Test files that mention the mark. The others need not be imported by every rank."""
    found: list[str] = []
    for path in map(Path, paths):
        candidates = sorted(path.rglob("test_*.py")) if path.is_dir() else [path]
        found += [str(file) for file in candidates if "mark.mpi" in file.read_text(encoding="utf-8")]
    return found


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.run", description="All checks and tests.")
    parser.add_argument(
        "--ranks",
        type=lambda text: tuple(int(word) for word in text.split(",")),
        default=RANKS,
        metavar="P,P,...",
        help="numbers of ranks for the tests marked mpi",
    )
    parser.add_argument("-k", dest="expression", metavar="EXPR", help="only tests that match, as for pytest")
    parser.add_argument("--no-lint", action="store_true", help="without the checks of the sources")
    parser.add_argument("--no-single", action="store_true", help="without the single-process tests")
    parser.add_argument("--no-ranks", action="store_true", help="without the tests on several ranks")
    parser.add_argument(
        "--no-host-cuda",
        action="store_true",
        help="without the tests of GPUs on a host that stands in for them",
    )
    parser.add_argument(
        "--mpiexec", metavar="PATH", help="the launcher; default: this environment's, else PATH's"
    )
    parser.add_argument("--slurm", action="store_true", help="the tests on a real Slurm, and no others")
    parser.add_argument(
        "--tally", type=Path, metavar="FILE", help="begin with the counts that are there, and leave the sum"
    )
    parser.add_argument("paths", nargs="*", default=ALL_TESTS, help="files or folders; default: tests")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    end_on_sigterm()
    started = time.monotonic()
    tally = Tally()
    if options.tally is not None:
        tally.begin_with(options.tally)
    if options.slurm:
        options.no_lint = options.no_single = options.no_ranks = options.no_host_cuda = True
    selection = ["-k", options.expression] if options.expression else []
    partial = bool(selection) or options.paths != ALL_TESTS
    # Open MPI gives its ranks a terminal of their own: pytest cannot see where its output ends up.
    colour = "--color=yes" if sys.stdout.isatty() else "--color=no"
    plain = ["-m", "pytest", colour, "-p", "no:cacheprovider"]
    pytest = [*plain, *selection]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks are the parallelism
    if not options.no_lint:
        run_checks(tally)
    with tempfile.TemporaryDirectory() as folder:
        if options.slurm:
            run_slurm(tally, pytest, Path(folder))
        if not options.no_single:
            outcomes = Path(folder) / "single"
            # The signal method ends the late test alone. It works here, where no test blocks inside MPI.
            single = [
                "-m",
                "not mpi and not slurm",
                "--timeout-method=signal",
                f"--outcomes={outcomes}",
                *options.paths,
            ]
            command = [sys.executable, *pytest, *single]
            run_group(tally, "single process", command, SINGLE_SECONDS, os.environ, outcomes, partial)
        files = files_with_rank_tests(options.paths)
        for ranks in () if options.no_ranks or (partial and not files) else options.ranks:
            outcomes = Path(folder) / f"ranks-{ranks}"
            marked = ["--with-mpi", "-m", "mpi", f"--outcomes={outcomes}", *files]
            command, environment = mpiexec_command(ranks, [*pytest, *marked], mpiexec=options.mpiexec)
            title = f"{ranks} rank{'s' if ranks > 1 else ''}"
            run_group(tally, title, command, RANKS_SECONDS, environment, outcomes, partial)
        if not options.no_host_cuda:
            run_host_cuda(tally, plain, Path(folder), options)
    announce("closing")
    for failure in tally.failures:
        print(f"FAILED {failure}")
    if not sum(tally.counts.values()):
        print("no test was run")
    if options.tally is not None:
        tally.keep(options.tally)
    print(tally.closing_line(time.monotonic() - started), flush=True)
    # without a Slurm there is nothing to pass
    ran = tally.counts["passed"] or (options.slurm and tally.counts["skipped"])
    return 0 if ran and not tally.counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
