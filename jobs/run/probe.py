"""Tries to read a run file in a child process: HDF5 may hang or crash on a damaged one.

python -m jobs.run.probe FILE       status 0; else 1, with what is wrong with the file on standard error
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

from jobs.run.file import RunFileError
from jobs.run.reader import RunReader, read_record

SECONDS = 3
"""That reading may take, and one more for every 20 MB; 0.05 s are usual."""
_ROOT = Path(__file__).parents[2]


def check_readable(path: Path) -> None:
    """Read a run file to its end in a child process.

    Raises:
        RunFileError: no run file, a damaged one, or one that HDF5 crashes on or does not finish in time.
    """
    child = subprocess.run(
        [sys.executable, "-m", "jobs.run.probe", str(path.absolute())],
        cwd=_ROOT,
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if child.returncode < 0:
        ending = signal.Signals(-child.returncode).name
        why = "HDF5 does not come to its end" if ending == "SIGALRM" else f"HDF5 crashed on it ({ending})"
        raise RunFileError(f"{path} is not a whole run file: {why}")
    if child.returncode:
        raise RunFileError(child.stderr.strip())


def problem(path: Path) -> str:
    """What is wrong with a run file, in this process: a line that names it, "" for nothing."""
    try:
        with RunReader(path) as reader:
            if not all(isinstance(section, dict) for section in reader.config.values()):
                raise ValueError("its configuration has no sections")
            _ = reader.status
        read_record(path, 0)
    except RunFileError as error:
        return str(error)
    except Exception as error:
        return f"{path} is not a whole run file: {' '.join(str(error).split()) or type(error).__name__}"
    return ""


def main(path: Path) -> NoReturn:
    """Look at a run file; the process ends when the time is up."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.alarm(SECONDS + (path.stat().st_size if path.exists() else 0) // 20_000_000)
    sys.exit(problem(path) or 0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
