"""What all ranks must decide alike: whether to go on, and whether they still hold the same parameters."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TypeVar

import torch
from mpi4py import MPI
from torch import nn

Result = TypeVar("Result")


class Refused(Exception):  # noqa: N818 - a decision of all ranks together, not one rank's error
    """What was asked for cannot be done; raised on every rank together, the message meant for the user."""


class RanksDiverged(RuntimeError):  # noqa: N818
    """The ranks hold different parameters, which data-parallel training must never do."""


class NonFiniteLossError(ArithmeticError):
    """A loss is NaN or Inf on some rank; raised on every rank alike."""


def decide_on_root(
    comm: MPI.Intracomm,
    action: Callable[[], Result],
    faults: tuple[type[Exception], ...],
    raises: type[Exception] = Refused,
) -> Result:
    """Run the action on rank 0 alone and give its result to every rank.

    Args:
        comm: collective.
        action: returns something that pickles.
        faults: what counts as the user's fault; any other exception ends the job as usual.
        raises: on every rank, with the fault's message.

    Raises:
        Refused, or what `raises` says instead.

    Traffic: one broadcast.
    """
    results: list[Result] = []
    message: str | None = None
    if comm.rank == 0:
        try:
            results.append(action())
        except faults as fault:
            message = str(fault)
    message, results = comm.bcast((message, results))
    if message is not None:
        raise raises(message)
    return results[0]


def decide_together(
    comm: MPI.Intracomm, action: Callable[[], Result], faults: tuple[type[Exception], ...]
) -> Result:
    """Run the action on every rank; when it fails on any, all of them give up with the same message.

    The action must not communicate: a rank whose action failed would be missing.

    Returns:
        This rank's own result.

    Raises:
        Refused: on every rank, naming the ranks unless the fault is the same on all.

    Traffic: one allgather.
    """
    results: list[Result] = []
    message: str | None = None
    try:
        results.append(action())
    except faults as fault:
        message = str(fault)
    messages = comm.allgather(message)
    distinct = {text for text in messages if text is not None}
    if not distinct:
        return results[0]
    if len(distinct) == 1 and None not in messages:
        raise Refused(distinct.pop())
    raise Refused("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(messages) if text is not None))


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
