"""The hook, where a user changes model, groups or ranks around it: as torch's DDP alone, or one sentence on all ranks."""

from __future__ import annotations

import copy
import gc
import warnings
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from oktopk import DistributedOptimizer
from oktopk.elastic import of_rank
from oktopk.torch import OkTopkState, ddp_hook
from tests.oktopk.test_as_torch_alone import Heads, adamw, backward, images, sgd
from tests.training import flat

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("group")]


def hooked(model: nn.Module, state: OkTopkState | None = None, **options: Any) -> tuple[Any, OkTopkState]:
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.0005, **options)
    state = state or OkTopkState(density=0.1, threshold_interval=2)
    ddp.register_comm_hook(state, ddp_hook)
    return ddp, state


def train(ddp: Any, optimizer: torch.optim.Optimizer, rank: int, steps: range, heads: str = "ab") -> None:
    for step in steps:
        optimizer.zero_grad()
        backward(ddp, rank, step, heads)
        optimizer.step()


@pytest.mark.parametrize("frozen", [False, True])
def test_what_no_rank_uses_is_left_alone_and_keeps_its_residual(comm: MPI.Intracomm, frozen: bool) -> None:
    ddp, state = hooked(Heads(), find_unused_parameters=True)
    optimizer, model = adamw(ddp), ddp.module
    if frozen:
        train(ddp, optimizer, comm.rank, range(3))
    before = model.b.weight.detach().clone()
    kept = comm.allreduce(residual_of(state, model, "b.weight")) if frozen else 0.0
    for step in range(3, 6):
        train(ddp, optimizer, comm.rank, range(step, step + 1), "a")
        assert torch.equal(model.b.weight, before) and model.b.weight.grad is None
        assert np.allclose(comm.allreduce(residual_of(state, model, "b.weight")), kept, atol=1e-6)
    train(ddp, optimizer, comm.rank, range(6, 7), "ab" if comm.rank == 0 else "a")
    assert not torch.equal(model.b.weight, before)
    assert np.array_equal(flat(model), comm.bcast(flat(model)))


def residual_of(state: OkTopkState, model: nn.Module, name: str) -> Any:
    """Of a parameter on this rank, which the first step leaves none of."""
    saved = of_rank(state.state_dict())
    for number, names in enumerate(saved["buckets"]):
        if name in names:
            residual = saved["reducer"]["buckets"][str(number)]["residual"].double()
            pieces = residual.split([model.get_parameter(each).numel() for each in names])
            return pieces[names.index(name)].numpy()
    return np.zeros(model.get_parameter(name).numel())


@pytest.mark.parametrize(("at", "views"), [(0, False), (1, True), (3, False)])
def test_a_model_that_becomes_channels_last_under_ddp_is_named(
    comm: MPI.Intracomm, at: int, views: bool
) -> None:
    """torch gives a hook gradients in the order of its buckets, and takes them back in that of the parameters."""
    ddp, _ = hooked(Heads(), gradient_as_bucket_view=views)
    optimizer = sgd(ddp)
    train(ddp, optimizer, comm.rank, range(at))
    if comm.rank == comm.size - 1:
        ddp.module.to(memory_format=torch.channels_last)
    before = flat(ddp)
    named = rf"rank {comm.size - 1}: the parameter 'body\.weight' is laid out otherwise .*memory_format=\.\.\.\) before"
    with pytest.raises(Exception, match=named):
        train(ddp, optimizer, comm.rank, range(at, at + 1))
    assert np.array_equal(flat(ddp), before)


def test_a_model_that_was_channels_last_before_is_reduced_in_its_order(comm: MPI.Intracomm) -> None:
    results = []
    for last in (False, True):
        model = Heads()
        if last:
            model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        ddp, _ = hooked(model, OkTopkState(method="dense"))
        train(ddp, sgd(ddp), comm.rank, range(4))
        results.append(flat(ddp))
    assert np.allclose(results[0], results[1], rtol=1e-3, atol=1e-5)


def test_a_model_of_another_type_than_its_ddps_is_named(comm: MPI.Intracomm) -> None:
    ddp, _ = hooked(Heads())
    train(ddp, sgd(ddp), comm.rank, range(1))
    ddp.module.bfloat16()
    with pytest.raises(
        RuntimeError, match=r"reduces no gradient any more: the type .* torch\.float32 .* torch\.bfloat16"
    ):
        ddp(images(comm.rank, 1).bfloat16()).sum().backward()


@pytest.mark.parametrize(
    ("dtype", "named"),
    [
        (torch.float64, r"torch\.float64 on cpu, not"),
        (torch.complex64, r"torch\.complex64 on cpu, not .*view_as_real"),
    ],
)
def test_gradients_that_it_would_round_are_refused(
    comm: MPI.Intracomm, dtype: torch.dtype, named: str
) -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(5, dtype=dtype))

        def forward(self, inputs: torch.Tensor) -> torch.Tensor:
            return (inputs * self.weight).abs().sum()

    ddp, _ = hooked(Scaled())
    with pytest.raises(Exception, match=named):
        ddp(torch.ones(5)).backward()


@pytest.mark.mpi(min_size=2)
def test_models_of_two_groups_of_ranks_train_apart(comm: MPI.Intracomm) -> None:
    parts = [dist.new_group([0]), dist.new_group(list(range(1, comm.size)))]
    mine, members = (parts[0], [0]) if comm.rank == 0 else (parts[1], list(range(1, comm.size)))
    ddp, state = hooked(Heads(), OkTopkState(method="dense"), process_group=mine)
    train(ddp, sgd(ddp), comm.rank, range(3))
    plain = Heads()
    optimizer = sgd(plain)
    for step in range(3):
        optimizer.zero_grad()
        for rank in members:
            backward(plain, rank, step, share=1 / len(members))
        optimizer.step()
    assert np.allclose(flat(ddp), flat(plain), rtol=1e-4, atol=1e-6)
    other, _ = hooked(Heads(), OkTopkState(dist.group.WORLD), process_group=mine)
    named = rf"OkTopkState has ranks \[0, .*\], and its DistributedDataParallel reduces over ranks \[{members[0]}.*\]: leave"
    with pytest.raises(Exception, match=named):
        backward(other, comm.rank, 0)
    state.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("anew", [False, True])
def test_rates_that_part_are_named_by_all_ranks(comm: MPI.Intracomm, anew: bool) -> None:
    """Of another optimizer, too, that takes the place of the first one."""
    ddp, _ = hooked(Heads())
    optimizer = sgd(ddp)
    train(ddp, optimizer, comm.rank, range(2))
    if anew:
        optimizer = sgd(ddp)
    optimizer.param_groups[0]["lr"] = 0.5 if comm.rank == 0 else 0.25
    with pytest.raises(
        Exception,
        match=r"'lr' of the optimizer's group 0 differs between ranks: 0\.5 on rank 0, 0\.25 on rank 1",
    ):
        train(ddp, optimizer, comm.rank, range(2, 4))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("name", ["body.weight", "a.weight"])
def test_rates_that_part_are_named_in_a_step_that_skips_a_bucket(comm: MPI.Intracomm, name: str) -> None:
    """Of the last bucket, which takes the ranks' tokens along, or another one: the optimizer steps on the others."""
    ddp, state = hooked(Heads(), OkTopkState(density=0.1, nonfinite="skip"))
    optimizer = sgd(ddp)
    train(ddp, optimizer, comm.rank, range(3))
    assert state.reducer is not None and len(state.reducer.reducers) > 1
    optimizer.param_groups[0]["lr"] = 0.5 if comm.rank == 0 else 0.25
    if comm.rank == 0:
        ddp.module.get_parameter(name).register_hook(lambda gradient: gradient * float("nan"))
    before = flat(ddp)
    with pytest.raises(RuntimeError, match="'lr' of the optimizer's group 0 differs between ranks: 0.5 on"):
        train(ddp, optimizer, comm.rank, range(3, 4))
    assert np.array_equal(flat(ddp), before)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_an_optimizer_that_ranks_free_in_other_steps_parts_nobody(
    comm: MPI.Intracomm, momentum: float
) -> None:
    """Python frees what is in a cycle when it likes."""
    ddp, _ = hooked(Heads())
    optimizer: Any = torch.optim.SGD(ddp.parameters(), lr=1e-3, momentum=momentum)
    optimizer.owner = {"optimizer": optimizer}
    train(ddp, optimizer, comm.rank, range(2))
    gc.disable()
    try:
        optimizer = torch.optim.SGD(ddp.parameters(), lr=1e-2, momentum=momentum)
        for step in range(2, 8):
            if step == 3 + 2 * comm.rank:
                gc.collect()
            train(ddp, optimizer, comm.rank, range(step, step + 1))
    finally:
        gc.enable()
    assert len(set(comm.allgather(flat(ddp).tobytes()))) == 1


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("steps", [0, 2])
def test_states_that_differ_are_named_by_all_ranks(comm: MPI.Intracomm, steps: int) -> None:
    """Loaded before the first step, or later."""
    ddp, _ = hooked(Heads())
    optimizer = sgd(ddp)
    train(ddp, optimizer, comm.rank, range(steps))
    held = [torch.full_like(p, float(comm.rank == 1)) for p in ddp.parameters()]
    state = {number: {"momentum_buffer": momentum} for number, momentum in enumerate(held)}
    optimizer.load_state_dict({**optimizer.state_dict(), "state": state})
    with pytest.raises(
        Exception, match="the ranks have loaded different states into the optimizer: load one"
    ):
        train(ddp, optimizer, comm.rank, range(2, 4))


@pytest.mark.parametrize(("steps", "loads"), [(1, True), (2, True), (2, False)])
def test_residuals_that_are_lost_at_resume_are_warned_of(
    comm: MPI.Intracomm, steps: int, loads: bool
) -> None:
    """After the first step a state of the hook is empty: who loads it has lost nothing."""
    ddp, state = hooked(Heads())
    optimizer = sgd(ddp)
    train(ddp, optimizer, comm.rank, range(steps))
    again, continued = hooked(Heads())
    resumed = sgd(again)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    if loads:
        continued.load_state_dict(state.state_dict())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train(again, resumed, comm.rank, range(steps, steps + 1))
    lost = [each for each in caught if "residuals start empty" in str(each.message)]
    assert len(lost) == (comm.rank == 0 and not loads)


@pytest.mark.parametrize("hook", [False, True])
@pytest.mark.parametrize("sparse", [False, True])
def test_a_table_that_the_forward_pass_rescales_is_warned_of(
    comm: MPI.Intracomm, hook: bool, sparse: bool
) -> None:
    model = nn.Sequential(nn.Embedding(50, 8, max_norm=1.0, sparse=sparse), nn.Linear(8, 3))
    told = pytest.warns(
        UserWarning,
        match=r"Embedding\(max_norm=\.\.\.\) rescales .*torch\.renorm\(",
    )
    with told if comm.rank == 0 else nullcontext():
        if hook:
            ddp, _ = hooked(model)
            ddp(torch.arange(3)).sum().backward()
        else:
            DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), comm)


def test_a_ddp_that_reduces_beside_a_wrapped_optimizer_is_warned_of(
    comm: MPI.Intracomm, recwarn: pytest.WarningsRecorder
) -> None:
    from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook

    for noop in (False, True):
        recwarn.clear()
        ddp = DistributedDataParallel(Heads())
        if noop:
            ddp.register_comm_hook(None, noop_hook)
        optimizer = DistributedOptimizer(sgd(ddp), comm, "dense")
        train(ddp, optimizer, comm.rank, range(2))
        told = [str(each.message) for each in recwarn if "reduced twice" in str(each.message)]
        assert len(told) == (comm.rank == 0 and comm.size > 1 and not noop)
