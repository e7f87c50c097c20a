"""Where tests of reducers run; and what they make is closed behind them."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from mpi4py import MPI

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
            made[-1].close()


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
