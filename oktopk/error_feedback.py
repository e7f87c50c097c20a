"""Error feedback: the vectors that one rank carries from step to step, and how a step changes them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.sparse import SparseVector, Vector
from oktopk.backend import Backend
from oktopk.settings import Settings
from oktopk.step import Spans, StepResult


class ErrorFeedback:
    """The vectors of one rank: the update, and the residual that was not applied.

    Args:
        backend: whose arrays they are.
        length: elements of the gradient (n).
        settings: equal on all ranks.
        sparse: some steps leave entries in the residual.
        carried: elements of the residual, those of this rank's shard; None: n.
        update: float32[n], memory to take for the update, zero; None: its own.

    Raises:
        MemoryError: the device's memory does not suffice.

    Attributes:
        update: float32[n], the last step's result.
        residual: float32[carried]; None where no step leaves anything behind.
        support: the entries where `update` may not be zero; None: all of it.
        selected: the entries that this rank sent in the last step, valid until the next one; None: all, or not known.
        pending: whether the residual may not be zero.
    """

    def __init__(
        self,
        backend: Backend,
        length: int,
        settings: Settings,
        sparse: bool,
        carried: int | None = None,
        update: Vector | None = None,
    ) -> None:
        self._backend, self._kernels = backend, backend.kernels
        self._length = length
        self._carried = shard = length if carried is None else carried
        self.update = backend.zeros(length) if update is None else update
        self.residual: Vector | None = backend.zeros(shard) if sparse else None
        # in two levels the entries of an update come shard by shard, out of order
        self._sparse_update = backend.sparse_update(self.update) if sparse and carried is None else None
        self.support: SparseVector | None = SparseVector.empty(length)
        self.selected: SparseVector | None = None
        self.pending = False
        self._saved = backend.zeros(shard) if sparse and settings.nonfinite == "skip" else None
        self._withheld: Spans = ()
        self._aside: list[Vector] = []  # a copy of each span of the residual
        self._was_pending = False  # when they were put aside
        self._added = False  # entries that this rank had not selected, since then

    def withhold(self, spans: Spans) -> None:
        """Keep what the residual holds in these spans out of steps, until spans are given that leave them out.

        Costs nothing where they are as before, but after steps that have added entries to the residual.
        """
        if spans == self._withheld and not (spans and self._added):
            return
        self.put_back()
        self._withheld, self._was_pending = spans, self.pending
        if self.residual is not None:
            self._aside = [self.residual[begin:end].copy() for begin, end in spans]
            for vector in self._residual_and_copy():
                for begin, end in spans:
                    vector[begin:end] = 0

    def put_back(self) -> None:
        """Make the residual whole again: the next step withholds anew."""
        if self._aside:
            for vector in self._residual_and_copy():
                for (begin, end), copy in zip(self._withheld, self._aside, strict=True):
                    vector[begin:end] += copy
        self.pending = self.pending or (self._was_pending and bool(self._withheld))
        self._withheld, self._aside, self._added = (), [], False

    def _residual_and_copy(self) -> list[Vector]:
        """The vectors that a step may change or be undone from."""
        return [vector for vector in (self.residual, self._saved) if vector is not None]

    def save(self) -> None:
        """Copy the residual, where the settings skip steps that are not finite, so that `restore` is exact."""
        if self._saved is not None:
            self._saved[:] = self.residual

    def keep_no_copies(self) -> None:
        """Free what `save` copies to: nothing that a step adds to the residual is taken out again."""
        self._saved = None

    @property
    def restores(self) -> bool:
        """Whether `restore` makes the residual what it was."""
        return self._saved is not None

    def restore(self) -> None:
        """Make the residual what it was at the last `save`."""
        if self._saved is not None and self.residual is not None:
            self.residual[:] = self._saved

    def begin_update(self, writes_out: bool) -> None:
        """Prepare the update for a sparse step, before the memory of the last update's entries is used again.

        Args:
            writes_out: the step may write to the update by itself, so that it must be zero. Else it may keep the last entries,
                which `write` takes away as it writes the new ones.
        """
        if self._sparse_update is None or writes_out:
            self.clear_update()

    def clear_update(self) -> None:
        """Make the update zero again."""
        if self.support is None:
            self.update.fill(0)
        elif self.support.nnz and self._sparse_update is not None:
            self._sparse_update.replace()
        elif self.support.nnz:
            self._kernels.clear_support(self.update, self.support.entries)
        self.nothing_applied()

    def nothing_applied(self) -> None:
        """Note that the update is zero."""
        self.support = SparseVector.empty(self._length)

    def drop_update(self) -> None:
        """Make the update zero, whatever a step that no rank applies has written to it."""
        self.update.fill(0)
        self.nothing_applied()

    def applied(self, result: StepResult) -> None:
        """Note a step that the device applies by itself, on its stream."""
        self.support, self.selected, self.pending = result.update, result.selected, True

    def apply(self, result: StepResult, scale: float) -> None:
        """Write the update, times `scale`, and clear what it holds of this rank's out of the residual."""
        self.write(result.update, scale)
        self.clear_sent(result)

    def write(self, update: SparseVector | None, scale: float) -> None:
        """Write the entries of an update, times `scale`; None: the whole vector was written. See `begin_update`."""
        if update is not None and self._sparse_update is not None:
            if self.support is None:
                self.update.fill(0)
            self._sparse_update.replace(update.entries, scale)
        elif update is not None:
            self._kernels.write_scaled(self.update, update.entries, scale)
        self.support = update

    def clear_sent(self, result: StepResult) -> None:
        """Clear what the update holds of this rank's out of the residual, and add what was pruned or rounded away."""
        self.selected = result.selected
        if result.selected is None:
            if self.pending and self.residual is not None:
                self.residual.fill(0)
            self.pending = False
            return
        assert self.residual is not None
        self.pending = True
        self._clear_applied(self.residual, result)
        self._added = self._added or bool(result.returned) or result.rounded is not None
        for pruned in result.returned:
            self._kernels.add_entries(self.residual, pruned.entries, 1.0)
        if result.rounded is not None:
            assert result.update is not None
            self._kernels.add_common(self.residual, result.rounded.entries, result.update.entries)

    def state_dict(self) -> dict[str, Any]:
        """The residual, copied to the host; None where it holds nothing."""
        self.put_back()
        vector = self.residual if self.pending else None
        return {"residual": None if vector is None else self._backend.to_host(vector)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`."""
        self._withheld, self._aside = (), []
        self.support = self.selected = None
        self.pending = state["residual"] is not None
        self.residual = self._loaded(self.residual, state["residual"])

    def _loaded(self, vector: Vector | None, loaded: NDArray[np.float32] | None) -> Vector | None:
        """The vector with what is loaded in it, zero if nothing is; memory is taken only where there was none."""
        if loaded is None:
            if vector is not None:
                vector.fill(0)
            return vector
        if vector is None:
            vector = self._backend.zeros(self._carried)
        self._backend.copy_from_host(vector, loaded)
        return vector

    def _clear_applied(self, vector: Vector, result: StepResult) -> None:
        """Zero what this rank sent and what counts as applied, or make it the rounding error."""
        assert result.selected is not None
        if result.only_applied:
            assert result.update is not None
            self._kernels.clear_common(
                vector, result.selected.entries, result.update.entries, result.errors_stay
            )
        elif result.errors_stay:
            self._kernels.write_scaled(vector, result.selected.entries, 1.0)
        else:
            self._kernels.clear_support(vector, result.selected.entries)
