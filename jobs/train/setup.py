"""Builds what a run trains with: device, task and reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI

from data import DataError
from jobs.cluster.agreement import Refused, decide_together
from jobs.config.config import Config
from jobs.train.optimizers import build_optimizer
from jobs.train.placement import Placement, find_placement
from jobs.train.reduce.baselines import DdpTraining
from jobs.train.reduce.reduction import ReducingOptimizer, build_reduction
from jobs.train.tasks.images import build_images
from jobs.train.tasks.speech import build_speech
from jobs.train.tasks.task import Workload, WorkloadError
from jobs.train.tasks.text import build_language
from oktopk import broadcast_parameters


def build_workload(config: Config, *, rank: int, size: int) -> Workload[Any]:
    """The workload that a configuration describes, as one rank sees it; the weights are equal on all ranks.

    Raises:
        DataError: data that is missing, broken, or too little for the ranks.
        WorkloadError: settings and data that do not go together.
    """
    builds: dict[str, Build] = {"images": build_images, "speech": build_speech, "text": build_language}
    return builds[config.task](config, rank=rank, size=size)


Build = Callable[..., Workload[Any]]
"""What makes the workload of a rank, as build_workload(config, rank=, size=)."""


@dataclass(frozen=True)
class Setup:
    """Objects that stay the same from the first step to the last.

    Attributes:
        config: the run's.
        comm: the ranks that train together.
        placement: this rank's device.
        workload: this rank's side of the task.
        optimizer: reduces gradients and applies them; it has the workload's parameters.
    """

    config: Config
    comm: MPI.Intracomm
    placement: Placement
    workload: Workload[Any]
    optimizer: ReducingOptimizer


def set_up(config: Config, comm: MPI.Intracomm, build: Build = build_workload) -> Setup:
    """Make what a configuration describes, with equal parameters on all ranks. Collective.

    Raises:
        Refused: on every rank: the data, the device or this MPI do not allow it.
    """
    placement = find_placement(config.training.device, comm, deterministic=config.training.deterministic)
    if config.training.cuda_graph and not placement.on_gpu:
        raise Refused(f"training.cuda_graph needs GPUs, and this run is on {placement.device}")
    workload = _build_workload(config, comm, build, placement)
    broadcast_parameters(workload.model, comm)
    inner = build_optimizer(config.optimizer, workload.model.parameters(), fused=placement.on_gpu)
    optimizer = build_reduction(config, workload.network, inner, placement, comm)
    if isinstance(optimizer, DdpTraining):
        workload.network = optimizer.network  # its forward pass prepares the reduction
    return Setup(config, comm, placement, workload, optimizer)


def _build_workload(config: Config, comm: MPI.Intracomm, build: Build, placement: Placement) -> Workload[Any]:
    def build_here() -> Workload[Any]:
        workload = build(config, rank=comm.rank, size=comm.size)
        workload.move_to(placement)
        if workload.steps_per_epoch < config.training.accumulate:
            raise WorkloadError(
                f"training.accumulate {config.training.accumulate} is more than the "
                f"{workload.steps_per_epoch} batches of an epoch"
            )
        return workload

    return decide_together(comm, build_here, (DataError, WorkloadError, OSError, torch.OutOfMemoryError))
