"""What the programs have in common. Import it before a framework: under mpiexec that must not see the launcher's variables."""

from __future__ import annotations

import hashlib
import os
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import oktopk
from oktopk import DistributedOptimizer

UNDER_MPI = "RANK" not in os.environ
if UNDER_MPI:
    from mpi4py import MPI

    oktopk.METHODS  # noqa: B018 - before the variables are gone, by which the library sees processes without MPI
    for name in ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "MV2_COMM_WORLD_SIZE"):
        if MPI.COMM_WORLD.size > 1:
            os.environ.pop(name, None)
RANK, RANKS = (
    (MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size)
    if UNDER_MPI
    else (int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]))
)


def own_folder(folder: str) -> str:
    """A folder of this rank's where the framework sees it alone."""
    return os.path.join(folder, str(RANK)) if UNDER_MPI else folder


def everyone(value: Any) -> list[Any]:
    """The values of all ranks."""
    if UNDER_MPI:
        return MPI.COMM_WORLD.allgather(value)
    values: list[Any] = [None] * RANKS
    dist.all_gather_object(values, value)
    return values


def alike(value: Any) -> bool:
    """Whether all ranks have the same."""
    return len(set(everyone(value))) == 1


def digest(tensors: Any) -> str:
    """Of the bits of some tensors."""
    data = b"".join(tensor.detach().numpy().tobytes() for tensor in tensors)
    return hashlib.sha256(data).hexdigest()


def network() -> nn.Module:
    """The same on all ranks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 1))


def optimizer_of(model: nn.Module, kind: str) -> torch.optim.Optimizer:
    """Of updates around AdamW, of gradients around SGD, or plain AdamW."""
    if kind == "gradients":
        return DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9), density=0.05)
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return DistributedOptimizer(inner, density=0.05) if kind == "updates" else inner


def rows() -> torch.Tensor:
    """512 inputs, whose sums are to be learned."""
    return torch.randn(512, 16, generator=torch.Generator().manual_seed(1))


def say(what: str, is_so: bool) -> None:
    """Print a finding of this rank."""
    sys.stdout.write(f"rank {RANK}: {what}: {is_so}\n")
    sys.stdout.flush()
