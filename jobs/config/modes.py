"""Names of the baseline reductions (nccl, ddp, ...). No imports, so reports need no MPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAINING_MODES = ("nccl", "ddp", "powersgd", "sparseloco")
"""Ways to sum all gradients, powersgd in low rank, that take part in the backward pass or are another library's, and sparseloco;
see jobs.train.reduce."""

DENSE_OVLP = "dense-ovlp"
"""What tables call `nccl` and `dense` with `overlap`; run files of earlier versions name it as their method."""

OVERLAPPED_MODES = (DENSE_OVLP, "ddp", "powersgd")
"""Rows of tables that reduce behind the backward pass."""

DDP_MODES = ("ddp", "powersgd")
"""Those that torch's DistributedDataParallel reduces, in buckets."""


def row_of(method: str, overlap: bool, sends: str = "gradients") -> str:
    """What tables call a run of a method."""
    if sends != "gradients":
        return f"{method}-{sends}"
    return DENSE_OVLP if overlap and method in ("dense", "nccl") else method


def is_replayed(config: Mapping[str, Any], method: str) -> bool:
    """Whether a run with this configuration, and this method, replays its steps as CUDA graphs.

    Graphs of DDP's steps are younger than run files of them, and as old as the key run.timeline_after, which those lack.
    """
    if method in DDP_MODES and "timeline_after" not in config.get("run", {}):
        return False
    return bool(config.get("training", {}).get("cuda_graph"))
