"""What goes wrong in a training loop of one's own is a sentence on every rank, not a training that is wrong."""

from __future__ import annotations

import copy
import gc
import sys
import time
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn

import oktopk
from collectives.errors import MissingRanksError
from collectives.launchers import LauncherError
from oktopk import METHODS, DistributedOptimizer, GradientAllreduce, average_buffers, broadcast_parameters
from oktopk.buckets import BucketedAllreduce
from oktopk.elastic import of_rank, redistribute
from oktopk.rows import RowSparseAllreduce
from oktopk.torch.states import not_saved_of
from tests.training import flat, network, squares, train

LIMIT = 0.5
"""Seconds that a rank may come late."""

pytestmark = pytest.mark.mpi
ONE_STEP = pytest.mark.long("`make test` has Ok-Topk's step, and two levels over gloo")
TWO_CALLS = pytest.mark.long("`make test` has GradientAllreduce and broadcast_parameters")


@pytest.fixture
def over(request: pytest.FixtureRequest, comm: MPI.Intracomm) -> Any:
    """The ranks of a job as a library knows them."""
    return comm if request.param == "MPI" else request.getfixturevalue("group")


def sgd(model: nn.Module, **keywords: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), **{"lr": 0.05, "momentum": 0.9} | keywords)


def backward(model: nn.Module, comm: MPI.Intracomm, step: int = 0) -> None:
    squares(model, comm.rank, step).backward()


@pytest.mark.also(ranks=1)
@pytest.mark.parametrize(
    "variable", ["WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS"]
)
def test_processes_that_mpi_does_not_see_are_refused(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, variable: str
) -> None:
    monkeypatch.setenv(variable, "6")
    if comm.size > 1:  # MPI sees the others: what the launcher of something else says does not count
        GradientAllreduce(comm, 10)
        return
    message = (
        rf"{variable}=6: .* started 6 processes, but the MPI .* size 1.* "
        r'call torch\.distributed\.init_process_group\("gloo"\) first.* mpiexec -n 6 python -m mpi4py my\.py'
    )
    with pytest.raises(LauncherError, match=message):
        GradientAllreduce(comm, 10)
    with pytest.raises(LauncherError, match=message):
        DistributedOptimizer(sgd(network()))
    with pytest.raises(LauncherError, match=message):
        broadcast_parameters(network())
    GradientAllreduce(MPI.COMM_SELF, 10)
    monkeypatch.setenv(variable, "1")
    GradientAllreduce(comm, 10)


def test_no_communicator_is_all_ranks_of_the_job(comm: MPI.Intracomm) -> None:
    assert GradientAllreduce(None, 10).transport.size == comm.size
    model = network()
    assert DistributedOptimizer(sgd(model)).reducer.transport.size == comm.size
    average_buffers(model)
    with pytest.raises(
        TypeError, match=r"comm is a str, not an mpi4py\.MPI\.Intracomm or a torch\.distributed\.ProcessGroup"
    ):
        GradientAllreduce("world", 10)  # type: ignore[arg-type]


@pytest.mark.mpi(min_size=2)
def test_parameters_that_differ_become_rank_0s_with_one_warning(
    comm: MPI.Intracomm, recwarn: pytest.WarningsRecorder
) -> None:
    strange = range(1, comm.size, 2)
    model = network(seed=int(comm.rank in strange))
    for parameter in model[3].parameters():
        parameter.requires_grad_(False)
    frozen, mean = model[3].weight.clone(), model[1].running_mean.fill_(comm.rank).clone()
    DistributedOptimizer(sgd(model), comm)
    trained = [p.detach().numpy().tobytes() for p in model.parameters() if p.requires_grad]
    assert len(set(map(tuple, comm.allgather(trained)))) == 1
    assert torch.equal(model[0].weight, network(seed=0)[0].weight)
    assert torch.equal(model[3].weight, frozen) and torch.equal(model[1].running_mean, mean)
    named = f"parameters on rank(s) {', '.join(map(str, strange))} differed from rank 0's"
    messages = [str(warning.message) for warning in recwarn]
    assert [named in message for message in messages] == [True] * (comm.rank == 0)


def test_equal_parameters_are_left_as_they_are_in_silence(
    comm: MPI.Intracomm, recwarn: pytest.WarningsRecorder
) -> None:
    model = network()
    before = flat(model)
    DistributedOptimizer(sgd(model), comm).close()
    assert np.array_equal(flat(model), before) and not len(recwarn)


@pytest.mark.mpi(min_size=2)
def test_parameters_that_differ_are_refused_without_broadcast(comm: MPI.Intracomm) -> None:
    model = network(seed=comm.rank)
    before = flat(model)
    others = ", ".join(map(str, range(1, comm.size)))
    with pytest.raises(ValueError, match=rf"parameters on rank\(s\) {others} differ .* broadcast is False"):
        DistributedOptimizer(sgd(model), comm, broadcast=False)
    assert np.array_equal(flat(model), before)


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("kind", ["state", "learning rate"])
def test_optimizers_that_differ_are_refused(comm: MPI.Intracomm, kind: str) -> None:
    odd = comm.rank == comm.size - 1
    model = network()
    inner = sgd(model, lr=0.1 if odd and kind == "learning rate" else 0.2)
    if odd and kind == "state":
        inner.state[model[0].weight]["momentum_buffer"] = torch.ones(30, 20)
    with pytest.raises(
        ValueError, match=rf"state or a setting .* on rank\(s\) {comm.size - 1} differs from rank 0's"
    ):
        DistributedOptimizer(inner, comm)


def test_an_optimizer_that_is_wrapped_already_is_refused(comm: MPI.Intracomm) -> None:
    optimizer = DistributedOptimizer(sgd(network()), comm)
    with pytest.raises(ValueError, match="is a DistributedOptimizer already: wrap it once"):
        DistributedOptimizer(optimizer, comm)
    optimizer.close()
    with pytest.raises(TypeError, match="optimizer is a generator, not a torch optimizer"):
        DistributedOptimizer(network().parameters(), comm)


def test_an_optimizer_has_one_wrapper_in_use_at_a_time(comm: MPI.Intracomm, left_open: list[Any]) -> None:
    """One that was closed or is gone is in use no more; the error of a second one does not keep the first."""
    inner = sgd(network())
    first = DistributedOptimizer(inner, comm)
    refused = r"all ranks: a DistributedOptimizer is around this optimizer already: .* close\(\) it first"
    with pytest.raises(
        ValueError, match=refused if comm.size > 1 else refused.replace("all ranks", "rank 0")
    ) as caught:
        DistributedOptimizer(inner, comm)
    with pytest.raises(
        ValueError,
        match=r"a DistributedOptimizer reduces gradients of these parameters already: .* close\(\) it",
    ):
        DistributedOptimizer(torch.optim.SGD(inner.param_groups[0]["params"][:1], lr=0.1), comm)
    left_open.clear()
    del first
    gc.collect()
    DistributedOptimizer(inner, comm).close()
    assert caught.value.args  # as a notebook keeps it
    second = DistributedOptimizer(inner, comm)
    schedule: Any = torch.optim.lr_scheduler.ConstantLR(second)
    left_open.clear()
    del second, schedule  # without close
    DistributedOptimizer(inner, comm)


def test_a_rank_may_be_away_between_steps(comm: MPI.Intracomm) -> None:
    reducer = GradientAllreduce(comm, 100, timeout=LIMIT)
    reducer.step(np.arange(100, dtype=np.float32))
    if comm.rank == 0:
        time.sleep(LIMIT + 0.1)  # an evaluation, before what has no limit
    reducer.transport.barrier()


@pytest.mark.parametrize(
    ("method", "kind"), [("oktopk", "unfrozen"), ("dense", "added"), ("gtopk", "replaced")]
)
def test_a_parameter_trained_later_is_an_error_on_all(comm: MPI.Intracomm, method: str, kind: str) -> None:
    model = network()
    model[3].bias.requires_grad_(False)
    optimizer = DistributedOptimizer(sgd(model), comm, method, density=0.05)
    odd = comm.size - 1

    def step(number: int) -> None:
        optimizer.zero_grad()
        backward(model, comm, number)
        optimizer.step()

    step(0)
    before, residual = flat(model), optimizer.reducer.residual
    kept = None if residual is None else residual.copy()
    if comm.rank == odd:
        group = optimizer.inner.param_groups[0]["params"]
        if kind == "unfrozen":
            model[3].bias.requires_grad_(True)
        elif kind == "added":
            optimizer.inner.add_param_group({"params": [nn.Parameter(torch.zeros(7))]})
        else:
            group[0] = nn.Parameter(torch.zeros(7))  # as many as before
    with pytest.raises(
        ValueError, match=rf"rank {odd}: 1 parameter\(s\) .*\(7,\), need a gradient .* then wrap"
    ):
        step(1)
    assert np.array_equal(flat(model), before)
    assert kept is None or np.allclose(residual, kept, atol=1e-4)


def test_one_ranks_error_in_a_step_is_raised_by_all(comm: MPI.Intracomm) -> None:
    """The flag that travels is that of a gradient that is not finite: the two must not be mistaken for each other."""
    two_levels: dict[str, Any] = {"levels": "hosts", "ranks_per_host": 2}
    for method, more in [*((method, {}) for method in METHODS), ("oktopk", two_levels)]:
        reducer = GradientAllreduce(comm, 100, method, density=0.1, nonfinite="skip", **more)
        gradient = np.arange(100, dtype=np.float32)
        with pytest.raises(ValueError, match="rank 0: no data") as caught:
            reducer.step(gradient, problem="no data" if comm.rank == 0 else "")
        assert more or caught.value.__suppress_context__  # a traceback of one error
        poisoned = gradient.copy()
        poisoned[comm.rank] = np.nan
        assert reducer.step(poisoned).skipped
        assert not reducer.step(gradient).skipped
        reducer.close()


@pytest.mark.mpi(min_size=2)
def test_a_state_of_another_rank_is_refused_on_all(comm: MPI.Intracomm) -> None:
    model = network()
    optimizer = DistributedOptimizer(sgd(model), comm, density=0.05)
    backward(model, comm)
    optimizer.step()
    own = optimizer.state_dict()
    before = optimizer.reducer.residual.copy()
    saved = comm.allgather(own)
    refused = (
        rf"the state is of rank 1 of {comm.size}, and this is rank 0 of {comm.size}: .*elastic\.redistribute"
    )
    with pytest.raises(ValueError, match=refused):
        optimizer.load_state_dict(saved[(comm.rank + 1) % comm.size])
    group = comm.Split(comm.rank // 2, comm.rank)
    small = DistributedOptimizer(sgd(network()), group, density=0.05)
    if group.size > 1 and comm.size > 2:
        with pytest.raises(
            ValueError, match=rf"of {comm.size}, and this is rank {group.rank} of {group.size}"
        ):
            small.load_state_dict(own)
    assert np.array_equal(optimizer.reducer.residual, before)
    small.load_state_dict(redistribute(saved.__getitem__, comm.size, group.rank, group.size))
    total = group.allreduce(small.reducer.residual)
    assert np.allclose(
        total, sum(of_rank(state["reducer"])["residual"].numpy() for state in saved), atol=1e-5
    )
    optimizer.load_state_dict(own)
    for each in (optimizer, small):
        each.close()
    group.Free()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    "settings",
    [{"sends": "updates"}, {"sends": "gradients"}, {"sends": "gradients", "bucket_mb": 0.001}],
    ids=str,
)
def test_a_step_warns_if_all_ranks_loaded_one_state(comm: MPI.Intracomm, settings: dict[str, Any]) -> None:
    """As frameworks do that save rank 0's optimizer alone."""

    def made() -> tuple[nn.Module, DistributedOptimizer]:
        model = network()
        inner = torch.optim.Adam(model.parameters(), lr=2e-3)
        return model, DistributedOptimizer(inner, comm, density=0.05, **settings)

    model, optimizer = made()
    train(model, optimizer, comm.rank, range(4))
    with optimizer.agreed():
        weights = copy.deepcopy(model.state_dict())
    own = copy.deepcopy(optimizer.state_dict())
    first = comm.bcast(own)
    train(model, optimizer, comm.rank, range(4, 7))
    for then_own in (False, True):
        again, continued = made()
        again.load_state_dict(weights)
        continued.load_state_dict(copy.deepcopy(first))
        for reducer in getattr(continued.reducer, "reducers", [continued.reducer]):
            assert reducer.steps == 4 and not reducer.residual.any()
        for number, held in enumerate(continued.state[p] for p in again.parameters()):
            assert torch.equal(held["exp_avg"], first["state"][number]["exp_avg"])
        with continued.agreed():
            assert all(torch.equal(value, weights[name]) for name, value in again.state_dict().items())
        if then_own:
            continued.load_state_dict(copy.deepcopy(own))
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            train(again, continued, comm.rank, range(4, 7))
        said = [str(each.message) for each in told]
        lost = (
            f"every rank has loaded the state of rank 0 of {comm.size}: the residuals of all ranks are lost"
        )
        assert sum(lost in sentence for sentence in said) == (comm.rank == 0 and not then_own), said
        assert np.array_equal(flat(again), flat(model)) == then_own
        with continued.agreed():
            assert len(set(comm.allgather(flat(again).tobytes()))) == 1


def test_one_state_of_more_ranks_names_redistribute() -> None:
    alone: Any = types.SimpleNamespace(size=1, allgather_objects=lambda value: [value])
    said = not_saved_of((0, 4), alone)
    assert "every rank has loaded the state of rank 0 of 4" in said
    assert said.endswith("turn the 4 states into 1 by oktopk.elastic.redistribute")
    assert not not_saved_of((0, 1), alone)


class Table:
    """A table, with the call of a reducer."""

    def __init__(self, over: Any, **settings: Any) -> None:
        self.reducer = RowSparseAllreduce(over, 10, 2, **settings)

    def step(self) -> object:
        return self.reducer.step(np.arange(3), np.ones((3, 2), np.float32))


class Vectors:
    """A reducer that reduces ones, in buckets where there are several lengths."""

    def __init__(self, over: Any, lengths: list[int], **settings: Any) -> None:
        more = {"density": 0.1} | settings
        gradients = [np.ones(length, np.float32) for length in lengths]
        several = len(lengths) > 1
        self._given = [gradients] if several else gradients
        self.reducer: Any = (
            BucketedAllreduce(over, lengths, **more) if several else GradientAllreduce(over, *lengths, **more)
        )

    def step(self, **more: Any) -> object:
        return self.reducer.step(*self._given, **more)


class Trained:
    """An optimizer of a network, as a reducer."""

    def __init__(
        self, over: Any, kind: Callable[..., torch.optim.Optimizer], table: bool = False, **settings: Any
    ) -> None:
        self._model = network()
        tables = [nn.Parameter(torch.zeros(3, 2))] if table else []
        inner = kind([*self._model.parameters(), *tables], lr=0.01)
        self.reducer = DistributedOptimizer(inner, over, **{"sparse": tables} if table else {}, **settings)

    def step(self) -> None:
        squares(self._model, 0, 0).backward()
        self.reducer.step()


ADAMW, HOSTS = torch.optim.AdamW, {"ranks_per_host": 2}
MADE: dict[str, Callable[..., Any]] = {
    "reducer": lambda over, **more: Vectors(over, [100], levels="flat", **more),
    "dense": lambda over, **more: Vectors(over, [100], method="dense", levels="flat", **more),
    "gtopk": lambda over, **more: Vectors(over, [100], method="gtopk", levels="flat", **more),
    "two levels": lambda over, **more: Vectors(over, [100], levels="hosts", **HOSTS, **more),
    "hosts of three": lambda over, **more: Vectors(over, [100], levels="hosts", ranks_per_host=3, **more),
    "buckets": lambda over, **more: Vectors(over, [60, 40], levels="flat", **more),
    "buckets in two levels": lambda over, **more: Vectors(over, [60, 40], levels="hosts", **HOSTS, **more),
    "table": Table,
    "overlap": lambda over, **more: Trained(over, torch.optim.SGD, overlap=True, bucket_mb=0.001, **more),
    "updates": lambda over, **more: Trained(over, ADAMW, **more),
    "updates of hosts": lambda over, **more: Trained(over, ADAMW, replica="host", **HOSTS, **more),
}
CLOSED_ALONE = ("reducer", "two levels", "buckets", "table", "overlap", "updates", "updates of hosts")
CALLS: dict[str, Callable[[Any, Any], object]] = {
    "gathered_residual": lambda made, state: made.reducer.gathered_residual(),
    "reset": lambda made, state: made.reducer.reset(),
    "skip_together before step 1": lambda made, state: made.reducer.skip_together(False),
    "load_state_dict": lambda made, state: made.reducer.load_state_dict(state),
    "step 1 with measure=True": lambda made, state: made.step(measure=True),
}
CALLED_ALONE = {
    "reducer": [*CALLS],
    "two levels": ["step 1 with measure=True"],
    "buckets": ["load_state_dict"],
    "buckets in two levels": ["gathered_residual"],
    "table": ["reset"],
    "overlap": ["load_state_dict"],
}


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(
    ("over", "name"),
    [
        *(("MPI", name) for name in CALLED_ALONE),
        *(
            pytest.param("gloo", name, marks=pytest.mark.long("`make test` has it over MPI"))
            for name in [*CALLED_ALONE][:3]
        ),
    ],
    indirect=["over"],
)
def test_a_rank_that_makes_another_call_is_named_with_it(comm: MPI.Intracomm, over: Any, name: str) -> None:
    for call in CALLED_ALONE[name]:
        made = MADE[name](over, timeout=LIMIT)
        made.step()  # the first one agrees on more than later ones
        state = made.reducer.state_dict()
        with pytest.raises(
            MissingRanksError, match=rf"^step 1: rank\(s\) 1 called {call} instead, and did not"
        ) as raised:
            CALLS[call](made, state) if comm.rank == 1 else made.step()
        assert raised.value.ranks == [1]
        made.reducer.close()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize(
    ("over", "names"),
    [
        ("MPI", CLOSED_ALONE[:1]),
        ("gloo", ("updates",)),
        pytest.param("MPI", CLOSED_ALONE, marks=pytest.mark.long("`make test` has one of seven")),
        pytest.param("gloo", CLOSED_ALONE, marks=pytest.mark.long("`make test` has one of seven")),
    ],
    indirect=["over"],
)
def test_a_rank_that_alone_closes_is_named_with_that_call(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, over: Any, names: Sequence[str]
) -> None:
    """Over gloo the others learn of it when its connections end, else once the limit has passed."""
    monkeypatch.setattr("collectives.closing.OTHERS_CLOSE", LIMIT)
    for name in names:
        made = MADE[name](over, timeout=2.0)
        with monkeypatch.context() as patch:  # ranks may be slow to load kernels, then they step at once
            patch.setattr("collectives.limit._debugged", lambda: True)
            made.step()
            comm.Barrier()
        error: MissingRanksError | None = None
        if comm.rank == 1:
            began = time.monotonic()
            made.reducer.close()
            assert time.monotonic() - began < 60
        else:
            with pytest.raises(
                MissingRanksError, match=r"^step 1: rank\(s\) 1 called close instead, and did not come"
            ) as raised:
                made.step()
            error = raised.value
        told = comm.allgather(error and error.ranks)
        assert told == [None if rank == 1 else [1] for rank in range(comm.size)], name
        made.reducer.close()


@pytest.mark.mpi(min_size=2)
def test_ranks_that_close_at_other_times_go_on(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    for waits in (60.0, 0.0):  # for the others, so that all or not all have closed by then
        monkeypatch.setattr("collectives.closing.OTHERS_CLOSE", waits)
        reducers = [Vectors(comm, [100]) for _ in range(3)]
        for number, reducer in enumerate(reducers):
            reducer.step()
            if comm.rank == number % comm.size:
                time.sleep(0.05)
            reducer.reducer.close()
            later = Vectors(comm, [50, 50])  # another reducer finds nothing of the closed one
            later.step()
            later.reducer.close()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("overlap", [True, False])
def test_measures_of_buckets_asked_for_by_one_are_refused(comm: MPI.Intracomm, overlap: bool) -> None:
    model = network()
    optimizer = DistributedOptimizer(sgd(model), comm, timeout=LIMIT, bucket_mb=0.001, overlap=overlap)
    backward(model, comm)
    before = flat(model)
    with pytest.raises(ValueError, match="rank 1: measures are taken of one vector"):
        optimizer.step(measure=comm.rank == 1)
    assert np.array_equal(flat(model), before)
    optimizer.step()  # the gradients are still there
    assert not np.array_equal(flat(model), before)
    backward(model, comm)
    optimizer.step()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("over", "name", "steps", "more", "missing"),
    [
        ("MPI", "reducer", 0, {}, 0),
        ("MPI", "reducer", 3, {"measure": True}, 0),
        # the control operations of methods differ, what ends the waiting does not
        *(
            pytest.param(*case, 3, {}, 0, marks=ONE_STEP)
            for case in (("MPI", "dense"), ("MPI", "gtopk"), ("gloo", "reducer"))
        ),
        ("MPI", "buckets", 1, {}, 0),
        ("gloo", "two levels", 3, {}, 0),
        # alone on its host, the second one, or without a shard
        ("MPI", "two levels", 1, {}, -1),
        ("MPI", "hosts of three", 1, {}, -1),
    ],
    indirect=["over"],
)
def test_ranks_missing_in_a_step_are_named_by_all(
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
    after_the_others: Callable[[int], None],
    over: Any,
    name: str,
    steps: int,
    more: dict[str, bool],
    missing: int,
) -> None:
    monkeypatch.setattr("collectives.limit.ANSWER", 10.0 if steps else 1.5)
    missing %= comm.size
    made = MADE[name](over, timeout=LIMIT, threshold_interval=2)
    for _ in range(steps):
        made.step(**more)
    after_the_others(missing)
    if comm.rank == missing and not steps:
        time.sleep(2.0)  # it comes later than while the others wait to hear of each other
    began = time.monotonic()
    with pytest.raises(
        MissingRanksError, match=rf"step {steps}.*: rank\(s\) {missing} did not come within {LIMIT} s"
    ) as caught:
        made.step(**more)
    assert caught.value.ranks == [missing]
    with pytest.raises(MissingRanksError):  # nothing goes on after that
        made.step(**more)
    assert time.monotonic() - began < 60
    made.reducer.close()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(
    ("over", "what", "comes"),
    [
        ("MPI", "GradientAllreduce", "late"),
        ("MPI", "broadcast_parameters", "late"),
        ("gloo", "GradientAllreduce", "never"),
        *(
            pytest.param(*case, "late", marks=TWO_CALLS)
            for case in (
                ("MPI", "DistributedOptimizer"),
                ("MPI", "average_buffers"),
                ("gloo", "DistributedOptimizer"),
            )
        ),
    ],
    indirect=["over"],
)
def test_ranks_missing_in_a_construction_are_named_by_all(
    comm: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
    after_the_others: Callable[[int], None],
    over: Any,
    what: str,
    comes: str,
) -> None:
    monkeypatch.setattr("collectives.limit.ANSWER", 1.5 if comes == "never" else 10.0)
    model = network()
    first: Any = {"GradientAllreduce": 10, "DistributedOptimizer": sgd(model)}.get(what, model)
    call: Any = getattr(oktopk, what)
    own = comm.Dup() if over is comm else torch.distributed.new_group()  # not to be used after that
    arguments = (own, first) if what == "GradientAllreduce" else (first, own)
    missing = comm.size - 1
    after_the_others(missing)  # they wait to hear of each other
    if comm.rank != missing or comes == "late":
        began = time.monotonic()
        with pytest.raises(
            MissingRanksError,
            match=rf"^{what}\(\.\.\.\): rank\(s\) {missing} did not come within {LIMIT} s .*Every rank must make this call$",
        ) as caught:
            call(*arguments, timeout=LIMIT)
        assert caught.value.ranks == [missing]
        assert time.monotonic() - began < 60
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_a_state_that_one_rank_does_not_load_names_it(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, after_the_others: Callable[[int], None]
) -> None:
    monkeypatch.setattr("collectives.limit.ANSWER", 10.0)
    optimizer = DistributedOptimizer(sgd(network()), comm, timeout=LIMIT)
    state = optimizer.state_dict()
    after_the_others(comm.size - 1)
    with pytest.raises(MissingRanksError, match=rf"load_state_dict: rank\(s\) {comm.size - 1} did not come"):
        optimizer.load_state_dict(state)
    optimizer.close()
    comm.Barrier()


@pytest.mark.mpi(min_size=2)
def test_under_a_debugger_a_rank_waits_on(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydevd", types.ModuleType("pydevd"))
    reducer = GradientAllreduce(comm, 100, timeout=0.1)
    for late in (0, comm.size - 1):
        if comm.rank == late:
            time.sleep(0.2)
        assert reducer.step(np.arange(100, dtype=np.float32)).global_nnz
