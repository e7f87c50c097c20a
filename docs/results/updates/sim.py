"""Which exchange of optimizer updates trains a language model as well as dense AdamW?

P workers are simulated on one GPU. Worker q computes its gradient at `reference - view`, runs its own AdamW, and adds the update to
what it has not sent yet (`unsent[q]`). Every h steps the workers exchange: each sends the entries of `unsent` above a threshold,
the sums above a global threshold are applied to the reference. Decay acts on the reference.

    DATA=DIR STEPS=1000 P=4 python sim.py SPEC ...          SPEC = name/key=value/...; one JSON line a run on standard output

name: dense (AdamW on the mean gradient), updates, gradients (error feedback on gradients, then AdamW).
keys: lr; b2: second-moment decay, `root` for 0.95^(1/P); seed
  d: density; h: steps between exchanges; olr: outer rate; mu: outer Nesterov momentum; wire: float32, bfloat16, int8, int4
  lv: share of the residual that a worker's own model contains (0: it sees the reference after each exchange)
  rd: residual decay an exchange; stride: 1 sends a rotating part of the elements, without indices; chunk: 1 selects per chunk of 4,096 and applies all (SparseLoCo)
  w, wm, wh: a dense start of w of the steps, summed as g(radients) or u(pdates), every wh steps; fh: h of the last part
  dr, dw: density falls from dr to d over the share dw of the steps
  v: own; mean (of the mean gradient, exact); slice/K=..: a rotating 1/K of it; ratio: own times the measured ratio of each tensor;
     pools/K=..: pool from a rotating 1/K of the workers' v and m, averaged densely in 8 bits (stale by up to K steps)
  rs: the ratio is measured on 1/rs of the elements (0: on all); rg=1: one ratio for all tensors
  pr, pl: a shared prediction of the mean movement is applied in every step and taken from what is unsent: w = pl (w + pr u)
     frozen: exact until the share fz of the steps; pool: (own + (P-1) mean of all)/P^2 + signal
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
B = BATCH // P
L, D = int(env("L", 6)), int(env("D", 384))
DATA = env("DATA", "gptdata")
dev = env("DEVICE", "cuda")
COMPILE = int(env("COMPILE", 1))
LIMIT = float(env("LIMIT", 1e9))
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

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, D // 64, 64).permute(2, 0, 3, 1, 4)
        x = x + self.o(
            F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, D)
        )
        return x + self.d(F.gelu(self.u(self.n2(x))))


class GPT(nn.Module):
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

    def forward(self, x):
        h = self.e(x) + self.p.weight
        for b in self.b:
            h = b(h)
        return F.cross_entropy(
            (self.n(h[:, :-1]) @ self.e.weight.T).float().reshape(-1, V), x[:, 1:].reshape(-1)
        )


def start_weights(seed):
    torch.manual_seed(seed)
    return torch.cat([p.detach().reshape(-1) for p in GPT().parameters()])


torch.manual_seed(0)
model = GPT().to(dev)
params = list(model.parameters())
sizes = [p.numel() for p in params]
n = sum(sizes)
flat = torch.empty(n, device=dev)
grad = torch.zeros(n, device=dev)
decays = torch.zeros(n, device=dev)
at = 0
for p in params:
    k = p.numel()
    flat[at : at + k].copy_(p.data.reshape(-1))
    p.data = flat[at : at + k].view_as(p)
    p.grad = grad[at : at + k].view_as(p)
    if p.dim() > 1:
        decays[at : at + k] = 0.1
    at += k
xs = torch.zeros(B, T, dtype=torch.long, device=dev)
ar = torch.arange(T, device=dev)
fast = compiled(model)


@torch.enable_grad()
def forward_backward():
    grad.zero_()
    with torch.autocast(dev, torch.bfloat16):
        loss = fast(xs)
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


def evaluate(weights):
    global first_half
    flat.copy_(weights)
    total = 0.0
    with torch.no_grad(), torch.autocast(dev, torch.bfloat16):
        for i in range(0, EVAL, 48):
            if i == EVAL // 2:
                first_half = total / i
            total += float(model(held_t[i : i + 48])) * len(held_t[i : i + 48])
    return total / EVAL


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
def step_pooled(m, v, pool, signal, unsent, lr, c1, c2):
    v2 = (v + (P - 1) * pool) / P**2 * c2 + (1 - 1 / P) * (signal * c1).square()
    unsent.add_(lr * (m * c1) / (v2.sqrt() + 1e-8))


@compiled
def step_pools(m, v, pool, signal, unsent, lr, c1, c2):
    own = v * c2
    v2 = torch.where(pool > 0, (own + (P - 1) * pool) / P**2 + (1 - 1 / P) * signal.square(), own)
    unsent.add_(lr * (m * c1) / (v2.sqrt() + 1e-8))


def rounded(x, wire, least, d):
    """Values as they arrive: bfloat16, or a code in [0, Q] linear in the bits between a block's least and largest magnitude."""
    if wire in ("float32", "plain"):
        return x
    if wire == "bfloat16":
        return x.bfloat16().float()
    top = 127 if wire == "int8" else 7
    block = max(256, int(256 / d))
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
def picked(unsent, t):
    return torch.where(unsent.abs() >= t, unsent, 0.0)


@compiled
def settle(unsent, sent, s, tg):
    keep = s.abs() >= tg
    unsent.sub_(torch.where(keep, sent, 0.0))
    return torch.where(keep, s, 0.0)


def thresholds(x, k, count=400_000):
    pos = torch.randint(0, n, (count,), device=dev)
    return torch.topk(x[:, pos].abs(), max(1, round(count * k / n)), dim=1, sorted=False).values.amin(
        1, keepdim=True
    )


def exchange(unsent, d, wire, chunk, stride=None):
    """The mean update; unsent loses what was sent and applied."""
    if (
        stride is not None and d < 1
    ):  # a rotating part of all elements, the same on all workers, without indices
        K = max(1, round(1 / d))
        part = unsent[:, stride % K :: K]
        sent = rounded(part.contiguous(), wire, None, 1)
        part.sub_(sent)
        mean = sent.mean(0, keepdim=True)
        v = rounded(mean, wire, None, 1)
        part[stride % P].add_((mean - v)[0] * P)
        u = torch.zeros(n, device=dev)
        u[stride % K :: K] = v[0]
        return u
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
    tg = thresholds(s, d * n, 1_600_000)
    u = settle(unsent, sent, s, tg)
    if wire not in ("float32", "plain"):
        v = rounded(u, wire, None, d)
        owner = torch.arange(n, device=dev) * P // n
        unsent.scatter_add_(0, owner[None], u - v)
        u = v
    return u[0] / P


STRIDE = {"float32": 2, "bfloat16": 1, "int8": 0.516, "int4": 0.266}
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
    olr, mu, lv, wire, rd, chunk = (
        f("olr", 1),
        f("mu", 0),
        f("lv", 0),
        o.get("wire", "float32"),
        f("rd", 1),
        int(f("chunk", 0)),
    )
    w, wm, wh = f("w", 0), o.get("wm", "u"), int(f("wh", 1))
    dr, dw = f("dr", 0), f("dw", 0)
    S = 1 if name in ("dense", "gradients") else P
    idx = batches(seed, steps)
    ref = start_weights(seed).to(dev)

    def zeros(r):
        return torch.zeros(r, n, device=dev)

    m, v, unsent, gs = zeros(S), zeros(S), zeros(P if name != "dense" else 1), zeros(P)
    car = zeros(P) if (h > 1 or wh > 1) and lv < 1 else None
    buf = zeros(1)[0] if mu else None
    pr, pl = f("pr", 0), f("pl", 0.99)
    pred = zeros(1)[0] if pr else None
    msh = zeros(1)[0] if vmode == "pools" else None
    vsh = zeros(1)[0] if vmode in ("mean", "slice", "frozen", "pool", "pools") or wm == "g" else None
    rho = torch.ones(n, device=dev)
    sums = torch.zeros(2, len(sizes), device=dev)
    Ks = int(f("K", 50))
    sl = -(-n // Ks)
    stride, turn = int(f("stride", 0)), 0
    rs, rg = int(f("rs", 0)), int(f("rg", 0))
    begins = np.cumsum([0, *sizes])[:-1].tolist()
    out, sent_bytes, t0, since, losses, info = [], 0.0, time.time(), 0, torch.zeros((), device=dev), {}
    for s in range(steps):
        lr = lr0 * min(1, (s + 1) / (0.05 * steps)) * (0.1 + 0.45 * (1 + math.cos(math.pi * s / steps)))
        t = s + 1
        starting = s < round(w * steps)
        hh = wh if starting else h
        dd = 1.0 if starting else d
        if dw and s < dw * steps:
            dd = max(d, dr * (d / dr) ** (s / (dw * steps)))
        flat.copy_(ref)
        for q in range(P):
            if name == "updates" and (since or lv):
                torch.sub(ref, unsent[q] if car is not None or lv == 1 else lv * unsent[q], out=flat)
                if car is not None:
                    flat.add_(car[q], alpha=1 - lv)
            xs.copy_(train_t[idx[s, q][:, None] + ar])
            replay()
            gs[q].copy_(grad)
            losses += loss_t.detach()
        c1, c2 = 1 / (1 - b1**t), 1 / (1 - b2**t)

        def scalar(x):
            return torch.full((), x, device=dev)

        def clip(g):
            return (1 / (g.norm(dim=1, keepdim=True) + 1e-6)).clamp(max=1)

        if name != "updates" or (starting and wm == "g"):
            if name == "gradients":
                unsent.add_(gs)
                mean = exchange(unsent, dd, wire, chunk)[None]
            else:
                mean = gs.mean(0, keepdim=True)
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
            moments(gs, m, v, clip(gs), scalar(b1), scalar(b2))
            if vmode in ("mean", "slice", "frozen", "pool"):
                mean = (gs * clip(gs)).mean(0)
            if vmode in ("mean", "frozen") and (vmode == "mean" or s < f("fz", 0.1) * steps):
                vsh.lerp_(mean.square(), 1 - b2)
                info["c2"] = c2
                sent_bytes += 1.0
            if vmode == "slice":
                j = s % Ks
                part = slice(j * sl, min(n, (j + 1) * sl))
                age = s // Ks + 1
                bs = f("bs", 0.9)
                vsh[part].lerp_(mean[part].square(), 1 - min(bs, 1 - 1 / age))
                sent_bytes += 1 / Ks
            if vmode in ("mean", "frozen"):
                step_of(m, vsh.expand(P, n).contiguous(), unsent, lrt, c1t, scalar(info["c2"]))
            elif vmode == "slice":
                own = (
                    v * c2
                )  # a few samples do not make a second moment: it stays between that of pure noise and the own
                step_of(m, torch.minimum(torch.maximum(vsh, own / P), own), unsent, lrt, c1t, scalar(1.0))
            elif vmode == "pool":
                vsh.lerp_(gs.square().mean(0), 1 - b2)
                step_pooled(m, v, vsh, m.mean(0), unsent, lrt, c1t, c2t)
            elif vmode == "pools":
                j = s % Ks
                part = slice(j * sl, min(n, (j + 1) * sl))
                sent_bytes += 1 / Ks
                vsh[part] = v[:, part].mean(0) * c2
                msh[part] = m[:, part].mean(0) * c1
                step_pools(m, v, vsh, msh, unsent, lrt, c1t, c2t)
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
                if pr:
                    unsent.sub_(pred)
                    ref.sub_(pred)
                u = exchange(unsent, dd, wire, chunk, turn if stride else None)
                since = 0
                turn += 1
                sent_bytes += 1.0 if dd >= 1 else (STRIDE if stride else BYTES)[wire] * dd
                if mu:
                    buf.mul_(mu).add_(u)
                    u = u + mu * buf
                ref.sub_(olr * u)
                if pr:
                    pred.add_(u, alpha=pr).mul_(pl)
                if rd < 1:
                    unsent.mul_(rd)
                if car is not None:
                    car.copy_(unsent)
        if (s + 1) % max(1, steps // 4) == 0 or s == steps - 1:
            if (s < steps - 1 and (s + 1) % (steps // 4)) or len(out) >= 4:
                continue
            out.append(round(evaluate(ref), 4))
            if out[-1] != out[-1] or out[-1] > 9.5:
                break
    less = round(evaluate(ref - unsent.mean(0)), 4) if name != "dense" and d < 1 else None
    ratio = float(gs.mean(0).square().sum() / gs.square().sum(1).mean())
    print(
        json.dumps(
            {
                "spec": spec,
                "n": n,
                "P": P,
                "steps": steps,
                "held": out,
                "half": round(first_half, 4),
                "less": less,
                "train": round(float(losses) / P / (s + 1), 4),
                "bytes": round(sent_bytes / (s + 1), 5),
                "gratio": round(ratio, 3),
                "residual": round(float(unsent.mean(0).norm()), 3),
                "seconds": round(time.time() - t0, 1),
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
