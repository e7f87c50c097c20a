"""Names of the baseline reductions (nccl, ddp, ...). No imports, so reports need no MPI."""

from __future__ import annotations

TRAINING_MODES = ("nccl", "ddp")
"""Ways to sum all gradients that take part in the backward pass or are another library's; see jobs.train.reduce."""

DENSE_OVLP = "dense-ovlp"
"""What tables call `dense` with `overlap`."""

OVERLAPPED_MODES = (DENSE_OVLP, "ddp")
"""Rows of tables that reduce behind the backward pass."""


def row_of(method: str, overlap: bool, sends: str = "gradients") -> str:
    """What tables call a run of a method."""
    if sends != "gradients":
        return f"{method}-{sends}"
    return DENSE_OVLP if overlap and method == "dense" else method
