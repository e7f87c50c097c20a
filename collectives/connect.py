"""The one door to communication libraries: MPI by mpi4py, or a torch process group. Imports neither before it is used."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard

from collectives.launchers import check_launcher

if TYPE_CHECKING:
    from mpi4py import MPI

    from collectives.host_transport import HostTransport
    from collectives.limit import Limit
    from collectives.process_group import ProcessGroup

Communicator: TypeAlias = "MPI.Intracomm | ProcessGroup | HostTransport"

INSTALL_MPI = "load the site's MPI module, or pip install 'oktopk[mpi]'"


def mpi_problem() -> str:
    """Why mpi4py.MPI cannot be imported, and what to install; "" if it was imported."""
    try:
        import mpi4py.MPI  # noqa: F401
    except (ImportError, RuntimeError) as error:
        return f"mpi4py finds no MPI library ({str(error).splitlines()[0]}): {INSTALL_MPI}"
    return ""


def communicator(comm: Communicator | None) -> Communicator:
    """The communicator to use: the one given, or for None that of all ranks of the job.

    All ranks are torch's default process group where there is one, else MPI's COMM_WORLD.

    Raises:
        TypeError: it is something else.
        ImportError: MPI is to be used, and there is none; the message says what to install.
        LauncherError: a launcher started several processes, and these are only this one. What is passed as `MPI.COMM_SELF` or
            as a process group is not checked.
    """
    if _is_transport(comm):
        return comm
    distributed = _torch_distributed()
    if distributed is not None:
        if comm is None and distributed.is_initialized():
            if distributed.get_world_size() == 1:
                check_launcher("torch's default process group")
            return distributed.group.WORLD
        if isinstance(comm, distributed.ProcessGroup):
            return comm
    known = sys.modules.get("mpi4py.MPI")  # who has a communicator has imported it
    if comm is not None and not (known is not None and isinstance(comm, known.Intracomm)):
        raise TypeError(
            f"comm is a {type(comm).__name__}, not an mpi4py.MPI.Intracomm or a torch.distributed.ProcessGroup"
        )
    if problem := mpi_problem():
        raise ImportError(
            f'{problem}. Without MPI, under torchrun, call torch.distributed.init_process_group("gloo") first'
        )
    from collectives import mpi

    return mpi.communicator(comm)


def connect(comm: Communicator | None, limit: Limit | None = None) -> HostTransport:
    """The transport for host arrays among the ranks of a communicator, as `communicator`. Collective: every rank must call.

    Args:
        comm: it is duplicated: transports never see its messages nor each other's. A transport stands for its ranks, and those
            that are made of one share an NCCL communicator and windows of peer memory: they must communicate in one order on all
            ranks.
        limit: on the time that ranks may come late to this call; None: they are waited for.

    Raises:
        MissingRanksError: they did not come in time; on the others, and on a missing one when it comes. The communicator must
            not be used after that.
    """
    chosen: Any = communicator(comm)
    if _is_transport(chosen):
        if limit is not None:
            chosen.expect_all(limit.what, limit.seconds)
            chosen.barrier()
        transport = chosen._like_this(chosen.comm)
        transport.shared = chosen.shared
        return transport
    distributed = _torch_distributed()
    if distributed is not None and isinstance(chosen, distributed.ProcessGroup):
        from collectives import process_group

        return process_group.connect(chosen, limit)
    from collectives import mpi

    return mpi.connect(chosen, limit)


def _is_transport(comm: Any) -> TypeGuard[HostTransport]:
    known = sys.modules.get("collectives.host_transport")  # who has one has imported it
    return known is not None and isinstance(comm, known.HostTransport)


def _torch_distributed() -> Any:
    """torch.distributed, where the caller has imported it and it was built; else None."""
    distributed: Any = sys.modules.get("torch.distributed")
    return distributed if distributed is not None and distributed.is_available() else None
