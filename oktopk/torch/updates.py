"""Updates in place of gradients: each rank's optimizer steps first, then what it changed is selected and summed."""

from __future__ import annotations

import copy
import math
import operator
import sys
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from collectives.closing import closes
from collectives.traffic import Traffic
from collectives.transport import MissingRanksError, refuse
from oktopk.allreduce import GradientAllreduce, NonFiniteGradientError
from oktopk.damage import StateError, state_errors
from oktopk.displacement import Displacement
from oktopk.elastic import between_exchanges, of_rank
from oktopk.results import StepReport
from oktopk.torch.adamw import SelectingStep, takes_steps
from oktopk.torch.agreement import groups_of, reduced_over_hosts, reduced_twice_warning
from oktopk.torch.arguments import levels_of
from oktopk.torch.gradient_norms import GradientNorms, most_norm
from oktopk.torch.gradients import missing_spans
from oktopk.torch.host_replica import HostReplica, SummedReplica
from oktopk.torch.local_share import LocalShare
from oktopk.torch.local_step import (
    SHARED_BY,
    LocalStep,
    agreed_settings,
    has_step_hooks,
    is_adaptive,
    most_share,
)
from oktopk.torch.optimizer import DistributedOptimizer
from oktopk.torch.own_weights import keeps_weights, own_weights_sentence
from oktopk.torch.reference import Reference
from oktopk.torch.replica import Replica
from oktopk.torch.residual_decay import ADAM_DECAY, ResidualDecay
from oktopk.torch.sampled_ratio import SampledRatio
from oktopk.torch.shard_step import ShardStep, is_elementwise
from oktopk.torch.shared_moments import SharedMoments
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
from oktopk.torch.step_agreement import REFERENCE, StepAgreement, groups_difference, numbers_of

# the ratio and the hash of the reference are new in the first exchanges, then in every tenth
_FIRST, _EVERY = 20, 10

_is_sparse = operator.attrgetter("is_sparse")


class UpdatesOptimizer(DistributedOptimizer, sends="updates"):
    """What `DistributedOptimizer(optimizer, sends="updates")` makes, and by default of AdamW: the optimizer comes first.

    In each step the wrapped optimizer steps on this rank's own gradient. What it changed joins the residual. Entries of the
    residuals are summed over the ranks, by default those that `union` selects, and Ok-Topk where the density is at least 5 %.
    All ranks subtract the mean from the *reference*: float32 values of all parameters, equal on all ranks, bit for bit.

        optimizer steps                     x, what the parameters hold, becomes x'
        residual := residual + (x - x')
        u := the sums of what the method selects and applies                # each residual loses what it sent
        residual := residual · what `residual_decay` leaves of it
        reference := decay · (reference - u / P)
        parameters := round(reference - local_share · residual)

    So a rank's own parameters hold a share of what it has not sent yet, and differ a little from
    those of other ranks. Without it a rank computes a hundred gradients before it sees what the first
    of them did. By default the share is 1/P, as much as the rank's updates will count; with several
    replicas, an optimizer of Adam's kind and an exchange in each step it is at most 0.05. With up to
    four replicas it begins five times as large, is small after 500 exchanges, and grows as the
    learning rate falls, to six times as much, see `LocalShare`; of more it is at most 0.1 over the
    root of their number.
    `agreed` puts the reference into the parameters, to evaluate, to save and to write into them.

    With several replicas, an optimizer of Adam's kind and an exchange in each step residuals forget
    old updates, which were made at parameters that are no more: see `ResidualDecay`. With
    `residual_decay=0`, and for other optimizers, nothing is lost.

    Optimizers of Adam's kind divide by second moments, here of one rank's gradient and not of the mean. For them

    - beta1 becomes beta1^7 where `local_share` is below 1 and `every` is 1: the residual averages in
      place of momentum;
    - beta2 becomes beta2^(1/P), and at least 0.998, but in RAdam;
    - the learning rate is divided by the root of a ratio that is measured: the squared norm of the mean gradient over the mean
      squared norm of the ranks' gradients, see `SampledRatio`;
    - where more than four replicas exchange in each step, second moments become their mean over the replicas, each about once
      in a thousand exchanges, see `SharedMoments`.

    Around `oktopk.torch.AdamW` the step of the optimizer is computed in the pass that selects, and parameters are written once.

    Decoupled weight decay (of torch's AdamW and Muon, and of groups with `decoupled_weight_decay`) acts on the reference, on
    parameters that have had a gradient on some rank since the last exchange. Coupled decay is part of the gradient. What else an
    optimizer does is part of its update.

    Where a gradient is not finite, this rank's optimizer does not step. With nonfinite="skip" the others go on. With "raise" all
    ranks raise in the exchange; those that stepped keep their update in the residual. So it is where the gradient of a parameter
    is not clipped and has a norm above (1 - momentum) / 4P of the largest float, by a learning rate above 1 less. Where an
    exchange is skipped or raises so, residuals are cut to 1/4P of the largest float: more cannot be summed.

    What has a reference, a residual and second moments of its own is a *replica*: a rank, or the ranks of a host together.

    - `replica="rank"`: as above, where P is the number of ranks.
    - `replica="host"`: in every step the ranks of a host make each `p.grad` the mean of theirs, the same bits on all of them, and
      each optimizer steps on that: an elementwise one on the rank's shard alone, others on all parameters. In an exchange each
      rank sends one shard of what changed to the ranks of other hosts that have the same shard: a host sends what one rank would.
      The update comes back to all ranks of the host, whose parameters are then equal, bit for bit. A host counts by its ranks:
      reference := decay · (reference - sum over hosts of ranks / P · u).
    - `replica="summed"`: the same, of gradients that are equal on the ranks of a host already, as DDP over them makes them.
    - Parameters that `fully_shard` made: the ranks that shard one model, after FSDP2 has reduced its gradient. `replica` stays
      "auto", and `optimizer.replica` is "shards". Each rank exchanges its shards with the ranks that hold the same ones.
    - `replica="auto"`: "host" where there are several hosts with several ranks each and the method reduces shards, else "rank".

    With hosts, H of them, read 1/H for 1/P where betas, the ratio and the default of `local_share`
    are meant. Where hosts have unlike numbers of ranks, w = ranks / P, betas take the sum over
    hosts of w^2 for it, and the default of `local_share` is w, with Adam's kind at most as above.
    `reducer.residual` is then a shard of the host's, times its ranks. A gradient that is not finite
    on one rank is not on its whole host. With "summed" the ranks of a host compare the norms of
    their gradients, in the first 20 exchanges and in every tenth. A parameter has a gradient where
    any rank of the host has one. `optimizer.replica` and `repr` say which it is.

    Elementwise are torch's Adam, AdamW, RAdam, Adamax, SGD and RMSprop, `oktopk.torch.AdamW`, and optimizers with an
    attribute `elementwise = True`; not where hooks are on their step. What such an optimizer keeps of a parameter is of this
    rank's elements of it, in one dimension; in `optimizer.state`, which the wrapped one has while it steps alone; and in a state
    under "updates" alone. The smallest host has G ranks: a rank keeps n/G
    elements of n, and those of larger hosts that have no shard keep none. With `every` > 1 it steps on all parameters, as the
    ranks of a host would have to tell each other their shards between exchanges.

    Ranks that shard one model agree in each step on whether all gradients are finite, else none of them steps; on the norm for
    `clip_norm`, which is that of the whole gradient; on the ratio; and on how an exchange ended: an error of one rank is raised
    on all ranks, and a step that one skips is skipped. See docs/ddp.md.

    Elements that a user writes between steps become the reference, and what was not sent of them is dropped; one that is
    written with what it holds already counts as not written, unless another rank has taken it. All ranks must write the same,
    within `agreed` where that depends on what parameters hold. Where `every` > 1, writing outside of it also drops the
    parameter's steps since the last exchange. Ranks whose references part are named within ten exchanges, those that write
    unlike values in the next one.

    Memory: beside the reducer's 8n bytes, residual and update, 4n for the reference. With hosts of G ranks the reducer has 4n for
        the update, 4n for gradients, and 12n/G for shards of residual, sums and displacement; beside it 4n for the reference, 4n
        for the host's residual, and while a step runs 4n of scratch, or the parameters' size once more. Where the optimizer steps
        on a shard, that of its parameters, and while a step runs some 16n/G.
    Traffic: that of the method, once in `every` steps; no message between. Where elements were written outside of `agreed`, and
        the ranks' references differ by that, two bits an element of these parameters in the next exchange, see
        `Reference.reconcile`, which reports leave out. For Adam's kind, in the first 20 exchanges and in
        every tenth, a dense sum of a thousandth of the gradient, of 4,096 to 65,536 values. With more than four replicas, and
        `every` of 1, in the same exchanges 20.5 (P-1)/P bits for each of a hundredth of the elements. With hosts all these are of
        one rank a shard between hosts. Inside a host each rank reads 8n bytes of gradients and of their mean in shared or peer
        memory, in every step but for "summed", and in each exchange 4n bytes of residuals; beside it control messages of some
        words. Among
        the ranks that shard one model a control allgather of six int64 a step, of one more with a GradScaler, of one in each
        exchange and in each average of second moments, of three in each measurement of the ratio.
    Source: Li & Hoefler, PPoPP 2022, algorithm 2, where the learning rate stands before the residual: the update of SGD.
    """

    reducer: GradientAllreduce
    residual_decay: float
    """The power by which residuals forget; 0 where nothing is lost."""

    _sharded: ShardStep | None = None

    def _options(self) -> dict[str, Any]:
        return levels_of(self._arguments["replica"]) if self._replica.plain else {"levels": "flat"}

    def _prepare(self, gradient_type: str, overlap: bool) -> None:
        self._interval: int = self._arguments["every"]
        self._sizes = [parameter.numel() for parameter in self._parameters]
        size, group = self.reducer.transport.size, self.reducer.group
        ranks = Counter(self.reducer.hosts or range(size)).values()  # of each replica
        self._replicas = len(ranks)
        ranks_here = 1 if group is None else group.host.size
        equal_replicas = size**2 / sum(each**2 for each in ranks)  # they count as so many of one size
        often = is_adaptive(self.inner) and self._interval == 1 and self._replicas > 1
        share, power = self._arguments["local_share"], self._arguments["residual_decay"]
        varies = share is None and often and equal_replicas <= SHARED_BY
        if share is None:
            share = min(ranks_here / size, most_share(equal_replicas) if often else 1.0)
        if power is None:
            power = ADAM_DECAY if often else 0.0
        self._share, self.residual_decay = LocalShare(share, varies), float(power)
        averages = share < 1 and self._interval == 1
        self._forgetting = ResidualDecay(self.residual_decay)
        self._local = LocalStep(self.inner, equal_replicas, averages)
        self._replica = self._replica_in_levels()
        self._as_wrapped = self._replica.watched()
        self._reference = Reference(
            self._parameters, self.reducer, self._memory, self._share.now, self._as_wrapped
        )
        self._sharded = self._new_shard_step()
        self._left_out = " and the moments of all replicas but one" * (self._replicas > 1)
        if self._sharded is not None:
            self._left_out = " and all moments"
        self._selecting = self._new_selecting_step()
        self._applied = self._update
        self._kept: list[Tensor] | None = None  # what the parameters held, within `agreed`
        self._ratio: SampledRatio | None = None
        if is_adaptive(self.inner):
            self._ratio = SampledRatio(self._replica, self.reducer, self._memory)
        self._moments: SharedMoments | None = None
        if self._ratio is not None and self._interval == 1 and self._replicas > SHARED_BY:
            self._moments = SharedMoments(
                self.inner, self._replica, self.reducer, self._memory, sharded=self._sharded
            )
        self._loaded: dict[str, Any] | None = None  # a state whose parameters may be loaded after it
        self._exchanges = 0
        self._failed = False  # the last exchange has, on all ranks
        # why weights beside the parameters are refused; None until these have moved
        self._beside: str | None = None
        self._begin_window()
        self._counted = [*self._parameters, *self._tables.tables]
        groups, self._hash = groups_of([self.inner]), {REFERENCE: 0}
        self._agreement = StepAgreement(self._compared, len(self._counted), self._reconcile)
        self._replica.meet(self.reducer.transport, self.reducer.advice, groups)
        if self._sharded is not None:  # now that nothing above can raise
            self._sharded.adopt()

    def _compared(self) -> list[dict[str, Any]]:
        """What is compared over the ranks in each exchange: settings of the groups, and the hash of the reference."""
        groups = self._agreed(self.param_groups)
        if self._interval > 1:
            # of rates and decays in the steps since the last exchange, which may have been others
            decays = zip(groups, self._local.factors, strict=True)
            groups = [{**group, "decay since the last exchange": factor} for group, factor in decays]
        return [*groups, self._hash]

    def _agreed(self, groups: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Of the optimizer's groups, or those of a state, what all ranks agree on; ranks of one replica on all of it."""
        if self._replica.plain and self.reducer.group is None:
            return agreed_settings(self.inner, groups, self._tables.tables)
        return groups

    def _replica_in_levels(self) -> Replica:
        """What this rank is a part of, now that it is known which ranks share a host."""
        if self.reducer.group is None:
            return self._replica
        if self._arguments["replica"] == "summed":
            return SummedReplica(self._parameters, self.reducer)
        return HostReplica(self._parameters, self.reducer, self._memory)

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

    @property
    def local_share(self) -> float:
        """Of its residual that a replica's own parameters hold, as of now."""
        return self._share.now

    @property
    def replica(self) -> str:
        """What has a reference of its own: "rank", "host", "summed" or "shards"."""
        return self._replica.name

    def _new_shard_step(self) -> ShardStep | None:
        """What steps on this rank's shard; None where each rank steps on all parameters. Alike on all ranks. Collective.

        Between two exchanges the ranks of a host would have to tell each other what became of their shards.

        Raises:
            ValueError: a rank has no memory for it; on every rank alike.
        """
        transport, reducer = self.reducer.transport, self.reducer
        if reducer.group is None or self._replicas == transport.size or self._interval > 1:
            return None
        if not all(transport.allgather_objects(is_elementwise(self.inner))):
            return None
        with transport.together():
            sharded = ShardStep(self.inner, self._replica, reducer, self._memory, self._reference)
        return sharded

    def _new_selecting_step(self) -> SelectingStep | None:
        """What takes the wrapped optimizer's steps in the pass that selects; None where they are its own. Alike on all ranks."""
        inner, reducer = self.inner, self.reducer
        if self._interval > 1 or reducer.group is not None or self._tables:
            return None
        if not (self._replica.plain and takes_steps(inner)):
            return None
        return SelectingStep(inner, self._parameters, reducer, self._as_wrapped)

    def _begin_window(self) -> None:
        self._steps = 0  # since the last exchange
        self._whole = False  # in this step each parameter has a gradient
        self._selected = False  # this step's moves are not in the parameters: the exchange computes them
        self._broken = False  # a gradient was not finite, and all ranks are to raise
        self._problem = ""  # of a step, for the exchange to raise
        self._present = bytearray(len(self._parameters))  # has had a gradient
        self._local.begin_window()

    # a step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As the wrapped optimizer's."""
        self.inner.zero_grad(set_to_none)

    def _step(self, measure: bool, grad_scaler: GradScaler | None) -> None:
        if self._kept is not None:
            raise RuntimeError(
                "step() within `with optimizer.agreed():`, where parameters are not this rank's own: leave it first"
            )
        with self._replica.gradients() as unreadable:
            self._step_on_tensors(measure, grad_scaler, unreadable)

    def _step_on_tensors(self, measure: bool, grad_scaler: GradScaler | None, unreadable: str) -> None:
        """As `step`, once the replica's tensors have gradients. unreadable: why one has none, in a sentence."""
        if self._only_sets_up_state():
            self._reference.look()
            if not self._as_wrapped.problem:  # else the next step says so on all ranks
                self._take_written()
                self._inner_step()
            self._reference.watch()
            return
        self._reference.look()
        here = self._as_wrapped.problem or unreadable or self._wrapped.unwrapped() or self._unreadable()
        here = here or self._reduced_over_hosts()
        self._problem = problem = self._problem or here
        if self._tables and grad_scaler is not None:  # tables are summed: all skip, or none
            skipped = self._unscale(grad_scaler, problem)
            if skipped is not None:
                if not problem:
                    self._take_written()
                self.report = skipped
                self._reference.watch()
                return
        scaled = grad_scaler is not None
        self._problem = self._replica.refuse(problem, f"step {self.reducer.steps}", scaled, self._steps)
        # a problem may be of another rank of the replica; `_unscale` has answered for tables
        if self._problem and grad_scaler is not None and not self._tables:
            self._answer(grad_scaler)
        finite = not self._problem and self._finite(grad_scaler)
        if not finite and self._selecting is not None:
            self._selecting.forget()
        problem = self._problem  # perhaps of another rank of the replica
        if not self._tables:
            if finite:
                self._step_alone()
        elif not self._step_with_tables(finite, problem):
            return
        self._steps += 1
        self._local.count_decay()
        if self._steps >= self._interval:
            self._exchange(measure, problem or self._own_weights())
        else:
            self._reference.watch()

    def _own_weights(self) -> str:
        """Why an optimizer that has stepped cannot be wrapped, in a sentence; "" if it can."""
        if self._beside is None and not self._selected:
            with nullcontext() if self._sharded is None else self._sharded.in_place():
                if moved := self._moved():
                    self._beside = (
                        own_weights_sentence(self.inner) if keeps_weights(self.inner, moved) else ""
                    )
        return self._beside or ""

    def _moved(self) -> list[Tensor]:
        """The parameters that the optimizer has moved, or their pieces. Waits for a GPU."""
        if self._sharded is not None:
            return self._sharded.moved()
        return [p for p, has in zip(self._replica.parameters, self._reference.moved(), strict=True) if has]

    def _unreadable(self) -> str:
        """Why this rank's gradients cannot be stepped on, in a sentence; "" if they can."""
        if self._sharded is not None and has_step_hooks(self.inner):
            return (
                "the wrapped optimizer, or torch for all optimizers, has hooks on its step, which takes this rank's shard of the "
                "parameters alone: register them before it is wrapped, then each rank steps on all of them"
            )
        gradients = self._gradients()
        if any(map(_is_sparse, gradients)):
            return "a gradient is sparse: name its parameter in sparse=[...], or build the embedding with sparse=False"
        if self._exchanges or self._steps or self._loaded is not None:
            return ""
        if gradients or not self._reference.written():
            return ""
        return (
            "parameters have moved before the first step, and none has a gradient: an optimizer that steps in the backward pass "
            "leaves nothing to exchange. Take one that steps in step()"
        )

    def _reduced_over_hosts(self) -> str:
        """Why this host has no gradient of its own, in a sentence; "" if it has, or had once."""
        group = self.reducer.group
        if group is None or self.report is not None or self._steps:
            return ""
        return reduced_over_hosts(self._wrapped.all, group.host.size)

    def _gradients(self) -> list[Tensor]:
        """Those that are there."""
        return [gradient for p in self._parameters if (gradient := p.grad) is not None]

    @torch.no_grad()
    def _finite(self, scaler: GradScaler | None) -> bool:
        """Whether this rank's gradients are finite, after unscaling; then they are clipped.

        What was written into parameters is taken before they are. Where several ranks are a replica, of its gradient; False, too,
        where another of them has a problem. A GPU is waited for once, for both.
        """
        replica, reducer = self._replica, self.reducer
        found: list[Tensor] = []
        if scaler is not None:
            found += self._answer(scaler, unscale=True).values()
        elif hasattr(self, "found_inf"):
            raise RuntimeError(
                "no GradScaler was passed to step(): take bfloat16, which needs none, or call step(grad_scaler=...)"
            )
        healthy = replica.take_mean()
        gradients = self._gradients()
        self._whole = len(gradients) == len(self._parameters)
        norms = GradientNorms(gradients, self._reference.vector.device)
        written = self._reference.changed()  # compared while a GPU computes the norms
        if self._selecting is not None:
            self._selecting.look()
        changed, *overflows = norms.read([written, *found], square=replica.sharded)
        self._take_written(changed)
        loaded, self._loaded = self._loaded, None
        if not healthy:  # the exchange raises
            return False
        overflowed = any(overflows)
        if not overflowed and not norms.finite:  # a rate may be a tensor, whose GPU would be waited for
            ranks = reducer.transport.size
            norms.look_closely(math.inf if self.clip_norm else most_norm(self.param_groups, ranks))
        what = f"step {reducer.steps}"
        ready = replica.ready("", what, overflowed, norms.finite, norms.square, self._steps)
        self._problem = ready.problem
        if loaded is not None and self._steps < ready.steps and self._reference.fits(loaded):
            self._go_on(loaded)  # of this shard nothing was written
        if ready.problem:
            return False
        if ready.overflowed or (not ready.finite and scaler is not None and replica.several):
            assert scaler is not None
            for flag in self._answer(scaler).values():  # the Inf may be another rank's
                flag.fill_(1.0)
            return False
        if not ready.finite:
            self._broken = self._broken or reducer.settings.nonfinite == "raise"
            return False
        if self.clip_norm:
            norms.clip(self.clip_norm, ready.norm)
            replica.clipped()
        return True

    def _step_with_tables(self, finite: bool, problem: str) -> bool:
        """Sum the tables' gradients, then step; a rank whose gradients are not finite steps on the tables alone. Collective.

        Returns:
            False where the step is skipped on all ranks, since a table's gradient is not finite.
        """
        dense = [(p, p.grad) for p in self._parameters]
        self._problem = ""  # raised here
        with self._memory.stream_scope():
            reduced = self._tables.reduce(problem)
        if not reduced:
            self.report = self.reducer.skip_together(True)
            self._reference.watch()
            return False
        try:
            for table, reducer in zip(self._tables.tables, self._tables.reducers, strict=True):
                if reducer.sum is None:  # no rank has touched a row: as in torch alone
                    table.grad = None
            if not finite:
                for parameter, _ in dense:
                    parameter.grad = None
            self._step_alone()
        finally:
            for parameter, gradient in dense:
                parameter.grad = gradient
            self._tables.put_back()
        return True

    def _step_alone(self) -> None:
        """The wrapped optimizer's step on this rank's gradient."""
        if self._whole and not self._tables:
            self._present = bytearray(b"\1") * len(self._parameters)
        else:
            present = [p.grad is not None for p in self._parameters]
            self._present = bytearray(map(operator.or_, self._present, present))
        self._local.take(1.0 if self._ratio is None else self._ratio.scale, self._step_wrapped)

    def _step_wrapped(self) -> None:
        self._selected = self._selecting is not None and self._selecting.run()
        if not self._selected:
            self._reference.stepped = self._inner_step()

    def _inner_step(self) -> tuple[Tensor, Tensor] | None:
        """The wrapped optimizer's own step. Returns `Reference.stepped`."""
        if self._sharded is not None:
            return self._sharded.step()
        self.inner.step()
        return None

    # an exchange

    @torch.no_grad()
    def _exchange(self, measure: bool, problem: str) -> None:
        """Select and sum what the optimizers changed since the last exchange, and move the reference. Collective."""
        reference, transport = self._reference, self.reducer.transport
        if not self._selected:
            reference.look()  # the optimizer, or a hook of it, may have moved parameters
        new = self._exchanges < _FIRST or self._exchanges % _EVERY == 0
        if new or self._failed or reference.marked:
            self._hash[REFERENCE] = reference.digest()
        if new:
            problem = self._replica.unequal(problem)
        self._warn_of_lost()
        first = self.report is None and transport.rank == 0 and not problem
        if first and (warning := reduced_twice_warning(self._wrapped.all, "updates", self._replica.averaged)):
            warnings.warn(warning, stacklevel=4)
        tables = bytes(table.grad is not None for table in self._tables.tables)
        token = self._agreement.tell(bytes(self._present) + tables)
        if self._selected and self._selecting is not None and not problem:
            moved: Displacement = self._selecting.displacement
        else:
            # where there is a problem nothing can be read: this window's moves stay in the parameters, but for those of a
            # shard, which are dropped
            moved = reference.displacement(
                bytes(len(self._present)) if problem else self._present, flagged=self._broken
            )
        stepped = any(self._present)
        absent = () if all(self._present) else missing_spans(self._sizes, self._present)
        what, applied, anywhere = f"step {self.reducer.steps}", False, b""
        failed: Exception | None = None
        report = self.report
        try:
            with self._memory.stream_scope():
                self.report = report = self.reducer.step(
                    moved, measure=measure, problem=problem, absent=absent, token=token
                )
            applied = not report.skipped
            if applied:
                anywhere = self._agreement.hear(self.reducer.tokens, transport)
        except (NonFiniteGradientError, ValueError) as error:
            failed = self._replica.of_world(error)
        except MissingRanksError as error:
            raise self._replica.of_world(error) from None
        failed, skipped = self._replica.outcome(failed, what, not applied)
        if applied and (skipped or failed is not None):
            self.reducer.take_back()
        if skipped or isinstance(failed, NonFiniteGradientError):
            reference.residual.bound()
        if failed is not None:
            self._failed = True
            if problem:  # the other ranks have stepped, this one has not
                reference.residual.gather()
                present = self._present
                self._exchanges += 1
                self._begin_window()
                self._present = present
            else:
                self._end_window()
            raise failed
        assert report is not None
        report.every = self._interval
        report.replicas = self._replicas
        factors, report.skipped = None, skipped
        if not skipped:
            reference.subtract_update()
            reference.settle()
            if self.reducer.tokens is not None:  # the ranks' hashes are equal
                reference.marked.clear()
            factors = self._local.decay_of(self._replica.parameters, anywhere)
            parameters = self._replica.parameters
            factor = self._forgetting.count(any(self._local.moved(parameters, anywhere)))
            reference.residual.scale(factor, self._local.moved(parameters, anywhere))
            if new:
                self._share.renew(self.param_groups, self._forgetting.exchanges)
        self._failed = False
        report.row_bytes = sum(each.bytes for each in self._tables.reports)
        self._end_window(factors)
        if new and self._ratio is not None:
            self._ratio.measure()
            if self._moments is not None:
                with self._replica.together(what):
                    self._moments.average(self._ratio.measured, stepped)
            _count(report, self.reducer.take_traffic())
        _count(report, self._replica.take_traffic())

    def _end_window(self, factors: Sequence[float] | None = None) -> None:
        """Make the parameters what follows from reference and residual, and begin a new window. factors: of `Reference.show`."""
        self._reference.residual.gather()
        self._reference.set_share(self._share.now)
        self._reference.show(factors)
        self._exchanges += 1
        self._begin_window()

    # what users write

    def _reconcile(self) -> bytes:
        """Where tokens tell that ranks may have parted: give all of them what some have written. Collective."""
        self._reference.reconcile(self.reducer.transport)
        self._hash[REFERENCE] = self._reference.digest()
        return b""

    @torch.no_grad()
    def _take_written(self, changed: bool | None = None) -> None:
        """Make what was written to since the last step the reference. changed: as `Reference.written`.

        Raises:
            RuntimeError: a parameter has another type or shape than at construction; on this rank alone.
        """
        if changed is None:  # else the step has looked
            self._reference.look()
            if self._as_wrapped.problem:
                raise RuntimeError(self._as_wrapped.problem)
        reference, loaded = self._reference, self._loaded
        numbers = reference.written(by_version=not self._steps, changed=changed)
        if numbers and loaded is not None and self._reference.fits(loaded):
            self._go_on(loaded)
        elif numbers:
            reference.take(numbers)
            reference.watch()

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Within, the parameters are round(reference), equal on all ranks: to evaluate, to save, and to write into them.

        After weights were loaded outside of it they may differ between ranks until the next exchange: take a step first.

        Not collective. `step` raises within; `state_dict` is as outside.
        """
        if self._kept is not None:
            yield
            return
        with torch.no_grad():
            self._take_written()
            self._kept = self._reference.show_agreed()
        self._replica.reshard()
        try:
            yield
        finally:
            kept, self._kept = self._kept, None
            if kept is not None:  # not closed within
                with torch.no_grad():
                    self._reference.leave_agreed(kept)
                self._replica.reshard()

    # state

    @property
    def gradient(self) -> Any:
        """float32[n]: this rank's gradient as it is now, on the host; zero where there is none."""
        with self._replica.gradients():
            parts = [torch.zeros_like(p) if p.grad is None else p.grad for p in self._parameters]
            return torch.cat([part.detach().reshape(-1).float() for part in parts]).cpu().numpy()

    def state_dict(self) -> dict[str, Any]:
        """As `DistributedOptimizer.state_dict`, and under "updates" the reference and what this rank's parameters hold.

        Between exchanges, too. Save the model within `agreed`, or each rank its own. Where the model holds either of these when
        the state is loaded, training goes on bit for bit; also where each rank's own is loaded after it.

        What the wrapped optimizer keeps is this rank's own as well, and is in "updates" once more, by the same tensors, for
        `torch.distributed.checkpoint`; there of sharded parameters this rank's shards, as plain tensors. What it keeps of a shard
        of a host is there alone. All tensors are on the host.
        """
        return super().state_dict()

    def _state(self) -> dict[str, Any]:
        with self._lent():
            state = super()._state()
        state["state"] = on_host(state["state"])
        optimizer = {name: state[name] for name in ("state", "param_groups")}
        optimizer["state"] = self._replica.saved(optimizer, self.param_groups)
        own = self._own_state() | {"optimizer": optimizer}
        if self._sharded is not None:  # else other ranks, or other optimizers, would take it for theirs
            state["state"] = {}
        return {**state, "updates": by_rank(own, self.reducer.transport.rank)}

    @torch.no_grad()
    def _own_state(self) -> dict[str, Any]:
        if self._kept is None:
            self._take_written()
        return {
            **self._reference.state(self._kept),
            "steps": self._steps,
            "exchanges": self._exchanges,
            "present": list(self._present),
            "factors": self._local.factors,
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

        def check(given: dict[str, Any], same: dict[str, Any], lost: bool) -> None:
            given["whether the state is of updates"] = own is not None
            if own is not None:
                self._check_own(own)
                given["what the residual of the state has forgotten"] = tuple(own["forgetting"])
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

        unwritten = not self._reference.written(by_version=not self._steps)
        self._load_parts(state, check, empty, also)
        with torch.no_grad():
            self._reference.look()
            self._reference.residual.gather()
            self._begin_window()
            fits = own is not None and all(transport.allgather_objects(self._reference.fits(own)))
            fits = not self._replica.any(not fits, "load_state_dict")
            if own is not None and self._not_saved:
                own = between_exchanges(own)
            if own is not None:
                # without moments, which are loaded, and would take 8n bytes until the next step
                own = {name: held for name, held in own.items() if name != "optimizer"}
            if self._selecting is not None:
                self._selecting.forget()
            self._loaded = own
            self._load_counts(own)
            if fits and own is not None:
                self._go_on(own)
                return
            # a rank's own parameters, which differ a little, are no reference; what a user has written is
            if own is not None or not all(transport.allgather_objects(unwritten)):
                self._reference.take_all()
            self._reference.show()

    def _load_counts(self, own: dict[str, Any] | None) -> None:
        """Load what is neither the reference's nor of steps since the last exchange; None: as at construction."""
        self._exchanges = 0 if own is None else own["exchanges"]
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
                "the state has moments of one shard, and here each rank steps on all parameters: go on with every=1, the same "
                "optimizer and no hooks on its step"
            )
        if own is None:
            kept: dict[Any, Any] = optimizer["state"]
            return kept
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
        self._steps, self._present = own["steps"], bytearray(own["present"])
        self._local.factors = list(own["factors"])
        self._reference.load(own)

    @state_errors(what="the state of updates is damaged: ")
    def _check_own(self, own: Any) -> None:
        """Raise StateError where a state cannot be loaded on this rank."""
        self._replica.check_shard(own["shard"])
        self._reference.check_state(own)
        counts = own["steps"], own["exchanges"], len(own["present"]), len(own["factors"])
        own["ratio"] is None or (own["ratio"]["measured"], own["ratio"]["squares"])
        ResidualDecay.check_state(own["forgetting"])
        LocalShare.check_state(own["local_share"])
        own["optimizer"]["state"], own["optimizer"]["param_groups"]
        wanted = len(self._parameters), len(self.param_groups)
        if counts[2:] != wanted or not 0 <= counts[0] < self._interval or counts[1] < 0:
            raise StateError(
                f"the state has {counts[2]} parameters in {counts[3]} groups, {counts[0]} steps after an exchange; the optimizer "
                f"has {wanted[0]} in {wanted[1]} and exchanges every {self._interval}"
            )

    def _compare_states(self, state: dict[str, Any]) -> None:
        numbers_and_names = numbers_of(self._agreed(state["param_groups"])), names_kept(state["state"])
        ranks, kept = zip(*self.reducer.transport.allgather_objects(numbers_and_names), strict=True)
        refuse(groups_difference(ranks) or kept_difference(kept))

    def __deepcopy__(self, memo: dict[int, Any]) -> UpdatesOptimizer:
        """As `DistributedOptimizer.__deepcopy__`. Collective."""
        if not self._replica.plain:
            raise RuntimeError(
                "a DistributedOptimizer of sharded parameters cannot be copied, as FSDP2's modules cannot: save its state_dict()"
            )
        with self._lent():
            copy.deepcopy(self.inner, memo)
        with torch.no_grad():
            for parameter, view in zip(self._parameters, self._reference.views, strict=True):
                memo[id(parameter)].detach().copy_(view)  # equal on all ranks, as at construction
        copied: UpdatesOptimizer = super().__deepcopy__(memo)  # type: ignore[assignment]
        with torch.no_grad():
            own = self._own_state()
            copied._reference.residual.gather()
            copied._load_counts(own)
            copied._go_on(own)
        return copied

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
            self._take_written()
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


def _count(report: StepReport, sent: Traffic) -> None:
    """Add what was sent beside a step to its report."""
    for name in ("words", "messages", "bytes", "bytes_between", "control_words", "control_messages"):
        setattr(report, name, getattr(report, name) + getattr(sent, name))
