"""What steps on a gradient of its own: a rank, or several ranks together. Here a rank, whose ways the others change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

from torch import Tensor

from collectives.traffic import Traffic
from collectives.transport import Transport
from oktopk.damage import StateError
from oktopk.torch.as_wrapped import AsWrapped

Groups = Sequence[dict[str, Any]]


class Ready(NamedTuple):
    """What the ranks of a replica know before the optimizer steps, the same on all of them.

    Attributes:
        problem: why none of them steps, in a sentence; "" if they can.
        overflowed: whether the GradScaler of any has found an Inf.
        finite: whether the gradients of all are.
        norm: of the whole gradient; None where this rank has all of it.
        steps: since the last exchange, the most of any.
    """

    problem: str
    overflowed: bool
    finite: bool
    norm: float | None
    steps: int


class Replica:
    """What has a reference, a residual and moments of its own: this rank alone, which nobody has to be asked for.

    Classes of several ranks change what they need, and then every rank of the replica must call. Their docstrings say what a
    method sends; here none sends anything.

    Args:
        parameters: which an optimizer moves.

    Attributes:
        name: as `DistributedOptimizer.replica`.
        parameters: as the user knows them.
        tensors: what is exchanged of each: plain tensors that share its memory. The list is kept.
        several: whether ranks step on the same gradient, so that what one of them finds counts for all.
        sharded: whether each rank has a part of the gradient.
        plain: whether the tensors are the parameters themselves.
        averaged: the ranks over which gradients are a mean before the step.
    """

    name = "rank"
    several = False
    sharded = False
    plain = True
    averaged = 1

    def __init__(self, parameters: Sequence[Tensor]) -> None:
        self.parameters = self.tensors = list(parameters)

    @property
    def shard(self) -> list[int]:
        """[number of this rank's part of the parameters, number of parts]."""
        return [0, 1]

    # when something is built or loaded

    def meet(self, transport: Transport, advice: str, groups: Callable[[], Groups]) -> None:
        """Before the first step, once there is a reducer. Not collective.

        Args:
            transport: of the reducer, between replicas.
            advice: as that of `Limit`, for steps.
            groups: gives the optimizer's groups.
        """

    def watched(self) -> AsWrapped:
        """What watches the tensors, each as it is now."""
        return AsWrapped(self.tensors)

    @contextmanager
    def agree(self, what: str) -> Iterator[dict[str, Any]]:
        """Raise an error of any rank's `with` block as a ValueError on every rank of a sharded replica, at its end.

        Args:
            what: begins, for the message of a rank that is missing; as in all methods below.

        Yields:
            A dict to be filled with plain values that must be equal on all ranks of the replica.
        """
        yield {}

    def together(self, what: str) -> AbstractContextManager[None]:
        """An error within on some rank of the replica is raised on all of them."""
        return nullcontext()

    def any(self, flag: bool, what: str) -> bool:
        """Whether the flag of any rank of the replica is up."""
        return flag

    def sums(self, values: Sequence[float], what: str) -> tuple[list[float], bool]:
        """Sums over the ranks of the replica, the same bits on all of them.

        Args:
            values: the last one is to be equal on all ranks, and is not summed.

        Returns:
            (the sums of the others, whether the last one is equal).
        """
        return list(values[:-1]), True

    # a step

    @contextmanager
    def gradients(self) -> Iterator[str]:
        """Within, each tensor has its gradient.

        Yields:
            Why one cannot be read, in a sentence; "" if all can.
        """
        yield ""

    def refuse(self, problem: str, what: str, scaled: bool, steps: int) -> str:
        """Before gradients are looked at, tell the other ranks of a problem, or hear of theirs.

        Args:
            problem: of this rank; "" if it has none.
            scaled: whether there is a GradScaler; equal on all ranks.
            steps: as `Ready`.

        Returns:
            The problem that keeps the replica from stepping; "" if none is known yet.
        """
        return problem

    def take_mean(self) -> bool:
        """Make each gradient the replica's. Returns False where another rank has told a problem by `refuse`."""
        return True

    def in_buffer(self, gradient: Tensor) -> bool:
        """Whether a gradient is as `take_mean` has left it in this step, and the reducer's gradient buffer has it, too."""
        return False

    def buffer_changed(self) -> None:
        """Gradients are no longer in the buffer: they were scaled, by kernels that count no version, or it was written over."""

    def ready(
        self, problem: str, what: str, overflowed: bool, finite: bool, square: float, steps: int
    ) -> Ready:
        """What is known before the optimizer steps.

        Args:
            problem, overflowed, finite, steps: as `Ready`, of this rank.
            square: of the norm of this rank's part of the gradient, where the replica is sharded.
        """
        return Ready(problem, overflowed, finite, None, steps)

    def unequal(self, problem: str) -> str:
        """Why its ranks may not count as one, in a sentence; `problem` if they may."""
        return problem

    def outcome(
        self, error: Exception | None, what: str, skipped: bool = False
    ) -> tuple[Exception | None, bool]:
        """What the other ranks of the replica have met in what all have done.

        Args:
            error: of this rank, which it has caught; None for none.
            skipped: whether its step was skipped.

        Returns:
            (the first of the ranks' errors, whether the step of any was skipped).
        """
        return error, skipped

    def of_world(self, error: Exception) -> Exception:
        """An error of an exchange, with ranks as the user numbers them. Not collective."""
        return error

    def take_traffic(self) -> Traffic:
        """What this rank has sent to others of its replica since the last call, beside the reducer's. Not collective."""
        return Traffic()

    # what the user reads

    def reshard(self) -> None:
        """Let modules that hold copies of the parameters gather them anew, as these were written to. Not collective."""

    def saved(self, optimizer: dict[str, Any], groups: Groups) -> dict[Any, Any]:
        """What a wrapped optimizer keeps by the numbers of its parameters, as a state has it. Not collective.

        Args:
            optimizer: its "state" and "param_groups", as its `state_dict` has them.
            groups: its own.
        """
        return optimizer["state"]

    def loaded(self, optimizer: dict[str, Any], groups: Groups) -> dict[Any, Any]:
        """The reverse of `saved`."""
        return optimizer["state"]

    def check_shard(self, shard: Any) -> None:
        """Raise StateError where a state is of another `shard`."""
        if list(shard) != self.shard:
            (saved, shards), (rank, ranks) = shard, self.shard
            raise StateError(
                f"the state is of shard {saved} of {shards}, and this rank has shard {rank} of {ranks}: each rank saves and "
                "loads its own"
            )

    def close(self) -> None:
        """Free what the library holds."""
