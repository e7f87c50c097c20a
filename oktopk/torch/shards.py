"""The ranks that shard one model, as FSDP2 does: one replica, whose shards an optimizer moves as plain tensors."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collectives.connect import connect
from collectives.host_transport import HostTransport
from collectives.limit import Limit
from collectives.traffic import Traffic
from collectives.transport import EVERY_RANK_CALLS, MissingRanksError
from oktopk.allreduce import NonFiniteGradientError
from oktopk.torch.as_wrapped import AsWrapped, version_of

TWO_DIMENSIONS = (
    "a parameter is on a mesh of two dimensions, over which FSDP reduces densely: call "
    'fully_shard(..., mesh=mesh["shard"])'
)


def is_sharded(parameter: Any) -> bool:
    """Whether a parameter is a DTensor, as `fully_shard` makes them."""
    return hasattr(parameter, "device_mesh")


def local_tensor(parameter: Any) -> Tensor:
    """This rank's shard of a parameter, of which it shares the memory; the parameter, detached, if it is not sharded."""
    return _held(parameter).detach()


def _held(parameter: Any) -> Tensor:
    held: Tensor = parameter._local_tensor if is_sharded(parameter) else parameter
    return held


def kept_locally(value: Any, parameter: Any) -> Any:
    """What an optimizer keeps of a parameter, as it is saved: of what is laid out as the parameter this rank's shard."""
    alike = is_sharded(value) and is_sharded(parameter) and value.shape == parameter.shape
    if alike and (value.device_mesh, value.placements) == (parameter.device_mesh, parameter.placements):
        return local_tensor(value)
    return value


def laid_out_as_parameter(value: Any, parameter: Any) -> Any:
    """The reverse of `kept_locally`, on the parameter's mesh, which may be another one than that of before."""
    plain = isinstance(value, Tensor) and not is_sharded(value)
    if not (plain and is_sharded(parameter) and value.shape == _held(parameter).shape):
        return value
    from torch.distributed.tensor import DTensor

    mesh, placements = parameter.device_mesh, parameter.placements
    shape, stride = parameter.shape, parameter.stride()
    return DTensor.from_local(value, mesh, placements, run_check=False, shape=shape, stride=stride)


def shards_problem(
    parameters: Sequence[Any], sends: str, replica: str, tables: Sequence[Tensor], levels: str
) -> str:
    """Why parameters of which some are sharded cannot be trained, in a sentence; "" if they can, or if none is sharded.

    Args:
        parameters: of an optimizer, those that need a gradient.
        sends, replica: as `DistributedOptimizer`.
        tables: the parameters with sparse gradients.
        levels: of the settings.
    """
    sharded = [parameter for parameter in parameters if is_sharded(parameter)]
    if not sharded:
        return ""
    from torch.distributed.tensor import Shard

    if any(parameter.device_mesh.ndim > 1 for parameter in sharded):
        return TWO_DIMENSIONS
    if sends == "gradients":
        return (
            "a parameter is sharded, as by fully_shard: take oktopk.torch.OkTopkReplicas between the replicas of the model, or "
            "sends='updates'"
        )
    if len(sharded) < len(parameters):
        return (
            f"{len(sharded)} parameter(s) of the optimizer are sharded and {len(parameters) - len(sharded)} are not: give those "
            "that are not an optimizer of their own"
        )
    for parameter in sharded:
        (placement,) = parameter.placements
        if parameter.device_mesh != sharded[0].device_mesh:
            return "parameters are sharded over several meshes: give those of each an optimizer of their own"
        if type(placement) is not Shard:
            return f"a parameter is laid out as {placement}, not as Shard: only what fully_shard makes can be exchanged"
        if type(_held(parameter)) is not Tensor:
            kind = type(_held(parameter)).__name__
            return (
                f"a shard is a {kind}, not a plain tensor: leave low precision to FSDP's MixedPrecisionPolicy"
            )
    if replica != "auto" or levels == "hosts":
        wrong = "levels='hosts'" if replica == "auto" else f"replica={replica!r}"
        return f"{wrong} is not for sharded parameters: the ranks that shard one model are the replica"
    if tables:
        return "tables with sparse gradients cannot be sharded: build them with sparse=False"
    return ""


class Ready(NamedTuple):
    """What the ranks of a replica have told each other before the optimizer steps.

    Attributes:
        problem: whether any has a problem, which `Shards.sentence` tells.
        overflowed: whether the GradScaler of any has found an Inf.
        finite: whether the gradients of all are.
        norm: of the whole gradient.
        steps: since the last exchange, the most of any.
        alike: whether the checksums of all are equal.
    """

    problem: bool
    overflowed: bool
    finite: bool
    norm: float
    steps: int
    alike: bool


class Shards:
    """This rank's shards as plain tensors, and what is agreed on among the ranks that shard one model: a replica.

    Nothing is hooked into FSDP2, whose group carries no message of ours.

    Args:
        parameters: DTensors, the first one on a mesh of one dimension.
        timeout: seconds that ranks may come late to what follows. Collective among the ranks of the mesh.

    Raises:
        MissingRanksError: ranks of the replica did not come in time. It names ranks of the default process group, as all of them.

    Attributes:
        rank: this rank's number among those of the replica.
        ranks: of the replica, as the default process group numbers them.
        several: whether there are several ranks.
        replicas: of each replica its ranks, as the default process group numbers them; [] before they are known.
        parameters: as given; a tensor of one element more where this rank has none of any parameter.
        tensors: of each its shard, which shares its memory; the list is kept, and has the tensors that were there at the last
            `look`.

    Memory: none; while a step runs the tensors hold the gradients.
    Traffic: each method says what it takes, among the ranks of the replica; none where there is one.
    """

    @classmethod
    def of(cls, parameters: Sequence[Any], timeout: float) -> Shards | None:
        """The shards of parameters; None where none is sharded, or the first one over a mesh that has no group for its shards."""
        first = next(filter(is_sharded, parameters), None)
        return None if first is None or first.device_mesh.ndim > 1 else cls(parameters, timeout)

    def __init__(self, parameters: Sequence[Any], timeout: float) -> None:
        self.parameters = list(parameters)
        if not any(_held(parameter).numel() for parameter in parameters):
            self.parameters.append(_held(parameters[0]).new_zeros(1))
        self.tensors = list(map(local_tensor, self.parameters))
        self._seen = list(map(_held, self.parameters))
        group = next(p for p in self.parameters if is_sharded(p)).device_mesh.get_group()
        self.rank: int = group.rank()
        self.ranks: list[int] = torch.distributed.get_process_group_ranks(group)
        self.several = len(self.ranks) > 1
        self.replicas: list[list[int]] = []
        self._modules = _fsdp_modules(self.parameters)
        self._timeout, self._advice = timeout, EVERY_RANK_CALLS
        self._transport: HostTransport | None = None
        if self.several:
            with self._in_world():
                self._transport = connect(group, Limit("DistributedOptimizer(...)", timeout))

    # shards as tensors

    def look(self) -> None:
        """Take the shards that are there now: `Module.to` and `load_state_dict` may have moved them."""
        now = list(map(_held, self.parameters))
        for number, (held, seen) in enumerate(zip(now, self._seen, strict=True)):
            if held is not seen:
                self.tensors[number] = held.detach()
        self._seen = now

    def watched(self) -> AsWrapped:
        """What watches the tensors, each as it is now."""
        return _ShardsAsWrapped(self)

    @contextmanager
    def gradients(self) -> Iterator[str]:
        """Within, each tensor's `grad` is this rank's shard of its parameter's.

        Yields:
            Why one cannot be read, in a sentence; "" if all can.
        """
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
        """Let modules that a forward pass has left unsharded gather their parameters anew, which were written to."""
        for reference in self._modules:
            if (module := reference()) is not None:
                module.reshard()

    # what the ranks of a replica tell each other

    def share_limits(self, transport: Any, advice: str) -> None:
        """Let ranks that give up here, or in a transport, tell so to those that wait for them in the other place.

        Args:
            transport: of the ranks that have this shard.
            advice: as that of `Limit`, for steps.
        """
        self._advice = advice
        if self._transport is not None:
            self._transport.share_limit(transport)

    def sentence(self, problem: str, what: str, alike: dict[str, Any] | None = None) -> str:
        """The problems of all ranks of the replica, in a sentence; "" if none has one. Collective.

        Args:
            problem: of this rank.
            what: begins, for the message.
            alike: name -> what is to be equal on all ranks.

        Traffic: an allgather of the sentences, and of what is to be equal.
        """
        if self._transport is None:
            return problem
        with self._within(what):
            problems = self._transport.allgather_objects(problem)
        if not any(problems):
            try:
                self._transport.agree(alike or {})
            except ValueError as error:
                return f"among the shards of a model {error}"
        if len(set(problems)) == 1:
            return problem
        told = dict.fromkeys(text for text in problems if text)
        return "; ".join(
            f"shard(s) {', '.join(str(n) for n, theirs in enumerate(problems) if theirs == text)}: {text}"
            for text in told
        )

    def ready(
        self,
        what: str,
        problem: bool,
        overflowed: bool,
        finite: bool,
        square: float,
        steps: int,
        checksum: int,
    ) -> Ready:
        """Agree before the optimizer steps. Collective.

        Args:
            what: begins, for the message.
            problem, overflowed, finite, steps: as `Ready`, of this rank.
            square: of the norm of this rank's part of the gradient.
            checksum: int64, of what is to be equal on all ranks.

        Traffic: a control allgather of six int64.
        """
        mine = [problem, overflowed, finite, steps, int(np.float64(square).view(np.int64)), checksum]
        everyone = self._allgather(np.array(mine, np.int64), what)
        problems, overflows, finites, all_steps, squares, checksums = everyone.T
        # summed in the order of the ranks, so that all have the same bits
        total = sum(squares.copy().view(np.float64).tolist())
        return Ready(
            problem=bool(problems.any()),
            overflowed=bool(overflows.any()),
            finite=bool(finites.all()),
            norm=total**0.5,
            steps=int(all_steps.max()),
            alike=len(set(checksums.tolist())) == 1,
        )

    def any(self, flag: bool, what: str) -> bool:
        """Whether the flag of any rank of the replica is up. Collective. Traffic: a control allgather of one int64."""
        return bool(self._allgather(np.array([flag], np.int64), what).any())

    def sums(self, values: Sequence[float], what: str) -> tuple[list[float], bool]:
        """Sums over the ranks of the replica, the same bits on all of them. Collective.

        Args:
            values: the last one is to be equal on all ranks, and is not summed.

        Returns:
            (the sums of the others, whether the last one is equal).

        Traffic: a control allgather of as many int64.
        """
        rows = self._allgather(np.array(values, np.float64).view(np.int64), what).view(np.float64)
        return [sum(column) for column in rows.T[:-1].tolist()], len(set(rows[:, -1].tolist())) == 1

    def outcome(
        self, error: Exception | None, what: str, skipped: bool = False
    ) -> tuple[Exception | None, bool]:
        """What the other ranks of the replica have met in what all have done. Collective.

        Args:
            error: of this rank, which it has caught; None for none.
            skipped: whether its step was skipped.

        Returns:
            (the first of the ranks' errors, whether the step of any was skipped).

        Traffic: a control allgather of one int64; where there is an error, an allgather of these.
        """
        mine = np.array([2 if error is not None else int(skipped)], np.int64)
        worst = int(self._allgather(mine, what).max())
        if worst < 2 or self._transport is None:
            return error, skipped or worst == 1
        errors = self._transport.allgather_objects(None if error is None else _packed(error))
        first = next(number for number, theirs in enumerate(errors) if theirs is not None)
        return error if first == self.rank else _unpacked(errors[first]), skipped

    @contextmanager
    def together(self, what: str, undo: Callable[[], None]) -> Iterator[None]:
        """What raises a ValueError within on some rank of the replica raises it on all of them. Collective.

        Args:
            what: is done within, for messages.
            undo: called where another rank has raised, and this one has not.
        """
        error: Exception | None = None
        try:
            yield
        except ValueError as raised:
            error = raised
        first, _ = self.outcome(error, what)
        if first is not None:
            if error is None:
                undo()
            raise first

    def of_world(self, error: Exception) -> Exception:
        """An error of the ranks that have this shard, with ranks as the default process group numbers them.

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
        """What this rank has sent to others of its replica since the last call: control messages alone."""
        return Traffic() if self._transport is None else self._transport.take_traffic()

    def close(self) -> None:
        """Free what the library holds. Collective."""
        if self._transport is not None:
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

    def __init__(self, shards: Shards) -> None:
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
        held = _held(gradient)
        alike = gradient.placements == parameter.placements and type(held) is Tensor
        if alike and (held.shape, held.dtype, held.device) == (tensor.shape, tensor.dtype, tensor.device):
            return ""
    return (
        f"the gradient of a sharded parameter of shape {tuple(parameter.shape)} is not laid out as the parameter: leave it as "
        "FSDP's backward pass makes it"
    )


def _fsdp_modules(parameters: Sequence[Tensor]) -> list[weakref.ref[Any]]:
    """The modules that `fully_shard` was called on which have any of the parameters; none of them is kept alive."""
    from torch.distributed.fsdp import FSDPModule

    known = set(map(id, parameters))
    modules = [held for held in gc.get_objects() if issubclass(type(held), FSDPModule)]
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
