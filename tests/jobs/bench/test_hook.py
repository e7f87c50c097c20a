"""The table of communication hooks, and plain top-k, which stands beside Ok-Topk's there."""

# No `from __future__ import annotations`: torch compares a hook's annotations with its classes.

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from mpi4py import MPI
from torch import nn
from torch.distributed import GradBucket
from torch.nn.parallel import DistributedDataParallel

from jobs.bench.arguments import parse
from jobs.bench.document import BenchError, read
from jobs.bench.hook import Contestant, measure_hooks
from jobs.bench.job import run
from jobs.bench.plain_topk import PlainTopK, plain_topk_hook
from jobs.bench.tables import document_tables
from jobs.train.reduce.background import start_process_group, stop_process_group

SHORT = [
    "--table",
    "hook",
    "--length",
    "3000",
    "--steps",
    "9",
    "--warmup",
    "3",
    "--set",
    "threshold_interval=8",
]
DENSITY = 0.1

pytestmark = pytest.mark.mpi


@pytest.fixture
def process_group(comm: MPI.Intracomm) -> Iterator[None]:
    start_process_group(comm, torch.device("cpu"), "gloo", "")
    yield
    stop_process_group()


@pytest.mark.usefixtures("process_group")
def test_plain_topk_applies_or_keeps_every_gradient_while_buckets_change(comm: MPI.Intracomm) -> None:
    torch.manual_seed(2)
    model = nn.Sequential(nn.Linear(20, 60), nn.ReLU(), nn.Linear(60, 60), nn.ReLU(), nn.Linear(60, 7))
    parameters = list(model.parameters())
    state = PlainTopK(DENSITY)
    layouts: list[list[int]] = []

    def hook(state: PlainTopK, bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
        layouts[-1].append(len(bucket.parameters()))
        return plain_topk_hook(state, bucket)

    ddp = DistributedDataParallel(model, bucket_cap_mb=0.002)
    ddp.register_comm_hook(state, hook)
    given, applied = (np.zeros(sum(p.numel() for p in parameters)) for _ in range(2))
    for step in range(4):
        layouts.append([])
        inputs = torch.randn(8, 20, generator=torch.Generator().manual_seed(100 * step + comm.rank))
        given += flat(torch.autograd.grad(model(inputs).square().mean(), parameters))
        model.zero_grad()
        ddp(inputs).square().mean().backward()
        update = flat(p.grad for p in parameters)
        assert 0 < np.count_nonzero(update) <= comm.size * (DENSITY * len(update) + len(layouts[-1]))
        applied += update
    assert layouts[0] != layouts[-1]
    kept = comm.allreduce(flat(state.residuals[p] for p in parameters))
    given = comm.allreduce(given)
    assert np.abs(given - kept - comm.size * applied).max() <= 1e-5 * np.abs(given).max()


def flat(pieces: Iterable[torch.Tensor | None]) -> np.ndarray:
    return torch.cat([piece.detach().reshape(-1) for piece in pieces if piece is not None]).double().numpy()


def test_a_step_with_each_hook_and_without_communication(comm: MPI.Intracomm, tmp_path: Path) -> None:
    path = Path(comm.bcast(str(tmp_path / "hook.json")))
    options = parse([*SHORT, "--json", str(path), "--quiet"], launched=True)
    assert run(options, comm) == 0
    content = comm.bcast(read(path) if comm.rank == 0 else None)
    assert content["kind"] == "hook table"
    assert "plain-topk" in document_tables(content)
    (entry,) = content["runs"]
    assert list(entry["left_out"]) == ["bf16"]
    methods = {method["name"]: method for method in entry["methods"]}
    assert list(methods) == [
        *("compute", "ddp", "plain-topk", "powersgd"),
        *("oktopk", "oktopk-model", "oktopk-mpi"),
    ]
    for method in methods.values():
        assert len(method["series"]) == 9
        assert min(method["series"]) > 0
    assert [method["carrier"] for method in entry["methods"][4:]] == ["gloo", "gloo", "MPI"]
    n, ranks = entry["length"], comm.size
    assert methods["ddp"]["bytes"] == pytest.approx(8 * n * (ranks - 1) / ranks, abs=4)
    assert methods["plain-topk"]["bytes"] == pytest.approx(8 * 0.01 * n * (ranks - 1), rel=0.02)
    assert (methods["oktopk"]["bytes"] > 0) == (ranks > 1)


@pytest.mark.mpi(min_size=2)
def test_ranks_that_end_with_different_parameters_are_refused(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Contestant, "digest", lambda one: f"{one.name} {one.name == 'ddp' and comm.rank}")
    with pytest.raises(BenchError, match="different parameters: ddp$"):
        measure_hooks(parse([*SHORT, "--quiet"], launched=True), comm)
