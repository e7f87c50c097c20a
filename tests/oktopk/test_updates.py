"""Updates: each rank's optimizer steps first, what it changed is summed, and the reference is equal on all ranks."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from oktopk import DistributedOptimizer, NonFiniteGradientError
from oktopk.elastic import of_rank, redistribute
from oktopk.torch.local_step import betas_of_replica, most_share
from oktopk.torch.updates.optimizer import UpdatesOptimizer
from oktopk.torch.updates.reference_parameters import ReferenceParameters
from tests.oracle import masked, top_k
from tests.replicas import Replicas
from tests.training import flat, gradients, loss, network, steady, train
from tests.updates import own, reference, references, to_come

pytestmark = pytest.mark.mpi


def wrap(model: nn.Module, comm: Any, kind: str = "adamw", **settings: Any) -> Any:
    return Replicas(comm).wrap(model, kind, **settings)


def trained(comm: Any, steps: int, kind: str = "adamw", **settings: Any) -> tuple[Any, Any]:
    return Replicas(comm).trained(steps, kind, **settings)


def check_agreed(model: nn.Module, optimizer: Any, comm: MPI.Intracomm) -> None:
    Replicas(comm).check_agreed(model, optimizer)


@pytest.mark.parametrize(
    ("dtype", "steps"),
    [
        (torch.float32, 24),  # past the exchanges that compare the reference
        (torch.bfloat16, 24),
        pytest.param(torch.bfloat16, 1000, marks=pytest.mark.long("`make test` has 24 steps")),
    ],
    ids=str,
)
def test_steps_at_rate_zero_leave_every_bit(comm: MPI.Intracomm, dtype: torch.dtype, steps: int) -> None:
    model = network().to(dtype)
    optimizer = steady(torch.optim.AdamW(model.parameters(), lr=0.0), comm, density=0.1, sends="updates")
    held, start = flat(model), reference(optimizer)
    drawn = torch.Generator().manual_seed(comm.rank)
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn(parameter.shape, generator=drawn).to(dtype)
        optimizer.step()
    assert np.array_equal(flat(model), held)
    assert torch.equal(reference(optimizer), start)
    assert not optimizer.reducer.residual.any()


@pytest.mark.parametrize(
    ("wire", "dtype"), [("plain", torch.float32), ("bfloat16", torch.bfloat16), ("int4", torch.float32)]
)
def test_odd_lengths_are_agreed_on_by_any_number_of_ranks(
    comm: MPI.Intracomm, wire: str, dtype: torch.dtype
) -> None:
    """Whatever each rank reads, at a rate of its own, and where one of them has no gradient."""
    agreed = moved = True
    for ranks in range(1, comm.size + 1):
        part = comm.Split(comm.rank < ranks)
        drawn = torch.Generator().manual_seed(comm.rank)
        for length in (1, 7, 1003):
            start = torch.randn(length, generator=torch.Generator().manual_seed(3)).to(dtype)
            weight = nn.Parameter(start.clone())
            inner = torch.optim.SGD([weight], lr=0.1 * (1 + part.rank), momentum=0.9, weight_decay=0.01)
            optimizer: Any = steady(inner, part, density=0.1, wire=wire, sends="updates")
            for step in range(4):
                weight.grad = torch.randn(length, generator=drawn).to(dtype)
                if step == 2 and part.rank == part.size - 1:
                    weight.grad = None
                optimizer.step()
                vector = reference(optimizer)
                with optimizer.agreed():
                    agreed &= torch.equal(weight, vector.to(dtype))
                agreed &= len(set(part.allgather(vector.numpy().tobytes()))) == 1
                # a single element may round back to where it was
                moved &= length == 1 or step < 2 or not torch.equal(vector, start.float())
            optimizer.close()
        part.Free()
    assert comm.allreduce(agreed and moved, MPI.LAND)


class Tied(nn.Module):
    """An embedding that rescales the rows it reads, whose weight is that of the last layer, too."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.rows, self.last = nn.Embedding(11, 3, max_norm=1.0), nn.Linear(3, 11)
        self.last.weight = self.rows.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.last(self.rows(tokens))
        return scores


@pytest.mark.filterwarnings("ignore:.*max_norm")
@pytest.mark.parametrize("share", [0.0, pytest.param(0.5, marks=pytest.mark.mpi(min_size=2))])
def test_tied_weights_rescaled_rows_and_averages_are_agreed_on(comm: MPI.Intracomm, share: float) -> None:
    """Where ranks that read a row hold the same one; else the ranks that have parted are told so, all of them."""
    model, sentence = Tied(), ""
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    optimizer: Any = steady(inner, comm, density=0.2, wire="int8", local_share=share)
    assert optimizer.length == 44
    drawn = torch.Generator().manual_seed(comm.rank)
    for step in range(8):
        tokens, following = torch.randint(11, (2, 5), generator=drawn)
        optimizer.zero_grad()
        error = nn.functional.cross_entropy(model(tokens), following)
        assert (model.rows.weight[tokens].norm(dim=1) < 1.0001).all()
        if step != 3 or comm.rank:
            error.backward()
        try:
            optimizer.step()
        except ValueError as parted:
            sentence = str(parted)
            break
        with optimizer.agreed():
            average.update_parameters(model)
            held = comm.allgather((flat(model).tobytes(), flat(average).tobytes()))
        assert len(set(held)) == len(set(references(optimizer, comm))) == 1
    assert len(set(comm.allgather(sentence))) == 1
    assert ("have parted" in sentence) == (share > 0)


@pytest.mark.parametrize(("method", "every"), [("union", 1), ("oktopk", 2)])
def test_measures_are_of_what_the_optimizers_changed(comm: MPI.Intracomm, method: str, every: int) -> None:
    """SGD moves by the rate times the gradient, so that what entered the residuals is known."""
    weight = nn.Parameter(torch.zeros(2000))
    optimizer = steady(
        torch.optim.SGD([weight], lr=0.5), comm, method, density=0.05, sends="updates", every=every
    )
    drawn = torch.Generator().manual_seed(comm.rank)
    for _ in range(3):
        residual, entered = optimizer.reducer.residual.copy(), np.zeros(2000)
        for _ in range(every):
            weight.grad = torch.randn(2000, generator=drawn) ** 3
            entered += 0.5 * weight.grad.double().numpy()
            optimizer.step(measure=True)
        entered, residual = comm.allreduce(entered) / comm.size, comm.allreduce(residual) / comm.size
        report = optimizer.report
        assert report.measures is not None
        assert report.measures.gradient_norm == pytest.approx(np.linalg.norm(entered), rel=1e-4)
        best = masked(entered + residual, top_k(entered + residual, report.k))
        missed = np.linalg.norm(best - optimizer.reducer.update)
        assert report.measures.missed == pytest.approx(missed, rel=1e-3, abs=1e-4)
        assert report.measures.xi < comm.size
        left = comm.allreduce(optimizer.reducer.residual.astype(np.float64)) / comm.size
        ratio = np.linalg.norm(left) / np.linalg.norm(optimizer.reducer.update.astype(np.float64))
        assert report.measures.residual_over_update == pytest.approx(ratio, rel=1e-3)


@pytest.mark.mpi(min_size=2)
@pytest.mark.also(ranks=6)
@pytest.mark.parametrize("resumed", [False, True])
def test_regions_of_adamw_are_balanced_from_the_second_step_on(comm: MPI.Intracomm, resumed: bool) -> None:
    """In the first one all elements move by as much, so that the lowest indices are selected."""

    def wrapped() -> Any:
        return steady(torch.optim.AdamW([weight], lr=1e-3), comm, "oktopk", density=0.02)

    weight = nn.Parameter(torch.zeros(20_000))
    optimizer = wrapped()
    drawn = torch.Generator().manual_seed(comm.rank)
    balance = []
    for step in range(4):
        weight.grad = torch.randn(len(weight), generator=drawn)
        optimizer.step(measure=True)
        balance.append(optimizer.report.measures.region_balance)
        if resumed and step == 0:
            state = optimizer.state_dict()
            optimizer.close()
            optimizer = wrapped()
            optimizer.load_state_dict(state)
    assert balance[0] > 1.5, balance  # else this says nothing
    assert max(balance[1:]) < 1.5, balance


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("cancels", [True, False])
def test_huge_finite_gradients_keep_no_later_step_from_being_applied(
    comm: MPI.Intracomm, cancels: bool
) -> None:
    """Their momentum would bring residuals, or the sum of these, above the largest float in every later step."""
    for share in (0.9, 0.3 / comm.size):
        model = network()
        optimizer = wrap(model, comm, "sgd", nonfinite="skip")
        train(model, optimizer, comm.rank, range(1))
        velocities = [each["momentum_buffer"].clone() for each in optimizer.inner.state.values()]
        gradients(model, optimizer, comm.rank, 1)
        sign = {0: 1, comm.size - 1: -1}.get(comm.rank, 0) if cancels else 1
        if sign:
            model[0].weight.grad[0] = share * sign * torch.finfo(torch.float32).max
        optimizer.step()
        if sign:
            held = [each["momentum_buffer"] for each in optimizer.inner.state.values()]
            assert all(map(torch.equal, velocities, held))
        assert np.abs(flat(model)).max() < 100
        for step in range(2, 8):
            train(model, optimizer, comm.rank, range(step, step + 1))
            assert not optimizer.report.skipped
        check_agreed(model, optimizer, comm)
        optimizer.close()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
def test_a_nan_is_a_step_that_was_left_out(comm: MPI.Intracomm, kind: str) -> None:
    """The ratio is measured in the step, too, in which one rank has no finite gradient, or none."""
    ends = []
    for nan in (True, False):
        model = network()
        optimizer = wrap(model, comm, kind, nonfinite="skip")
        for step in range(14):
            gradients(model, optimizer, comm.rank, step)
            if step == 3 and comm.rank == 1:
                for parameter in model.parameters():
                    parameter.grad = torch.full_like(parameter, torch.nan) if nan else None
            optimizer.step()
        ends.append((reference(optimizer), optimizer.reducer.residual.copy()))
        optimizer.close()
    assert torch.equal(ends[0][0], ends[1][0]) and np.array_equal(ends[0][1], ends[1][1])


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("nonfinite", ["skip", "raise"])
def test_residuals_near_the_largest_float_are_cut_once(comm: MPI.Intracomm, nonfinite: str) -> None:
    weight, length = nn.Parameter(torch.zeros(100)), 100
    optimizer = steady(
        torch.optim.SGD([weight], lr=1.0), comm, density=0.01, sends="updates", nonfinite=nonfinite
    )
    largest, stopped = torch.finfo(torch.float32).max, []
    for step in range(75):
        share = 0.9 / 4 / comm.size if step < 60 else 0.0
        weight.grad = torch.full((length,), share / 10 * largest)
        try:
            optimizer.step()
        except NonFiniteGradientError:
            stopped.append(step)
        else:
            stopped += [step] if optimizer.report.skipped else []
    assert stopped and stopped[-1] <= 60  # no later step, where gradients are zero
    assert len(set(references(optimizer, comm))) == 1 and torch.isfinite(reference(optimizer)).all()


@pytest.mark.parametrize(("every", "ranks"), [(1, "all"), (4, "rank 0")])
def test_another_memory_format_parts_no_ranks(comm: MPI.Intracomm, every: int, ranks: str) -> None:
    vectors = []
    for later in (False, True):
        torch.manual_seed(1)
        model = nn.Sequential(nn.Conv2d(3, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3))
        optimizer = wrap(model, comm, "sgd", density=0.2, every=every)
        changes = later and (ranks == "all" or comm.rank == 0)
        for step in range(8):
            if changes and step == 2:
                model.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
            optimizer.zero_grad()
            batch = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(step * 9 + comm.rank))
            model(batch).square().mean().backward()
            optimizer.step()  # in the first exchanges ranks whose references have parted raise
        assert changes == (not model[0].weight.is_contiguous())
        assert len(set(references(optimizer, comm))) == 1
        vectors.append(reference(optimizer))
    assert torch.allclose(vectors[0], vectors[1], atol=1e-6)


MESSAGES = (
    *("allgather_objects", "allreduce_control", "allgather_control"),
    *("alltoall_control", "any_control", "barrier"),
)


def test_no_message_travels_between_exchanges(comm: MPI.Intracomm) -> None:
    model, optimizer = trained(comm, 4, every=4)
    transport = optimizer.reducer.transport
    assert transport.take_traffic().bytes == 0  # what measured the ratio is in the report
    for name in MESSAGES:
        setattr(transport, name, lambda *_, name=name: pytest.fail(f"{name} was called"))
    train(model, optimizer, comm.rank, range(4, 7))
    assert transport.take_traffic().bytes == 0
    assert optimizer.report.step == 0
    for name in MESSAGES:
        delattr(transport, name)
    train(model, optimizer, comm.rank, range(7, 8))
    report = optimizer.report
    assert (report.step, report.every, report.replicas) == (1, 4, comm.size)
    assert report.bytes_by_step == report.bytes / 4
    assert str(report).startswith(
        f"exchange 1: {report.global_nnz:,} of {optimizer.length:,} entries applied, "
    )
    check_agreed(model, optimizer, comm)


# what users write


@pytest.mark.parametrize("how", ["put aside", "moved by a hook"])
def test_weights_put_aside_and_back_or_moved_change_nothing(comm: MPI.Intracomm, how: str) -> None:
    """As an average of weights does for an evaluation, and as a hook of the wrapped optimizer may."""
    vectors = []
    for changes in (False, True):
        model = network()
        optimizer = wrap(model, comm, every=2)

        def move(*_: Any, model: nn.Module = model) -> None:
            for p in model.parameters():
                p.data = p.data.clone()

        if changes and how == "moved by a hook":
            optimizer.inner.register_step_post_hook(move)
        for step in range(6):
            train(model, optimizer, comm.rank, range(step, step + 1))
            if changes and how == "put aside":
                kept = [p.detach().clone() for p in model.parameters()]
                with torch.no_grad():
                    for p in model.parameters():
                        p.zero_()
                    for p, held in zip(model.parameters(), kept, strict=True):
                        p.copy_(held)
        vectors.append((reference(optimizer).numpy().tobytes(), flat(model).tobytes()))
    assert vectors[0] == vectors[1]


def test_the_hash_of_the_reference_changes_where_an_element_does(comm: MPI.Intracomm) -> None:
    for length in (1, 6, 7):
        reference: Any = SimpleNamespace(vector=torch.randn(length))
        before = ReferenceParameters.digest(reference)
        for element in range(length):
            held = float(reference.vector[element])
            reference.vector[element] = held + 1
            assert ReferenceParameters.digest(reference) != before
            reference.vector[element] = held
        assert ReferenceParameters.digest(reference) == before
    reference.vector[:2] = reference.vector[:2].flip(0)  # two elements that have changed places
    assert ReferenceParameters.digest(reference) != before


# state


@pytest.mark.parametrize(
    ("what", "why"), [("gradients", "no 'updates'"), ("the wrapped optimizer alone", "that was not wrapped")]
)
def test_a_state_without_updates_empties_the_residual_and_warns(
    comm: MPI.Intracomm, what: str, why: str, recwarn: pytest.WarningsRecorder
) -> None:
    """As `set_optimizer_state_dict` of torch.distributed.checkpoint loads one, while ranks hold parameters of their own."""
    model, optimizer = trained(comm, 5, sends="gradients" if what == "gradients" else "updates")
    state = optimizer.state_dict()
    if what == "gradients":
        before, weights, model = flat(model), model.state_dict(), network()
        optimizer = wrap(model, comm)
        model.load_state_dict(weights)
    else:
        before = reference(optimizer).numpy()
        state = {name: state[name] for name in ("state", "param_groups")}
    optimizer.load_state_dict(state)
    told = [str(warning.message) for warning in recwarn if "residuals start empty" in str(warning.message)]
    assert [why in sentence for sentence in told] == [True] * (comm.rank == 0)
    assert np.array_equal(reference(optimizer), before)
    assert not optimizer.reducer.residual.any()
    assert len(set(comm.allgather(flat(model).tobytes()))) == 1
    train(model, optimizer, comm.rank, range(5, 9))  # the references are compared in each
    check_agreed(model, optimizer, comm)


@pytest.mark.parametrize(("sends", "flat_names"), [("updates", False), ("gradients", True)])
def test_a_state_by_torch_is_told_for_what_it_lacks(
    comm: MPI.Intracomm, group: Any, sends: str, flat_names: bool, recwarn: pytest.WarningsRecorder
) -> None:
    options = StateDictOptions(flatten_optimizer_state_dict=flat_names)
    model, optimizer = trained(comm, 5, sends=sends)
    state = get_optimizer_state_dict(model, optimizer, options=options)
    with optimizer.agreed():
        weights = copy.deepcopy(model.state_dict())
    optimizer.close()
    again = network()
    again.load_state_dict(weights)
    loaded = wrap(again, comm, sends=sends)
    set_optimizer_state_dict(again, loaded, copy.deepcopy(state), options=options)
    several = sends == "updates" and comm.size > 1
    others = " and the moments of all replicas but one" if several else ""
    sentence = f"or came by get_optimizer_state_dict, which leaves out residuals{others} ("
    told = [str(warning.message) for warning in recwarn if "residuals start empty" in str(warning.message)]
    assert [sentence in each for each in told] == [True] * (comm.rank == 0)
    assert loaded.inner.state and not loaded.reducer.residual.any()


def test_another_number_of_ranks_keeps_what_is_to_come(comm: MPI.Intracomm) -> None:
    model, optimizer = trained(comm, 5, density=0.1)
    with optimizer.agreed():
        weights = copy.deepcopy(model.state_dict())
    states = comm.allgather(copy.deepcopy(optimizer.state_dict()))
    to_come = np.mean(comm.allgather(optimizer.reducer.residual.astype(np.float64)), axis=0)
    for state in states:
        state["state"][1]["exp_avg"] = states[0]["state"][1]["exp_avg"]
    for ranks in (1, 2, comm.size + 1):
        parts = [redistribute(lambda r: states[r], comm.size, rank, ranks) for rank in range(ranks)]
        residuals = [of_rank(part["reducer"])["residual"].numpy().astype(np.float64) for part in parts]
        assert np.allclose(np.mean(residuals, axis=0), to_come, atol=1e-7)
        for rank, part in enumerate(parts):
            inherited = range(rank, comm.size, ranks) or range(comm.size)
            moments = [states[r]["state"][0]["exp_avg_sq"].double() for r in inherited]
            mean = sum(moments) / len(inherited)
            assert torch.allclose(part["state"][0]["exp_avg_sq"].double(), mean, rtol=1e-5)
            assert torch.equal(part["state"][1]["exp_avg"], states[0]["state"][1]["exp_avg"])
        again = [redistribute(parts.__getitem__, ranks, rank, comm.size) for rank in range(comm.size)]
        residuals = [of_rank(part["reducer"])["residual"].numpy().astype(np.float64) for part in again]
        assert np.allclose(np.mean(residuals, axis=0), to_come, atol=1e-7)
        if comm.size % ranks == 0:  # each passes its mean on to as many
            first, second = (
                np.mean([part["state"][0]["exp_avg_sq"].numpy() for part in each], axis=0)
                for each in (parts, again)
            )
            assert np.allclose(first, second, rtol=1e-5)
    one = MPI.COMM_SELF
    other = network(3)
    loaded = wrap(other, one, density=0.1)
    other.load_state_dict(weights)
    loaded.load_state_dict(redistribute(lambda r: states[r], comm.size, 0, 1))
    assert torch.equal(reference(loaded), reference(optimizer))
    mean = sum(state["state"][0]["exp_avg_sq"].double() for state in states) / comm.size
    assert torch.allclose(loaded.state[other[0].weight]["exp_avg_sq"].double(), mean, rtol=1e-5)
    train(other, loaded, 0, range(5, 8))


@pytest.mark.mpi(min_size=2)
def test_optimizers_that_step_in_the_backward_pass_are_named(comm: MPI.Intracomm) -> None:
    model = network()
    optimizer = wrap(model, comm)
    if comm.rank == 1:
        with torch.no_grad():
            model[0].weight.add_(1)
    elif comm.rank == 0:
        loss(model, comm.rank, 0).backward()
    with pytest.raises(ValueError, match="rank 1: parameters have moved before the first step"):
        optimizer.step()


def test_a_shared_rate_in_a_tensor_is_scaled_once(comm: MPI.Intracomm) -> None:
    model = network()
    rate = torch.tensor(2e-3)
    groups = [{"params": list(model[0].parameters())}, {"params": list(model[3].parameters())}]
    optimizer = steady(torch.optim.AdamW(groups, lr=rate), comm, density=0.1, sends="updates")
    seen: list[float] = []
    optimizer.inner.register_step_pre_hook(lambda inner, *_: seen.append(float(inner.param_groups[1]["lr"])))
    train(model, optimizer, comm.rank, range(4))
    assert seen[0] == pytest.approx(2e-3)
    of_mean, mean = own(optimizer)["ratio"]["squares"]
    scale = min(max(of_mean / mean, 1 / comm.size), 1.0) ** -0.5
    assert seen[-1] == pytest.approx(2e-3 * scale, rel=0.3)
    assert all(group["lr"] is optimizer.param_groups[0]["lr"] for group in optimizer.param_groups)
    assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(2e-3)
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.999)


def test_betas_are_those_of_a_replicas_own_gradients() -> None:
    assert betas_of_replica((0.9, 0.95), 1, True, 0.998) == (0.9, 0.95)
    assert betas_of_replica([0.9, 0.95], 4, True, 0.998) == (0.9**7, 0.998)
    assert betas_of_replica((0.9, 0.999), 4, True, 0.998) == (0.9**7, 0.999**0.25)
    assert betas_of_replica((0.9, 0.95), 2.5, False, 0.0) == (0.9, 0.95**0.4)
    assert [most_share(replicas) for replicas in (2, 4, 16)] == [0.05, 0.05, 0.025]


@pytest.mark.also(ranks=1)
@pytest.mark.parametrize(
    ("kind", "settings", "expected"),
    [
        (torch.optim.AdamW, {}, (0.9**7, 0.998)),
        (torch.optim.NAdam, {"method": "union"}, (0.9**7, 0.998)),
        (torch.optim.RAdam, {}, (0.9**7, None)),
        (torch.optim.Adam, {"every": 2}, (0.9, 0.998)),
        (torch.optim.AdamW, {"local_share": 1.0}, (0.9, 0.998)),
    ],
)
def test_steps_use_a_replicas_betas_and_groups_keep_the_users(
    comm: MPI.Intracomm, kind: Any, settings: dict[str, Any], expected: tuple[float, float | None]
) -> None:
    model = network()
    optimizer = steady(kind(model.parameters(), betas=(0.9, 0.95)), comm, **settings)
    seen: list[tuple[float, float]] = []
    optimizer.inner.register_step_pre_hook(lambda inner, *_: seen.append(inner.param_groups[0]["betas"]))
    loss(model, comm.rank, 0).backward()
    optimizer.step()
    first, second = expected
    second = 0.95 ** (1 / comm.size) if second is None else second
    assert seen[0] == pytest.approx((0.9, 0.95) if comm.size == 1 else (first, second))
    assert optimizer.param_groups[0]["betas"] == (0.9, 0.95)


@pytest.mark.parametrize("every", [1, 2])
def test_a_state_loads_with_another_share_and_nothing_is_lost(comm: MPI.Intracomm, every: int) -> None:
    """Between exchanges, too: what the parameters have moved since the last one is the same."""
    model, ends = network(), []
    settings: dict[str, Any] = {"density": 0.05, "every": every, "sends": "updates"}
    optimizer = steady(torch.optim.SGD(model.parameters(), lr=1e-2), comm, local_share=0.5, **settings)
    train(model, optimizer, comm.rank, range(5))
    saved, weights = optimizer.state_dict(), copy.deepcopy(model.state_dict())
    optimizer.close()
    for share in (0.5, 0.1):
        again = steady(torch.optim.SGD(model.parameters(), lr=1e-2), comm, local_share=share, **settings)
        model.load_state_dict(weights)
        again.load_state_dict(copy.deepcopy(saved))
        for group in again.param_groups:
            group["lr"] = 0.0
        train(model, again, comm.rank, range(5, 6))
        assert again.report is not None  # it has exchanged
        residual = again.reducer.residual
        assert np.allclose(flat(model), reference(again).numpy() - share * residual, atol=1e-7)
        ends.append((reference(again).numpy(), residual.copy()))
        again.close()
    assert np.abs(ends[0][1]).max() > 1e-3
    for one, other in zip(*ends, strict=True):
        assert np.allclose(one, other, atol=1e-6)


def test_another_model_under_a_state_loses_nothing_of_the_residual(comm: MPI.Intracomm) -> None:
    """As with rank 0's own model on all ranks, or a model that is kept."""
    model, optimizer = trained(comm, 4)
    weights = comm.bcast({n: v.clone() for n, v in model.state_dict().items()} if comm.rank == 0 else None)
    other = network(3)
    loaded = wrap(other, comm)
    other.load_state_dict(weights)
    loaded.load_state_dict(optimizer.state_dict())
    residual = comm.allreduce(optimizer.reducer.residual.astype(np.float64))
    before = reference(loaded).double().numpy() - residual / comm.size
    for p in other.parameters():
        p.grad = torch.zeros_like(p)
    for group in loaded.param_groups:
        group["lr"] = 0.0
    loaded.step()
    assert np.allclose(to_come(loaded, comm), before, atol=1e-7)


@pytest.mark.mpi(min_size=2)
def test_one_element_that_a_rank_writes_alone_is_found(comm: MPI.Intracomm) -> None:
    model, optimizer = trained(comm, 2)
    if comm.rank == 1:
        with torch.no_grad():
            model[0].weight[0, 1] = 3
    with pytest.raises(ValueError, match=r"have parted: their hash is .* on rank 0, .* on rank 1"):
        train(model, optimizer, comm.rank, range(2, 5))
    model.load_state_dict(network(9).state_dict())
    train(model, optimizer, comm.rank, range(5, 9))
    check_agreed(model, optimizer, comm)


@pytest.mark.parametrize(
    ("kind", "settings", "sends", "method", "falls"),
    [
        ("AdamW", {}, "updates", "union", 100),
        ("AdamW", {"density": 0.049}, "updates", "union", 100),
        ("RAdam", {"density": 0.05}, "updates", "oktopk", 100),
        ("AdamW", {"density": np.float32(0.0625)}, "updates", "oktopk", 100),
        ("AdamW", {"density": 0.25}, "updates", "oktopk", 100),
        ("AdamW", {"density": 0.05, "every": 2}, "updates", "union", 0),
        ("AdamW", {"density_warmup_steps": 0}, "updates", "union", 0),
        ("AdamW", {"dense_warmup_steps": 3}, "updates", "union", 0),
        ("AdamW", {"density_warmup_steps": 7, "first_density": 0.1}, "updates", "union", 7),
        ("Adam", {"sends": "gradients"}, "gradients", "oktopk", 0),
        ("AdamW", {"method": "dense"}, "gradients", "dense", 0),
        ("AdamW", {"density": 0.5}, "gradients", "oktopk", 0),
        ("SGD", {}, "gradients", "oktopk", 0),
        ("SGD", {"sends": "updates"}, "updates", "union", 0),
        ("SparseAdam", {}, "gradients", "oktopk", 0),
    ],
    ids=str,
)
def test_the_optimizer_decides_what_is_sent_unless_told(
    comm: MPI.Intracomm, kind: str, settings: dict[str, Any], sends: str, method: str, falls: int
) -> None:
    """Updates by the method that loses less at the density, which falls at first where Adam's travel in each step."""
    inner = getattr(torch.optim, kind)(network().parameters())
    optimizer = DistributedOptimizer(inner, comm, **settings)
    assert isinstance(optimizer, UpdatesOptimizer) == (sends == "updates")
    assert optimizer.reducer.method == method
    assert optimizer.reducer.settings.density_warmup_steps == falls
    with optimizer.agreed():  # whatever it sends, so that one script takes both
        pass


def test_a_class_is_derived_from_what_it_sends(comm: MPI.Intracomm) -> None:
    class OfBoth(DistributedOptimizer):
        pass

    class OfUpdates(UpdatesOptimizer):
        pass

    sgd = torch.optim.SGD(nn.Linear(5, 3).parameters())
    with pytest.raises(TypeError, match="derive it from GradientsOptimizer or UpdatesOptimizer"):
        OfBoth(sgd, comm)
    with pytest.raises(
        ValueError, match="OfUpdates sends 'updates', not 'gradients': for these take Gradients"
    ):
        OfUpdates(sgd, comm, density=0.1, sends="gradients")
    optimizer = OfUpdates(sgd, comm, density=0.1)
    assert optimizer.replica == "rank"


def test_density_falls_from_a_quarter_in_a_hundred_steps(comm: MPI.Intracomm) -> None:
    model = network()
    optimizer = DistributedOptimizer(torch.optim.AdamW(model.parameters(), lr=1e-3), comm, density=0.01)
    densities = [optimizer.reducer.settings.density_at(step) for step in range(102)]
    falls = next(step for step in range(102) if densities[step] < densities[0])
    for step in (0, falls):
        train(model, optimizer, comm.rank, range(step and 1, step + 1))
        assert optimizer.report.k / optimizer.length == pytest.approx(densities[step], rel=0.01)
    assert densities[0] == 0.25
    assert sorted(densities, reverse=True) == densities
    assert [densities[50], densities[99]] == pytest.approx([0.05, 0.05 / 5**0.5])
    assert densities[100:] == [0.01] * 2


class _Raises(torch.optim.SGD):
    """Raises in the step that `left` counts down to, once it has moved the first `moves` parameters; None: all."""

    left: int = -1
    moves: int | None = 0

    def step(self, closure: Any = None) -> Any:
        self.left -= 1
        (group,) = self.param_groups
        parameters = group["params"]
        if self.left == 0:
            group["params"] = parameters[: self.moves]
        try:
            super().step(closure)
        finally:
            group["params"] = parameters
        if self.left == 0:
            raise MemoryError("no memory for moments")


class _RaisesOnItsShard(_Raises):
    elementwise = True


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("per_host", "every", "moves", "kind"),
    [
        (0, 1, 0, _Raises),
        (0, 2, None, _Raises),
        (0, 1, None, _Raises),
        (0, 1, 1, _Raises),
        (2, 1, 0, _Raises),
        (2, 1, 1, _Raises),
        (2, 2, 1, _Raises),
        (2, 1, 1, _RaisesOnItsShard),
    ],
)
def test_an_optimizer_that_raises_on_one_rank_raises_on_all(
    comm: MPI.Intracomm, per_host: int, every: int, moves: int | None, kind: type[_Raises]
) -> None:
    """In the exchange, with the rank and what was raised; then all go on."""
    model, last = network(), comm.size - 1
    inner = kind(model.parameters(), lr=0.01)
    inner.moves = moves
    optimizer = Replicas(comm, per_host).wrap(model, lambda parameters: inner, every=every, sends="updates")
    if comm.rank == last:
        inner.left = 3
    train(model, optimizer, comm.rank, range(2))
    with pytest.raises(
        ValueError, match=f"rank {last}: the wrapped optimizer raised MemoryError: no memory"
    ) as error:
        train(model, optimizer, comm.rank, range(2, 2 + every))
    assert isinstance(error.value.__cause__, MemoryError) == (comm.rank == last)
    train(model, optimizer, comm.rank, range(4, 8))
    Replicas(comm, per_host).check_agreed(model, optimizer)


def test_what_one_rank_alone_raises_comes_as_it_is() -> None:
    model = network()
    inner = _Raises(model.parameters(), lr=0.01)
    inner.left = 1
    optimizer = UpdatesOptimizer(inner, MPI.COMM_SELF)
    with pytest.raises(MemoryError):
        train(model, optimizer, 0, range(1))
