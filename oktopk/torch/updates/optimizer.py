"""Updates in place of gradients: each rank's optimizer steps first, then what it changed is selected and summed."""

from __future__ import annotations

import math
import operator
import warnings
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from collectives.errors import MissingRanksError
from oktopk.allreduce import NonFiniteGradientError
from oktopk.displacement import Displacement
from oktopk.settings import DENSE_ABOVE
from oktopk.torch.adamw import SelectingStep, takes_steps
from oktopk.torch.agreement import groups_of, reduced_over_hosts, reduced_twice_warning
from oktopk.torch.arguments import levels_of
from oktopk.torch.gradients import missing_spans
from oktopk.torch.local_step import (
    SHARED_BY,
    LocalStep,
    has_step_hooks,
    is_adaptive,
    most_share,
)
from oktopk.torch.own_weights import keeps_weights, own_weights_sentence
from oktopk.torch.replica import Replica
from oktopk.torch.updates.gradient_check import GradientCheck
from oktopk.torch.updates.gradient_norms import GradientNorms, most_norm
from oktopk.torch.updates.host_reference import HostReference
from oktopk.torch.updates.host_replica import HostReplica, SummedReplica
from oktopk.torch.updates.local_share import LocalShare
from oktopk.torch.updates.reference_parameters import ReferenceParameters
from oktopk.torch.updates.residual_decay import ADAM_DECAY, ResidualDecay
from oktopk.torch.updates.sampled_ratio import SampledRatio
from oktopk.torch.updates.shard_step import ShardStep, is_elementwise
from oktopk.torch.updates.shared_moments import SharedMoments
from oktopk.torch.updates.state import UpdatesState
from oktopk.torch.updates.step_agreement import UpdatesAgreement
from oktopk.torch.updates.window import Window

_is_sparse = operator.attrgetter("is_sparse")


class UpdatesOptimizer(UpdatesState, sends="updates"):
    """What `DistributedOptimizer(optimizer, sends="updates")` makes, and by default of AdamW: the optimizer comes first.

    In each step the wrapped optimizer steps on this rank's own gradient. What it changed joins the residual. Entries of the
    residuals are summed over the ranks, by default those that `union` selects, and Ok-Topk where the density is at least 5 %.
    With Adam's kind and an exchange in each step the density falls from 25 % over the first 100, where nothing is said of them.
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
    four replicas it begins five times as large, if the density begins with 25 %, is small after 500
    exchanges, and grows as the learning rate falls, to six times as much, see `LocalShare`; of more it is at most 0.1 over the
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
        for the host's residual, in a dense step 4n of scratch, and the parameters' size where the optimizer steps on all of
        them. Where it steps on a shard, that of its parameters, and while a step runs some 16n/G.
    Traffic: that of the method, once in `every` steps; no message between. Where elements were written outside of `agreed`, and
        the ranks' references differ by that, two bits an element of these parameters in the next exchange, see
        `ReferenceParameters.reconcile`, which reports leave out. For Adam's kind, in the first 20 exchanges and in
        every tenth, a dense sum of a thousandth of the gradient, of 4,096 to 65,536 values. With more than four replicas, and
        `every` of 1, in the same exchanges 20.5 (P-1)/P bits for each of a hundredth of the elements. With hosts all these are of
        one rank a shard between hosts. Inside a host each rank reads 8n bytes of gradients and of their mean in shared or peer
        memory, in every step but for "summed", and in each exchange 4n bytes of residuals; beside it control messages of some
        words. Among
        the ranks that shard one model a control allgather of six int64 a step, of one more with a GradScaler, of one in each
        exchange and in each average of second moments, of three in each measurement of the ratio.
    Source: Li & Hoefler, PPoPP 2022, algorithm 2, where the learning rate stands before the residual: the update of SGD.
    """

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
        large = self.reducer.settings.density_at(0) >= DENSE_ABOVE
        self._share, self.residual_decay = LocalShare(share, varies, large), float(power)
        averages = share < 1 and self._interval == 1
        self._forgetting = ResidualDecay(self.residual_decay)
        self._local = LocalStep(self.inner, equal_replicas, averages)
        self._replica = self._replica_in_levels()
        self._as_wrapped = self._replica.watched()
        self._reference = (ReferenceParameters if group is None else HostReference)(
            self._parameters, self.reducer, self._memory, self._share.now, self._as_wrapped
        )
        self._check = self._new_check()
        self._sharded = self._new_shard_step()
        self._left_out = " and the moments of all replicas but one" * (self._replicas > 1)
        if self._sharded is not None:
            self._left_out = " and all moments"
        self._selecting = self._new_selecting_step()
        self._applied = self._update
        if is_adaptive(self.inner):
            self._ratio = SampledRatio(self._replica, self.reducer, self._memory)
        self._moments: SharedMoments | None = None
        if self._ratio is not None and self._interval == 1 and self._replicas > SHARED_BY:
            self._moments = SharedMoments(
                self.inner, self._replica, self.reducer, self._memory, sharded=self._sharded
            )
        # why weights beside the parameters are refused; None until these have moved
        self._beside: str | None = None
        self._window = Window(self._interval, len(self._parameters), self._local)
        self._agreement = UpdatesAgreement(
            self.inner,
            self._local,
            self._reference,
            self.reducer.transport,
            every=self._interval,
            single=self._replica.plain and group is None,
        )
        self._replica.meet(self.reducer.transport, self.reducer.advice, groups_of([self.inner]))
        if self._sharded is not None:  # now that nothing above can raise
            self._sharded.adopt()

    def _replica_in_levels(self) -> Replica:
        """What this rank is a part of, now that it is known which ranks share a host."""
        if self.reducer.group is None:
            return self._replica
        if self._arguments["replica"] == "summed":
            return SummedReplica(self._parameters, self.reducer)
        return HostReplica(self._parameters, self.reducer, self._memory)

    def _new_check(self) -> GradientCheck | None:
        """What checks gradients on a GPU; None on CPUs. Collective.

        Raises:
            ValueError: a rank has no memory for it; on every rank alike.
        """
        check = None
        with self.reducer.transport.together(ValueError):
            if self._parameters[0].is_cuda:
                kernels = self.reducer.backend.kernels
                check = GradientCheck(self._parameters, self._reference, kernels, self._memory)
        return check

    def _new_shard_step(self) -> ShardStep | None:
        """What steps on this rank's shard; None where each rank steps on all parameters. Alike on all ranks. Collective.

        Between two exchanges the ranks of a host would have to tell each other what became of their shards.

        Raises:
            ValueError: a rank has no memory for it; on every rank alike.
        """
        transport, reference = self.reducer.transport, self._reference
        if not isinstance(reference, HostReference):
            return None
        if self._replicas == transport.size or self._interval > 1:
            return None
        if not all(transport.allgather_objects(is_elementwise(self.inner))):
            return None
        with transport.together():
            sharded = ShardStep(self.inner, self._replica, self.reducer, self._memory, reference)
        return sharded

    def _new_selecting_step(self) -> SelectingStep | None:
        """What takes the wrapped optimizer's steps in the pass that selects; None where they are its own. Alike on all ranks."""
        inner, reducer = self.inner, self.reducer
        if self._interval > 1 or reducer.group is not None:
            return None
        if not (self._replica.plain and takes_steps(inner)):
            return None
        return SelectingStep(inner, self._parameters, reducer, self._as_wrapped)

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
        window, what, scaled = self._window, f"step {self.reducer.steps}", grad_scaler is not None
        here = self._as_wrapped.problem or unreadable or self._wrapped.unwrapped() or self._unreadable()
        problem = window.problem or here or self._reduced_over_hosts()
        window.problem = self._replica.refuse(problem, what, scaled, window.steps)
        if window.problem and grad_scaler is not None:  # perhaps of another rank of the replica
            self._answer(grad_scaler)
        finite = not window.problem and self._finite(grad_scaler)
        if finite:
            try:
                self._step_alone()
            except Exception as error:
                if self.reducer.transport.size == 1:
                    raise
                window.raised = error  # on this rank alone, perhaps: the exchange tells the others
                window.problem = f"the wrapped optimizer raised {type(error).__name__}: {error}"
                self._reference.watch()  # what it has moved is no user's write
        if self._selecting is not None and (window.raised is not None or not finite):
            self._selecting.forget()
        if window.count_step():
            self._exchange(measure, window.problem or self._own_weights())
        else:
            self._reference.watch()

    def _own_weights(self) -> str:
        """Why an optimizer that has stepped cannot be wrapped, in a sentence; "" if it can."""
        if self._beside is None and not self._window.selected:
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
            return "a gradient is sparse: build the embedding with sparse=False, or take sends='gradients'"
        if not self._window.is_first_step or self._loaded is not None:
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
        if group is None or self.report is not None or self._window.steps:
            return ""
        return reduced_over_hosts(self._wrapped.all, group.host.size)

    def _gradients(self) -> list[Tensor]:
        """Those that are there."""
        return [gradient for p in self._parameters if (gradient := p.grad) is not None]

    @torch.no_grad()
    def _finite(self, scaler: GradScaler | None) -> bool:
        """Whether this rank's gradients are finite, after unscaling; then they are clipped.

        What was written into parameters is taken before they are. Where several ranks are a replica, of its gradient; False, too,
        where another of them has a problem. A GPU is waited for once for both, and before that for flags of a GradScaler.
        """
        replica, reducer, window = self._replica, self.reducer, self._window
        inf_flags: list[Tensor] = []
        if scaler is not None:
            inf_flags += self._answer(scaler, unscale=True).values()
        elif hasattr(self, "found_inf"):
            raise RuntimeError(
                "no GradScaler was passed to step(): take bfloat16, which needs none, or call step(grad_scaler=...)"
            )
        healthy = replica.take_mean()
        gradients = self._gradients()
        window.whole = len(gradients) == len(self._parameters)
        check = None if self._check is None else self._check.begin()
        norms = GradientNorms(gradients, self._reference.vector.device, check)
        written = self._reference.changed(compare=check is None)  # while a GPU computes the norms
        if self._selecting is not None:
            self._selecting.look()
        changed, overflows = norms.read(written, inf_flags, square=replica.sharded)
        self._take_written(changed)
        loaded, self._loaded = self._loaded, None
        if not healthy:  # the exchange raises
            return False
        overflowed = any(overflows)
        if not overflowed and not norms.finite:  # a rate may be a tensor, whose GPU would be waited for
            ranks = reducer.transport.size
            norms.look_closely(math.inf if self.clip_norm else most_norm(self.param_groups, ranks))
        what = f"step {reducer.steps}"
        ready = replica.ready("", what, overflowed, norms.finite, norms.square, window.steps)
        window.problem = ready.problem
        if loaded is not None and window.steps < ready.steps and self._reference.fits(loaded):
            self._go_on(loaded)  # of this shard nothing was written
        if ready.problem:
            return False
        if ready.overflowed or (not ready.finite and scaler is not None and replica.several):
            assert scaler is not None
            for flag in self._answer(scaler).values():  # the Inf may be another rank's
                flag.fill_(1.0)
            return False
        if not ready.finite:
            window.broken = window.broken or reducer.settings.nonfinite == "raise"
            return False
        if self.clip_norm:
            norms.clip(self.clip_norm, ready.norm)
            replica.buffer_changed()
        return True

    def _step_alone(self) -> None:
        """The wrapped optimizer's step on this rank's gradient."""
        if self._window.whole:
            self._window.add([True] * len(self._parameters))
        else:
            self._window.add(p.grad is not None for p in self._parameters)
        self._local.take(1.0 if self._ratio is None else self._ratio.scale, self._step_wrapped)

    def _step_wrapped(self) -> None:
        self._window.selected = self._selecting is not None and self._selecting.run()
        if not self._window.selected:
            self._inner_step()

    def _inner_step(self) -> None:
        """The wrapped optimizer's own step."""
        if self._sharded is not None:
            self._sharded.step()
        else:
            self.inner.step()

    # an exchange

    @torch.no_grad()
    def _exchange(self, measure: bool, problem: str) -> None:
        """Select and sum what the optimizers changed since the last exchange, and move the reference. Collective."""
        reference, transport, window = self._reference, self.reducer.transport, self._window
        raised = window.raised
        if not window.selected:
            reference.look()  # the optimizer, or a hook of it, may have moved parameters
        new = window.renews
        if new or window.failed or reference.marked:
            self._agreement.look()
        if new:
            problem = self._replica.unequal(problem)
        self._warn_of_lost()
        first = self.report is None and transport.rank == 0 and not problem
        if first and (warning := reduced_twice_warning(self._wrapped.all, "updates", self._replica.averaged)):
            warnings.warn(warning, stacklevel=4)
        token = self._agreement.tell(bytes(window.present))
        if window.selected and self._selecting is not None and not problem:
            displacement: Displacement = self._selecting.displacement
        else:
            # where there is a problem nothing can be read: this window's moves stay in the parameters, but for those of a
            # shard, which are dropped
            displacement = reference.displacement(
                bytes(len(window.present)) if problem else window.present, flagged=window.broken
            )
        stepped = any(window.present)
        absent = () if all(window.present) else missing_spans(self._sizes, window.present)
        what, applied, anywhere = f"step {self.reducer.steps}", False, b""
        failed: Exception | None = None
        report = self.report
        try:
            with self._memory.stream_scope():
                self.report = report = self.reducer.step(
                    displacement, measure=measure, problem=problem, absent=absent, token=token
                )
            applied = not report.skipped
            if applied:
                anywhere = self._agreement.hear(self.reducer.tokens, transport)
        except (NonFiniteGradientError, ValueError) as error:
            failed = self._replica.of_world(error)
        except MissingRanksError as error:
            raise self._replica.of_world(error) from raised
        failed, skipped = self._replica.outcome(failed, what, not applied)
        if applied and (skipped or failed is not None):
            self.reducer.take_back()
        if skipped or isinstance(failed, NonFiniteGradientError):
            reference.residual.bound()
        if failed is not None:
            window.failed = True
            if problem:  # the other ranks have stepped, this one has not
                reference.residual.gather()
                window.end(moved=False, compared=False)
            else:
                self._end_window(compared=False)
            if raised is not None:
                raise failed from raised
            raise failed
        assert report is not None
        report.every = window.every
        report.replicas = self._replicas
        factors, report.skipped = None, skipped
        if not skipped:
            reference.subtract_update()
            reference.settle()
            if self.reducer.tokens is not None:  # the ranks' hashes are equal
                reference.marked.clear()
            factors = self._local.decay_of(self._replica.parameters, anywhere)
            parameters = self._replica.parameters
            factor = self._forgetting.count(any(self._local.may_have_moved(parameters, anywhere)))
            reference.residual.scale(factor, self._local.may_have_moved(parameters, anywhere))
            if new:
                self._share.renew(self.param_groups, self._forgetting.exchanges)
        window.failed = False
        self._end_window(factors, compared=not skipped)
        if new and self._ratio is not None:
            self._ratio.measure()
            if self._moments is not None:
                with self._replica.together(what):
                    self._moments.average(self._ratio.measured, stepped)
            report.add_traffic(self.reducer.take_traffic())
        report.add_traffic(self._replica.take_traffic())

    def _end_window(self, factors: Sequence[float] | None = None, compared: bool = True) -> None:
        """Make the parameters what follows from reference and residual, and begin a new window.

        Args:
            factors: of `ReferenceParameters.show`.
            compared: as `Window.end`.
        """
        self._reference.residual.gather()
        self._reference.set_share(self._share.now)
        self._reference.show(factors)
        self._window.end(compared=compared)
