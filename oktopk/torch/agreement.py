"""What the ranks check about an optimizer or its parameters before they reduce gradients together."""

from __future__ import annotations

import gc
import hashlib
import inspect
import math
import operator
import weakref
from collections.abc import Callable, Iterable, Sequence
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from collectives.errors import refuse
from collectives.transport import Transport
from oktopk.torch.alive import alive
from oktopk.torch.gradients import is_dense
from oktopk.torch.interop import TYPE_NAMES
from oktopk.torch.sharded_replica import ShardedReplica
from oktopk.torch.shards import local_tensor
from oktopk.torch.step_agreement import agreed_settings, groups_difference, numbers_of

_REDUCERS: weakref.WeakKeyDictionary[Any, frozenset[int]] = weakref.WeakKeyDictionary()
"""What reduces gradients -> the ids of its parameters, which it keeps. No weak references to these: `torch.utils.swap_tensors`,
by which `Module.to` may convert them, refuses tensors that have any."""


def reducer_of(parameters: Iterable[Tensor], kind: type = object) -> Any:
    """What reduces the gradient of one of these parameters and is of this kind; None where there is nothing."""
    known = set(map(id, parameters))

    def registered() -> Any:
        return next((one for one, ids in _REDUCERS.items() if ids & known and isinstance(one, kind)), None)

    if registered() is None:
        return None
    gc.collect()  # a scheduler leaves a cycle
    return registered()


def register_reducer(reducer: Any, parameters: Iterable[Tensor]) -> None:
    """Let `reducer_of` find a reducer, until it is gone or `unregister_reducer` was called."""
    _REDUCERS[reducer] = frozenset(map(id, parameters))


def unregister_reducer(reducer: Any) -> None:
    """The reverse of `register_reducer`."""
    _REDUCERS.pop(reducer, None)


def check_reduced_once(optimizer: torch.optim.Optimizer, trained: Iterable[Tensor]) -> None:
    """Raise ValueError where another reducer has these parameters of an optimizer to be wrapped."""
    if (other := reducer_of(trained)) is None:
        return
    wraps = isinstance(other, torch.optim.Optimizer)
    name = "a DistributedOptimizer" if wraps else f"an {type(other).__name__}"
    same = getattr(other, "inner", None) is optimizer
    what = "is around this optimizer" if same else "reduces gradients of these parameters"
    del other  # which the error's traceback would keep alive
    raise ValueError(f"{name} {what} already: use that one, or close() it first")


class _Compared(NamedTuple):
    """What one rank tells the others."""

    length: int
    layout: bytes
    shard: tuple[int, list[int]] | None
    state: bytes
    values: bytes


def check_wrapping(optimizer: torch.optim.Optimizer, parameters: list[Tensor], clip_norm: float) -> None:
    """Raise ValueError where an optimizer cannot be wrapped on this rank.

    Args:
        optimizer: to be wrapped.
        parameters: those that need a gradient.
        clip_norm: as `DistributedOptimizer`.
    """
    closure = inspect.signature(optimizer.step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise ValueError(
            f"{type(optimizer).__name__} computes gradients several times a step, by a closure, and each would have to be "
            "reduced: take an optimizer whose step needs none"
        )
    if not parameters:
        raise ValueError("no parameter of the optimizer needs a gradient")
    if not any(parameter.numel() for parameter in parameters):
        raise ValueError("no parameter that needs a gradient has an element")
    first = parameters[0]
    check_types(parameters)
    for parameter in parameters:
        if parameter.dtype != first.dtype:
            raise ValueError(f"parameters are {first.dtype} and {parameter.dtype}: all must be of one type")
        if parameter.device != first.device:
            raise ValueError(
                f"parameters are on {first.device} and {parameter.device}: all must be on one device"
            )
        if not is_dense(parameter):
            raise ValueError(
                f"a parameter of shape {tuple(parameter.shape)} with strides {parameter.stride()} is not contiguous in any "
                "order of its dimensions: make it a tensor of its own, by clone()"
            )
    if not (math.isfinite(clip_norm) and clip_norm >= 0):
        raise ValueError(f"clip_norm {clip_norm} is not in [0, inf)")


def check_types(parameters: Iterable[Tensor]) -> None:
    """Raise ValueError where gradients of these parameters' types are not reduced."""
    for parameter in parameters:
        if parameter.dtype not in TYPE_NAMES:
            parts = (
                ": keep its real and imaginary parts in one of those, by torch.view_as_real"
                if parameter.is_complex()
                else ""
            )
            raise ValueError(
                f"a parameter is {parameter.dtype} on {parameter.device}, "
                f"not torch.float32, torch.bfloat16 or torch.float16{parts}"
            )


def groups_of(optimizers: Iterable[torch.optim.Optimizer]) -> Callable[[], list[dict[str, Any]]]:
    """What gives the groups of optimizers, of those that are still there, and keeps none of them alive."""
    kept = [weakref.ref(optimizer) for optimizer in optimizers]
    return lambda: [
        group for each in kept if (optimizer := each()) is not None for group in optimizer.param_groups
    ]


def reduced_twice_warning(parameters: Iterable[Tensor], sends: str = "gradients", ranks: int = 1) -> str:
    """What to say where a DDP reduces gradients of some of these parameters in its backward pass; "" if none does.

    Args:
        sends: of the optimizer or hook: "gradients" or "updates".
        ranks: over how many a DDP may sum: of a host with replica="summed", else 1.
    """
    if reducing_ddp(parameters, ranks) is None:
        return ""
    if sends == "updates":
        return (
            "a DistributedDataParallel reduces gradients of these parameters in its backward pass, so optimizers step "
            "on the mean already: call ddp.register_comm_hook(None, noop_hook), of "
            "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks"
        )
    return (
        "a DistributedDataParallel reduces gradients of these parameters densely in its backward pass, so that they are "
        "reduced twice: train its module without it, or leave the optimizer as it is and register oktopk.torch.ddp_hook"
    )


def reduced_over_hosts(parameters: Iterable[Tensor], ranks: int) -> str:
    """Why hosts cannot be replicas where a DDP reduces over more ranks than these; "" if none does.

    Args:
        ranks: of this rank's host.
    """
    if (ddp := reducing_ddp(parameters, ranks)) is None:
        return ""
    return (
        f"a DistributedDataParallel reduces gradients over {ddp.process_group.size()} ranks, of "
        "several hosts, and a host is to step on a gradient of its own: call "
        "ddp.register_comm_hook(None, noop_hook), of "
        "torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks, or give it the ranks of one "
        "host as process_group, with replica='summed'"
    )


def reducing_ddp(parameters: Iterable[Tensor], ranks: int) -> Any:
    """The DDP that reduces gradients of these over more than `ranks` ranks; None if none does."""
    if not torch.distributed.is_available():
        return None
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
    from torch.nn.parallel import DistributedDataParallel

    known = set(map(id, parameters))
    for ddp in alive(DistributedDataParallel):
        if ddp.process_group.size() <= ranks:
            continue
        hooks = [hook for hook, _ in getattr(ddp, "_comm_hooks", ())]
        if noop_hook not in hooks and any(id(parameter) in known for parameter in ddp.module.parameters()):
            return ddp
    return None


def optimizers_of(parameters: Iterable[Tensor]) -> list[torch.optim.Optimizer]:
    """The torch optimizers of this process that have any of these parameters, one for those that share their groups."""
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    gc.collect()  # a scheduler leaves a cycle
    by_groups: dict[int, tuple[int, torch.optim.Optimizer]] = {}
    for optimizer in alive(torch.optim.Optimizer):
        groups = vars(optimizer).get("param_groups", ())  # none while it is made
        known = [places[id(p)] for group in groups for p in group["params"] if id(p) in places]
        if known:
            by_groups[id(groups)] = min(known), optimizer
    return [optimizer for _, optimizer in sorted(by_groups.values(), key=operator.itemgetter(0))]


class FoundOptimizers:
    """The optimizers of a model, for a hook, which is given none: their groups, and what of their states ranks must have alike.

    Args:
        parameters: of the model.
    """

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        self._parameters = list(parameters)
        self._optimizers: list[weakref.ref[torch.optim.Optimizer]] = []
        self._in_vain = 0  # times that none was found, in a row
        # of the state that the first ones were found with, or that was loaded into one last
        self._states: weakref.WeakKeyDictionary[torch.optim.Optimizer, bytes] = weakref.WeakKeyDictionary()

    def look(self) -> list[torch.optim.Optimizer]:
        """Find them, anew where one is gone; where there is none, as before the first step, no more than twice.

        When Python frees one is not the same on all ranks: before these name a difference, each calls `find`.
        """
        optimizers = [optimizer for each in self._optimizers if (optimizer := each()) is not None]
        if len(optimizers) == len(self._optimizers) and (optimizers or self._in_vain == 2):
            return optimizers
        return self.find()

    def find(self) -> list[torch.optim.Optimizer]:
        """Find them anew."""
        first = not self._optimizers
        optimizers = optimizers_of(self._parameters)
        self._optimizers = [weakref.ref(optimizer) for optimizer in optimizers]
        self._in_vain = 0 if optimizers else min(2, self._in_vain + 1)
        for optimizer in optimizers:
            self._watch(optimizer, first)
        return optimizers

    def state_found_anew(self) -> bytes:
        """`find`, then `state`."""
        self.find()
        return self.state()

    def groups(self) -> list[dict[str, Any]]:
        """Of all that are still there."""
        return [
            group
            for each in self._optimizers
            if (optimizer := each()) is not None
            for group in optimizer.param_groups
        ]

    def state(self) -> bytes:
        """A checksum of what was loaded into them; of nothing where each rank keeps a part, as torch's ZeRO does."""
        optimizers = [optimizer for each in self._optimizers if (optimizer := each()) is not None]
        if any(hasattr(optimizer, "consolidate_state_dict") for optimizer in optimizers):
            return b""
        return b"".join(self._states.get(optimizer, b"") for optimizer in optimizers)

    def _watch(self, optimizer: torch.optim.Optimizer, first: bool) -> None:
        if optimizer in self._states or not hasattr(optimizer, "_optimizer_load_state_dict_post_hooks"):
            return
        own = weakref.ref(self)

        def loaded(optimizer: torch.optim.Optimizer) -> None:
            if (owner := own()) is not None:
                kept = [optimizer.state[p] for p in owner._parameters if p in optimizer.state]
                owner._states[optimizer] = _digest(kept) if kept else b""

        if first:  # a later one may have been found in another step than on other ranks
            loaded(optimizer)
        else:
            self._states[optimizer] = b""
        optimizer.register_load_state_dict_post_hook(loaded)


def rescaled_warning(parameters: Iterable[Tensor]) -> str:
    """What to say where a module's forward pass changes some of these parameters, each rank by its own batch; "" if none does."""
    known = set(map(id, parameters))
    names = {
        type(module).__name__
        for module in alive(nn.Module)
        if isinstance(vars(module).get("max_norm"), int | float)
        and id(vars(module).get("_parameters", {}).get("weight")) in known
    }
    if not names:
        return ""
    return (
        f"{', '.join(sorted(names))}(max_norm=...) rescales rows of its weight in each forward pass, on each rank those of its "
        "own batch, so that the ranks' parameters part: build it without max_norm, and after step() call "
        "weight.data.copy_(torch.renorm(weight.data, 2, 0, max_norm)) on all ranks; with sends='updates' within agreed()"
    )


def compared(
    transport: Transport,
    optimizer: torch.optim.Optimizer,
    parameters: list[Tensor],
    broadcast: bool,
    sends: str,
    shards: ShardedReplica | None = None,
) -> list[int]:
    """The ranks whose parameters have other values than rank 0's. Collective.

    Args:
        optimizer, parameters: as `check_wrapping`.
        broadcast: whether parameters may have other values than on rank 0.
        sends: "gradients" or "updates".
        shards: of the parameters, where they are sharded.

    Raises:
        ValueError: something else differs between ranks that the reducer cannot see; on every rank alike.

    Traffic: one allgather of some 100 bytes. Parameters and optimizer state are hashed on the host, once.
    """
    every = chain.from_iterable(group["params"] for group in optimizer.param_groups)
    places = {id(p): place for place, p in enumerate(p for p in every if p.requires_grad)}
    tensors = parameters if shards is None else shards.tensors
    layout = repr(
        [[(places[id(p)], tuple(p.shape), p.stride()) for p in parameters], [tuple(p.shape) for p in tensors]]
    ).encode()
    # hosts are not known yet: the first exchange compares their ranks' rates
    groups = agreed_settings(optimizer, optimizer.param_groups, sends == "updates" and shards is None)
    own = _Compared(
        sum(p.numel() for p in tensors),
        hashlib.blake2b(layout, digest_size=8).digest(),
        None if shards is None else (shards.rank, shards.ranks),
        _digest(_plain_state(optimizer, groups, moments=sends == "gradients")),
        _digest(tensors),
    )
    everyone = transport.allgather_objects(own)
    if any(each.shard is not None for each in everyone):
        _check_replicas([each.shard for each in everyone])
    if shards is not None:
        shards.replicas = [each.shard[1] for each in everyone if each.shard is not None]
    if len({each.length for each in everyone}) > 1:
        return []  # which the reducer refuses
    if len({each.layout for each in everyone}) > 1:
        raise ValueError("the parameters' shapes, order or memory layouts differ between ranks")
    if others := _unlike_first([each.state for each in everyone]):
        raise ValueError(
            f"the optimizer's state or a setting of its groups (the learning rate, ...) on rank(s) {_listed(others)} differs "
            "from rank 0's: build it alike on all ranks, or load one state on all of them before wrapping"
        )
    others = _unlike_first([each.values for each in everyone])
    if others and not broadcast:
        raise ValueError(
            f"parameters on rank(s) {_listed(others)} differ from rank 0's, and broadcast is False: "
            "seed the ranks alike, load one checkpoint on all of them, or call oktopk.broadcast_parameters"
        )
    return others


def _check_replicas(shards: Sequence[tuple[int, list[int]] | None]) -> None:
    """Raise ValueError where ranks do not hold one shard, each of another replica.

    Args:
        shards: of each rank the number of its shard, and the ranks of its replica; None: its parameters are not sharded.
    """
    if whole := [rank for rank, shard in enumerate(shards) if shard is None]:
        raise ValueError(
            f"parameters of rank(s) {_listed(whole)} of comm are not sharded, and those of the others are: call fully_shard on "
            "all ranks, or on none"
        )
    known = [shard for shard in shards if shard is not None]
    group = (
        "pass the group of those that hold this rank's shard, one of each replica. It is that of "
        "the mesh dimension beside the one given to fully_shard: "
        'mesh["replicate"].get_group() of a mesh of (replicas, shards) with '
        'mesh_dim_names=("replicate", "shard")'
    )
    if len({tuple(ranks) for _, ranks in known}) < len(shards):
        raise ValueError(f"comm has several ranks of one replica, which shard its model together: {group}")
    if len({number for number, _ in known}) > 1:
        raise ValueError(f"comm has ranks that hold different shards: {group}")


def compare_states(transport: Transport, state: Any) -> None:
    """Raise ValueError where the states of an optimizer that ranks are about to load differ. Collective.

    Args:
        state: with the keys "state" and "param_groups".

    Traffic: one allgather of 20 bytes and the groups' numbers.
    """
    own = state_digest(state), numbers_of(state["param_groups"])
    everyone = transport.allgather_objects(own)
    refuse(groups_difference([numbers for _, numbers in everyone]))
    if others := _unlike_first([digest for digest, _ in everyone]):
        ranks = _listed(others)
        raise ValueError(
            f"the optimizer's state on rank(s) {ranks} differs from rank 0's: load one state on all ranks"
        )


def state_digest(state: Any) -> bytes:
    """A checksum of what an optimizer's state has under "state"."""
    return _digest(state["state"])


def replaced_warning(ranks: list[int]) -> str:
    """What rank 0 says where parameters had other values on some ranks."""
    return (
        f"parameters on rank(s) {_listed(ranks)} differed from rank 0's, and were replaced by them. Frozen parameters and "
        "buffers were not compared: oktopk.broadcast_parameters(model) makes all of them equal"
    )


def _unlike_first(digests: Sequence[bytes]) -> list[int]:
    return [rank for rank, digest in enumerate(digests) if digest != digests[0]]


def _listed(ranks: list[int]) -> str:
    return ", ".join(map(str, ranks))


def _plain_state(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], moments: bool
) -> list[Any]:
    """Settings of its groups, and if asked for the state of their parameters, in the order of these."""
    state: list[Any] = []
    for group in groups:
        state.append({name: value for name, value in group.items() if name != "params"})
        state += [optimizer.state[p] for p in group["params"] if moments and p in optimizer.state]
    return state


def _digest(value: object) -> bytes:
    """Of tensors and plain values in lists and dictionaries; what is neither is left out, as its text may name an address."""
    digest = hashlib.blake2b(digest_size=16)

    def add(value: object) -> None:
        if isinstance(value, Tensor):
            host = local_tensor(value).cpu().contiguous()
            digest.update(f"{tuple(host.shape)} {host.dtype}".encode())
            digest.update(host.reshape(-1).view(torch.uint8).numpy().data)
        elif isinstance(value, dict):
            for name, item in value.items():
                digest.update(f"{name}:".encode())
                add(item)
        elif isinstance(value, str | int | float | np.generic | None):
            digest.update(f"{value!r},".encode())
        elif isinstance(value, Iterable):
            for item in value:
                add(item)

    add(value)
    return digest.digest()
