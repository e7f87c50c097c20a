"""What an optimizer of updates keeps, as its state has it, and steps that are not on shards: no test looks inside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor

from oktopk.elastic import of_rank


def own(optimizer: Any) -> dict[str, Any]:
    """What its state has of this rank under "updates". It takes what was written, as saving does."""
    state: dict[str, Any] = of_rank(optimizer.state_dict()["updates"])
    return state


def reference(optimizer: Any) -> Tensor:
    """float32[n] in CPU memory, a copy of the reference, of this rank's shard where ranks shard the model."""
    vector: Tensor = own(optimizer)["reference"]
    return vector


def references(optimizer: Any, comm: MPI.Intracomm) -> list[bytes]:
    """Those of all ranks. Collective."""
    return comm.allgather(reference(optimizer).numpy().tobytes())


def unsent(optimizer: Any) -> NDArray[np.float32]:
    """float32[n], the residual of this rank's replica: of a host on each of its ranks, times their number. Collective."""
    residual: NDArray[np.float32] = optimizer.reducer.gathered_residual()
    if (group := optimizer.reducer.group) is None:
        return residual
    return np.sum(group.host.allgather_objects(residual), axis=0, dtype=np.float32)


def to_come(optimizer: Any, comm: MPI.Intracomm) -> NDArray[np.float64]:
    """float64[n], the reference less all that is still to be sent, where training stands. Collective."""
    residual = comm.allreduce(optimizer.reducer.gathered_residual().astype(np.float64)) / comm.size
    vector: NDArray[np.float64] = reference(optimizer).double().numpy() - residual
    return vector


def go_on_behind_the_first_exchanges(optimizer: Any) -> None:
    """From here on one exchange in ten compares the ranks' references: the next one, and not the nine that follow."""
    state = optimizer.state_dict()
    of_rank(state["updates"])["exchanges"] = 20
    optimizer.load_state_dict(state)
    assert own(optimizer)["exchanges"] == 20


def on_shard(optimizer: Any) -> bool:
    """Whether each rank steps on its shard of a host's parameters."""
    return "each rank steps on its shard" in repr(optimizer)


def moments(optimizer: Any, name: str = "exp_avg") -> Tensor:
    """float32[n], what the ranks of this rank's host keep of all parameters under a name. Collective."""
    mine = [optimizer.state[p][name].float().reshape(-1) for p in optimizer.param_groups[0]["params"]]
    if not on_shard(optimizer):
        return torch.cat(mine)
    whole = torch.zeros(optimizer.length)
    optimizer.reducer.group.share_values(torch.cat(mine).numpy(), whole.numpy())
    return whole


def on_all(kind: Callable[[Any], torch.optim.Optimizer]) -> Callable[[Any], torch.optim.Optimizer]:
    """Makes what `kind` makes, with a hook on its step, so that each rank of a host steps on all parameters."""

    def make(parameters: Any) -> torch.optim.Optimizer:
        inner = kind(parameters)
        inner.register_step_post_hook(lambda *_: None)
        return inner

    return make
