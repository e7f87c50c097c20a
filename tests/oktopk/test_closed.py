"""What was closed says so from every public call, and touches nothing that was freed."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI

import oktopk
from collectives.connect import connect
from oktopk import DistributedOptimizer, GradientAllreduce
from oktopk.torch import OkTopkState
from oktopk.worker import CommunicationThread
from tests.devices import on_gpus, put, use
from tests.oktopk.test_users_mistakes import MADE, Trained

pytestmark = pytest.mark.mpi

LENGTH = 60
GRADIENT = np.ones(LENGTH, np.float32)


def stepped(name: str, comm: MPI.Intracomm) -> Any:
    made = MADE[name](comm)
    made.step()
    return made.reducer


def trained(comm: MPI.Intracomm, kind: Any = torch.optim.SGD, **settings: Any) -> DistributedOptimizer:
    made = Trained(comm, kind, density=0.1, **settings)
    made.step()
    return made.reducer


def levels_on_gpus(comm: MPI.Intracomm) -> GradientAllreduce:
    use("cuda", comm)
    reducer = GradientAllreduce(
        comm, LENGTH, density=0.1, device="cuda", levels="hosts", ranks_per_host=2, peer_memory=True
    )
    reducer.step(put("cuda", GRADIENT))
    return reducer


STEPPED = ("reducer", "gtopk", "two levels", "buckets", "table", "overlap", "updates", "updates of hosts")
MAKERS: dict[str, Callable[[MPI.Intracomm], Any]] = {
    **{name: partial(stepped, name) for name in STEPPED},
    "two levels on GPUs": levels_on_gpus,
    "optimizer": trained,
    "updates in one pass": lambda comm: trained(comm, oktopk.torch.AdamW),
    "optimizer of a table": lambda comm: trained(comm, table=True),
    "optimizer in two levels": lambda comm: trained(comm, levels="hosts", ranks_per_host=2),
    "hook": OkTopkState,
    "transport": connect,
    "thread": lambda comm: CommunicationThread("oktopk", together=()),
}


def public_calls(kind: type) -> list[str]:
    """Methods and properties that are documented for users: not those of torch's base classes alone."""
    return [
        name
        for name in dir(kind)
        if not name.startswith("_")
        and (callable(getattr(kind, name)) or isinstance(getattr(kind, name), property))
    ]


def every_call_refuses(closed: Any) -> None:
    calls = set(public_calls(type(closed)))
    assert len(calls) > 2
    for call in calls - {"close", "remove"}:
        with pytest.raises(RuntimeError, match=r"this \w+ was closed"):
            getattr(closed, call)()


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[on_gpus] * ("on GPUs" in name)) for name in MAKERS]
)
def test_every_public_call_of_what_was_closed_says_so(comm: MPI.Intracomm, name: str) -> None:
    made = MAKERS[name](comm)
    kind = type(made)
    held = [made, *(getattr(made, inner, None) for inner in ("reducer", "overlapped", "transport", "group"))]
    held += [getattr(held[1], "group", None), *getattr(getattr(made, "_tables", None), "reducers", [])]
    buffer = getattr(made, "gradient_buffer", None)
    made.close()
    for closed in held:
        if closed is not None:
            every_call_refuses(closed)
    made.close()  # again is allowed
    assert isinstance(made, kind)
    if buffer is not None:  # its memory lives as long as the array
        buffer[:] = 1
        assert buffer.sum() == len(buffer)
    comm.barrier()


def test_within_agreed_an_optimizer_can_be_closed(comm: MPI.Intracomm) -> None:
    """Leaving it reads nothing of the optimizer, and the parameters stay equal on all ranks."""
    optimizer = trained(comm, torch.optim.AdamW)
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    with optimizer.agreed():
        agreed = [p.detach().clone() for p in parameters]
        optimizer.close()
    assert all(map(torch.equal, parameters, agreed))
    assert len(set(comm.allgather(b"".join(p.numpy().tobytes() for p in agreed)))) == 1
