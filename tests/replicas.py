"""Kinds of replicas that updates travel between: single ranks, hosts of consecutive ranks, and ranks that shard one model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import Tensor, nn

from oktopk import DistributedOptimizer
from oktopk.torch.adamw import AdamW as OurAdamW
from oktopk.torch.shards import is_sharded, local_tensor
from tests.training import network, train
from tests.updates import on_shard, own, reference

SIZE = MPI.COMM_WORLD.size
SHARDS = [
    shards for shards in range(1, SIZE + 1) if SIZE % shards == 0 and (SIZE < 4 or 1 < shards < SIZE)
] or [SIZE]
"""Ranks that shard a model, as many as divide those of the job: all of them where these are few."""


def _capturable(parameters: list[Any]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, **ADAMW, capturable=parameters[0].is_cuda)


ADAMW, SGD = {"lr": 2e-3, "weight_decay": 0.1}, {"lr": 0.05, "momentum": 0.9}
OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, **ADAMW, fused=True),
    "adamw foreach": lambda p: torch.optim.AdamW(p, **ADAMW, foreach=True),
    "sgd": lambda p: torch.optim.SGD(p, **SGD, weight_decay=1e-3),
    "adam": lambda p: torch.optim.Adam(p, lr=2e-3),
    "adam tensor rate": lambda p: torch.optim.Adam(p, lr=torch.tensor(2e-3, device="cpu")),
    "oktopk adamw": lambda p: OurAdamW(p, **ADAMW),
    "adamw capturable": lambda p: _capturable(list(p)),
}


def mesh_of(shards: int, name: str = "shard") -> Any:
    """All ranks, of replicas and shards; collective.

    Args:
        name: of the dimension of shards, another one in each file of a job: torch keeps one of several equal meshes, and the
            process groups of a file end with it.
    """
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", (SIZE // shards, shards), mesh_dim_names=("replicate", name))


def along_shards(mesh: Any) -> Any:
    """Of a mesh of two dimensions the one of shards."""
    return mesh[mesh.mesh_dim_names[1]]


def layers(seed: int = 5) -> nn.Sequential:
    """Without statistics of batches; 7 rows over several shards are uneven, and 2 leave a shard without any."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 2), nn.Tanh(), nn.Linear(2, 7))


def sharded(mesh: Any, model: nn.Module | None = None, **options: Any) -> Any:
    """A model that FSDP2 shards, its first layer by itself."""
    from torch.distributed.fsdp import fully_shard

    made: Any = layers() if model is None else model
    if isinstance(made, nn.Sequential):
        fully_shard(made[0], mesh=along_shards(mesh), **options)
    return fully_shard(made, mesh=along_shards(mesh), **options)


def whole(model: nn.Module) -> NDArray[np.float32]:
    """A copy of all parameters, of all shards."""
    parameters: Any = model.parameters()
    parts = [p.full_tensor() if is_sharded(p) else p for p in parameters]
    return torch.cat([p.detach().float().reshape(-1) for p in parts]).cpu().numpy().copy()


def held(tensors: Any) -> Tensor:
    """A copy of what this rank holds of them."""
    return torch.cat([local_tensor(each).float().reshape(-1) for each in tensors]).cpu()


@dataclass
class Replicas:
    """One kind.

    Attributes:
        comm: all ranks.
        per_host: ranks of a host, which is a replica; 0: none is.
        mesh: of the ranks that shard a model; None: none do.
        place: the device of models that none shard.
    """

    comm: MPI.Intracomm
    per_host: int = 0
    mesh: Any = None
    place: Any = "cpu"

    @property
    def of_rank(self) -> list[int]:
        """The replica of each rank."""
        ranks = 1 if self.mesh is None else along_shards(self.mesh).size()
        return [rank // max(ranks, self.per_host) for rank in range(self.comm.size)]

    @property
    def name(self) -> str:
        """As `optimizer.replica`."""
        return "shards" if self.mesh is not None else "host" if self.per_host else "rank"

    def mates(self, rank: int) -> list[int]:
        """The ranks of a rank's replica."""
        return [other for other, at in enumerate(self.of_rank) if at == self.of_rank[rank]]

    @property
    def shard(self) -> int:
        """This rank's shard of the model."""
        return 0 if self.mesh is None else along_shards(self.mesh).get_local_rank()

    def model(self, seed: int = 5) -> Any:
        return network(seed).to(self.place) if self.mesh is None else sharded(self.mesh, layers(seed))

    def wrap(self, model: nn.Module, kind: Any = "", **settings: Any) -> Any:
        """Around AdamW, one of OPTIMIZERS, or what `kind` makes of the parameters."""
        kind = OPTIMIZERS[kind] if kind in OPTIMIZERS else kind or (lambda p: torch.optim.AdamW(p, **ADAMW))
        given: dict[str, Any] = {
            "density": 0.05,
            "method": "union",
            "threshold_interval": 3,
            "sends": "updates",
            "density_warmup_steps": 0,
        }
        if self.per_host:
            given |= {"replica": "host", "ranks_per_host": self.per_host}
        over = self.comm if self.mesh is None else self.mesh["replicate"].get_group()
        return DistributedOptimizer(kind(model.parameters()), over, **given | settings)

    def trained(self, steps: int, kind: Any = "", seed: int = 5, **settings: Any) -> tuple[Any, Any]:
        """A model and its optimizer, after so many steps."""
        model = self.model(seed)
        optimizer = self.wrap(model, kind, **settings)
        train(model, optimizer, self.comm.rank, range(steps))
        return model, optimizer

    def check_agreed(self, model: nn.Module, optimizer: Any) -> None:
        """References are equal on the ranks that hold a shard, parameters in a host, and the agreed model and ratios on all."""
        comm, state = self.comm, own(optimizer)
        assert optimizer.reference.device == next(model.parameters()).device
        references = comm.allgather((self.shard, state["reference"].numpy().tobytes()))
        assert len(set(references)) == len({shard for shard, _ in references})
        if self.mesh is None:
            here = comm.allgather(held(model.parameters()).numpy().tobytes())
            assert len(set(zip(self.of_rank, here, strict=True))) == len(set(self.of_rank))
        with optimizer.agreed():
            assert len(set(comm.allgather(whole(model).tobytes()))) == 1
            trained = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
            agreed, dtype = held(trained), next(model.parameters()).dtype
            assert torch.equal(agreed, state["reference"][: len(agreed)].to(dtype).float())
        assert len(set(map(str, comm.allgather(state["ratio"])))) == 1


class Balance:
    """What the optimizers that hold this rank's shard changed, against what the reference moved and residuals hold."""

    def __init__(self, replicas: Replicas, model: nn.Module, optimizer: Any) -> None:
        self.replicas, self.optimizer = replicas, optimizer
        self.before = reference(optimizer).double().numpy()
        self.moved = np.zeros(len(self.before))
        inner, group = optimizer.inner.step, optimizer.reducer.group
        on_shards = on_shard(optimizer)

        def counted() -> None:
            stepped = list(model.parameters())
            if on_shards:  # whose step moves pieces of the parameters
                stepped = optimizer.inner.param_groups[0]["params"]
            was = held(stepped).double()
            inner()
            moved = (was - held(stepped).double()).numpy()
            if not on_shards:
                self.moved[: len(was)] += moved
            elif group.shard is not None:
                whole = np.zeros_like(self.moved)
                group.layout.insert(moved * group.host.size, group.shard, whole)
                self.moved += whole

        optimizer.inner.step = counted

    def over_this_shard(self, mine: NDArray[np.float64]) -> list[NDArray[np.float64]]:
        every = self.replicas.comm.allgather((self.replicas.shard, mine))
        return [each for shard, each in every if shard == self.replicas.shard]

    def check(self) -> None:
        moved = self.over_this_shard(self.moved)
        residual = self.optimizer.reducer.gathered_residual().astype(np.float64)
        applied = (self.before - reference(self.optimizer).double().numpy()) * len(moved)
        for vector, least in ((sum(moved), 0.01), (applied, 0.01), (residual, 1e-3 if len(moved) > 1 else 0)):
            assert self.replicas.comm.allreduce(np.abs(vector).max(initial=0), MPI.MAX) >= least
        assert np.allclose(sum(moved), sum(self.over_this_shard(residual)) + applied, atol=3e-6)
