"""Ok-Topk between the replicas of a model that FSDP2 shards."""

from __future__ import annotations

import warnings
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from collectives.closing import announce, closes
from collectives.connect import connect
from collectives.limit import Limit
from collectives.transport import refuse
from oktopk.allreduce import GradientAllreduce
from oktopk.elastic import of_rank
from oktopk.results import StepReport
from oktopk.settings import settings_problem, timeout_of
from oktopk.state import state_problem
from oktopk.torch.agreement import (
    GRADIENT_TYPES,
    FoundOptimizers,
    reducer_of,
    register_reducer,
    rescaled_warning,
    unregister_reducer,
)
from oktopk.torch.interop import memory_of
from oktopk.torch.modules import broadcast_tensors
from oktopk.torch.shards import TWO_DIMENSIONS, local_tensor
from oktopk.torch.states import as_arrays, as_tensors, by_rank
from oktopk.torch.step_agreement import StepAgreement

if TYPE_CHECKING:
    from collectives.connect import Communicator

# the namespace that is public since torch 2.6
from torch.distributed.fsdp import FSDPModule


class OkTopkReplicas:
    """Reduces each shard of the gradients over the replicas, after FSDP2 has reduced it inside a replica.

    On a mesh of two dimensions FSDP2 would do both, densely. So shard over the second dimension alone, and give this class the
    group of the first one. Each module that `fully_shard` was called on has a reducer of its own, whose residual is of this
    rank's shard. Every rank of the group must hold the same shard and take the same steps.

    The backward pass waits for each module's step; nothing overlaps with it. After `set_requires_all_reduce(False)` the gradients
    of a pass are kept for the next one that reduces.

    A gradient that is not finite on some replica becomes NaN on all, as with a dense allreduce: where `clip_grad_norm_` gives
    NaN, call `skip` in place of the optimizer's step.

    Args:
        model: with `fully_shard` applied on a mesh of one dimension. Parameters become those of the group's first rank.
        comm: the ranks that hold this rank's shard, one in each replica: `mesh["replicate"].get_group()`. Collective.
        method: a name in `oktopk.METHODS`.
        settings: keywords of `oktopk.Settings`, but `nonfinite`, `deferred`.

    Raises:
        ValueError: no module is sharded, or one over a mesh of two dimensions; a setting is not known or not for this class; a
            DistributedOptimizer has the parameters already.
        RuntimeError: ranks did not come within `Settings.timeout`.

    Attributes:
        reports: name of the module -> report of its last step.

    Memory: that of a `GradientAllreduce` of this rank's shard, with nonfinite="skip".
    Traffic: that of the method for each module, as FSDP2 reduces it, in the backward pass; no dense allreduce.

    Example:
        >>> mesh = init_device_mesh("cuda", (2, 4), mesh_dim_names=("replicate", "shard"))
        >>> fully_shard(model, mesh=mesh["shard"])
        >>> replicas = OkTopkReplicas(model, mesh["replicate"].get_group(), density=0.01)
    """

    def __init__(
        self, model: nn.Module, comm: Communicator | None, method: str = "oktopk", **settings: Any
    ) -> None:
        modules = {name: module for name, module in model.named_modules() if isinstance(module, FSDPModule)}
        self._arguments: dict[str, Any] = {"method": method, "nonfinite": "skip", **settings}
        self._reducers: dict[str, GradientAllreduce] = {}
        self._types: dict[str, torch.dtype] = {}
        self._loaded: dict[str, Any] = {}
        self._names, self._modules = set(modules), modules
        self._partial: dict[str, Tensor] = {}  # gradients that were not reduced over the replicas yet
        self._telling: str | None = None  # the module whose messages take the token along
        self.reports: dict[str, StepReport] = {}
        parameters = self._parameters = list(model.parameters())
        self._optimizers = FoundOptimizers(parameters)
        self._agreement = StepAgreement(self._optimizers.groups, renew=self._optimizers.state_found_anew)
        with ExitStack() as opened:  # closed where this raises
            # reducers that are made of one transport share what carries their messages: the backward pass takes them in turn
            self._transport = connect(comm, Limit("OkTopkReplicas(...)", timeout_of(settings)))
            opened.callback(self._transport.close)
            with self._transport.together(ValueError) as alike:
                refuse(settings_problem(settings, OkTopkReplicas, "peer_memory"))
                for name in ("nonfinite", "deferred"):
                    refuse(f"{name} is not for the replicas of a sharded model" if name in settings else "")
                refuse("" if modules else "the model has no module that fully_shard was called on")
                if any(p.device_mesh.ndim > 1 for p in parameters if hasattr(p, "device_mesh")):
                    raise ValueError(TWO_DIMENSIONS)
                if (own := reducer_of(parameters)) is not None:
                    raise ValueError(
                        f"a {type(own).__name__} reduces gradients of these parameters already: use that one, or close() it first"
                    )
                named = model.named_parameters()
                alike["shards"] = [(name, tuple(local_tensor(p).shape)) for name, p in named]
            broadcast_tensors(parameters, self._transport)
            opened.pop_all()
        if self._transport.rank == 0 and (warning := rescaled_warning(parameters)):
            warnings.warn(warning, stacklevel=2)
        register_reducer(self, parameters)
        for name, module in modules.items():
            module.set_all_reduce_hook(partial(self._reduce, name))

    def _reduce(self, name: str, shard: Tensor) -> None:
        """Make the gradient of a module's shard the mean over the replicas. Collective."""
        memory = memory_of(shard.device)
        if name in self._partial:
            shard += self._partial.pop(name)
        if not self._modules[name]._get_fsdp_state()._fsdp_param_groups[0].all_reduce_grads:
            # of several backward passes, as set_requires_all_reduce(False) asks for
            self._partial[name] = shard.clone()
            shard.zero_()
            return
        if name not in self._reducers:
            types = {dtype: key for key, dtype in GRADIENT_TYPES.items() if memory.device != "cpu"}
            gradient_type = types.get(shard.dtype, "float32")
            arguments = self._arguments | {"device": memory.device, "stream": memory.stream}
            self._types[name] = GRADIENT_TYPES[gradient_type]
            self._reducers[name] = GradientAllreduce(
                self._transport, shard.numel(), gradient_type=gradient_type, **arguments
            )
            if self._telling is None:
                self._telling = name
            if name in self._loaded:
                self._reducers[name].load_state_dict(as_arrays(self._loaded.pop(name)))
        reducer, problem = self._reducers[name], ""
        if shard.numel() != reducer.length:
            problem = (
                f"the gradient of module {name!r} has {shard.numel()} elements on this rank, and had {reducer.length}: some of "
                "its parameters have none any more, as they were frozen or not used. Call fully_shard on those apart"
            )
        gradient = shard.new_zeros(reducer.length) if problem else shard
        token = None
        if name == self._telling:
            self._optimizers.look()
            self._agreement.state = self._optimizers.state()
            token = self._agreement.tell()
        report = self.reports[name] = reducer.step(
            memory.array(gradient.to(self._types[name])), problem=problem, token=token
        )
        if token is not None:
            self._agreement.hear(reducer.tokens, reducer.transport)
        shard.copy_(memory.tensor(reducer.writable_update))
        if report.skipped:
            shard.fill_(torch.nan)

    def skip(self) -> None:
        """Undo the last backward pass, whose gradients are not stepped on: residuals are as before it. Every rank must call."""
        for name, reducer in self._reducers.items():
            if not self.reports[name].skipped:
                reducer.take_back()

    def gathered_residuals(self) -> dict[str, Any]:
        """Name of the module -> `GradientAllreduce.gathered_residual` of this rank's shard. Collective."""
        return {name: reducer.gathered_residual() for name, reducer in self._reducers.items()}

    def state_dict(self) -> dict[str, Any]:
        """What the next step depends on, of this rank: tensors and plain values, under a key with the rank.

        Every rank saves its own, or all together by `torch.distributed.checkpoint`, which takes this object.
        """
        held = {name: as_tensors(reducer.state_dict()) for name, reducer in self._reducers.items()}
        return by_rank(self._loaded | held)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue where this rank's `state_dict` was taken, bit for bit. Collective.

        Raises:
            ValueError: as `GradientAllreduce.load_state_dict`, for modules that have not been reduced yet in their first step; or
                the state is of other modules, on every rank alike. Where a module's cannot be loaded, none is.
            oktopk.MissingRanksError: ranks did not make this call in time; on every rank alike.
        """
        state = of_rank(state)
        problem = self._state_problem(state)
        self._meet("OkTopkReplicas.load_state_dict")
        self._transport.agree({} if problem else {"modules": sorted(state)}, problem)
        for name, reducer in self._reducers.items():
            reducer.load_state_dict(as_arrays(state[name]))
        self._loaded = {name: held for name, held in state.items() if name not in self._reducers}

    def _state_problem(self, state: Any) -> str:
        """Why a state cannot be loaded, as far as it can be told before a backward pass, in a sentence; "" if it can."""
        if not isinstance(state, dict):
            return f"the state is a {type(state).__name__}, not a dict"
        wanted = {
            name for name, module in self._modules.items() if _is_reduced(module)
        } | self._reducers.keys()
        others = sorted(map(repr, (wanted - set(state)) | (set(state) - self._names)))
        if (state or self._reducers) and others:
            return f"the state and the model differ in sharded modules: {', '.join(others)}"
        problems = (
            state_problem(as_arrays(state[name]), reducer) for name, reducer in self._reducers.items()
        )
        return next(filter(None, problems), "")

    def _meet(self, what: str) -> None:
        """Wait for all ranks to begin this call, where a step of the others waits first. Collective."""
        if self._reducers:  # in the order of the backward pass
            next(iter(self._reducers.values())).meet(what)
            return
        self._transport.expect_all(what, timeout_of(self._arguments))
        self._transport.barrier()
        self._transport.expect_none()

    @closes
    def close(self) -> None:
        """Free what the reducers hold. Collective. A further backward pass of the model raises RuntimeError."""
        unregister_reducer(self)
        for module in self._modules.values():
            module.set_all_reduce_hook(lambda _: self.skip())  # which raises, as every public call
        announce([reducer.transport for reducer in self._reducers.values()])
        for reducer in self._reducers.values():
            reducer.close()
        self._reducers = {}
        self._transport.close()


def _is_reduced(module: Any) -> bool:
    """Whether FSDP2 reduces gradients for this module itself, and not for sharded ones within it alone."""
    within: list[Any] = [
        each for each in module.modules() if each is not module and isinstance(each, FSDPModule)
    ]
    inner = {id(parameter) for each in within for parameter in each.parameters()}
    return any(parameter.requires_grad and id(parameter) not in inner for parameter in module.parameters())
