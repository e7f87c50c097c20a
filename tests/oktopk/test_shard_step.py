"""Elementwise optimizers step on this rank's shard of its host's parameters, and keep moments of it alone."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._python_dispatch import TorchDispatchMode

from oktopk import DistributedOptimizer, levels
from oktopk.torch.updates import optimizer as updates
from oktopk.torch.updates.reference_parameters import SAMPLES
from oktopk.torch.updates.shard_step import is_elementwise
from oktopk.torch.updates.shared_moments import SLICES
from tests.replicas import OPTIMIZERS, Replicas
from tests.training import flat, gradients, inputs, network, train
from tests.updates import moments, on_all, on_shard, own, reference

pytestmark = [pytest.mark.mpi(min_size=3), pytest.mark.also(ranks=4), pytest.mark.also(ranks=5)]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shards that begin and end within parameters."""
    monkeypatch.setattr(levels, "BLOCK", 64)


class Lion(torch.optim.Optimizer):
    """Steps by signs."""

    elementwise = True

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-3, "betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            one, other = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                held = self.state[parameter].setdefault("exp_avg", torch.zeros_like(parameter))
                sign = (held * one + parameter.grad * (1 - one)).sign()
                parameter.sub_(sign * group["lr"])
                held.mul_(other).add_(parameter.grad * (1 - other))


def make(comm: MPI.Intracomm, per_host: int = 2, kind: Any = "", **settings: Any) -> tuple[nn.Module, Any]:
    model = settings.pop("model", None) or network()
    return model, Replicas(comm, per_host).wrap(model, kind, **settings)


def trained(comm: MPI.Intracomm, steps: int = 2, **settings: Any) -> tuple[nn.Module, Any]:
    model, optimizer = make(comm, **settings)
    train(model, optimizer, comm.rank, range(steps))
    return model, optimizer


def elements(optimizer: Any, name: str = "exp_avg") -> int:
    """What this rank keeps under a name, in elements."""
    return sum(state[name].numel() for state in optimizer.state.values())


KINDS: dict[str, Any] = {name: OPTIMIZERS[name] for name in ("adamw foreach", "adam tensor rate", "sgd")}
KINDS |= {"oktopk adamw": OPTIMIZERS["oktopk adamw"], "lion": Lion}
KINDS |= {
    name: lambda p, kind=name: getattr(torch.optim, kind)(p, lr=1e-3)
    for name in ("RAdam", "Adamax", "RMSprop")
}


def of_16_bits(dtype: torch.dtype) -> nn.Module:
    """Of whole vectors of a CPU: torch rounds 16 bits otherwise in the elements that are left at the end of a tensor."""
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 32, bias=False), nn.Linear(32, 64, bias=False)).to(dtype)


@pytest.mark.parametrize(
    ("per_host", "kind", "dtype", "settings"),
    [
        *((2, kind, torch.float32, {}) for kind in KINDS),
        (3, "adamw foreach", torch.float32, {"clip_norm": 0.05, "method": "oktopk"}),
        (2, "sgd", torch.float32, {"replica": "summed", "local_share": 1.0}),
        (2, "sgd", torch.bfloat16, {}),
        pytest.param(2, "sgd", torch.float16, {}, marks=pytest.mark.long("`make test` has bfloat16")),
    ],
    ids=str,
)
def test_steps_on_shards_are_those_on_all_parameters(
    comm: MPI.Intracomm, per_host: int, kind: str, dtype: torch.dtype, settings: Any
) -> None:
    """Bit for bit; of each number that the optimizer keeps of an element one rank of a host has it."""
    ends: list[Any] = []
    for makes in (KINDS[kind], on_all(KINDS[kind])):
        layers: Any = network() if dtype == torch.float32 else of_16_bits(dtype)
        model, optimizer = make(comm, per_host, makes, density=0.2, model=layers, **settings)
        rank = optimizer.hosts[comm.rank] if optimizer.replica == "summed" else comm.rank
        for step in range(6):
            optimizer.zero_grad()
            model(inputs(rank, step).to(dtype)).float().square().mean().backward()
            if step in (2, 3):
                layers[-1].weight.grad = None
            optimizer.step()
        assert on_shard(optimizer) == (not ends)
        names = sorted({*optimizer.state[layers[0].weight]} - {"step"})
        size = optimizer.length if ends else optimizer.reducer.group.shard_length
        assert all(elements(optimizer, name) == size for name in names)
        assert {state[name].dtype for state in optimizer.state.values() for name in names} == {dtype}
        kept = [moments(optimizer, name) for name in names]
        ends.append([torch.from_numpy(flat(model)), reference(optimizer), *kept])
        Replicas(comm, per_host).check_agreed(model, optimizer)
    assert len(ends[0]) > 2 and all(map(torch.equal, *ends))


class Copies(TorchDispatchMode):
    """Counts the elements that are copied into a tensor, within, by its memory."""

    def __init__(self, target: Tensor) -> None:
        super().__init__()
        self.begin, self.elements = target.data_ptr(), 0
        self.end = self.begin + target.numel() * target.element_size()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "copy_" in str(func):
            targets = args[0] if isinstance(args[0], list) else args[:1]
            self.elements += sum(t.numel() for t in targets if self.begin <= t.data_ptr() < self.end)
        return func(*args, **kwargs or {})


@pytest.mark.parametrize(
    ("settings", "times"), [({}, 1), ({"clip_norm": 1e-3}, 2), ({"replica": "summed"}, 1)], ids=str
)
def test_gradients_that_nothing_has_changed_are_copied_once(
    comm: MPI.Intracomm, settings: dict[str, Any], times: int
) -> None:
    """To the memory that the host reads: its mean is read there, but for gradients that are clipped behind it.

    Behind them the parameters are copied there, once.
    """
    model, optimizer = make(comm, **settings)
    rank = optimizer.hosts[comm.rank]
    train(model, optimizer, rank, range(1))
    alone = optimizer.reducer.group.host.size == 1  # has no mean
    for step in range(1, 4):
        gradients(model, optimizer, rank, step)
        with Copies(torch.from_numpy(optimizer.reducer.gradient_buffer)) as copies:
            optimizer.step()
        assert copies.elements == (1 + (1 if alone else times)) * optimizer.length


def test_second_moments_are_averaged_among_the_holders_of_a_shard(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As among more than four replicas: of each shard the slice with the number of the measurement."""
    monkeypatch.setattr(updates, "SHARED_BY", 1)
    model, optimizer = trained(comm, 1)
    group = optimizer.reducer.group
    mine = torch.cat([optimizer.state[p]["exp_avg_sq"] for p in model.parameters()])
    size = -(-len(mine) // SLICES)
    if group.between is not None:
        held = [each.numpy() for each in group.between.allgather_objects(mine)]
        alike = [
            all((each[at : at + size] == held[0][at : at + size]).all() for each in held)
            for at in (size, 3 * size)
        ]
        assert alike == [True, False]
    train(model, optimizer, comm.rank, range(1, 4))
    Replicas(comm, 2).check_agreed(model, optimizer)


class WithoutMemory(TorchDispatchMode):
    """Within, no memory is left for a piece of a tensor of this shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape = shape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "new_empty" in str(func) and args[0].shape == self.shape:
            raise RuntimeError("DefaultCPUAllocator: not enough memory")
        return func(*args, **kwargs or {})


def test_a_rank_without_memory_is_an_error_of_all(comm: MPI.Intracomm) -> None:
    """The wrapped optimizer keeps what it had."""
    model = network()
    plain = torch.optim.AdamW(model.parameters(), lr=1e-3)
    train(model, plain, comm.rank, range(2))
    scarce = WithoutMemory(model[0].weight.shape) if comm.rank == 1 else nullcontext()
    with pytest.raises(ValueError, match="^rank 1: DefaultCPUAllocator: not enough memory"), scarce:
        make(comm, model=model, kind=lambda parameters: plain, timeout=5.0)
    assert plain.state[model[0].weight]["exp_avg"].shape == (30, 20)
    _, optimizer = make(comm, model=model, kind=lambda parameters: plain)
    train(model, optimizer, comm.rank, range(2))


# states


def test_a_plain_optimizers_state_is_cut_to_the_shard(comm: MPI.Intracomm) -> None:
    """One that is loaded, and one that the wrapped optimizer has already."""
    alone = network()
    plain = torch.optim.AdamW(alone.parameters(), lr=1e-3)
    train(alone, plain, 0, range(2))
    expected = torch.cat([plain.state[p]["exp_avg"].reshape(-1) for p in alone.parameters()])
    model, optimizer = make(comm)
    optimizer.load_state_dict(copy.deepcopy(plain.state_dict()))
    _, wrapped = make(comm, model=alone, kind=lambda parameters: plain)
    for each in (optimizer, wrapped):
        assert torch.equal(moments(each), expected)
        assert elements(each) == each.reducer.group.shard_length
    train(model, optimizer, comm.rank, range(2))


def test_one_ranks_state_on_all_brings_no_moments_of_shards(
    comm: MPI.Intracomm, recwarn: pytest.WarningsRecorder
) -> None:
    _model, optimizer = trained(comm, 3)
    state = comm.bcast(copy.deepcopy(optimizer.state_dict()))
    again, loaded = make(comm)
    loaded.load_state_dict(copy.deepcopy(state))
    assert not loaded.state
    for group in loaded.param_groups:
        group["lr"] = 0.0  # before which all ranks agree on whether there is a state
    train(again, loaded, comm.rank, range(3, 5))
    lost = "of all ranks are lost, and all moments, as each rank keeps those of its shard alone. Save each rank's"
    assert any(lost in str(each.message) for each in recwarn) == (comm.rank == 0)
    Replicas(comm, 2).check_agreed(again, loaded)


def test_states_by_torch_have_no_moments_of_shards(
    comm: MPI.Intracomm, recwarn: pytest.WarningsRecorder
) -> None:
    """An optimizer without state is set up by a step at a learning rate of 0."""
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    model, optimizer = make(comm)
    start = flat(model)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    assert (flat(model) == start).all() and elements(optimizer) == optimizer.reducer.group.shard_length
    train(model, optimizer, comm.rank, range(2))
    set_optimizer_state_dict(model, optimizer, state, options=options)
    told = [each for each in recwarn if "leaves out residuals and all moments (" in str(each.message)]
    assert len(told) == (comm.rank == 0) and not optimizer.state
    train(model, optimizer, comm.rank, range(2))
    Replicas(comm, 2).check_agreed(model, optimizer)


def test_moments_of_another_shard_or_of_one_are_refused(comm: MPI.Intracomm) -> None:
    _model, optimizer = trained(comm)
    states = comm.allgather(copy.deepcopy(optimizer.state_dict()))
    assert all(not state["state"] for state in states)  # it is under "updates", and no other rank's
    with pytest.raises(ValueError, match="another shard|is of rank"):
        optimizer.load_state_dict(states[(comm.rank + 1) % comm.size])
    _, whole = make(comm, kind=on_all(OPTIMIZERS["adamw"]))
    with pytest.raises(ValueError, match="here each rank steps on all of them: .* else go on with every=1"):
        whole.load_state_dict(states[comm.rank])


# what nothing watches


def test_what_is_written_past_all_watching_stays(comm: MPI.Intracomm) -> None:
    """Through `.data`, into elements that no sample holds: it counts as a move."""
    model, optimizer = trained(comm, 3, density=0.25)
    weight = max(model.parameters(), key=lambda each: each.numel())
    with optimizer.agreed():
        before = weight.detach().clone()
    places = [place for place in range(1, weight.numel(), 7) if place % (weight.numel() // SAMPLES)]
    assert len(places) > 20
    weight.data.view(-1)[places] += 1
    assert not own(optimizer)["marked"]
    optimizer.param_groups[0]["lr"] = 0.0
    train(model, optimizer, comm.rank, range(3, 24))
    with optimizer.agreed():
        moved = (weight.detach() - before).view(-1)[places]
    assert (moved > 0.9).all()


def test_gradients_say_that_moments_of_shards_are_lost(
    comm: MPI.Intracomm, recwarn: pytest.WarningsRecorder
) -> None:
    _model, optimizer = trained(comm)
    state = optimizer.state_dict()
    gradients: Any = DistributedOptimizer(
        torch.optim.AdamW(network().parameters()), comm, density=0.2, sends="gradients"
    )
    gradients.load_state_dict(state)
    said = [str(each.message) for each in recwarn if "shards" in str(each.message)]
    assert len(said) == (comm.rank == 0) and all("none are kept" in each for each in said)
    assert not gradients.state


# which optimizers


class Subclass(torch.optim.AdamW):
    pass


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (OPTIMIZERS["oktopk adamw"], True),
        (Lion, True),
        (Subclass, False),
        (torch.optim.NAdam, False),
        (torch.optim.LBFGS, False),
        (torch.optim.Adafactor, False),
    ],
)
def test_only_optimizers_that_are_known_or_say_so_are_elementwise(
    kind: Callable[[Any], Any], expected: bool
) -> None:
    optimizer = kind(network().parameters())
    assert is_elementwise(optimizer) == expected
    optimizer.register_step_post_hook(lambda *_: None)
    assert not is_elementwise(optimizer)


def test_hooks_on_the_step_see_all_parameters_or_are_refused(comm: MPI.Intracomm) -> None:
    """Also where one rank alone has one."""
    seen = []

    def hooked(parameters: Any) -> torch.optim.Optimizer:
        inner = torch.optim.AdamW(parameters, lr=1e-3)
        if comm.rank == 0:
            inner.register_step_pre_hook(
                lambda optimizer, *_: seen.append(optimizer.param_groups[0]["params"][0].shape)
            )
        return inner

    model, optimizer = trained(comm, kind=hooked)
    assert elements(optimizer) == optimizer.length
    assert seen == [(30, 20)] * 2 * (comm.rank == 0)
    model, optimizer = make(comm)
    start = flat(model)
    hook = optimizer.inner.register_step_post_hook(lambda *_: None)
    with pytest.raises(
        ValueError,
        match="the wrapped optimizer, or torch for all optimizers, has hooks on its step, which takes this rank's shard",
    ):
        train(model, optimizer, comm.rank, range(1))
    assert not optimizer.state and (flat(model) == start).all()
    hook.remove()
    train(model, optimizer, comm.rank, range(1))


class WithMasters(Lion):
    """Keeps weights beside the parameters from its first step on, and moves those."""

    def step(self, closure: Any = None) -> Any:
        super().step()
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter].setdefault("weights", parameter.detach().clone())


def test_weights_beside_a_shard_are_found(comm: MPI.Intracomm) -> None:
    model, optimizer = make(comm, kind=WithMasters)
    for _ in range(2):
        with pytest.raises(ValueError, match="WithMasters keeps weights beside the parameters"):
            train(model, optimizer, comm.rank, range(1))


def test_what_is_dropped_leaves_the_optimizer_no_shard(comm: MPI.Intracomm) -> None:
    """Nor does it have one between steps, when a user saves it."""
    model, optimizer = trained(comm)
    assert elements(optimizer) == optimizer.reducer.group.shard_length
    inner = optimizer.inner
    assert not inner.state_dict()["state"]
    del optimizer
    train(model, inner, comm.rank, range(2))
    assert inner.state[model[0].weight]["exp_avg"].shape == (30, 20)


@pytest.mark.parametrize(("per_host", "kind"), [(2, "adamw foreach"), (3, "lion")])
def test_closed_optimizers_go_on_with_the_moments_of_their_host(
    comm: MPI.Intracomm, per_host: int, kind: str
) -> None:
    """As where each rank has stepped on all parameters, bit for bit; and it may be wrapped again."""
    runs: list[Any] = []
    for makes in (KINDS[kind], on_all(KINDS[kind])):
        model, optimizer = make(comm, per_host, makes)
        train(model, optimizer, comm.rank, range(2))
        inner = optimizer.inner
        optimizer.close()
        train(model, inner, comm.rank, range(2))
        kept = [inner.state[p][name] for p in model.parameters() for name in sorted(inner.state[p])]
        runs.append([torch.from_numpy(flat(model)), *kept])
        if kind != "lion" and len(runs) == 1:
            _, again = make(comm, model=model, kind=lambda parameters, inner=inner: inner)
            assert elements(again) == again.reducer.group.shard_length
            again.close()
    assert len(runs[0]) > 6 and all(map(torch.equal, *runs))


def test_moments_that_are_given_back_are_laid_out_as_parameters(comm: MPI.Intracomm) -> None:
    """Of 16 bits, too; what one rank keeps of a parameter and others do not is dropped."""
    layers = nn.Sequential(nn.Conv2d(3, 8, 2), nn.Conv2d(8, 8, 1)).to(torch.bfloat16)
    model: Any = layers
    model.to(memory_format=torch.channels_last)
    _, optimizer = make(comm, model=model, kind=lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9))
    batch = torch.randn(2, 3, 4, 4, generator=torch.Generator().manual_seed(comm.rank))
    model(batch.to(torch.bfloat16)).float().square().mean().backward()
    optimizer.step()
    inner, last = optimizer.inner, list(model.parameters())[-1]
    if comm.rank == 0:
        del optimizer.state[last]
    optimizer.close()
    for parameter in list(model.parameters())[:-1]:
        buffer = inner.state[parameter]["momentum_buffer"]
        assert torch.equal(buffer, parameter.grad) and buffer.stride() == parameter.stride()
        assert buffer.dtype == torch.bfloat16
    assert (last in inner.state) == (comm.rank > 1)


@pytest.mark.parametrize("handled", [False, True])
def test_moments_are_dropped_where_one_rank_closes_alone(
    comm: MPI.Intracomm, handled: bool, recwarn: pytest.WarningsRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After `timeout`; at once where an error is handled, which may be this rank's alone."""
    monkeypatch.setattr("collectives.limit.ANSWER", 0.5)
    monkeypatch.setattr("collectives.closing.OTHERS_CLOSE", 0.1)
    with monkeypatch.context() as patch:  # ranks may be slow
        patch.setattr("collectives.limit._debugged", lambda: True)
        model, optimizer = make(comm, timeout=600.0 if handled else 1.0)
        train(model, optimizer, comm.rank, range(2))
        comm.Barrier()
    inner = optimizer.inner
    for first in (True, False):
        if first == (comm.rank == 0):
            try:
                raise RuntimeError("of this rank alone")
            except RuntimeError:
                if handled:
                    optimizer.close()
            optimizer.close()
        comm.Barrier()
    dropped = [str(each.message) for each in recwarn if "moments of shards are dropped" in str(each.message)]
    if comm.rank < 2:  # of the first host
        assert not inner.state and len(dropped) == 1
    why = "an exception is handled" if handled else "close: rank(s)"
    assert all(f"dropped: {why}" in each for each in dropped)
