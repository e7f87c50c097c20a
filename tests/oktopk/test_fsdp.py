"""Ok-Topk between two replicas of a model, started by torchrun; FSDP2 shards each over two ranks on CPUs, or on one GPU."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer
from oktopk.elastic import of_rank
from tests.conftest import NO_GPU
from tests.launched import ROOT, run_torchrun
from tests.oktopk.test_closed import every_call_refuses

HEAD = f"""
import sys
import warnings

sys.path.insert(0, {str(ROOT)!r})
warnings.simplefilter("ignore")
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.debug import CommDebugMode
from oktopk.torch import OkTopkReplicas

device = sys.argv[1]
dist.init_process_group("cpu:gloo,cuda:nccl" if device == "cuda" else "gloo")
torch.set_num_threads(1)
rank, ranks = dist.get_rank(), dist.get_world_size()
if device == "cuda":
    torch.cuda.set_device(rank)
shards = ranks // 2
mesh = init_device_mesh(device, (2, shards), mesh_dim_names=("replicate", "shard"))
replicate = mesh["replicate"].get_group()


def network(seed):
    torch.manual_seed(seed)
    layers = (nn.Linear(20, 51), nn.ReLU(), nn.Linear(51, 40), nn.ReLU(), nn.Linear(40, 7))
    return nn.Sequential(*layers).to(device)


def sharded(seed):
    model = network(seed)
    fully_shard(model[2], mesh=mesh["shard"])
    return fully_shard(model, mesh=mesh["shard"])


def loss(model, step, of=rank):
    inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + of)).to(device)
    return nn.functional.mse_loss(model(inputs), inputs[:, :7])


def train(model, steps):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in steps:
        optimizer.zero_grad()
        loss(model, step).backward()
        optimizer.step()


def whole(model):
    return torch.cat([p.full_tensor().detach().reshape(-1) for p in model.parameters()])


def same_on_all_ranks(vector):
    everyone = [torch.empty_like(vector) for _ in range(ranks)]
    dist.all_gather(everyone, vector)
    return all(torch.equal(vector, other) for other in everyone)
"""

DENSE = """
model, own = sharded(rank), network(0)  # other values on every rank: replicas become the first one, whose shards differ
replicas = OkTopkReplicas(model, replicate, method="dense")
start = whole(model)
at = 0
for p in own.parameters():
    p.data.copy_(start[at : at + p.numel()].view_as(p))
    at += p.numel()
for step in range(3):
    with CommDebugMode() as counted:
        train(model, [step])
counts = {str(name): number for name, number in counted.get_comm_counts().items()}
assert not any("allreduce" in name or "all_reduce" in name for name in counts), counts
assert shards == 1 or any("reduce_scatter" in name for name in counts), counts
optimizer = torch.optim.SGD(own.parameters(), lr=0.1)
for step in range(3):
    optimizer.zero_grad()
    for other in range(ranks):
        (loss(own, step, other) / ranks).backward()
    optimizer.step()
expected = torch.cat([p.detach().reshape(-1) for p in own.parameters()])
assert torch.allclose(whole(model), expected, atol=1e-5), (whole(model) - expected).abs().max()
assert same_on_all_ranks(whole(model))
"""

SPARSE = """
model = sharded(0)
replicas = OkTopkReplicas(model, replicate, density=0.05, threshold_interval=3)
train(model, range(4))
assert sorted(replicas.reports) == ["", "2"]
for report in replicas.reports.values():
    assert report.method == "oktopk" and report.words < 6 * report.k
assert device == "cpu" or not any(reducer.p2p_unavailable_reason for reducer in replicas._reducers.values())
assert same_on_all_ranks(whole(model))
dcp.save({"replicas": replicas}, checkpoint_id=sys.argv[2])
saved, parameters = replicas.state_dict(), {k: v.clone() for k, v in model.state_dict().items()}
residuals = replicas.gathered_residuals()
assert all(residual.any() for residual in residuals.values())
train(model, range(4, 7))
again = sharded(1)
again.load_state_dict(parameters)
other = OkTopkReplicas(again, replicate, density=0.05, threshold_interval=3)
other.load_state_dict(saved)
dcp.load({"replicas": other}, checkpoint_id=sys.argv[2])
train(again, range(4, 7))
assert torch.equal(whole(again), whole(model))
kept = other.gathered_residuals()
try:
    other.load_state_dict({"another": None})
except ValueError as error:
    assert "differ in sharded modules" in str(error)
else:
    raise AssertionError("a state of other modules was taken")
broken = loss(again, 7) * (float("nan") if rank == ranks - 1 else 1.0)
broken.backward()
assert rank % shards < shards - 1 or all(report.skipped for report in other.reports.values())
norm = nn.utils.clip_grad_norm_(again.parameters(), 1.0)
assert not torch.isfinite(norm.full_tensor()), norm
other.skip()
after = other.gathered_residuals()
assert all(torch.equal(torch.from_numpy(after[name]), torch.from_numpy(held)) for name, held in kept.items())
again.zero_grad()
train(again, range(8, 10))
assert torch.isfinite(whole(again)).all() and same_on_all_ranks(whole(again))
"""

MISTAKES = """
for wrong, settings, text in (
    (network(0), {}, "no module that fully_shard was called on"),
    (sharded(0), {"nonfinite": "raise"}, "nonfinite is not for the replicas"),
    (sharded(0), {"densty": 0.1}, "did you mean density"),
    (fully_shard(network(0), mesh=mesh), {}, "on a mesh of two dimensions"),
    (network(rank) if rank < shards else sharded(0), {}, "rank 0: the model has no module"),
):
    try:
        OkTopkReplicas(wrong, replicate, **settings)
    except ValueError as error:
        assert text in str(error), error
    else:
        raise AssertionError(text)
"""


@pytest.mark.long("starts ranks for each device and script; `make test` has the reducer that they use")
@pytest.mark.timeout(180)
@pytest.mark.parametrize("script", [DENSE, SPARSE, MISTAKES], ids=["dense", "sparse", "mistakes"])
@pytest.mark.parametrize(
    ("device", "ranks"),
    [
        ("cpu", 4),
        pytest.param("cuda", 2, marks=pytest.mark.skipif(torch.cuda.device_count() < 2, reason=NO_GPU)),
    ],
    ids=["cpu", "cuda"],
)
def test_replicas(tmp_path: Path, device: str, ranks: int, script: str) -> None:
    path = tmp_path / "train.py"
    path.write_text(HEAD + script + '\nprint("done\\n", end="", flush=True)\n')
    done = run_torchrun(ranks, str(path), device, str(tmp_path / "checkpoint"))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("done") == ranks


# On ranks that are up, each a replica


@pytest.fixture
def replicas(comm: MPI.Intracomm, group: Any) -> Any:
    """Makes a model that is sharded over one rank, and its replicas."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from oktopk.torch import OkTopkReplicas

    mesh = init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("replicate", "shard"))
    made: list[OkTopkReplicas] = []

    def make(
        apart: Sequence[int] = (0,), **settings: Any
    ) -> tuple[Any, OkTopkReplicas, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 2))
        for number in apart:
            fully_shard(model[number], mesh=mesh["shard"])
        fully_shard(model, mesh=mesh["shard"])
        made.append(OkTopkReplicas(model, mesh["replicate"].get_group(), **settings))
        return model, made[-1], torch.optim.SGD(model.parameters(), lr=0.1)

    yield make
    for each in made:
        each.close()


def backward(model: Any, rank: int, number: int, share: float = 1.0) -> None:
    inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * number + rank))
    (model(inputs).square().mean() * share).backward()


@pytest.mark.mpi
@pytest.mark.parametrize("how", ["set_requires_gradient_sync", "set_requires_all_reduce"])
def test_gradients_are_reduced_once_where_they_are_accumulated(
    comm: MPI.Intracomm, replicas: Any, how: str
) -> None:
    model, made, optimizer = replicas(method="dense")
    plain = nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3), nn.Linear(3, 2))
    plain.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
    alone = torch.optim.SGD(plain.parameters(), lr=0.1)
    for step in range(3):
        optimizer.zero_grad()
        alone.zero_grad()
        for part in range(3):
            getattr(model, how)(part == 2)
            backward(model, comm.rank, 3 * step + part)
            for rank in range(comm.size):
                backward(plain, rank, 3 * step + part, 1 / comm.size)
        optimizer.step()
        alone.step()
    assert [reducer.steps for reducer in made._reducers.values()] == [3, 3]
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert np.allclose(mine.full_tensor().detach(), theirs.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.mpi
def test_parameters_that_are_frozen_later_are_named_or_stay(comm: MPI.Intracomm, replicas: Any) -> None:
    model, _, optimizer = replicas(density=0.2)
    backward(model, comm.rank, 0)
    optimizer.step()
    optimizer.zero_grad()
    model[0].requires_grad_(False)  # a module of its own
    before = model[0].weight.full_tensor().clone()
    backward(model, comm.rank, 1)
    optimizer.step()
    assert torch.equal(model[0].weight.full_tensor(), before)
    model[3].requires_grad_(False)  # a part of one
    with pytest.raises(
        Exception, match=r"the gradient of module '' has 18 elements .* had 26: .* fully_shard on those"
    ):
        backward(model, comm.rank, 2)


@pytest.mark.mpi
def test_replicas_that_were_closed_refuse_every_call_and_the_backward_pass(
    comm: MPI.Intracomm, replicas: Any
) -> None:
    model, made, _ = replicas(density=0.2)
    backward(model, comm.rank, 0)
    held = [made, made._transport, *made._reducers.values()]
    made.close()
    for closed in held:
        every_call_refuses(closed)
    with pytest.raises(RuntimeError, match="this OkTopkReplicas was closed"):
        backward(model, comm.rank, 1)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("steps", [0, 1])
def test_a_state_that_one_rank_cannot_load_is_loaded_into_no_module(
    comm: MPI.Intracomm, replicas: Any, steps: int
) -> None:
    model, made, _ = replicas(density=0.2)
    for step in range(2 * steps):
        backward(model, comm.rank, step)
    saved = copy.deepcopy(of_rank(made.state_dict()))
    damaged: dict[str, tuple[Any, str]] = {"none": (None, "the state is a NoneType, not a dict")}
    if steps:
        last = list(made._reducers)[-1]
        damaged["empty"] = ({}, "the state and the model differ in sharded modules")
        damaged["cut"] = (
            saved | {last: saved[last] | {"residual": saved[last]["residual"][:-1]}},
            "residual of the state is float32",
        )
        backward(model, comm.rank, 2)
    before = {name: get.tobytes() for name, get in made.gathered_residuals().items()}
    for state, sentence in damaged.values():
        with pytest.raises(ValueError, match=f"^rank {comm.size - 1}: .*{sentence}"):
            made.load_state_dict(state if comm.rank == comm.size - 1 else saved)
        assert before == {name: get.tobytes() for name, get in made.gathered_residuals().items()}
    made.load_state_dict(saved)
    backward(model, comm.rank, 2)


@pytest.mark.mpi
def test_a_model_whose_parameters_are_all_in_sharded_layers_loads_its_state(
    comm: MPI.Intracomm, replicas: Any
) -> None:
    model, made, _ = replicas((0, 2, 3), density=0.2)
    backward(model, comm.rank, 0)
    saved = copy.deepcopy(made.state_dict())
    before = {name: get.copy() for name, get in made.gathered_residuals().items()}
    backward(model, comm.rank, 1)
    made.load_state_dict(saved)
    assert sorted(before) == ["0", "2", "3"]
    for name, residual in made.gathered_residuals().items():
        assert np.array_equal(residual, before[name])
    lacking = {name: held for name, held in of_rank(saved).items() if name != "2"}
    with pytest.raises(ValueError, match="the state and the model differ in sharded modules: '2'"):
        made.load_state_dict(lacking)


@pytest.mark.long("waits for a limit of 2 s; `make test` has the same of a reducer")
@pytest.mark.mpi(min_size=2)
def test_a_rank_that_alone_loads_a_state_of_replicas_is_named(comm: MPI.Intracomm, replicas: Any) -> None:
    model, made, _ = replicas(density=0.2, timeout=2.0)
    backward(model, comm.rank, 0)
    saved = made.state_dict()
    comm.Barrier()
    with pytest.raises(
        Exception, match=r"step 1: rank\(s\) 1 called OkTopkReplicas.load_state_dict instead, and did not"
    ):
        if comm.rank == 1:
            made.load_state_dict(saved)
        else:
            backward(model, comm.rank, 1)
    comm.Barrier()


@pytest.mark.mpi
def test_gradients_of_shards_are_not_sent_by_a_wrapped_optimizer(comm: MPI.Intracomm, replicas: Any) -> None:
    _, _, optimizer = replicas(density=0.2)
    with pytest.raises(
        ValueError, match=r"a parameter is sharded, as by fully_shard: take oktopk\.torch\.OkTopkReplicas"
    ):
        DistributedOptimizer(optimizer, comm)


@pytest.mark.mpi(min_size=2)
def test_rates_of_replicas_that_part_are_named(comm: MPI.Intracomm, replicas: Any) -> None:
    model, _, optimizer = replicas(density=0.2)
    optimizer.param_groups[0]["lr"] = 0.5 if comm.rank else 0.25
    with pytest.raises(
        Exception, match=r"'lr' of the optimizer's group 0 differs between ranks: 0\.25 on rank 0, 0\.5 on"
    ):
        backward(model, comm.rank, 0)


@pytest.mark.mpi
def test_a_table_of_replicas_that_the_forward_pass_rescales_is_warned_of(
    comm: MPI.Intracomm, group: Any
) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from oktopk.torch import OkTopkReplicas

    mesh = init_device_mesh("cpu", (comm.size, 1), mesh_dim_names=("replicate", "shard"))
    model = fully_shard(nn.Sequential(nn.Embedding(5, 4, max_norm=1.0)), mesh=mesh["shard"])
    with pytest.warns(UserWarning, match=r"Embedding\(max_norm") if comm.rank == 0 else nullcontext():
        OkTopkReplicas(model, mesh["replicate"].get_group()).close()
