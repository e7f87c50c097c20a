"""Steps over messages: on the host, over CUDA-aware MPI, or staged; transport and kernels make the difference."""

from __future__ import annotations

from collectives.codec import PLAIN
from collectives.errors import FlaggedRanksError
from collectives.tokens import TokenBoard
from oktopk.displacement import is_flagged
from oktopk.error_feedback import ErrorFeedback
from oktopk.methods.base import Method
from oktopk.step import CompletedStep, Gradient, Plan


class MessageExecutor:
    """Runs the steps of one method from beginning to end, in the caller's thread.

    Args:
        method: what a step computes.
        vectors: of this rank.

    Raises:
        MemoryError: the device has no memory for what the method keeps.
    """

    def __init__(self, method: Method, vectors: ErrorFeedback) -> None:
        self._method, self._vectors = method, vectors
        self._tokens = TokenBoard(method.transport)
        self.check, self.close = method.check, method.close
        method.prepare(vectors.update)

    def begin(self, gradient: Gradient, plan: Plan) -> CompletedStep:
        method, vectors, transport = self._method, self._vectors, self._method.transport
        by_message = method.sends_control
        if not by_message:
            self._tokens.post(plan.token)
        if method.hides_work:
            plan.meanwhile = vectors.clear_update
        elif method.sparse:
            with plan.timer.stage("apply"):
                vectors.begin_update(method.writes_out)
        # the last update may still lie there
        out = vectors.update if method.writes_out else None
        residual = vectors.residual if method.sparse or vectors.pending else None
        try:
            # one flag for both: a gradient that is not finite, and a problem, whose sentence follows where the flag is up
            flag = is_flagged(gradient) or bool(plan.problem)
            with transport.carrying(plan.token if by_message else None):
                result = method.reduce(gradient, residual, out, plan, flag)
            if out is None and result.update is None:
                raise TypeError(f"{method.name} returned no update, and its writes_out is False")
            result.tokens = transport.tokens if by_message else self._tokens.read()
        except FlaggedRanksError as flagged:
            vectors.drop_update()
            # so does what did not decode, as the flag of a sum that is not finite
            if flagged.ranks or method.codec is not PLAIN:
                try:
                    transport.agree({}, plan.problem or method.codec.take_damage())
                except ValueError as problem:
                    raise problem from None  # the flag only carried it
            raise
        except BaseException:  # nothing was applied: the last update must not be applied a second time
            vectors.drop_update()
            raise
        with plan.timer.stage("apply"):
            vectors.apply(result, plan.scale)
        return CompletedStep(result)
