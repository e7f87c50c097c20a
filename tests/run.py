"""What must hold, in one command with one closing line: `python -m tests.run`.

Four checks of the sources (lint, format, types, spelling, each counts as one) beside the single-process tests, then the
tests marked `mpi` on 1 and 3 ranks, those of communication on 8 ranks too, and beside these, as ranks that wait leave cores
idle, the tests of GPUs on a host that stands in for them (tests/host_cuda). Tests marked `long`, those of jobs and of torch on
1 rank, 2 ranks for the library's, and 6 for those of several hosts, are left to --long. --all runs both, 4, 5 and 8 ranks for
the library's, and Slurm. A group that hangs is ended. A test that took its job down, a group that ran nothing and a job that
failed for no reported reason count as failed.

    python -m tests.run --ranks 2,4 -k regions --no-lint --no-single
    python -m tests.run --long                      what is left out above, Slurm excepted
    python -m tests.run --slurm                     the batch scripts, on a real Slurm that is started for them
    python -m tests.run --host-cuda                 the tests of GPUs alone
    python -m tests.run --mpiexec /opt/mpich/bin/mpiexec

Another MPI than this environment's: run this module with the Python of an environment that has it, or name
its launcher with --mpiexec (and its library in MPI4PY_LIBMPI).
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import IO

from oktopk.launch import end_on_sigterm, mpiexec_command
from tests import host_cuda
from tests.cluster.slurm.install import slurm_problem
from tests.outcomes import WITHOUT_GPU, read_outcomes

ROOT = Path(__file__).resolve().parent.parent
RANKS = (1, 3)
MANY_RANKS = 8  # in every run: communication, and tests that need four ranks or more
OTHER_RANKS = (2,)  # left to --long
# left to --long: hosts, or replicas, of 2 + 2 and 3 + 1 ranks, of 2 + 2 + 1, and of 2 + 2 + 2 and 3 + 3
HOSTS_RANKS = (4, 5, 6)
# Whose tests on 1 rank are left to --long, but those marked `also(ranks=1)`: tests of a single process train and bench on one
# rank, the contract and all that is below torch hold there in every run, and each process takes 3 s to start torch.
NOT_ALONE = "tests/jobs"
WITH_TORCH = re.compile(r"^(?:import|from) torch\b", re.MULTILINE)
ONLY_ALL_RANKS = (4, 5, MANY_RANKS)  # left to --all, as they take as long as all of the others
FOR_ANY_RANKS = ("tests/collectives", "tests/oktopk")  # whose tests these numbers of ranks are for
HOST_CUDA_TEST_SECONDS = 240  # more than a kernel on the host waits for other ranks
# alone those that compare all bits, of files that do without torch; odd; and as many as a region needs to get three times its
# share, or two hosts of two ranks
HOST_CUDA_RANKS = (1, 3, 4)
ALL_TESTS = ["tests"]
CORES = os.cpu_count() or 1
WORKERS = min(4, 1 + CORES)  # one more than cores: some tests wait
RANK_WORKERS = min(4, CORES)  # for tests of one rank: they wait for nobody, and starting torch takes 3 s
# Generous: they end what hangs, on a slow machine too.
CHECK_SECONDS = 600
SINGLE_SECONDS = 3600
SLURM_SECONDS = 540
SLURM_LEAVING = 60  # to end its jobs and daemons: ten minutes in all
RANKS_SECONDS = 3600
BESIDE_LEAVING = 30  # for what runs beside to end its own groups


class Tally:
    """Passed, failed and skipped so far; what failed, by name.

    Args:
        exit_first: run no group after a failure.
        output: what is printed, and by commands; None: where this process prints.
    """

    def __init__(self, exit_first: bool = False, output: IO[bytes] | None = None) -> None:
        self.exit_first, self.output = exit_first, output
        self.ended = False  # run no further group
        self.running: list[subprocess.Popen[bytes]] = []
        self.counts: Counter[str] = Counter()
        self.failures: list[str] = []
        self.ran: set[str] = set()
        self.without_gpu: set[str] = set()

    def add(self, state: str, name: str) -> None:
        self.counts[state] += 1
        if state == "failed":
            self.failures.append(name)

    def take(self, other: Tally) -> None:
        """Add what another one has counted."""
        self.counts.update(other.counts)
        self.failures += other.failures
        self.ran |= other.ran
        self.without_gpu |= other.without_gpu

    def keep(self, file: Path) -> None:
        """Leave it to a later run, which begins with what is here."""
        kept = [self.counts, self.failures, sorted(self.ran), sorted(self.without_gpu)]
        file.write_text(json.dumps(kept), encoding="utf-8")

    def begin_with(self, file: Path) -> None:
        """Take over what an earlier run left, if there was one."""
        if file.exists() and file.stat().st_size:
            counts, failures, ran, without_gpu = json.loads(file.read_text(encoding="utf-8"))
            self.counts.update(counts)
            self.failures += failures
            self.ran.update(ran)
            self.without_gpu.update(without_gpu)

    def closing_line(self, seconds: float) -> str:
        states = ", ".join(f"{self.counts[state]} {state}" for state in ("passed", "failed", "skipped"))
        return f"{states} in {seconds:.0f} s"


def run(
    tally: Tally,
    command: Sequence[str],
    seconds: float,
    environment: Mapping[str, str] | None = None,
    leaving: float = 10,
) -> int | None:
    """Exit status of a command; None if it had to be ended.

    Args:
        tally: says where it prints.
        seconds: that it may take.
        leaving: that it then has to end what it started.
    """
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=tally.output,
        stderr=tally.output,
        start_new_session=True,
    )
    tally.running.append(process)
    try:
        return process.wait(timeout=0 if tally.ended else seconds)
    except subprocess.TimeoutExpired:
        return None
    finally:
        end(process, leaving)
        tally.running.remove(process)


def end(process: subprocess.Popen[bytes], leaving: float) -> None:
    """End a process that leads a session, if it still runs."""
    if process.poll() is None:
        process.terminate()  # mpiexec passes it on to its ranks, which are in process groups of their own
        try:
            process.wait(timeout=leaving)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def announce(title: str, output: IO[bytes] | None = None) -> None:
    line = f"\n=== {title} ==="
    if output is None:
        print(line, flush=True)
    else:
        output.write(f"{line}\n".encode())
        output.flush()


@contextmanager
def checks_beside(tally: Tally) -> Iterator[None]:
    """Lint, format, types and spelling, beside what is run meanwhile; what they say comes after that."""
    tools = Path(sys.executable).parent
    checks = {
        "lint": [str(tools / "ruff"), "check", "--quiet", "."],
        "format": [str(tools / "ruff"), "format", "--check", "--quiet", "."],
        "types": [sys.executable, "-m", "mypy", "--no-error-summary"],
        "spelling": [str(tools / "codespell")],
    }
    running: dict[str, tuple[subprocess.Popen[bytes], IO[bytes]]] = {}
    try:
        for name, command in checks.items():
            output: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 - as long as the check
            process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT
            )
            running[name] = process, output
        end = time.monotonic() + CHECK_SECONDS
        yield
        announce("checks")
        for name, (process, output) in running.items():
            try:
                state = "failed" if process.wait(max(0.0, end - time.monotonic())) else "passed"
                late = ""
            except subprocess.TimeoutExpired:
                state, late = "failed", f" (did not end in {CHECK_SECONDS} s)"
            output.seek(0)
            print(f"{output.read().decode(errors='replace')}{name}: {state}{late}", flush=True)
            tally.add(state, f"check: {name}")
    finally:
        for process, output in running.values():
            if process.poll() is None:
                process.kill()
                process.wait()
            output.close()


@contextmanager
def beside(tally: Tally, work: Callable[[Tally], None]) -> Iterator[None]:
    """Do work in a thread beside the groups that are run meanwhile; what it prints comes last."""
    with tempfile.TemporaryFile() as said:
        own = Tally(output=said)
        with ThreadPoolExecutor(1) as thread:
            done = thread.submit(work, own)
            try:
                yield
                done.result()  # each of its groups has a time limit
            except BaseException:
                own.ended = True
                for process in list(own.running):
                    end(process, BESIDE_LEAVING)
                raise
        said.seek(0)
        print(said.read().decode(errors="replace"), end="", flush=True)
    tally.take(own)


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
    if tally.ended or (tally.exit_first and tally.failures):
        return
    announce(title, tally.output)
    status = run(tally, command, seconds, environment, leaving)
    states = read_outcomes(outcomes)
    tally.without_gpu |= {test for test, state in states.items() if state == WITHOUT_GPU}
    states = {test: state for test, state in states.items() if state != WITHOUT_GPU}
    tally.ran |= {test for test, state in states.items() if state != "skipped"}
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
    marked = ["-m", "slurm", "--timeout-method=signal", f"--outcomes={outcomes}", "tests/cluster/slurm"]
    command = [sys.executable, *pytest, *marked]
    between_hosts = os.environ | {"OMPI_MCA_btl": "^ofi"}  # jobs take the environment along, and need TCP
    run_group(tally, "Slurm", command, SLURM_SECONDS, between_hosts, outcomes, False, SLURM_LEAVING)


def run_host_cuda(tally: Tally, pytest: Sequence[str], folder: Path, options: argparse.Namespace) -> None:
    """The tests of GPUs where there is none: kernels compiled for the host."""
    files = files_of_tests(options.paths)
    alone, among = marked(files, "host_cuda(ranks=0"), marked(files, "host_cuda(ranks=", *HOST_CUDA_RANKS)
    if not alone and not among:
        return
    title = "kernels on the host"
    if shutil.which("g++") is None and not os.environ.get("CI"):
        announce(f"{title}: not run, as there is no g++ to compile them", tally.output)
        tally.add("skipped", title)
        return
    asked = {host_cuda.ASKED_FOR: "1", "OKTOPK_CUDA_AWARE_MPI": "1"}
    length = "" if options.all else " and long" if options.long else " and not long"
    may_be_empty = options.expression is not None or options.long
    slow = [f"--timeout={HOST_CUDA_TEST_SECONDS}"]
    if alone:
        outcomes = folder / "host-cuda"
        single = [
            *slow,
            "-m",
            f"host_cuda(ranks=0) and not mpi{length}",
            "--timeout-method=signal",
            f"--outcomes={outcomes}",
            *workers(options, "load"),
            *alone,
        ]
        chosen = ["-k", options.expression] if options.expression else []
        command = [sys.executable, *pytest, *chosen, *single]
        run_group(tally, title, command, SINGLE_SECONDS, os.environ | asked, outcomes, may_be_empty)
    for ranks in HOST_CUDA_RANKS if options.ranks is None else options.ranks:
        outcomes = folder / f"host-cuda-{ranks}"
        every = ranks == 1 and (options.all or options.long or options.ranks or options.expression)
        files = among if every else marked(among, "host_cuda(ranks=", ranks)
        if not files:
            continue
        which = "mpi and host_cuda" if every else f"mpi and host_cuda(ranks={ranks})"
        chosen = [
            *slow,
            "--with-mpi",
            "-m",
            which if ranks == 1 and options.long else f"{which}{length}",
            *(["-k", options.expression] if options.expression else []),
            f"--outcomes={outcomes}",
            *files,
        ]
        command, environment = rank_command(ranks, [*pytest, *chosen], options)
        where = f"{title}, {ranks} rank{'s' if ranks > 1 else ''}"
        run_group(tally, where, command, RANKS_SECONDS, environment | asked, outcomes, may_be_empty)


def workers(options: argparse.Namespace, share: str = "loadfile", most: int = WORKERS) -> list[str]:
    """Arguments for pytest to share tests among processes, none for a few tests: starting the processes takes longer.

    Args:
        share: "loadfile": one process runs a file, whose tests share what they set up; "load": any process runs any test.
        most: processes, where --workers does not say.
    """
    partial = options.expression is not None or options.paths != ALL_TESTS
    count = options.workers if options.workers is not None else 0 if partial else most
    # a test that ends its process is tried again in a new one, by default four times for each process
    # files in the order of conftest.py, not those of many tests first
    order = ["--no-loadscope-reorder"]
    return ["-n", str(count), "--dist", share, *order, "--max-worker-restart=2"] if count else []


def rank_command(
    ranks: int, module_args: Sequence[str], options: argparse.Namespace, few: bool = False
) -> tuple[list[str], dict[str, str]]:
    """Command and environment of a pytest on several ranks; one needs no launcher, so that processes share tests, if not few."""
    command, environment = mpiexec_command(ranks, module_args, mpiexec=options.mpiexec)
    shared = workers(options, most=RANK_WORKERS) if ranks == 1 and not few else []
    return [sys.executable, *module_args, *shared] if shared else command, environment


def files_of_tests(paths: Sequence[str]) -> list[str]:
    """The files of tests in these files and folders."""
    both = ((path, sorted(path.rglob("test_*.py")) if path.is_dir() else [path]) for path in map(Path, paths))
    return [str(file) for _, files in both for file in files]


def marked(files: Sequence[str], mark: str, *numbers: int) -> list[str]:
    """Those that mention a mark, with one of these numbers if there are any. The others need not be imported by every rank."""
    wanted = re.compile(
        rf"\bmark\.{re.escape(mark)}" + (rf"({'|'.join(map(str, numbers))})\b" if numbers else r"\b")
    )
    return [file for file in files if wanted.search(Path(file).read_text(encoding="utf-8"))]


def files_with_rank_tests(paths: Sequence[str]) -> list[str]:
    return marked(files_of_tests(paths), "mpi")


def not_alone(files: Sequence[str]) -> list[str]:
    """Those whose tests on one rank are left to --long."""
    return [
        file
        for file in files
        if file.startswith(NOT_ALONE) or WITH_TORCH.search(Path(file).read_text(encoding="utf-8"))
    ]


def files_of_ranks_alone() -> list[str]:
    """Test files that are marked as a whole. The processes of the other tests need not import them."""
    files = files_with_rank_tests(ALL_TESTS)
    marked = re.compile(r"^pytestmark = .*\bmark\.mpi\b", re.MULTILINE)
    return [file for file in files if marked.search(Path(file).read_text(encoding="utf-8"))]


def rank_groups(options: argparse.Namespace, files: Sequence[str]) -> list[tuple[int, list[str], str]]:
    """(ranks, files, expression of marks) of each job that runs the tests marked mpi."""
    everything = list(files)
    if options.ranks:
        mark = "mpi" if options.all else "mpi and long" if options.long else "mpi and not long"
        return [(ranks, everything, mark) for ranks in options.ranks]
    library = [file for file in everything if file.startswith(FOR_ANY_RANKS)]
    others = not_alone(everything)
    alone, *of_hosts, many = (
        (ranks, marked(files, "also(ranks=", ranks), f"mpi and not long and also(ranks={ranks})")
        for ranks in (1, *HOSTS_RANKS, MANY_RANKS)
    )
    if options.all:
        few = [(ranks, everything, "mpi") for ranks in RANKS]
        several = [(ranks, library, "mpi") for ranks in (*OTHER_RANKS, *ONLY_ALL_RANKS)]
        return [*few, *several, *(group for group in of_hosts if group[0] not in ONLY_ALL_RANKS)]
    if options.long:
        more = [(ranks, library, "mpi and not long") for ranks in OTHER_RANKS]
        more += [*of_hosts, (1, others, "mpi and not long")]
        repeated = [(ranks, everything, "mpi and long") for ranks in RANKS]
        return more + repeated * bool(marked(files, "long"))
    without = [file for file in everything if file not in others]
    return [(1, without, "mpi and not long"), alone, (3, everything, "mpi and not long"), many]


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.run",
        description="Run the checks of the sources and the tests on one and on several ranks, with one closing line.",
        epilog="examples:\n"
        "  python -m tests.run\n"
        "  python -m tests.run --ranks 2,4 -k regions --no-lint --no-single\n"
        "  python -m tests.run --mpiexec /opt/mpich/bin/mpiexec",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--ranks",
        type=lambda text: tuple(int(word) for word in text.split(",")),
        metavar="P,P,...",
        help="Numbers of ranks for all tests marked mpi, each at least 1; default: 1,3, and 8 for some",
    )
    parser.add_argument(
        "--long",
        action="store_true",
        help="Run only what is left out by default: tests marked long, those of jobs and of torch on 1 rank, 2 ranks for the "
        "library's, 4, 5 and 6 for those of several hosts",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help="Run everything: the tests of --long and --slurm too, and the library's on 4, 5 and 8 ranks",
    )
    parser.add_argument(
        "--workers",
        type=int,
        metavar="N",
        help="Processes that share the tests of one process or rank; default: one per core up to 4 for all tests, else one",
    )
    parser.add_argument(
        "-k", dest="expression", metavar="EXPR", help="Expression that selects tests by name, as for pytest"
    )
    parser.add_argument(
        "-x", dest="exit_first", action="store_true", help="End with the first test that fails"
    )
    parser.add_argument("--no-lint", action="store_true", help="Skip the checks of the sources")
    parser.add_argument("--no-single", action="store_true", help="Skip the tests of a single process")
    parser.add_argument("--no-ranks", action="store_true", help="Skip the tests on several ranks")
    parser.add_argument(
        "--no-host-cuda",
        action="store_true",
        help="Skip the tests of GPUs on a host that stands in for them",
    )
    parser.add_argument(
        "--mpiexec",
        metavar="PATH",
        help="Launcher of the ranks; default: this environment's, else the first on PATH",
    )
    parser.add_argument("--slurm", action="store_true", help="Run only the tests on a real Slurm")
    parser.add_argument(
        "--host-cuda",
        action="store_true",
        help="Run only the tests of GPUs on a host that stands in for them",
    )
    parser.add_argument(
        "--tally",
        type=Path,
        metavar="FILE",
        help="File of counts that those of this run are added to; default: none",
    )
    parser.add_argument(
        "paths", nargs="*", default=ALL_TESTS, help="Files or folders of tests; default: tests"
    )
    return parser.parse_args(arguments)


def main(arguments: Sequence[str] | None = None) -> int:
    options = parse(arguments)
    end_on_sigterm()
    started = time.monotonic()
    tally = Tally(options.exit_first)
    if options.tally is not None:
        tally.begin_with(options.tally)
    if options.slurm:
        options.no_lint = options.no_single = options.no_ranks = options.no_host_cuda = True
    if options.host_cuda:
        options.no_lint = options.no_single = options.no_ranks = True
    if options.long:
        options.no_lint = True
    selection = ["-k", options.expression] if options.expression else []
    partial = bool(selection) or options.paths != ALL_TESTS
    # Open MPI gives its ranks a terminal of their own: pytest cannot see where its output ends up.
    colour = "--color=yes" if sys.stdout.isatty() else "--color=no"
    plain = ["-m", "pytest", colour, "-p", "no:cacheprovider", *["-x"][: options.exit_first]]
    pytest = [*plain, *selection]
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks are the parallelism
    # Open MPI's module for libfabric sleeps for 1 s in every process when it finds no network of its own
    os.environ.setdefault("OMPI_MCA_btl", "^ofi,tcp")
    # else each process compiles the tests and their asserts anew, in 3 s
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    with tempfile.TemporaryDirectory() as folder:
        with nullcontext() if options.no_lint else checks_beside(tally):
            if not options.no_single:
                outcomes = Path(folder) / "single"
                length = "" if options.all else " and long" if options.long else " and not long"
                # The signal method ends the late test alone. It works here, where no test blocks inside MPI.
                single = [
                    "-m",
                    f"not mpi and not slurm{length}",
                    "--timeout-method=signal",
                    f"--outcomes={outcomes}",
                    *workers(options),
                    *options.paths,
                    *(f"--ignore={file}" for file in files_of_ranks_alone() if options.paths == ALL_TESTS),
                ]
                command = [sys.executable, *pytest, *single]
                run_group(tally, "single process", command, SINGLE_SECONDS, os.environ, outcomes, partial)
        groups = [] if options.no_ranks else rank_groups(options, files_with_rank_tests(options.paths))
        # a few tests are shown as they run, and behind a failure that ends the run there is nothing to run beside
        both = bool(groups) and not (options.no_host_cuda or partial or options.exit_first)
        host_cuda_groups = functools.partial(
            run_host_cuda, pytest=plain, folder=Path(folder), options=options
        )
        with beside(tally, host_cuda_groups) if both else nullcontext():
            for number, (ranks, files, mark) in enumerate(groups):
                if partial and not files:
                    continue
                outcomes = Path(folder) / f"ranks-{number}"
                marked = ["--with-mpi", "-m", mark, f"--outcomes={outcomes}", *files]
                few = "also(" in mark
                command, environment = rank_command(ranks, [*pytest, *marked], options, few)
                title = f"{ranks} rank{'s' if ranks > 1 else ''}"
                may_be_empty = partial or mark == "mpi and long"
                run_group(tally, title, command, RANKS_SECONDS, environment, outcomes, may_be_empty)
        if not options.no_host_cuda and not both:
            host_cuda_groups(tally)
        if options.slurm or (options.all and not partial and not options.host_cuda):
            run_slurm(tally, pytest, Path(folder))
    announce("closing")
    if left_out := len(tally.without_gpu - tally.ran):
        print(f"There is no GPU: {left_out} tests that need one were not run.")
    for failure in tally.failures:
        print(f"FAILED {failure}")
    if not sum(tally.counts.values()):
        print("no test was run")
    if options.tally is not None:
        tally.keep(options.tally)
    print(tally.closing_line(time.monotonic() - started), flush=True)
    # without a Slurm, or a compiler, there is nothing to pass
    ran = tally.counts["passed"] or ((options.slurm or options.host_cuda) and tally.counts["skipped"])
    return 0 if ran and not tally.counts["failed"] else 1


if __name__ == "__main__":
    sys.exit(main())
