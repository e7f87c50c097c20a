"""torch.distributed among the ranks of an MPI communicator, and its allreduce while the backward pass goes on."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from collectives.traffic import WORD_BYTES, Traffic


class WireError(RuntimeError):
    """A way to communicate that is not to be had here; on every rank alike."""


class TorchWire:
    """Sums vectors over the ranks, in place, by allreduces of torch.distributed, on a GPU on a stream of its own.

    Args:
        dtype: that they travel and are summed in.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._works: list[tuple[Tensor, Tensor, Any]] = []
        self._sent: dict[int, Tensor] = {}  # by address: what goes in place of a vector of another type
        self._ranks = dist.get_world_size()
        averages = dist.get_backend() == dist.Backend.NCCL  # gloo only sums
        self._operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._scale = 1.0 if averages else 1.0 / self._ranks

    @property
    def started(self) -> int:
        """Vectors that were started since `finish`."""
        return len(self._works)

    def reads_tensors(self, number: int) -> bool:
        """Never: a bucket is one vector."""
        return False

    def start(self, gradient: Tensor, ready: Callable[[Any], None] | None = None) -> None:
        """Begin with a vector, once what was asked for before has filled it. Collective, in the same order on all ranks."""
        vector = sent = gradient
        if vector.dtype != self._dtype:
            sent = self._sent.setdefault(vector.data_ptr(), torch.empty_like(vector, dtype=self._dtype))
            sent.copy_(vector)
        self._works.append((vector, sent, dist.all_reduce(sent, self._operation, async_op=True)))

    def finish(self) -> Traffic:
        """All that were started are their means over the ranks now, or before whatever a GPU is asked for next.

        Words and messages are those of a ring.
        """
        words, messages = 0, len(self._works)
        for vector, sent, work in self._works:
            work.wait()
            if sent is not vector:
                vector.copy_(sent)
            if self._scale != 1.0:
                vector.mul_(self._scale)
            words += sent.nbytes // 4
        self._works.clear()
        return ring_traffic(words, self._ranks, messages)

    def abandon(self) -> None:
        """As `finish`."""
        self.finish()


def ring_traffic(words: int, ranks: int, pieces: int) -> Traffic:
    """What a ring would send per rank for so many words in so many pieces: what a library sends is not to be seen."""
    return Traffic(WORD_BYTES * (2 * words * (ranks - 1) // ranks), 2 * pieces * (ranks - 1))


_p2p_allowed: list[bool] = []


def allow_p2p(allowed: bool) -> None:
    """Before NCCL starts: let it copy from GPU to GPU, or only through host memory (NCCL_P2P_DISABLE=1).

    NCCL reads that variable once in a process.

    Raises:
        WireError: it was asked otherwise in this process.
    """
    if _p2p_allowed and _p2p_allowed[0] != allowed:
        raise WireError(
            f"reduction.nccl_p2p was {_p2p_allowed[0]} in an earlier run of this process, and NCCL keeps it"
        )
    _p2p_allowed[:] = [allowed]
    if not allowed:
        os.environ["NCCL_P2P_DISABLE"] = "1"


def start_process_group(comm: MPI.Intracomm, device: torch.device, backend: str, unit: str) -> None:
    """torch.distributed over the ranks of a communicator, which tells them where to meet. Collective.

    Args:
        comm: one process group at a time.
        device: of this rank.
        backend: "nccl" or "gloo".
        unit: this rank's GPU, by a name that no other one in the world has; NCCL serves one rank on each.

    Raises:
        WireError: torch has no such backend, or NCCL would have to serve two ranks on one GPU.
    """
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise WireError(f"torch {torch.__version__} has no {backend}, which torch.distributed needs here")
    hosts, units = zip(*comm.allgather((socket.gethostname(), unit)), strict=True)
    if backend == "nccl" and len(set(units)) < comm.size:
        raise WireError(f"NCCL takes one rank per GPU, but {comm.size} ranks share {len(set(units))}")
    if dist.is_initialized():
        raise WireError("there is a process group already")
    host = "127.0.0.1" if len(set(hosts)) == 1 else hosts[0]
    store = dist.TCPStore(host, 0, comm.size, True, wait_for_workers=False) if comm.rank == 0 else None
    port = comm.bcast(store.port if store is not None else None)
    if store is None:
        store = dist.TCPStore(host, port, comm.size, False)
    bound = device if device.index is not None else None
    dist.init_process_group(backend, store=store, rank=comm.rank, world_size=comm.size, device_id=bound)


def stop_process_group() -> None:
    """End what start_process_group started. Collective."""
    if dist.is_initialized():
        # A worker of gloo's may still want the interpreter's lock to drop its last work, and destroying joins it with that lock
        # held. Asleep we do not hold it.
        time.sleep(0.2)
        dist.destroy_process_group()
