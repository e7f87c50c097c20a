"""Start jobs of this checkout on several ranks: `python -m jobs.launch` is `oktopk-run`.

python -m jobs.launch -n 4 -m jobs.train jobs/configs/digits.toml
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from oktopk.launch import main, mpiexec_command


def run_job(
    ranks: int, module_args: Sequence[str], *, patience: float = 0.0, seconds: float | None = None
) -> int:
    """Run one job to its end and return its exit status. An interrupt ends the job first.

    Args:
        ranks, module_args: as mpiexec_command.
        patience: seconds that an interrupted job is given, by SIGUSR1, to stop with a checkpoint; 0: none.
        seconds: after which it is interrupted; None: never.
    """
    argv, environment = mpiexec_command(ranks, module_args)
    process = subprocess.Popen(
        argv, env=environment, cwd=Path(__file__).parent.parent, stdin=subprocess.DEVNULL
    )
    try:
        return process.wait(timeout=seconds)
    except BaseException as error:
        if patience:
            # launchers pass this one on; SIGTERM they take as meant for themselves, and kill the ranks
            process.send_signal(signal.SIGUSR1)
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=patience)
        process.terminate()
        try:
            process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            process.kill()
        if isinstance(error, subprocess.TimeoutExpired):
            return process.wait()
        raise


if __name__ == "__main__":
    main(prog="python -m jobs.launch")
