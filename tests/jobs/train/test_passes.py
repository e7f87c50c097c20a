"""Passes that are replayed do what passes that Python asks for do, and leave no trace of their capture."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from mpi4py import MPI
from torch import nn

from data.text.loader import TextBatch
from jobs.config.sections import OptimizerConfig
from jobs.report.summary import Run, read_runs
from jobs.train.__main__ import main
from jobs.train.optimizers import build_optimizer
from jobs.train.passes import CapturedPasses, EagerPasses, Passes
from jobs.train.reduce.baselines import EAGER_STEPS, DdpTraining
from jobs.train.reduce.process_group import start_process_group, stop_process_group
from jobs.train.tasks.task import autocast
from models.bert import BERT
from models.vgg import VGG16
from oktopk import DistributedOptimizer
from tests.devices import gpus, use
from tests.jobs.train.conftest import Words

DIGITS = Path(__file__).parents[3] / "jobs" / "configs" / "digits.toml"
needs_gpu = pytest.mark.skipif(not gpus(), reason="no GPU")


class Images:
    """A network with batch norm, as a workload has it."""

    def __init__(self, precision: str) -> None:
        torch.manual_seed(3)
        self.precision = precision
        self.model = VGG16(width=0.125).cuda()
        self.network: nn.Module = self.model
        self.steps_per_epoch = 1

    def loss(self, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        with autocast(self.precision, torch.device("cuda")):
            logits = self.network(batch[0])
        return nn.functional.cross_entropy(logits.float(), batch[1])

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        drawn = torch.Generator().manual_seed(step)
        images = torch.randn(8, 3, 32, 32, generator=drawn)
        return images.cuda(), torch.randint(0, 10, (8,), generator=drawn).cuda()


class Text:
    """A network with dropout, as a workload has it; some sequences are padded."""

    def __init__(self, precision: str) -> None:
        torch.manual_seed(3)
        self.precision = precision
        self.model = BERT(100, layers=2, hidden=64).cuda()
        self.network: nn.Module = self.model
        self.steps_per_epoch = 1

    def loss(self, batch: tuple[torch.Tensor, ...]) -> torch.Tensor:
        text = TextBatch(*batch)
        with autocast(self.precision, torch.device("cuda")):
            words, follows = self.network(text.tokens, text.segments, text.present, text.places)
        masked = nn.functional.cross_entropy(words.flatten(0, 1).float(), text.labels.flatten())
        return masked + nn.functional.cross_entropy(follows.float(), text.follows)

    def batch(self, step: int) -> TextBatch:
        drawn = torch.Generator().manual_seed(step)
        tokens = torch.randint(5, 100, (4, 16), generator=drawn)
        present = torch.arange(16) < torch.randint(8, 17, (4, 1), generator=drawn)
        places = torch.randint(0, 8, (4, 3), generator=drawn)
        labels, follows = tokens.gather(1, places), torch.randint(0, 2, (4,), generator=drawn)
        whole = TextBatch(tokens, torch.zeros_like(tokens), present, places, labels, follows)
        return TextBatch(*(tensor.cuda() for tensor in whole))


@pytest.fixture
def alike() -> Iterator[None]:
    """The same bits from run to run, so that two ways can be compared by them."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.backends.cudnn.benchmark = False
    yield
    torch.use_deterministic_algorithms(False)
    stop_process_group()  # of a run that was stopped, or failed


@needs_gpu
def test_a_loss_is_kept_over_later_batches() -> None:
    workload = Images("float32")
    passes = CapturedPasses(workload, torch.tensor(1.0, device="cuda"))
    first = passes.forward(workload.batch(0))
    before = float(first)
    passes.backward()
    second = passes.forward(workload.batch(1))
    assert float(first) == before != float(second)
    passes.close()


@needs_gpu
@pytest.mark.mpi
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize(("gradient_type", "peer_memory"), [("", True), ("", False), ("bfloat16", True)])
def test_buckets_of_a_replay_are_the_eager_ones(
    comm: MPI.Intracomm, alike: None, gradient_type: str, peer_memory: bool, passes: int
) -> None:
    use("cuda", comm)
    settings: dict[str, Any] = {"density": 0.05, "threshold_interval": 2, "gradient_type": gradient_type}
    settings["peer_memory"] = peer_memory

    def oktopk(inner: torch.optim.Optimizer) -> DistributedOptimizer:
        return DistributedOptimizer(inner, comm, overlap=True, bucket_mb=0.04, **settings)

    expected = reduced_gradients(comm, EagerPasses, oktopk, passes)
    found = reduced_gradients(comm, CapturedPasses, oktopk, passes)
    for one, other in zip(expected, found, strict=True):
        # kernels of cuDNN may add in another order, so that a selection at the threshold differs
        assert torch.linalg.vector_norm(one - other) <= 0.1 * torch.linalg.vector_norm(one)
    assert comm.allgather(found[-1].sum().item()) == [found[-1].sum().item()] * comm.size


def reduced_gradients(
    comm: MPI.Intracomm, way: type[EagerPasses | CapturedPasses], reducing: Any, passes: int
) -> list[torch.Tensor]:
    """The reduced gradients of some steps, and the parameters after them."""
    workload = Images("float32")
    parameters = list(workload.model.parameters())
    optimizer = reducing(torch.optim.SGD(parameters, lr=0.05))
    share = torch.tensor(1.0 / passes, device="cuda")
    turns: Passes = EagerPasses(workload, share)
    if way is CapturedPasses:
        turns = CapturedPasses(workload, share, optimizer.overlapped)
        middle = parameters[len(parameters) // 2]
        middle.register_hook(lambda gradient: torch.cuda._sleep(10_000_000))  # the host is far ahead
    gradients = []
    for step in range(4):
        optimizer.zero_grad()
        for number in range(passes):
            last = number + 1 == passes
            with nullcontext() if last else optimizer.no_sync():
                turns.forward(workload.batch((step * passes + number) * comm.size + comm.rank), last=last)
                turns.backward()
        optimizer.reduce()
        gradients.append(torch.cat([p.grad.reshape(-1) for p in parameters if p.grad is not None]).clone())
        optimizer.apply()
    turns.close()
    optimizer.close()
    return [*gradients, torch.cat([p.detach().reshape(-1) for p in parameters])]


class DdpTrained:
    """What some steps on each rank leave: losses, parameters, and how often the network was called."""

    def __init__(
        self, comm: MPI.Intracomm, kind: type[Images | Text], method: str, passes: int, captured: bool
    ) -> None:
        workload, calls = kind("float32"), []
        config = OptimizerConfig(lr=0.05, momentum=0.9)
        inner = build_optimizer(config, workload.model.parameters(), fused=True)
        start_process_group(comm, torch.device("cuda", torch.cuda.current_device()))
        made: dict[str, Any] = {"bucket_mb": 0.04, "captured": captured}
        made["dtype"] = torch.bfloat16 if method == "bfloat16" else torch.float32
        training = DdpTraining(inner, 0.0, workload.network, **made)
        workload.network = training.network
        workload.model.register_forward_pre_hook(lambda *given: calls.append(1))
        torch.cuda.manual_seed(11 + comm.rank)
        share = torch.tensor(1.0 / passes, device="cuda")
        turns: Passes = EagerPasses(workload, share)
        if captured:
            turns = CapturedPasses(workload, share, training.overlapped, training.eager_start)
        losses = []
        for step in range(EAGER_STEPS + 6):
            training.zero_grad()
            for number in range(passes):
                last = number + 1 == passes
                with nullcontext() if last else training.no_sync():
                    batch = workload.batch((step * passes + number) * comm.size + comm.rank)
                    losses.append(turns.forward(batch, last=last))
                    turns.backward()
            training.reduce()
            training.apply()
        turns.close()
        training.close()
        self.losses, self.calls = torch.stack(losses), len(calls)
        self.parameters = torch.cat([p.detach().reshape(-1) for p in workload.model.parameters()])


@needs_gpu
@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize(("kind", "passes"), [(Images, 1), (Images, 2), (Text, 1)])
@pytest.mark.parametrize("method", ["float32", "bfloat16"])
def test_steps_that_are_replayed_are_those_that_are_not(
    comm: MPI.Intracomm, alike: None, method: str, kind: type[Images | Text], passes: int
) -> None:
    if comm.size > gpus():
        pytest.skip("NCCL takes one rank per GPU")
    use("cuda", comm)
    eager, captured = (DdpTrained(comm, kind, method, passes, each) for each in (False, True))
    assert captured.calls == EAGER_STEPS * passes + passes
    assert eager.calls == (EAGER_STEPS + 6) * passes
    for name in ("losses", "parameters"):
        assert torch.allclose(getattr(eager, name), getattr(captured, name), rtol=1e-3, atol=1e-4), name
    assert len(set(comm.allgather(captured.parameters.sum().item()))) == 1


@needs_gpu
@pytest.mark.parametrize(
    ("network", "overrides"),
    [
        ("digits", ["reduction.method=oktopk", "optimizer.clip_norm=1.0"]),
        (
            "digits",
            ["reduction.method=oktopk", "reduction.gradient_type=bfloat16", "training.precision=bfloat16"],
        ),
        ("digits", ["reduction.method=nccl", "training.channels_last=true"]),
        ("digits", ["reduction.method=ddp"]),
        ("digits", ["reduction.method=oktopk", "reduction.overlap=true", "reduction.bucket_mb=0.1"]),
        ("bert", ["reduction.method=dense", "model.dropout=0.1"]),  # the same random numbers
    ],
)
def test_a_captured_run_trains_as_an_eager_one(
    alike: None, tmp_path: Path, words: Words, network: str, overrides: list[str]
) -> None:
    common = ["training.device=cuda", "training.batch_size=16", "training.accumulate=2"]
    common += ["training.steps=12", "training.eval_every=4", "training.deterministic=true", *overrides]

    def run(name: str, *more: str) -> Run:
        path = tmp_path / f"{name}.h5"
        assert main(words(network, f"run.file={path}", *common, *more), comm=MPI.COMM_SELF) == 0
        return read_runs([path])[0]

    eager, captured = run("eager"), run("captured", "training.cuda_graph=true")
    loose = 5e-2 if "training.precision=bfloat16" in overrides else 1e-2
    assert captured.steps["loss"] == pytest.approx(eager.steps["loss"], rel=loose)
    assert captured.evaluations["loss"] == pytest.approx(eager.evaluations["loss"], rel=loose)
    assert captured.steps["words"].tolist() == eager.steps["words"].tolist()


def test_graphs_are_refused_where_there_is_no_gpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "run.h5"
    words = [str(DIGITS), "--set", f"run.file={path}", "training.cuda_graph=true", "training.device=cpu"]
    assert main(words, comm=MPI.COMM_SELF) == 2
    assert "training.cuda_graph needs GPUs, and this run is on cpu" in capsys.readouterr().err
    assert not path.exists()
