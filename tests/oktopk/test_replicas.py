"""Replicas: a host's ranks step on their mean gradient, and exchange what changed, one shard each.

Hosts are made of consecutive ranks by `ranks_per_host`: 2 + 2 or 3 + 1 of 4 ranks, 2 + 2 + 1 or 3 + 2 of 5.
"""

from __future__ import annotations

import copy
import math
import pickle
from collections import Counter
from contextlib import nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from mpi4py import MPI
from numpy.typing import NDArray
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.nn.parallel import DistributedDataParallel

from collectives.traffic import Traffic, step_limit
from oktopk import DistributedOptimizer, levels
from oktopk.elastic import inherited_ranks, of_rank, redistribute
from oktopk.levels import Layout
from oktopk.torch import local_step
from oktopk.torch.updates import optimizer as updates
from oktopk.torch.updates.shared_moments import SLICES
from tests import oracle
from tests.replicas import ADAMW, SGD, Replicas
from tests.training import flat, gradients, network, steady, train
from tests.updates import (
    go_on_behind_the_first_exchanges,
    moments,
    on_shard,
    own,
    reference,
    references,
)

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.also(ranks=4),
    pytest.mark.also(ranks=5),
    pytest.mark.also(ranks=6),
]


@pytest.fixture(autouse=True)
def short_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "BLOCK", 64)


def wrap(model: nn.Module, comm: Any, per_host: int = 2, **settings: Any) -> Any:
    return Replicas(comm, per_host).wrap(model, **settings)


def check_agreed(model: nn.Module, optimizer: Any, comm: MPI.Intracomm) -> None:
    Replicas(comm, 2).check_agreed(model, optimizer)


def count(transport: Any, sent: list[Traffic], patch: pytest.MonkeyPatch) -> None:
    """Append to `sent` what the transport sends from now on: what reports take, and objects."""
    take, gather = transport.take_traffic, transport.allgather_objects

    def taken() -> Traffic:
        sent.append(take())
        return sent[-1]

    def gathered(value: Any) -> list[Any]:
        nbytes = (transport.size - 1) * len(pickle.dumps(value))
        sent.append(Traffic(control_bytes=nbytes, control_messages=1))
        objects: list[Any] = gather(value)
        return objects

    patch.setattr(transport, "take_traffic", taken)
    patch.setattr(transport, "allgather_objects", gathered)


class Oracle:
    """Replicas on float64 vectors, of w that minimises |x w - y|^2 over the batch (x, y) of each rank: one step an exchange."""

    def __init__(self, start: NDArray[np.float32], hosts: list[int], adam: bool) -> None:
        sizes = Counter(hosts)
        self.hosts, self.adam = hosts, adam
        self.ranks = np.array([sizes[host] for host in range(len(sizes))], np.float64)[:, None]
        self.weights = self.ranks / len(hosts)
        self.replicas = 1 / float((self.weights**2).sum())
        self.reference = start.astype(np.float64)
        self.held = np.repeat(self.reference[None], len(sizes), axis=0)
        self.residual, self.first, self.second = (np.zeros_like(self.held) for _ in range(3))
        layout, places = Layout(tuple(hosts), len(start)), np.arange(len(start), dtype=np.float32)
        shards = [layout.extract(places, shard) for shard in range(layout.shards)]
        self.order = np.concatenate(shards).astype(np.int64)  # in which ties are shared out
        most = local_step.most_share(1 / (self.weights[:, 0] ** 2).sum())
        self.share = np.minimum(self.weights, most if adam and len(sizes) > 1 else 1)
        self.squares = np.zeros(2)
        self.steps = 0

    @property
    def ratio(self) -> float:
        return float(self.squares[0] / self.squares[1])

    def gradients(self, batches: list[tuple[Any, Any]]) -> NDArray[np.float64]:
        """float64[H, n], the mean of each host."""
        total = np.zeros_like(self.held)
        for host, (x, y) in zip(self.hosts, batches, strict=True):
            total[host] += 2 / len(y) * x.T @ (x @ self.held[host] - y)
        return total / self.ranks

    def moved(self, gradient: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the hosts' optimizers take off their parameters."""
        self.steps += 1
        if not self.adam:
            self.first = 0.9 * self.first + gradient
            return 0.05 * self.first
        scale = 1.0
        if self.squares[1]:
            scale = 1 / math.sqrt(min(max(self.ratio, 1 / len(self.ranks)), 1))
        one, other = 0.8 if self.replicas == 1 else 0.8**7, 0.5 ** (1 / self.replicas)
        self.first = one * self.first + (1 - one) * gradient
        self.second = other * self.second + (1 - other) * gradient**2
        root = np.sqrt(self.second / (1 - other**self.steps)) + 20
        return 0.05 * scale * self.first / (1 - one**self.steps) / root

    def step(self, batches: list[tuple[Any, Any]], k: int) -> None:
        gradient, order = self.gradients(batches), self.order
        moved = self.ranks * self.moved(gradient)
        found = oracle.ok_topk(moved[:, order], self.residual[:, order], k)
        self.residual[:, order] = found.residuals
        self.reference[order] -= found.update / len(self.hosts)
        self.reference *= 1 - 0.05 * 0.1 if self.adam else 1
        if self.adam and len(self.ranks) > 1:
            self.residual *= ((self.steps + 28) / (self.steps + 29)) ** 2
        self.held = self.reference - self.share / self.ranks * self.residual
        mean = (self.weights * gradient).sum(axis=0)
        new = np.array([(mean**2).sum(), (self.weights * gradient**2).sum()])
        self.squares = new if self.steps == 1 else 0.8 * self.squares + 0.2 * new

    def take_averaged(self, second: NDArray[np.float32]) -> None:
        """Take the averaged second moments of this step's slice, which are the mean to the rounding of 8 bits."""
        size = -(-len(second) // SLICES)
        here = slice(self.steps * size, (self.steps + 1) * size)
        assert np.allclose(second[here], (self.weights * self.second[:, here]).sum(axis=0), rtol=0.05)
        self.second[:, here] = second[here]


@pytest.mark.parametrize(
    ("per_host", "kind"),
    [(1, torch.optim.AdamW), (2, torch.optim.AdamW), (2, torch.optim.SGD), (3, torch.optim.AdamW)],
)
def test_steps_of_replicas_are_the_oracles(
    comm: MPI.Intracomm, per_host: int, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A host counts by its ranks; betas, the rate and the share are those of so many replicas."""
    monkeypatch.setattr(local_step, "LEAST_BETA2", 0.0)
    rng = np.random.default_rng(6)  # with 5, two entries on four ranks differ by rounding alone
    start = rng.standard_normal(500).astype(np.float32)
    model = nn.Linear(500, 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.from_numpy(start)[None])
    adam = kind is torch.optim.AdamW
    # a large eps: else all elements move alike, and the largest are a matter of rounding; a small beta2, so that what replicas
    # make of it shows
    inner = kind(
        model.parameters(), **(ADAMW | {"lr": 0.05, "eps": 20, "betas": (0.8, 0.5)} if adam else SGD)
    )
    settings: dict[str, Any] = {"ranks_per_host": per_host, "density": 0.1, "threshold_interval": 1}
    optimizer = steady(inner, comm, "oktopk", sends="updates", replica="host", **settings)
    expected = Oracle(start, optimizer.hosts, adam)
    for _ in range(6):
        same = rng.standard_normal((9, 500))  # in all batches, so that the ratio is not that of noise alone
        batches = [
            (same + 0.5 * rng.standard_normal((9, 500)), rng.standard_normal(9)) for _ in range(comm.size)
        ]
        x, y = (torch.from_numpy(each).float() for each in batches[comm.rank])
        optimizer.zero_grad()
        (model(x)[:, 0] - y).square().mean().backward()
        optimizer.step()
        expected.step(batches, optimizer.report.k)
        if adam and len(expected.ranks) > local_step.SHARED_BY:  # ranks, which step on all parameters
            expected.take_averaged(inner.state[model.weight]["exp_avg_sq"][0].numpy())
        assert np.allclose(reference(optimizer), expected.reference, rtol=1e-5, atol=2e-5)
        assert np.allclose(flat(model), expected.held[optimizer.hosts[comm.rank]], rtol=1e-5, atol=2e-5)
    assert np.abs(expected.reference - start).max() > 0.05
    hosts = len(expected.ranks)
    assert hosts == 1 or not adam or 1 / hosts + 0.05 < expected.ratio < 0.95
    assert optimizer.replica == "host" and "replica='host'" in repr(optimizer)
    assert optimizer.local_share == pytest.approx(expected.share[optimizer.hosts[comm.rank], 0])
    assert (optimizer.report.levels, optimizer.report.replicas) == ("hosts", hosts)


def test_states_that_part_inside_a_host_part_no_references(comm: MPI.Intracomm) -> None:
    """Each shard's displacement is its holder's alone."""
    model = network()
    optimizer = wrap(model, comm, kind="sgd")
    for step in range(5):
        train(model, optimizer, comm.rank, range(step, step + 1))
        for state in optimizer.state.values():
            state["momentum_buffer"].add_(1e-3 * comm.rank)
        check_agreed(model, optimizer, comm)


@pytest.mark.mpi(min_size=3)
def test_a_host_sends_what_one_rank_would(comm: MPI.Intracomm) -> None:
    """Between hosts: within the caps of so many hosts, whatever the ranks of each, and nothing between exchanges."""
    model = network()
    optimizer = wrap(model, comm, kind="sgd", every=2)  # which measures no ratio
    hosts = np.array(optimizer.hosts)
    between = np.zeros(max(hosts) + 1)
    for window in range(8):
        train(model, optimizer, comm.rank, range(2 * window, 2 * window + 1))
        sent = optimizer.reducer.take_traffic()
        assert (
            comm.allreduce(sent.bytes) == 0 < comm.allreduce(sent.control_bytes)
        )  # means are read, not sent
        train(model, optimizer, comm.rank, range(2 * window + 1, 2 * window + 2))
        mine = np.bincount(hosts, comm.allgather(optimizer.report.bytes_between))
        assert np.mean(mine) <= 4 * step_limit(optimizer.report.k, len(mine))
        between += mine
    assert between.all()


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("per_host", [1, 2])
def test_what_adamw_sends_to_other_hosts_beside_updates_is_bounded(
    comm: MPI.Intracomm, per_host: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three int64 to each rank with the same shard; in one exchange of ten a sample and moments."""
    monkeypatch.setattr(updates, "SHARED_BY", 1)  # so that second moments are averaged
    for width in (30, 900):
        torch.manual_seed(5)
        model = nn.Sequential(nn.Linear(20, width), nn.Linear(width, 7))
        optimizer = wrap(model, comm, per_host)
        train(model, optimizer, comm.rank, range(1))  # in which ranks set up the method together
        go_on_behind_the_first_exchanges(optimizer)
        length, group, sent = optimizer.length, optimizer.reducer.group, list[Traffic]()
        peers = 0 if group.between is None else group.between.size - 1
        for transport in (optimizer.reducer.transport, group.between):
            if transport is not None:
                count(transport, sent, monkeypatch)
        for exchange in range(20, 25):
            sent.clear()
            train(model, optimizer, comm.rank, range(exchange, exchange + 1))
            total, measured = sum(sent, Traffic()), exchange == 20
            assert total.bytes_between == optimizer.report.bytes_between
            payload = np.mean(np.bincount(optimizer.hosts, comm.allgather(total.bytes_between)))
            sample = math.ceil(length / max(1, length // 4096)) + 2
            most = 4 * step_limit(optimizer.report.k, max(optimizer.hosts) + 1)
            assert 0 < payload <= most + 8 * sample * measured
            assert total.control_messages <= (1 + 2 * measured) * bool(peers)
            # moments: two numbers before entries, then two and those of the parameters' ranks
            assert total.control_bytes <= 8 * peers * (3 + (2 + 2 + 4) * measured)


@pytest.mark.mpi(min_size=3)
def test_one_rank_of_each_host_measures_the_ratio(comm: MPI.Intracomm) -> None:
    """In an exchange of nothing else, as gradients are zero."""
    model = network()
    optimizer = wrap(model, comm)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    assert own(optimizer)["ratio"]["measured"] == 1
    sends = comm.allgather(optimizer.report.bytes > 2 * optimizer.length)
    assert sends == [rank % 2 == 0 for rank in range(comm.size)]


def test_gradients_that_are_summed_already_are_those_of_a_host(comm: MPI.Intracomm) -> None:
    vectors = []
    for replica in ("host", "summed"):
        model = network()
        optimizer = wrap(model, comm, 2, replica=replica, every=2)
        group = optimizer.reducer.group
        train(model, optimizer, optimizer.hosts[comm.rank], range(8))
        check_agreed(model, optimizer, comm)
        vectors.append(flat(model).tobytes())
        optimizer.reducer.take_traffic()
        train(model, optimizer, optimizer.hosts[comm.rank], range(8, 9))  # without an exchange
        sent = group.host.allgather_objects(optimizer.reducer.take_traffic().control_messages)
        assert any(sent) == (replica == "host" and group.host.size > 1)
    assert vectors[0] == vectors[1]
    unlike = "replica='summed' needs equal gradients on the ranks of a host"
    with pytest.raises(ValueError, match=unlike) if comm.size > 1 else nullcontext():
        train(model, optimizer, comm.rank, range(9, 11))


def test_ddp_over_a_hosts_ranks_trains_as_a_host(
    comm: MPI.Intracomm, group: Any, recwarn: pytest.WarningsRecorder
) -> None:
    hosts = [range(first, min(first + 2, comm.size)) for first in range(0, comm.size, 2)]
    groups = [torch.distributed.new_group(list(ranks)) for ranks in hosts]
    held = []
    for replica in ("host", "summed"):
        model = network()
        optimizer = wrap(model, comm, replica=replica)
        trained: nn.Module = model
        if replica == "summed":
            trained = DistributedDataParallel(model, process_group=groups[comm.rank // 2])
        for step in range(5):
            gradients(trained, optimizer, comm.rank, step)
            optimizer.step()
            check_agreed(model, optimizer, comm)
        held.append(flat(model))
        optimizer.close()
    assert np.allclose(held[0], held[1], rtol=0, atol=1e-6)
    assert not [w for w in recwarn if "DistributedDataParallel" in str(w.message)]


@pytest.mark.mpi(min_size=3)
@pytest.mark.parametrize("settings", [{}, {"replica": "summed", "every": 2}], ids=str)
def test_a_ddp_over_several_hosts_is_refused(
    comm: MPI.Intracomm, group: Any, settings: dict[str, Any], recwarn: pytest.WarningsRecorder
) -> None:
    model = network()
    optimizer = wrap(model, comm, **settings)
    start, ddp = flat(model).copy(), DistributedDataParallel(model)
    for _ in range(2):  # it stays refused
        with pytest.raises(ValueError) as raised:
            train(ddp, optimizer, comm.rank, range(settings.get("every", 1)))
        sentence = (
            f"all ranks: a DistributedDataParallel reduces gradients over {comm.size} ranks, of several hosts"
        )
        assert str(raised.value).startswith(sentence)
        assert len(set(comm.allgather(str(raised.value)))) == 1
        assert not optimizer.state and np.array_equal(flat(model), start)
    ddp.register_comm_hook(None, noop_hook)
    rank = optimizer.hosts[comm.rank] if optimizer.replica == "summed" else comm.rank
    train(ddp, optimizer, rank, range(4))
    check_agreed(model, optimizer, comm)
    assert not np.array_equal(flat(model), start)
    assert not [w for w in recwarn if "DistributedDataParallel" in str(w.message)]


def test_a_gradient_of_any_rank_counts_for_its_host(comm: MPI.Intracomm) -> None:
    model = network()
    optimizer = wrap(model, comm, density=0.2)
    group = optimizer.reducer.group
    for step in range(4):
        gradients(model, optimizer, comm.rank, step)
        if group.host.rank:
            model[3].bias.grad = None
        if optimizer.hosts[comm.rank]:
            model[3].weight.grad = None
        optimizer.step()
        check_agreed(model, optimizer, comm)
        assert (model[3].weight.grad is None) == (optimizer.hosts[comm.rank] > 0)
        assert model[3].bias.grad is not None


def to_come(states: list[dict[str, Any]], hosts: list[int] | None) -> NDArray[np.float64]:
    """float64[n], by how much the reference is still to move."""
    parts = [of_rank(state["reducer"])["residual"].numpy().astype(np.float64) for state in states]
    if hosts is None:
        return np.mean(parts, axis=0)
    layout, total = Layout(tuple(hosts), 907), np.zeros(907)
    for rank, part in enumerate(parts):
        whole, shard = np.zeros(907), layout.shard_of(rank)
        if shard is not None:
            layout.insert(part, shard, whole)
        total += whole
    return total / len(hosts)


RANKS: dict[str, Any] = {"replica": "rank"}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (RANKS, {"per_host": 2}),
        ({"per_host": 2}, {"per_host": 3}),
        ({"per_host": 3}, RANKS),
        *(
            pytest.param({"per_host": 2}, other, marks=pytest.mark.mpi(min_size=3))
            for other in (RANKS, {"per_host": 3, "every": 2})
        ),
    ],
    ids=str,
)
def test_states_move_between_ranks_and_hosts_and_nothing_is_lost(
    comm: MPI.Intracomm, one: dict[str, Any], other: dict[str, Any]
) -> None:
    """Moments become the mean of those that a replica inherits, whatever each rank has of them before and afterwards."""
    model, moved = network(), network(3)
    optimizer = wrap(model, comm, **one)
    train(model, optimizer, comm.rank, range(5))
    states = comm.allgather(copy.deepcopy(optimizer.state_dict()))
    expected = to_come(states, optimizer.hosts)
    assert expected.any() or comm.size == 1
    every = dict(zip(optimizer.hosts or range(comm.size), comm.allgather(moments(optimizer)), strict=True))
    with optimizer.agreed():
        weights = copy.deepcopy(model.state_dict())
    loaded = wrap(moved, comm, **other)
    moved.load_state_dict(weights)
    refused, saved = "", optimizer.replica
    if (optimizer.hosts is None) != (loaded.hosts is None):
        refused = f"the state is of replica='{saved}'.*pass replica='{saved}'"
    elif optimizer.hosts != loaded.hosts:
        refused = r"on hosts \[.*redistribute with hosts=optimizer.hosts"
    if refused:
        with pytest.raises(ValueError, match=refused):
            loaded.load_state_dict(copy.deepcopy(states[comm.rank]))
    state = redistribute(states.__getitem__, comm.size, comm.rank, comm.size, loaded.hosts)
    assert np.allclose(to_come(comm.allgather(state), loaded.hosts), expected, atol=1e-7)
    loaded.load_state_dict(state)
    assert torch.equal(reference(loaded), reference(optimizer))
    now = loaded.hosts or range(comm.size)
    inherited = inherited_ranks(now[comm.rank], max(now) + 1, len(every)) or range(len(every))
    mean = torch.stack([every[replica] for replica in inherited]).mean(dim=0)
    assert torch.allclose(moments(loaded), mean, rtol=1e-5, atol=1e-8) and mean.any()
    assert on_shard(loaded) or loaded.state[moved[0].weight]["exp_avg"].shape == (30, 20)
    train(moved, loaded, comm.rank, range(5, 7))
    assert len(set(references(loaded, comm))) == 1


def test_a_dense_warm_up_and_measures_work_between_replicas(comm: MPI.Intracomm) -> None:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(50, 20), nn.Linear(20, 30), nn.Linear(30, 4))
    inner = torch.optim.SGD(model.parameters(), lr=0.05)
    settings: dict[str, Any] = {"density": 0.1, "ranks_per_host": 2, "dense_warmup_steps": 2}
    optimizer = DistributedOptimizer(inner, comm, sends="updates", replica="host", **settings)
    for step in range(5):
        optimizer.zero_grad()
        model(torch.arange(5) + 5 * step + comm.rank).square().mean().backward()
        optimizer.step(measure=step == 3)
        assert optimizer.report.method == ("dense" if step < 2 else "oktopk")
        assert (optimizer.report.measures is not None) == (step == 3)
        check_agreed(model, optimizer, comm)
        assert optimizer.reducer.gathered_residual().any() == (step >= 2 and comm.rank in (0, 2, 4, 6))


@pytest.mark.parametrize(
    ("settings", "replica"),
    [
        ({}, "host"),
        ({"levels": "auto"}, "host"),
        ({"levels": "flat"}, "rank"),
        ({"method": "topka"}, "rank"),
        ({"method": "union"}, "host"),
        ({"replica": "rank"}, "rank"),
    ],
    ids=str,
)
def test_several_hosts_of_several_ranks_are_replicas_by_default(
    comm: MPI.Intracomm, settings: dict[str, Any], replica: str
) -> None:
    optimizer = wrap(network(), comm, 2, **{"replica": "auto"} | settings)
    several = min(Counter(optimizer.reducer.transport.hosts).values()) > 1 and comm.size > 2
    assert optimizer.replica == (replica if several else "rank")
    assert f"replica={optimizer.replica!r}" in repr(optimizer)
