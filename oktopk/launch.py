"""Start ranks: the one place that knows how this machine's `mpiexec` wants to be called.

    oktopk-run -n 4 train.py --epochs 3

is `mpiexec -n 4 python -m mpi4py train.py --epochs 3` with what the machine needs added: permission to run as
root, more ranks than cores, waiting ranks that give the core away.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path

from collectives.connect import INSTALL_MPI, mpi_problem

# Left by a surrounding job of MPI or torchrun. A job started inside it would take itself for one of its ranks.
_INHERITED = (
    "PMIX_",
    "PMI_",
    "PMI2_",
    "HYDI_",
    "HYDRA_",
    "OMPI_COMM_WORLD_",
    "OMPI_UNIVERSE_",
    "OMPI_FILE_",
    "PRTE_LAUNCHED",
    "TORCHELASTIC_",
)


class LaunchError(RuntimeError):
    """No usable mpiexec, or a number of ranks that cannot be started."""


def end_on_sigterm() -> None:
    """Let a SIGTERM raise SystemExit, so that whoever started a job ends it before leaving."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))


def find_mpiexec() -> str:
    """Path of the mpiexec to use: the one beside the running interpreter, else the first on PATH.

    Raises:
        LaunchError: there is none.
    """
    for folder in (Path(sys.executable).parent, Path(sys.prefix) / "bin"):
        candidate = folder / "mpiexec"
        if os.access(candidate, os.X_OK):
            return str(candidate)
    on_path = shutil.which("mpiexec")
    if on_path is None:
        raise LaunchError(f"no mpiexec beside {sys.executable} nor on PATH: {INSTALL_MPI}")
    return on_path


def library_problem() -> str:
    """As mpi_problem, without starting MPI: a process that has started it cannot start an mpiexec."""
    with suppress(ImportError):
        import mpi4py

        mpi4py.rc(initialize=False)
    return mpi_problem()


@cache
def mpiexec_flavour(mpiexec: str) -> str:
    """Which MPI a launcher belongs to, by `mpiexec --version`.

    Returns:
        "openmpi" (5 and later), "openmpi4" (4 and earlier), "mpich" (any Hydra launcher) or "unknown".

    Raises:
        LaunchError: the launcher does not run.
    """
    try:
        answer = subprocess.run(
            [mpiexec, "--version"],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env=launch_environment(1, "unknown"),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LaunchError(f"{mpiexec} --version does not run: {error}") from error
    words = answer.stdout + answer.stderr
    if "Open MPI" in words or "OpenRTE" in words:
        major = next(
            (word.split(".")[0] for word in words.split() if word[:1].isdigit() and "." in word), "5"
        )
        return "openmpi" if not major.isdigit() or int(major) >= 5 else "openmpi4"
    if "HYDRA" in words or "MPICH" in words or "Intel(R) MPI" in words:
        return "mpich"
    return "unknown"


def launch_environment(
    ranks: int,
    flavour: str,
    *,
    cores: int | None = None,
    root: bool | None = None,
    base: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """The environment for `ranks` ranks: base (default: ours) without a surrounding job, plus what is needed.

    A variable that the user has set is left as it is. cores and root default to this machine and this user.
    """
    source = os.environ if base is None else base
    environment = {
        name: value for name, value in source.items() if "_MCA_" in name or not name.startswith(_INHERITED)
    }
    # One thread per rank unless the user says otherwise: the ranks are the parallelism.
    environment.setdefault("OMP_NUM_THREADS", "1")
    # the ranks of one host need no ports, which others could reach
    if not flavour.startswith("openmpi"):
        if flavour == "mpich":
            environment.setdefault("UCX_TLS", "^tcp")
        return environment
    if flavour == "openmpi":
        # a rank has threads (autograd's, NCCL's), and two jobs on a host would be bound to the same cores
        environment.setdefault("PRTE_MCA_hwloc_default_binding_policy", "none")
    environment.setdefault("OMPI_MCA_btl", "^tcp")
    if root is None:
        root = hasattr(os, "geteuid") and os.geteuid() == 0
    if cores is None:
        cores = available_cores()
    if root:
        environment.setdefault("OMPI_ALLOW_RUN_AS_ROOT", "1")
        environment.setdefault("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1")
    if ranks > cores:
        if flavour == "openmpi4":
            environment.setdefault("OMPI_MCA_rmaps_base_oversubscribe", "1")
        else:
            environment.setdefault("PRTE_MCA_rmaps_default_mapping_policy", ":OVERSUBSCRIBE")
    if ranks >= cores:
        # with a core for each rank, the launcher and a rank's threads still need one
        environment.setdefault("OMPI_MCA_mpi_yield_when_idle", "1")
    return environment


def refuses_root(mpiexec: str) -> bool:
    """Whether a launcher refuses this user, who is root, where it is called as it is. `oktopk-run` adds what it asks for.

    Raises:
        LaunchError: as `mpiexec_flavour`.
    """
    added = launch_environment(1, mpiexec_flavour(mpiexec)).keys() - os.environ.keys()
    return any(name.startswith("OMPI_ALLOW_RUN_AS_ROOT") for name in added)


def available_cores() -> int:
    """Cores this process may use, which in a container or a batch job are fewer than the machine has."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def mpiexec_command(
    ranks: int, module_args: Sequence[str], *, mpiexec: str | None = None
) -> tuple[list[str], dict[str, str]]:
    """Command and environment that run `python -m mpi4py MODULE_ARGS...` on several ranks of this machine.

    Always through mpi4py's runner: under plain `python` an exception on one rank leaves the others waiting.

    Args:
        ranks: number of ranks, >= 1.
        module_args: what follows `python -m mpi4py`: ["-m", "my.module", "x.toml"] or ["script.py", ...].
        mpiexec: the launcher; default find_mpiexec().

    Returns:
        (argv, env) for subprocess.run(argv, env=env).

    Raises:
        LaunchError: no launcher, or ranks < 1.
    """
    if ranks < 1:
        raise LaunchError(f"ranks {ranks} is not at least 1")
    launcher = mpiexec or find_mpiexec()
    environment = launch_environment(ranks, mpiexec_flavour(launcher))
    return [launcher, "-n", str(ranks), sys.executable, "-m", "mpi4py", *module_args], environment


def main(argv: Sequence[str] | None = None, prog: str = "oktopk-run") -> None:
    """The command `oktopk-run`: becomes the mpiexec it describes."""
    words = list(sys.argv[1:] if argv is None else argv)
    own = _own_words(words)
    parser = argparse.ArgumentParser(
        prog=prog,
        usage=f"{prog} [-h] -n RANKS (SCRIPT | -m MODULE) [ARGUMENT ...]",
        description="Start a Python program on several ranks of this machine. It runs under `python -m mpi4py`, so that all\n"
        "ranks end when one raises, and with what this machine's mpiexec needs for root, and for more ranks than cores.",
        epilog=f"examples:\n  {prog} -n 4 train.py --epochs 3\n  {prog} -n 2 -m my_package.train\n\n"
        "On several hosts, or under Slurm, use the site's launcher: srun python -m mpi4py train.py. Variables that are set\n"
        "(OMP_NUM_THREADS, OMPI_MCA_..., PRTE_MCA_...) are kept; OMP_NUM_THREADS is 1 where it is not set.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "-n",
        "--ranks",
        type=int,
        required=True,
        metavar="RANKS",
        help="Number of ranks (processes) to start, at least 1",
    )
    ranks = parser.parse_args(words[:own]).ranks
    program = words[own:]
    if not program or program == ["-m"]:
        parser.error("no program: give a script, or -m and a module")
    try:
        command, environment = mpiexec_command(ranks, program)
        if problem := library_problem():
            raise LaunchError(problem)
    except LaunchError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        raise SystemExit(2) from None
    os.execve(command[0], command, environment)


def _own_words(words: Sequence[str]) -> int:
    """How many of the words come before the program: argparse would take the program's `-m` for an option of its own."""
    count = 0
    while count < len(words) and words[count].startswith("-") and words[count] != "-m":
        count += 2 if words[count] in ("-n", "--ranks") else 1
    return min(count, len(words))


if __name__ == "__main__":
    main()
