"""Updates between the replicas of a model that FSDP2 shards, on ranks that are up: as many shards as divide them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

from collectives.errors import MissingRanksError
from oktopk import DistributedOptimizer
from oktopk.elastic import of_rank, redistribute
from oktopk.torch.shards import is_sharded, local_tensor
from tests.replicas import ADAMW, SHARDS, SIZE, Replicas, held, layers, mesh_of, sharded, whole
from tests.training import flat, gradients, loss, steady, train
from tests.updates import own, reference

pytestmark = [pytest.mark.mpi(min_size=2), pytest.mark.also(ranks=4), pytest.mark.also(ranks=6)]

LONG = pytest.mark.long("`make test` has each thing once, not each with each")


@pytest.fixture(
    scope="module", params=[pytest.param(n, marks=LONG) if n == 1 and SIZE == 3 else n for n in SHARDS]
)
def mesh(request: pytest.FixtureRequest, group: Any) -> Any:
    """Of two dimensions, replicas and shards; one shard has less to agree on."""
    return mesh_of(request.param)


@pytest.fixture(scope="module")
def one_shard(group: Any) -> Any:
    """Each rank is a replica."""
    return mesh_of(1)


@pytest.fixture(scope="module")
def one_replica(group: Any) -> Any:
    """All ranks shard one model."""
    return mesh_of(SIZE)


def wrap(model: nn.Module, mesh: Any, kind: str = "", **settings: Any) -> Any:
    return Replicas(MPI.COMM_WORLD, mesh=mesh).wrap(model, kind, **settings)


def trained(mesh: Any, steps: int, kind: str = "", **settings: Any) -> tuple[Any, Any]:
    """A sharded model and its optimizer, after so many steps."""
    return Replicas(MPI.COMM_WORLD, mesh=mesh).trained(steps, kind, **settings)


def check_agreed(model: nn.Module, optimizer: Any, mesh: Any, comm: MPI.Intracomm) -> None:
    Replicas(comm, mesh=mesh).check_agreed(model, optimizer)


def test_a_step_that_one_shard_skips_is_skipped_by_all(
    comm: MPI.Intracomm, one_replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, optimizer = trained(one_replica, 2, "sgd")
    agreed, reducer = reference(optimizer), optimizer.reducer
    residual = reducer.residual.copy()
    if comm.rank == 0:
        monkeypatch.setattr(reducer, "step", lambda *_, **__: reducer.skip_together(True))
    train(model, optimizer, comm.rank, range(2, 3))
    monkeypatch.undo()
    assert comm.allgather(optimizer.report.skipped) == [True] * comm.size
    assert torch.equal(reference(optimizer), agreed)
    assert (reducer.residual != residual).any() == (comm.rank > 0)  # what was taken back stays there
    train(model, optimizer, comm.rank, range(3, 5))
    check_agreed(model, optimizer, one_replica, comm)


def test_what_is_written_reaches_unsharded_modules(comm: MPI.Intracomm, mesh: Any) -> None:
    """At construction, within `agreed` and after it, by `load_state_dict` and by `close`."""

    def outputs() -> torch.Tensor:
        with torch.no_grad():
            return model(torch.ones(3, 20)).clone()

    model = sharded(mesh)
    parameters = list(model.parameters())  # the outermost module has others after a forward pass
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.1 * mesh["replicate"].get_local_rank())  # other ones in each replica
    inner = torch.optim.AdamW(parameters, **ADAMW)
    outputs()
    optimizer = steady(inner, mesh["replicate"].get_group(), density=0.05)
    assert len(set(comm.allgather(outputs().numpy().tobytes()))) == 1
    train(model, optimizer, comm.rank, range(3))
    own, alone = outputs(), layers()
    with optimizer.agreed():
        agreed, state = outputs(), optimizer.state_dict()
        weights = [parameter.detach().clone() for parameter in parameters]
        alone.load_state_dict({name: value.full_tensor() for name, value in model.state_dict().items()})
        assert torch.equal(agreed, alone(torch.ones(3, 20)))
    assert torch.equal(outputs(), own) and not torch.equal(agreed, own)
    assert len(set(comm.allgather(agreed.numpy().tobytes()))) == 1
    train(model, optimizer, comm.rank, range(3, 4))
    outputs()
    with torch.no_grad():
        for parameter, weight in zip(parameters, weights, strict=True):
            parameter.copy_(weight)
    model.reshard()
    outputs()
    optimizer.load_state_dict(state)
    assert torch.equal(outputs(), own)
    optimizer.close()
    assert torch.equal(outputs(), agreed)


def test_ranks_that_hold_different_shards_of_two_replicas_are_refused(comm: MPI.Intracomm) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    if comm.size != 4:
        pytest.skip("two replicas of two shards are four ranks, of `make test-long`")
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    crossed = [torch.distributed.new_group(ranks) for ranks in ([0, 3], [1, 2])]
    group = crossed[comm.rank in (1, 2)]
    with pytest.raises(ValueError, match="comm has ranks that hold different shards"):
        DistributedOptimizer(torch.optim.AdamW(sharded(mesh).parameters()), group)


def test_an_exchange_that_fails_for_one_shard_fails_for_all(
    comm: MPI.Intracomm, one_replica: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No rank is left in FSDP's next collective operation."""
    model, optimizer = trained(one_replica, 2)
    step = optimizer.reducer.step

    def fails(*arguments: Any, **keywords: Any) -> Any:
        step(*arguments, **keywords)
        raise ValueError("of one group alone")

    if comm.rank == comm.size - 1:
        monkeypatch.setattr(optimizer.reducer, "step", fails)
    with pytest.raises(ValueError, match="of one group alone"):
        train(model, optimizer, comm.rank, range(2, 3))
    monkeypatch.undo()
    train(model, optimizer, comm.rank, range(3, 5))
    check_agreed(model, optimizer, one_replica, comm)


def test_moments_are_saved_as_plain_tensors(comm: MPI.Intracomm, mesh: Any) -> None:
    """Beside them what torch's functions look at stays as torch makes it; both have the same memory."""
    model, optimizer = trained(mesh, 2)
    state = optimizer.state_dict()
    saved = of_rank(state["updates"])["optimizer"]["state"]
    for number, parameter in enumerate(model.parameters()):
        moment = saved[number]["exp_avg"]
        assert type(moment) is torch.Tensor
        assert moment.shape == parameter.to_local().shape
        whole = state["state"][number]["exp_avg"]
        assert is_sharded(whole)
        assert whole.to_local().data_ptr() == moment.data_ptr()
    optimizer.load_state_dict(state)
    assert all(is_sharded(kept["exp_avg"]) for kept in optimizer.inner.state.values())


def sums(ranks: MPI.Intracomm, mesh: Any, optimizer: Any) -> tuple[Any, Any]:
    """(the mean of the residuals, that of the first moments) over the ranks that have this rank's shard."""
    mates = ranks.Split(mesh["shard"].get_local_rank())
    states = [optimizer.inner.state[p] for p in optimizer.inner.param_groups[0]["params"]]
    moments = np.concatenate([kept["exp_avg"].to_local().numpy().reshape(-1) for kept in states])
    both = mates.allreduce(optimizer.reducer.residual) / mates.size, mates.allreduce(moments) / mates.size
    mates.Free()
    return both


@pytest.mark.skipif(SIZE != 4, reason="4 ranks")
@pytest.mark.parametrize("by", ["file", "dcp"])
def test_training_goes_on_with_another_number_of_replicas(
    comm: MPI.Intracomm, group: Any, tmp_path: Path, by: str
) -> None:
    """Of two replicas of two shards one, on two of the four ranks, and back."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import DeviceMesh

    two, one = mesh_of(2), DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("replicate", "shard"))
    folder, few = Path(str(comm.bcast(tmp_path))), comm.Split(comm.rank < 2)
    expected: Any = None
    for number, (mesh, ranks) in enumerate(((two, comm), (one, few), (two, comm))):
        if comm.rank < ranks.size:
            model = sharded(mesh, layers(5 + number))
            optimizer = wrap(model, mesh)
            process_group = (
                None if ranks is comm else torch.distributed.new_group([0, 1], use_local_synchronization=True)
            )
            replica, shard = mesh["replicate"].get_local_rank(), mesh["shard"].get_local_rank()
            before = folder / str(number - 1)
            if number:
                saved_replicas = 2 if mesh is one else 1

                def read(r: int, shard: int = shard, before: Path = before) -> Any:
                    if by == "file":
                        return torch.load(before / f"{r}-{shard}.pt", weights_only=True)
                    saved: Any = {
                        "optimizer": {
                            name: {f"rank-{2 * r + shard}": None} for name in ("reducer", "updates")
                        }
                    }
                    dcp.load(saved, checkpoint_id=before, no_dist=True)
                    return saved["optimizer"]

                whole_model = {"model": model.state_dict()}
                dcp.load(whole_model, checkpoint_id=before, process_group=process_group)
                model.load_state_dict(whole_model["model"])
                optimizer.load_state_dict(
                    redistribute(read, saved_replicas, replica, mesh["replicate"].size())
                )
                found = sums(ranks, mesh, optimizer)
                for mine, theirs in zip(found, expected or found, strict=True):
                    assert np.allclose(mine, theirs, atol=1e-7)
                    assert np.abs(mine).max() > 1e-5
            train(model, optimizer, comm.rank, range(4 * number, 4 * number + 4))
            check_agreed(model, optimizer, mesh, ranks)
            expected = sums(ranks, mesh, optimizer)
            (folder / str(number)).mkdir(exist_ok=True)
            torch.save(optimizer.state_dict(), folder / str(number) / f"{replica}-{shard}.pt")
            with optimizer.agreed():
                whole_state = {"model": model.state_dict(), "optimizer": optimizer}
                dcp.save(whole_state, checkpoint_id=folder / str(number), process_group=process_group)
        else:
            expected = None
        comm.barrier()
    few.Free()


def test_a_rank_without_any_element_takes_part(comm: MPI.Intracomm, mesh: Any, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model: Any = sharded(mesh, nn.Linear(20, 1, bias=False))
    optimizer = wrap(model, mesh, every=2, density=0.2)
    for step in range(9):
        optimizer.zero_grad()
        model(
            torch.randn(8, 20, generator=torch.Generator().manual_seed(31 * step + comm.rank))
        ).square().mean().backward()
        optimizer.step()
    check_agreed(model, optimizer, mesh, comm)
    state, parameters = copy.deepcopy(optimizer.state_dict()), model.state_dict()
    optimizer.load_state_dict(state)  # then the model, which on that rank writes nothing
    model.load_state_dict(parameters)
    train_once = torch.ones(1, 20)
    for _ in range(3):
        optimizer.zero_grad()
        model(train_once).sum().backward()
        optimizer.step()
    assert len(set(comm.allgather(own(optimizer)["steps"]))) == 1
    check_agreed(model, optimizer, mesh, comm)


def test_shards_that_are_moved_or_loaded_are_followed(comm: MPI.Intracomm, mesh: Any) -> None:
    model, optimizer = trained(mesh, 3)
    first = next(model.parameters())
    before = first.to_local().data_ptr()
    with torch.no_grad():
        model._apply(lambda tensor: tensor + 0)
    assert first.to_local().data_ptr() != before
    train(model, optimizer, comm.rank, range(3, 5))
    check_agreed(model, optimizer, mesh, comm)
    written = {name: torch.full_like(value, 0.25) for name, value in model.state_dict().items()}
    with optimizer.agreed():
        model.load_state_dict(written)
    assert (reference(optimizer)[: len(held(model.parameters()))] == 0.25).all()
    model.double()
    optimizer.zero_grad()
    with pytest.raises(
        ValueError, match=r"the type of a parameter .* was torch\.float32 when it was wrapped"
    ):
        optimizer.step()


def test_closed_optimizers_leave_the_agreed_model_for_another_one(comm: MPI.Intracomm, mesh: Any) -> None:
    model, optimizer = trained(mesh, 3)
    with pytest.raises(ValueError, match=r"a DistributedOptimizer is around this optimizer already"):
        DistributedOptimizer(optimizer.inner, mesh["replicate"].get_group(), density=0.1)
    optimizer.close()
    assert len(set(comm.allgather(whole(model).tobytes()))) == 1
    DistributedOptimizer(optimizer.inner, mesh["replicate"].get_group(), density=0.1)


def test_weights_beside_the_shards_are_refused(comm: MPI.Intracomm, mesh: Any) -> None:
    """Where one rank has no element to compare, too."""
    model = sharded(mesh, nn.Linear(20, 2))
    inner: Any = torch.optim.SGD(model.parameters(), lr=0.1)
    inner.averages = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match="SGD keeps weights beside the parameters") as told:
        DistributedOptimizer(inner, mesh["replicate"].get_group(), sends="updates", density=0.1)
    assert len(set(comm.allgather(str(told.value)))) == 1


Wrong = Callable[[Any], tuple[Any, dict[str, Any]]]


def laid_out(placement: Any) -> Wrong:
    from torch.distributed.tensor import distribute_tensor

    def make(mesh: Any) -> Any:
        return [nn.Parameter(distribute_tensor(torch.ones(4, 3), mesh["shard"], [placement]))], {}

    return make


def two_meshes(mesh: Any) -> Any:
    model = layers()
    from torch.distributed.fsdp import fully_shard

    fully_shard(model[0], mesh=mesh["shard"])
    fully_shard(model[2], mesh=mesh["replicate"])
    return [*model[0].parameters(), *model[2].parameters()], {}


def mistakes() -> dict[str, Wrong]:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Replicate

    def over_both(mesh: Any) -> Any:
        model: Any = fully_shard(layers(), mesh=mesh)
        return list(model.parameters()), {}

    def some(mesh: Any) -> Any:
        return [*sharded(mesh).parameters(), nn.Parameter(torch.ones(3))], {}

    def one(**settings: Any) -> Wrong:
        return lambda mesh: (list(sharded(mesh).parameters()), settings)

    def of_one_rank(mesh: Any) -> Any:
        rank = torch.distributed.get_rank()
        return list(sharded(mesh).parameters()), {"every": 2 if rank == SIZE - 1 else 1}

    def of_one_type(mesh: Any) -> Any:
        rank = torch.distributed.get_rank()
        return list(sharded(mesh).parameters()), {"clip_norm": "x" if rank == SIZE - 1 else 1.0}

    return {
        "a parameter is on a mesh of two dimensions, over which FSDP reduces densely": over_both,
        "a parameter is sharded, as by fully_shard: pass sends='updates'": one(sends="gradients"),
        "parameter.s. of the optimizer are sharded and 1 are not": some,
        "parameters are sharded over several meshes": two_meshes,
        "a parameter is laid out as R.*, not as Shard": laid_out(Replicate()),
        "replica='host' is not for sharded parameters": one(replica="host"),
        "levels='hosts' is not for sharded parameters": one(levels="hosts"),
        "ranks disagree on every" if SIZE > 1 else "^$": of_one_rank,
        "not supported between|must be real number": of_one_type,
        "comm has several ranks of one replica.*the one given to fully_shard: mesh..replicate...get_group": one(comm=None),
    }  # fmt: skip


def test_what_cannot_be_sharded_is_refused_by_one_sentence(
    comm: MPI.Intracomm, one_replica: Any, mesh: Any
) -> None:
    for sentence, make in mistakes().items():
        if sentence == "^$" or ("several" in sentence and mesh["shard"].size() == 1):
            continue
        parameters, settings = make(mesh)
        before = [p.detach().clone() for p in parameters]
        group = settings.pop("comm", mesh["replicate"].get_group())
        given = {"sends": "updates", "density": 0.1} | settings
        with pytest.raises(ValueError, match=sentence) as refused:
            DistributedOptimizer(torch.optim.SGD(parameters, lr=0.1), group, **given)
        assert len(set(comm.allgather(str(refused.value)))) == 1, sentence
        for parameter, value in zip(parameters, before, strict=True):
            assert torch.equal(local_tensor(parameter), local_tensor(value))


@pytest.mark.long("ranks wait 8 s for a missing one; `make test` has the transports' errors")
def test_a_rank_that_does_not_come_is_named(comm: MPI.Intracomm, mesh: Any) -> None:
    """On the ranks of its replica, on those that hold its shard, and on those that wait for either."""
    model, optimizer = trained(mesh, 2, timeout=6.0)
    gradients(model, optimizer, comm.rank, 2)
    missing, shards = comm.size - 1, mesh["shard"].size()
    if comm.rank == missing:
        comm.barrier()
    with pytest.raises(MissingRanksError) if comm.size > 1 else nullcontext() as told:
        optimizer.step()
    if comm.rank != missing:
        comm.barrier()
    sentences = comm.allgather("" if told is None else str(told.value))
    mates = range(missing + 1 - shards, missing + 1)
    for rank, sentence in enumerate(sentences[:-1]):
        if rank in mates:
            assert f"that shard one model: rank(s) {missing} did not come within 6 s" in sentence
        elif rank % shards == shards - 1:
            assert f"that hold one shard: rank(s) {missing} did not come within 6 s" in sentence
        else:
            assert "waited for another rank that is missing, did not come within" in sentence


@pytest.mark.long("compiles; `make test` has the optimizer that they meet")
@pytest.mark.parametrize("how", ["bfloat16", "compiled", "columns"])
def test_other_ways_of_fsdp_train(comm: MPI.Intracomm, mesh: Any, how: str) -> None:
    """A policy of mixed precision, a compiled model, and shards of columns."""
    from torch.distributed.fsdp import MixedPrecisionPolicy
    from torch.distributed.tensor import Shard

    options: dict[str, Any] = {}
    if how == "bfloat16":
        options["mp_policy"] = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    if how == "columns":
        options["shard_placement_fn"] = lambda parameter: Shard(parameter.ndim - 1)
    torch.manual_seed(5)
    width = 4 * SIZE
    model = sharded(
        mesh, nn.Sequential(nn.Linear(20 * SIZE, width), nn.Tanh(), nn.Linear(width, width)), **options
    )
    optimizer = wrap(model, mesh)
    trained = torch.compile(model, backend="aot_eager") if how == "compiled" else model
    start = whole(model)
    for step in range(5):
        optimizer.zero_grad()
        batch = torch.randn(8, 20 * SIZE, generator=torch.Generator().manual_seed(31 * step + comm.rank))
        trained(batch).float().square().mean().backward()
        optimizer.step()
        check_agreed(model, optimizer, mesh, comm)
    assert np.abs(whole(model) - start).max() > 1e-3


@pytest.mark.long("`make test` has elementwise optimizers")
def test_muon_computes_of_all_shards_what_it_computes_of_parameters(
    comm: MPI.Intracomm, one_replica: Any
) -> None:
    """Muon orthogonalises in bfloat16, whose sums the shards order otherwise."""

    def bare() -> nn.Sequential:
        torch.manual_seed(5)
        return nn.Sequential(nn.Linear(20, 30, bias=False), nn.Tanh(), nn.Linear(30, 7, bias=False))

    model, alone = sharded(one_replica, bare()), bare()
    muon = {"lr": 0.02, "weight_decay": 0.1}
    group = one_replica["replicate"].get_group()
    optimizer = steady(torch.optim.Muon(model.parameters(), **muon), group, sends="updates", density=0.1)
    plain = torch.optim.Muon(alone.parameters(), **muon)
    for step in range(4):
        optimizer.zero_grad()
        plain.zero_grad()
        loss(model, comm.rank, step).backward()
        loss(alone, comm.rank, step).backward()
        for p in alone.parameters():
            p.grad = torch.from_numpy(comm.allreduce(p.grad.numpy()) / comm.size)
        optimizer.step()
        plain.step()
    assert np.abs(flat(alone) - flat(bare())).max() > 0.03
    assert np.allclose(whole(model), flat(alone), rtol=0, atol=2e-3)


def test_ranks_that_did_not_shard_are_named_on_all(comm: MPI.Intracomm, one_shard: Any) -> None:
    model = sharded(one_shard) if comm.rank else layers()
    with pytest.raises(ValueError, match=r"parameters of rank\(s\) 0 of comm are not sharded"):
        DistributedOptimizer(torch.optim.AdamW(model.parameters()), one_shard["replicate"].get_group())
