"""AdamW in the pass that selects against torch's, wrapped alike: the same moments, steps and sums, and the same rules."""

from __future__ import annotations

import copy
import gc
import math
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import oktopk.torch
from oktopk import NonFiniteGradientError
from oktopk.torch.as_wrapped import AsWrapped
from tests.adamw import assert_torchs
from tests.training import flat, loss, network, steady, train
from tests.updates import reference, references

pytestmark = pytest.mark.mpi

OURS, TORCHS = oktopk.torch.AdamW, torch.optim.AdamW
SHAPES = (
    (130, 31),
    (1,),
    (7, 3),
    (64,),
    (0,),
    (1029,),
)  # on both sides of a vector, and of a piece of the pass


def parameters(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(2)
    return [nn.Parameter(torch.randn(shape, generator=generator).to(dtype)) for shape in SHAPES]


def wrap(kind: type[Any], given: Any, comm: Any, settings: dict[str, Any], **group: Any) -> Any:
    inner = kind(given, **({"lr": 2e-3, "weight_decay": 0.0, "fused": True} | group))
    kept = {"density": 0.05, "threshold_interval": 3, "residual_decay": 0}  # so that moves can be added up
    return steady(inner, comm, **(kept | settings))


def feed(held: list[nn.Parameter], rank: int, step: int) -> None:
    """Gradients that do not depend on the parameters."""
    generator = torch.Generator().manual_seed(100 * step + rank)
    for parameter in held:
        gradient = torch.randn(parameter.shape, generator=generator)
        parameter.grad = gradient.bfloat16().to(parameter.dtype)


class Run:
    """Steps of one kind of AdamW on given gradients.

    Attributes:
        moved: float64[n], by how much the optimizers of all ranks have moved parameters: sent, and still to be sent.
    """

    def __init__(
        self, kind: type[Any], comm: Any, settings: dict[str, Any], groups: Any, **group: Any
    ) -> None:
        self.comm, self.held = comm, parameters(group.pop("dtype", torch.float32))
        given = self.held if groups is None else groups(self.held)
        self.optimizer = wrap(kind, given, comm, settings, **group)
        self.before = reference(self.optimizer).double().numpy()

    @property
    def moved(self) -> Any:
        residual = self.comm.allreduce(self.optimizer.reducer.residual.astype(np.float64))
        return residual + self.comm.size * (self.before - reference(self.optimizer).double().numpy())

    def state(self, name: str) -> list[Any]:
        state = self.optimizer.inner.state
        return [state[p][name].clone() if p in state else None for p in self.held]

    @property
    def selects(self) -> bool:
        return "AdamW in the pass that selects" in repr(self.optimizer)


def missing(run: Run, step: int) -> None:
    run.held[3].grad = None
    if (step + run.comm.rank) % 2:
        run.held[0].grad = None


def not_a_number(run: Run, step: int) -> None:
    if step == 3 and run.comm.rank == run.comm.size - 1:
        run.held[0].grad.view(-1)[5] = math.nan


def two_groups(held: list[nn.Parameter]) -> Any:
    held[2].requires_grad_(False)
    return [
        {"params": held[:1], "weight_decay": 0.1},
        {"params": held[1:], "lr": 1e-3, "betas": (0.4, 0.99), "eps": 1e-6},
    ]


CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any, Callable[[Run, int], None] | None]] = {
    "oktopk, clipped": ({"method": "oktopk", "clip_norm": 0.5}, {}, None, None),
    "clipped": ({"clip_norm": 0.5}, {}, None, None),
    "groups, decay, frozen": ({}, {}, two_groups, lambda run, step: setattr(run.held[2], "grad", None)),
    "missing gradients": ({"nonfinite": "raise", "method": "oktopk"}, {}, None, missing),
    "nan raises": ({"nonfinite": "raise"}, {}, None, not_a_number),
    "nan is skipped, torch's own choice of kernels": (
        {"nonfinite": "skip"},
        {"fused": None},
        None,
        not_a_number,
    ),
    "a tensor rate": ({}, {"lr": torch.tensor(2e-3)}, None, None),
    "union, int8": ({"method": "union", "wire": "int8"}, {}, None, None),
    "bfloat16, behind a warm-up": ({"dense_warmup_steps": 2}, {"dtype": torch.bfloat16}, None, None),
    "gtopk, foreach": ({"method": "gtopk"}, {"fused": None, "foreach": True}, None, None),
}


@pytest.mark.parametrize("name", CASES)
def test_moments_steps_and_moves_are_those_of_torchs_adamw(comm: MPI.Intracomm, name: str) -> None:
    """On gradients that do not depend on the parameters: what is selected may differ where magnitudes are nearly equal.

    Those of bfloat16 are compared with float32's, since torch's loses what is below half an ulp of a parameter.
    """
    settings, group, groups, change = CASES[name]
    torchs_own = group | {"dtype": torch.float32, "fused": True, "foreach": None}
    runs = [Run(OURS, comm, settings, groups, **group), Run(TORCHS, comm, settings, groups, **torchs_own)]
    assert [run.selects for run in runs] == [True, False]
    for step in range(6):
        for run in runs:
            feed(run.held, comm.rank, step)
            if change is not None:
                change(run, step)
            raises = name == "nan raises" and step == 3
            with pytest.raises(NonFiniteGradientError) if raises else nullcontext():
                run.optimizer.step(measure=step == 5)
    ours, torchs = runs
    for moment in ("exp_avg", "exp_avg_sq", "step"):
        mine, theirs = ours.state(moment), torchs.state(moment)
        assert [each is None for each in mine] == [each is None for each in theirs]
        mine, theirs = ([each for each in state if each is not None] for state in (mine, theirs))
        if "bfloat16" in name:
            pairs = zip(mine, theirs, strict=True)
            assert all(torch.allclose(one.float(), other, rtol=2e-2, atol=2e-2) for one, other in pairs)
        else:
            assert_torchs(mine, theirs)
    tolerance = np.full(len(ours.moved), 1e-3 if "bfloat16" in name else 2e-6)
    if name == "groups, decay, frozen":  # what one of the two sends a step earlier decays by another value
        tolerance[: ours.held[0].numel()] = 5e-5
    assert np.abs(ours.moved).max() > 1e-3
    assert np.allclose(ours.moved, torchs.moved, rtol=1e-4, atol=tolerance)
    for run in runs:
        assert len(set(references(run.optimizer, comm))) == 1
        run.optimizer.close()


def smooth() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(20, 30), nn.Tanh(), nn.Linear(30, 7))


def test_one_rank_trains_as_torchs_adamw_to_rounding() -> None:
    """Whatever is selected: the residual counts at once."""
    alone, model = smooth(), smooth()
    torchs = TORCHS(alone.parameters(), lr=1e-2, weight_decay=0.0, fused=True)
    optimizer = wrap(OURS, model.parameters(), MPI.COMM_SELF, {}, lr=1e-2)
    train(alone, torchs, 0, range(20))
    train(model, optimizer, 0, range(20))
    assert loss(model, 0, 20).item() < 0.5 * loss(smooth(), 0, 20).item()
    assert np.allclose(flat(alone), flat(model), atol=1e-5)


@pytest.mark.parametrize("kinds", [(OURS, TORCHS), (TORCHS, OURS)], ids=["to torch's", "from torch's"])
def test_states_of_torchs_adamw_and_ours_load_either_way(comm: MPI.Intracomm, kinds: tuple[Any, Any]) -> None:
    model = network()
    # a large eps: the gradient of a bias before a norm is rounding alone, and Adam would make steps of it
    settings = {"weight_decay": 0.1, "eps": 1e-2}
    first = wrap(kinds[0], model.parameters(), comm, {}, **settings)
    train(model, first, comm.rank, range(5))
    saved = copy.deepcopy((model.state_dict(), first.state_dict()))
    again = network(6)
    second = wrap(kinds[1], again.parameters(), comm, {}, **settings)
    train(again, second, comm.rank, range(2))
    again.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    for each, optimizer in ((model, first), (again, second)):
        train(each, optimizer, comm.rank, range(5, 9))
    counts = {float(state["step"]) for state in second.inner.state.values()}
    assert counts == {9.0}
    assert np.allclose(flat(model), flat(again), atol=1e-3)


def test_a_steady_step_sees_a_count_that_was_written(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = network()
    optimizer = wrap(OURS, model.parameters(), comm, {})
    train(model, optimizer, comm.rank, range(3))
    looks, look = [], AsWrapped.look

    def counted(watched: AsWrapped) -> None:
        looks.append(watched)
        look(watched)

    monkeypatch.setattr(AsWrapped, "look", counted)
    train(model, optimizer, comm.rank, range(3, 5))
    assert len(looks) == 2
    steps = [state["step"] for state in optimizer.inner.state.values()]
    assert len({step.untyped_storage().data_ptr() for step in steps}) == 1
    steps[0].fill_(70)
    train(model, optimizer, comm.rank, range(5, 6))
    assert [step.item() for step in steps] == [71.0] + [6.0] * (len(steps) - 1)


def moved(states: list[Any]) -> None:
    """As an optimizer is offloaded, and back."""
    for state in states:
        for each in state.values():
            each.data = each.data.clone()


def written_elsewhere(states: list[Any]) -> None:
    states[0]["step"].data = torch.tensor(70.0)


def of_one_element(states: list[Any]) -> None:
    states[0]["step"] = states[0]["step"].reshape(1)


def swapped(states: list[Any]) -> None:
    one, other = states[:2]
    one["step"].fill_(10)
    one["step"], other["step"] = other["step"], one["step"]


def transposed(states: list[Any]) -> None:
    for name in ("exp_avg", "exp_avg_sq"):
        states[0][name].t_()


@pytest.mark.parametrize("change", [moved, written_elsewhere, of_one_element, swapped, transposed])
def test_counts_and_moments_that_a_user_puts_elsewhere_are_torchs(
    comm: MPI.Intracomm, change: Callable[[list[Any]], None]
) -> None:
    found = []
    for kind in (OURS, TORCHS):
        held = [nn.Parameter(torch.ones(20, 20)), nn.Parameter(torch.ones(64))]
        optimizer = wrap(kind, held, comm, {}, fused=False)
        for step in range(4):
            if step == 2:
                change(states := [optimizer.inner.state[each] for each in held])
            feed(held, comm.rank, step)
            optimizer.step()
        found.append([{name: each.clone() for name, each in state.items()} for state in states])
        optimizer.close()
    for ours, torchs in zip(*found, strict=True):
        assert float(ours["step"]) == float(torchs["step"])
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.allclose(ours[name], torchs[name], rtol=1e-5, atol=1e-9)


@pytest.mark.parametrize("what", ["cleared", "loaded after a skip", "loaded after torch's step"])
def test_moments_that_are_replaced_are_freed(comm: MPI.Intracomm, what: str) -> None:
    """Also where the pass has looked for what it reads, and the step was another one."""
    model = network()
    optimizer = wrap(OURS, model.parameters(), comm, {"nonfinite": "skip"})
    train(model, optimizer, comm.rank, range(3))
    saved = copy.deepcopy(optimizer.state_dict())
    held = [weakref.ref(state["exp_avg"]) for state in optimizer.inner.state.values()]
    if what == "cleared":
        optimizer.inner.state.clear()
    else:
        skipped = "skip" in what
        if not skipped:
            optimizer.inner.register_step_post_hook(lambda *_: None)
        (loss(model, comm.rank, 3) * (float("nan") if skipped else 1.0)).backward()
        optimizer.step()
        optimizer.load_state_dict(saved)
    gc.collect()
    assert [each() for each in held] == [None] * len(held)
    optimizer.close()


def test_an_update_that_is_not_finite_leaves_torchs_moments(comm: MPI.Intracomm) -> None:
    """A gradient of zero over a root of zero, on one rank: as in torch the moments have seen it, and no parameter moves there."""
    moments = []
    for kind in (OURS, TORCHS):
        held = [nn.Parameter(torch.ones(80))]
        optimizer = wrap(kind, held, comm, {"density": 0.2, "nonfinite": "raise"}, eps=0.0)
        held[0].grad = torch.full((80,), 2.0)
        if comm.rank == 0:
            held[0].grad[3] = 0.0
        with pytest.raises(NonFiniteGradientError):
            optimizer.step()
        assert comm.rank or float(held[0][3]) == 1.0
        moments.append(
            [optimizer.inner.state[held[0]][name].clone() for name in ("exp_avg", "exp_avg_sq", "step")]
        )
        held[0].grad = torch.full((80,), 2.0)
        optimizer.step()
        assert bool(torch.isfinite(held[0]).all())
        optimizer.close()
    assert all(map(torch.equal, *moments))


OTHERS: dict[str, Any] = {
    "amsgrad": lambda run: run.optimizer.param_groups[0].update(amsgrad=True),
    "maximize": lambda run: run.optimizer.param_groups[0].update(maximize=True),
    "a hook": lambda run: run.optimizer.inner.register_step_post_hook(
        lambda *_: [p.data.clamp_(-1, 1) for p in run.held]
    ),
    "moments laid out otherwise": lambda run: run.optimizer.inner.state[run.held[0]].update(
        exp_avg=torch.zeros(SHAPES[0][::-1]).t()
    ),
    "moments moved behind their tensor": lambda run: lay_out_otherwise(
        run.optimizer.inner.state[run.held[0]]["exp_avg"]
    ),
}


def lay_out_otherwise(tensor: torch.Tensor) -> None:
    """As a program does that moves an optimizer's state: the tensor stays the same object."""
    tensor.data = tensor.data.t().contiguous().t()


@pytest.mark.parametrize("what", [*OTHERS, "every"])
def test_what_the_pass_does_not_compute_is_torchs_own_step(comm: MPI.Intracomm, what: str) -> None:
    settings = {"every": 2} if what == "every" else {}
    runs = [Run(kind, comm, settings, None, fused=None, foreach=False) for kind in (OURS, TORCHS)]
    for run in runs:
        if "moments" in what:
            feed(run.held, comm.rank, 0)
            for parameter in run.held:
                parameter.grad.zero_()
            run.optimizer.step()
        if what in OTHERS:
            OTHERS[what](run)
        for step in range(3):
            feed(run.held, comm.rank, step)
            run.optimizer.step()
    values = [torch.cat([p.detach().reshape(-1) for p in run.held]) for run in runs]
    assert torch.equal(*values)
    assert not torch.equal(values[0], torch.cat([p.detach().reshape(-1) for p in parameters()]))


def test_alone_it_is_torchs() -> None:
    values = []
    for kind in (OURS, TORCHS):
        held = parameters()
        optimizer = kind(held, lr=2e-3)
        for step in range(3):
            feed(held, 0, step)
            optimizer.step()
        values.append(torch.cat([p.detach().reshape(-1) for p in held]))
    assert torch.equal(*values)
