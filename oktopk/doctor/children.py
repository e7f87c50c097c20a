"""Start the doctor's probes in processes of their own, and say in a sentence how they ended."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from oktopk.launch import LaunchError, find_mpiexec, launch_environment, mpiexec_command

ROOT = Path(__file__).parents[2]
PROBE = ("-m", "oktopk.doctor.probe")


def find_launcher() -> str:
    """Path of what starts ranks: mpiexec, or srun inside a Slurm allocation where there is none.

    Raises:
        LaunchError: neither is there; the message says what to do.
    """
    try:
        return find_mpiexec()
    except LaunchError as missing:
        srun = shutil.which("srun")
        if srun is None:
            raise LaunchError(f"{missing}; there is no srun either") from None
        if "SLURM_JOB_ID" not in os.environ:
            raise LaunchError(f"{missing}; {srun} needs an allocation: salloc -n 2 oktopk-doctor") from None
        return srun


def command_for_two(launcher: str, module_args: Sequence[str]) -> tuple[list[str], dict[str, str]]:
    """Command and environment that run two ranks.

    Raises:
        LaunchError: the launcher does not run.
    """
    if Path(launcher).name != "srun":
        return mpiexec_command(2, module_args, mpiexec=launcher)
    # --overlap: the step may share what the shell's own step holds
    command = [launcher, "--overlap", "-n", "2", sys.executable, "-m", "mpi4py", *module_args]
    return command, launch_environment(2, "srun")


def one(what: str, timeout: float, probe: Sequence[str] = PROBE) -> dict[str, Any]:
    """What one process found; `problem` says how it failed, if it did."""
    return _result(
        lambda path: ([sys.executable, *probe, what, path], as_given(os.environ)), timeout, ranks=1
    )


def two(
    launcher: str,
    what: str,
    timeout: float,
    extra: Mapping[str, str] | None = None,
    probe: Sequence[str] = PROBE,
) -> dict[str, Any]:
    """What rank 0 of two found in an exchange of `oktopk.doctor.probe`; `problem` says how they failed, if they did.

    Args:
        timeout: seconds until both are ended.
        extra: environment variables on top of this process's.
    """

    def job(path: str) -> tuple[list[str], dict[str, str]]:
        command, environment = command_for_two(launcher, [*probe, what, path])
        return command, as_given(environment) | dict(extra or {})

    return _result(job, timeout, ranks=2)


def as_given(environment: Mapping[str, str]) -> dict[str, str]:
    """An environment without what loading UCX in this very process put there."""
    loaded = getattr(sys.modules.get("collectives"), "WITHOUT_CUDA_UCX", "not even imported") == ""
    put = sys.modules["collectives.cuda.ucx"].UCX_SETTINGS if loaded else {}
    return {name: value for name, value in environment.items() if put.get(name) != value}


def _result(
    job: Callable[[str], tuple[list[str], dict[str, str]]], timeout: float, ranks: int
) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="doctor-") as folder:
        path = Path(folder) / "result"
        try:
            command, environment = job(str(path))
            ended = _ended(command, environment, timeout)
        except (LaunchError, OSError) as error:
            return {"problem": str(error)}
        results = [_read(Path(f"{path}.{rank}")) for rank in range(ranks)]
    # a rank's own words first: the other one, and the launcher, only say that it ended
    for rank, result in enumerate(results):
        if result and result.get("problem"):
            where = f"rank {rank}: " if ranks > 1 and ended else ""
            return result | {"problem": where + result["problem"]}
    if ended:
        return (results[0] or {}) | {"problem": ended}
    missing = [rank for rank, result in enumerate(results) if result is None]
    if missing:
        return {"problem": f"rank(s) {missing} ended without a word"}
    assert results[0] is not None
    return results[0]


def _read(path: Path) -> dict[str, Any] | None:
    try:
        return dict(json.loads(path.read_text(encoding="utf-8")))
    except (OSError, ValueError):
        return None  # it died before, or while it wrote


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
    announced = re.search(r"\b(?:on|by|with|from)?\s*signal[: ]+(\d+)", output)
    number = (
        -status if status < 0 else status - 128 if status > 128 else int(announced[1]) if announced else 0
    )
    if number in set(signal.Signals):
        name = signal.Signals(number).name
        meaning = " (a segmentation fault)" if number == signal.SIGSEGV else ""
        return f"a process died of {name}{meaning}"
    lines = [line.strip() for line in output.splitlines() if line.strip(" -=*\t")]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Exit)\b.*:", line)]
    last_line = (errors or lines or ["nothing"])[-1]
    return f"ended with status {status}: {last_line[:200]}"
