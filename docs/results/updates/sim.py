"""Which exchange of optimizer updates trains a language model as well as dense AdamW?

P workers are simulated on one GPU. Worker q computes its gradient at `reference - view`, runs its own AdamW, and adds the update to
what it has not sent yet (`unsent[q]`). Every h steps the workers exchange: each sends the entries of `unsent` above a threshold,
the sums above a global threshold are applied to the reference. Decay acts on the reference.

    DATA=DIR STEPS=1000 P=4 python sim.py SPEC ...          SPEC = name/key=value/...; one JSON line a run on standard output

name: dense (AdamW on the mean gradient), updates, gradients (error feedback on gradients, then AdamW),
  powersgd/rank=4 (w: a dense start), demo/decay=0.999/keep=32, zeroone/vk=16/h=16 (0/1 Adam; h: the most steps between
  exchanges, 1 by default).
keys: lr; b1, b2: decays of the moments, b2=root for 0.95^(1/P); seed
  d: density; h: steps between exchanges; olr: outer rate; mu: outer Nesterov momentum; wire: float32, bfloat16, int8, int4
  lv: share of the residual that a worker's own model contains (0: it sees the reference after each exchange)
  lg: lv grows as the learning rate falls, to lg times as much: lv · min(lg, largest rate / rate), from the end of the warm-up
  ls: in place of lv, the share is ls times the root of the density of now over P
  stop: steps, after which the run ends with its next evaluation
  mask=union: all workers send the same entries, those that any of them chose, each a P-th; wire float32 or int4
  mask=sum: all send those whose sums are the largest, which nobody could know
  rd: residual decay an exchange; fg: power of a decay by age, times 1 - fg / (s + 30) in step s
  part: 1 holds the share lv of what was moved since the last exchange, too (h above 1); else all of it
  blk: with mask=union groups of so many elements are chosen, by their norms; chunk: 1 selects per chunk of 4,096 and applies all (SparseLoCo)
  w, wm, wh: a dense start of w of the steps, summed as g(radients) or u(pdates), every wh steps
  dr, dw: density falls from dr to d over the share dw of the steps
  v: own; mean (of the mean gradient, exact); ratio: own times the measured ratio of each tensor
  vs: second moments are averaged over the workers in slices of 1/vs a step, in 8 bits
  rs: the ratio is measured on 1/rs of the elements (0: on all); rg=1: one ratio for all tensors
Runs of runs.jsonl with other keys, all of which lost, are of 2d20e2a3 or, with mask=clock or ag, of 7c2b4eeb, with ht of d2f09b74: see
the file there.
"""

import json
import math
import os
import sys
import time

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F

torch.backends.cuda.matmul.allow_tf32 = True
env = os.environ.get
STEPS, P, T, V = int(env("STEPS", 1000)), int(env("P", 4)), int(env("T", 512)), int(env("V", 16384))
BATCH = int(env("BATCH", 64))
B1 = 0.9
B = BATCH // P
L, D = int(env("L", 6)), int(env("D", 384))
DATA = env("DATA", "gptdata")
dev = env("DEVICE", "cuda")
COMPILE = int(env("COMPILE", 1))
LIMIT = float(env("LIMIT", 1e9))
STOP = int(env("STOP", 10**9))  # a run ends with the first evaluation after so many steps
BEGIN = time.time()
EVAL = int(env("EVAL", 960))
train, held = np.load(f"{DATA}/train.npy"), np.load(f"{DATA}/held.npy")
train_t = torch.from_numpy(train.astype(np.int32)).to(dev)
held_t = torch.from_numpy(held[: EVAL * T].reshape(EVAL, T).astype(np.int64)).to(dev)
compiled = (lambda f: torch.compile(f, dynamic=False)) if COMPILE else (lambda f: f)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(D), nn.LayerNorm(D)
        self.qkv, self.o = nn.Linear(D, 3 * D), nn.Linear(D, D)
        self.u, self.d = nn.Linear(D, 4 * D), nn.Linear(4 * D, D)


class GPT(nn.Module):
    """The shapes and the start; `losses` computes with the weights of several workers at once."""

    def __init__(self):
        super().__init__()
        self.e, self.p = nn.Embedding(V, D), nn.Embedding(T, D)
        self.b = nn.ModuleList(Block() for _ in range(L))
        self.n = nn.LayerNorm(D)
        for m in self.modules():
            if isinstance(m, (nn.Linear, nn.Embedding)):
                nn.init.normal_(m.weight, 0, 0.02)
            if isinstance(m, nn.Linear):
                nn.init.zeros_(m.bias)


def losses_of(w, x):
    """The sum over W workers of their mean losses. w: name -> [W, ...], x: tokens [W, B, T]."""
    W, b, t = x.shape

    def linear(h, name):
        return torch.baddbmm(w[name + ".bias"][:, None], h, w[name + ".weight"].transpose(1, 2))

    def norm(h, name):
        return F.layer_norm(h, (D,)) * w[name + ".weight"][:, None] + w[name + ".bias"][:, None]

    rows = torch.arange(W, device=x.device)[:, None, None]
    h = (w["e.weight"][rows, x] + w["p.weight"][:, None]).view(W, b * t, D)
    for i in range(L):
        q, k, v = (
            linear(norm(h, f"b.{i}.n1"), f"b.{i}.qkv").view(W * b, t, 3, D // 64, 64).permute(2, 0, 3, 1, 4)
        )
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(W, b * t, D)
        h = h + linear(a, f"b.{i}.o")
        h = h + linear(F.gelu(linear(norm(h, f"b.{i}.n2"), f"b.{i}.u")), f"b.{i}.d")
    h = norm(h, "n").view(W, b, t, D)[:, :, :-1].reshape(W, b * (t - 1), D)
    logits = torch.bmm(h, w["e.weight"].transpose(1, 2))
    return F.cross_entropy(logits.float().view(-1, V), x[:, :, 1:].reshape(-1), reduction="sum") / (
        b * (t - 1)
    )


def start_weights(seed):
    torch.manual_seed(seed)
    return torch.cat([p.detach().reshape(-1) for p in GPT().parameters()])


shapes = {name: p.shape for name, p in GPT().named_parameters()}
sizes = [shape.numel() for shape in shapes.values()]
n = sum(sizes)
LENGTHS = torch.tensor(sizes, device=dev)
decays = torch.zeros(n, device=dev)
views = torch.empty(P, n, device=dev)  # the workers' own weights
gs = torch.zeros(P, n, device=dev)  # and gradients
weights, at = {}, 0
for (name, shape), size in zip(shapes.items(), sizes, strict=True):
    weights[name] = views[:, at : at + size].view(P, *shape).requires_grad_()
    weights[name].grad = gs[:, at : at + size].view(P, *shape)
    if len(shape) > 1:
        decays[at : at + size] = 0.1
    at += size
xs = torch.zeros(P, B, T, dtype=torch.long, device=dev)
ar = torch.arange(T, device=dev)
fast = compiled(losses_of)


@torch.enable_grad()
def forward_backward():
    gs.zero_()
    with torch.autocast(dev, torch.bfloat16):
        loss = fast(weights, xs)
    loss.backward()
    return loss


if dev == "cuda":
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            forward_backward()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss_t = forward_backward()
    replay = graph.replay
else:

    def replay():
        global loss_t
        loss_t = forward_backward()


def evaluate(vector):
    global first_half
    one, at = {}, 0
    for (name, shape), size in zip(shapes.items(), sizes, strict=True):
        one[name] = vector[at : at + size].view(1, *shape)
        at += size
    total = torch.zeros((), device=dev)
    with torch.no_grad(), torch.autocast(dev, torch.bfloat16):
        for i in range(0, EVAL, 48):
            if i == EVAL // 2:
                first_half = float(total) / i
            total += losses_of(one, held_t[None, i : i + 48]) * len(held_t[i : i + 48])
    return float(total) / EVAL


@compiled
def moments(g, m, v, clip, b1, b2):
    g = g * clip
    m.add_((g - m) * (1 - b1))
    v.add_((g * g - v) * (1 - b2))


@compiled
def step_of(m, v, unsent, lr, c1, c2):
    unsent.add_(lr * (m * c1) / ((v * c2).sqrt() + 1e-8))


@compiled
def step_scaled(m, v, factor, unsent, lr, c1, c2):
    unsent.add_(lr * (m * c1) / ((v * factor * c2).sqrt() + 1e-8))


@compiled
def coded(x, top: int, block: int):
    """As `rounded`, in blocks."""
    rows = x.shape[0]
    pad = -x.shape[-1] % block
    y = F.pad(x, (0, pad)).view(rows, -1, block)
    bits = y.abs().view(torch.int32).float()
    low = torch.where(bits > 0, bits, torch.full_like(bits, 3e9)).amin(-1, keepdim=True)
    high = bits.amax(-1, keepdim=True)
    span = (high - low).clamp(min=1)
    code = ((bits - low) * top / span).round()
    out = (low + code * span / top).to(torch.int32).view(torch.float32) * y.sign()
    return torch.where(y == 0, 0.0, out).view(rows, -1)[:, : x.shape[-1]]


@compiled
def coded_masked(x, block: int):
    """Zero, or one of 7 magnitudes between a block's largest and a 32nd of it."""
    rows = x.shape[0]
    pad = -x.shape[-1] % block
    y = F.pad(x, (0, pad)).view(rows, -1, block)
    bits = y.abs().view(torch.int32).float()
    high = bits.amax(-1, keepdim=True)
    span = 5.0 * 2**23  # five octaves
    code = ((bits - high) * 6 / span + 6).round()
    out = (high + (code - 6) * span / 6).to(torch.int32).view(torch.float32) * y.sign()
    return torch.where((code < 0) | (high == 0), 0.0, out).view(rows, -1)[:, : x.shape[-1]]


def rounded(x, wire, least, d):
    """Values as they arrive: bfloat16, or a code in [0, Q] linear in the bits between a block's least and largest magnitude."""
    if wire in ("float32", "plain"):
        return x
    if wire == "bfloat16":
        return x.bfloat16().float()
    top = 127 if wire == "int8" else 7
    return coded(x, top, max(256, int(256 / d)))


@compiled
def picked(unsent, t):
    return torch.where(unsent.abs() >= t, unsent, 0.0)


@compiled
def settle(unsent, sent, s, tg):
    keep = s.abs() >= tg
    unsent.sub_(torch.where(keep, sent, 0.0))
    return torch.where(keep, s, 0.0)


def thresholds(x, k, count=400_000):
    count = min(count, x.shape[1])
    pos = torch.randint(0, x.shape[1], (count,), device=dev)
    return torch.topk(x[:, pos].abs(), max(1, round(count * k / n)), dim=1, sorted=False).values.amin(
        1, keepdim=True
    )


@compiled
def masked(unsent, mask):
    return torch.where(mask, unsent, 0.0)


def exchange_masked(unsent, d, wire, turn, group, exact):
    """All workers send the same entries: those that any of them chose, a P-th each, in groups of so many; exact: the largest sums."""
    size = unsent.mean(0, keepdim=True) if exact else unsent
    size = size if group == 1 else size.view(len(size), -1, group).norm(dim=-1)
    each, count = (d * n, 4_000_000) if exact else (d * n / P * 1.05, 400_000)
    mask = (size.abs() >= thresholds(size, each, count)).any(0, keepdim=True)
    mask = mask.repeat_interleave(group, dim=1)
    sent = masked(unsent, mask)
    block = max(256, int(256 / d))
    if wire == "int4":
        sent = coded_masked(sent, block)
    unsent.sub_(sent)
    u = sent.mean(0, keepdim=True)
    if wire == "int4":
        v = coded_masked(u, block)
        owner = torch.arange(n, device=dev) * P // n
        unsent.scatter_add_(0, owner[None], (u - v) * P)
        u = v
    return u[0], float(mask.float().mean()) if turn % 500 == 0 else None


def exchange(unsent, d, wire, chunk):
    """The mean update; unsent loses what was sent and applied."""
    if d >= 1:
        u = unsent.mean(0)
        unsent.zero_()
        return u
    if chunk:
        pad = -n % 4096
        y = F.pad(unsent, (0, pad)).view(P, -1, 4096)
        t = torch.topk(y.abs(), max(1, round(4096 * d)), dim=-1).values[..., -1:]
        sent = torch.where(y.abs() >= t, y, 0.0).view(P, -1)[:, :n]
        sent = rounded(sent, wire, None, d)
        unsent.sub_(sent)
        return sent.mean(0)
    sent = picked(unsent, thresholds(unsent, d * n))
    sent = rounded(sent, wire, None, d)
    s = sent.sum(0, keepdim=True)
    tg = thresholds(s, d * n, min(1_600_000, 2 * n))
    u = settle(unsent, sent, s, tg)
    if wire not in ("float32", "plain"):
        v = rounded(u, wire, None, d)
        owner = torch.arange(n, device=dev) * P // n
        unsent.scatter_add_(0, owner[None], u - v)
        u = v
    return u[0] / P


@compiled
def orthogonal(matrix):
    """Gram-Schmidt, as PowerSGD does it."""
    columns = []
    for column in matrix.T:
        for other in columns:
            column = column - (column @ other) * other
        columns.append(column / (column.norm() + 1e-8))
    return torch.stack(columns, 1)


def power_sgd(err, factors, rank, mean):
    """PowerSGD (Vogels et al., 2019) with error feedback: matrices as rank products, the rest densely."""
    at, words = 0, 0
    for i, (shape, size) in enumerate(zip(shapes.values(), sizes, strict=True)):
        part = slice(at, at + size)
        if len(shape) == 2:
            matrix = gs[:, part].add_(err[:, part]).view(P, *shape)
            left = orthogonal((matrix @ factors[i]).mean(0))
            factors[i] = (matrix.transpose(1, 2) @ left).mean(0)
            near = (left @ factors[i].T).reshape(-1)
            torch.sub(gs[:, part], near, out=err[:, part])
            mean[part] = near
            words += rank * sum(shape)
        else:
            mean[part] = gs[:, part].mean(0)
            words += size
        at += size
    return 2 * words / n


def cosines():
    i = torch.arange(64, device=dev, dtype=torch.float64)
    basis = torch.cos(math.pi / 64 * (i[None] + 0.5) * i[:, None]) * (2 / 64) ** 0.5
    basis[0] *= 0.5**0.5
    return basis.float()


def demo(delta, lr, decay, keep, total):
    """DeMo (Peng et al., 2024): the largest cosine components of each 64 x 64 of the momentum leave it; their sum's sign is the step."""
    delta.mul_(decay).add_(gs, alpha=lr)
    at, C = 0, cosines()
    for shape, size in zip(shapes.values(), sizes, strict=True):
        part = slice(at, at + size)
        at += size
        square = len(shape) == 2
        x = delta[:, part]
        if square:
            x = x.view(P, shape[0] // 64, 64, shape[1] // 64, 64).transpose(2, 3)
            y = C @ x @ C.T
            flat = y.reshape(P, -1, 4096)
        else:
            y = x.view(P, -1, 64) @ C.T
            flat = y
        k = min(keep, flat.shape[-1])
        top = flat.abs().topk(k, dim=-1).indices
        sent = torch.zeros_like(flat).scatter_(-1, top, flat.gather(-1, top))
        if square:
            back = C.T @ sent.view_as(y) @ C
            back = back.transpose(2, 3).reshape(P, -1)
        else:
            back = (sent @ C).reshape(P, -1)
        delta[:, part] -= back
        total[part] = back.sum(0)


def one_bit(x):
    """Signs, times the mean magnitude of each worker's tensor."""
    out = torch.empty_like(x)
    for row, signs in zip(x, out, strict=True):
        means = [
            norm / size
            for norm, size in zip(torch._foreach_norm(list(row.split(sizes)), 1), sizes, strict=True)
        ]
        scales = torch.stack(means).repeat_interleave(LENGTHS, output_size=n)
        torch.where(row < 0, -scales, scales, out=signs)
    return out


class ZeroOne:
    """0/1 Adam (Lu et al., 2022): steps between exchanges with v that all workers share, exchanges of momentum in one bit.

    v is renewed by the mean gradient, in float32, at intervals that double after every `each` renewals. Beyond the paper: each
    tensor has a scale of its own, moments are corrected as Adam's, v is renewed before a step, and the shared weights decay.
    """

    def __init__(self, each):
        self.moved, self.error, self.back = (torch.zeros(rows, n, device=dev) for rows in (P, P, 1))
        self.each, self.renewed, self.next, self.since, self.rates = each, 0, 0, 0, 0.0

    def step(self, s, g, m, v, unsent, ref, lr, interval, b1, b2):
        """A step of all workers; returns the bytes sent, of a dense exchange 1."""
        sent = 0.0
        if s == self.next:
            v[0].lerp_(g.mean(0).square(), 1 - b2)
            self.renewed, sent = self.renewed + 1, 1.0
            self.next = s + 2 ** (self.renewed // self.each)
        m.lerp_(g, 1 - b1)
        rate, size = lr / (1 - b1 ** (s + 1)), (v[:1] / (1 - b2**self.renewed)).sqrt_() + 1e-8
        unsent.add_(m, alpha=rate)
        self.moved.addcdiv_(m, size, value=rate)
        self.rates, self.since = self.rates + rate, self.since + 1
        if self.since >= interval:
            unsent.add_(self.error)
            bits = one_bit(unsent)
            torch.sub(unsent, bits, out=self.error)
            self.back.add_(bits.mean(0))
            mean = one_bit(self.back)
            self.back.sub_(mean)
            m.copy_(mean / self.rates)
            ref.sub_((mean / size)[0])
            self.rates, self.since, sent = 0.0, 0, sent + 1 / 32
            self.moved.zero_()
            unsent.zero_()
        return sent


KEYS = "lr b1 b2 seed d h olr mu wire lv lg ls stop mask rd fg part blk chunk w wm wh dr dw v vs rs rg rank decay keep steps vk"
MASKED = {"float32": 2.25, "int4": 0.52}  # 8 bits an index, once; a value twice
BYTES = {"plain": 4, "float32": 2.5, "bfloat16": 1.5, "int8": 1.05, "int4": 0.8}
places = {}
first_half = 0.0


def batches(seed, steps):
    if (seed, steps) not in places:
        gen = torch.Generator().manual_seed(1000 + seed)
        places[seed, steps] = torch.randint(0, len(train) - T - 1, (steps, P, B), generator=gen).to(dev)
    return places[seed, steps]


@torch.no_grad()
def run(spec):
    name, *given = spec.split("/")
    o = dict(x.split("=") for x in given)

    def f(key, value):
        return float(o.get(key, value))

    seed, lr0, d, h = int(f("seed", 0)), f("lr", 2e-3), f("d", 1), int(f("h", 1))
    steps = int(f("steps", STEPS))
    b1, b2 = f("b1", 0.9), (0.95 ** (1 / P) if o.get("b2") == "root" else f("b2", 0.95))
    vmode = o.get("v", "own")
    olr, mu, lv, wire = f("olr", 1), f("mu", 0), f("lv", 0), o.get("wire", "float32")
    rd, chunk = f("rd", 1), int(f("chunk", 0))
    w, wm, wh = f("w", 0), o.get("wm", "u"), int(f("wh", 1))
    dr, dw, ls = f("dr", 0), f("dw", 0), f("ls", 0)
    S, factors = 1 if name in ("dense", "gradients", "powersgd") else P, []
    idx = batches(seed, steps)
    ref = start_weights(seed).to(dev)

    def zeros(r):
        return torch.zeros(r, n, device=dev)

    m, v, unsent = zeros(S), zeros(S), zeros(P if name != "dense" else 1)
    mask, chosen = o.get("mask"), []
    if (
        mask not in (None, "union", "sum")
        or vmode not in ("own", "mean", "ratio")
        or set(o) - set(KEYS.split())
    ):
        raise ValueError(f"mask {mask}, v {vmode}, or a key that is none of {KEYS}")
    car = zeros(P) if (h > 1 or wh > 1) and lv < 1 and not f("part", 0) else None
    buf = zeros(1)[0] if mu else None
    vsh = zeros(1)[0] if vmode == "mean" or wm == "g" else None
    rho = torch.ones(n, device=dev)
    vs, turn = int(f("vs", 0)), 0
    sums = torch.zeros(2, len(sizes), device=dev)
    rs, rg = int(f("rs", 0)), int(f("rg", 0))
    zero_one = ZeroOne(int(f("vk", 16))) if name == "zeroone" else None
    begins = np.cumsum([0, *sizes])[:-1].tolist()
    out, sent_bytes, t0, since, losses = [], 0.0, time.time(), 0, torch.zeros((), device=dev)
    for s in range(steps):
        lr = lr0 * min(1, (s + 1) / (0.05 * steps)) * (0.1 + 0.45 * (1 + math.cos(math.pi * s / steps)))
        t = s + 1
        starting = s < round(w * steps)
        hh = wh if starting else h
        dd = 1.0 if starting else d
        if dw and s < dw * steps:
            dd = max(d, dr * (d / dr) ** (s / (dw * steps)))
        if f("lg", 0) and s >= 0.05 * steps:
            lv = f("lv", 1) * min(f("lg", 1), lr0 / lr)
        if ls:
            lv = ls * math.sqrt(dd / P)
        with torch.no_grad():
            if name == "updates" and (since or lv):
                if car is not None:
                    torch.sub(ref, unsent, out=views)
                    views.add_(car, alpha=1 - lv)
                else:
                    torch.sub(ref, unsent, alpha=lv, out=views)
            elif zero_one is not None:
                torch.sub(ref, zero_one.moved, out=views)
            else:
                views.copy_(ref.expand(P, n))
        xs.copy_(train_t[idx[s][:, :, None] + ar])
        replay()
        losses += loss_t.detach()
        c1, c2 = 1 / (1 - b1**t), 1 / (1 - b2**t)

        def scalar(x):
            return torch.full((), x, device=dev)

        def clip(g):
            return (1 / (g.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)

        if name == "demo":
            demo(v, lr, f("decay", 0.999), int(f("keep", 32)), unsent[0])
            ref.mul_(1 - lr * decays).sub_(lr * unsent[0].sign())
            sent_bytes += P * f("keep", 32) / 4096 * 28 / 32  # of a ring, 32 (P - 1) / P bits an element
        elif zero_one is not None:  # exchanges are twice as far apart each time that the rate has halved
            interval = 1 if s < 0.05 * steps else min(h, 2 ** int(math.log2(lr0 / lr)))
            ref.mul_(1 - lr * decays)
            sent_bytes += zero_one.step(s, gs * clip(gs), m, v, unsent, ref, lr, interval, b1, b2)
        elif name != "updates" or (starting and wm == "g"):
            if name == "powersgd":
                mean = torch.empty(1, n, device=dev)
                if starting:
                    mean[0] = gs.mean(0)
                    sent_bytes += 1.0
                else:
                    if not factors:
                        factors.extend(
                            torch.randn(x[-1], int(f("rank", 4)), device=dev) for x in shapes.values()
                        )
                    sent_bytes += power_sgd(unsent, factors, int(f("rank", 4)), mean[0])
            elif name == "gradients":
                unsent.add_(gs)
                mean = exchange(unsent, dd, wire, chunk)[None]
            else:
                mean = gs.mean(0, keepdim=True)
            if name != "powersgd":
                sent_bytes += 1.0 if dd >= 1 else BYTES[wire] * dd
            one = mean.expand(S, n)
            moments(one.contiguous() if S > 1 else one, m, v, clip(mean), scalar(b1), scalar(b2))
            u = torch.zeros(1, n, device=dev)
            step_of(m[:1], v[:1], u, scalar(lr), scalar(c1), scalar(c2))
            if vsh is not None:
                vsh.copy_(v[0])
            ref.mul_(1 - lr * decays).sub_(u[0])
        else:
            lrt, c1t, c2t = scalar(lr), scalar(c1), scalar(c2)
            clips = clip(gs)
            moments(gs, m, v, clips, scalar(b1), scalar(b2))
            if vs:
                j = s % vs
                part = slice(j * -(-n // vs), (j + 1) * -(-n // vs))
                v[:, part] = v[:, part].mean(0)
                sent_bytes += 0.5 / vs
            if vmode == "mean":
                vsh.lerp_((gs * clip(gs)).mean(0).square(), 1 - b2)
                sent_bytes += 1.0
                step_of(m, vsh.expand(P, n).contiguous(), unsent, lrt, c1t, c2t)
            elif vmode == "ratio":
                if s % 10 == 0 or s < 20:
                    if rs:  # by a random sample of each tensor, at least 32 of its elements
                        spot = torch.cat(
                            [
                                at + torch.randint(0, k, (max(min(32, k), k // rs),), device=dev)
                                for at, k in zip(begins, sizes, strict=False)
                            ]
                        )
                        few = gs[:, spot]
                        tensor = torch.repeat_interleave(
                            torch.arange(len(sizes), device=dev),
                            torch.tensor([max(min(32, k), k // rs) for k in sizes], device=dev),
                        )
                        a = torch.zeros(len(sizes), device=dev).index_add_(0, tensor, few.mean(0).square())
                        b = torch.zeros(len(sizes), device=dev).index_add_(0, tensor, few.square().mean(0))
                        sent_bytes += len(spot) * 2 / n
                        size = torch.tensor([k / max(min(32, k), k // rs) for k in sizes], device=dev)
                        a, b = a * size, b * size
                    else:
                        mean = gs.mean(0)
                        a = torch.stack(torch._foreach_norm(list(mean.split(sizes)))).square()
                        b = (
                            sum(torch.stack(torch._foreach_norm(list(g.split(sizes)))).square() for g in gs)
                            / P
                        )
                    sums.lerp_(torch.stack([a, b]), 0.2)
                    both = sums.sum(1, keepdim=True).expand_as(sums) if rg else sums
                    rho = torch.repeat_interleave(
                        (both[0] / both[1].clamp(min=1e-30)).clamp(1 / P, 1), torch.tensor(sizes, device=dev)
                    )
                step_scaled(m, v, rho, unsent, lrt, c1t, c2t)
            else:
                step_of(m, v, unsent, lrt, c1t, c2t)
            ref.mul_(1 - lr * decays)
            since += 1
            if since >= hh or s == steps - 1:
                if mask and dd < 1:
                    u, share = exchange_masked(unsent, dd, wire, turn, int(f("blk", 1)), mask == "sum")
                    if share is not None:
                        chosen.append(round(share, 5))
                else:
                    u = exchange(unsent, dd, wire, chunk)
                since = 0
                turn += 1
                sent_bytes += dd * (MASKED if mask else BYTES)[wire] if dd < 1 else 1.0
                if mu:
                    buf.mul_(mu).add_(u)
                    u = u + mu * buf
                ref.sub_(olr * u)
                if rd < 1 or f("fg", 0):
                    unsent.mul_(rd * (1 - f("fg", 0) / (s + 30)))
                if car is not None:
                    car.copy_(unsent)
        if (s + 1) % max(1, steps // 4) == 0 or s == steps - 1:
            if (s < steps - 1 and (s + 1) % (steps // 4)) or len(out) >= 4:
                continue
            out.append(round(evaluate(ref), 4))
            if s + 1 >= f("stop", STOP):
                break
            if out[-1] != out[-1] or out[-1] > 9.5:
                break
    half = first_half
    some = name in ("updates", "gradients") and d < 1
    less = round(evaluate(ref - unsent.mean(0)), 4) if some else None
    ratio = float(gs.mean(0).square().sum() / gs.square().sum(1).mean())
    print(
        json.dumps(
            {
                "spec": spec,
                "n": n,
                "P": P,
                "steps": steps,
                "held": out,
                "half": round(half, 4),
                "less": less,
                "train": round(float(losses) / P / (s + 1), 4),
                "bytes": round(sent_bytes / (s + 1), 5),
                "gratio": round(ratio, 3),
                "residual": round(float(unsent.mean(0).norm()), 3),
                "seconds": round(time.time() - t0, 1),
                "chosen": chosen if mask else None,
            }
        ),
        flush=True,
    )


for spec in sys.argv[1:]:
    if time.time() - BEGIN > LIMIT:
        print(json.dumps({"spec": spec, "left_out": True}), flush=True)
        continue
    try:
        run(spec)
    except Exception as error:
        print(json.dumps({"spec": spec, "error": repr(error)[:300]}), flush=True)
