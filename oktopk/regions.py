"""Regions: which rank reduces which part of the gradient."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from collectives.transport import Transport
from oktopk.damage import StateError


def equal_boundaries(length: int, ranks: int) -> NDArray[np.int64]:
    """int64[ranks + 1]: regions of equal length."""
    return length * np.arange(ranks + 1, dtype=np.int64) // ranks


def region_boundaries(splits: NDArray[np.int64], length: int, transport: Transport) -> NDArray[np.int64]:
    """Cut the gradient into one contiguous region per rank, balanced by nnz.

    Args:
        splits: int64[P - 1], what this rank proposes: the indices that split its own last selection into equal counts.
        length: elements of the gradient (n).
        transport: where the ranks meet. Collective: every rank must call.

    Returns:
        int64[P + 1], ascending, equal on all ranks; rank r reduces [boundaries[r], boundaries[r + 1]). The
        boundaries are the mean of what the ranks propose.

    Traffic: control only: one allreduce of P - 1 int64.
    Source: Li & Hoefler, PPoPP 2022, section 3.1.1; there the selection is that of the same step.
    """
    size = transport.size
    boundaries = equal_boundaries(length, size)
    boundaries[1:-1] = transport.allreduce_control(splits) // size
    return boundaries


class Regions:
    """The regions of one instance of Ok-Topk: those of a renewal come from what the ranks selected before.

    Attributes:
        boundaries: int64[P + 1], of the last step; at first regions of equal length.
        splits: int64[P - 1], the indices that split this rank's last selection into equal counts; None before any step has ended,
            on all ranks or on none.
        stale: the next step renews the boundaries, whatever is planned: nothing was selected before these, or a region got more
            entries than there is room for.
    """

    def __init__(self, length: int, transport: Transport) -> None:
        self._length, self._transport = length, transport
        self.boundaries = equal_boundaries(length, transport.size)
        self.splits: NDArray[np.int64] | None = None
        self.stale = True
        self._learns = True

    def are_due(self, planned: bool) -> bool:
        """Whether this step renews the boundaries; equal on all ranks, as `planned` is."""
        return self.splits is not None and (planned or self.stale)

    def renew(self) -> None:
        """Agree on new boundaries. Collective; see `region_boundaries`."""
        assert self.splits is not None
        self.boundaries = region_boundaries(self.splits, self._length, self._transport)
        self.stale = False

    def begin(self, displaced: bool) -> None:
        """Tell what the step selects from. Every rank must call, before `learn`.

        Args:
            displaced: by a `Displacement`. From the first one nothing is learned: Adam first moves all elements by as much, and
                of equal magnitudes the lowest indices are selected.
        """
        self._learns = not (displaced and self.splits is None)

    def learn(self, splits: NDArray[np.int64] | None) -> None:
        """Remember what a step selected. Every rank must call.

        Args:
            splits: of this rank's selection; None where it is empty: the rank proposes the last ones, at first equal lengths.
        """
        if splits is not None and self._learns:
            self.splits = splits
        elif self.splits is None:
            self.splits = equal_boundaries(self._length, self._transport.size)[1:-1]

    @staticmethod
    def agreed_state(state: dict[str, Any]) -> tuple[list[int] | None, bool]:
        """What of a `state_dict` must be equal on all ranks, as a plain value."""
        boundaries = state["boundaries"]
        return None if boundaries is None else [int(b) for b in boundaries], state["splits"] is None

    @staticmethod
    def check_state(state: dict[str, Any], length: int) -> None:
        """Raise StateError where a `state_dict` cannot be loaded."""
        boundaries, splits = state["boundaries"], state["splits"]
        if boundaries is not None and not (
            _ascend([0, *boundaries, length]) and boundaries[0] == 0 and boundaries[-1] == length
        ):
            raise StateError(f"boundaries of the state do not ascend from 0 to {length}")
        if splits is not None and not _ascend([0, *splits, length]):
            raise StateError(f"splits of the state do not ascend within [0, {length}]")

    def state_dict(self) -> dict[str, Any]:
        """Boundaries, None where they are stale, and splits, copied."""
        splits = None if self.splits is None else self.splits.copy()
        return {"boundaries": None if self.stale else self.boundaries.copy(), "splits": splits}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue from a `state_dict`; what is of another number of ranks is agreed on anew."""
        size = self._transport.size
        boundaries = _fitting(state["boundaries"], size + 1)
        self.stale = boundaries is None
        self.boundaries = equal_boundaries(self._length, size) if boundaries is None else boundaries
        self.splits = _fitting(state["splits"], size - 1)


def _ascend(places: list[int]) -> bool:
    return bool(np.all(np.diff(places) >= 0))


def _fitting(array: Any, length: int) -> NDArray[np.int64] | None:
    return np.array(array, np.int64) if array is not None and len(array) == length else None
