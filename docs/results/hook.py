"""Training steps under DistributedDataParallel with one communication hook or another, on equal models in one run.

    python -m jobs.launch -n 4 -m docs.results.hook --steps 16 --warmup 4 --set threshold_interval=16 --json FILE
    python -m docs.results.hook --draw hook.svg FILE...

It takes --length, --density, --steps, --warmup, --set, --seed, --device, --network, --json, --commit and --quiet, as jobs.bench.
The second draws the median step of each hook, a bar for each, of which as much is pale as a step under no_sync takes.
"""

import hashlib
import math
import sys
import time
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path

import matplotlib as mpl
import numpy as np
import torch
import torch.distributed as dist
from matplotlib.figure import Figure
from mpi4py import MPI
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from docs.results.bandwidth import bandwidth
from jobs.bench.document import BenchError, read
from jobs.bench.options import parse
from jobs.bench.run import run_all
from jobs.cluster.agreement import Refused, say
from jobs.render.chart import colour_of
from jobs.render.draw import FILE_WIDTH, PAGE, write
from jobs.restart.signals import leave
from jobs.train.placement import find_placement
from jobs.train.reduce.process_group import WireError, ring_traffic, start_process_group, stop_process_group
from oktopk.settings import entries_kept
from oktopk.torch import OkTopkState, ddp_hook

LAYERS = 8
BATCH = 8  # samples a rank and step
BUCKET_MB = 25
BLOCK = 4  # steps of one contestant in a row, before the next one's
TAKEN = (
    "--length",
    "--density",
    "--steps",
    "--warmup",
    "--set",
    "--seed",
    "--device",
    "--network",
    "--json",
    "--commit",
    "--quiet",
)
# in which PowerSGD sums the whole gradient first: torch's least; a parameter is approximated where that divides its elements by
# more than LEAST_RATE: torch's default
WHOLE_STEPS, LEAST_RATE = 2, 2
EPSILON = 1e-8  # added to the norm of a column, so that a gradient of zeros does not become NaN
TITLES = {
    "ddp": ("DDP", "ddp"),
    "bf16": ("DDP, bfloat16", "ddp"),
    "powersgd": ("PowerSGD, rank 1", "powersgd"),
    "oktopk": ("Ok-Topk", "oktopk"),
}  # contestant -> its title, and the method whose colour it has, in the order of the bars


def perceptron(length):
    """Square layers with about `length` parameters together; gradients of all layers are of one magnitude."""
    width = max(1, round(math.sqrt(length / LAYERS + 0.25) - 0.5))
    layers = []
    for _ in range(LAYERS):
        layers += [nn.Linear(width, width), nn.ReLU()]
        nn.init.kaiming_uniform_(layers[-2].weight, nonlinearity="relu")
    return nn.Sequential(*layers[:-1])


def low_rank_words(shapes, rank):
    """Elements that torch's PowerSGD sums over the ranks: P of n x r and Q of m x r where they are fewer, else all n x m."""
    words = 0
    for first, *others in shapes:
        rest = math.prod(others)
        r = min(rank, first, rest)
        low = (first + rest) * r
        words += low if LEAST_RATE * low < first * rest else first * rest
    return words


def low_rank_hook(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's PowerSGD hook, for several buckets on gloo as well, and for GPUs without a race."""
    if bucket.buffer().device.type == "cpu":
        # gloo runs the hook's later parts in its two threads, where each waits for a sum that needs one of them: with several
        # buckets at work the ranks hang
        future = powerSGD_hook(state, bucket)
        future.wait()
        return future
    # the hook reads its copy of the gradient on another stream, and frees it without telling the allocator: on a stream of
    # its own, which waits for that reader, its memory is not handed to the backward pass that goes on beside
    stream = STREAMS.setdefault(bucket.index(), torch.cuda.Stream())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        future = powerSGD_hook(state, bucket)
        future.wait()
    return future


STREAMS = {}  # bucket -> stream of `low_rank_hook`


@contextmanager
def process_group(name, comm):
    """This rank's device, "cpu" or "cuda", in a process group of all ranks over gloo or NCCL.

    Raises:
        BenchError: there is no such device, or what is done in it raises ValueError or WireError; on every rank alike.
    """
    try:
        place = find_placement(name, comm)
        start_process_group(comm, place.device)
        yield place.device
        stop_process_group()
    except (ValueError, WireError, Refused) as error:
        raise BenchError(str(error)) from error


class Contestant:
    """One model under DDP with one hook.

    Args:
        sent: gives the bytes that this rank sent in the last step, as a ring would but where they are counted.
        synchronizes: False: gradients stay on their rank, so that a step is the computation alone.
        oktopk: the hook's state, of Ok-Topk's, which counts its bytes.
    """

    def __init__(self, name, ddp, sent=lambda: 0, *, synchronizes=True, oktopk=None):
        self.name, self.ddp, self.synchronizes, self.oktopk = name, ddp, synchronizes, oktopk
        self.sent = sent if oktopk is None else lambda: oktopk.report.bytes
        self.seconds, self.bytes = [], []
        self.optimizer = torch.optim.SGD(ddp.parameters(), lr=0.01)

    def step(self, inputs, targets):
        """Forward, backward with what the hook does, and a step of SGD."""
        with nullcontext() if self.synchronizes else self.ddp.no_sync():
            self.optimizer.zero_grad()
            nn.functional.mse_loss(self.ddp(inputs), targets).backward()
        self.optimizer.step()

    def digest(self):
        """Of the parameters, by their bits."""
        values = torch.cat([parameter.detach().reshape(-1) for parameter in self.ddp.parameters()])
        return hashlib.sha256(values.cpu().numpy().tobytes()).hexdigest()

    def summary(self, compute, comm):
        """As it stands in the document."""
        slowest, alone = (np.max(comm.allgather(each.seconds), axis=0) for each in (self, compute))
        exposed = float(np.median(slowest) - np.median(alone)) if self.synchronizes else None
        carrier = ""
        if self.oktopk is not None:
            reducer = self.oktopk.reducer
            messages = reducer.reducers[0].p2p_unavailable_reason
            carrier = reducer.transport.library if messages else "peer memory"
        return {
            "name": self.name,
            "seconds": {
                "mean": float(np.mean(slowest)),
                "median": float(np.median(slowest)),
                "exposed": exposed,
            },
            "bytes": float(np.mean(comm.allgather(self.bytes))),
            "counted": self.oktopk is not None,
            "carrier": carrier,
            "series": slowest.tolist(),
        }


def contestants(options, device, rivals):
    """All that take part, and why others do not; rivals: name -> (hook, its state, what gives the bytes sent)."""
    torch.manual_seed(options.seed)
    model = perceptron(options.length)
    shapes = [p.shape for p in model.parameters()]
    length, ranks, left_out = sum(shape.numel() for shape in shapes), dist.get_world_size(), {}

    def ddp(hook=None, state=None):
        own = perceptron(options.length)
        own.load_state_dict(model.state_dict())
        made = DistributedDataParallel(own.to(device), bucket_cap_mb=BUCKET_MB)
        if hook is not None:
            made.register_comm_hook(state, hook)
        return made

    def ring(words):
        sent = ring_traffic(words, ranks, 1).bytes
        return lambda: sent

    found = [Contestant("compute", ddp(), synchronizes=False), Contestant("ddp", ddp(), ring(length))]
    try:
        found.append(Contestant("bf16", ddp(bf16_compress_hook), ring(length // 2)))
    except TypeError as error:  # torch's answer to gloo
        left_out["bf16"] = str(error)
    found += [Contestant(name, ddp(hook, state), sent) for name, (hook, state, sent) in rivals.items()]
    whole = {"start_powerSGD_iter": WHOLE_STEPS, "min_compression_rate": LEAST_RATE}
    state = PowerSGDState(None, 1, orthogonalization_epsilon=EPSILON, **whole)
    found.append(Contestant("powersgd", ddp(low_rank_hook, state), ring(low_rank_words(shapes, 1))))
    messages = {"peer_memory": False} if device.type == "cuda" else {}
    rows = {"oktopk": {}, "oktopk-mpi": {"comm": MPI.COMM_WORLD, **messages}}
    rows |= {"oktopk-messages": messages} if messages else {}
    for name, own in rows.items():
        oktopk = OkTopkState(density=options.density, **{**options.settings, **own})
        found.append(Contestant(name, ddp(ddp_hook, oktopk), oktopk=oktopk))
    return found, left_out


def measure_hooks(options, comm, rivals=None):
    """The run as it stands in the document; rivals: as `contestants`.

    Contestants take turns of BLOCK steps. A step's time is that of the slowest rank.

    Raises:
        BenchError: it cannot be done, or ranks ended with different parameters; on every rank alike.
    """
    with process_group(options.device, comm) as device:
        found, left_out = contestants(options, device, rivals or {})
        run(found, options, comm, device)
        together = (one for one in found if one.synchronizes)
        differing = [one.name for one in together if len(set(comm.allgather(one.digest()))) > 1]
        methods = [one.summary(found[0], comm) for one in found]
        for one in found:
            if one.oktopk is not None:
                one.oktopk.close()
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


def run(found, options, comm, device):
    """All steps of all contestants."""
    width = next(found[0].ddp.parameters()).shape[0]
    drawn = torch.Generator().manual_seed(1000 * options.seed + comm.rank)
    total = options.warmup + options.steps
    bar = tqdm(total=total, unit="step", disable=comm.rank != 0 or options.quiet, ncols=100)
    for first in range(0, total, BLOCK):
        steps = range(first, min(first + BLOCK, total))
        batches = [torch.randn(2, BATCH, width, generator=drawn).to(device) for _ in steps]
        for one in found:
            for number, (inputs, targets) in zip(steps, batches, strict=True):
                dist.barrier()  # waits asleep: MPI's would take a core from ranks that are not here yet
                began = time.perf_counter()
                one.step(inputs, targets)
                if device.type == "cuda":
                    torch.cuda.synchronize()
                seconds, sent = time.perf_counter() - began, one.sent()
                if number >= options.warmup:
                    one.seconds.append(seconds)
                    one.bytes.append(sent)
        bar.update(len(batches))
    bar.close()


def draw(documents, output):
    """A bar for each of TITLES that was measured.

    Raises:
        BenchError: there is no document, one is of something else, or the picture cannot be written.
    """
    if not documents or any(document.get("kind") != "hook table" for document in documents):
        raise BenchError("--draw FILE.svg DOCUMENT.json ... takes documents of the table of hooks")
    bars = []
    for own in (document["runs"][0] for document in documents):
        where = "one host"
        if "links" in own["network"]:
            rate = bandwidth(own)
            where = f"{rate:g} Gb/s" if math.isfinite(rate) else "unshaped links"
        steps = {method["name"]: method for method in own["methods"]}
        alone = 1e3 * steps["compute"]["seconds"]["median"]
        for name, (title, method) in TITLES.items():
            if name in steps:
                median, series = 1e3 * steps[name]["seconds"]["median"], 1e3 * np.array(steps[name]["series"])
                bars.append((f"{title}, {where}", method, alone, median, series.min(), series.max()))
    own = documents[0]["runs"][0]
    note = f"{own['ranks']} ranks, n = {own['length'] / 1e6:.1f} M, density {100 * own['density']:g} %, "
    note += f"{own['device'].upper()}; pale: computation alone; dark: exposed; bars: median; whiskers: least and most"
    with mpl.rc_context(PAGE):
        figure = Figure(figsize=(FILE_WIDTH, 0.9 + 0.5 * len(bars)), layout="constrained")
        axes = figure.subplots()
        for place, (_, method, alone, median, least, most) in enumerate(reversed(bars)):
            axes.barh(place, alone, color=colour_of(method), alpha=0.3)
            axes.barh(place, median - alone, left=alone, color=colour_of(method))
            spread = [[median - least], [most - median]]
            axes.errorbar(median, place, xerr=spread, color="#999999", capsize=3, linewidth=1.2)
            text = f"{alone:.0f} + {median - alone:.0f} ms"
            axes.annotate(text, (most, place), (6, 0), textcoords="offset points", va="center")
        axes.set_yticks(range(len(bars)), [bar[0] for bar in reversed(bars)])
        axes.margins(x=0.4)
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("step, ms")
        try:
            write(figure, axes, "Training steps with communication hooks", note, output)
        except (OSError, ValueError) as error:
            raise BenchError(f"{output} cannot be written: {error}") from error


def main(words, module="docs.results.hook", rivals=lambda density: {}, comm=MPI.COMM_WORLD):
    """Measure as the command line says, or draw; returns the exit status. rivals: density -> further contestants."""
    if {"-h", "--help"} & {*words}:
        say(comm, __doc__)
        return 0
    try:
        if words[:1] == ["--draw"]:
            draw([read(path) for path in words[2:]], Path(" ".join(words[1:2])))
            return 0
        if other := [word for word in words if word[:2] == "--" and word.partition("=")[0] not in TAKEN]:
            raise BenchError(f"{other[0]} is not for the table of hooks, which takes {', '.join(TAKEN)}")
        options = replace(parse(words), module=module)
        if len(options.lengths) != 1:
            raise BenchError("--length: the table of hooks takes one")
    except BenchError as error:
        say(comm, f"{module}: {error}")
        return 2
    measure = partial(measure_hooks, options, comm, rivals(options.density))
    return run_all(lambda: ("hook table", [measure]), options, comm)


if __name__ == "__main__":
    leave(main(sys.argv[1:]))
