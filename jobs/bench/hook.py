"""Training steps under DistributedDataParallel with one communication hook or another, on equal models in one run."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from jobs.bench.document import BenchError
from jobs.bench.options import Options
from jobs.cluster.agreement import Refused
from jobs.train.placement import find_placement
from jobs.train.reduce.background import WireError, ring_traffic, start_process_group, stop_process_group
from jobs.train.reduce.powersgd import EPSILON, low_rank, reduce_low_rank
from oktopk.settings import entries_kept
from oktopk.torch import OkTopkState, ddp_hook

LAYERS = 8
BATCH = 8
"""Samples a rank and step."""
BUCKET_MB = 25
BLOCK = 4
"""Steps of one contestant in a row, before the next one's."""
WHOLE_STEPS = 2
"""Steps in which PowerSGD sums the whole gradient first: torch's least."""


def perceptron(length: int) -> nn.Sequential:
    """Square layers with about `length` parameters together; gradients of all layers are of one magnitude."""
    width = max(1, round(math.sqrt(length / LAYERS + 0.25) - 0.5))
    layers: list[nn.Module] = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
        nn.init.kaiming_uniform_(layers[-2].weight, nonlinearity="relu")  # type: ignore[arg-type]
    return nn.Sequential(*layers[:-1])


@contextmanager
def process_group(name: str, comm: MPI.Intracomm) -> Iterator[torch.device]:
    """This rank's device, in a process group of all ranks over gloo or NCCL. Collective.

    Args:
        name: "cpu" or "cuda", whose ranks of a host get its GPUs in turn.

    Raises:
        BenchError: there is no such device, or what is done in it raises ValueError or WireError; on every rank alike.
    """
    try:
        place = find_placement(name, comm)
        start_process_group(comm, place.device, place.process_group, place.unit)
        yield place.device
        stop_process_group()
    except (ValueError, WireError, Refused) as error:
        raise BenchError(str(error)) from error


@dataclass
class Contestant:
    """One model under DDP with one hook.

    Attributes:
        name: as the table has it.
        sent: bytes that this rank sent in the last step.
        counted: they were counted; else they are what a ring would send.
        synchronizes: False: gradients stay on their rank, so that a step is the computation alone.
        oktopk: the hook's state, of Ok-Topk's.
    """

    name: str
    ddp: DistributedDataParallel
    sent: Callable[[], int] = lambda: 0
    counted: bool = False
    synchronizes: bool = True
    oktopk: OkTopkState | None = None
    seconds: list[float] = field(default_factory=list)
    bytes: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._optimizer = torch.optim.SGD(self.ddp.parameters(), lr=0.01)

    def step(self, inputs: torch.Tensor, targets: torch.Tensor) -> None:
        """Forward, backward with what the hook does, and a step of SGD. Collective where it synchronizes."""
        with nullcontext() if self.synchronizes else self.ddp.no_sync():
            self._optimizer.zero_grad()
            nn.functional.mse_loss(self.ddp(inputs), targets).backward()
        self._optimizer.step()

    @property
    def carrier(self) -> str:
        """What the gradients take between ranks, of Ok-Topk: "peer memory", or the library of its messages."""
        reducer = None if self.oktopk is None else self.oktopk.reducer
        if reducer is None:
            return ""
        return reducer.transport.library if reducer.buckets[0].p2p_unavailable_reason else "peer memory"

    def close(self) -> None:
        """Free what the hook holds. Collective."""
        if self.oktopk is not None:
            self.oktopk.close()

    def digest(self) -> str:
        """Of the parameters, by their bits."""
        values = torch.cat([parameter.detach().reshape(-1) for parameter in self.ddp.parameters()])
        return hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest()


Rival = tuple[Any, object, Callable[[], int]]
"""A communication hook, its state, and what gives the bytes that this rank sent in the last step."""


def contestants(
    options: Options, device: torch.device, rivals: Mapping[str, Rival]
) -> tuple[list[Contestant], dict[str, str]]:
    """All that take part, and why others do not. Collective, in a process group.

    Args:
        rivals: further ones, by name.

    Raises:
        ValueError: settings that Ok-Topk does not take; on every rank alike.
    """
    torch.manual_seed(options.seed)
    model = perceptron(options.length)
    started = {name: value.clone() for name, value in model.state_dict().items()}
    shapes = [p.shape for p in model.parameters()]
    length, ranks, left_out = sum(shape.numel() for shape in shapes), dist.get_world_size(), {}

    def ddp(hook: Any = None, state: object = None) -> DistributedDataParallel:
        model = perceptron(options.length).to(device)
        model.load_state_dict(started)
        made = DistributedDataParallel(model, bucket_cap_mb=BUCKET_MB)
        if hook is not None:
            made.register_comm_hook(state, hook)
        return made

    def ring(words: int) -> Callable[[], int]:
        sent = ring_traffic(words, ranks, 1).bytes
        return lambda: sent

    found = [
        Contestant("compute", ddp(), synchronizes=False),
        Contestant("ddp", ddp(), ring(length)),
    ]
    try:
        found.append(Contestant("bf16", ddp(bf16_compress_hook), ring(length // 2)))
    except TypeError as error:  # torch's answer to gloo
        left_out["bf16"] = str(error)
    found += [Contestant(name, ddp(hook, state), sent) for name, (hook, state, sent) in rivals.items()]
    state = PowerSGDState(
        None, 1, start_powerSGD_iter=WHOLE_STEPS, min_compression_rate=2, orthogonalization_epsilon=EPSILON
    )
    sums = ring(sum(low_rank(shapes, 1)))
    found.append(Contestant("powersgd", ddp(reduce_low_rank, state), sums))
    rows: dict[str, dict[str, Any]] = {
        "oktopk": {},
        "oktopk-mpi": {"comm": MPI.COMM_WORLD},
    }
    if device.type == "cuda":
        rows["oktopk-messages"] = {"peer_memory": False}
        rows["oktopk-mpi"]["peer_memory"] = False
    for name, own in rows.items():
        oktopk = OkTopkState(density=options.density, **{**options.settings, **own})
        sent = partial(_reported, oktopk)
        found.append(Contestant(name, ddp(ddp_hook, oktopk), sent, counted=True, oktopk=oktopk))
    return found, left_out


def _reported(state: OkTopkState) -> int:
    assert state.report is not None
    return state.report.bytes


def measure_hooks(
    options: Options, comm: MPI.Intracomm, rivals: Mapping[str, Rival] | None = None
) -> dict[str, Any]:
    """The run as it stands in the document, on rank 0; rivals: as `contestants`. Collective.

    Contestants take turns of BLOCK steps. A step's time is that of the slowest rank.

    Raises:
        BenchError: it cannot be done, or ranks ended with different parameters; on every rank alike.
    """
    with process_group(options.device, comm) as device:
        found, left_out = contestants(options, device, rivals or {})
        _run(found, options, comm, device)
        differing = [
            one.name for one in found if one.synchronizes and len(set(comm.allgather(one.digest()))) > 1
        ]
        methods = [_summary(one, found[0], comm) for one in found]
        for one in found:
            one.close()
    if differing:
        raise BenchError(f"the ranks ended with different parameters: {', '.join(differing)}")
    length = sum(parameter.numel() for parameter in found[0].ddp.parameters())
    return {
        "ranks": comm.size,
        "length": length,
        "density": options.density,
        "k": entries_kept(options.density, length),
        "device": options.device,
        "backend": "nccl" if options.device == "cuda" else "gloo",
        "threads": torch.get_num_threads(),
        "left_out": left_out,
        "network": options.network,
        "settings": options.settings,
        "course": {"warmup": options.warmup, "steps": options.steps, "block": BLOCK, "batch": BATCH},
        "bucket_mb": BUCKET_MB,
        "methods": methods,
    }


def _run(found: list[Contestant], options: Options, comm: MPI.Intracomm, device: torch.device) -> None:
    width = next(found[0].ddp.parameters()).shape[0]
    drawn = torch.Generator().manual_seed(1000 * options.seed + comm.rank)
    total = options.warmup + options.steps
    bar = tqdm(total=total, unit="step", disable=comm.rank != 0 or options.quiet, ncols=100)
    for first in range(0, total, BLOCK):
        batches = [
            torch.randn(2, BATCH, width, generator=drawn).to(device) for _ in range(min(BLOCK, total - first))
        ]
        for one in found:
            for number, (inputs, targets) in enumerate(batches, first):
                dist.barrier()  # waits asleep: MPI's would take a core from ranks that are not here yet
                began = time.perf_counter()
                one.step(inputs, targets)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds = time.perf_counter() - began
                sent = one.sent()
                if number >= options.warmup:
                    one.seconds.append(seconds)
                    one.bytes.append(sent)
        bar.update(len(batches))
    bar.close()


def _summary(one: Contestant, compute: Contestant, comm: MPI.Intracomm) -> dict[str, Any]:
    """Collective."""
    slowest, alone = (np.max(comm.allgather(each.seconds), axis=0) for each in (one, compute))
    exposed = float(np.median(slowest) - np.median(alone)) if one.synchronizes else None
    return {
        "name": one.name,
        "seconds": {
            "mean": float(np.mean(slowest)),
            "median": float(np.median(slowest)),
            "exposed": exposed,
        },
        "bytes": float(np.mean(comm.allgather(one.bytes))),
        "counted": one.counted,
        "carrier": one.carrier,
        "series": slowest.tolist(),
    }
