"""settings="auto": all ranks take what rank 0 predicts, in a bounded time, and a loaded state goes on as it was."""

from __future__ import annotations

import copy
import time
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer
from oktopk.plan import choice
from tests.oktopk.test_choice import FAST, SLOW, links

pytestmark = [pytest.mark.mpi, pytest.mark.also(ranks=4)]

LENGTH = 4000


def make(comm: MPI.Intracomm, kind: Any = torch.optim.SGD, **settings: Any) -> DistributedOptimizer:
    inner = kind([nn.Parameter(torch.zeros(LENGTH))], lr=0.1)
    return DistributedOptimizer(inner, comm, **{"density": 0.05, "ranks_per_host": 1} | settings)


def step(optimizer: DistributedOptimizer, seed: int) -> Any:
    (parameter,) = optimizer.param_groups[0]["params"]
    generator = torch.Generator().manual_seed(100 * seed + optimizer.reducer.transport.rank)
    parameter.grad = torch.randn(LENGTH, generator=generator)
    optimizer.step()
    with optimizer.agreed():
        return parameter.detach().clone()


def over(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch, rate: float, others: float) -> None:
    """Let rank 0 measure links of one rate, and the others of another."""
    mine = rate if comm.rank == 0 else others
    made = links(comm.size, 1, mine)
    monkeypatch.setattr(choice, "links_document", lambda *_, **__: made)


@pytest.mark.mpi(min_size=2)
def test_all_ranks_take_what_rank_0_predicts(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    for rate, others, wire in ((SLOW, FAST, "float32"), (FAST, SLOW, "plain")):
        over(comm, monkeypatch, rate, others)
        optimizer = make(comm, settings="auto", bucket_mb=0.008)
        assert len(set(comm.allgather(optimizer.chosen))) == 1
        assert f"settings='auto': wire={wire!r}, levels='flat'" in repr(optimizer)
        assert step(optimizer, 0).count_nonzero() and optimizer.report is not None
        assert (optimizer.report.wire, optimizer.reducer.settings.density) == (wire, 0.05)
        optimizer.close()


@pytest.mark.also(ranks=1)
def test_links_are_measured_within_their_time(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> None:
    spent: list[float] = []
    measure = choice.links_document

    def timed(*given: Any, **more: Any) -> Any:
        start = time.perf_counter()
        document = measure(*given, **more)
        spent.append(time.perf_counter() - start)
        return document

    monkeypatch.setattr(choice, "links_document", timed)
    kind, more = torch.optim.AdamW, {"every": "auto", "compute_ms": 1e6}
    optimizer = make(comm, kind, settings="auto", wire="int8", ranks_per_host=comm.size // 2 or 1, **more)
    if comm.size == 1:
        assert spent == [] and optimizer.chosen == "the defaults, as one rank has no links"
    else:
        assert max(spent) > 0 and ", measured" in optimizer.chosen
    step(optimizer, 0)
    assert optimizer.report is not None  # each step exchanges, where it computes for 1,000 s
    settings = optimizer.reducer.settings
    assert (settings.wire, optimizer.report.every, settings.density_warmup_steps) == ("int8", 1, 100)
    optimizer.close()


class Saved:
    """What an optimizer with these settings saves after a step, and what its next step gives."""

    def __init__(self, comm: MPI.Intracomm, kind: Any, **settings: Any) -> None:
        before = make(comm, kind, **settings)
        step(before, 0)
        self.state = copy.deepcopy(before.state_dict())
        self.weights = before.param_groups[0]["params"][0].detach().clone()
        self.next = step(before, 1)
        before.close()

    def goes_on_in(self, optimizer: DistributedOptimizer) -> None:
        optimizer.param_groups[0]["params"][0].detach().copy_(self.weights)
        optimizer.load_state_dict(copy.deepcopy(self.state))
        assert torch.equal(step(optimizer, 1), self.next)

    def is_refused_by(self, optimizer: DistributedOptimizer, sentence: str) -> None:
        with pytest.raises(ValueError, match=sentence):
            optimizer.load_state_dict(copy.deepcopy(self.state))
        optimizer.close()


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_the_wire_of_a_loaded_state_wins(
    comm: MPI.Intracomm, kind: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    over(comm, monkeypatch, SLOW, SLOW)
    saved = Saved(comm, kind, wire="int4")
    given = make(comm, kind, wire="plain", settings="auto")
    saved.is_refused_by(given, "state has wire 'int4', this reducer 'plain'")
    optimizer = make(comm, kind, settings="auto")
    assert optimizer.reducer.settings.wire != "int4"
    saved.goes_on_in(optimizer)
    assert optimizer.report is not None and optimizer.report.wire == "int4"
    assert optimizer.chosen.endswith("; then wire='int4', levels='flat', exchange='direct' of a loaded state")
    next(iter(saved.state["reducer"].values()))[0]["wire"] = "int3"
    saved.is_refused_by(optimizer, "wire 'int3' of the state is not one of plain, float32")


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
@pytest.mark.parametrize(
    ("saves", "chosen", "bucket_mb"), [("grid", "direct", 0.0), ("direct", "grid", 0.008)]
)
def test_the_exchange_of_a_loaded_state_wins(
    comm: MPI.Intracomm, kind: Any, saves: str, chosen: str, bucket_mb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = choice.Choice(f"exchange={chosen!r}, as a test says", {"exchange": chosen})
    monkeypatch.setattr(choice, "choose", lambda *_: made)
    bucket_mb *= kind is torch.optim.SGD  # updates have none
    more: dict[str, Any] = {"method": "oktopk", "wire": "float32", "bucket_mb": bucket_mb}
    saved = Saved(comm, kind, exchange=saves, **more)
    given = make(comm, kind, settings="auto", exchange=chosen, **more)
    saved.is_refused_by(given, f"state has exchange '{saves}', this reducer '{chosen}'")
    optimizer = make(comm, kind, settings="auto", **more)
    assert optimizer.reducer.settings.exchange == chosen
    step(optimizer, 0)
    saved.goes_on_in(optimizer)
    assert optimizer.reducer.settings.exchange == saves
    assert f"exchange={saves!r} of a loaded state" in optimizer.chosen
    part = next(iter(saved.state["reducer"].values()))[0]
    unlike = "grid" if comm.rank == 1 else "direct"
    for exchange, sentence in (("ring", "'ring' of the state is not one of direct, grid"), (unlike, "")):
        for each in part.get("buckets", {"": part}).values():
            each["exchange"] = exchange
        with pytest.raises(ValueError, match=f"exchange {sentence}".rstrip()):
            optimizer.load_state_dict(copy.deepcopy(saved.state))
    assert optimizer.reducer.settings.exchange == saves
    optimizer.close()


@pytest.mark.mpi(min_size=4)
@pytest.mark.parametrize(("saves", "measured", "bucket_mb"), [("flat", FAST, 0.0), ("hosts", SLOW, 0.008)])
def test_the_levels_of_a_loaded_state_win_before_the_first_step(
    comm: MPI.Intracomm, saves: str, measured: float, bucket_mb: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = links(comm.size // 2, 2, SLOW / measured * FAST, measured)
    monkeypatch.setattr(choice, "links_document", lambda *_, **__: made)
    more = {"ranks_per_host": 2, "bucket_mb": bucket_mb}
    saved = Saved(comm, torch.optim.SGD, levels=saves, **more)
    optimizer = make(comm, settings="auto", **more)
    assert optimizer.reducer.levels != saves
    saved.goes_on_in(optimizer)
    assert optimizer.report is not None and optimizer.report.levels == saves
    assert f"levels={saves!r}, exchange='direct' of a loaded state" in repr(optimizer)
    optimizer.close()
    other = make(comm, settings="auto", **more)
    stranger = make(comm, levels=saves, method="union", **more)
    with pytest.raises(ValueError, match="method 'union'"):
        other.load_state_dict(stranger.state_dict())
    stranger.close()
    assert other.reducer.levels != saves and "loaded" not in other.chosen
    step(other, 0)  # has a residual to lose
    saved.is_refused_by(other, r"the state is of .*redistribute")
