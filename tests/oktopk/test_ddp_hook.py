"""Ok-Topk as the hook of a DistributedDataParallel that others wrote: one line, whatever DDP does with its buckets."""

from __future__ import annotations

import copy
import gc
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from mpi4py import MPI
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.nn.parallel import DistributedDataParallel

from collectives.dense_allreduce import dense_words
from oktopk import DistributedOptimizer
from oktopk.elastic import of_rank, redistribute
from oktopk.torch import OkTopkState, ddp_hook
from tests.devices import on_torchs_gpu, torch_device
from tests.oktopk.test_closed import every_call_refuses
from tests.replicas import Replicas
from tests.training import flat, loss
from tests.training import train as train_wrapped

pytestmark = [pytest.mark.mpi, pytest.mark.usefixtures("group")]

BUCKET_MB = 0.002


class Branches(nn.Module):
    """A network with a layer that every other step leaves out."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.second, self.last = nn.Linear(20, 60), nn.Linear(60, 60), nn.Linear(60, 7)

    def forward(self, inputs: torch.Tensor, through: bool = True) -> torch.Tensor:
        hidden = torch.relu(self.first(inputs))
        return self.last(torch.relu(self.second(hidden)) if through else hidden)


def hooked(
    options: dict[str, object] | None = None,
    place: torch.device | str = "cpu",
    state: OkTopkState | None = None,
    **settings: object,
) -> tuple[DistributedDataParallel, OkTopkState]:
    ddp = DistributedDataParallel(Branches().to(place), **{"bucket_cap_mb": BUCKET_MB, **(options or {})})
    state = state or OkTopkState(**({"density": 0.05, "threshold_interval": 3} | settings))
    ddp.register_comm_hook(state, ddp_hook)
    return ddp, state


def train(ddp: DistributedDataParallel, rank: int, steps: range) -> None:
    optimizer = torch.optim.SGD(ddp.parameters(), lr=0.05)
    for step in steps:
        optimizer.zero_grad()
        loss(ddp, rank, step).backward()
        optimizer.step()


def residuals(comm: MPI.Intracomm, state: OkTopkState) -> dict[str, np.ndarray]:
    """The sum of every parameter's residual over the ranks."""
    saved = of_rank(state.state_dict())
    parameters = dict(Branches().named_parameters())
    found = {name: np.zeros(parameter.numel()) for name, parameter in parameters.items()}
    for number, names in enumerate(saved["buckets"]):
        held = saved["reducer"]["buckets"][str(number)]["residual"]
        pieces = held.split([parameters[name].numel() for name in names])
        found |= {
            name: comm.allreduce(piece.double().numpy()) for name, piece in zip(names, pieces, strict=True)
        }
    return found


@pytest.mark.parametrize(
    ("device", "options", "settings"),
    [
        pytest.param("cpu", {}, {}, id="cpu"),
        pytest.param(
            "cpu", {"gradient_as_bucket_view": True, "static_graph": True}, {}, id="cpu, views, static graph"
        ),
        pytest.param("cpu", {"find_unused_parameters": True}, {}, id="cpu, unused parameters"),
        on_torchs_gpu(
            "cuda", {"gradient_as_bucket_view": True}, {"peer_memory": True}, id="cuda, peer memory"
        ),
        on_torchs_gpu("cuda", {"find_unused_parameters": True}, {"comm": MPI.COMM_WORLD}, id="cuda, MPI"),
        on_torchs_gpu("cuda", {}, {"peer_memory": False}, id="cuda, gloo"),
    ],
)
def test_what_is_applied_and_what_remains_add_up_to_the_gradients(
    comm: MPI.Intracomm, device: str, options: dict[str, object], settings: dict[str, object]
) -> None:
    place = torch_device(device, comm)
    ddp, state = hooked(options, place, **settings)
    own = Branches().to(place)
    carried = {name: np.zeros(p.numel()) for name, p in own.named_parameters()}
    for step in range(5):
        through = "find_unused_parameters" not in options or step % 2 == 0
        own.load_state_dict(ddp.module.state_dict())
        for module in (ddp, own):
            module.zero_grad()
            loss(module, comm.rank, step, through=through).backward()
        assert state.report is not None
        assert state.report.step == step
        left = residuals(comm, state)
        for (name, reduced), mine in zip(ddp.module.named_parameters(), own.parameters(), strict=True):
            gradient = (
                np.zeros(mine.numel()) if mine.grad is None else mine.grad.cpu().double().reshape(-1).numpy()
            )
            applied = (
                0.0 if reduced.grad is None else reduced.grad.cpu().double().reshape(-1).numpy() * comm.size
            )
            assert np.allclose(
                applied + left[name], carried[name] + comm.allreduce(gradient), rtol=1e-5, atol=1e-6
            ), name
        carried = left
        with torch.no_grad():
            for parameter in ddp.parameters():
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad, alpha=0.05)
    assert np.array_equal(flat(ddp), comm.bcast(flat(ddp))), "ranks have other parameters"


def test_gradients_of_several_batches_are_reduced_together(comm: MPI.Intracomm) -> None:
    ddp, state = hooked()
    for step in range(3):
        ddp.zero_grad()
        for batch in range(3):
            with ddp.no_sync() if batch < 2 else nullcontext():
                loss(ddp, comm.rank, 3 * step + batch).backward()
            assert (state.report is None) == (step == 0 and batch < 2)
        assert state.report.step == step


def test_k_and_its_caps_are_those_of_the_whole_model(comm: MPI.Intracomm) -> None:
    ddp, state = hooked()
    train(ddp, comm.rank, range(1))  # dense
    for step in range(1, 5):
        train(ddp, comm.rank, range(step, step + 1))
        assert state.report.k == -(-len(flat(ddp)) // 20)
        assert len(state.report.buckets) > 1
        assert state.report.global_nnz <= 1.25 * state.report.k


def two_types() -> Branches:
    """Its second layer is bfloat16."""
    model = Branches()
    model.second.to(torch.bfloat16)
    model.second.register_forward_pre_hook(lambda module, given: (given[0].to(torch.bfloat16),))
    model.second.register_forward_hook(lambda module, given, output: output.float())
    return model


@pytest.mark.parametrize(
    ("made", "options", "dense"),
    [
        pytest.param(Branches, {}, 1, id="plain"),
        pytest.param(Branches, {}, 3, id="warm-up"),
        pytest.param(Branches, {"static_graph": True}, 2, id="static graph"),
        pytest.param(Branches, {"find_unused_parameters": True}, 1, id="unused parameters"),
        pytest.param(two_types, {"gradient_as_bucket_view": True}, 1, id="two types, views"),
    ],
)
def test_the_first_steps_are_those_of_ddp_alone_and_then_buckets_stay(
    comm: MPI.Intracomm, made: Callable[[], Branches], options: dict[str, Any], dense: int
) -> None:
    """DDP lays its buckets out anew after its first step, with a static graph after its second one."""
    ddp = DistributedDataParallel(made(), bucket_cap_mb=BUCKET_MB, **options)
    alone = DistributedDataParallel(made(), bucket_cap_mb=BUCKET_MB, **options)
    state = OkTopkState(density=0.05, threshold_interval=3, dense_warmup_steps=3 if dense == 3 else 0)
    ddp.register_comm_hook(state, ddp_hook)
    unused = of_rank(state.state_dict())
    for step in range(5):
        reducer = state.reducer
        train(ddp, comm.rank, range(step, step + 1))
        assert (state.report.step, state.report.method) == (step, "dense" if step < dense else "oktopk")
        if step < dense:
            train(alone, comm.rank, range(step, step + 1))
            near = {"rtol": 1e-2 if made is two_types else 1e-5, "atol": 1e-6}
            assert np.allclose(flat(ddp), flat(alone), **near)
            assert not state.reducer.gathered_residual().any()
        if not step:
            mean = comm.allreduce(state.report.bytes) / comm.size
            assert mean == pytest.approx(4 * dense_words(len(flat(ddp)), comm.size), abs=64)
            assert of_rank(state.state_dict()) == unused
        assert state.reducer is reducer or step in (0, 1 + ("static_graph" in options))
        assert np.array_equal(flat(ddp), comm.bcast(flat(ddp)))
    assert len(state.report.buckets) > 1
    assert state.reducer.gathered_residual().any()


@pytest.mark.parametrize(
    ("how", "saved_at", "options"),
    [
        pytest.param("a file", 3, {"bucket_cap_mb": 1.0}, id="other buckets"),
        ("dcp, an object", 4, {}),
        ("dcp, a dict", 0, {}),
        ("a copy", 3, {}),
        ("the DDP", 2, {}),
    ],
)
def test_a_killed_training_continues_bit_for_bit(
    comm: MPI.Intracomm, tmp_path: Path, how: str, saved_at: int, options: dict[str, object]
) -> None:
    """In the buckets of the state, whatever DDP's are."""
    folder = comm.bcast(tmp_path)
    ddp, state = hooked()
    train(ddp, comm.rank, range(saved_at))
    weights, file = copy.deepcopy(ddp.module.state_dict()), folder / f"{comm.rank}.pt"
    kept = copy.deepcopy(state) if how == "a copy" else None
    if how.startswith("dcp"):
        saved = {"hook": state if how == "dcp, an object" else state.state_dict()}
        dcp.save(saved, checkpoint_id=folder)
    elif kept is None:
        torch.save(ddp if how == "the DDP" else state.state_dict(), file)
    train(ddp, comm.rank, range(saved_at, 6))
    if how == "the DDP":
        kept = torch.load(file, weights_only=False)._comm_hooks[0][1]
    again, continued = hooked(options, state=kept)
    again.module.load_state_dict(weights)
    if how == "a file":
        continued.load_state_dict(torch.load(file, weights_only=True))
    elif how.startswith("dcp"):
        loaded = {"hook": continued if how == "dcp, an object" else continued.state_dict()}
        dcp.load(loaded, checkpoint_id=folder)
        if how == "dcp, a dict":
            continued.load_state_dict(loaded["hook"])
    train(again, comm.rank, range(saved_at, 6))
    assert np.array_equal(flat(again), flat(ddp))
    assert continued.report.step == 5


@contextmanager
def fewer_ranks(comm: MPI.Intracomm, folder: Path, key: str, names: Sequence[str] = ()) -> Iterator[Any]:
    """(a process group of all ranks but the last, its communicator, what `redistribute` reads a rank's state with).

    On the last rank None. key: of the states in a distributed checkpoint, which are under these names of it, or alone there.
    """

    def read(rank: int) -> Any:
        own = {f"rank-{rank}": None}
        saved: dict[str, Any] = {key: {name: dict(own) for name in names} or own}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that torch reads for this process alone
            dcp.load(saved, checkpoint_id=folder, no_dist=True)
        return saved[key]

    ranks = comm.size - 1
    group = dist.new_group(list(range(ranks)))
    part = comm.Split(0 if comm.rank < ranks else MPI.UNDEFINED, comm.rank)
    yield (group, part, read) if comm.rank < ranks else None
    if comm.rank < ranks:
        part.Free()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_on_fewer_ranks_a_distributed_checkpoint_is_redistributed(
    comm: MPI.Intracomm, tmp_path: Path
) -> None:
    folder = comm.bcast(tmp_path)
    ddp, state = hooked()
    train(ddp, comm.rank, range(4))
    dcp.save({"hook": state}, checkpoint_id=folder)
    before = residuals(comm, state)
    with fewer_ranks(comm, folder, "hook") as among:
        if among is None:
            return
        group, part, read = among
        fewer, continued = hooked({"process_group": group}, comm=group)
        continued.load_state_dict(redistribute(read, comm.size, comm.rank, part.size))
        after = residuals(part, continued)
        for name, total in before.items():
            assert np.allclose(after[name], total, rtol=1e-5, atol=1e-7), name
        train(fewer, comm.rank, range(4, 6))
        assert continued.report.step == 5
        assert np.array_equal(flat(fewer), part.bcast(flat(fewer)))
        continued.close()


@pytest.mark.mpi(min_size=2)
def test_on_fewer_ranks_the_replicas_of_a_distributed_checkpoint_are_redistributed(
    comm: MPI.Intracomm, tmp_path: Path
) -> None:
    folder = comm.bcast(tmp_path)
    model = Branches()
    optimizer = Replicas(dist.group.WORLD).wrap(model, every=2)
    train_wrapped(model, optimizer, comm.rank, range(4))
    with optimizer.agreed():
        dcp.save({"model": model.state_dict(), "optimizer": optimizer}, checkpoint_id=folder)
        agreed = flat(model)
    to_come = comm.allreduce(optimizer.reducer.residual) / comm.size
    moments = comm.allgather(optimizer.state[model.first.weight]["exp_avg_sq"])
    with fewer_ranks(comm, folder, "optimizer", ("reducer", "updates")) as among:
        if among is None:
            return
        group, part, read = among
        fewer = Branches()
        continued, ranks = Replicas(group).wrap(fewer, every=2), part.size
        weights = fewer.state_dict()
        dcp.load({"model": weights}, checkpoint_id=folder, process_group=group)
        continued.load_state_dict(redistribute(read, comm.size, comm.rank, ranks, continued.hosts))
        with continued.agreed():
            assert np.array_equal(flat(fewer), agreed)
        assert np.allclose(part.allreduce(continued.reducer.residual) / ranks, to_come, atol=1e-7)
        mean = sum(moments[comm.rank :: ranks]) / len(moments[comm.rank :: ranks])
        assert torch.allclose(continued.state[fewer.first.weight]["exp_avg_sq"], mean)
        train_wrapped(fewer, continued, comm.rank, range(4, 8))  # the references are compared
        continued.close()


def test_a_distributed_checkpoint_has_what_a_wrapped_optimizer_keeps(
    comm: MPI.Intracomm, tmp_path: Path
) -> None:
    def made() -> tuple[nn.Module, DistributedOptimizer]:
        model = Branches()
        optimizer = torch.optim.Adam(model.parameters())
        return model, DistributedOptimizer(optimizer, density=0.05, threshold_interval=3, sends="gradients")

    folder = comm.bcast(tmp_path)
    model, optimizer = made()
    train_wrapped(model, optimizer, comm.rank, range(4))
    own = {"reducer": optimizer.state_dict()["reducer"]}
    whole = get_optimizer_state_dict(model, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": whole, **own}, checkpoint_id=folder)
    train_wrapped(model, optimizer, comm.rank, range(4, 6))
    again, continued = made()
    saved = {"model": again.state_dict(), "optimizer": get_optimizer_state_dict(again, continued)}
    saved |= {"reducer": continued.state_dict()["reducer"]}
    dcp.load(saved, checkpoint_id=folder)
    again.load_state_dict(saved["model"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that residuals start empty
        set_optimizer_state_dict(again, continued, saved["optimizer"])
    continued.load_state_dict(continued.inner.state_dict() | {"reducer": saved["reducer"]})
    train_wrapped(again, continued, comm.rank, range(4, 6))
    assert np.array_equal(flat(again), flat(model))


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "steps", [pytest.param(0, marks=pytest.mark.long("`make test` has a later step")), 3]
)
def test_a_rank_that_leaves_a_bucket_out_is_told_what_to_do(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, steps: int
) -> None:
    monkeypatch.setattr("collectives.limit.ANSWER", 1.5)
    group = dist.new_group()
    ddp, state = hooked({"process_group": group}, comm=group, timeout=2.0)
    train(ddp, comm.rank, range(steps))
    comm.Barrier()
    ddp.zero_grad()
    if comm.rank == 1:  # the last bucket is left out
        monkeypatch.setattr(ddp.module.first, "forward", lambda inputs: torch.ones(len(inputs), 60))
    outputs = loss(ddp, comm.rank, steps)
    if comm.rank == 1:
        outputs.backward()
        # DDP begins with one bucket, of which the hook then does not hear
        for asked in (lambda: state.report, state.state_dict, state.complete) if steps else ():
            with pytest.raises(RuntimeError, match="left the others out, as a parameter was not used"):
                asked()
    else:
        with pytest.raises(
            RuntimeError, match=r"rank\(s\) 1 did not come .* pass find_unused_parameters=True to Distri"
        ):
            outputs.backward()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "names",
    [
        ["close"],
        pytest.param(
            ["OkTopkState.load_state_dict", "gathered_residual", "deepcopy"],
            marks=pytest.mark.long("`make test` has the one that ends at once"),
        ),
    ],
)
def test_a_rank_that_makes_another_call_is_named_with_it(comm: MPI.Intracomm, names: list[str]) -> None:
    calls: dict[str, Callable[[OkTopkState], Any]] = {
        "OkTopkState.load_state_dict": lambda state: state.load_state_dict(state.state_dict()),
        "gathered_residual": lambda state: state.reducer.gathered_residual(),
        "deepcopy": copy.deepcopy,
        "close": OkTopkState.close,
    }
    for name in names:
        call = calls[name]
        group = dist.new_group()
        ddp, state = hooked({"process_group": group}, comm=group, timeout=2.0)
        train(ddp, comm.rank, range(3))
        outputs = loss(ddp, comm.rank, 3)
        comm.Barrier()
        if comm.rank == 1 and name == "close":
            call(state)
        else:
            with pytest.raises(
                RuntimeError, match=rf"step 3: rank\(s\) 1 called {name} instead, and did not"
            ):
                call(state) if comm.rank == 1 else outputs.backward()
        comm.Barrier()


def test_a_hook_that_was_closed_refuses_every_call_and_the_backward_pass(comm: MPI.Intracomm) -> None:
    ddp, state = hooked()
    train(ddp, comm.rank, range(2))
    reducer = state.reducer
    assert reducer is not None
    held = [state, reducer, *reducer.reducers, *reducer.transports]
    state.close()
    for closed in held:
        every_call_refuses(closed)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="this OkTopkState was closed"):
            train(ddp, comm.rank, range(2, 3))


def of_another_method(ddp: DistributedDataParallel, state: OkTopkState, rank: int) -> Callable[[], Any]:
    other, saved = hooked(method="topka")
    train(other, rank, range(2))
    state.load_state_dict(saved.state_dict())
    return lambda: state.load_state_dict(hooked()[1].state_dict())


def of_another_model(ddp: DistributedDataParallel, state: OkTopkState, rank: int) -> Callable[[], Any]:
    """With a parameter that the DDP does not reduce; only the last bucket tells."""
    other, saved = hooked()
    train(other, rank, range(2))
    state.load_state_dict(saved.state_dict())
    return lambda: state.load_state_dict(hooked()[1].state_dict())


def of_a_wrapped_optimizer(ddp: DistributedDataParallel, state: OkTopkState, rank: int) -> Callable[[], Any]:
    return DistributedOptimizer(torch.optim.SGD(ddp.parameters(), lr=0.05)).close


def of_a_second_ddp(ddp: DistributedDataParallel, state: OkTopkState, rank: int) -> Callable[[], Any]:
    others = [DistributedDataParallel(nn.Linear(4, 2))]
    others[0].register_comm_hook(state, ddp_hook)
    return others.clear


@pytest.mark.parametrize(
    ("cause", "sentence"),
    [
        (of_another_method, "state has method 'topka', this reducer 'oktopk'"),
        (of_another_model, r"DDP does not reduce the parameter 'first\.bias' any more"),
        (of_a_wrapped_optimizer, "a DistributedOptimizer reduces gradients of this DistributedDataParallel"),
        (of_a_second_ddp, "2 DistributedDataParallel have one OkTopkState"),
    ],
)
def test_after_an_error_of_the_hook_ddp_can_take_its_next_backward_pass(
    comm: MPI.Intracomm, cause: Callable[..., Callable[[], Any]], sentence: str
) -> None:
    if cause is of_another_model:  # DDP's buckets are without it
        model = Branches()
        model.first.bias.requires_grad_(False)
        ddp, state = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB), OkTopkState(density=0.05)
        ddp.register_comm_hook(state, ddp_hook)
    else:
        ddp, state = hooked()
    remedy, own = cause(ddp, state, comm.rank), Branches()
    loss(own, comm.rank, 0).backward()
    for _ in range(2):
        ddp.zero_grad()
        with pytest.raises(Exception, match=sentence) as raised:
            loss(ddp, comm.rank, 0).backward()
        assert len(set(comm.allgather(str(raised.value).splitlines()[0]))) == 1
        assert state.report is None
        for mine, held in zip(own.parameters(), ddp.module.parameters(), strict=True):
            assert held.grad is None or torch.equal(held.grad, mine.grad), "something was applied"
    remedy()
    train(ddp, comm.rank, range(3))
    assert state.report is not None and state.report.step == 2
    assert np.array_equal(flat(ddp), comm.bcast(flat(ddp)))


def test_an_error_no_bucket_could_tell_is_undone_next_step(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last bucket does not start: those before it are undone when the next backward pass begins."""
    ddp, state = hooked(nonfinite="skip")
    train(ddp, comm.rank, range(3))
    before = residuals(comm, state)
    with monkeypatch.context() as patch:
        patch.setattr(state._engine._agreement, "tell", lambda: 1 / 0)
        with pytest.raises(RuntimeError, match="ZeroDivisionError"):
            loss(ddp, comm.rank, 3).backward()
    assert state.reducer is not None and state.reducer.started == 1
    for look in (lambda: state.report, state.complete, state.state_dict):
        with pytest.raises(RuntimeError, match=r"raised while 1 bucket\(s\) were reduced"):
            look()
    ddp.zero_grad()
    loss(ddp, comm.rank, 3).backward()
    again, twin = hooked(nonfinite="skip")
    train(again, comm.rank, range(3))
    assert all(np.array_equal(each, before[name]) for name, each in residuals(comm, twin).items())
    again.zero_grad()
    loss(again, comm.rank, 3).backward()
    # what both sent and kept: thresholds are exact behind an error, so that other entries may have been selected
    wholes = []
    for model, held in ((ddp, residuals(comm, state)), (again, residuals(comm, twin))):
        named = model.module.named_parameters()
        wholes.append({name: held[name] / comm.size + each.grad.flatten().numpy() for name, each in named})
    assert all(np.allclose(each, wholes[1][name], rtol=1e-4, atol=1e-6) for name, each in wholes[0].items())


def test_an_error_on_one_rank_leaves_residuals_on_all(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To rounding. Found at the second bucket, when the first one is on its way."""
    ddp, state = hooked(nonfinite="skip")
    train(ddp, comm.rank, range(3))
    before, last = residuals(comm, state), comm.size - 1

    def no_memory(given: Any, check: Callable[[Any], None] = state._engine._check_order) -> None:
        if state._engine.reducer.started == 1:
            raise MemoryError("no memory for the order")
        check(given)

    with monkeypatch.context() as patch:
        if comm.rank == last:
            patch.setattr(state._engine, "_check_order", no_memory)
        ddp.zero_grad()
        with pytest.raises(RuntimeError, match="no memory for the order") as raised:
            loss(ddp, comm.rank, 3).backward()
    assert len(set(comm.allgather(str(raised.value).splitlines()[0]))) == 1
    after = residuals(comm, state)
    assert all(np.allclose(after[name], before[name], rtol=0, atol=1e-6) for name in before)
    train(ddp, comm.rank, range(4, 6))
    assert np.array_equal(flat(ddp), comm.bcast(flat(ddp)))


def test_parameters_whose_gradients_a_hook_reduces_are_not_wrapped(comm: MPI.Intracomm) -> None:
    ddp, state = hooked()
    train(ddp, comm.rank, range(3))  # DDP lays its buckets out anew
    inner = torch.optim.SGD(ddp.parameters(), lr=0.05)
    with pytest.raises(ValueError, match="an OkTopkState reduces gradients of these parameters already"):
        DistributedOptimizer(inner)
    state.close()
    DistributedOptimizer(inner).close()


def test_a_hook_that_was_dropped_without_a_close_does_not_hold_its_parameters(
    comm: MPI.Intracomm, left_open: list[Any]
) -> None:
    ddp, state = hooked()
    train(ddp, comm.rank, range(3))
    model, dropped = ddp.module, weakref.ref(state)
    del ddp, state
    left_open.clear()
    latest = time.monotonic() + 10
    while (
        dropped() is not None and time.monotonic() < latest
    ):  # its thread is about to let go of the last call
        time.sleep(0.01)
        gc.collect()
    assert dropped() is None
    DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.05)).close()


@pytest.mark.parametrize("trained", [True, False])
def test_a_state_that_does_not_fit_one_rank_changes_nothing(comm: MPI.Intracomm, trained: bool) -> None:
    """With a reducer, and before there is one."""
    ddp, state = hooked()
    train(ddp, comm.rank, range(2))
    saved, last = of_rank(state.state_dict()), comm.size - 1
    empty: dict[str, Any] = {"buckets": [], "reducer": None, "tables": {}}
    first, *others = saved["buckets"]
    hostile: dict[str, dict[str, Any]] = {
        rf"rank {last}: .*not one of OkTopkState\.state_dict": {"residual": None},
        f"rank {last}: .*the state has a parameter 'another.weight'": saved
        | {"buckets": [["another.weight"], *others]},
        f"rank {last}: .*the state has a parameter 'another'": saved | {"tables": {"another": {}}},
        f"rank {last}: .*the state is damaged: TypeError": saved | {"buckets": 7},
        f"rank {last}: .*the state is damaged: TypeError .int": saved | {"tables": 7},
        f"rank {last}: .*the state is damaged: .*'int' object is not iterable": empty | {"buckets": 7},
    }
    if comm.size > 1:
        hostile |= {
            "ranks disagree on whether a state is empty": empty,
            "ranks disagree on buckets of the state": saved | {"buckets": [first[::-1], *others]},
            "ranks disagree on tables of the state": saved | {"tables": {"first.weight": {}}},
        }
    if trained:  # else it is seen in the backward pass alone
        buckets = saved["reducer"]["buckets"]
        short = buckets | {"0": buckets["0"] | {"residual": torch.ones(3)}}
        wrong = saved | {"reducer": saved["reducer"] | {"buckets": short}}
        hostile[rf"rank {last}: .*residual of the state is float32\[3\]"] = wrong
    _fresh, loaded = (ddp, state) if trained else hooked()
    for sentence, wrong in hostile.items():
        with pytest.raises(ValueError, match=sentence):
            loaded.load_state_dict(wrong if comm.rank == last else saved)
    train(ddp, comm.rank, range(2, 4))  # goes on as if nothing had been loaded
    assert state.report is not None and state.report.step == 3


def test_a_skipped_bucket_leaves_the_others_to_be_applied_once(comm: MPI.Intracomm) -> None:
    ddp, state = hooked(nonfinite="skip")
    train(ddp, comm.rank, range(3))
    before = residuals(comm, state)
    ddp.zero_grad()
    own = Branches()
    own.load_state_dict(ddp.module.state_dict())
    if comm.rank == 0:  # in the last bucket of the backward pass alone
        ddp.module.first.weight.register_hook(lambda gradient: gradient * float("nan"))
    for module in (ddp, own):
        loss(module, comm.rank, 3).backward()
    assert state.report.skipped
    after = residuals(comm, state)
    applied = ddp.module.last.weight.grad.double().reshape(-1).numpy() * comm.size
    gradient = comm.allreduce(own.last.weight.grad.double().reshape(-1).numpy())
    name = "last.weight"
    assert applied.any()
    assert np.allclose(applied + after[name], before[name] + gradient, rtol=1e-5, atol=1e-6)
    assert not ddp.module.first.weight.grad.any()


def test_a_state_is_what_was_loaded_until_the_next_step(comm: MPI.Intracomm) -> None:
    ddp, state = hooked()
    unused = state.state_dict()
    train(ddp, comm.rank, range(2))
    saved = state.state_dict()
    train(ddp, comm.rank, range(2, 4))
    state.load_state_dict(saved)
    assert of_rank(state.state_dict())["reducer"]["buckets"]["0"]["steps"] == 2
    state.load_state_dict(unused)
    train(ddp, comm.rank, range(1))
    assert state.report.step == 0


def test_a_state_loaded_early_leaves_the_group_to_ddp(comm: MPI.Intracomm) -> None:
    alone = [dist.new_group([rank]) for rank in range(comm.size)][comm.rank]
    model = nn.Linear(4, 2)
    state = OkTopkState(density=0.5, module=model, sends="gradients")
    state.load_state_dict(OkTopkState(density=0.5, module=model).state_dict())
    ddp = DistributedDataParallel(model, process_group=alone)
    ddp.register_comm_hook(state, ddp_hook)
    ddp(torch.full((1, 4), 1.0 + comm.rank)).sum().backward()
    assert torch.equal(model.weight.grad, torch.full((2, 4), 1.0 + comm.rank))


def test_a_state_of_other_sizes_is_refused_before_the_first_step(comm: MPI.Intracomm) -> None:
    def wide(width: int) -> tuple[DistributedDataParallel, OkTopkState]:
        ddp, state = DistributedDataParallel(nn.Linear(9, width)), OkTopkState(density=0.2)
        ddp.register_comm_hook(state, ddp_hook)
        return ddp, state

    def train_on(ddp: DistributedDataParallel) -> None:
        for step in range(3):
            ddp(torch.full((2, 9), 1.0 + comm.rank + step)).square().mean().backward()

    other, saved = wide(5)
    train_on(other)
    ddp, state = wide(6)
    with pytest.raises(ValueError, match=r"the state has buckets of \[50\] elements, .* have \[60\]"):
        state.load_state_dict(saved.state_dict())
    assert state.reducer is None
    train_on(ddp)
    assert state.report.step == 2
