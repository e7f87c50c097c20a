"""Buckets that are reduced behind the backward pass: the bits of the same buckets without it, whatever the loop does."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer
from oktopk.buckets import BucketedAllreduce
from oktopk.elastic import of_rank, redistribute
from oktopk.torch.interop import TensorMemory
from oktopk.torch.overlap import BucketLayout, in_models_order
from tests.devices import hold_up, need_gpus, on_torchs_gpu, torch_device
from tests.training import flat, loss, train, wrapped

pytestmark = pytest.mark.mpi

BUCKET_MB = 0.001  # 250 elements: a bucket for each of the three layers


def network(place: torch.device | str = "cpu") -> nn.Module:
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 40), nn.ReLU(), nn.Linear(40, 7))
    return layers.to(place)


def wrap(model: nn.Module, comm: MPI.Intracomm, **settings: Any) -> DistributedOptimizer:
    return wrapped(model, comm, **{"overlap": True, "bucket_mb": BUCKET_MB} | settings)


@pytest.mark.parametrize(
    ("device", "settings"),
    [
        pytest.param("cpu", {}, id="cpu"),
        pytest.param("cpu", {"method": "dense"}, id="cpu, dense"),
        pytest.param("cpu", {"clip_norm": 0.5, "wire": "int8"}, id="cpu, clipped and rounded"),
        on_torchs_gpu("cuda", {"peer_memory": False}, id="cuda, several at once"),
        on_torchs_gpu("cuda", {"peer_memory": True}, id="cuda, peer memory"),
        on_torchs_gpu("cuda", {"gradient_type": "bfloat16"}, id="cuda, bfloat16"),
    ],
)
def test_overlap_changes_no_bit(comm: MPI.Intracomm, device: str, settings: dict[str, object]) -> None:
    place = torch_device(device, comm)
    results = []
    for overlap in (False, True):
        model = network(place)
        optimizer = wrap(model, comm, overlap=overlap, **settings)
        for step in range(5):
            optimizer.zero_grad()
            with optimizer.no_sync():
                loss(model, comm.rank, 2 * step).backward()
            assert optimizer.reducer.started == 0
            total = loss(model, comm.rank, 2 * step + 1)
            hold_up()  # a bucket that waits for nothing reads what is not there yet
            total.backward()
            assert optimizer.reducer.started == (2 if overlap else 0)
            optimizer.step()
            assert len(optimizer.report.buckets) == 3
        results.append(flat(model))
    assert np.array_equal(*results)
    assert np.array_equal(results[0], comm.bcast(results[0])), "ranks have other parameters"


def test_a_recorded_backward_pass_starts_its_buckets_once_it_is_replayed(comm: MPI.Intracomm) -> None:
    expected, model = network(), network()
    train(expected, wrap(expected, comm), comm.rank, range(4))
    optimizer = wrap(model, comm)
    buckets = optimizer.overlapped
    assert buckets is not None
    assert wrap(network(), comm, overlap=False).overlapped is None
    for step in range(4):
        for replay in (False, True):  # a pass before the capture leaves nothing
            optimizer.zero_grad()
            with buckets.recording() as recorded:
                loss(model, comm.rank, step).backward()
            assert (buckets.started, len(recorded.marks)) == (0, 2)
            if replay:
                buckets.replayed(recorded)
        assert buckets.started == 2
        optimizer.step()
    assert np.array_equal(flat(model), flat(expected))
    buckets.replayed(recorded)
    with pytest.raises(RuntimeError, match="a second backward pass before step"):
        loss(model, comm.rank, 4).backward()
    with pytest.raises(RuntimeError, match="a replay while the gradients"):
        buckets.replayed(recorded)
    optimizer.abandon()


class Marked(TensorMemory):
    """Memory whose marks are numbers, and which notes what the reducer waits for: marks, and all that torch has to do.

    Attributes:
        waits: what it waited for.
        ends: how often torch was told to wait for the reducer.
    """

    def __init__(self) -> None:
        self._next = count()
        self.waits: list[int | str] = []
        self.ends = 0

    def stream_scope(self) -> AbstractContextManager[None]:
        self.waits.append("all")
        return self.before_torch()

    @contextmanager
    def before_torch(self) -> Iterator[None]:
        yield
        self.ends += 1

    def mark(self) -> int:
        return next(self._next)

    def after(self, mark: int) -> Any:
        return lambda stream: self.waits.append(mark)


@pytest.mark.parametrize("replay", [False, True])
def test_a_bucket_waits_for_its_part_of_the_backward_pass_alone(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, replay: bool
) -> None:
    memory = Marked()
    monkeypatch.setattr("oktopk.torch.optimizer.memory_of", lambda place, beside: memory)
    model = network()
    optimizer = wrap(model, comm)
    buckets = optimizer.overlapped
    assert buckets is not None
    for step in range(3):
        with buckets.recording() if replay else nullcontext() as recorded:
            loss(model, comm.rank, step).backward()
        if replay:
            buckets.replayed(recorded)
        optimizer.step()
    assert (memory.waits, memory.ends) == (list(range(9)), 3)
    loss(model, comm.rank, 3).backward()
    optimizer.abandon()
    assert memory.ends == 4


def test_a_table_waits_for_the_backward_pass_behind_the_buckets(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = Marked()
    monkeypatch.setattr("oktopk.torch.optimizer.memory_of", lambda place, beside: memory)
    model = nn.Sequential(nn.Embedding(30, 20, sparse=True), network())
    optimizer = wrap(model, comm)
    calls: list[str] = []
    tables, reducer = optimizer._tables, optimizer.reducer
    assert tables is not None and isinstance(reducer, BucketedAllreduce)

    def note(name: str, each: Any) -> None:
        step = each.step

        def noted(*given: Any, **more: Any) -> Any:
            calls.append(name)
            return step(*given, **more)

        monkeypatch.setattr(each, "step", noted)

    note("table", tables.reducers[0])
    for number, bucket in enumerate(reducer.reducers):
        note(str(number), bucket)
    for _ in range(3):
        model(torch.arange(4) + comm.rank).square().mean().backward()
        optimizer.step()
    assert memory.waits == list(range(12))
    assert calls == 3 * ["0", "1", "2", "table"]


@pytest.mark.parametrize("device", [on_torchs_gpu("cuda", id="cuda")])
def test_a_bucket_is_reduced_over_messages_while_the_backward_pass_goes_on(
    comm: MPI.Intracomm, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    need_gpus(comm.size)
    model = network(torch_device(device, comm))
    optimizer = wrap(model, comm, peer_memory=False)
    train(model, optimizer, comm.rank, range(8))  # what is allocated later would wait for the GPU
    reducer = optimizer.reducer
    early: list[bool] = []
    assert isinstance(reducer, BucketedAllreduce)
    finish = reducer.finish

    def finish_after_a_look(*arguments: Any) -> Any:
        while goes_on() and not early:
            early.extend([True] if reducer._started[1].done() else [])
            time.sleep(0.001)
        return finish(*arguments)

    monkeypatch.setattr(reducer, "finish", finish_after_a_look)
    optimizer.zero_grad()
    total = loss(model, comm.rank, 8)  # which copies to the GPU, and waits for it
    hold_up(200_000_000)  # the host is far ahead, as with a pass that is replayed
    total.backward()
    goes_on = hold_up(4_000_000_000)
    optimizer.step()
    assert early == [True]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("device", [on_torchs_gpu("cuda", id="cuda")])
def test_updates_that_are_written_late_are_waited_for(
    comm: MPI.Intracomm, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = torch_device(device, comm)
    expected, model = network(place), network(place)
    train(expected, wrap(expected, comm, peer_memory=False), comm.rank, range(6))
    optimizer = wrap(model, comm, peer_memory=False)
    assert isinstance(optimizer.reducer, BucketedAllreduce)
    for bucket in optimizer.reducer.reducers:
        stream = torch.cuda.ExternalStream(bucket.backend.stream.ptr)

        def late(*given: Any, own: Any = bucket._vectors.apply, stream: Any = stream) -> None:
            with torch.cuda.stream(stream):
                hold_up()
            own(*given)

        monkeypatch.setattr(bucket._vectors, "apply", late)
    train(model, optimizer, comm.rank, range(6))
    assert np.array_equal(flat(model), flat(expected))


@pytest.mark.filterwarnings("ignore:GradScaler is going to stop")
def test_what_would_change_gradients_that_are_being_reduced_raises(comm: MPI.Intracomm) -> None:
    model = network()
    optimizer = wrap(model, comm)
    optimizer.zero_grad()
    loss(model, comm.rank, 0).backward()
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.zeros(()))
    with pytest.raises(RuntimeError, match="GradScaler with overlap=True"):
        scaler.step(optimizer)
    with pytest.raises(RuntimeError, match="put all but the last into"):
        loss(model, comm.rank, 1).backward()
    optimizer.abandon()


def test_gradients_that_were_changed_while_they_are_reduced_are_refused(comm: MPI.Intracomm) -> None:
    model = network()
    optimizer = wrap(model, comm)
    before = optimizer.reducer.gathered_residual()
    optimizer.zero_grad()
    loss(model, comm.rank, 0).backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
    with pytest.raises(RuntimeError, match=r"changed between the backward pass and step\(\).*pass clip_norm"):
        optimizer.step()
    optimizer.abandon()
    after = comm.allreduce(optimizer.reducer.gathered_residual().astype(np.float64))
    assert not before.any() and np.isfinite(after).all()
    train(model, optimizer, comm.rank, range(1, 3))
    assert optimizer.report.step == 2


def test_a_parameter_that_was_frozen_at_wrapping_undoes_what_was_reduced(comm: MPI.Intracomm) -> None:
    model = network()
    model[0].bias.requires_grad_(False)
    optimizer = wrap(model, comm)
    model[0].bias.requires_grad_(True)
    optimizer.zero_grad()
    loss(model, comm.rank, 0).backward()
    assert optimizer.reducer.started == 2
    gradient = np.concatenate([p.grad.reshape(-1) for p in optimizer._parameters])
    mass = comm.allreduce(gradient.astype(np.float64))[-2727:]
    with pytest.raises(ValueError, match="need a gradient that is not reduced"):
        optimizer.step()
    left = comm.allreduce(optimizer.reducer.gathered_residual().astype(np.float64))[-2727:]
    assert np.allclose(left, mass, atol=1e-6)


@pytest.mark.parametrize("last", [False, True], ids=["in the backward pass", "in the step"])
def test_a_sparse_gradient_of_one_rank_is_a_sentence_on_all(comm: MPI.Intracomm, last: bool) -> None:
    first, second = torch.nn.Parameter(torch.ones(60, 10)), torch.nn.Parameter(torch.ones(60, 10))
    optimizer = wrap(torch.nn.ParameterList([first, second]), comm)
    drawn = torch.Generator().manual_seed(comm.rank)
    for sparse in (False, True, False):
        numbers = torch.randint(60, (4,), generator=drawn)
        optimizer.zero_grad()
        here = sparse and comm.rank == comm.size - 1
        rows = [
            torch.nn.functional.embedding(numbers, table, sparse=here and (table is first) == last)
            for table in (first, second)
        ]
        (rows[0] * rows[1]).sum().backward()
        assert optimizer.reducer.started == 1
        if sparse:
            with pytest.raises(ValueError, match=rf"rank {comm.size - 1}: a gradient is sparse: name its"):
                optimizer.step()
        else:
            optimizer.step()
    for parameter in (first, second):
        assert np.array_equal(parameter.detach(), comm.bcast(parameter.detach().numpy()))


def test_an_optimizer_that_was_wrapped_anew_takes_over(comm: MPI.Intracomm) -> None:
    model = network()
    wrap(model, comm).close()
    train(model, wrap(model, comm), comm.rank, range(3))
    assert np.array_equal(flat(model), comm.bcast(flat(model)))


def test_buckets_begin_where_kernels_may_read_several_elements_at_once() -> None:
    parameters = [torch.zeros(n) for n in (1201, 2400, 60, 287)]
    layout = BucketLayout(parameters, 0.004)
    assert layout.lengths == [2747, 1201]
    assert [each.start % 64 for each in layout.slices] == [0, 0]
    assert layout.starts == [0, 1216, 3616, 3676]


def test_buckets_on_gpus_have_240_mb_at_least() -> None:
    def lengths(millions: list[int], bucket_mb: float = 0.0) -> list[float]:
        tensors: Any = [SimpleNamespace(numel=lambda n=n: n * 1_000_000, is_cuda=True) for n in millions]
        return [length / 1e6 for length in BucketLayout(tensors, bucket_mb).lengths]

    assert lengths([59]) == [59]
    assert lengths([20, 30, 31]) == [61, 20]
    assert lengths([40] * 7) == [80, 80, 80, 40]
    assert lengths([20, 30, 31], 100.0) == [31, 30, 20]


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("method", "first"),
    [("oktopk", "a learning rate of 0"), ("oktopk", "a table"), ("dense", "a table that is skipped")],
)
def test_ranks_that_started_unlike_buckets_meet_in_the_step(
    method: str, first: str, comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the start of a bucket waits for the other ranks, as it does on GPUs that compute exact thresholds."""
    start = BucketedAllreduce.start

    def waiting(*arguments: Any, **named: Any) -> Any:
        begun = start(*arguments, **named)
        begun.exception()
        return begun

    monkeypatch.setattr(BucketedAllreduce, "start", waiting)
    torch.manual_seed(0)
    words = nn.Embedding(10, 4, sparse="table" in first)
    layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
    inner = torch.optim.SGD([*words.parameters(), *layers.parameters()], lr=0.1 if words.sparse else 0.0)
    settings: dict[str, Any] = {"overlap": True, "bucket_mb": 1e-5, "nonfinite": "skip", "timeout": 20.0}
    optimizer = DistributedOptimizer(inner, comm, method, **settings)
    for step in range(3):
        optimizer.zero_grad()
        hidden = layers[1](layers[0](words(torch.tensor([1, 2]))))
        (layers[2](hidden) if comm.rank == 0 else hidden).sum().backward()
        skipped = "skipped" in first and step == 1
        if skipped and comm.rank == 0:
            words.weight.grad._values()[0, 0] = float("nan")  # type: ignore[union-attr, operator]
        optimizer.step()
        assert optimizer.report is not None
        assert (optimizer.report.step, optimizer.report.skipped) == (step, skipped)
    assert np.array_equal(flat(layers), comm.bcast(flat(layers)))


def test_a_learning_rate_of_zero_leaves_no_pass_behind(
    comm: MPI.Intracomm,
) -> None:
    model = network()
    inner = torch.optim.SGD(model.parameters(), lr=0.0)
    optimizer = DistributedOptimizer(inner, comm, overlap=True, bucket_mb=BUCKET_MB, density=0.05)
    for _ in range(2):  # a second pass would be refused
        optimizer.zero_grad()
        (0 * loss(model, comm.rank, 0)).backward()
        optimizer.step()
    assert optimizer.reducer.steps == 0
    inner.param_groups[0]["lr"] = 0.1
    train(model, optimizer, comm.rank, range(2))
    assert optimizer.reducer.steps == 2


def test_deferred_buckets_are_completed_when_they_are_asked_for(comm: MPI.Intracomm) -> None:
    expected, model = network(), network()
    train(expected, wrap(expected, comm), comm.rank, range(12))
    optimizer = wrap(model, comm, deferred=True)
    train(model, optimizer, comm.rank, range(12))
    optimizer.complete()
    assert optimizer.report is not None and optimizer.report.complete
    assert all(bucket.complete for bucket in optimizer.report.buckets)
    assert np.array_equal(flat(model), flat(expected))  # over messages no step is deferred


def parted(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of many a script: weights decay, biases do not."""
    every = list(model.parameters())
    weights, biases = ([p for p in every if (p.dim() > 1) is decays] for decays in (True, False))
    groups = [{"params": weights, "weight_decay": 0.01}, {"params": biases}]
    return torch.optim.SGD(groups, lr=0.05, momentum=0.9, weight_decay=0.0)


def lengths_of(optimizer: DistributedOptimizer) -> list[int]:
    assert isinstance(optimizer.reducer, BucketedAllreduce)
    return optimizer.reducer.lengths


def sizes(*modules: nn.Module) -> list[int]:
    return [sum(p.numel() for p in module.parameters()) for module in modules]


ORDERED: dict[str, Any] = {"overlap": True, "bucket_mb": BUCKET_MB, "density": 0.05}


def test_buckets_follow_the_model_where_groups_part_weights_from_biases(comm: MPI.Intracomm) -> None:
    model = network()
    optimizer = DistributedOptimizer(parted(model), comm, **ORDERED)
    assert lengths_of(optimizer) == sizes(model[4], model[2], model[0])
    loss(model, comm.rank, 0).backward()
    assert optimizer.reducer.started == 2  # type: ignore[union-attr]
    optimizer.step()
    train(model, optimizer, comm.rank, range(1, 4))
    state = copy.deepcopy(optimizer.state_dict())
    resumed = network()
    again = DistributedOptimizer(parted(resumed), comm, **ORDERED, order=resumed.parameters())
    resumed.load_state_dict(model.state_dict())
    again.load_state_dict(state)
    for each, own in ((model, optimizer), (resumed, again)):
        train(each, own, comm.rank, range(4, 8))
    assert np.array_equal(flat(model), flat(resumed))


def test_buckets_have_the_order_that_is_given(comm: MPI.Intracomm) -> None:
    model, foreign = network(), nn.Linear(2, 2)
    turned = [model[2], foreign, model[0], model[4]]
    order = (p for module in turned for p in [*module.parameters(), *module.parameters()])
    optimizer = DistributedOptimizer(parted(model), comm, **ORDERED, order=order)
    assert lengths_of(optimizer) == sizes(model[4], model[0], model[2])
    train(model, optimizer, comm.rank, range(3))
    assert np.array_equal(flat(model), comm.bcast(flat(model)))


def test_a_state_of_buckets_in_another_order_is_refused_on_every_rank(comm: MPI.Intracomm) -> None:
    torch.manual_seed(3)
    model = nn.Sequential(*(nn.Linear(16, 16) for _ in range(4)))  # buckets of equal lengths in either order
    every = list(model.parameters())
    inner = torch.optim.SGD(every, lr=0.05)
    optimizer = DistributedOptimizer(inner, comm, **ORDERED, order=every)
    states = comm.allgather(optimizer.state_dict())
    state, reducer = states[comm.rank], of_rank(states[comm.rank]["reducer"])
    assert redistribute(lambda rank: states[rank], comm.size, 0, comm.size + 1)["reducer"]["order"] == [
        *range(8)
    ]
    damaged = reducer | {"order": None if comm.rank == comm.size - 1 else reducer["order"]}
    with pytest.raises(ValueError, match="the state is damaged: TypeError 'NoneType'"):
        optimizer.load_state_dict(state | {"reducer": damaged})
    lacking = {name: held for name, held in reducer.items() if name != "order"}
    with pytest.raises(ValueError, match="the state is damaged: KeyError 'order'"):
        optimizer.load_state_dict(state | {"reducer": lacking})
    optimizer.close()
    other = DistributedOptimizer(inner, comm, **ORDERED, order=[*every[2:], *every[:2]])
    with pytest.raises(ValueError, match="buckets of parameters in another order"):
        other.load_state_dict(state | {"reducer": reducer})
    whole = {name: held for name, held in reducer.items() if name != "buckets"}
    with pytest.raises(ValueError, match="the state is not one of buckets"):
        other.load_state_dict(state | {"reducer": whole})
    other.close()


@pytest.mark.parametrize(
    ("overlap", "places", "message"),
    [
        (True, [0, 0, 1, 2], "order lacks 3 of the parameters that need a gradient"),
        (True, [], "order lacks 6 of the"),
        (False, range(6), "order is for buckets: pass overlap=True"),
    ],
)
def test_an_order_that_cannot_be_taken_raises_on_every_rank(
    comm: MPI.Intracomm, overlap: bool, places: Sequence[int], message: str
) -> None:
    model = network()
    every = list(model.parameters())
    order = every if overlap and comm.rank < comm.size - 1 else [every[place] for place in places]
    with pytest.raises(ValueError, match=message):
        DistributedOptimizer(torch.optim.SGD(every, lr=0.1), comm, overlap=overlap, order=order)


@pytest.mark.mpi(min_size=2)
def test_ranks_of_other_orders_all_raise(comm: MPI.Intracomm) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    order = list(model.parameters())
    order = [*order[2:], *order[:2]] if comm.rank else order
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ValueError, match="shapes, order or memory layouts differ between ranks"):
        DistributedOptimizer(inner, comm, overlap=True, order=order)


class Uninitialized(nn.Module):
    """Whose parameters cannot be asked for."""

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        raise RuntimeError("not yet")


def test_the_order_is_that_of_the_smallest_module_whatever_else_there_is() -> None:
    first, second, third = nn.Linear(3, 4), nn.Linear(4, 5), nn.Linear(1, 1)
    mixed = [*second.parameters(), *first.parameters()]

    def order() -> list[int]:
        return [id(p) for p in in_models_order(mixed)]

    def of(*modules: nn.Module) -> list[int]:
        return [id(p) for module in modules for p in module.parameters()]

    broken = Uninitialized()
    assert order() == of(second, first)
    larger = nn.ModuleList([third, nn.Sequential(second, first), third])
    assert order() == of(second, first)
    both = nn.Sequential(first, second)
    larger.append(both)
    assert order() == of(second, first)  # of two of one size the one that is most like the groups
    larger[1] = third
    gc.collect()
    assert order() == of(first, second)
    tied = nn.Linear(5, 4)
    tied.weight = first.weight  # used twice, and listed once
    both.append(tied)
    assert order() == of(first, second)
    del broken
