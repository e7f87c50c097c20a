"""The bench where it meets a GPU and torch.distributed, on several ranks; and its refusal where there is neither."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from mpi4py import MPI

from jobs.bench.device import Device, DrawnGradients
from jobs.bench.document import BenchError, read
from jobs.bench.libraries import torch_problem
from jobs.bench.run import contestant, measure_run, open_device, run_all, takes_part
from jobs.bench.run import main as run
from tests.devices import gpus
from tests.jobs.bench.test_gpu_table import script

TINY = (script.Cell(300_000, 0.01, 8, 16),)
on_a_gpu = pytest.mark.skipif(not gpus(), reason="no GPU")
without_gpus = pytest.mark.skipif(gpus() > 0, reason="there is a GPU")


@without_gpus
@pytest.mark.mpi
def test_without_a_gpu_every_rank_leaves_with_one_sentence(
    comm: MPI.Intracomm, capfd: pytest.CaptureFixture[str]
) -> None:
    for main, words in ((run, ["--device", "cuda", "--methods", "oktopk"]), (script.main, [])):
        assert main(words, comm) == 2
        said = capfd.readouterr().err
        assert (": --device cuda cannot be used: " in said) == (comm.rank == 0)
        assert said.count("\n") == (comm.rank == 0)


@without_gpus
@pytest.mark.mpi
def test_without_cuda_every_rank_refuses_nccl(comm: MPI.Intracomm) -> None:
    assert "NCCL's rows need a torch with CUDA" in torch_problem()
    with pytest.raises(BenchError, match="NCCL's rows need a torch with CUDA"):
        takes_part([contestant("nccl")], Device(), comm)


@on_a_gpu
@pytest.mark.mpi
@pytest.mark.timeout(300)
def test_a_tiny_table_on_gpus(comm: MPI.Intracomm, tmp_path: Path) -> None:
    path = comm.bcast(tmp_path) / "table.json"
    cells = script.cells(["--quiet", "--json", str(path)], TINY)
    todo = [partial(measure_run, own, comm) for own in cells]
    assert run_all(lambda: ("gpu table", todo), cells[0], comm) == 0
    if comm.rank:
        return
    found = read(path)
    assert [run["gradient_type"] for run in found["runs"]] == ["float32", "bfloat16"]
    for entry in found["runs"]:
        names = [method["name"] for method in entry["methods"]]
        assert {"oktopk", "oktopk-mpi"} <= set(names)
        assert ("nccl" in names) == (entry["ranks_per_device"] == 1)
        for method in entry["methods"]:
            assert method["agreed"], method["name"]
            assert method["seconds"]["all"]["steps"] == 16
        ours = entry["methods"][names.index("oktopk")]
        assert ours["words"]["mean"] <= entry["bounds"]["upper"]
    assert found["format"] == "oktopk bench 1"


def _host(array: Any) -> np.ndarray:
    return np.asarray(array.get())


@on_a_gpu
@pytest.mark.mpi
def test_gradients_on_gpus_are_the_hosts_to_rounding(comm: MPI.Intracomm) -> None:
    device = open_device("cuda", "float32", comm)
    for name in ("iid", "heavy", "clustered"):
        host = DrawnGradients(name, 10_001, comm.rank, seed=5)
        drawn = device.source(name, 10_001, comm.rank, 5)
        for _ in range(3):
            expected = host.next()
            np.testing.assert_allclose(_host(drawn.next()), expected, rtol=1e-5, atol=1e-5)


@on_a_gpu
@pytest.mark.mpi
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "float16"])
def test_a_gradient_is_placed_as_its_type(comm: MPI.Intracomm, kind: str) -> None:
    device = open_device("cuda", kind, comm)
    gradient = np.random.default_rng(comm.rank).standard_normal(5000).astype(np.float32)
    found = _host(device.to_device(gradient))
    if kind == "bfloat16":
        bits = gradient.view(np.uint32)
        expected = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    else:
        expected = gradient.astype(kind)
    assert found.tobytes() == expected.tobytes()
    placed = device.to_device(gradient)
    same = device.digest(placed)
    assert device.digest(placed.copy()) == same
    placed[[0, 4999]] = placed[[4999, 0]]
    assert device.digest(placed) != same


@on_a_gpu
@pytest.mark.mpi
@pytest.mark.parametrize(
    ("method", "kind"), [("nccl", "float32"), ("nccl-bf16", "bfloat16"), ("nccl-bf16", "float32")]
)
def test_nccl_averages_what_was_loaded(comm: MPI.Intracomm, method: str, kind: str) -> None:
    from jobs.bench.libraries import NcclAllreduce, leave_nccl

    device = open_device("cuda", kind, comm)
    if comm.allreduce(device.sharers, MPI.MAX) > 1 or any(comm.allgather(torch_problem())):
        pytest.skip("NCCL takes one rank per GPU, and a torch with CUDA")
    reducer = NcclAllreduce(comm, 1000, method)
    gradient = device.to_device(np.arange(1000, dtype=np.float32) % 64 + comm.rank)
    given = reducer.load(gradient)
    report = reducer.step(given)
    device.finish()
    found = _host(reducer.update)
    if method == "nccl-bf16":
        found = (found.astype(np.uint32) << 16).view(np.float32)
    np.testing.assert_allclose(found, np.arange(1000) % 64 + (comm.size - 1) / 2, rtol=2**-8)
    assert (report.k, report.method) == (1000, method)
    reducer.close()
    leave_nccl()
