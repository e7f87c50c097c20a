"""`oktopk.reference`, and updates of the library, as further executors of the contract's tests."""

from __future__ import annotations

from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from oktopk.reference import equal_splits, sparse_allreduce, step_of_updates, top_k
from oktopk.results import StepReport
from oktopk.settings import entries_kept
from tests.devices import get


class CountingComm(MPI.Intracomm):
    """A communicator that counts the words of the entries that this rank sends to others."""

    words = 0

    def Sendrecv(self, sendbuf: Any, dest: int, *arguments: Any, **keywords: Any) -> None:  # noqa: N802 - MPI's name
        self.words += 2 * len(sendbuf) * (dest != self.rank)
        super().Sendrecv(sendbuf, dest, *arguments, **keywords)


class ReferenceAllreduce:
    """Takes and gives what the contract's tests use of `GradientAllreduce`; the update is the sum, and settings are ignored."""

    def __init__(
        self, comm: MPI.Intracomm, length: int, method: str, *, density: float, **settings: object
    ) -> None:
        assert method == "oktopk"
        self._comm, self._k = comm, entries_kept(density, length)
        self.residual, self.update = np.zeros(length, np.float32), np.zeros(length, np.float32)
        self._splits = equal_splits(comm.size, length)
        self._steps = 0

    def step(self, gradient: Any) -> StepReport:
        comm = CountingComm(self._comm)
        selected = self._exchange(comm, get(gradient))
        self._steps += 1
        return StepReport(
            step=self._steps - 1,
            method="oktopk",
            k=self._k,
            length=len(self.update),
            seconds={},
            local_exact=True,
            global_exact=True,
            local_nnz=selected,
            global_nnz=np.count_nonzero(self.update),
            words=comm.words,
        )

    def _exchange(self, comm: CountingComm, gradient: NDArray[np.float32]) -> int:
        """Make `update` and `residual` those of the next step; return how many entries this rank selected."""
        self.residual += gradient
        selected = top_k(MPI.COMM_SELF, self.residual, self._k)
        self.update = sparse_allreduce(comm, self.residual, self._splits, self._k)
        return len(selected)

    def close(self) -> None:
        pass


class ReferenceUpdates(ReferenceAllreduce):
    """The same, of optimizers that move parameters by P times the gradient: the reference then moves by the gradients' sum.

    So that integers stay integers: the mean of P ranks, and parameters that have the whole residual (a share of 1).
    """

    def __init__(
        self, comm: MPI.Intracomm, length: int, method: str, *, density: float, **settings: object
    ) -> None:
        super().__init__(comm, length, method, density=density, **settings)
        self._reference, self._moved = np.zeros(length, np.float32), np.zeros(length, np.float32)

    def _exchange(self, comm: CountingComm, gradient: NDArray[np.float32]) -> int:
        parameters = self._reference - self._moved - comm.size * gradient
        selected = top_k(MPI.COMM_SELF, self._moved + comm.size * gradient, self._k)
        before = self._reference.copy()
        step_of_updates(comm, parameters, self._reference, self._moved, self._splits, self._k, share=1.0)
        assert np.array_equal(parameters, self._reference - self._moved)
        self.update, self.residual = before - self._reference, self._moved / np.float32(comm.size)
        return len(selected)


class LibraryUpdates:
    """The same, of `DistributedOptimizer(sends="updates")` around SGD with a rate of P, which exchanges in each step."""

    def __init__(
        self, comm: MPI.Intracomm, length: int, method: str, *, density: float, **settings: Any
    ) -> None:
        import torch  # here, as ranks import this file for tests without it

        from oktopk.torch.updates.optimizer import UpdatesOptimizer

        self._comm, self._weight = comm, torch.nn.Parameter(torch.zeros(length))
        inner = torch.optim.SGD([self._weight], lr=comm.size)
        settings = {"average": True} | settings | {"density": density, "local_share": 1.0}
        self._optimizer = UpdatesOptimizer(inner, comm, method, **settings)
        self.update = np.zeros(length, np.float32)

    @property
    def residual(self) -> NDArray[np.float32]:
        residual: NDArray[np.float32] = self._optimizer.reducer.residual / np.float32(self._comm.size)
        return residual

    def step(self, gradient: NDArray[np.float32]) -> StepReport:
        """As `ReferenceAllreduce.step`; all ranks hold the same reference and, within `agreed`, the same parameters."""
        import torch

        from tests.updates import reference  # here, as what compares gradients starts no torch

        optimizer = self._optimizer
        before = reference(optimizer).numpy()
        self._weight.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
        after = reference(optimizer).numpy()
        assert np.array_equal(self._weight.detach().numpy(), after - optimizer.reducer.residual)
        with optimizer.agreed():
            agreed = self._weight.detach().numpy().tobytes()
        assert agreed == after.tobytes()
        assert len(set(self._comm.allgather(agreed))) == 1
        self.update = before - after
        assert optimizer.report is not None
        return optimizer.report

    def close(self) -> None:
        self._optimizer.close()
