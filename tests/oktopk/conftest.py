"""Reducers and optimizers that a test makes are closed behind it."""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterator
from typing import Any

import pytest

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
