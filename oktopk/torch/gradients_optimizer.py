"""Gradients of all ranks are reduced, then the wrapped optimizer steps on the mean."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.amp.grad_scaler import GradScaler

from collectives.closing import closes
from oktopk.buckets import BucketedAllreduce
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.damage import StateError, state_errors
from oktopk.results import StepReport
from oktopk.torch.agreement import groups_of, reduced_twice_warning, state_digest
from oktopk.torch.auto import levels_of_state
from oktopk.torch.engine import Engine, OneVector
from oktopk.torch.gradients import GradientsInPlace, dense_views
from oktopk.torch.interop import GRADIENT_TYPES, TYPE_NAMES, TensorMemory
from oktopk.torch.local_step import may_only_set_up
from oktopk.torch.optimizer import DistributedOptimizer
from oktopk.torch.overlap import BackwardBuckets, BucketLayout
from oktopk.torch.step_agreement import StepAgreement


class GradientsOptimizer(DistributedOptimizer, sends="gradients"):
    """What `DistributedOptimizer(optimizer, sends="gradients")` makes, and by default of SGD.

    The gradients of all ranks are reduced, then the wrapped optimizer steps on the average, on which momentum, weight decay and
    Adam act. `step` copies the gradients into one flat buffer of `gradient_type`. Where Ok-Topk's kernels read each other's
    memory, they read each `p.grad` where autograd left it, and round on the way: only a step that is dense or measured fills the
    buffer. Residual and update are float32; the wrapped optimizer sees the update, in the parameters' type. A parameter without a
    gradient on this rank counts as zero, and its residual stays here; where no rank has one, its `p.grad` is None for the wrapped
    optimizer, as in torch alone: neither momentum nor decay moves it.

    A skipped step leaves parameters and optimizer state untouched, unless it was deferred: the report of such a step
    (`Settings.deferred`) is incomplete until the next one begins, or `complete`, and where it stopped or is skipped the optimizer
    has stepped on an update of zero. In buckets that is so of each bucket by itself: the optimizer has stepped on the updates of
    the others, and a parameter that had no gradient on any rank in the step before stays as it is.

    Memory: that of `GradientAllreduce`; n elements of gradients beside autograd's own (where kernels read those in place, once a
        step uses the buffer); n more of updates where parameters are not float32.
    Traffic: that of the method, once a step; at construction two barriers and three allgathers, one of each more where kernels
        read gradients in place.
    Source: Li & Hoefler, PPoPP 2022, algorithm 2.
    """

    _loaded_hook: Any = None  # for states that are loaded into the wrapped optimizer by itself

    def _make_reducer(
        self, comm: Any, method: str, memory: TensorMemory, options: dict[str, Any], bucket_mb: float | None
    ) -> None:
        self._layout = BucketLayout(self._parameters, math.inf if bucket_mb is None else bucket_mb)
        if bucket_mb is None:
            super()._make_reducer(comm, method, memory, options, bucket_mb)
            return
        self._update = torch.zeros(
            self._layout.length, dtype=torch.float32, device=self._parameters[0].device
        )
        updates = [memory.array(self._update[each]) for each in self._layout.slices]
        self.reducer = BucketedAllreduce(comm, self._layout.lengths, method, updates=updates, **options)

    def _prepare(self, gradient_type: str, overlap: bool) -> None:
        """Set up what a step reads and writes, once there is a reducer. Collective."""
        layout, bucketed, dtype = self._layout, self._engine.bucketed, GRADIENT_TYPES[gradient_type]
        tensors: list[GradientTensors] = []
        if bucketed.can_read_tensors:
            kind = TYPE_NAMES[self._parameters[0].dtype]
            for reducer, each in zip(bucketed.reducers, layout.ranges, strict=True):
                tensors.append(reducer.gradient_tensors([p.numel() for p in self._parameters[each]], kind))
        shared = None if self._in_buckets else bucketed.reducers[0].gradient_buffer
        whole = None if shared is None else self._memory.tensor(shared).view(dtype)
        self._gradients = gradients = GradientsInPlace(
            self._parameters, dtype, tensors, layout.ranges, layout.starts, layout.length, whole
        )
        # not of this instance, which the buckets would keep alive
        postponed = partial(may_only_set_up, self.inner)
        self._backward = BackwardBuckets(
            self._parameters, gradients, layout, bucketed, self._memory, overlap, postponed
        )
        # what the wrapped optimizer sees must be of the parameters' type
        self._applied = self._update.to(self._parameters[0].dtype)
        self._like = [self._gradients.as_wrapped.like(n, "meta") for n in range(len(self._parameters))]
        self._updates: list[Tensor] = []  # views of what is applied, made by the first step
        self._said_none = False
        self._changes = 0  # of the parameters, when they were made
        self._counted = [*self._parameters, *self._tables.tables]  # whose gradients may be missing
        self._agreement = agreement = StepAgreement(groups_of([self.inner]), len(self._counted))

        def loaded(inner: torch.optim.Optimizer) -> None:
            # it keeps the agreement alone: the optimizer outlives this one. Torch's ZeRO has a part of the state on each rank
            if not hasattr(inner, "consolidate_state_dict"):
                agreement.state = state_digest(inner.state_dict())

        self._loaded_hook = self.inner.register_load_state_dict_post_hook(loaded)
        self._version = -1  # of the update, when it was handed out; -1: it is not

    def _follow_levels(self, state: object) -> None:
        if "levels" not in self._open or self.reducer.steps:
            return
        self.reducer.meet("load_state_dict")
        wanted = levels_of_state(state, self.length, self._arguments["method"], self._hosts)
        everyone = set(self.reducer.transport.allgather_objects(wanted))
        if everyone != {wanted} or wanted in (None, self.reducer.levels):
            return
        comm, method, memory, options, bucket_mb = self._made_of
        before = self.reducer
        self._make_reducer(comm, method, memory, options | {"levels": wanted}, bucket_mb)
        self._let_go()
        before.close()
        self._engine = Engine(self.reducer, self._tables, memory)
        self._settle()
        self._prepare(self._arguments["gradient_type"], self._arguments["overlap"])

    @property
    def _in_buckets(self) -> bool:
        return isinstance(self.reducer, BucketedAllreduce)

    @property
    def overlapped(self) -> BackwardBuckets | None:
        """What starts buckets in the backward pass, with `overlap`; for passes that a CUDA graph replays. None without it."""
        return self._backward if self._arguments["overlap"] else None

    @torch._disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear all gradients, as torch's optimizers; those of tables become None in any case.

        With `overlap`, after a backward pass that was not stepped, it is `abandon`: every rank must call then.
        """
        if self._backward.started:
            self.abandon()
        self._gradients.zero(set_to_none)
        self._tables.zero_grad()

    def no_sync(self) -> AbstractContextManager[None]:
        """Backward passes within add up locally. Needed with `overlap`; without it they do so anyway, until `step`."""
        return self._backward.no_sync()

    def abandon(self) -> None:
        """Forget a backward pass that an error ended, where `overlap` has begun to reduce its gradients. Every rank must call."""
        with self._engine.before_torch():
            self._backward.abandon()

    def _step(self, measure: bool, grad_scaler: GradScaler | None) -> None:
        if self._only_sets_up_state():
            self._backward.forget()
            self.inner.step()
        else:
            self.reduce(measure=measure, grad_scaler=grad_scaler)
            self.apply()

    @torch._disable_dynamo
    def reduce(self, *, measure: bool = False, grad_scaler: GradScaler | None = None) -> StepReport:
        """The first half of a step: from here to `apply`, each `p.grad` is its piece of the update. Collective.

        In between the update may be looked at or changed, as long as all ranks change it alike; a skipped step has none, and a
        deferred one that is skipped or stopped has zeros; in buckets only those have that were.

        Args:
            measure, grad_scaler: as `step`.

        Returns:
            The step's `report`.

        Raises:
            NonFiniteGradientError: as `step`.
            RuntimeError: the last update was not applied.
        """
        if self._version >= 0:
            raise RuntimeError(
                "reduce() again before apply(): each p.grad still is its piece of the last update"
            )
        if grad_scaler is not None and (skipped := self._unscale(grad_scaler)) is not None:
            self.report = skipped
            return skipped
        if hasattr(self, "found_inf"):
            raise RuntimeError(
                f"no GradScaler was passed to step(): torch {torch.__version__} does not pass it, or something has replaced the "
                "optimizer's step(), as Accelerate does for float16: take bfloat16 there, or in place of GradScaler.step() call "
                "reduce(grad_scaler=...) and apply()"
            )
        self.report = report = self._reduced(measure)
        if report.skipped:
            return report
        anywhere = self._heard(report)
        if self.clip_norm:
            clip_([self._update, *self._tables.values], self.clip_norm)
        if self._applied is not self._update:
            self._applied.copy_(self._update)
        self._gradients.lay_aside()
        for parameter, update, used in zip(
            self._parameters, self._updates, anywhere[: len(self._parameters)], strict=True
        ):
            parameter.grad = update if used else None
        for number in self._gradients.as_wrapped.relaid:
            parameter = self._parameters[number]
            if parameter.grad is not None:  # as the optimizer's own state is laid out
                parameter.grad = torch.empty_like(parameter).copy_(self._updates[number])
        self._tables.leave_out(anywhere[len(self._parameters) :])
        self._version = self._update._version
        return report

    def _unscale(self, scaler: GradScaler) -> StepReport | None:
        """Divide the gradients by the scale, where the user has not. Collective.

        Returns:
            The report of the step, where an Inf on some rank skips it: every rank's scaler then has it too. Else None.
        """
        if self.overlapped is not None:  # refused on every rank, though some may have started no bucket yet
            raise RuntimeError(
                "GradScaler with overlap=True: take bfloat16, which needs none, or overlap=False"
            )
        inf_flags = self._answer(scaler, unscale=True)
        skipped = self.reducer.skip_together(any(flag.item() for flag in inf_flags.values()))
        if skipped is not None:
            for flag in inf_flags.values():
                flag.fill_(1.0)
        return skipped

    @torch._disable_dynamo
    def apply(self) -> None:
        """The second half of a step: the wrapped optimizer's own, unless the step was skipped."""
        if self._version < 0:
            return
        try:
            self.inner.step()
        finally:
            self._gradients.attach()
            self._tables.put_back()
            if self._update._version != self._version:  # some optimizers work in place on p.grad
                self.reducer.forget_support()
            self._version = -1

    def _reduced(self, measure: bool) -> StepReport:
        """Start the buckets that the backward pass has not, the last one with a token; then `Engine.finish`. Collective."""
        problem = self._changed()
        self._warn_of_lost()
        first = self.report is None and self.reducer.transport.rank == 0
        if first and (warning := reduced_twice_warning(self._wrapped.all)):
            warnings.warn(warning, stacklevel=4)
        present = bytes(parameter.grad is not None for parameter in self._counted)
        token = self._agreement.tell(present)
        bucketed = self._engine.bucketed
        own = "" if self._tables else problem
        if isinstance(bucketed, OneVector):
            bucketed.measure = measure
        elif measure:
            own = own or "measures are taken of one vector: pass overlap=False and bucket_mb=0"
        rest = self._backward.rest(own)
        ready = self._engine.ready()
        for number, (gradient, more) in enumerate(rest, bucketed.started):
            last = number == len(bucketed.reducers) - 1
            more |= {"absent": self._gradients.missing(number), "token": token if last else None}
            bucketed.start(gradient, ready, **more)
        return self._engine.finish(problem)

    def _heard(self, report: StepReport) -> bytes:
        """As `Engine.hear`; warns the first time that no rank has a gradient."""
        anywhere = self._engine.hear(self._agreement, report)
        if not (any(anywhere) or self._said_none) and self.reducer.transport.rank == 0:
            warnings.warn(
                f"no parameter of the optimizer has a gradient on any rank in step {report.step}: if the model has others by "
                "now, as after load_state_dict(assign=True) or to(device), change it first, then wrap",
                stacklevel=4,
            )
        self._said_none = self._said_none or not any(anywhere)
        return anywhere

    def _changed(self) -> str:
        """What has changed since the optimizer was wrapped that a step cannot go on with, in a sentence; "" if nothing has."""
        watched = self._gradients.as_wrapped
        watched.look()
        if watched.changes != self._changes:  # `Module.to` may have given what each p.grad was other memory
            self._changes = watched.changes
            self._updates = dense_views(self._applied, self._like, self._layout.starts)
        return watched.problem or self._wrapped.unwrapped()

    def _has_gradients(self) -> bool:
        return super()._has_gradients() or self._backward.started > 0

    def _reducer_state(self) -> dict[str, Any]:
        state = super()._reducer_state()
        return {**state, "order": list(self._wrapped.order)} if self._in_buckets else state

    def _check_parts(self, state: dict[str, Any], reducer: Any, tables: Any) -> None:
        super()._check_parts(state, reducer, tables)
        if reducer is not None and self._in_buckets:
            with state_errors():  # of a state without buckets the reducer says so
                if "buckets" in reducer and list(reducer["order"]) != self._wrapped.order:
                    raise StateError(
                        "the state has buckets of parameters in another order: pass the order that it was taken with"
                    )

    def _let_go(self) -> None:
        """Take hooks away that `_prepare` has set."""
        if self._loaded_hook is not None:
            self._loaded_hook.remove()
        self._backward.remove()

    @closes
    def close(self) -> None:
        self._let_go()
        super().close()


def clip_(vectors: Sequence[Tensor], norm: float) -> None:
    """Scale vectors in place so that their Euclidean norm together is at most `norm`; without waiting for a GPU."""
    norms = [torch.linalg.vector_norm(vector, dtype=torch.float32) for vector in vectors]
    together = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    scale = (norm / (together + 1e-6)).clamp(max=1.0)
    for vector in vectors:
        vector.mul_(scale)
