"""How a run's gradients are reduced: by a method of oktopk, or by a mode of training."""

from __future__ import annotations

import math
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import nn

from collectives.launchers import LauncherError
from jobs.cluster.agreement import Refused
from jobs.config.config import Config
from jobs.train.passes import Overlapped
from jobs.train.placement import Placement
from jobs.train.reduce.background import WireError, allow_p2p, start_process_group
from jobs.train.reduce.baselines import DdpTraining, NcclTraining
from jobs.train.reduce.powersgd import PowerSgdTraining
from oktopk import METHODS, DistributedOptimizer, StepReport

_TRIAL_LENGTH = 4096
_TRIAL_STEPS = 3  # one with exact thresholds, then some that reuse them


class ReducingOptimizer(Protocol):
    """What the loop needs of an optimizer that reduces; see oktopk.DistributedOptimizer."""

    length: int

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the torch optimizer within."""
        ...

    @property
    def hosts(self) -> list[int] | None:
        """int[P], the number of each rank's host, in two levels; None in flat steps."""
        ...

    @property
    def gradient(self) -> NDArray[np.float32]:
        """This rank's flat gradient, on the host."""
        ...

    def zero_grad(self) -> None:
        """Forget all gradients."""
        ...

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it backward passes add up locally."""
        ...

    def reduce(self, *, measure: bool = False) -> StepReport:
        """The first half of a step. Collective."""
        ...

    def apply(self) -> None:
        """The second half of a step."""
        ...

    def complete(self) -> None:
        """Complete the reports of all steps."""
        ...

    def state_dict(self) -> dict[str, Any]:
        """What a restart of this rank needs."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from a state_dict. Collective."""
        ...

    def close(self) -> None:
        """Free what was set up. Collective."""
        ...


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
        network: what losses are computed with. For "ddp" and "powersgd" DistributedDataParallel is wrapped around it: see
            DdpTraining.network.
        inner: the torch optimizer that owns its parameters.
        placement: this rank's device.
        comm: the ranks that train together.

    Raises:
        Refused: the device, this MPI or this torch cannot do it; on every rank alike.
    """
    settings = config.reduction
    try:
        if settings.method in METHODS:
            optimizer = DistributedOptimizer(
                inner,
                comm,
                settings.method,
                gradient_type=settings.gradient_type,
                clip_norm=config.optimizer.clip_norm,
                row_density=settings.row_density,
                **settings.buckets(),
                **settings.settings(),
            )
            optimizer.reducer.time_stages = config.run.time_stages
            return optimizer
        return _BUILDERS[settings.method](config, network, inner, placement, comm)
    except (ValueError, WireError, LauncherError) as error:  # the same on every rank
        raise Refused(str(error)) from error


def compile_kernels(config: Config, placement: Placement, comm: MPI.Intracomm) -> None:
    """Take a few steps of the run's method on a parameter that is thrown away, so that its kernels are compiled. Collective.

    Compiling takes seconds, and would be booked as the reduction of the first step. CPU ranks and methods of oktopk only: the
    kernels of GPUs are compiled while the reduction is set up, and the other modes have none.

    Raises:
        Refused: as build_reduction.
    """
    if placement.device.type != "cpu" or config.reduction.method not in METHODS:
        return
    network = nn.Module()
    weight = nn.Parameter(torch.zeros(_TRIAL_LENGTH))
    network.register_parameter("weight", weight)
    settings = config.reduction.model_copy(update={"dense_warmup_steps": 0, "density_warmup_steps": 0})
    trial = config.model_copy(update={"reduction": settings})
    optimizer = build_reduction(trial, network, torch.optim.SGD([weight], lr=0.0), placement, comm)
    try:
        # values that differ between ranks and steps, without a draw from the generators of the run
        phases = torch.arange(1, _TRIAL_LENGTH + 1) * (comm.rank + 1)
        for step in range(_TRIAL_STEPS):
            weight.grad = torch.sin(phases * (step + 1.0))
            optimizer.reduce(measure=bool(config.run.measure_every) and step == _TRIAL_STEPS - 1)
            optimizer.apply()
        optimizer.complete()
    finally:
        optimizer.close()


def overlapped(optimizer: ReducingOptimizer) -> Overlapped | None:
    """What a backward pass that is replayed tells of its buckets; None where it begins no reduction."""
    found: Overlapped | None = getattr(optimizer, "overlapped", None)
    return found


def _nccl(
    config: Config,
    network: nn.Module,
    inner: torch.optim.Optimizer,
    placement: Placement,
    comm: MPI.Intracomm,
) -> ReducingOptimizer:
    settings = config.reduction
    if placement.process_group != "nccl":
        raise WireError(
            f"reduction.method 'nccl' needs GPUs, and this run is on {placement.device}: its like there is 'dense'"
        )
    _start_process_group(config, placement, comm)
    return NcclTraining(
        inner,
        config.optimizer.clip_norm,
        getattr(torch, settings.gradient_type or "float32"),
        bucket_mb=settings.bucket_mb if settings.overlap else math.inf,
        overlapped=settings.overlap,
    )


def _ddp(
    config: Config,
    network: nn.Module,
    inner: torch.optim.Optimizer,
    placement: Placement,
    comm: MPI.Intracomm,
) -> ReducingOptimizer:
    gradient_type = config.reduction.gradient_type
    if gradient_type not in ("", "float32", "bfloat16"):
        raise WireError(f"reduction.gradient_type {gradient_type!r} is not for 'ddp': float32 or bfloat16")
    _start_process_group(config, placement, comm)
    return DdpTraining(
        inner,
        config.optimizer.clip_norm,
        network,
        comm.size,
        bucket_mb=config.reduction.bucket_mb,
        compressed=gradient_type == "bfloat16",
    )


def _powersgd(
    config: Config,
    network: nn.Module,
    inner: torch.optim.Optimizer,
    placement: Placement,
    comm: MPI.Intracomm,
) -> ReducingOptimizer:
    gradient_type = config.reduction.gradient_type
    if gradient_type not in ("", "float32"):
        raise WireError(f"reduction.gradient_type {gradient_type!r} is not for 'powersgd': float32")
    _start_process_group(config, placement, comm)
    return PowerSgdTraining(
        inner,
        config.optimizer.clip_norm,
        network,
        comm.size,
        bucket_mb=config.reduction.bucket_mb,
        rank=config.reduction.powersgd_rank,
        start=config.reduction.powersgd_start,
    )


_BUILDERS = {"nccl": _nccl, "ddp": _ddp, "powersgd": _powersgd}


def _start_process_group(config: Config, placement: Placement, comm: MPI.Intracomm) -> None:
    if placement.process_group == "nccl":
        allow_p2p(config.reduction.nccl_p2p)
    start_process_group(comm, placement.device, placement.process_group, placement.unit)
