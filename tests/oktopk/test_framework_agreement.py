"""What the frameworks' lines have in common, without a framework: when parameters are what all ranks agree on."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

from oktopk import DistributedOptimizer
from oktopk.frameworks.agreement import Agreement

pytestmark = pytest.mark.mpi(min_size=2)


def parts(comm: MPI.Intracomm, model: nn.Module) -> bool:
    """Whether the ranks' parameters differ."""
    return len(set(comm.allgather(b"".join(p.detach().numpy().tobytes() for p in model.parameters())))) > 1


def watched(comm: MPI.Intracomm, *beside: nn.Module) -> tuple[nn.Module, DistributedOptimizer, Agreement]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(12, 24), nn.Linear(24, 1))
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    optimizer = DistributedOptimizer(inner, comm, density=0.05, density_warmup_steps=0)
    agreement = Agreement([optimizer])
    agreement.watch(model, *beside)
    train(comm, model, optimizer)
    assert parts(comm, model)
    return model, optimizer, agreement


def train(comm: MPI.Intracomm, model: nn.Module, optimizer: DistributedOptimizer, steps: int = 3) -> None:
    model.train()
    for step in range(steps):
        drawn = torch.Generator().manual_seed(comm.size * step + comm.rank)
        optimizer.zero_grad()
        model(torch.randn(8, 12, generator=drawn)).square().mean().backward()
        optimizer.step()


def evaluate(model: nn.Module) -> None:
    model.eval()
    with torch.no_grad():
        model(torch.zeros(1, 12))


def test_passes_that_evaluate_enter_and_others_leave(comm: MPI.Intracomm) -> None:
    model, optimizer, _ = watched(comm)
    own = [p.detach().clone() for p in model.parameters()]
    for _ in range(3):
        evaluate(model)
    assert not parts(comm, model)
    model.train()
    model(torch.zeros(1, 12))
    assert all(torch.equal(p, kept) for p, kept in zip(model.parameters(), own, strict=True))
    model.state_dict()
    assert not parts(comm, model)
    train(comm, model, optimizer)
    assert parts(comm, model)


def test_after_training_they_stay_where_nothing_refers_to_the_optimizer(comm: MPI.Intracomm) -> None:
    model, optimizer, agreement = watched(comm)
    agreement.end()
    assert not parts(comm, model)
    del optimizer, agreement
    gc.collect()
    assert not parts(comm, model)


def test_agreed_that_a_user_enters_holds_until_it_is_left(comm: MPI.Intracomm) -> None:
    model, optimizer, _ = watched(comm)
    evaluate(model)  # the agreement enters before the user
    with optimizer.agreed():
        model.train()
        model(torch.zeros(1, 12))
        assert not parts(comm, model)
        with optimizer.agreed():
            pass
        assert not parts(comm, model)
    assert parts(comm, model)
    train(comm, model, optimizer)


def test_what_is_held_outlasts_passes_that_compute_gradients(comm: MPI.Intracomm) -> None:
    model, optimizer, agreement = watched(comm)
    evaluate(model)
    agreement.hold()
    model.eval()
    model(torch.zeros(1, 12))
    assert not parts(comm, model)
    agreement.leave()
    assert parts(comm, model)
    agreement.hold()
    train(comm, model, optimizer)  # a step leaves


def test_a_model_that_is_not_trained_enters_nothing(comm: MPI.Intracomm) -> None:
    teacher = nn.Linear(12, 1)
    model, optimizer, _ = watched(comm, teacher)
    model.train()
    loss = model(torch.ones(1, 12)).sum()
    evaluate(teacher)
    loss.backward()
    assert parts(comm, model)
    optimizer.step()


@pytest.mark.parametrize("damage", ["no folder", "not a file of torch"])
def test_a_checkpoint_one_rank_cannot_read_fails_on_all(
    comm: MPI.Intracomm, tmp_path: Path, damage: str
) -> None:
    _, _, agreement = watched(comm)
    folder = tmp_path / "saved"  # of this rank: hosts have their own
    agreement.save(str(folder))
    own: Any = folder
    if comm.rank == comm.size - 1:
        if damage == "no folder":
            own = tmp_path / "elsewhere"
        else:
            for name in (0, comm.rank):
                (folder / f"oktopk-{name}.pt").write_bytes(b"no")
    what = "there is no folder" if damage == "no folder" else "cannot be read"
    with pytest.raises(ValueError, match=rf"^rank {comm.size - 1}: .*{what}"):
        agreement.expect_from(str(own))
