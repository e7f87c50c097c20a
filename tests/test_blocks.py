"""Every block of code of README and of the guide runs as it stands, alone, on several ranks.

One that follows `<!-- needs GPUs -->` runs where there are some. A block has the imports that a reader would copy. It finds what
is a reader's own: a network, batches, earlier files.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI
from sybil import Example, Sybil
from sybil.parsers.markdown import CodeBlockParser, PythonCodeBlockParser
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import oktopk
from oktopk.torch import OkTopkState, ddp_hook
from tests.conftest import NO_GPU
from tests.devices import asynchronous

pytestmark = pytest.mark.mpi(min_size=2)

ROOT = Path(__file__).resolve().parent.parent
PAGES = (
    "README.md",
    "docs/quickstart.md",
    "docs/usage.md",
    "docs/ddp.md",
    "docs/checkpoints.md",
    "docs/migrate.md",
    "docs/adamw.md",
    "docs/gpu.md",
    "docs/plan.md",
    "docs/add-a-method.md",
)
NEEDS_GPUS = "<!-- needs GPUs -->"


def changed(example: Example) -> None:
    """Run a diff as what it makes."""
    kept = (line[1:] for line in str(example.parsed).splitlines() if not line.startswith("-"))
    exec(compile("\n".join(kept), example.path, "exec"), example.namespace)


PARSERS = [PythonCodeBlockParser(doctest_optionflags=0), CodeBlockParser("diff", changed)]
BLOCKS = {
    f"{page}-{number}": example
    for page in PAGES
    for number, example in enumerate(Sybil(PARSERS).parse(ROOT / page).examples())
}


def block(name: str) -> Any:
    """The test's parameter of a block."""
    example = BLOCKS[name]
    before = example.document.text[: example.start].rstrip()
    marks = [pytest.mark.skipif(not asynchronous(), reason=NO_GPU)] if before.endswith(NEEDS_GPUS) else []
    return pytest.param(name, marks=marks)


class Network(nn.Linear):
    """Enough of one for every block, the same on all ranks."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(30, 2)


def own(comm: MPI.Intracomm, code: str) -> dict[str, Any]:
    """What a reader has: of these names those that a block uses and does not make."""
    drawn = torch.Generator().manual_seed(comm.rank)
    batches = [(torch.randn(4, 30, generator=drawn), torch.randn(4, 2, generator=drawn)) for _ in range(3)]
    names: dict[str, Any] = {"Net": Network, "loss": nn.functional.mse_loss, "my_ranks_batches": batches}
    names |= {
        "x": batches[0][0],
        "y": batches[0][1],
        "learning_rate": 0.1,
        "replicas": comm.size,
        "shards": 1,
    }
    names |= {"gradient": np.ones(50, np.float32), "parameters": np.zeros(50, np.float32)}
    names |= {"folder": "checkpoint", "ranks_that_saved": comm.size, "replicas_that_saved": comm.size}
    names |= {"local_rank": comm.rank, "mine": batches[0][0].new_ones(1 << 18)}
    if ("optimizer." in code and "optimizer =" not in code) or "scaler" in code:
        names["model"] = Network()
        sgd = torch.optim.SGD(names["model"].parameters(), lr=0.1)
        names["optimizer"] = oktopk.DistributedOptimizer(sgd, comm=comm, density=0.1)
        nn.functional.mse_loss(names["model"](names["x"]), names["y"]).backward()
        names["optimizer"].step()
        torch.save(names["optimizer"].state_dict(), f"optimizer-{comm.rank}.pt")
        names["scaler"] = torch.amp.GradScaler("cpu")
    if "ddp." in code and "ddp =" not in code:
        dist.init_process_group("gloo")
        names["ddp"], names["state"] = DistributedDataParallel(Network()), OkTopkState(density=0.1)
        names["ddp"].register_comm_hook(names["state"], ddp_hook)
        nn.functional.mse_loss(names["ddp"](names["x"]), names["y"]).backward()
    comm.Barrier()
    return names


@pytest.fixture
def under_torchrun(comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What torchrun tells a rank; its process group ends with the test."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = comm.bcast(free.getsockname()[1])
    told = {"RANK": comm.rank, "LOCAL_RANK": comm.rank, "WORLD_SIZE": comm.size}
    for name, value in {**told, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}.items():
        monkeypatch.setenv(name, str(value))
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_every_page_with_blocks_is_among_these() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").rglob("*.md")]
    with_blocks = [
        str(page.relative_to(ROOT))
        for page in pages
        if re.search("^```(python|diff)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    ]
    assert sorted(with_blocks) == sorted(PAGES)


@pytest.mark.parametrize("name", [block(name) for name in BLOCKS])
def test_a_block_of_code_runs_alone(
    comm: MPI.Intracomm,
    name: str,
    tmp_path_factory: pytest.TempPathFactory,
    under_torchrun: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    example = BLOCKS[name]
    monkeypatch.chdir(comm.bcast(tmp_path_factory.mktemp("block")))
    names = example.namespace
    names.clear()
    names |= own(comm, str(example.parsed))
    if "from mine import" in str(example.parsed):  # the page's first block
        if comm.rank == 0:
            Path("mine.py").write_text(str(BLOCKS["docs/add-a-method.md-0"].parsed), encoding="utf-8")
        monkeypatch.syspath_prepend(Path.cwd())
        monkeypatch.setitem(oktopk.METHODS, "randomk", oktopk.METHODS["topka"])  # taken away again
        comm.Barrier()
    example.evaluate()
    if "my_ranks_batches" in str(example.parsed):
        (model,) = (names[name] for name in ("model", "ddp") if name in names)
        with getattr(names.get("optimizer"), "agreed", nullcontext)():  # it sends updates
            weight: Any = next(iter(model.parameters())).detach()
            weight = weight.full_tensor() if isinstance(weight, DTensor) else weight
            assert len({*comm.allgather(weight.numpy().tobytes())}) == 1
            assert not torch.equal(weight, Network().weight)
    for value in list(names.values()):
        if hasattr(value, "close") and not isinstance(value, type):
            value.close()
    names.clear()
