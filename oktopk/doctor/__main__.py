"""What this host offers, tried and not only asked: one screen, and what to do about what is missing.

    oktopk-doctor

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

from oktopk.doctor import children, machine
from oktopk.doctor.screen import screen
from oktopk.doctor.verdict import LIBRARY, REQUIRED, Optional, verdict
from oktopk.launch import LaunchError, end_on_sigterm, refuses_root

PACKAGES = (
    *machine.PACKAGES,
    "cupy",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "libucx-cu12",
    "libucx-cu13",
)
_VARIABLES = ("OKTOPK_", "CUDA_VISIBLE_DEVICES", "MPICH_GPU_SUPPORT_ENABLED", "MPI4PY_", "SLURM_JOB_ID")


def examine(timeout: float, say: Callable[[str], None], packages: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that the screen shows, as plain values for JSON.

    Args:
        packages: distributions to look for besides PACKAGES.
        timeout: seconds for each thing that is tried.
        say: told what is being tried.
    """
    findings: dict[str, Any] = {
        "machine": machine.machine(),
        "date": machine.now(),
        "versions": machine.versions([*PACKAGES, *packages]),
        "environment": children.as_given(machine.environment())
        | {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        "gpu": {"present": has_driver(), "problem": ""},
        "launcher": {"command": "", "problem": ""},
        "exchanges": {},
        "kernels": {},
    }
    if any(name not in findings["versions"] for name in REQUIRED):
        return findings  # the probes could not even be imported
    say("kernels for CPUs, which are compiled once")
    findings["kernels"] = children.one("cpu", timeout)
    gpu = findings["gpu"]
    if gpu["present"]:
        say("GPUs, and kernels for them")
        gpu |= ask_nvidia_smi() | children.one("gpus", timeout)
    try:
        launcher = findings["launcher"]["command"] = children.find_launcher()
        findings["launcher"]["refuses_root"] = refuses_root(launcher)
    except LaunchError as error:
        findings["launcher"]["problem"] = str(error)
        return findings
    say("the MPI library")
    if problem := children.one("mpi", timeout)["problem"]:
        findings["launcher"]["problem"] = problem
        return findings
    tries: dict[str, dict[str, str]] = {"host": {}}
    if gpu["present"] and not gpu["problem"]:
        tries |= {"device": {}, "staged": {"OKTOPK_CUDA_AWARE_MPI": "0"}, "peer": {}}
    for what, extra in tries.items():
        say(f"{what} memory between two processes")
        findings["exchanges"][what] = children.two(launcher, what, timeout, extra)
    return findings


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
    gpus: dict[str, Any] = {}
    if rows:
        gpus["driver_name"] = rows[0][3]
        gpus["devices"] = [
            {
                "name": name,
                "bytes": int(float(mebibytes) * 2**20) if _number(mebibytes) else 0,
                "capability": capability,
            }
            for name, mebibytes, capability, _ in rows
        ]
    if links := read_topology(_output("nvidia-smi", "topo", "-m")):
        gpus["links"] = links
    return gpus


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


def parse(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Try what this host offers to several ranks: MPI between two processes in host memory and, where there are\n"
        "GPUs, in device memory, staged through the host, and by peer memory. Prints one screen: versions, GPUs, what works\n"
        "and how fast, the path that oktopk takes, and what to do about what is missing.",
        epilog="exit status: 0 where the best works that the hardware allows, 1 where something slower does,\n"
        "2 where several ranks cannot run\n\nexample:\n"
        f"  {prog} --json doctor.json",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="File to write the findings to, as JSON; default: none"
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=120,
        metavar="SECONDS",
        help="Seconds after which a try is ended; default: %(default)s",
    )
    return parser.parse_args(argv)


def _through_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def main(
    argv: Sequence[str] | None = None, *, prog: str = "oktopk-doctor", optional: Sequence[Optional] = LIBRARY
) -> int:
    """The command `oktopk-doctor`.

    Args:
        argv: default the process's own.
        prog: the command's name, for messages.
        optional: packages that some of the user's programs need; the advice names those that are missing.

    Returns:
        The exit status.
    """
    options = parse(argv, prog)
    end_on_sigterm()

    def say(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[Ktrying {text} ...", end="", file=sys.stderr, flush=True)

    try:
        findings = examine(options.timeout, say, [name for each in optional for name in each.packages])
    except KeyboardInterrupt:
        return 130
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    judged = verdict(findings, optional)
    print(screen(findings, judged))
    if options.json is not None:
        answer = findings | {"path": judged.path, "status": judged.status, "advice": judged.advice}
        try:
            with open(options.json, "w", encoding="utf-8", opener=_through_no_link) as file:
                file.write(json.dumps(answer, indent=2) + "\n")
        except OSError as error:
            print(f"{prog}: {error}", file=sys.stderr)
            return 2
    return judged.status


if __name__ == "__main__":
    sys.exit(main())
