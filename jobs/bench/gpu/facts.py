"""What a measurement on GPUs depends on besides the machine: the GPU, its driver, the CUDA and NCCL of CuPy and torch."""

from __future__ import annotations

import importlib.metadata
import os
import re
import sys
from pathlib import Path
from typing import Any

import cupy

_TUNING = ("CUDA_", "OKTOPK_", "CUPY_", "TORCH_NCCL_")


def gpu_facts() -> dict[str, Any]:
    """Plain values about the current GPU, which stands for all of its host; None where something does not tell."""
    runtime = cupy.cuda.runtime
    current = cupy.cuda.Device()
    properties = runtime.getDeviceProperties(current.id)
    count = runtime.getDeviceCount()
    peers = [number for number in range(count) if number != current.id]
    return {
        "name": properties["name"].decode(),
        "count": count,
        "memory_bytes": int(properties["totalGlobalMem"]),
        "multiprocessors": int(properties["multiProcessorCount"]),
        "compute_capability": current.compute_capability,
        "peers": sum(bool(runtime.deviceCanAccessPeer(current.id, peer)) for peer in peers),
        "driver": _driver(),
        "driver_cuda": runtime.driverGetVersion(),
        "runtime_cuda": runtime.runtimeGetVersion(),
        "cupy": cupy.__version__,
        "ucx": next((found for name in ("libucx-cu13", "libucx-cu12") if (found := _version(name))), None),
        **_torch_facts(),
        "environment": {
            name: value for name, value in sorted(os.environ.items()) if name.startswith(_TUNING)
        },
    }


def _driver() -> str | None:
    try:
        text = Path("/proc/driver/nvidia/version").read_text()
    except OSError:
        return None
    found = re.search(r"\b(\d{3,}\.\d+(?:\.\d+)?)\b", text)
    return found[1] if found else None


def _torch_facts() -> dict[str, Any]:
    torch = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available():
        return {"torch_cuda": None, "nccl": None}
    return {"torch_cuda": torch.version.cuda, "nccl": ".".join(map(str, torch.cuda.nccl.version()))}


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
