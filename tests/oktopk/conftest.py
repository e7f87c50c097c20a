"""Where tests of reducers run; and what they make is closed behind them."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from mpi4py import MPI

from collectives.limit import Limit, missing_ranks
from tests.devices import DEVICES, torch_device, use

KINDS = {
    "oktopk.allreduce": "GradientAllreduce",
    "oktopk.buckets": "BucketedAllreduce",
    "oktopk.rows": "RowSparseAllreduce",
    "oktopk.torch.optimizer": "DistributedOptimizer",
    "oktopk.torch.ddp": "OkTopkState",
}
"""Where they are, if a test has imported it: torch and MPI are not imported for their sake."""


def note(kind: Any, made: list[Any], patch: pytest.MonkeyPatch) -> None:
    """Keep what is constructed of a kind in a list until it is closed."""
    construct, close = kind.__init__, kind.close

    @functools.wraps(construct)
    def constructed(self: Any, *arguments: Any, **keywords: Any) -> None:
        construct(self, *arguments, **keywords)
        made.append(self)

    def closed(self: Any) -> None:
        made[:] = [each for each in made if each is not self]
        close(self)

    patch.setattr(kind, "__init__", constructed)
    patch.setattr(kind, "close", closed)


@pytest.fixture(autouse=True)
def left_open(request: pytest.FixtureRequest) -> Iterator[list[Any]]:
    """What the test has made and not closed; closed after a test that passed, the last one first. Collective."""
    made: list[Any] = []
    failed = request.session.testsfailed
    with pytest.MonkeyPatch.context() as patch:
        for module, name in KINDS.items():
            if module in sys.modules:
                note(getattr(sys.modules[module], name), made, patch)
        yield made
        while made and request.session.testsfailed == failed:
            # a state makes its reducer later than itself, and closes it
            states = [each for each in made if type(each).__name__ == "OkTopkState"]
            (states or made)[-1].close()


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> str:
    """The host, and this rank's GPU, which is made the current one."""
    use(request.param, comm)
    return str(request.param)


@pytest.fixture(params=DEVICES[1:])
def cuda(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> str:
    """This rank's GPU alone, made the current one."""
    use(request.param, comm)
    return str(request.param)


@pytest.fixture
def place(device: str, comm: MPI.Intracomm) -> Any:
    """`device` as torch's."""
    return torch_device(device, comm)


GAVE_UP = 77
"""Tag of the messages of ranks that have given up, on the test's communicator."""


@pytest.fixture
def after_the_others(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """What the ranks call before one of them comes late to an operation: it returns there when the others have given up.

    Those give up once all of them have waited for as long as the limit, so that it alone is missing, however slow the machine.
    Before that call no rank gives up.
    """
    monkeypatch.setattr("collectives.limit._debugged", lambda: True)
    parts = []

    def after(missing: int) -> None:
        others = comm.Split(comm.rank == missing)
        parts.append(others)
        if comm.rank == missing:
            messages = [comm.irecv(source=rank, tag=GAVE_UP) for rank in range(comm.size) if rank != missing]
            while not MPI.Request.Testall(messages):
                time.sleep(0.001)
            return
        waiting: list[MPI.Request] = []

        def wait_on() -> bool:
            if not waiting:
                waiting.append(others.Ibarrier())
            return not waiting[0].Test()

        def gives_up(limit: Limit, notes: Any, waited: float) -> Any:
            leave = notes.leave

            def tell(note: int) -> None:
                leave(note)
                others.Barrier()  # none waits for the others' notes before all have left theirs
                comm.send(None, missing, GAVE_UP)

            monkeypatch.setattr(notes, "leave", tell)
            return missing_ranks(limit, notes, waited)

        monkeypatch.setattr("collectives.limit._debugged", wait_on)
        monkeypatch.setattr("collectives.limit.missing_ranks", gives_up)

    yield after
    for part in parts:
        part.Free()
