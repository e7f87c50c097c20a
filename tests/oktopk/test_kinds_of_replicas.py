"""What holds whatever a replica is: a rank, the ranks of a host, or those that shard a model. Each guarantee once, over them."""

from __future__ import annotations

import copy
import functools
import io
import math
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.optim._functional import adam

from oktopk import NonFiniteGradientError, levels
from oktopk.elastic import of_rank
from oktopk.torch.shards import is_sharded, local_tensor
from tests.devices import get, need_gpus, on_real_gpus, torch_device
from tests.replicas import (
    OPTIMIZERS,
    SHARDS,
    SIZE,
    Balance,
    Replicas,
    along_shards,
    held,
    layers,
    mesh_of,
    sharded,
    whole,
)
from tests.training import flat, gradients, loss, network, train
from tests.updates import go_on_behind_the_first_exchanges, own, reference, unsent

pytestmark = [pytest.mark.mpi, pytest.mark.also(ranks=6)]

LONG = pytest.mark.long("`make test` has each thing once, not each with each")


def case(kind: str, *values: Any, long: bool = False, least: int = 1) -> Any:
    """Parameters of a test: a kind of replicas, and more. On one rank no kind is sharded, which has tests of its own there.

    Hosts and shards are two of two on four ranks; of single ranks three are enough.
    """
    marks = [pytest.mark.mpi(min_size=max(least, 2 if "shard" in kind else 1)), *[LONG] * long]
    marks += [on_real_gpus] * ("on GPUs" in kind)
    if " of " in kind:
        marks.append(pytest.mark.also(ranks=4))
    return pytest.param(kind, *values, marks=marks)


def shards(*values: Any, long: bool = False) -> list[Any]:
    """Cases of as many shards as divide the ranks; one shard has less to agree on."""
    return [case(f"shards of {n}", *values, long=long or (n == 1 and SIZE == 3)) for n in SHARDS]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts whose shards begin and end within parameters."""
    monkeypatch.setattr(levels, "BLOCK", 64)


@pytest.fixture(scope="module")
def meshes(group: Any) -> Callable[[int], Any]:
    """The mesh of so many shards, made once."""
    return functools.cache(functools.partial(mesh_of, name="part"))


@pytest.fixture
def replicas(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Replicas:
    """Of the kind that a test is told: "ranks", "hosts of 2", "hosts of 2 on GPUs", "shards of 3", or this rank "alone"."""
    kind, _, place = request.param.partition(" on ")
    kind, _, number = kind.partition(" of ")
    if place:
        need_gpus(int(number or 0))
        torch.cuda.set_device(torch_device("cuda", comm))
        return Replicas(comm, int(number or 0), place=torch_device("cuda", comm))
    if kind == "shards":
        return Replicas(comm, mesh=request.getfixturevalue("meshes")(int(number)))
    return Replicas(MPI.COMM_SELF if kind == "alone" else comm, int(number or 0))


def over(*names: str, cases: list[Any]) -> Any:
    """The mark of a test of these cases."""
    return pytest.mark.parametrize(("replicas", *names), cases, indirect=["replicas"], ids=str)


def moments(optimizer: Any) -> torch.Tensor:
    """A copy of what the wrapped optimizer keeps of this rank's parameters, numbers of steps apart."""
    states = optimizer.state.values()
    kept = [state[name] for state in states for name in sorted(state) if name != "step"]
    return held(kept) if kept else torch.empty(0)


EACH_KIND = [
    case("ranks", {"kind": "adamw", "nonfinite": "skip"}),
    case("ranks", {"kind": "adamw", "every": 3}),
    case("ranks", {"kind": "adamw foreach", "local_share": 0.0}),
    case("ranks", {"kind": "sgd", "method": "gtopk"}),
    case("ranks", {"kind": "adam tensor rate", "method": "oktopk"}),
    case("ranks", {"first_density": 0.16, "density_warmup_steps": 6}),
    case("hosts of 2", {}),
    case("hosts of 3", {"every": 3, "wire": "int4", "local_share": 0.0}),
    case("hosts of 2", {"clip_norm": 0.1, "method": "oktopk"}),
]
EACH_KIND += [
    case(f"shards of {number}", settings, long=at > 0)
    for number in SHARDS
    for at, settings in enumerate(
        (
            {},
            {"every": 3, "wire": "int4"},
            {"kind": "oktopk adamw", "method": "oktopk"},
            {"kind": "sgd", "clip_norm": 0.1, "local_share": 0.0},
        )
    )
]


ON_GPUS = [
    case("ranks on GPUs", {"kind": "adamw", "nonfinite": "skip"}),
    case("ranks on GPUs", {"kind": "adamw foreach", "method": "oktopk", "wire": "int4"}),
    case("ranks on GPUs", {"kind": "sgd", "every": 2}),
    case("ranks on GPUs", {"kind": "adam tensor rate", "method": "oktopk"}),
    case("ranks on GPUs", {"kind": "adamw capturable"}),
    case("ranks on GPUs", {"kind": "oktopk adamw", "wire": "int4"}),
    case("hosts of 2 on GPUs", {"kind": "adamw", "nonfinite": "skip"}),
    case("hosts of 2 on GPUs", {"kind": "oktopk adamw", "clip_norm": 0.1}),
    case("hosts of 2 on GPUs", {"kind": "sgd", "every": 2, "method": "oktopk"}),
    case("hosts of 3 on GPUs", {"kind": "adamw foreach", "wire": "int4"}),
]


@over("settings", cases=EACH_KIND + ON_GPUS)
def test_references_are_equal_after_every_exchange(replicas: Replicas, settings: dict[str, Any]) -> None:
    """And lie where the parameters do, whatever torch's default device.

    Parameters stay where they are, as a captured graph needs, also where one rank's NaN is skipped.
    """
    model, rank = replicas.model(), replicas.comm.rank
    with torch.device("meta" if replicas.place == "cpu" else "cpu"):
        optimizer = replicas.wrap(model, **settings)
    assert optimizer.replica == replicas.name
    start, addresses = whole(model), [local_tensor(p).data_ptr() for p in model.parameters()]
    for step in range(9 if "every" in settings else 7 if "first_density" in settings else 5):
        gradients(model, optimizer, rank, step)
        if step == 2 and rank == 0 and "nonfinite" in settings:
            next(model.parameters()).grad[0, 0] = math.nan
        optimizer.step()
        replicas.check_agreed(model, optimizer)
    assert np.isfinite(whole(model)).all() and not np.array_equal(whole(model), start)
    assert [local_tensor(p).data_ptr() for p in model.parameters()] == addresses
    assert any(replicas.comm.allgather(optimizer.reducer.gathered_residual().any()))


@over(
    "settings",
    cases=[
        case("hosts of 1", {"wire": "plain", "every": 2}),
        case("shards of 1", {"every": 2, "clip_norm": 0.1}),
    ],
)
def test_replicas_of_one_rank_train_as_ranks_bit_for_bit(
    replicas: Replicas, settings: dict[str, Any]
) -> None:
    comm, ends = replicas.comm, []
    for kind in (Replicas(comm), replicas):
        model = layers() if replicas.mesh is not None and kind is not replicas else replicas.model()
        optimizer = kind.wrap(model, **settings)
        train(model, optimizer, comm.rank, range(6))
        assert optimizer.replica == kind.name and f"replica={kind.name!r}" in repr(optimizer)
        words = optimizer.report.control_words if replicas.mesh is not None else 0  # hosts agree on more
        ends.append((reference(optimizer).numpy().tobytes(), whole(model).tobytes(), words))
    assert ends[0] == ends[1]
    assert ends[0][1] != whole(replicas.model()).tobytes()


HALF: dict[str, Any] = {"local_share": 0.5}
SHARED = HALF | {"every": 2}


@over(
    "dtype",
    "settings",
    cases=[
        case("ranks", torch.float32, {"method": "oktopk"}),
        case("ranks", torch.bfloat16, {}),
        case("ranks", torch.float32, {"every": 2, "wire": "int4"}),
        case("hosts of 2", torch.float32, SHARED | {"method": "oktopk"}),
        case("hosts of 3", torch.bfloat16, SHARED),
        case("hosts of 2", torch.bfloat16, HALF),  # whose ranks step on shards
        case("ranks on GPUs", torch.bfloat16, HALF),
        *(case("hosts of 2 on GPUs", torch.float32, each) for each in (HALF, SHARED)),
        case("hosts of 2 on GPUs", torch.bfloat16, HALF),
        *(case(f"shards of {number}", torch.float32, {"every": 2}) for number in SHARDS),
    ],
)
def test_nothing_is_lost_between_the_optimizers_and_the_reference(
    replicas: Replicas, dtype: torch.dtype, settings: dict[str, Any]
) -> None:
    model, comm = replicas.model().to(dtype), replicas.comm
    optimizer = replicas.wrap(model, "sgd", density=0.1, **settings)
    balance = Balance(replicas, model, optimizer)
    for step in range(8):
        optimizer.zero_grad()
        batch = torch.randn(8, 20, generator=torch.Generator().manual_seed(31 * step + comm.rank))
        model(batch.to(replicas.place, dtype)).float().square().mean().backward()
        optimizer.step()
    assert next(model.parameters()).dtype == dtype
    balance.check()
    replicas.check_agreed(model, optimizer)
    if replicas.per_host:  # half of what the host has not sent, whose residual is times its ranks
        shown = reference(optimizer).numpy() - 0.5 * unsent(optimizer) / optimizer.reducer.group.host.size
        assert np.allclose(flat(model), shown, rtol=0 if dtype == torch.float32 else 2**-8, atol=1e-6)


@over(
    "what",
    "nonfinite",
    cases=[
        *(
            case("ranks", *given, least=2)
            for given in (("nan", "raise"), ("nan", "skip"), ("momenta", "skip"))
        ),
        *(case(f"shards of {number}", what, "raise") for number in SHARDS for what in ("nan", "momenta")),
    ],
)
def test_nothing_is_lost_by_an_error(replicas: Replicas, what: str, nonfinite: str) -> None:
    """Where one rank's gradient is not finite, or its momentum is another, which all ranks are told alike."""
    model, comm = replicas.model(), replicas.comm
    optimizer = replicas.wrap(model, "sgd", density=0.1, every=3, nonfinite=nonfinite)
    balance = Balance(replicas, model, optimizer)
    last, fails = comm.rank == comm.size - 1, what == "momenta" or nonfinite == "raise"
    differs = "'momentum' of the optimizer's group 0 differs between ranks: 0.9 on"
    sentence = "NaN or Inf" if what == "nan" else differs
    for window in range(4):
        expected = pytest.raises((ValueError, NonFiniteGradientError), match=sentence)
        with expected if fails and window == 1 else nullcontext() as told:
            for step in range(3 * window, 3 * window + 3):
                gradients(model, optimizer, comm.rank, step)
                if step == 4 and what == "nan" and last:
                    local_tensor(next(model.parameters()).grad)[0, 0] = math.nan
                if step == 5 and what == "momenta" and last:
                    optimizer.param_groups[0]["momentum"] = 0.5
                optimizer.step()
        assert told is None or len(set(comm.allgather(str(told.value)))) == 1
        optimizer.param_groups[0]["momentum"] = 0.9
        # ranks that shard a model leave the moves of a window that fails in it until the next exchange
        if window != 1 or replicas.mesh is None:
            balance.check()
    states = comm.allgather(of_rank(optimizer.state_dict()["reducer"])["residual"] is None)
    assert states == [False] * comm.size
    replicas.check_agreed(model, optimizer)


@over("kind", "every", cases=[case("ranks", "sgd", 2, least=2), case("ranks", "adam", 1, least=2)])
def test_ranks_have_rates_of_their_own_without_decay(replicas: Replicas, kind: str, every: int) -> None:
    """From the start, by a scheduler, and from a state; unless it is zero."""
    model, comm, ends = replicas.model(), replicas.comm, []
    more = {"momentum": 0.9} if kind == "sgd" else {}
    rule = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam}[kind]
    kind_of = functools.partial(rule, lr=0.01 * (1 + comm.rank), weight_decay=0.01, **more)
    optimizer = replicas.wrap(model, kind_of, every=every)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2 + comm.rank, 0.5)
    for step in range(8):
        train(model, optimizer, comm.rank, range(step, step + 1))
        schedule.step()
        replicas.check_agreed(model, optimizer)
    state, weights = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    other = replicas.model(3)
    loaded = replicas.wrap(other, kind_of, every=every)
    other.load_state_dict(weights)
    loaded.load_state_dict(state)
    for network_, each in ((model, optimizer), (other, loaded)):
        train(network_, each, comm.rank, range(8, 8 + 2 * every))
        ends.append(reference(each))
    assert torch.equal(*ends)
    rates = comm.allgather(loaded.param_groups[0]["lr"])
    assert len(set(rates)) > 1
    damaged = copy.deepcopy(loaded.state_dict())
    if comm.rank == 1:
        of_rank(damaged["updates"])["optimizer"]["param_groups"][0]["lr"] = "abc"
    with pytest.raises(
        ValueError, match="'lr' of the optimizer's group 0 differs between ranks: .* abc on rank 1"
    ):
        loaded.load_state_dict(damaged)
    loaded.param_groups[0]["lr"] *= comm.rank > 0
    with pytest.raises(ValueError, match="'lr' of .* differs between ranks: 0.0 on rank 0, not 0 on rank 1"):
        train(other, loaded, comm.rank, range(20, 20 + every))


@over("kind", cases=[case("ranks", "sgd", least=2), case("ranks", "adamw", least=2)])
def test_rates_that_all_ranks_need_are_compared(replicas: Replicas, kind: str) -> None:
    """Where the optimizer keeps nothing, and where decay took one in a step before the exchange."""
    model, comm = replicas.model(), replicas.comm
    rule = torch.optim.SGD if kind == "sgd" else torch.optim.AdamW
    optimizer = replicas.wrap(model, functools.partial(rule, lr=0.01, weight_decay=0.1), every=2)
    (group,) = optimizer.param_groups
    train(model, optimizer, comm.rank, range(2))
    group["lr"] = 0.01 * (1 + comm.rank)
    train(model, optimizer, comm.rank, range(2, 3))
    if kind == "adamw":
        group["weight_decay"] = 0.0
    what = "'lr'" if kind == "sgd" else "'decay since the last exchange'"
    with pytest.raises(ValueError, match=f"{what} of the optimizer's group 0 differs between ranks"):
        train(model, optimizer, comm.rank, range(3, 4))


@over(
    "nonfinite",
    "every",
    cases=[
        *(case("ranks", how, every) for how, every in (("raise", 2), ("skip", 1))),
        *(case("hosts of 2", *given, least=3) for given in (("raise", 2), ("skip", 1))),
        *shards("raise", 2),
        *shards("skip", 2, long=True),
    ],
)
def test_a_replica_with_a_nonfinite_gradient_does_not_step(
    replicas: Replicas, nonfinite: str, every: int
) -> None:
    model, comm = replicas.model(), replicas.comm
    optimizer = replicas.wrap(model, nonfinite=nonfinite, every=every)
    bad = min(1, comm.size - 1)
    mates, raises = replicas.mates(bad), nonfinite == "raise"
    here = comm.rank in mates
    train(model, optimizer, comm.rank, range(every))
    gradients(model, optimizer, comm.rank, 9)
    if comm.rank == bad:
        local_tensor(next(model.parameters()).grad)[0, 0] = math.inf
    before, parameters = moments(optimizer), held(model.parameters())
    agreed = reference(optimizer)
    named = rf"on rank\(s\) {', '.join(map(str, mates))}$"
    fails = pytest.raises(NonFiniteGradientError, match=named) if raises else nullcontext()
    with fails if every == 1 else nullcontext():
        optimizer.step()
    assert torch.equal(moments(optimizer), before) == (here or not len(before))  # a rank may have no shard
    assert {float(state["step"]) for state in optimizer.state.values()} == {every + 1.0 - here}
    if every == 2:
        assert torch.equal(held(model.parameters()), parameters) == here
        with fails:
            train(model, optimizer, comm.rank, range(10, 11))
    if raises or len(mates) < comm.size:
        assert torch.equal(reference(optimizer), agreed) == raises
    left = comm.allgather(optimizer.reducer.gathered_residual().any())
    others = {*range(comm.size)} - {*mates}
    assert any(left[rank] for rank in others) == bool(others)  # what they have done stays
    train(model, optimizer, comm.rank, range(11, 11 + 2 * every))
    assert np.isfinite(whole(model)).all()
    replicas.check_agreed(model, optimizer)


@over(cases=[case("ranks"), case("hosts of 2", least=3)])
def test_a_nonfinite_move_is_found_on_all_ranks(replicas: Replicas) -> None:
    """Of one rank's optimizer, which holds a shard of its host's displacement."""
    comm = replicas.comm
    model, optimizer = replicas.trained(2, "sgd")
    before, bad = flat(model), comm.size - 1 if optimizer.reducer.shards > 1 else 0
    if comm.rank == bad:
        for state in optimizer.state.values():
            state["momentum_buffer"].fill_(math.inf)
    with pytest.raises(NonFiniteGradientError, match=f"rank.s. {bad}"):
        train(model, optimizer, comm.rank, range(2, 3))
    assert np.isfinite(flat(model)).all()
    assert comm.rank != bad or replicas.per_host or np.array_equal(flat(model), before)
    replicas.check_agreed(model, optimizer)


@over(
    "kind",
    cases=[
        case("ranks", "adamw", least=2),
        case("ranks", "oktopk adamw", least=2),
        case("hosts of 2", "adamw", least=3),
        *shards("adamw"),
    ],
)
@pytest.mark.filterwarnings("error::UserWarning")  # of a scheduler that sees no step of the optimizer
def test_an_inf_of_a_gradscaler_skips_its_replica(replicas: Replicas, kind: str) -> None:
    """After a step in which that rank has no gradients."""
    model, comm = replicas.model(), replicas.comm
    optimizer = replicas.wrap(model, kind)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer.inner, 0.9)
    here, without = comm.rank in replicas.mates(1), comm.rank == 1 and replicas.mesh is None
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(loss(model, comm.rank, step)).backward()
        if without and step == 1:
            optimizer.zero_grad()
        elif comm.rank == 1 and step == 2:
            local_tensor(next(model.parameters()).grad)[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        replicas.check_agreed(model, optimizer)
    assert scaler.get_scale() == (512.0 if here else 1024.0)
    steps = {float(state["step"]) for state in optimizer.state.values()}
    assert steps == {4.0 - here - (without and not replicas.per_host)}  # others of the host have gradients


def _values(case: Any) -> tuple[str, dict[str, Any]]:
    kind, settings = case.values
    return kind, settings


def gone_on(replicas: str, every: int, how: str, **settings: Any) -> Any:
    return case(replicas, {"every": every} | settings, how)


@over(
    "settings",
    "how",
    cases=[
        gone_on("ranks", 1, "own", method="oktopk"),
        gone_on("ranks", 1, "own, into one that is running", kind="oktopk adamw"),
        gone_on("ranks", 1, "own, in other memory"),
        gone_on("ranks", 1, "own, after a write"),
        gone_on("ranks", 3, "own, the optimizer first"),
        gone_on("ranks", 3, "agreed"),
        gone_on("ranks", 1, "agreed, the optimizer first"),
        gone_on("ranks", 1, "agreed, saved within"),
        gone_on("ranks", 2, "agreed, loaded within one that is running", local_share=0.5),
        gone_on("hosts of 3", 3, "own"),
        gone_on("hosts of 2", 1, "own, after a write"),
        gone_on("hosts of 2", 3, "agreed"),
        gone_on("hosts of 2", 1, "agreed, loaded within"),
        gone_on("hosts of 2", 1, "torch's distributed checkpoint"),
        *shards({"every": 2}, "own"),
        *(
            each
            for every, how in (
                (1, "own"),
                (1, "agreed"),
                (2, "agreed"),
                (1, "torch's distributed checkpoint"),
            )
            for each in shards({"every": every}, how, long=True)
        ),
        *(pytest.param(*each.values, "own", marks=each.marks) for each in ON_GPUS),
        *(
            case(kind.removesuffix(" on GPUs"), more, "own", long=True)
            for kind, more in map(_values, ON_GPUS)
        ),
    ],
)
def test_training_goes_on_from_a_state_bit_for_bit(
    replicas: Replicas, settings: dict[str, Any], how: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """In the middle of a window, too. Of the agreed model, each rank's own parameters are in its state."""
    import torch.distributed.checkpoint as dcp

    comm = replicas.comm
    settings = {"clip_norm": 0.0 if replicas.mesh is None else 0.5} | settings
    model = replicas.model()
    optimizer = replicas.wrap(model, **settings)
    for step in range(5):
        gradients(model, optimizer, comm.rank, step)
        if step == 2 and comm.rank == 0 and "nonfinite" in settings:
            next(model.parameters()).grad[0, 0] = math.nan
        optimizer.step()
    if "write" in how:
        with optimizer.agreed(), torch.no_grad():
            model[0].weight.fill_(0.125)
        model[3].bias.data = model[3].bias.data.clone()
        model[1].bias.detach().fill_(0.25)
    folder, path, checkpoint = str(comm.bcast(tmp_path)), tmp_path / f"{comm.rank}.pt", "checkpoint" in how
    with nullcontext() if how.startswith("own") else optimizer.agreed():
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        if checkpoint:
            request.getfixturevalue("group")
            dcp.save({"model": model.state_dict(), "optimizer": optimizer}, checkpoint_id=folder)
        if "saved within" in how:
            torch.save(optimizer.state_dict(), path)
    if "saved within" not in how:
        torch.save(optimizer.state_dict(), path)
    other = replicas.model(3)
    loaded = replicas.wrap(other, **settings)
    if "running" in how:
        train(other, loaded, comm.rank, range(3))
    train(model, optimizer, comm.rank, range(5, 9))
    if checkpoint:
        saved = {"model": other.state_dict(), "optimizer": loaded}
        dcp.load(saved, checkpoint_id=folder)
        other.load_state_dict(saved["model"])
    elif "memory" in how:
        for name, parameter in other.named_parameters():
            parameter.data = weights[name]
        loaded.load_state_dict(torch.load(path, weights_only=True))
    else:
        with loaded.agreed() if "loaded within" in how else nullcontext():
            if "first" not in how:
                other.load_state_dict(weights)
            loaded.load_state_dict(torch.load(path, weights_only=True))
            if "first" in how:
                other.load_state_dict(weights)
            shown = other.state_dict()
            assert "loaded" not in how or all(torch.equal(shown[name], weights[name]) for name in weights)
    train(other, loaded, comm.rank, range(5, 9))
    if how == "agreed, the optimizer first":  # which saw the model after its first gradient was computed
        assert np.abs(whole(other) - whole(model)).max() < 0.05
        replicas.check_agreed(other, loaded)
        return
    assert torch.equal(held(other.parameters()), held(model.parameters()))
    assert torch.equal(moments(loaded), moments(optimizer))
    assert torch.equal(reference(loaded), reference(optimizer))
    assert np.array_equal(get(loaded.reducer.residual), get(optimizer.reducer.residual))
    assert own(loaded)["ratio"] == own(optimizer)["ratio"]


def spoil(parameter: Any) -> None:
    """Leave a gradient that cannot be read."""
    gradient, parameter.grad = parameter.grad, None
    parameter.grad = torch.zeros(gradient.shape) if is_sharded(parameter) else gradient.to_sparse()


@over(
    "at",
    "scaled",
    cases=[
        case("ranks", 2, True),
        case("hosts of 2", 2, False, least=2),
        case("hosts of 2", 3, False, least=2),
        *shards(3, False),
        *shards(3, True, long=True),
    ],
)
def test_all_ranks_go_on_from_one_ranks_problem(replicas: Replicas, at: int, scaled: bool) -> None:
    """Ranks measure the ratio in the same exchanges, whoever stepped."""
    model, comm = replicas.model(), replicas.comm
    optimizer = replicas.wrap(model, every=2 if replicas.mesh is None else 1)
    sentence = rf"rank {comm.size - 1}: a gradient is sparse"
    if replicas.mesh is not None:
        sentence = "of a sharded parameter of shape .* is not laid out as"
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, enabled=scaled)
    for step in range(8):
        optimizer.zero_grad()
        scaler.scale(loss(model, comm.rank, step)).backward()
        if step == at and comm.rank == comm.size - 1:
            spoil(next(model.parameters()))
        with pytest.raises(ValueError, match=sentence) if step == 3 else nullcontext() as told:
            scaler.step(optimizer)
        assert told is None or len(set(comm.allgather(str(told.value)))) == 1
        scaler.update()
    state = own(optimizer)
    assert len(set(comm.allgather((state["exchanges"], state["ratio"]["measured"])))) == 1
    replicas.check_agreed(model, optimizer)


class Graph:
    """Stands for a CUDA graph of a step of AdamW: a replay works in the memory of the capture, with the numbers of then."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        (group,) = optimizer.param_groups
        parameters, (first, second) = group["params"], group["betas"]
        states = [optimizer.state[p] for p in parameters]
        self._arguments: dict[str, Any] = {
            "params": [p.detach() for p in parameters],
            "grads": [p.grad.detach() for p in parameters],
            "exp_avgs": [state["exp_avg"] for state in states],
            "exp_avg_sqs": [state["exp_avg_sq"] for state in states],
            "max_exp_avg_sqs": [],
            "state_steps": [state["step"] for state in states],
            "beta1": first,
            "beta2": second,
        }
        kept = ("lr", "eps", "weight_decay", "amsgrad", "maximize", "foreach", "capturable")
        self._arguments |= {name: group[name] for name in kept}

    def replay(self) -> None:
        adam(**self._arguments, decoupled_weight_decay=True)


class Stepping(torch.optim.AdamW):
    """Of a class of its own, so that it steps on all parameters of a host; `capture` its second step, and it is replayed."""

    graph: Graph | None = None
    capture = False

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        if self.graph is None and self.state and self.capture:
            self.graph = Graph(self)
        if self.graph is None:
            super().step()
        else:
            self.graph.replay()


@over(
    "settings",
    cases=[
        case("ranks", {"foreach": True}),
        case("ranks", {"every": 2, "clip_norm": 0.1}),
        case("hosts of 2", {"nonfinite": "skip"}, least=3),
    ],
)
def test_a_capturable_optimizer_is_replayed_to_the_same_bits(
    replicas: Replicas, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Parameters, gradients and a rate in a tensor keep their addresses, also where one rank leaves a step out."""
    module = sys.modules["torch.optim.adam"]  # else torch captures on devices alone
    monkeypatch.setattr(module, "_get_capturable_supported_devices", lambda **_: ["cpu"])
    foreach, ends = settings.pop("foreach", False), []
    stepping = functools.partial(Stepping, weight_decay=0.1, capturable=True, foreach=foreach)
    for captured in (False, True):
        model, comm, rate = replicas.model(), replicas.comm, torch.tensor(2e-3)
        optimizer = replicas.wrap(model, functools.partial(stepping, lr=rate), **settings)
        optimizer.inner.capture = captured
        addresses = [p.data_ptr() for p in model.parameters()]
        for step in range(7):
            rate.fill_(2e-3 / (1 + step))
            optimizer.zero_grad(set_to_none=False)
            loss(model, comm.rank, step).backward()
            if step == 5 and "nonfinite" in settings and comm.rank == 1:
                model[0].weight.grad[0, 0] = math.nan
            optimizer.step()
            assert [p.data_ptr() for p in model.parameters()] == addresses
        assert (optimizer.inner.graph is not None) == captured
        assert optimizer.param_groups[0]["lr"] is rate
        replicas.check_agreed(model, optimizer)
        ends.append((whole(model), moments(optimizer)))
        optimizer.close()
    assert np.array_equal(ends[0][0], ends[1][0]) and torch.equal(ends[0][1], ends[1][1])


@over(
    "change",
    cases=[
        *(case("ranks", change, least=2) for change in ("type", "shape", "length")),
        *(case("hosts of 2", change, least=3) for change in ("type", "length")),
    ],
)
def test_another_type_or_shape_is_named_on_all_ranks(replicas: Replicas, change: str) -> None:
    comm = replicas.comm
    model, optimizer = replicas.trained(3, timeout=20.0)
    weight: Any = model[0].weight
    if comm.rank == 1:
        other = {"type": weight.double(), "shape": torch.zeros(31, 20), "length": weight.data[:15]}
        weight.data = other[change].detach()
    weight.grad = torch.zeros_like(weight)
    what = "type" if change == "type" else "shape"
    with pytest.raises(ValueError, match=f"rank 1: the {what} of a parameter of shape .30, 20. was"):
        optimizer.step()
    inner, one_host = optimizer.inner, replicas.per_host and comm.rank < replicas.per_host
    expected = pytest.warns(UserWarning, match=f"moments of shards are dropped: .*the {what} of a")
    with expected if one_host and "on its shard" in repr(optimizer) else nullcontext():
        optimizer.close()
    assert not (one_host and inner.state)


@over(
    "kind",
    "settings",
    cases=[
        case("alone", "sgd", {}),
        case(f"hosts of {SIZE}", "sgd", {}),
        case(f"shards of {SIZE}", "sgd", {"clip_norm": 0.05}),
        case(f"shards of {SIZE}", "adam", {}),
        case(f"shards of {SIZE}", "sgd", {}, long=True),
        case(f"shards of {SIZE}", "adam", {"clip_norm": 0.05}, long=True),
        case(f"shards of {SIZE}", "sgd", {"by torch": 0.05}, long=True),
    ],
)
def test_one_replica_trains_as_the_optimizer_alone(
    replicas: Replicas, kind: str, settings: dict[str, Any]
) -> None:
    """Of the whole model, whose norm is clipped; backward passes whose gradients FSDP keeps are added up."""
    model, comm = replicas.model(), replicas.comm
    alone: Any = network() if replicas.mesh is None else layers()
    clip_norm, by_torch = settings.get("clip_norm", 0.0), settings.get("by torch", 0.0)
    optimizer = replicas.wrap(model, kind, clip_norm=clip_norm)
    plain = OPTIMIZERS[kind](alone.parameters())
    parts = 1 if replicas.mesh is None else 2
    for step in range(8):
        optimizer.zero_grad()
        plain.zero_grad()
        for part in range(parts):
            if replicas.mesh is not None:
                model.set_requires_gradient_sync(part + 1 == parts)
            loss(model, comm.rank, parts * step + part).backward()
            loss(alone, comm.rank, parts * step + part).backward()
        if by_torch:
            nn.utils.clip_grad_norm_(model.parameters(), by_torch)
        optimizer.step()
        for p in alone.parameters():
            p.grad = torch.from_numpy(comm.allreduce(p.grad.numpy()) / comm.size)
        if settings:
            assert nn.utils.clip_grad_norm_(alone.parameters(), clip_norm + by_torch) > clip_norm + by_torch
        plain.step()
    assert any(comm.allgather(optimizer.reducer.gathered_residual().any()))
    assert np.allclose(whole(model), flat(alone), rtol=0, atol=1e-5 if replicas.mesh is None else 2e-5)
    assert np.abs(flat(alone) - whole(replicas.model())).max() > 1e-3
    assert optimizer.report.bytes_between == 0


@over(cases=[case("ranks", least=2), case("hosts of 2", least=3), *shards()])
def test_what_one_replica_holds_is_loaded_on_all(replicas: Replicas) -> None:
    """That replica finds nothing written, and the others all of it."""
    model, comm = replicas.model(), replicas.comm
    optimizer = replicas.wrap(model, density=0.2)
    go_on_behind_the_first_exchanges(optimizer)
    train(model, optimizer, comm.rank, range(4))
    with torch.no_grad():
        for parameter in model.parameters():
            mine = local_tensor(parameter)
            every = comm.allgather((replicas.shard, mine.numpy().copy()))
            mine.copy_(torch.from_numpy(next(given for shard, given in every if shard == replicas.shard)))
    train(model, optimizer, comm.rank, range(4, 6))
    replicas.check_agreed(model, optimizer)


@over("kind", cases=[case("ranks", "adamw"), case("ranks", "oktopk adamw"), case("hosts of 2", "adamw")])
def test_what_is_written_becomes_the_reference_and_outlives_closing(replicas: Replicas, kind: str) -> None:
    comm = replicas.comm
    model, optimizer = replicas.trained(3, kind, density=0.2)
    with optimizer.agreed(), torch.no_grad():
        model[3].bias.fill_(0.5)
        with optimizer.agreed():  # is one, and takes no step
            model[1].bias.data = torch.full((30,), 0.25)
        with pytest.raises(RuntimeError, match=r"step\(\) within `with optimizer.agreed\(\):`"):
            optimizer.step()
    assert torch.equal(reference(optimizer)[-7:], torch.full((7,), 0.5))
    assert not any(comm.allgather(optimizer.reducer.gathered_residual()[-7:].any()))
    optimizer.zero_grad()
    optimizer.step()  # nothing has a gradient: nothing moves
    with optimizer.agreed():
        assert (model[3].bias == 0.5).all() and (model[1].bias == 0.25).all()
    train(model, optimizer, comm.rank, range(3, 6))
    replicas.check_agreed(model, optimizer)
    model[3].bias.detach().fill_(0.75)  # outside of `agreed`: saving takes it
    assert torch.equal(reference(optimizer)[-7:], torch.full((7,), 0.75))
    assert not any(comm.allgather(optimizer.reducer.gathered_residual()[-7:].any()))
    # on all ranks alike; what an element holds already counts as not written, and one of network(9) does so by chance
    model.load_state_dict(network(10).state_dict())
    optimizer.close()
    assert np.array_equal(flat(model), flat(network(10)))


def everything(model: nn.Module, optimizer: Any) -> bytes:
    """What a load may change on this rank."""
    held_here = [held(model.parameters()), moments(optimizer), torch.from_numpy(optimizer.reducer.residual)]
    if hasattr(optimizer, "replica"):  # of updates
        held_here.append(reference(optimizer))
    return b"".join(each.numpy().tobytes() for each in held_here)


def check_refused(comm: MPI.Intracomm, model: Any, optimizer: Any, state: Any, sentence: str) -> None:
    """By one sentence on all ranks, on none of which anything is loaded."""
    before = everything(model, optimizer)
    with pytest.raises(ValueError, match=sentence) as refused:
        optimizer.load_state_dict(state)
    told = comm.allgather((str(refused.value), everything(model, optimizer) == before))
    assert len(set(told)) == 1 and told[0][1], told
    train(model, optimizer, comm.rank, range(3, 5))


def kept(state: Any) -> Any:
    """What a state has of the wrapped optimizer on this rank."""
    return of_rank(state["updates"])["optimizer"]


def reducer(state: Any) -> Any:
    return of_rank(state["reducer"])


def other_group(state: Any) -> None:
    state["param_groups"][0]["params"] = state["param_groups"][0]["params"][:-1]


NO_OPTIMIZER = "not that of an optimizer: Attrib"
BROKEN: dict[str, tuple[Callable[[Any], object], str]] = {
    "nothing is kept": (lambda state: kept(state).update(state=None), NO_OPTIMIZER),
    "a moment of another shape": (
        lambda state: kept(state)["state"][0].update(exp_avg=torch.zeros(3)),
        r"has exp_avg of shape \(3,\) of a parameter of shape",
    ),
    "a step that is none": (
        lambda state: kept(state)["state"][0].update(step=torch.tensor(-1.0)),
        r"the state is damaged: step tensor\(-1\.\) of a parameter",
    ),
    "a moment is missing": (
        lambda state: kept(state)["state"][2].pop("exp_avg_sq"),
        f"state of parameter 2 lacks exp_avg_sq on rank {SIZE - 1}, which other ranks have",
    ),
    "a share that is none": (
        lambda state: of_rank(state["updates"]).update(local_share=[0.05, 0.01, 1.0]),
        r"share of the state is 0.01 of first 0.05",
    ),
    "a rank that is none": (lambda state: reducer(state).update(rank=[1]), "is of rank"),
    "a shorter residual": (
        lambda state: reducer(state).update(residual=reducer(state)["residual"][:-1]),
        "residual of the state is float32",
    ),
    "replicas that differ": (lambda state: reducer(state).update(unaided=7), "ranks disagree on unaided"),
    "groups": (other_group, "the state has groups of"),
    "groups beside gradients": (other_group, r"the state has groups of \[5\] .*, the optimizer of \[6\]"),
    "None": (lambda state: None, "the state is a NoneType, not a dict"),
    "None beside gradients": (lambda state: None, "the state is a NoneType, not a dict"),
    "a list": (lambda state: [], "the state is a list, not a dict"),
}


OF_SHARDS = ("replicas that differ", "groups", "a moment of another shape", "nothing is kept", "a list")


@over(
    "what",
    cases=[
        *(case("ranks", what) for what in ("a moment of another shape", "a step that is none")),
        *(case("ranks", what) for what in ("nothing is kept", "a rank that is none", "a share that is none")),
        case("ranks", "a moment is missing", least=2),
        *(case("ranks", what) for what in ("groups beside gradients", "None beside gradients")),
        *(each for what in ("a shorter residual", "None") for each in shards(what)),
        *(each for what in OF_SHARDS for each in shards(what, long=True)),
    ],
)
def test_a_broken_state_of_one_rank_is_loaded_by_none(replicas: Replicas, what: str) -> None:
    """Not by those either that have another shard."""
    comm = replicas.comm
    if what == "replicas that differ" and len(replicas.mates(0)) == comm.size:
        pytest.skip("one replica")
    sends = "gradients" if "gradients" in what else "updates"
    model, optimizer = replicas.trained(2, timeout=60.0, sends=sends)
    state = copy.deepcopy(optimizer.state_dict())
    train(model, optimizer, comm.rank, range(2, 3))
    change, sentence = BROKEN[what]
    if comm.rank == comm.size - 1:
        changed = change(state)
        state = changed if what in ("None", "None beside gradients", "a list") else state
    check_refused(comm, model, optimizer, state, sentence)


def even(seed: int = 5) -> nn.Sequential:
    """Whose shards have equal shapes."""
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(20, 4 * SIZE), nn.AdaptiveAvgPool1d(7), nn.Tanh())


@over("whose", cases=[each for whose in ("the next shard's", "rank 0's") for each in shards(whose)])
def test_a_state_of_another_shard_is_refused(replicas: Replicas, whose: str) -> None:
    comm, count = replicas.comm, along_shards(replicas.mesh).size()
    if count == 1:
        pytest.skip("one shard")
    model = sharded(replicas.mesh, even())
    optimizer = replicas.wrap(model)
    train(model, optimizer, comm.rank, range(3))
    next_shard = comm.rank - replicas.shard + (replicas.shard + 1) % count
    saved = comm.allgather(as_saved(optimizer.state_dict()))
    state = torch.load(io.BytesIO(saved[0 if whose == "rank 0's" else next_shard]), weights_only=True)
    sentence = (
        f"the state is of shard 0 of {count}, and this rank has shard {count - 1} of {count}: each rank saves"
    )
    check_refused(comm, model, optimizer, state, sentence)


def as_saved(state: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(state, stream)
    return stream.getvalue()
