"""What carries the pieces of a dense gradient while the backward pass goes on: MPI in a thread, or a torch process group."""

from __future__ import annotations

import os
import queue
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from collectives.connect import connect
from collectives.dense_allreduce import DenseAllreduce
from collectives.traffic import WORD_BYTES, Traffic


class WireError(RuntimeError):
    """A way to communicate that is not to be had here; on every rank alike."""


class Wire(Protocol):
    """Sums pieces of one vector over the ranks, in place, in the background."""

    def start(self, number: int) -> None:
        """Begin with a piece, once what was asked for before has filled it. Collective, in the same order on all ranks."""

    def finish(self) -> Traffic:
        """All pieces that were started are their means over the ranks now, or before whatever a GPU is asked for next."""

    def close(self) -> None:
        """Free what was set up. Collective."""


class MpiWire:
    """Our own dense allreduce per piece, in a thread of its own: MPI progresses only where it is called.

    Nothing else may call MPI between the first `start` and `finish`. A non-blocking allreduce of MPI's would stand still until
    the backward pass is over, and would not promise the same bits on all ranks.

    Args:
        comm: collective.
        pieces: float32 on the CPU; must not move.

    Raises:
        WireError: MPI does not let another thread call it.
    """

    def __init__(self, comm: MPI.Intracomm, pieces: Sequence[Tensor]) -> None:
        if MPI.Query_thread() < MPI.THREAD_SERIALIZED:
            raise WireError(
                "this MPI was not started for threads (MPI_THREAD_SERIALIZED): use reduction.method=dense"
            )
        self._transport = connect(comm)
        self._allreduces = [DenseAllreduce(piece.numpy(), self._transport) for piece in pieces]
        self._started = 0
        self._orders: queue.SimpleQueue[DenseAllreduce | None] = queue.SimpleQueue()
        self._outcomes: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        # a daemon: a rank that fails must not wait for a message that never comes
        self._thread = threading.Thread(target=self._work, name="dense allreduce", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while (allreduce := self._orders.get()) is not None:
            try:
                allreduce.run(1.0 / self._transport.size)
            except BaseException as error:
                self._outcomes.put(error)
            else:
                self._outcomes.put(None)

    def start(self, number: int) -> None:
        """As the protocol says."""
        self._orders.put(self._allreduces[number])
        self._started += 1

    def finish(self) -> Traffic:
        """As the protocol says."""
        while self._started:
            self._started -= 1
            if (error := self._outcomes.get()) is not None:
                raise error
        return self._transport.take_traffic()

    def close(self) -> None:
        """As the protocol says."""
        self._orders.put(None)
        self._thread.join()
        for allreduce in self._allreduces:
            allreduce.free()
        self._transport.close()


class TorchWire:
    """An allreduce of torch.distributed per piece, on a stream of its own on a GPU.

    Args:
        pieces: on the device of the process group; must not move.
        dtype: that they travel and are summed in.
    """

    def __init__(self, pieces: Sequence[Tensor], dtype: torch.dtype) -> None:
        self._pieces = pieces
        self._wired = [
            piece if piece.dtype == dtype else torch.empty_like(piece, dtype=dtype) for piece in pieces
        ]
        self._works: list[tuple[int, Any]] = []
        self._ranks = dist.get_world_size()
        averages = dist.get_backend() == dist.Backend.NCCL  # gloo only sums
        self._operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._scale = 1.0 if averages else 1.0 / self._ranks

    def start(self, number: int) -> None:
        """As the protocol says."""
        piece, wired = self._pieces[number], self._wired[number]
        if wired is not piece:
            wired.copy_(piece)
        self._works.append((number, dist.all_reduce(wired, self._operation, async_op=True)))

    def finish(self) -> Traffic:
        """As the protocol says. Words and messages are those of a ring."""
        words = 0
        for number, work in self._works:
            work.wait()
            piece, wired = self._pieces[number], self._wired[number]
            if wired is not piece:
                piece.copy_(wired)
            if self._scale != 1.0:
                piece.mul_(self._scale)
            words += wired.nbytes // 4
        messages = len(self._works)
        self._works.clear()
        return ring_traffic(words, self._ranks, messages)

    def close(self) -> None:
        """As the protocol says."""
        stop_process_group()


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
