"""Error feedback: what one rank carries from step to step, and what becomes of it when an update is applied."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.sparse import SparseVector
from oktopk.backend import Backend
from oktopk.settings import Settings
from oktopk.step import StepResult


class ErrorFeedback:
    """The vectors of one rank: the update, the residual that was not applied, and momentum before selection.

    Args:
        backend: whose arrays they are.
        length: elements of the gradient (n).
        settings: equal on all ranks.
        sparse: some step leaves entries behind.

    Raises:
        MemoryError: the device's memory does not suffice.

    Attributes:
        update: float32[n], the last step's result.
        residual: float32[n]; None where no step leaves anything behind.
        velocity: float32[n] with momentum correction, else None.
        support: where `update` is not zero; None: anywhere.
        selected: what this rank sent in the last step, in scratch until the next one; None: all, or it is not known.
        pending: whether the residual may hold anything.
    """

    def __init__(self, backend: Backend, length: int, settings: Settings, sparse: bool) -> None:
        self._backend, self._kernels = backend, backend.kernels
        self._length = length
        self._momentum = settings.momentum_correction
        self.update: NDArray[np.float32] = backend.zeros(length)
        self.residual: NDArray[np.float32] | None = backend.zeros(length) if sparse else None
        self.velocity: NDArray[np.float32] | None = backend.zeros(length) if self._momentum else None
        self.support: SparseVector | None = None
        self.selected: SparseVector | None = None
        self.pending = False
        self._all_moved = True  # by the last `correct`

    def correct(self, gradient: NDArray[np.float32]) -> tuple[NDArray[np.float32], bool]:
        """What is to be accumulated, after momentum if that was asked for; and whether it is no longer finite."""
        if self.velocity is None:
            return gradient, False
        self._all_moved = not self._kernels.accumulate_momentum(gradient, self.velocity, self._momentum)
        return (self.velocity, False) if self._all_moved else (gradient, True)

    def clear_update(self) -> None:
        """Make the update zero again."""
        if self.support is None:
            self.update.fill(0)
        elif self.support.nnz:
            self._kernels.clear_support(self.update, self.support.entries)
        self.nothing_applied()

    def nothing_applied(self) -> None:
        """The update is zero, and stays so."""
        self.support = SparseVector.empty(self._length)

    def undo(self, gradient: NDArray[np.float32]) -> None:
        """Take a gradient out of the velocity again, of a step that nobody applies; the update is zero."""
        if self.velocity is not None:
            self._kernels.undo_momentum(gradient, self.velocity, self._momentum, self._all_moved)
        self.update.fill(0)
        self.nothing_applied()

    def applied(self, result: StepResult) -> None:
        """Learn of a step that the device has applied, or will have when its stream gets there."""
        self.support, self.selected, self.pending = result.update, result.selected, True

    def apply(self, result: StepResult, scale: float) -> None:
        """Write the update, times `scale`, and clear what it holds of this rank's out of residual and velocity."""
        kernels = self._kernels
        if result.update is not None:
            kernels.write_scaled(self.update, result.update.entries, scale)
        self.support = result.update
        self.selected = result.selected
        if result.selected is None:
            if self.pending and self.residual is not None:
                self.residual.fill(0)
            self.pending = False
            return
        assert self.residual is not None
        self.pending = True
        self._clear_applied(self.residual, result)
        for pruned in result.returned:
            kernels.add_entries(self.residual, pruned.entries)
        if self.velocity is not None:
            self._clear_applied(self.velocity, result)

    def state_dict(self) -> dict[str, Any]:
        """Residual and velocity, copied to the host; None for what holds nothing."""
        held = self.residual if self.pending else None
        vectors = {"residual": held, "velocity": self.velocity}
        return {
            name: None if vector is None else self._backend.to_host(vector)
            for name, vector in vectors.items()
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self.support = self.selected = None
        self.pending = state["residual"] is not None
        self.residual = self._loaded(self.residual, state["residual"])
        self.velocity = self._loaded(self.velocity, state["velocity"])

    def _loaded(self, vector: Any, loaded: NDArray[np.float32] | None) -> Any:
        if loaded is not None:
            return self._backend.from_host(loaded)
        if vector is not None:
            vector.fill(0)
        return vector

    def _clear_applied(self, vector: NDArray[np.float32], result: StepResult) -> None:
        """Zero what this rank sent and what counts as applied."""
        assert result.selected is not None
        if result.only_applied:
            assert result.update is not None
            self._kernels.clear_common(vector, result.selected.entries, result.update.entries)
        else:
            self._kernels.clear_support(vector, result.selected.entries)
