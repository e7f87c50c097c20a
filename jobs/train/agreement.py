"""Errors that end a training run on all ranks, and the check that they hold the same parameters."""

from __future__ import annotations

import hashlib

import torch
from mpi4py import MPI
from torch import nn


class RanksDiverged(RuntimeError):  # noqa: N818
    """The ranks hold different parameters, which data-parallel training must never do."""


class NonFiniteLossError(ArithmeticError):
    """A loss is NaN or Inf on some rank; raised on every rank alike."""


def check_same_parameters(module: nn.Module, comm: MPI.Intracomm, step: int, *, buffers: bool = True) -> None:
    """Check that parameters and buffers are bit-identical on all ranks.

    Each tensor is copied to the host and hashed there, about 1 s for 1 GB.

    Args:
        module: on any device.
        comm: collective.
        step: for the message.
        buffers: these too, which each rank has its own of until they are averaged.

    Raises:
        RanksDiverged: on every rank, naming which ranks hold what.

    Traffic: one allgather of a digest.
    """
    tensors = module.state_dict().values() if buffers else module.parameters()
    digest = hashlib.blake2b(digest_size=8)
    for tensor in tensors:
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    digests: list[str] = comm.allgather(digest.hexdigest())
    if len(set(digests)) == 1:
        return
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(digests):
        holders.setdefault(value, []).append(rank)
    parts = "; ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())
    raise RanksDiverged(f"parameters differ between ranks after step {step}: {parts}")
