"""What the doctor tries, in processes of its own, and in a sentence how they ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from oktopk.launch import LaunchError, find_mpiexec, launch_environment, mpiexec_command

ROOT = Path(__file__).parents[2]
PROBE = ("-m", "oktopk.doctor.probe")


@dataclass(frozen=True)
class Try:
    """An exchange between two processes.

    Attributes:
        title: of its line on the screen.
        starter: what starts the processes: "mpi" or "torch"; "" for the first of them that works.
        probe: a name in `EXCHANGES` of `oktopk.doctor.probe`.
        aware: value of OKTOPK_CUDA_AWARE_MPI; "" for the doctor's own.
    """

    title: str
    starter: str
    probe: str
    aware: str = ""


TRIES = {
    "host": Try("host memory, MPI", "mpi", "host"),
    "gloo": Try("host memory, torch", "torch", "host"),
    "device": Try("device memory, MPI", "mpi", "device", aware="1"),
    "staged": Try("device memory, staged", "mpi", "device", aware="0"),
    "nccl": Try("device memory, torch", "torch", "device"),
    "peer": Try("peer memory, CUDA IPC", "", "peer", aware="0"),
}
"""In the order in which they are tried. Messages of the last one go through host memory."""

Starter: TypeAlias = tuple[list[str], dict[str, str]]
"""Command and environment that run ranks of the Python program whose name follows."""


def alone() -> Starter:
    """One rank, of no job."""
    return [sys.executable], dict(os.environ)


def mpi_starter() -> Starter:
    """mpiexec, or srun inside a Slurm allocation where there is none.

    Raises:
        LaunchError: neither is there, or it does not run; the message says what to do.
    """
    try:
        mpiexec = find_mpiexec()
    except LaunchError as missing:
        srun = shutil.which("srun")
        if srun is None:
            raise LaunchError(f"{missing}; there is no srun either") from None
        if "SLURM_JOB_ID" not in os.environ:
            raise LaunchError(f"{missing}; {srun} needs an allocation: salloc -n 2 oktopk-doctor") from None
        # --overlap: the step may share what the shell's own step holds
        command = [srun, "--overlap", "-n", "2", sys.executable, "-m", "mpi4py"]
        return command, launch_environment(2, "srun")
    return mpiexec_command(2, [], mpiexec=mpiexec)


def torch_starter() -> Starter:
    """torchrun, which needs no MPI."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    return command, launch_environment(2, "torchrun")


def attempt(
    starter: Starter,
    what: str,
    timeout: float,
    ranks: int = 2,
    probe: Sequence[str] = PROBE,
) -> dict[str, Any]:
    """What rank 0 of a probe found; `problem` says how the ranks failed, if they did.

    Args:
        what: a name in `ALONE` or `EXCHANGES` of `oktopk.doctor.probe`.
        timeout: seconds until all ranks are ended.
        ranks: that the starter starts; each writes its findings to a file of its own.
    """
    command, environment = starter
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        path = f"{folder}/found"
        try:
            ended = _ended([*command, *probe, what, path], as_given(environment), timeout)
        except OSError as error:
            return {"problem": str(error)}
        findings = [_read(Path(f"{path}.{rank}")) for rank in range(ranks)]
    # a rank's own words first: the other one, and the launcher, only say that it ended
    for rank, each in enumerate(findings):
        if problem := each.get("problem"):
            return each | {"problem": f"rank {rank}: {problem}" if ranks > 1 and ended else problem}
    silent = [rank for rank, each in enumerate(findings) if not each]
    if silent and not ended:
        ended = f"rank(s) {silent} ended without a word"
    return findings[0] | {"problem": ended}


def as_given(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what loading UCX in this very process put there."""
    loaded = getattr(sys.modules.get("collectives"), "WITHOUT_CUDA_UCX", "not even imported") == ""
    put = sys.modules["collectives.cuda.ucx"].UCX_SETTINGS if loaded else {}
    return {name: value for name, value in environment.items() if put.get(name) != value}


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return {}  # it died before, or while it wrote


def _ended(command: Sequence[str], environment: Mapping[str, str], timeout: float) -> str:
    """Run to the end; how it failed, in a sentence, "" if it did not."""
    with tempfile.TemporaryFile() as output:
        process = subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status = process.wait(timeout)
        except subprocess.TimeoutExpired:
            return f"did not end in {timeout:g} s, and was ended"
        finally:
            _end(process)
        output.seek(0)
        return how_it_ended(status, output.read().decode(errors="replace"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """End a launcher, which ends its ranks, if there is time; then whatever is left of its session."""
    if process.poll() is None:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(5)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def how_it_ended(status: int, output: str) -> str:
    """A sentence on an exit status other than 0: the signal by name, or the error that was printed.

    Args:
        status: as subprocess gives it.
        output: standard output and standard error.
    """
    if not status:
        return ""
    number = -status if status < 0 else status - 128
    # a SIGTERM is how a launcher ends the other ranks; torchrun names the first cause last
    announced = re.findall(r"\bsignal[: ]+(?!15\b)(\d+)", output, re.IGNORECASE)
    if 0 < status <= 128 and announced:
        number = int(announced[-1])
    if number in set(signal.Signals):
        name = signal.Signals(number).name
        meaning = " (a segmentation fault)" if number == signal.SIGSEGV else ""
        return f"a process died of {name}{meaning}"
    lines = [line.strip() for line in output.splitlines() if line.strip(" -=*\t")]
    # not torchrun's own, which follows that of a rank
    error = re.compile(r"(?!.*ChildFailedError)[\w.]*(Error|Exception|Exit)\b.*:")
    errors = [line for line in lines if error.match(line)]
    last_line = (errors or lines or ["nothing"])[-1]
    return f"ended with status {status}: {last_line[:200]}"
