"""Language models by the library: each rank on its own GPU, AdamW, dense or with updates.

    DATA=DIR torchrun --nproc-per-node 4 library.py SPEC ...          SPEC = kind/key=value/...; one JSON line a run

kind: dense (DistributedDataParallel), bfloat16 and powersgd/rank=4 (the same with these hooks of torch), updates, gradients (the
  library's optimizer with that `sends`), sparseloco/every=15 (sparseloco.py), alone (no exchange).
keys: lr; b2 (beta2, 0.95); opt (adamw; lion; sgd: momentum 0.9, no decay); seed; steps, in place of STEPS; d: density; and what is passed on: every, method (union; before 14c7d693 oktopk), wire, local_share, replica, ranks_per_host, ...
Environment: STEPS, BATCH (sequences of all ranks), T (tokens of one), V (words), L, D (layers, channels), LIMIT (seconds, after which no run begins), OUT (a file),
TIMED (wait for the GPU in each step, and evaluate nothing; pass density_warmup_steps=0 to time the last density), EAGER (compile nothing),
EVALUATIONS (in a run, after equal numbers of steps; 4).
With more ranks than GPUs these share them, and messages go by gloo: start the Multi-Process Service (MPS) before.
Batches, schedule, clipping and decay are those of sim.py.
"""

import gc
import json
import math
import os
import statistics
import time
from contextlib import nullcontext, suppress

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.nn.parallel import DistributedDataParallel

from docs.results.updates.sparseloco import SparseLoCo
from models.gpt import GPT
from oktopk import DistributedOptimizer

env = os.environ.get
STEPS, BATCH = int(env("STEPS", "3000")), int(env("BATCH", "64"))
T, V = int(env("T", "512")), int(env("V", "16384"))
LAYERS, HIDDEN, EVAL = int(env("L", "12")), int(env("D", "768")), int(env("EVAL", "960"))
TIMED, EAGER = bool(env("TIMED")), bool(env("EAGER"))  # wait for the GPU in each step; compile nothing
DDP, LIBRARY = ("dense", "bfloat16", "powersgd"), ("updates", "gradients")
EVALUATIONS = int(env("EVALUATIONS", "4"))
LIMIT, BEGIN = float(env("LIMIT", "1e9")), time.time()


class WithLoss(nn.Module):
    """A network and the mean loss of its next tokens."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.net(x[:, :-1])
        return nn.functional.cross_entropy(scores.float().flatten(0, 1), x[:, 1:].flatten())


class Lion(torch.optim.Optimizer):
    """The sign of a mean of gradients, decay aside (Chen et al., 2023, betas as there)."""

    def __init__(self, params, lr: float) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "decoupled_weight_decay": True})

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            parameters, (short, long) = group["params"], group["betas"]
            gradients = [p.grad for p in parameters]
            means = [self.state[p].setdefault("exp_avg", torch.zeros_like(p)) for p in parameters]
            torch._foreach_mul_(parameters, 1 - group["lr"] * group["weight_decay"])
            signs = torch._foreach_sign(torch._foreach_lerp(gradients, means, short))
            torch._foreach_add_(parameters, signs, alpha=-group["lr"])
            torch._foreach_lerp_(means, gradients, 1 - long)


def optimizer_of(name: str, groups: list[dict], rate: float, betas: tuple[float, float], fused: bool):
    """The optimizer that a spec names."""
    if name == "lion":
        return Lion(groups, rate)
    if name == "sgd":
        return torch.optim.SGD([{**group, "weight_decay": 0.0} for group in groups], lr=rate, momentum=0.9)
    return torch.optim.AdamW(groups, lr=rate, betas=betas, fused=fused)


def main(specs: list[str]) -> None:
    cuda = torch.cuda.is_available()
    local, gpus = int(os.environ["LOCAL_RANK"]), torch.cuda.device_count()
    device = torch.device("cuda", local % gpus) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda and int(os.environ["LOCAL_WORLD_SIZE"]) <= gpus else "gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    folder = env("DATA", "gptdata")
    train = torch.from_numpy(np.load(f"{folder}/train.npy").astype(np.int32)).to(device)
    held = torch.from_numpy(np.load(f"{folder}/held.npy")[: EVAL * T].reshape(EVAL, T).astype(np.int64))
    held = held[rank::ranks].to(device)
    net = GPT(V, layers=LAYERS, hidden=HIDDEN, positions=T).to(device)
    model = torch.compile(WithLoss(net)) if cuda and not EAGER else WithLoss(net)
    for spec in specs:
        late = torch.tensor([float(time.time() - BEGIN > LIMIT)], device=device)
        dist.all_reduce(late)
        if late.item():
            break
        try:
            result = run(spec, net, model, train, held, rank, ranks)
        except Exception as error:  # the other runs go on
            result = {"spec": spec, "error": f"{type(error).__name__}: {error}"[:500]}
        gc.collect()  # of the parameters' hooks
        if rank == 0:
            print(json.dumps(result), flush=True)
            if env("OUT"):
                with open(env("OUT"), "a") as file:
                    file.write(json.dumps(result) + "\n")
    dist.destroy_process_group()


def run(spec, net, model, train, held, rank, ranks):
    """Train once. Returns what a line of the results holds."""
    kind, *given = spec.split("/")
    options = dict(each.split("=") for each in given)
    lr0, seed = float(options.pop("lr")), int(options.pop("seed", 0))
    steps, mine = int(options.pop("steps", STEPS)), BATCH // ranks
    betas, name = (0.9, float(options.pop("b2", 0.95))), options.pop("opt", "adamw")
    settings = {"density": float(options.pop("d", 1)), "every": 1}
    settings |= {name: number(value) for name, value in options.items()}
    torch.manual_seed(seed)
    with torch.no_grad():
        start = GPT(V, layers=LAYERS, hidden=HIDDEN, positions=T)
        for parameter, value in zip(net.parameters(), start.parameters(), strict=True):
            parameter.copy_(value)
            parameter.grad = None
    generator = torch.Generator().manual_seed(1000 + seed)
    places = torch.randint(0, len(train) - T - 1, (steps, ranks, mine), generator=generator)[:, rank]
    places = places.to(train.device)
    matrices = [p for p in net.parameters() if p.ndim > 1]
    vectors = [p for p in net.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = optimizer_of(name, groups, lr0, betas, train.is_cuda)
    forward = model
    if kind in DDP:
        forward = DistributedDataParallel(model, gradient_as_bucket_view=True)
        if kind == "bfloat16":
            forward.register_comm_hook(None, bf16_compress_hook)
        if kind == "powersgd":
            state = PowerSGDState(None, settings["rank"], start_powerSGD_iter=2, min_compression_rate=1)
            forward.register_comm_hook(state, powerSGD_hook)
    elif kind == "sparseloco":
        optimizer = SparseLoCo(optimizer, settings["every"])
    elif kind != "alone":
        optimizer = DistributedOptimizer(optimizer, sends=kind, **settings)
    around = torch.arange(T, device=train.device)
    found, durations, sent, losses = [], [], 0, torch.zeros((), device=train.device)
    began = time.time()
    for step in range(steps):
        mark = time.perf_counter()
        rate = lr0 * min(1, (step + 1) / (0.05 * steps))
        rate *= 0.1 + 0.45 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = rate
        with torch.autocast(train.device.type, torch.bfloat16):
            loss = forward(train[places[step][:, None] + around].long())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        losses += loss.detach() if step >= steps - steps // 10 else 0
        if kind in LIBRARY and (step + 1) % settings["every"] == 0:
            sent += optimizer.report.bytes
        if step % 10 == 9 or TIMED:
            torch.cuda.synchronize() if train.is_cuda else None
        durations.append(time.perf_counter() - mark)
        if (step + 1) % (steps // EVALUATIONS) == 0 and not TIMED:
            with optimizer.agreed() if hasattr(optimizer, "agreed") else nullcontext():
                found.append(round(evaluate(model, held), 4))
            if rank == 0:
                print(spec, step + 1, found[-1], round(time.time() - began, 1), flush=True)
    length = sum(p.numel() for p in net.parameters())
    sent += optimizer.sent if kind == "sparseloco" else 0
    totals = torch.tensor([float(sent), float(losses) / max(1, steps // 10)], device=train.device)
    dist.all_reduce(totals)
    ring = 2 * 2 * length * (ranks - 1) / ranks * steps  # bytes a rank sends of bfloat16
    result = {"spec": spec, "n": length, "P": ranks, "steps": steps, "batch": BATCH, "held": found}
    result |= {"train": round(totals[1].item() / ranks, 4), "seconds": round(time.time() - began, 1)}
    timed = durations[steps // 4 : steps] if TIMED else durations[steps // 4 : steps // 2]
    result["step_ms"] = round(1e3 * statistics.mean(timed), 2)
    if TIMED:
        result["median_ms"] = round(1e3 * statistics.median(timed), 2)
        result["first_100_s"] = round(sum(durations[:100]), 2)
    if sent:
        result["bytes"] = round(totals[0].item() / ranks / ring, 5)
    if kind in LIBRARY:
        result["peer_memory"] = getattr(optimizer.reducer, "p2p_unavailable_reason", "buckets") or "yes"
        optimizer.close()
    return result


def number(word):
    """The int, float or truth value that a word is; else the word."""
    for kind in (int, float):
        with suppress(ValueError):
            return kind(word)
    return {"True": True, "False": False}.get(word, word)


@torch.no_grad()
def evaluate(model, held):
    """The mean loss of all ranks' held-out sequences."""
    total, each = torch.zeros((), device=held.device), 40
    for at in range(0, len(held), each):
        with torch.autocast(held.device.type, torch.bfloat16):
            total += model(held[at : at + each]) * len(held[at : at + each])
    dist.all_reduce(total)
    return total.item() / (len(held) * dist.get_world_size())


if __name__ == "__main__":
    import sys

    main(sys.argv[1:])
