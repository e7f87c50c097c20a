"""Models with sparse embedding gradients train through DistributedOptimizer as they are."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from oktopk import DistributedOptimizer, NonFiniteGradientError
from oktopk.elastic import of_rank, redistribute
from oktopk.torch import OkTopkState, ddp_hook
from tests.devices import on_torchs_gpu, torch_device

pytestmark = pytest.mark.mpi

WORDS, WIDTH = 40, 6


class TwoTables(nn.Module):
    """Two tables, one of them used twice, and a dense layer."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.words = nn.Embedding(WORDS, WIDTH, sparse=sparse, padding_idx=0)
        self.again = nn.Embedding(WORDS, WIDTH, sparse=sparse)
        self.again.weight = self.words.weight
        self.bags = nn.EmbeddingBag(WORDS // 2, WIDTH, mode="sum", sparse=sparse)
        self.out = nn.Linear(WIDTH, 1)

    def forward(self, batch: Tensor, bags: bool) -> Tensor:
        hidden = self.words(batch).sum(1) + self.again(batch.flip(0)).sum(1)
        if bags:
            hidden = hidden + self.bags(batch // 2)
        loss: Tensor = self.out(hidden).square().mean()
        return loss


class OneTable(nn.Embedding):
    """A table alone."""

    def __init__(self, sparse: bool) -> None:
        torch.manual_seed(4)
        super().__init__(WORDS, WIDTH, sparse=sparse)

    def forward(self, batch: Tensor, bags: bool) -> Tensor:  # type: ignore[override]
        return super().forward(batch).square().sum()


def hooked(model: nn.Module | None = None, **settings: Any) -> tuple[DistributedDataParallel, OkTopkState]:
    ddp = DistributedDataParallel(TwoTables(sparse=True) if model is None else model)
    state = OkTopkState(**{"density": 0.2} | settings)
    ddp.register_comm_hook(state, ddp_hook)
    return ddp, state


def batch_of(rank: int, step: int) -> Tensor:
    drawn = torch.Generator().manual_seed(100 * step + rank)
    return torch.randint(0, WORDS, (3, 4), generator=drawn)


def inner(kind: str, model: nn.Module) -> torch.optim.Optimizer:
    if kind == "adagrad":
        return torch.optim.Adagrad(model.parameters(), lr=0.1)
    return torch.optim.SGD(model.parameters(), lr=0.005)


@pytest.mark.parametrize("device", ["cpu", on_torchs_gpu("cuda", id="cuda")])
@pytest.mark.parametrize(
    ("kind", "overlap", "clip_norm"),
    [("sgd", False, 0.0), ("sgd", True, 0.05), ("adagrad", True, 0.0), ("adagrad", False, 0.05)],
)
def test_training_is_that_of_one_process_on_the_mean_gradient(
    kind: str, overlap: bool, clip_norm: float, device: str, comm: MPI.Intracomm
) -> None:
    place = torch_device(device, comm)
    model, alone = TwoTables(sparse=True).to(place), TwoTables(sparse=False).to(place)
    optimizer = DistributedOptimizer(inner(kind, model), comm, "dense", overlap=overlap, clip_norm=clip_norm)
    other = inner(kind, alone)
    for step in range(4):
        optimizer.zero_grad()
        mine = batch_of(comm.rank, step).to(place)
        model(mine, bags=comm.rank != comm.size - 1).backward()  # one rank leaves it untouched
        optimizer.step()
        other.zero_grad()
        for rank in range(comm.size):
            (alone(batch_of(rank, step).to(place), bags=rank != comm.size - 1) / comm.size).backward()
        if clip_norm:
            nn.utils.clip_grad_norm_(alone.parameters(), clip_norm)
        for parameter in alone.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        other.step()
        assert [report.step for report in optimizer.table_reports] == [step, step]
    for one, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(one, theirs, atol=2e-6), (one - theirs).abs().max()
    values = comm.allgather([p.detach().cpu().numpy().tobytes() for p in model.parameters()])
    assert all(each == values[0] for each in values)


def test_sparse_adam_sees_a_coalesced_gradient_and_needs_no_dense_parameter(comm: MPI.Intracomm) -> None:
    torch.manual_seed(1)
    words = nn.Embedding(WORDS, WIDTH, sparse=True)
    sparse_adam = torch.optim.SparseAdam(words.parameters(), lr=0.1)
    seen: list[Any] = []
    sparse_adam.register_step_pre_hook(lambda *_: seen.append(words.weight.grad))
    optimizer = DistributedOptimizer(sparse_adam, comm, density=0.1)
    before = words.weight.detach().clone()
    for step in range(3):
        optimizer.zero_grad()
        words(batch_of(comm.rank, step)).square().sum().backward()
        optimizer.step()
        assert seen[-1].is_coalesced() and seen[-1].layout == torch.sparse_coo
    touched = torch.cat([batch_of(rank, step).flatten() for rank in range(comm.size) for step in range(3)])
    moved = (words.weight != before).any(dim=1)
    assert moved.nonzero().flatten().tolist() == touched.unique().tolist()


def test_a_weight_that_a_dense_layer_shares_is_reduced_by_its_rows(comm: MPI.Intracomm) -> None:
    torch.manual_seed(2)
    words, out = nn.Embedding(WORDS, WIDTH, sparse=True), nn.Linear(WIDTH, WORDS, bias=False)
    out.weight = words.weight
    optimizer = DistributedOptimizer(torch.optim.SGD(words.parameters(), lr=1.0), comm)
    before = words.weight.detach().clone()
    losses = [out(words(batch_of(rank, 0)))[..., :5].square().mean() for rank in range(comm.size)]
    mean = torch.autograd.grad(sum(losses[1:], losses[0]) / comm.size, words.weight, retain_graph=True)[0]
    optimizer.zero_grad()
    losses[comm.rank].backward()
    optimizer.step()
    assert torch.allclose(before - words.weight, mean.to_dense(), atol=1e-6)


@pytest.mark.parametrize(
    ("where", "overlap", "nonfinite"),
    [
        *(("words", False, "skip"), ("bags", True, "raise"), ("out", False, "raise")),
        *(("loss", True, "skip"), ("no table", False, "raise")),
    ],
)
def test_a_nan_in_a_table_or_beside_it_changes_neither(
    nonfinite: str, where: str, overlap: bool, comm: MPI.Intracomm
) -> None:
    """Nor the parameters, nor what the wrapped optimizer keeps; a model without tables is like one with them."""
    model = TwoTables(sparse=where != "no table")
    buckets = {"overlap": True, "bucket_mb": 1e-5} if overlap else {}
    optimizer = DistributedOptimizer(
        inner("adagrad", model), comm, density=0.2, nonfinite=nonfinite, **buckets
    )

    def train(step: int, poison: bool = False) -> None:
        optimizer.zero_grad()
        poisoned = poison and comm.rank == 0
        nan = poisoned and where == "out"  # in the gradient of this layer alone
        handle = model.out.weight.register_hook(lambda gradient: gradient * float("nan") if nan else gradient)
        scale = float("nan") if poisoned and where in ("loss", "no table") else 1.0
        (scale * model(batch_of(comm.rank, step), bags=True)).backward()
        handle.remove()
        if poisoned and where in ("words", "bags"):
            gradient = getattr(model, where).weight.grad
            gradient._values()[0, 1] = float("nan")
        optimizer.step()

    train(0)
    values = [p.detach().clone() for p in model.parameters()]
    state = copy.deepcopy(optimizer.state_dict())
    kept = str(optimizer.inner.state_dict())
    if nonfinite == "raise":
        with pytest.raises(NonFiniteGradientError, match=r"NaN or Inf on rank\(s\) 0\b"):
            train(1, poison=True)
    else:
        train(1, poison=True)
        assert optimizer.report is not None and optimizer.report.skipped
    assert all(torch.equal(p, value) for p, value in zip(model.parameters(), values, strict=True))
    assert str(optimizer.inner.state_dict()) == kept
    if where != "no table":
        assert of_rank(optimizer.state_dict()["tables"]) == of_rank(state["tables"])
    train(2)
    assert optimizer.report is not None and not optimizer.report.skipped
    assert [report.skipped for report in optimizer.table_reports] == 2 * [False] * (where != "no table")


def test_tables_that_are_named_in_another_order_or_twice_are_the_same(comm: MPI.Intracomm) -> None:
    torch.manual_seed(0)
    first, second = nn.Embedding(10, 2, sparse=True), nn.Embedding(10, 2, sparse=True)
    tables = [first.weight, second.weight]
    inside = torch.optim.SGD(tables, lr=1.0)
    optimizer = DistributedOptimizer(
        inside, comm, sparse=[*(tables if comm.rank else tables[::-1]), first.weight]
    )
    inside.param_groups.append({**inside.param_groups[0], "params": [nn.Parameter(torch.ones(1), False)]})
    before = second.weight.detach().clone()
    first(torch.tensor([1])).sum().backward()
    optimizer.step()
    assert torch.equal(second.weight, before) and len(optimizer.table_reports) == 2


def test_what_cannot_be_is_a_sentence_on_every_rank(comm: MPI.Intracomm) -> None:
    model = TwoTables(sparse=True)
    for settings, text in (
        ({"deferred": True}, "deferred steps are not for tables"),
        ({"sparse": [torch.zeros(2, 2)]}, "no parameter of the optimizer"),
    ):
        with pytest.raises(ValueError, match=text):
            DistributedOptimizer(inner("sgd", model), comm, **settings)  # type: ignore[arg-type]
    optimizer = DistributedOptimizer(inner("sgd", model), comm, sparse=[])
    model(batch_of(comm.rank, 0), bags=True).backward()
    with pytest.raises(ValueError, match="name its parameter in sparse"):
        optimizer.step()


@pytest.mark.parametrize(
    ("tables", "device", "peer_memory"),
    [
        pytest.param(TwoTables, "cpu", None, id="cpu"),
        pytest.param(OneTable, "cpu", None, id="cpu, a table alone"),
        on_torchs_gpu(TwoTables, "cuda", True, id="cuda, peer memory"),
        on_torchs_gpu(TwoTables, "cuda", False, id="cuda, messages"),
    ],
)
def test_ddps_hook_reduces_rows_and_continues_bit_for_bit(
    tables: Callable[..., nn.Module],
    device: str,
    peer_memory: bool | None,
    comm: MPI.Intracomm,
    group: Any,
) -> None:
    place = torch_device(device, comm)

    def train(ddp: Any, state: OkTopkState, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            ddp(batch_of(comm.rank, step).to(place), bags=True).backward()
            optimizer.step()
            assert state.report is not None and state.report.step == step
            assert {report.step for report in state.table_reports.values()} == {step}

    (ddp, state), (later, continued) = (
        hooked(tables(sparse=True).to(place), density=1.0, peer_memory=peer_memory) for _ in range(2)
    )
    optimizer = inner("sgd", ddp)
    train(ddp, state, optimizer, range(3))
    later.load_state_dict(ddp.state_dict())
    continued.load_state_dict(copy.deepcopy(state.state_dict()))
    train(ddp, state, optimizer, range(3, 6))
    train(later, continued, inner("sgd", later), range(3, 6))
    named = {name for name, _ in ddp.module.named_parameters()}
    assert set(state.table_reports) == named - {"out.weight", "out.bias"}
    if peer_memory is not None:
        for table in state._engine.tables.reducers:
            assert (table.p2p_unavailable_reason == "") == peer_memory
    for mine, theirs in zip(ddp.parameters(), later.parameters(), strict=True):
        assert torch.equal(mine, theirs)
    alone = tables(sparse=False).to(place)
    other = inner("sgd", alone)
    for step in range(6):
        other.zero_grad()
        for rank in range(comm.size):
            (alone(batch_of(rank, step).to(place), bags=True) / comm.size).backward()
        other.step()
    for mine, theirs in zip(ddp.parameters(), alone.parameters(), strict=True):
        assert torch.allclose(mine, theirs, atol=2e-6)


def test_over_messages_ddps_tables_are_reduced_in_the_thread_of_the_buckets(
    comm: MPI.Intracomm, group: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads would put what they send over NCCL on the GPU in an order of each rank's own."""
    ddp, state = hooked(density=1.0)
    threads: set[int] = set()

    def step() -> None:
        ddp(batch_of(comm.rank, 0), bags=True).backward()

    def note(reducer: Any) -> None:
        real = reducer.step

        def noted(*given: Any, **more: Any) -> Any:
            threads.add(threading.get_ident())
            return real(*given, **more)

        monkeypatch.setattr(reducer, "step", noted)

    for _ in range(3):
        step()
    assert state.reducer is not None
    for reducer in [*state.reducer.reducers, *state._engine.tables.reducers]:
        note(reducer)
    step()
    assert state.report is not None and len(state.table_reports) == 2
    assert len(threads) == 1 and threading.get_ident() not in threads


def test_deferred_steps_of_ddps_hook_are_not_for_tables(comm: MPI.Intracomm, group: Any) -> None:
    ddp, _ = hooked(deferred=True)
    for step in range(2):
        with pytest.raises(RuntimeError, match="deferred steps are not for tables with sparse gradients: pa"):
            ddp(batch_of(comm.rank, step), bags=True).backward()


@pytest.mark.parametrize(
    ("where", "nonfinite"),
    [
        *(("bags", how) for how in ("raise", "skip")),
        *(("out", "raise"), ("no table", "raise")),  # test_ddp_hook.py skips a bucket without one
    ],
)
def test_under_ddp_a_nan_of_one_rank_reaches_all(
    where: str, nonfinite: str, comm: MPI.Intracomm, group: Any
) -> None:
    """In a table, beside one, and in a model without tables."""
    tables = where != "no table"
    ddp, state = hooked(TwoTables(sparse=tables), nonfinite=nonfinite)
    factors = {"bags": 0.0, "loss": 1.0, "out": 1.0}
    ddp.module.out.weight.register_hook(lambda gradient: gradient * factors["out"])

    def backward() -> None:
        ddp.zero_grad()
        loss = ddp(batch_of(comm.rank, 0), bags=True) * factors["loss"]
        (loss + ddp.module.bags(torch.zeros(1, 1, dtype=torch.int64)).sum() * factors["bags"]).backward()

    backward()
    where = where if tables else "loss"
    good = factors[where]
    factors[where] = float("nan") if comm.rank == 0 else good
    with (
        pytest.raises(RuntimeError, match=r"NonFiniteGradientError: .* NaN or Inf on rank\(s\) 0\b")
        if nonfinite == "raise"
        else nullcontext()
    ):
        backward()
    assert all(parameter.grad is not None for parameter in ddp.module.parameters())
    if nonfinite == "skip":
        assert state.table_reports["bags.weight"].skipped
        assert not ddp.module.bags.weight.grad.to_dense().any()
    factors[where] = good
    backward()
    assert not any(report.skipped for report in (state.report, *state.table_reports.values()))
    gradients = comm.allgather([p.grad.to_dense().numpy().tobytes() for p in ddp.parameters()])
    assert gradients == [gradients[0]] * comm.size


@pytest.mark.mpi(min_size=2)
def test_a_rank_that_has_joined_adds_no_rows_of_its_last_step(comm: MPI.Intracomm, group: Any) -> None:
    ddp, _ = hooked()
    last = comm.rank == comm.size - 1
    with ddp.join():
        for step in range(3 + last):
            ddp.zero_grad()
            ddp(batch_of(comm.rank, step), bags=True).backward()
    if last:
        reduced = ddp.module.words.weight.grad.coalesce()
        own = TwoTables(sparse=True)
        own(batch_of(comm.rank, 3), bags=True).backward()
        assert torch.equal(reduced._indices(), own.words.weight.grad.coalesce()._indices())


def test_on_another_number_of_ranks_tables_go_on_at_their_step(comm: MPI.Intracomm) -> None:
    model = TwoTables(sparse=True)
    optimizer = DistributedOptimizer(inner("sgd", model), comm, density=0.2)
    optimizer.zero_grad()
    model(batch_of(comm.rank, 0), bags=True).backward()
    optimizer.step()
    saved = comm.allgather(optimizer.state_dict())
    tables = of_rank(saved[0]["tables"])
    assert {table["steps"] for table in tables.values()} == {1}
    for ranks in (1, comm.size, comm.size + 1):
        states = [redistribute(saved.__getitem__, comm.size, rank, ranks) for rank in range(ranks)]
        assert all(of_rank(state["tables"]) == tables for state in states)
    optimizer.load_state_dict(redistribute(saved.__getitem__, comm.size, comm.rank, comm.size))
