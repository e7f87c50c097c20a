"""The model whose gradients a hook reduces: its DistributedDataParallel, names and ranks."""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oktopk.buckets import BucketedAllreduce
from oktopk.damage import StateError, state_errors
from oktopk.elastic import check_redistributed
from oktopk.torch.agreement import check_types, reducer_of
from oktopk.torch.alive import alive
from oktopk.torch.optimizer import DistributedOptimizer
from oktopk.torch.states import as_arrays
from oktopk.torch.tables import check_tables


class Layout(NamedTuple):
    """Parameters as a hook reduces them.

    Attributes:
        buckets: those of each bucket of the reducer, in the order in which buckets start.
        tables: those with sparse gradients.
    """

    buckets: list[list[Tensor]]
    tables: list[Tensor]

    @property
    def dense(self) -> list[Tensor]:
        """The parameters of all buckets."""
        return [parameter for bucket in self.buckets for parameter in bucket]

    @property
    def lengths(self) -> list[int]:
        """Elements of each bucket."""
        return [sum(parameter.numel() for parameter in bucket) for bucket in self.buckets]

    def check(self, arguments: dict[str, Any]) -> None:
        """Raise ValueError where a hook with these arguments cannot reduce this."""
        check_types(self.dense)
        check_tables(self.tables, self.tables, arguments)
        if reducer_of([*self.dense, *self.tables], DistributedOptimizer) is not None:
            raise ValueError(
                "a DistributedOptimizer reduces gradients of this DistributedDataParallel already: take the hook or the "
                "DistributedOptimizer, and close() the other one"
            )


@dataclass(frozen=True)
class HookedModel:
    """The model of a hook.

    Attributes:
        names: of each parameter.
        communicator: of the ranks, as the user gave them, or else the DDP's process group.
        dense_steps: after which DDP's buckets do not change any more.
    """

    names: dict[Tensor, str]
    communicator: Any
    dense_steps: int

    @classmethod
    def of(cls, state: object, comm: Any, module: nn.Module | None) -> HookedModel:
        """That of the DDP which has a state of the hook, or of a module that may not be in one yet.

        Raises:
            RuntimeError: there is neither.
            ValueError: several DDPs have the state, or the ranks are others than the DDP's.
        """
        dense_steps = 1
        if (ddp := ddp_of(state)) is not None:
            module = module or ddp.module
            dense_steps = 2 if ddp.static_graph else 1
            _check_group(comm, ddp.process_group)
            comm = ddp.process_group if comm is None else comm
        if module is None:
            raise RuntimeError(
                "no DistributedDataParallel was found that has this OkTopkState: pass OkTopkState(module=model)"
            )
        names: dict[Tensor, str] = {p: name for name, p in module.named_parameters()}
        return cls(names, comm, dense_steps)

    def layout_of(self, state: dict[str, Any]) -> Layout:
        """The layout of a state of the hook, which names parameters.

        Raises:
            StateError: the model has no parameter of a name.
        """
        known = {name: parameter for parameter, name in self.names.items()}
        names = *state["buckets"], state["tables"]
        if unknown := [name for bucket in names for name in bucket if name not in known]:
            raise StateError(f"the state has a parameter {unknown[0]!r}, and the model has none of this name")
        *buckets, tables = [[known[name] for name in bucket] for bucket in names]
        return Layout(buckets, tables)


def ddp_of(state: object) -> DistributedDataParallel | None:
    """The DDP of this process that has a state of the hook; None where none is found.

    Raises:
        ValueError: several have it.
    """

    def with_state() -> list[DistributedDataParallel]:
        ddps = alive(DistributedDataParallel)
        return [ddp for ddp in ddps if any(kept is state for _, kept in getattr(ddp, "_comm_hooks", ()))]

    if len(with_state()) > 1:
        gc.collect()  # one that is not used any more may be in a cycle
    ddps = with_state()
    if len(ddps) > 1:
        raise ValueError(
            f"{len(ddps)} DistributedDataParallel have one OkTopkState: register the hook with one of its own for each"
        )
    return ddps[0] if ddps else None


def _check_group(comm: Any, group: dist.ProcessGroup) -> None:
    """Raise ValueError where a communicator, if there is one, is seen not to be that of a DDP's process group."""
    ddp_ranks = dist.get_process_group_ranks(group)
    if isinstance(comm, dist.ProcessGroup):
        own = dist.get_process_group_ranks(comm)
        same, has = own == ddp_ranks, f"ranks {own}"
    else:
        size = getattr(comm, "size", len(ddp_ranks))  # what is no communicator is refused later
        same, has = size == len(ddp_ranks), f"{size} ranks"
    if not same:
        raise ValueError(
            f"OkTopkState has {has}, and its DistributedDataParallel reduces over ranks {ddp_ranks}: leave comm out, or pass the "
            "process_group of the DistributedDataParallel"
        )


def names_in(
    state: object, model: HookedModel, reducer: BucketedAllreduce | None
) -> tuple[list[list[str]], list[str]]:
    """The names of the parameters of a hook's state, by buckets, and of its tables.

    Args:
        model, reducer: that are to go on from it; a model that is not known yet has no names.

    Raises:
        ValueError: the state cannot be loaded.
    """
    check_redistributed(state)
    if not isinstance(state, dict) or not {"buckets", "reducer", "tables"} <= state.keys():
        raise StateError("the state is not one of OkTopkState.state_dict()")
    with state_errors():
        buckets, tables = [list(names) for names in state["buckets"]], sorted(dict(state["tables"]))
        if state["reducer"] is None or not model.names:
            return buckets, tables
        own = model.layout_of(state).lengths
        saved = as_arrays(state["reducer"])
        lengths = [saved["buckets"][str(number)]["length"] for number in range(len(saved["buckets"]))]
    if buckets and lengths != own:
        raise StateError(f"the state has buckets of {lengths} elements, their parameters have {own}")
    if reducer is not None and own == reducer.lengths:
        reducer.check_state(saved)
    return buckets, tables
