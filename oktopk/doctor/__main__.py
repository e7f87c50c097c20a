"""What this host offers, tried and not only asked: one screen, and what to do about what is missing.

    oktopk-doctor
    oktopk-run -n 4 -m oktopk.doctor --hosts

Whatever could crash or hang runs in processes of its own. Exit status: 0 where the best works that the hardware allows, 1
where something slower does, 2 where several ranks cannot run.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from oktopk.doctor import children, machine
from oktopk.doctor.screen import screen
from oktopk.doctor.verdict import CANNOT, LIBRARY, REQUIRED, Optional, verdict
from oktopk.launch import LaunchError, end_on_sigterm, refuses_root

PACKAGES = (*machine.PACKAGES, "cupy", "cupy-cuda12x", "cupy-cuda13x", "libucx-cu12", "libucx-cu13")
_VARIABLES = ("OKTOPK_", "CUDA_VISIBLE_DEVICES", "MPICH_GPU_SUPPORT_ENABLED", "MPI4PY_", "SLURM_JOB_ID")


def examine(timeout: float, say: Callable[[str], None], packages: Sequence[str] = ()) -> dict[str, Any]:
    """Everything that the screen shows, as plain values for JSON.

    Args:
        timeout: seconds for each thing that is tried.
        say: told what is being tried.
        packages: distributions to look for besides PACKAGES.
    """
    gpu: dict[str, Any] = {"present": machine.has_driver(), "problem": ""}
    mpi: dict[str, Any] = {"command": "", "problem": "", "refuses_root": False}
    tried: dict[str, dict[str, Any]] = {}
    findings: dict[str, Any] = {
        "machine": machine.machine(),
        "date": machine.now(),
        "versions": machine.versions([*PACKAGES, *packages]),
        "environment": children.as_given(machine.environment())
        | {name: value for name, value in sorted(os.environ.items()) if name.startswith(_VARIABLES)},
        "gpu": gpu,
        "mpi": mpi,
        "tried": tried,
        "kernels": {},
    }
    if any(name not in findings["versions"] for name in REQUIRED):
        return findings  # the probes could not even be imported
    say("kernels for CPUs, which are compiled once")
    findings["kernels"] = children.attempt(children.alone(), "cpu", timeout, ranks=1)
    if gpu["present"]:
        say("GPUs, and kernels for them")
        gpu |= children.attempt(children.alone(), "gpus", timeout, ranks=1)
    starters: dict[str, children.Starter] = {}
    say("the MPI library")
    try:
        command, environment = children.mpi_starter()
        mpi |= {"command": command[0], "refuses_root": refuses_root(command[0])}
        mpi |= children.attempt(children.alone(), "mpi", timeout, ranks=1)
    except LaunchError as error:
        mpi["problem"] = str(error)
    if not mpi["problem"]:
        starters["mpi"] = command, environment
    if "torch" in findings["versions"]:
        starters["torch"] = children.torch_starter()
    usable = gpu["present"] and not gpu["problem"]
    for name, each in children.TRIES.items():
        which = each.starter or next(iter(starters), "")
        if which in starters and (usable or each.probe == "host"):
            say(f"{each.title} between two processes")
            command, environment = starters[which]
            if each.aware:
                environment = environment | {"OKTOPK_CUDA_AWARE_MPI": each.aware}
            tried[name] = children.attempt((command, environment), each.probe, timeout)
            if tried[name]["problem"] and each.probe == "host":
                del starters[which]  # nothing else would work
    return findings


def parse(argv: Sequence[str] | None, prog: str) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Try what this host offers to several ranks: two processes sum a gradient, by MPI\n"
        "and by torch's process group, in host memory and, where there are GPUs, in device memory,\n"
        "staged through the host, and by peer memory. Prints one screen: versions, GPUs, what works\n"
        "and how fast, the path that oktopk takes, and what to do about what is missing.\n"
        "With --hosts, on all ranks of a job: measures the links between them, and says whether\n"
        "sparse steps pay there, as oktopk-plan predicts.",
        epilog="exit status: 0 where the best works that the hardware allows, 1 where something slower does,\n"
        "2 where several ranks cannot run; with --hosts 0, or 2 where nothing can be said\n\n"
        "examples:\n"
        f"  {prog} --json doctor.json\n"
        f"  mpiexec -n 16 --host a:8,b:8 {prog} --hosts --parameters 98e6 --compute-ms 90",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    text = "File to write the findings to, as JSON, or with --hosts the links; default: none"
    parser.add_argument("--json", type=Path, metavar="FILE", help=text)
    text = "Seconds after which a try is ended; default: %(default)s"
    parser.add_argument("--timeout", type=float, default=120, metavar="SECONDS", help=text)
    text = "Measure the links between the ranks and hosts of a job; start it by a launcher."
    parser.add_argument("--hosts", action="store_true", help=text)
    text = "Parameters of the model, for --hosts; default: %(default)s."
    parser.add_argument("--parameters", default="98e6", metavar="N", help=text)
    text = "Milliseconds of a step without communication, for --hosts; default: %(default)g."
    parser.add_argument("--compute-ms", type=float, default=90.0, metavar="MS", help=text)
    return parser.parse_args(argv)


def _through_no_link(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


def _hosts(options: argparse.Namespace, prog: str) -> int:
    """`--hosts`, on every rank."""
    try:  # the rest of the doctor runs without what this needs
        from oktopk.doctor.hosts import hosts
    except ImportError as error:
        print(f"{prog}: {error}", file=sys.stderr)
        return CANNOT
    return hosts(options.parameters, options.compute_ms, options.json, prog)


def main(
    argv: Sequence[str] | None = None, *, prog: str = "oktopk-doctor", optional: Optional = LIBRARY
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
    if options.hosts:
        return _hosts(options, prog)
    end_on_sigterm()

    def say(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[Ktrying {text} ...", end="", file=sys.stderr, flush=True)

    try:
        findings = examine(options.timeout, say, optional.packages)
    except KeyboardInterrupt:
        return 130
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr, flush=True)
    findings |= verdict(findings, optional)
    print(screen(findings))
    if options.json is not None:
        try:
            with open(options.json, "w", encoding="utf-8", opener=_through_no_link) as file:
                file.write(json.dumps(findings, indent=2) + "\n")
        except OSError as error:
            print(f"{prog}: {error}", file=sys.stderr)
            return 2
    return int(findings["status"])


if __name__ == "__main__":
    sys.exit(main())
