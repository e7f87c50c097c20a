"""Equal parameters at the start, and equal batch-norm statistics, on the ranks of a data-parallel run."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import closing
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from collectives.connect import Communicator, connect
from collectives.dense_allreduce import DenseAllreduce
from collectives.limit import Limit
from collectives.transport import Transport
from oktopk.settings import Settings
from oktopk.torch.shards import local_tensor

if TYPE_CHECKING:
    from oktopk.torch.dense import DenseAllreduce as PeerAllreduce


def broadcast_parameters(
    module: nn.Module, comm: Communicator | None = None, root: int = 0, timeout: float = Settings.timeout
) -> None:
    """Copy the parameters and buffers of rank `root` to all ranks, in place. Collective.

    Those on a GPU pass through host memory: it is done once.

    Args:
        module: with the same parameters and buffers on all ranks.
        comm: as `GradientAllreduce` takes it. Of sharded parameters the ranks that hold this rank's shards.
        root: whose values are taken.
        timeout: seconds that a rank may come late.

    Raises:
        MissingRanksError: ranks did not come in time; on the others, and on a missing rank when it comes.

    Traffic: a barrier, and one broadcast of each.
    """
    with closing(connect(comm, Limit("broadcast_parameters(...)", timeout))) as transport:
        broadcast_tensors((*module.parameters(), *module.buffers()), transport, root)


def broadcast_tensors(tensors: Iterable[Tensor], transport: Transport, root: int = 0) -> None:
    """As `broadcast_parameters`, for tensors; of a DTensor this rank's shard."""
    for tensor in map(local_tensor, tensors):
        host = tensor.cpu().contiguous()
        transport.broadcast(host.reshape(-1).view(torch.uint8).numpy(), root)
        tensor.copy_(host)


def average_buffers(
    module: nn.Module,
    comm: Communicator | None = None,
    timeout: float = Settings.timeout,
    allreduce: PeerAllreduce | None = None,
) -> None:
    """Average the floating-point buffers (batch-norm statistics) over the ranks, in place. Collective.

    Each rank's batch norm sees its own batches only, so that these statistics differ between ranks: average them before an
    evaluation and before a model is saved.

    Bit-identical on all ranks. Those on a GPU pass through host memory, unless `allreduce` is given: they are few.

    Args:
        module: with the same buffers on all ranks.
        comm, timeout: as `broadcast_parameters`.
        allreduce: sums through peer memory, with the same bits, in place of `comm`; all buffers are on its GPU. Make it once:
            making it takes longer than averaging through host memory.

    Raises:
        MissingRanksError: as `broadcast_parameters`.
        RuntimeError: as `oktopk.torch.DenseAllreduce.check`.

    Traffic: a barrier, and one dense allreduce of all such buffers together.
    """
    buffers = [b.detach() for b in module.buffers() if b.is_floating_point()]
    if not buffers:
        return
    flat = torch.cat([b.reshape(-1).to(torch.float32) for b in buffers])
    if allreduce is not None:
        allreduce(flat, scale=1.0 / allreduce.size)
        allreduce.check()  # before the buffers are written
    else:
        flat = flat.cpu()
        with closing(connect(comm, Limit("average_buffers(...)", timeout))) as transport:
            messages = DenseAllreduce(flat.numpy(), transport)
            messages.run(scale=1.0 / transport.size)
            messages.free()
    for buffer, average in zip(buffers, flat.split([b.numel() for b in buffers]), strict=True):
        buffer.copy_(average.view_as(buffer))
