"""Steps in two levels: a host sums its gradients in shards, and a method reduces each shard between the hosts.

Of displacements nothing is summed inside a host: each rank has its shard of what the whole host is to send.
"""

from __future__ import annotations

import math
from functools import reduce

import numpy as np
from numpy.typing import NDArray

from collectives.cpu.kernels import bits_magnitude, magnitude_bits
from collectives.errors import FlaggedRanksError
from collectives.sparse import SparseVector
from collectives.tokens import combined, parts_of
from collectives.transport import Transport
from oktopk.displacement import ShardDisplacement
from oktopk.error_feedback import ErrorFeedback
from oktopk.host_group import HostGroup
from oktopk.methods.base import Method
from oktopk.step import Addend, CompletedStep, Gradient, Plan, Spans, StepResult

_MOST_KEPT = 64


class HostExecutor:
    """Runs the steps of one method on this rank's shard of its host's sum, in the caller's thread.

    Args:
        method: what a step computes of a shard, between hosts. A rank without a shard uses only its kernels.
        vectors: of this rank; the residual is that of its shard.
        group: the ranks of this host.
        transport: of all ranks.

    Raises:
        MemoryError: the device has no memory for what the method keeps.
    """

    def __init__(
        self, method: Method, vectors: ErrorFeedback, group: HostGroup, transport: Transport
    ) -> None:
        self._method, self._vectors, self._group, self._transport = method, vectors, group, transport
        # what a dense method writes; a sparse one gives entries and leaves it alone
        self._out = vectors.update if method.sparse else group.new_shard()
        self.check, self.close = method.check, method.close
        self._damage = ""  # what did not decode in this step
        self._absent: dict[int, Spans] = {}  # of the host, by a checksum of its ranks' tokens
        if group.between is not None:
            method.prepare(self._out)

    def begin(self, gradient: Gradient, plan: Plan) -> CompletedStep:
        try:
            return self._begin(gradient, plan)
        except BaseException:  # nothing was applied: the last update must not be applied a second time
            self._vectors.drop_update()
            raise

    def _begin(self, gradient: Gradient, plan: Plan) -> CompletedStep:
        method, vectors, group = self._method, self._vectors, self._group
        displacement = gradient if isinstance(gradient, ShardDisplacement) else None
        if method.hides_work and group.between is not None:
            plan.meanwhile = vectors.clear_update
        elif method.sparse:
            with plan.timer.stage("apply"):
                vectors.clear_update()
        # a device may find only now that what the last step gathered did not decode
        flag = (
            bool(plan.problem)
            or method.codec.gathered_damage
            or (displacement is not None and displacement.nonfinite)
        )
        flag = group.publish(gradient if displacement is None else None, flag, plan.token)
        token = None if plan.token is None else combined(group.host.tokens or ())
        self._withhold(plan.absent, token)
        summed, result = None, None
        if group.between is not None:
            with plan.timer.stage("host_sum"):
                # a displacement is in the residual already, and stays there; only a selection can sum while it reads
                summed = group.sum(at_once=not method.sparse) if displacement is None else displacement.vector
            with method.transport.carrying(token):
                result = self._reduce(summed, plan, flag)
            if result is not None and token is not None:
                token = combined(method.transport.tokens or ())
            group.publish_entries(None if result is None else result.update)
        flagged = group.between is not None and result is None
        outcomes = group.share_outcome(_outcome(result, flagged), token)
        if outcomes[:, 0].any():
            if result is not None and method.sparse:  # only another shard found something
                method.kernels.undo_accumulate(summed, vectors.residual, True)
            group.end_reading()
            raise self._flagged(gradient, plan)
        own_update, update = None, None
        if result is not None:
            vectors.clear_sent(result)  # before the entries get the whole vector's indices
            own_update = result.update
        with plan.timer.stage("host_gather"):
            if method.sparse:
                update = group.share_entries(own_update, outcomes[:, 1])
            else:
                group.share_values(self._out, vectors.update)
        with plan.timer.stage("apply"):
            vectors.write(update, plan.scale)
        if result is None:
            vectors.selected = None if update is None else SparseVector(update.entries[:0], update.length)
        whole = self._of_host(result, update, outcomes)
        # the first rank of a host always holds a shard, so that its token covers all hosts
        whole.tokens = None if token is None else (group.host.tokens or ())[:1]
        return CompletedStep(whole)

    def _withhold(self, absent: Spans, token: int | None) -> None:
        """Keep the residual out of the step where no rank of the host has a gradient. Collective where ranks differ.

        Args:
            absent: of this rank.
            token: combined of those of the host's ranks; None: they are not known, and all takes part.
        """
        group = self._group
        if token is None:
            absent = ()
        elif len({parts_of(each)[0] for each in group.host.tokens or ()}) > 1:
            key = parts_of(token)[0]
            if key not in self._absent:
                if len(self._absent) == _MOST_KEPT:
                    self._absent.clear()
                self._absent[key] = reduce(common_spans, group.host.allgather_objects(absent))
            absent = self._absent[key]
        if group.shard is not None:
            self._vectors.withhold(group.layout.spans_of_shard(absent, group.shard))

    def _of_host(
        self, result: StepResult | None, update: SparseVector | None, outcomes: NDArray[np.int64]
    ) -> StepResult:
        """The result of the whole host's step: the entries of all shards, the thresholds of the first.

        Equal on all ranks of the host but for what this rank selected and what was rounded.
        """
        _, _, _, local_exact, global_exact, *bits = outcomes[0].tolist()
        local, whole = (bits_magnitude(b) if b else math.nan for b in bits)
        length = self._group.layout.length
        return StepResult(
            update,
            self._vectors.selected,
            local_exact=bool(local_exact),
            global_exact=bool(global_exact),
            local_nnz=length if update is None else int(outcomes[:, 2].sum()),
            global_nnz=length if update is None else update.nnz,
            local_threshold=local,
            global_threshold=whole,
            rounding=(0.0, 0.0) if result is None else result.rounding,
        )

    def _reduce(self, summed: Addend, plan: Plan, flag: bool) -> StepResult | None:
        """The step of this rank's shard; None where nothing of the step may be applied.

        Args:
            flag: so it is already; equal on all ranks of the host.
        """
        method, vectors = self._method, self._vectors
        residual = vectors.residual if method.sparse or vectors.pending else None
        try:
            return method.reduce(summed, residual, self._out, plan, flag)
        except FlaggedRanksError:
            self._damage = method.codec.take_damage()
        except ValueError as error:
            # what was gathered did not decode, on the ranks of this shard on all hosts
            self._damage = str(error)
        return None

    def _flagged(self, gradient: Gradient, plan: Plan) -> FlaggedRanksError:
        """The error of a step that no rank applies; names the ranks whose own gradients are not finite. Collective.

        Raises:
            ValueError: some rank has a problem.
        """
        if isinstance(gradient, ShardDisplacement):
            nonfinite = int(gradient.nonfinite)
        else:
            scratch = self._vectors.update
            nonfinite = self._method.kernels.accumulate(gradient, None, scratch)
        problem, self._damage = plan.problem or self._damage, ""
        bad, problems = self._transport.allgather_control(
            np.array([nonfinite > 0, bool(problem)], np.int64)
        ).T
        if problems.any():
            self._transport.agree({}, problem)
        return FlaggedRanksError(np.flatnonzero(bad).tolist())


def common_spans(one: Spans, other: Spans) -> Spans:
    """The spans that lie in both."""
    both = ((max(a, c), min(b, d)) for a, b in one for c, d in other)
    return tuple((begin, end) for begin, end in both if begin < end)


def _outcome(result: StepResult | None, flagged: bool) -> list[int]:
    """What a rank says of its shard's step; see `_of_host`."""
    if result is None:
        return [flagged, 0, 0, 0, 0, 0, 0]
    nnz = 0 if result.update is None else result.update.nnz
    thresholds = (
        0 if math.isnan(magnitude) else magnitude_bits(magnitude)
        for magnitude in (result.local_threshold, result.global_threshold)
    )
    return [flagged, nnz, result.local_nnz, result.local_exact, result.global_exact, *thresholds]
