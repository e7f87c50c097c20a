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

    Each tensor is summed up where it lies, and 8 bytes of it are fetched.

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
    sums = torch.stack([_checksum(tensor.detach()) for tensor in tensors])
    digest = hashlib.blake2b(sums.cpu().numpy().tobytes(), digest_size=8).hexdigest()
    digests: list[str] = comm.allgather(digest)
    if len(set(digests)) == 1:
        return
    holders: dict[str, list[int]] = {}
    for rank, value in enumerate(digests):
        holders.setdefault(value, []).append(rank)
    parts = "; ".join(f"{value} on ranks {ranks}" for value, ranks in holders.items())
    raise RanksDiverged(f"parameters differ between ranks after step {step}: {parts}")


_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SPREAD = 0x1E3779B97F4A7C15  # odd, with no pattern in its bits


def _checksum(tensor: torch.Tensor) -> torch.Tensor:
    """int64: the sum of all elements' bits, each times an odd number that belongs to its place, modulo 2^64.

    One element that differs always shows; several hide each other once in 2^64.
    """
    bits = tensor.contiguous().reshape(-1).view(_BITS[tensor.element_size()])
    factors = torch.arange(1, len(bits) + 1, device=tensor.device).mul_(_SPREAD)
    factors.bitwise_xor_(factors >> 29).mul_(_SPREAD).bitwise_or_(1)
    return factors.mul_(bits).sum()
