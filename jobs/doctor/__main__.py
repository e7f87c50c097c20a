"""What this host offers, tried and not only asked: one screen, and what to do about what is missing.

    python -m jobs.doctor

Whatever could crash or hang runs in processes of its own. Exit status: 0 where the best works that the hardware allows, 1
where something slower does, 2 where several ranks cannot run.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from jobs.doctor import children
from jobs.doctor.screen import screen
from jobs.doctor.verdict import REQUIRED, verdict
from jobs.launch import LaunchError, end_on_sigterm
from jobs.run import provenance

PACKAGES = (
    *provenance.PACKAGES,
    "matplotlib",
    "pydantic",
    "scikit-learn",
    "tabulate",
    "tqdm",
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "libucx-cu12",
    "libucx-cu13",
)
_VARIABLES = ("OKTOPK_", "CUDA_VISIBLE_DEVICES", "MPICH_GPU_SUPPORT_ENABLED", "MPI4PY_", "SLURM_JOB_ID")


def examine(timeout: float, say: Callable[[str], None]) -> dict[str, Any]:
    """Everything that the screen shows, as plain values for JSON.

    Args:
        timeout: seconds for each thing that is tried.
        say: told what is being tried.
    """
    found: dict[str, Any] = {
        "machine": provenance.machine(),
        "date": provenance.now(),
        "versions": provenance.versions(PACKAGES),
        "environment": children.as_given(provenance.environment())
        | {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        "gpu": {"present": has_driver(), "problem": ""},
        "launcher": {"command": "", "problem": ""},
        "exchanges": {},
    }
    if any(name not in found["versions"] for name in REQUIRED):
        return found  # the probes could not even be imported
    gpu = found["gpu"]
    if gpu["present"]:
        say("GPUs, and kernels for them")
        gpu |= ask_nvidia_smi() | children.one("gpus", timeout)
    try:
        launcher = found["launcher"]["command"] = children.find_launcher()
    except LaunchError as error:
        found["launcher"]["problem"] = str(error)
        return found
    tries: dict[str, dict[str, str]] = {"host": {}}
    if gpu["present"] and not gpu["problem"]:
        tries |= {"device": {}, "staged": {"OKTOPK_CUDA_AWARE_MPI": "0"}, "peer": {}}
    for what, extra in tries.items():
        say(f"{what} memory between two processes")
        found["exchanges"][what] = children.two(launcher, what, timeout, extra)
    return found


def has_driver() -> bool:
    """Whether this host has an NVIDIA driver, hence a GPU."""
    return Path("/dev/nvidiactl").exists()


def ask_nvidia_smi() -> dict[str, Any]:
    """The GPUs, the driver and the links as nvidia-smi tells them; without it, nothing."""
    if shutil.which("nvidia-smi") is None:
        return {}
    fields = "name,memory.total,compute_cap,driver_version"
    rows = list(
        csv.reader(
            _output("nvidia-smi", f"--query-gpu={fields}", "--format=csv,noheader,nounits").splitlines()
        )
    )
    rows = [[cell.strip() for cell in row] for row in rows if len(row) == 4]
    found: dict[str, Any] = {}
    if rows:
        found["driver_name"] = rows[0][3]
        found["devices"] = [
            {
                "name": name,
                "bytes": int(float(mebibytes) * 2**20) if _number(mebibytes) else 0,
                "capability": capability,
            }
            for name, mebibytes, capability, _ in rows
        ]
    if links := read_topology(_output("nvidia-smi", "topo", "-m")):
        found["links"] = links
    return found


def read_topology(text: str) -> list[list[str]]:
    """The rows and columns of GPUs in the answer of `nvidia-smi topo -m`: X, NV18, PIX, SYS, ..."""
    lines = [re.sub(r"\x1b\[[0-9;]*m", "", line).split() for line in text.splitlines()]
    header = next((words for words in lines if words[:1] == ["GPU0"]), [])
    count = sum(bool(re.fullmatch(r"GPU\d+", word)) for word in header)
    rows = [
        words[1 : count + 1]
        for words in lines
        if words and re.fullmatch(r"GPU\d+", words[0]) and "X" in words
    ]
    return rows if len(rows) == count and all(len(row) == count for row in rows) else []


def _number(text: str) -> bool:
    return bool(re.fullmatch(r"[\d.]+", text))


def _output(*command: str) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return answer.stdout if answer.returncode == 0 else ""


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m jobs.doctor",
        description="Try what this host offers to several ranks, and advise on what is missing.",
        epilog="example:\n  python -m jobs.doctor --json doctor.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="File to write the findings to; default: none"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120,
        metavar="SECONDS",
        help="Seconds after which a try is ended; default: %(default)s",
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Returns the exit status."""
    options = parse(argv)
    end_on_sigterm()

    def say(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[Ktrying {text} ...", end="", file=sys.stderr, flush=True)

    try:
        found = examine(options.timeout, say)
    except KeyboardInterrupt:
        return 130
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    judged = verdict(found)
    print(screen(found, judged))
    if options.json is not None:
        answer = found | {"path": judged.path, "status": judged.status, "advice": judged.advice}
        try:
            options.json.write_text(json.dumps(answer, indent=2) + "\n", encoding="utf-8")
        except OSError as error:
            print(f"jobs.doctor: {error}", file=sys.stderr)
            return 2
    return judged.status


if __name__ == "__main__":
    sys.exit(main())
