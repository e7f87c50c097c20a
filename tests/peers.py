"""Reducers among peers, whose steps go through the memory of the GPUs of a host, and how a test looks at these steps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from mpi4py import MPI
from numpy.typing import NDArray

from oktopk import GradientAllreduce, StepReport
from oktopk.cuda.p2p_executor import P2PExecutor
from oktopk.steps import _TRUSTED
from tests.devices import get, put, use


def among_peers(comm: MPI.Intracomm, length: int, **settings: Any) -> GradientAllreduce:
    """A reducer on this rank's GPU, which is made the current one."""
    use("cuda", comm)
    reducer = GradientAllreduce(comm, length, "oktopk", device="cuda", peer_memory=True, **settings)
    assert reducer.p2p_unavailable_reason == ""
    return reducer


def on_both(comm: MPI.Intracomm, length: int, **settings: Any) -> tuple[GradientAllreduce, GradientAllreduce]:
    """The same reducer on the host and among peers."""
    return GradientAllreduce(comm, length, "oktopk", **settings), among_peers(comm, length, **settings)


def may_defer(reducer: GradientAllreduce) -> None:
    """Let the next step be deferred, whatever help the last ones needed."""
    reducer.complete()
    reducer._trust = _TRUSTED


def noted_outcomes(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, bool]]:
    """Of all steps among peers from here on: what became of their kernels, and whether of a launch that selected."""
    noted: list[tuple[Any, bool]] = []
    outcome = P2PExecutor.outcome

    def call(self: Any, epoch: int, exact: bool, packing: Any = None) -> Any:
        noted.append((outcome(self, epoch, exact, packing), packing is not None))
        return noted[-1][0]

    monkeypatch.setattr(P2PExecutor, "outcome", call)
    return noted


def learned(reducer: GradientAllreduce) -> list[tuple[Any, Any]]:
    """The thresholds of each of its methods."""
    methods = reducer.state_dict()["methods"].values()
    return [(method["selection"], method["threshold"]) for method in methods]


def step_alike(
    comm: MPI.Intracomm,
    on_host: GradientAllreduce,
    among: GradientAllreduce,
    gradient: NDArray[np.float32],
    on_device: Any = None,
) -> StepReport:
    """A step of both: updates, residuals, counts, words and thresholds are equal. Returns the report of the one among peers.

    Args:
        on_device: the gradient; None: in new memory.
    """
    expected = on_host.step(gradient)
    report = among.step(put("cuda", gradient) if on_device is None else on_device)
    where = (len(gradient), report.step)
    for name in ("local_nnz", "global_nnz", "local_exact", "global_exact", "global_threshold"):
        one, other = getattr(expected, name), getattr(report, name)
        assert one == other or one != one, (name, *where)
    assert comm.allreduce(report.words) == comm.allreduce(expected.words), where
    assert np.array_equal(get(among.update), on_host.update), where
    if on_host.residual is not None:
        assert np.array_equal(get(among.residual), on_host.residual), where
    assert learned(on_host) == learned(among), where
    return report
