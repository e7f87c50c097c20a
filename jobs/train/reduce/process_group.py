"""torch.distributed among the ranks of an MPI communicator."""

from __future__ import annotations

import socket
import time

import torch
import torch.distributed as dist
from mpi4py import MPI

from collectives.traffic import WORD_BYTES, Traffic


class WireError(RuntimeError):
    """A way to communicate that is not to be had here; on every rank alike."""


def ring_traffic(words: int, ranks: int, pieces: int) -> Traffic:
    """What a ring would send per rank for so many words in so many pieces: what a library sends is not to be seen."""
    return Traffic(WORD_BYTES * (2 * words * (ranks - 1) // ranks), 2 * pieces * (ranks - 1))


def start_process_group(comm: MPI.Intracomm, device: torch.device) -> None:
    """torch.distributed over the ranks of a communicator, which tells them where to meet. Collective.

    Args:
        comm: one process group at a time.
        device: of this rank: over gloo between CPUs, over NCCL between GPUs.

    Raises:
        WireError: torch has no such backend, or NCCL would have to serve two ranks on one GPU.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    if not dist.is_available() or not dist.is_backend_available(backend):
        raise WireError(f"torch {torch.__version__} has no {backend}, which torch.distributed needs here")
    # a batch system may show each rank a GPU of its own, and all of them are number 0
    gpu = str(torch.cuda.get_device_properties(device).uuid) if backend == "nccl" else ""
    hosts, gpus = zip(*comm.allgather((socket.gethostname(), gpu)), strict=True)
    if backend == "nccl" and (count := len(set(gpus))) < comm.size:
        raise WireError(f"NCCL takes one rank per GPU, but {comm.size} ranks share {count}")
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
