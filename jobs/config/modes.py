"""Names of the baseline reductions (nccl, ddp, ...). No imports, so reports need no MPI."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

TRAINING_MODES = ("dense-ovlp", "nccl", "ddp", "powersgd")
"""Ways to sum all gradients, powersgd in low rank, that take part in the backward pass or are another library's;
see jobs.train.reduce."""

OVERLAPPED_MODES = ("dense-ovlp", "ddp", "powersgd")
"""Those of them that reduce behind the backward pass."""

EAGER_MODES = ("ddp", "powersgd")
"""Those of them whose steps no CUDA graph replays."""


def is_replayed(training: Mapping[str, Any], method: str) -> bool:
    """Whether a run with this section of its configuration, and this method, replays its steps as CUDA graphs."""
    return bool(training.get("cuda_graph")) and method not in EAGER_MODES
