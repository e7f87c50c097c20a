"""What is done to a model after it was wrapped: a step goes on as torch alone would, or all ranks raise one sentence."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn

from oktopk import DistributedOptimizer
from tests.training import flat

pytestmark = pytest.mark.mpi

WAYS: dict[str, dict[str, Any]] = {
    "vector": {},
    "overlap": {"overlap": True, "bucket_mb": 0.0005},
    "two levels": {"levels": "hosts", "ranks_per_host": 2},
    "updates": {"sends": "updates"},
    "updates of hosts": {"sends": "updates", "replica": "host", "ranks_per_host": 2},
}
GRADIENTS = [way for way in WAYS if "updates" not in way]
SPARSE = {"density": 0.1, "threshold_interval": 2}


class Heads(nn.Module):
    """A body, and two heads of which a pass may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.body = nn.Conv2d(3, 6, 3)
        self.a, self.b = nn.Linear(6 * 16, 3), nn.Linear(6 * 16, 3)

    def forward(self, images: Tensor, heads: str = "ab") -> Tensor:
        hidden = torch.relu(self.body(images)).flatten(1)
        return sum(getattr(self, head)(hidden) for head in heads)  # type: ignore[return-value]


def images(rank: int, step: int) -> Tensor:
    return torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(100 * step + rank))


def backward(model: nn.Module, rank: int, step: int, heads: str = "ab", share: float = 1.0) -> None:
    batch = images(rank, step).to(next(model.parameters()))
    (model(batch, heads).square().mean() * share).backward()


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=0.1)


def there_and_back(model: nn.Module) -> None:
    model.double()
    model.float()


def elsewhere(model: nn.Module) -> None:
    for parameter in model.parameters():
        parameter.data = parameter.data.clone() * 0.5


def other_order(model: nn.Module) -> None:
    model.b.weight.data = model.b.weight.data.t().contiguous().t()  # type: ignore[union-attr,operator]


def swapped(model: nn.Module) -> None:
    """As `Module.to` converts, where `torch.__future__` says so."""
    for parameter in model.parameters():
        torch.utils.swap_tensors(parameter, nn.Parameter(parameter.detach() * 0.5))


CHANGES: dict[str, Callable[[nn.Module], Any]] = {
    "channels last": lambda model: model.to(memory_format=torch.channels_last),  # type: ignore[call-overload]
    "there and back": there_and_back,
    "other values": elsewhere,
    "other order": other_order,
    "swapped": swapped,
}


@pytest.mark.parametrize(
    ("way", "change", "when"),
    [
        *(("vector", change, "before") for change in CHANGES),
        ("vector", "channels last", "between"),
        ("vector", "there and back", "between"),
        ("overlap", "channels last", "before"),
        ("overlap", "swapped", "before"),
        ("overlap", "there and back", "between"),
    ],
)
def test_a_model_converted_after_wrapping_trains_on(
    comm: MPI.Intracomm, way: str, change: str, when: str
) -> None:
    """before: the backward pass; between: it and the step, or the update and the optimizer: each p.grad is converted, too."""
    model, plain = Heads(), Heads()
    optimizer, alone = DistributedOptimizer(sgd(model), comm, "dense", **WAYS[way]), sgd(plain)
    for step in range(3):
        optimizer.zero_grad()
        alone.zero_grad()
        if step in (1, 2) and when == "before":
            CHANGES[change](model)
            CHANGES[change](plain)
        backward(model, comm.rank, step)
        for rank in range(comm.size):
            backward(plain, rank, step, share=1 / comm.size)
        if step == 1 and when == "between" and way != "overlap":
            CHANGES[change](model)
            CHANGES[change](plain)
        optimizer.reduce()
        if step == 2 and when == "between":
            CHANGES[change](model)
            CHANGES[change](plain)
        optimizer.apply()
        alone.step()
    assert np.allclose(flat(model), flat(plain), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("way", "change", "named"),
    [
        *(
            (way, lambda model: model.bfloat16(), r"type .* was torch\.float32 when .* is torch\.bfloat16")
            for way in GRADIENTS
        ),
        ("vector", lambda model: model.double(), r"type .* was torch\.float32 when .* is torch\.float64"),
        (
            "vector",
            lambda model: setattr(model.b.weight, "data", torch.zeros(2, 96)),
            r"shape of a parameter of shape \(3, 96\) was \(3, 96\) when .* is \(2, 96\)",
        ),
    ],
)
def test_a_model_no_step_can_take_is_named_by_all(
    comm: MPI.Intracomm, way: str, change: Callable[[nn.Module], Any], named: str
) -> None:
    model = Heads()
    optimizer = DistributedOptimizer(sgd(model), comm, **SPARSE, **WAYS[way])
    backward(model, comm.rank, 0)
    optimizer.step()
    residual = optimizer.reducer.gathered_residual()
    if comm.rank == comm.size - 1:
        change(model)
    else:
        optimizer.zero_grad()
        backward(model, comm.rank, 1)
    with pytest.raises(ValueError, match=f"rank {comm.size - 1}: the {named}"):
        optimizer.step()
    assert np.allclose(optimizer.reducer.gathered_residual(), residual, atol=1e-6)


def run(
    comm: MPI.Intracomm, way: str, wrap: Callable[[nn.Module], torch.optim.Optimizer], **settings: Any
) -> tuple[Any, DistributedOptimizer, Callable[..., Any]]:
    model: Any = Heads()
    chosen = {"sends": "gradients"} | SPARSE | WAYS[way] | settings
    optimizer = DistributedOptimizer(wrap(model), comm, **chosen)
    steps = iter(range(1000))

    def step(heads: str = "ab") -> None:
        optimizer.zero_grad()
        backward(model, comm.rank, next(steps), heads)
        optimizer.step()

    return model, optimizer, step


@pytest.mark.parametrize("way", ["vector", "overlap"])
def test_parameters_that_the_model_has_no_more_are_warned_of(comm: MPI.Intracomm, way: str) -> None:
    model, _, step = run(comm, way, sgd)
    step()
    before = flat(model)
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    gone = r"no parameter of the optimizer has a gradient on any rank in step 1: .*assign=True.* then wrap"
    with pytest.warns(UserWarning, match=gone) if comm.rank == 0 else nullcontext():
        step()
    step()  # once is enough
    assert np.array_equal(flat(model), before)


@pytest.mark.parametrize(
    ("way", "how", "kind"),
    [
        ("vector", "requires_grad", "sgd"),
        ("vector", "None", "adamw"),
        ("overlap", "None", "sgd"),
        ("two levels", "requires_grad", "adamw"),
        ("two levels", "None", "int8"),
        ("updates", "None", "adamw"),
        ("updates of hosts", "None", "adamw"),
    ],
)
def test_a_layer_frozen_later_stays_and_keeps_its_residual(
    comm: MPI.Intracomm, way: str, how: str, kind: str
) -> None:
    """Decay included."""
    wrap = adamw if kind == "adamw" else sgd
    model, optimizer, step = run(comm, way, wrap, **({"wire": "int8"} if kind == "int8" else {}))
    for _ in range(3):
        step()
    frozen = slice(model.body.weight.numel() + 6, -(3 * 96 + 3))  # of head a
    kept = [model.a.weight.detach().clone(), optimizer.reducer.gathered_residual()[frozen]]
    assert comm.allreduce(np.abs(kept[1]).sum()) > 0
    model.a.requires_grad_(how != "requires_grad")
    for _ in range(3):
        step("ab" if how == "requires_grad" else "b")
        assert torch.equal(model.a.weight, kept[0])
        residual = optimizer.reducer.gathered_residual()[frozen]
        assert np.allclose(comm.allreduce(residual), comm.allreduce(kept[1]), atol=1e-6)
        assert np.array_equal(residual, kept[1]) or "updates" not in way
    assert not torch.equal(model.b.weight, Heads().b.weight)
    model.a.requires_grad_(True)
    step()
    assert not torch.equal(model.a.weight, kept[0])
    with optimizer.agreed():
        assert np.array_equal(flat(model), comm.bcast(flat(model)))


@pytest.mark.parametrize(
    ("way", "method"), [*((way, "oktopk") for way in WAYS), ("overlap", "dense"), ("vector", "gtopk")]
)
def test_a_parameter_that_no_rank_uses_is_left_alone(comm: MPI.Intracomm, way: str, method: str) -> None:
    """Where one rank uses it, it moves on all, as with dense sums: ranks that differ in turn, and all in the last step."""
    model, optimizer, step = run(comm, way, adamw, method=method)
    before = model.b.weight.detach().clone()
    for _ in range(2):
        step("a")
        assert torch.equal(model.b.weight, before) and model.b.weight not in optimizer.state
        assert model.b.weight.grad is None
    for turn in range(comm.size):
        before = model.b.weight.detach().clone()
        step("ab" if turn % comm.size == comm.rank else "a")
        assert not torch.equal(model.b.weight, before)
        with optimizer.agreed():
            assert np.array_equal(flat(model), comm.bcast(flat(model)))
    step()
    assert not torch.equal(model.b.weight, before)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("way", "name"), [*((way, "lr") for way in GRADIENTS), ("vector", "betas"), ("updates", "betas")]
)
def test_settings_that_part_are_named_by_all_ranks(comm: MPI.Intracomm, way: str, name: str) -> None:
    """A rate behind a schedule; betas in a list, as a file of settings gives them, which changes where it is."""
    model: Any = Heads()
    groups = [{"params": model.body.parameters()}, {"params": [*model.a.parameters(), *model.b.parameters()]}]
    inner = torch.optim.AdamW(groups, lr=0.1)
    optimizer: Any = DistributedOptimizer(inner, comm, **{"sends": "gradients"} | SPARSE | WAYS[way])
    group, schedule = optimizer.param_groups[1], torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    group["betas"] = [0.9, 0.99]
    for step in range(3):
        optimizer.zero_grad()
        backward(model, comm.rank, step)
        optimizer.step()
        schedule.step()
    if name == "lr":
        group["lr"] = 0.03 if comm.rank == comm.size - 1 else 0.02
    else:
        group["betas"][1] = 0.7 if comm.rank == comm.size - 1 else 0.5
    before, control = flat(model), optimizer.report.control_messages
    optimizer.zero_grad()
    backward(model, comm.rank, 3)
    values = comm.allgather(group["lr"] if name == "lr" else tuple(group["betas"]))
    listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
    sentence = re.escape(f"'{name}' of the optimizer's group 1 differs between ranks: {listed}. ")
    with pytest.raises(ValueError, match=sentence):
        optimizer.step()
    assert way == "updates" or np.array_equal(flat(model), before)
    assert control


@pytest.mark.parametrize("way", ["vector", "updates"])
def test_groups_that_a_user_divides_are_stepped_on(comm: MPI.Intracomm, way: str) -> None:
    """`param_groups` and `state` can be set, as of torch's own."""
    model, optimizer, step = run(comm, way, adamw)
    (group,) = optimizer.param_groups
    optimizer.param_groups = [
        {**group, "params": group["params"][:2], "lr": 0.0},
        {**group, "params": group["params"][2:]},
    ]
    before = model.body.weight.detach().clone(), model.a.weight.detach().clone()
    optimizer.load_state_dict(optimizer.state_dict())
    step()
    step()
    optimizer.state = type(optimizer.state)(dict)
    assert torch.equal(model.body.weight, before[0]) and not torch.equal(model.a.weight, before[1])
    assert not optimizer.inner.state


@pytest.mark.mpi(min_size=2)
def test_states_that_differ_are_refused_by_all_ranks(comm: MPI.Intracomm) -> None:
    model, optimizer, step = run(comm, "vector", sgd)
    step()
    state = optimizer.state_dict()
    optimizer.load_state_dict(state)
    before = flat(model)
    odd = comm.rank == comm.size - 1
    state["param_groups"][0]["lr"] = 0.5 if odd else 0.05
    with pytest.raises(
        ValueError, match=r"'lr' of the optimizer's group 0 differs between ranks: 0\.05 on rank 0"
    ):
        optimizer.load_state_dict(state)
    state["param_groups"][0]["lr"] = 0.05
    if odd:
        state["state"][0]["momentum_buffer"] = state["state"][0]["momentum_buffer"] + 1
    with pytest.raises(ValueError, match=rf"state on rank\(s\) {comm.size - 1} differs from rank 0's"):
        optimizer.load_state_dict(state)
    optimizer.inner.load_state_dict(
        {name: state[name] for name in ("state", "param_groups")}
    )  # behind its back
    with pytest.raises(
        ValueError, match="the ranks have loaded different states into the optimizer: load one"
    ):
        step()
    assert np.array_equal(flat(model), before)


def test_a_table_that_no_rank_uses_any_more_stays(comm: MPI.Intracomm) -> None:
    torch.manual_seed(3)
    table, layer = nn.Embedding(40, 4, sparse=True), nn.Linear(4, 2)
    inner = torch.optim.SGD([*table.parameters(), *layer.parameters()], lr=0.1, momentum=0.9)
    optimizer: Any = DistributedOptimizer(inner, comm, density=0.2)
    for step in range(5):
        optimizer.zero_grad()
        words = torch.randint(0, 40, (12,), generator=torch.Generator().manual_seed(10 * step + comm.rank))
        layer(table(words) if step < 3 else torch.ones(3, 4)).square().mean().backward()
        if step == 3:
            before = table.weight.detach().clone()
        optimizer.step()
    assert torch.equal(table.weight, before)
