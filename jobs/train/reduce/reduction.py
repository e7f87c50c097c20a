"""How a run's gradients are reduced: by a method of oktopk, or by a mode of training."""

from __future__ import annotations

import dataclasses

import torch
from mpi4py import MPI
from torch import nn

from collectives.launchers import LauncherError
from jobs.cluster.agreement import Refused
from jobs.config.config import Config
from jobs.train.placement import Placement
from jobs.train.reduce.baselines import DdpTraining, DenseTraining, NcclTraining
from jobs.train.reduce.process_group import WireError, start_process_group
from oktopk import METHODS, DistributedOptimizer, StepReport
from oktopk.settings import DEFAULT_BUCKET_MB
from oktopk.torch.updates.optimizer import UpdatesOptimizer

ReducingOptimizer = DistributedOptimizer | DenseTraining
"""What the loop trains with: its first half of a step reduces, its second applies."""


def reduce(optimizer: ReducingOptimizer, step: int, *, measure: bool = False) -> StepReport:
    """The first half of a step of the run, counted from 0; of updates all of it. Collective.

    A step of updates without an exchange is reported as one that sends nothing, see STEP_COLUMNS.
    """
    if not isinstance(optimizer, UpdatesOptimizer):
        return optimizer.reduce(measure=measure)
    before = optimizer.report
    optimizer.step(measure=measure)
    report, length = optimizer.report, optimizer.length
    if report is None or report is before:
        return StepReport(step, "dense", length, length, {}, True, local_nnz=length, global_nnz=length)
    return dataclasses.replace(report, step=step)  # it counts exchanges


def apply(optimizer: ReducingOptimizer) -> None:
    """The second half of a step."""
    if not isinstance(optimizer, UpdatesOptimizer):
        optimizer.apply()


def build_reduction(
    config: Config,
    network: nn.Module,
    inner: torch.optim.Optimizer,
    placement: Placement,
    comm: MPI.Intracomm,
) -> ReducingOptimizer:
    """The optimizer that reduces as `config.reduction` says. Collective.

    Args:
        config: a run's.
        network: what losses are computed with. For "ddp" DistributedDataParallel is wrapped around it: see DdpTraining.network.
        inner: the torch optimizer that owns its parameters.
        placement: this rank's device.
        comm: the ranks that train together.

    Raises:
        Refused: the device, this MPI or this torch cannot do it; on every rank alike.
    """
    settings, clip_norm = config.reduction, config.optimizer.clip_norm
    method, kind = settings.method, settings.gradient_type
    try:
        if method in METHODS:
            optimizer = DistributedOptimizer(
                inner,
                comm,
                method,
                gradient_type=kind,
                clip_norm=clip_norm,
                sends=settings.sends,
                every=settings.every,
                order=network.parameters() if settings.overlap else None,
                **settings.buckets(),
                **settings.settings(),
            )
            optimizer.reducer.time_stages = config.run.time_stages
            return optimizer
        if method == "nccl" and not placement.on_gpu:
            here = f"and this run is on {placement.device}: its like there is 'dense'"
            raise WireError(f"reduction.method 'nccl' needs GPUs, {here}")
        if method == "ddp" and kind not in ("", "float32", "bfloat16"):
            raise WireError(f"reduction.gradient_type {kind!r} is not for 'ddp': float32 or bfloat16")
        start_process_group(comm, placement.device)
        dtype, bucket_mb = getattr(torch, kind or "float32"), settings.bucket_mb or DEFAULT_BUCKET_MB
        if method == "nccl":
            return NcclTraining(inner, clip_norm, dtype)
        how = {"bucket_mb": bucket_mb, "dtype": dtype, "captured": config.training.cuda_graph}
        return DdpTraining(inner, clip_norm, network, **how)
    except (ValueError, WireError, LauncherError) as error:  # the same on every rank
        raise Refused(str(error)) from error
