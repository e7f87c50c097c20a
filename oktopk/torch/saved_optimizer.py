"""States of an optimizer and of the reducer beside it: saved by each rank, loaded by all together."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

from oktopk.allreduce import GradientAllreduce
from oktopk.buckets import BucketedAllreduce
from oktopk.damage import StateError
from oktopk.elastic import check_redistributed, of_rank, saved_rank, without_residual
from oktopk.state import check_state
from oktopk.torch.agreement import compare_states
from oktopk.torch.engine import Engine
from oktopk.torch.replica import Replica
from oktopk.torch.states import (
    as_arrays,
    as_tensors,
    by_rank,
    check_groups,
    check_kept,
    load_state,
    not_saved_of,
)
from oktopk.torch.step_agreement import numbers_of
from oktopk.torch.tables import SparseTables
from oktopk.torch.wrapped import WrappedOptimizer


class SavedOptimizer(WrappedOptimizer):
    """The part of a `DistributedOptimizer` that has to do with states; that class sets up what is named here, and has `step`."""

    reducer: GradientAllreduce | BucketedAllreduce
    """What sums over the ranks."""

    chosen: str = ""
    """What settings="auto" took and why, in a sentence; "" without it."""

    _engine: Engine
    _left_out = ""  # by get_optimizer_state_dict, beside residuals
    _not_saved = ""  # what a state that was loaded lacks, for the next step to warn of
    _replica: Replica
    _tables: SparseTables

    def state_dict(self) -> dict[str, Any]:
        """State of the wrapped optimizer, and under "reducer" this rank's own, see `oktopk.elastic.of_rank`.

        Tensors and plain values only. Every rank saves its own. What takes the optimizer's part alone, as
        `get_optimizer_state_dict` of `torch.distributed.checkpoint` does, drops the residuals; a state without "reducer" is
        loaded as that of an optimizer that was not wrapped.
        """
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where this rank's `state_dict` was taken, bit for bit. Collective: every rank must call.

        A state without "reducer", as of an optimizer that was not wrapped, starts with empty residuals; rank 0 warns. So does one
        rank's state on every rank, as of a framework that saves rank 0's alone; there the next step warns, unless each rank's own
        is loaded before it.

        Raises:
            ValueError: the state is of another length or method, of other buckets or of parameters in another order, or only some
                ranks' have "reducer", or is no dict; on every rank alike.
        """
        state: Any = state_dict
        if not isinstance(state, dict):  # on this rank alone, perhaps: all are told
            state = {"problem": f"the state is a {type(state).__name__}, not a dict"}
        before = self._ways()
        self._follow_levels(state)
        whose = "a state that was refused"
        try:
            super().load_state_dict(state)
            whose = "a loaded state"
        finally:
            if before != (ways := self._ways()):
                listed = ", ".join(f"{name}={way!r}" for name, way in ways.items())
                self.chosen += f"; then {listed} of {whose}"
        self._replica.reshard()

    def _state(self) -> dict[str, Any]:
        own = {"reducer": as_tensors(self._reducer_state())}
        own |= {"tables": self._tables.state()} if self._tables else {}
        rank = self.reducer.transport.rank
        return {**self.inner.state_dict(), **{name: by_rank(part, rank) for name, part in own.items()}}

    def _reducer_state(self) -> dict[str, Any]:
        return self.reducer.state_dict()

    def _load(self, state: dict[str, Any]) -> None:
        own, empty = of_rank(state.pop("updates", None)), ""
        if own is not None:
            state.pop("reducer", None)  # residuals of updates, which are of another size than gradients
            if own.get("sharding") is not None:
                empty = "the state has moments of a host's shards, which only updates on the same hosts go on with: none are kept"
        self._load_parts(state, empty=empty)

    def _load_parts(
        self,
        state: dict[str, Any],
        check: Callable[[dict[str, Any], dict[str, Any], bool], None] = lambda alike, same, lost: None,
        empty: str = "",
        also: str = "",
    ) -> None:
        """Load what is no kind's own: the wrapped optimizer's part, the reducer's, the tables'. Collective.

        Args:
            state: as `_state` returns it.
            check: raises StateError where this rank cannot load what is of a kind; fills in what of it is to be equal on all
                ranks, and on those of a replica; knows whether all ranks load the state of one, so that the others' is lost.
            empty: why residuals start empty, in a sentence, where the state has none.
            also: as `not_saved_of`.

        Raises:
            ValueError: on every rank alike. What the ranks have not found before the first part is loaded leaves parts loaded.
        """
        what, saved = "load_state_dict", saved_rank(state)
        reducer, tables = of_rank(state.pop("reducer", None)), of_rank(state.pop("tables", None))
        transport = self.reducer.transport
        with self._replica.together(what):
            self.reducer.meet(what)
            not_saved = not_saved_of(saved, transport, also)
            if not_saved:
                reducer = without_residual(reducer, transport.rank, transport.size, self.hosts)
                tables = None
            reducer = None if reducer is None else as_arrays(reducer)
            # the ranks that have another shard must not load theirs either
            with transport.together(ValueError) as alike, self._replica.agree(what) as same:
                check_redistributed(state)
                check(alike, same, bool(not_saved))
                alike |= {"whether the state has residuals": reducer is not None}
                alike |= {"whether the state has tables": tables is not None}
                self._check_parts(state, reducer, tables)
                if self._replica.sharded and reducer is not None:
                    check_state(reducer, self._one_vector)
                same |= {"the groups of the state": numbers_of(state["param_groups"])}
            self._compare_states(state)
            if reducer is not None and self._replica.sharded:
                self._one_vector.agree_on_state(reducer)
        with self._replica.together(what):  # what raised above has changed no shard
            self._engine.load(reducer, tables)
            if reducer is None and transport.rank == 0:
                empty = empty or (
                    "the state is that of an optimizer that was not wrapped, or came by "
                    f"get_optimizer_state_dict, which leaves out residuals{self._left_out} "
                    "(docs/checkpoints.md has what keeps them)"
                )
                warnings.warn(f"{empty}: residuals start empty, thresholds anew", stacklevel=5)
            with transport.together(StateError):
                try:
                    self._load_wrapped(state)
                except Exception as error:  # of the wrapped optimizer, perhaps on this rank alone
                    raise StateError(
                        f"the wrapped optimizer does not load its state: {type(error).__name__} {error}"
                    ) from error
        self._not_saved = not_saved

    def _load_wrapped(self, state: dict[str, Any]) -> None:
        """Load what is the wrapped optimizer's own."""
        load_state(self.inner, state)

    @property
    def _one_vector(self) -> GradientAllreduce:
        """The reducer, where it has no buckets."""
        assert isinstance(self.reducer, GradientAllreduce)
        return self.reducer

    def _check_parts(self, state: dict[str, Any], reducer: Any, tables: Any) -> None:
        """Raise StateError where this rank cannot load a state, but for what the reducer looks for itself."""
        check_groups(self.inner, state)
        check_kept(self.inner, state)
        if tables is not None:
            self._tables.check_state(tables)

    def _warn_of_lost(self) -> None:
        """In the first step after such a state: until then each rank's own may be loaded."""
        if self._not_saved and self.reducer.transport.rank == 0:
            warnings.warn(self._not_saved, stacklevel=5)
        self._not_saved = ""

    def _compare_states(self, state: dict[str, Any]) -> None:
        """Raise ValueError where the wrapped optimizer's states that ranks are about to load differ. Collective."""
        compare_states(self.reducer.transport, state)

    def _ways(self) -> dict[str, str]:
        """What the reducer has of OPEN."""
        settings = self.reducer.settings
        return {"wire": settings.wire, "levels": self.reducer.levels, "exchange": settings.exchange}

    def _follow_levels(self, state: object) -> None:
        """Before the first step, where levels were open, take those of a state that all ranks are about to load. Collective."""
