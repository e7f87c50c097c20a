"""The ranks that shard one model, as FSDP2 does: one replica, whose shards an optimizer moves as plain tensors."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collectives.closing import announce
from collectives.connect import connect
from collectives.errors import EVERY_RANK_CALLS, Caught, MissingRanksError
from collectives.host_transport import HostTransport
from collectives.limit import Limit
from collectives.traffic import Traffic
from oktopk.allreduce import NonFiniteGradientError
from oktopk.torch.alive import alive
from oktopk.torch.as_wrapped import AsWrapped, version_of
from oktopk.torch.replica import Groups, Ready, Replica
from oktopk.torch.shards import held_tensor, is_sharded, kept_locally, laid_out_as_parameter, local_tensor
from oktopk.torch.states import by_number
from oktopk.torch.step_agreement import StepAgreement, groups_difference, numbers_of


class ShardedReplica(Replica):
    """The ranks that shard one model; `tensors` are this rank's shards.

    Nothing is hooked into FSDP2, whose group carries no message of ours.

    Args:
        parameters: DTensors, the first one on a mesh of one dimension.
        timeout: seconds that ranks may come late to what follows. Collective among the ranks of the mesh.

    Raises:
        MissingRanksError: ranks of the replica did not come in time. It names ranks of the default process group, as all of them.

    Attributes:
        rank: this rank's number among those of the replica.
        ranks: of the replica, as the default process group numbers them.
        replicas: of each replica its ranks, as the default process group numbers them; [] before they are known.
        parameters: as given; a tensor of one element more where this rank has none of any parameter.
        tensors: the shards that were there at the last `look`.

    Memory: none; while a step runs the tensors hold the gradients.
    Traffic: each method says what it takes, among the ranks of the replica; none where there is one.
    """

    name = "shards"
    plain = False

    @classmethod
    def of(cls, parameters: Sequence[Any], timeout: float) -> ShardedReplica | None:
        """The replica that shards parameters; None where none is sharded, or the first one over a mesh of two dimensions."""
        first = next(filter(is_sharded, parameters), None)
        return None if first is None or first.device_mesh.ndim > 1 else cls(parameters, timeout)

    def __init__(self, parameters: Sequence[Any], timeout: float) -> None:
        super().__init__(parameters)
        if not any(held_tensor(parameter).numel() for parameter in parameters):
            self.parameters.append(held_tensor(parameters[0]).new_zeros(1))
        self.tensors = list(map(local_tensor, self.parameters))
        self._seen = list(map(held_tensor, self.parameters))
        first: Any = next(filter(is_sharded, self.parameters))
        group = first.device_mesh.get_group()
        self.rank: int = group.rank()
        self.ranks: list[int] = torch.distributed.get_process_group_ranks(group)
        self.several = self.sharded = len(self.ranks) > 1
        self.replicas: list[list[int]] = []
        self._modules = _fsdp_modules(self.parameters)
        self._timeout, self._advice = timeout, EVERY_RANK_CALLS
        self._transport: HostTransport | None = None
        if self.several:
            with self._in_world():
                self._transport = connect(group, Limit("DistributedOptimizer(...)", timeout))
        self._groups: Callable[[], Groups] = list
        self._numbers = StepAgreement(self._groups)

    @property
    def shard(self) -> list[int]:
        return [self.rank, len(self.ranks)]

    def meet(self, transport: Any, advice: str, groups: Callable[[], Groups]) -> None:
        """As the base class; `ready` then compares the groups' numbers.

        Ranks that give up here, or in the transport, tell so to those that wait for them in the other place.
        """
        self._advice, self._groups, self._numbers = advice, groups, StepAgreement(groups)
        if self._transport is not None:
            self._transport.share_limit(transport)

    # shards as tensors

    def look(self) -> None:
        """Take the shards that are there now: `Module.to` and `load_state_dict` may have moved them."""
        now = list(map(held_tensor, self.parameters))
        for number, (shard, seen) in enumerate(zip(now, self._seen, strict=True)):
            if shard is not seen:
                self.tensors[number] = shard.detach()
        self._seen = now

    def watched(self) -> AsWrapped:
        return _ShardsAsWrapped(self)

    @contextmanager
    def gradients(self) -> Iterator[str]:
        """Within, each tensor's `grad` is this rank's shard of its parameter's."""
        self.look()
        problem = ""
        for parameter, tensor in zip(self.parameters, self.tensors, strict=True):
            gradient = parameter.grad
            if gradient is None:
                continue
            wrong = _unlike(gradient, parameter, tensor)
            problem = problem or wrong
            if not wrong:
                tensor.grad = local_tensor(gradient)
        try:
            yield problem
        finally:
            for tensor in self.tensors:
                tensor.grad = None

    def reshard(self) -> None:
        """As the base class: a forward pass leaves the outermost module unsharded."""
        for reference in self._modules:
            if (module := reference()) is not None:
                module.reshard()

    def saved(self, optimizer: dict[str, Any], groups: Groups) -> dict[Any, Any]:
        """As the base class, by plain tensors: the mesh of a DTensor is of these ranks alone."""
        return by_number(optimizer, groups, kept_locally)

    def loaded(self, optimizer: dict[str, Any], groups: Groups) -> dict[Any, Any]:
        return by_number(optimizer, groups, laid_out_as_parameter)

    # what the ranks of a replica tell each other

    @contextmanager
    def agree(self, what: str) -> Iterator[dict[str, Any]]:
        """As the base class. Traffic: an allgather of the errors, and where there is none one of the values."""
        alike: dict[str, Any] = {}
        with Caught() as caught:
            yield alike
        problem = self._sentence(caught.sentence, what)
        if self._transport is not None and not problem:
            try:
                self._transport.agree(alike)
            except ValueError as error:
                raise ValueError(f"among the shards of a model {error}") from None
        if problem:
            raise ValueError(problem) from caught.error

    def _sentence(self, problem: str, what: str) -> str:
        """The problems of all ranks of the replica, in a sentence; "" if none has one. Traffic: an allgather of them."""
        if self._transport is None:
            return problem
        with self._within(what):
            problems = self._transport.allgather_objects(problem)
        if len(set(problems)) == 1:
            return problem
        reasons = dict.fromkeys(text for text in problems if text)
        return "; ".join(
            f"shard(s) {', '.join(str(n) for n, reason in enumerate(problems) if reason == text)}: {text}"
            for text in reasons
        )

    def refuse(self, problem: str, what: str, scaled: bool, steps: int) -> str:
        """As the base class. With a GradScaler before a DTensor is unscaled, for which torch communicates.

        Traffic: with a GradScaler as `any`. A rank with a problem comes to `ready` here, where the others wait for it.
        """
        anywhere = scaled and self.any(bool(problem), what)
        if problem or anywhere:
            return self.ready(problem, what, False, False, 0.0, steps).problem
        return ""

    def ready(
        self, problem: str, what: str, overflowed: bool, finite: bool, square: float, steps: int
    ) -> Ready:
        """As the base class. Traffic: a control allgather of six int64; where there is a problem, an allgather of these."""
        if not self.several:
            return super().ready(problem, what, overflowed, finite, square, steps)
        numbers = self._numbers.tell()
        own = [bool(problem), overflowed, finite, steps, int(np.float64(square).view(np.int64)), numbers]
        everyone = self._allgather(np.array(own, np.int64), what)
        problems, overflows, finites, all_steps, squares, all_numbers = everyone.T
        if problems.any() or len(set(all_numbers.tolist())) > 1:
            assert self._transport is not None
            with self._within(what):
                numbers_of_all = self._transport.allgather_objects(numbers_of(self._groups()))
            if difference := groups_difference(numbers_of_all):
                problem = problem or f"among the shards of a model {difference}"
            problem = self._sentence(problem, what)
        # summed in the order of the ranks, so that all have the same bits
        total = sum(squares.copy().view(np.float64).tolist())
        return Ready(problem, bool(overflows.any()), bool(finites.all()), total**0.5, int(all_steps.max()))

    def any(self, flag: bool, what: str) -> bool:
        """As the base class. Traffic: a control allgather of one int64."""
        return bool(self._allgather(np.array([flag], np.int64), what).any())

    def sums(self, values: Sequence[float], what: str) -> tuple[list[float], bool]:
        """As the base class. Traffic: a control allgather of as many int64."""
        rows = self._allgather(np.array(values, np.float64).view(np.int64), what).view(np.float64)
        return [sum(column) for column in rows.T[:-1].tolist()], len(set(rows[:, -1].tolist())) == 1

    def outcome(
        self, error: Exception | None, what: str, skipped: bool = False
    ) -> tuple[Exception | None, bool]:
        """As the base class. Traffic: a control allgather of one int64; where there is an error, an allgather of these."""
        own = np.array([2 if error is not None else int(skipped)], np.int64)
        worst = int(self._allgather(own, what).max())
        if worst < 2 or self._transport is None:
            return error, skipped or worst == 1
        errors = self._transport.allgather_objects(None if error is None else _packed(error))
        first = next(number for number, other in enumerate(errors) if other is not None)
        return error if first == self.rank else _unpacked(errors[first]), skipped

    @contextmanager
    def together(self, what: str) -> Iterator[None]:
        """As the base class. Traffic: that of `outcome`."""
        with Caught() as caught:
            yield
        first, _ = self.outcome(caught.error, what)
        if first is not None:
            raise first

    def of_world(self, error: Exception) -> Exception:
        """As the base class. An error of the ranks that have this shard then has those of the default process group.

        Of a gradient that is not finite all ranks of the replica are named, which step together.
        """
        if isinstance(error, NonFiniteGradientError):
            named = sorted(rank for replica in error.ranks for rank in self.replicas[replica])
            return NonFiniteGradientError(named, error.step)
        if isinstance(error, MissingRanksError):
            holders = [ranks[self.rank] for ranks in self.replicas]
            return error.among(f"the ranks {', '.join(map(str, holders))} that hold one shard", holders)
        return error

    def take_traffic(self) -> Traffic:
        """As the base class: control messages alone."""
        return Traffic() if self._transport is None else self._transport.take_traffic()

    def close(self) -> None:
        """As the base class. Collective."""
        if self._transport is not None:
            announce([self._transport])
            self._transport.close()

    def _allgather(self, row: NDArray[np.int64], what: str) -> NDArray[np.int64]:
        if self._transport is None:
            return row[None]
        with self._within(what):
            return self._transport.allgather_control(row)

    @contextmanager
    def _within(self, what: str) -> Iterator[None]:
        """A limit on the time that ranks of the replica may come late to the operation within."""
        assert self._transport is not None
        with self._in_world():
            self._transport.expect_all(what, self._timeout, self._advice)
            yield
            self._transport.expect_none()

    @contextmanager
    def _in_world(self) -> Iterator[None]:
        """Name missing ranks by their numbers in the default process group."""
        try:
            yield
        except MissingRanksError as error:
            ranks = ", ".join(map(str, self.ranks))
            raise error.among(f"the ranks {ranks} that shard one model", self.ranks) from None


class _ShardsAsWrapped(AsWrapped):
    """As the base class, of shards, which are looked for first."""

    def __init__(self, shards: ShardedReplica) -> None:
        super().__init__(shards.tensors)
        self._shards = shards

    def look(self) -> None:
        self._shards.look()
        super().look()

    def versions(self) -> list[int]:
        """A DTensor counts what is written to it, and its shard what is written to that."""
        whole = map(version_of, self._shards.parameters)
        return [one + other for one, other in zip(whole, super().versions(), strict=True)]

    def count_write(self) -> None:
        super().count_write()
        torch.autograd.graph.increment_version(self._shards.parameters)


def _unlike(gradient: Any, parameter: Any, tensor: Tensor) -> str:
    """Why a gradient is not laid out as its parameter, in a sentence; "" if it is."""
    if is_sharded(gradient):
        shard = held_tensor(gradient)
        alike = gradient.placements == parameter.placements and type(shard) is Tensor
        if alike and (shard.shape, shard.dtype, shard.device) == (tensor.shape, tensor.dtype, tensor.device):
            return ""
    return (
        f"the gradient of a sharded parameter of shape {tuple(parameter.shape)} is not laid out as the parameter: leave it as "
        "FSDP's backward pass makes it"
    )


def _fsdp_modules(parameters: Sequence[Tensor]) -> list[weakref.ref[Any]]:
    """The modules that `fully_shard` was called on which have any of the parameters; none of them is kept alive."""
    from torch.distributed.fsdp import FSDPModule

    known = set(map(id, parameters))
    modules = alive(FSDPModule)
    for module in modules:  # after a forward pass the outermost one has parameters that are not sharded
        module.reshard()
    return [weakref.ref(module) for module in modules if any(id(p) in known for p in module.parameters())]


def _packed(error: Exception) -> Any:
    """What another rank makes the same error of."""
    if isinstance(error, NonFiniteGradientError):
        return error.ranks, error.step
    return str(error)


def _unpacked(packed: Any) -> Exception:
    return ValueError(packed) if isinstance(packed, str) else NonFiniteGradientError(*packed)
