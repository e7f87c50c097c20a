"""What an optimizer of updates keeps, and what its users do between two steps: `agreed`, states, `close`."""

from __future__ import annotations

import sys
import warnings
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from collectives.closing import closes
from collectives.errors import MissingRanksError, refuse
from oktopk.allreduce import GradientAllreduce
from oktopk.damage import StateError, state_errors
from oktopk.elastic import between_exchanges, of_rank
from oktopk.torch.adamw import SelectingStep
from oktopk.torch.as_wrapped import AsWrapped
from oktopk.torch.optimizer import DistributedOptimizer
from oktopk.torch.states import (
    NOT_AN_OPTIMIZERS,
    by_number,
    by_rank,
    check_groups,
    check_replica,
    kept_difference,
    names_kept,
    on_host,
)
from oktopk.torch.step_agreement import groups_difference, numbers_of
from oktopk.torch.updates.local_share import LocalShare
from oktopk.torch.updates.reference_parameters import ReferenceParameters
from oktopk.torch.updates.residual_decay import ResidualDecay
from oktopk.torch.updates.sampled_ratio import SampledRatio
from oktopk.torch.updates.shard_step import ShardStep
from oktopk.torch.updates.step_agreement import UpdatesAgreement
from oktopk.torch.updates.window import Window


class _Agreed(AbstractContextManager[None]):
    """What `UpdatesState.agreed` returns: no generator, which would leave when it is collected."""

    def __init__(self, optimizer: UpdatesState) -> None:
        self._optimizer = optimizer

    def __enter__(self) -> None:
        self._optimizer._enter_agreed()

    def __exit__(self, *_: object) -> None:
        self._optimizer._leave_agreed()


class UpdatesState(DistributedOptimizer):
    """The part of an `UpdatesOptimizer` that takes no step; that class sets up what is named here, and has `_step`."""

    reducer: GradientAllreduce
    residual_decay: float
    """The power by which residuals forget; 0 where nothing is lost."""

    _agreeing = 0  # entered and not left
    _agreement: UpdatesAgreement
    _as_wrapped: AsWrapped
    _forgetting: ResidualDecay
    _kept: list[Tensor] | None = None  # what the parameters held, within `agreed`
    _loaded: dict[str, Any] | None = None  # a state whose parameters may be loaded after it
    _ratio: SampledRatio | None = None
    _reference: ReferenceParameters
    _selecting: SelectingStep | None
    _share: LocalShare
    _sharded: ShardStep | None = None
    _window: Window

    @property
    def local_share(self) -> float:
        """Of its residual that a replica's own parameters hold, as of now."""
        return self._share.now

    @property
    def reference(self) -> Tensor:
        """float32[n] on the parameters' device, to be read: the reference.

        After an exchange it is equal on all ranks, bit for bit. Where ranks shard the model it is
        of this rank's shards, and equal on ranks that have the same ones. Exchanges change it in
        place; what users write into parameters does so at the next step, `agreed` or `state_dict`.
        """
        return self._reference.vector

    @property
    def replica(self) -> str:
        """What has a reference of its own: "rank", "host", "summed" or "shards"."""
        return self._replica.name

    @property
    def state(self) -> Any:
        """The wrapped optimizer's, which has it itself only while it steps where that is on a shard."""
        return self.inner.state if self._sharded is None else self._sharded.state

    @state.setter
    def state(self, state: Any) -> None:
        if self._sharded is None:
            self.inner.state = state
        else:
            self._sharded.state = state

    def _lent(self) -> AbstractContextManager[None]:
        """Within, the wrapped optimizer has its state."""
        return nullcontext() if self._sharded is None else self._sharded.lent()

    # what users write

    @torch.no_grad()
    def _take_written(self, changed: bool | None = None) -> None:
        """Make what was written to since the last step the reference. changed: as `ReferenceParameters.written`.

        Raises:
            RuntimeError: a parameter has another type or shape than at construction; on this rank alone.
        """
        if changed is None:  # else the step has looked
            self._reference.look()
            if self._as_wrapped.problem:
                raise RuntimeError(self._as_wrapped.problem)
        reference, loaded = self._reference, self._loaded
        numbers = reference.written(by_version=not self._window.steps, changed=changed)
        if numbers and loaded is not None and self._reference.fits(loaded):
            self._go_on(loaded)
        elif numbers:
            reference.take(numbers)
            reference.watch()
            if changed is not None:
                self._window.took_writes = True
            elif self._kept is None:
                self._window.written = True

    def _take_written_outside(self) -> None:
        """As `_take_written`, outside of a step, where ranks cannot compare what they have taken: then warn."""
        self._take_written()
        if self._window.written and self.reducer.transport.size > 1:
            warnings.warn(
                "parameters were written to since the last step, outside of `with optimizer.agreed():`. What this rank holds "
                "there counts, so that ranks may part until the next step: write within it, or take a step before you evaluate, "
                "save or close",
                stacklevel=4,
            )

    def agreed(self) -> AbstractContextManager[None]:
        """Within, the parameters are round(reference), equal on all ranks: to evaluate, to save, and to write into them.

        After parameters were written to outside of it, loaded or clamped, they may differ between ranks until the next exchange,
        and a warning says so: take a step first.

        Not collective. `step` raises within; `state_dict` is as outside. Where several are entered, the last one that is left
        counts. One that is never left holds for good, also where nothing refers to it any more.
        """
        return _Agreed(self)

    def _enter_agreed(self) -> None:
        if self._kept is None:
            with torch.no_grad():
                self._take_written_outside()
                self._kept = self._reference.show_agreed()
            self._replica.reshard()
            self._agreeing = 0
        self._agreeing += 1

    def _leave_agreed(self) -> None:
        self._agreeing -= 1
        if self._agreeing or self._kept is None:  # the latter where it was closed within
            return
        kept, self._kept = self._kept, None
        with torch.no_grad():
            self._reference.leave_agreed(kept)
        self._replica.reshard()

    # state

    def state_dict(self) -> dict[str, Any]:
        """As `DistributedOptimizer.state_dict`, and under "updates" the reference and what this rank's parameters hold.

        Between exchanges, too. Save the model within `agreed`, or each rank its own. Where the model holds either of these when
        the state is loaded, training goes on bit for bit; also where each rank's own is loaded after it.

        What the wrapped optimizer keeps is this rank's own as well, and is in "updates" once more, by the same tensors, for
        `torch.distributed.checkpoint`; there of sharded parameters this rank's shards, as plain tensors. What it keeps of a shard
        of a host is there alone. All tensors are on the host.
        """
        return super().state_dict()

    @torch.no_grad()
    def _state(self) -> dict[str, Any]:
        if self._kept is None:  # before the reducer's residual is saved, of which it takes a part
            self._take_written()
        with self._lent(), self._memory.stream_scope():
            state = super()._state()
        state["state"] = on_host(state["state"])
        optimizer = {name: state[name] for name in ("state", "param_groups")}
        optimizer["state"] = self._replica.saved(optimizer, self.param_groups)
        own = self._own_state() | {"optimizer": optimizer}
        if self._sharded is not None:  # else other ranks, or other optimizers, would take it for theirs
            state["state"] = {}
        return {**state, "updates": by_rank(own, self.reducer.transport.rank)}

    def _own_state(self) -> dict[str, Any]:
        return {
            **self._reference.state(self._kept),
            **self._window.state(),
            "forgetting": self._forgetting.state(),
            "local_share": self._share.state(),
            "ratio": None if self._ratio is None else self._ratio.state(),
            "shard": self._replica.shard,
            "sharding": None if self._sharded is None else self._sharded.sharding,
        }

    def _load(self, state: dict[str, Any]) -> None:
        own = of_rank(state.pop("updates", None))
        transport, saved, empty, also = self.reducer.transport, of_rank(state.get("reducer")), "", ""
        if own is not None:
            also = ", and what the optimizers of other replicas kept"
            if isinstance(own, dict) and own.get("sharding"):
                also = ", and all moments, as each rank keeps those of its shard alone"
        if own is None and saved is not None:
            # residuals of gradients are of another size, and those of updates belong to a reference
            state.pop("reducer")
            empty = "the state has residuals and no 'updates': it is of sends='gradients', or that key was left out"

        def check(alike: dict[str, Any], same: dict[str, Any], lost: bool) -> None:
            alike["whether the state is of updates"] = own is not None
            if own is not None:
                self._check_own(own)
                alike["what the residual of the state has forgotten"] = tuple(own["forgetting"])
                check_replica(saved, self.hosts, self.replica)
                # torch's distributed checkpoint has those of one rank beside it
                state.setdefault("param_groups", own["optimizer"]["param_groups"])
            check_groups(self.inner, state if own is None else own["optimizer"])
            with state_errors(what=NOT_AN_OPTIMIZERS):
                state["state"] = self._kept_by(state if own is None else own["optimizer"], own, lost)
            moment = None if own is None else (own["exchanges"], own["steps"])
            same["the exchanges of the state, and steps since"] = moment
            ratio = None if own is None else own["ratio"]
            same["measurements of the state's ratio"] = None if ratio is None else ratio["measured"]

        unwritten = not self._reference.written(by_version=not self._window.steps)
        self._load_parts(state, check, empty, also)
        with torch.no_grad():
            self._reference.look()
            self._reference.residual.gather()
            self._window.begin()
            fits = own is not None and all(transport.allgather_objects(self._reference.fits(own)))
            fits = not self._replica.any(not fits, "load_state_dict")
            if own is not None and self._not_saved:
                own = between_exchanges(own)
            if own is not None:
                # without moments, which are loaded, and would take 8n bytes until the next step
                own = {name: value for name, value in own.items() if name != "optimizer"}
            if self._selecting is not None:
                self._selecting.forget()
            self._loaded = own
            self._load_counts(own)
            if fits and own is not None:
                self._go_on(own)
            else:
                # a rank's own parameters, which differ a little, are no reference; what a user has written is
                if own is not None or not all(transport.allgather_objects(unwritten)):
                    self._reference.take_all()
                self._reference.show()
            if self._kept is not None:
                self._kept = self._reference.show_agreed()

    def _load_counts(self, own: dict[str, Any] | None) -> None:
        """Load what is neither the reference's nor of steps since the last exchange; None: as at construction."""
        self._window.exchanges = 0 if own is None else own["exchanges"]
        self._forgetting.load([0, 0, 0] if own is None else own["forgetting"])
        self._share.begin()
        if own is not None:
            self._share.load(own["local_share"])
        self._reference.set_share(self._share.now)
        if self._ratio is not None:
            self._ratio.measured = 0  # ranks number their averages by it
            if own is not None and own["ratio"] is not None:
                self._ratio.load(own["ratio"])

    def _kept_by(self, optimizer: dict[str, Any], own: dict[str, Any] | None, lost: bool) -> dict[Any, Any]:
        """What the wrapped optimizer is to keep of what a state has, by number.

        Args:
            optimizer: its "state" and "param_groups".
            own: what the state has under "updates".
            lost: as `check` of `_load_parts`: of moments of shards no rank then keeps any, as the others have none.

        Raises:
            StateError: the state is of shards, and this optimizer keeps moments of all parameters.
        """
        sharding = None if own is None else own["sharding"]
        if self._sharded is not None:
            return {} if lost and sharding else self._sharded.loaded(optimizer, sharding)
        if sharding:
            raise StateError(
                "the state has moments of a shard of a host's parameters, and here each rank steps on all of them: for other "
                "hosts oktopk.elastic.redistribute puts them together; else go on with every=1, the same optimizer and no hooks "
                "on its step"
            )
        if own is None:
            return optimizer["state"]
        if sharding is None:
            return self._replica.loaded(optimizer, self.param_groups)
        return by_number(optimizer, self.param_groups, self._reference.in_shape)

    def _load_wrapped(self, state: dict[str, Any]) -> None:
        with self._lent():
            super()._load_wrapped(state)

    def _check_parts(self, state: dict[str, Any], reducer: Any, tables: Any) -> None:
        with nullcontext() if self._sharded is None else self._sharded.in_place():
            super()._check_parts(state, reducer, tables)

    def _go_on(self, own: dict[str, Any]) -> None:
        """Go on from a state; what this rank's parameters held is put back, where the state is of as many ranks."""
        self._window.load(own)
        self._reference.load(own)

    @state_errors(what="the state of updates is damaged: ")
    def _check_own(self, own: Any) -> None:
        """Raise StateError where a state cannot be loaded on this rank."""
        self._replica.check_shard(own["shard"])
        self._reference.check_state(own)
        self._window.check_state(own)
        own["ratio"] is None or (own["ratio"]["measured"], own["ratio"]["squares"])
        ResidualDecay.check_state(own["forgetting"])
        LocalShare.check_state(own["local_share"])
        own["optimizer"]["state"], own["optimizer"]["param_groups"]

    def _compare_states(self, state: dict[str, Any]) -> None:
        numbers_and_names = (
            numbers_of(self._agreement.settings(state["param_groups"])),
            names_kept(state["state"]),
        )
        ranks, kept = zip(*self.reducer.transport.allgather_objects(numbers_and_names), strict=True)
        refuse(groups_difference(ranks) or kept_difference(kept))

    @closes
    @torch.no_grad()
    def close(self) -> None:
        """Free what the library holds; the parameters become round(reference). Collective.

        Steps since the last exchange are dropped. Parameters of another type or shape than at construction stay as they are.

        Moments that a rank has of its shard alone become those of its host, of whole parameters: the wrapped optimizer then steps
        by itself. They are dropped, with a warning, where other ranks of the host do not come within `Settings.timeout`, have no
        memory for them, or have parameters of another type or shape; and while an exception is handled, which these may not have.

        Memory and traffic: with moments in shards as `ShardStep.give_back`; what the optimizer keeps of n elements stays.
        """
        self._as_wrapped.look()
        if not self._as_wrapped.problem:
            self._take_written_outside()
            self._reference.show_agreed()
        self._kept = None
        if self._sharded is not None:
            dropped = "an exception is handled, and other ranks may not close: call close() after it"
            if sys.exc_info()[0] is None:
                try:
                    self._sharded.give_back(self.reducer.settings.timeout, self._as_wrapped.problem)
                    dropped = ""
                except (MissingRanksError, ValueError) as error:
                    dropped = str(error)
            if dropped and self._sharded.state:
                warnings.warn(f"moments of shards are dropped: {dropped}", stacklevel=3)
            self._sharded = None  # the wrapped optimizer has its state for good
        if self._ratio is not None:
            self._ratio.close()
        self._replica.reshard()
        self._replica.close()
        super().close()

    def __repr__(self) -> str:
        one_pass = "" if self._selecting is None else ", AdamW in the pass that selects"
        shown = f"replica={self.replica!r}, local_share={self.local_share:.3g}"
        shown += f", residual_decay={self.residual_decay:.3g}{one_pass}"
        shown += ", each rank steps on its shard" * (self._sharded is not None)
        return f"{super().__repr__()[:-1]}, {shown})"
