"""Kernels that touch gradients, on the host or on a GPU, against NumPy and torch; nothing beside their arrays is written."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from collectives.sparse import ENTRY
from oktopk.cpu import kernels as host_kernels
from oktopk.cpu.accumulate import HostDisplacement
from oktopk.cpu.adamw import HostAdamW
from oktopk.cpu.kernels import BLOCK, ShardSum
from oktopk.displacement import adamw_terms
from tests.adamw import assert_torchs
from tests.devices import get, put

Vector = NDArray[np.float32]

GUARD = 64
SENTINEL = np.array((-7, -7.0), ENTRY)


class Held:
    """An array on a side, with something else before and behind it.

    Args:
        offset: elements before it.
    """

    def __init__(self, where: str, array: NDArray[Any], offset: int = GUARD) -> None:
        self._begin, self._end = offset, offset + len(array)
        self._around = np.full(self._end + GUARD, 77, array.dtype)
        self._around[self._begin : self._end] = array
        self._whole = put(where, self._around.copy())
        self.array = self._whole[self._begin : self._end]
        first = self._whole.ctypes.data if where == "cpu" else self._whole.data.ptr
        self.address = first + offset * array.itemsize

    def get(self) -> NDArray[Any]:
        """A copy; what is around it is as it was."""
        now = get(self._whole)
        inside = now[self._begin : self._end].copy()
        now[self._begin : self._end] = self._around[self._begin : self._end]
        assert now.tobytes() == self._around.tobytes()
        return inside


class Side:
    """The host, or the GPU of a `collectives.cuda.device.Device`, for gradients of a type."""

    def __init__(self, device: Any = None, gradient_type: str = "float32") -> None:
        self._device, self.where = device, "cpu" if device is None else "cuda"
        self.kernels: Any = host_kernels
        if device is not None:
            from oktopk.cuda.kernels import DeviceKernels

            self.kernels = DeviceKernels(device, gradient_type)

    def hold(self, array: NDArray[Any], offset: int = GUARD) -> Held:
        return Held(self.where, array, offset)

    def displacement(self, *arguments: Any) -> Any:
        return (HostDisplacement if self._device is None else self.kernels.displacement)(*arguments)

    def adamw(self, *arguments: Any) -> Any:
        return (HostAdamW if self._device is None else self.kernels.adamw_displacement)(*arguments)

    def shard_sum(self, rows: NDArray[Any], n: int, **layout: int) -> Any:
        """The sum of n elements of a shard; the rows live as long as the side."""
        out = np.empty(n, np.float32)
        if self._device is None:
            return ShardSum(rows, out=out, **layout)
        self._rows = [put("cuda", row) for row in rows]
        self._windows = put("cuda", np.array([row.data.ptr - 256 for row in self._rows], np.uint64))
        more = {"windows": self._windows.data.ptr, "first": 256, "ranks": len(rows)}
        from oktopk.cuda.shard_sum import DeviceShardSum

        held = self._device.allocate(n, np.float32)
        return DeviceShardSum(self._device, self.kernels.shard_sum_kernels, held, **more, **layout)

    def select(
        self, gradient: Any, residual: Any, bits: int, room: int, boundaries: NDArray[np.int64]
    ) -> tuple[Any, NDArray[np.void]]:
        """What was found, and the list, behind which nothing is written."""
        if self._device is None:
            entries = np.full(room + BLOCK + GUARD, SENTINEL)
            found = self.kernels.accumulate_select(gradient, residual, bits, entries[: room + BLOCK])
            assert np.all(entries[room + BLOCK :] == SENTINEL), "wrote past the end of the list"
            return found, entries[:room]
        from collectives.cuda.device import DeviceEntries

        memory = self._device.allocate(room + GUARD, np.uint64)
        memory.set(np.full(room + GUARD, SENTINEL).view(np.uint64))
        whole = DeviceEntries(self._device, memory.data.ptr, room + GUARD, memory)
        found = self.kernels.accumulate_select(gradient, residual, bits, whole[:room], boundaries)
        entries = whole.get()
        assert np.all(entries[room:] == SENTINEL), "wrote past the end of the list"
        return found, entries[:room]


def magnitude_bits(values: Any) -> NDArray[np.int32]:
    return np.atleast_1d(np.abs(np.asarray(values, np.float32))).view(np.int32)


def check_select(
    side: Side, gradient: Any, vector: Vector, residual: Held, magnitude: float, room: int | None = None
) -> NDArray[np.float32]:
    """One pass over what stands for a vector, into a list of a room, None for just enough; returns what it leaves."""
    before = residual.get()
    with np.errstate(over="ignore", invalid="ignore"):
        accumulated = vector + before
    finite, bits = np.isfinite(accumulated), int(magnitude_bits(magnitude)[0])
    wanted = np.flatnonzero(finite & (magnitude_bits(accumulated) >= bits))
    n, room = len(vector), len(wanted) if room is None else room
    edges = np.random.default_rng(n).integers(0, n + 1, 5)
    boundaries = np.sort(np.array([0, *edges, min(n, 4096), min(n, 4096), n, n], np.int64))
    found, entries = side.select(gradient, residual.array, bits, room, boundaries)
    assert (found.nnz, found.nonfinite) == (len(wanted), np.count_nonzero(~finite))
    after = residual.get()
    assert after.tobytes() == np.where(finite, accumulated, before).tobytes()
    if found.nnz <= room:
        assert entries["index"][: found.nnz].tolist() == wanted.tolist()
        assert entries["value"][: found.nnz].tobytes() == accumulated[wanted].tobytes()
        if side.where == "cuda":
            assert found.offsets.tolist() == np.searchsorted(wanted, boundaries).tolist()
    return after


def check_shard_sums(
    side: Side, rows: Vector, block: int, shards: int, magnitude: float, stored: Any = None
) -> None:
    """Each shard of the rows' sum, in their order, and taken back. stored: the rows as they are given; None: the same."""
    rng = np.random.default_rng(block)
    for shard in range(shards):
        mine = np.flatnonzero(np.arange(rows.shape[1]) // block % shards == shard)
        total = rows[0, mine].copy()
        for row in rows[1:]:
            total += row[mine]
        before = rng.standard_normal(len(mine)).astype(np.float32)
        left, cut = side.hold(before), {"block": block, "shards": shards, "shard": shard}
        gradient = side.shard_sum(rows if stored is None else stored, len(mine), **cut)
        after = check_select(side, gradient, total, left, magnitude)
        added, known = get(gradient.summed()), ~np.isnan(total)
        assert np.isnan(added[~known]).all() and added[known].tobytes() == total[known].tobytes()
        side.kernels.undo_accumulate(gradient, left.array)
        with np.errstate(invalid="ignore"):
            taken_back = np.where(np.isfinite(total), after - total, after)
        assert left.get().tobytes() == taken_back.tobytes()
        assert np.allclose(taken_back, before, atol=1e-5)


def wild(rng: np.random.Generator, size: int) -> Tensor:
    """Float32 that rounds up, down, to even, to Inf and to what is nearly zero, and some that is not finite."""
    values = (3 * rng.standard_normal(size)).astype(np.float32)
    largest = np.finfo(np.float32).max
    special = [np.nan, np.inf, -np.inf, largest, -largest, 65519, 65520, -65536, 1e-40, -1e-45, 6e-8, -0.0]
    special += [0.0, -6e-8, 2**-14, 1.3 * 2**-15]
    special += [1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-11, 1 + 3 * 2**-11]  # half way
    chosen = rng.random(size) < 0.3
    values[chosen] = rng.choice(np.array(special, np.float32), int(chosen.sum()))
    return torch.from_numpy(values)


def bits_of(tensor: Tensor) -> NDArray[Any]:
    """A tensor as kernels take it: bfloat16, which NumPy does not have, by its bits."""
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.int16).numpy().view(np.uint16)
    return tensor.numpy()


def check_displacement(side: Side, element_type: str, sizes: list[int], offset: int = GUARD) -> None:
    """Rounded as torch rounds and added as a vector, without a part; what is shown then leaves none, with another share, too."""
    dtype, rng, n, share = getattr(torch, element_type), np.random.default_rng(7), sum(sizes), 1 / 3
    values = wild(rng, n).numpy()
    values[~(np.abs(values) < 1e38)] = 1e-40
    unsent = np.where(rng.random(n) < 0.5, 0, rng.standard_normal(n) / 99).astype(np.float32)
    shown = torch.from_numpy(values - np.float32(share) * unsent).to(dtype)
    now = (shown.float() * (1 + 3 * torch.from_numpy(unsent))).to(dtype)
    now[rng.random(n) < 0.01] = math.nan
    with np.errstate(invalid="ignore"):
        vector = shown.float().numpy() - now.float().numpy()
    absent, edges = len(sizes) // 2, np.cumsum([0, *sizes])
    vector[edges[absent] : edges[absent + 1]] = 0
    reference, left = side.hold(values, offset), side.hold(unsent)
    parts = [side.hold(bits_of(part)) for part in now.split(sizes)]
    moved = side.displacement(sizes, element_type, reference.array, share)
    moved.set_pointers([part.address * (number != absent) for number, part in enumerate(parts)])
    after = check_select(side, moved, vector, left, 0.02)
    side.kernels.undo_accumulate(moved, left.array)  # it stays
    assert left.get().tobytes() == after.tobytes()
    moved.set_pointers([part.address for part in parts])
    for factors in ([0.5 + number % 3 / 4 for number in range(len(sizes))], None):
        if factors is not None:
            values = values * np.repeat(np.array(factors, np.float32), sizes)
        else:
            moved.set_share(share := 1 / 7)
        moved.show(left.array, factors)
        assert reference.get().tobytes() == values.tobytes()
        shown = torch.from_numpy(values - np.float32(share) * after).to(dtype)
        assert b"".join(part.get().tobytes() for part in parts) == bits_of(shown).tobytes()
    nothing = torch.where(shown.isfinite(), 0.0, math.nan).float().numpy()
    check_select(side, moved, nothing, left, 1e-45)


def check_adamw(side: Side, element_type: str, sizes: list[int], offset: int = GUARD) -> None:
    """On 3 steps, of which one lacks a gradient; the residual takes each move, and the moments of float32 are torch's.

    Args:
        offset: elements before each first moment.
    """
    dtype, rng, rate, eps, n = getattr(torch, element_type), np.random.default_rng(3), 1e-2, 1e-8, sum(sizes)
    absent, edges = len(sizes) // 2, np.cumsum([0, *sizes])
    missing = slice(int(edges[absent]), int(edges[absent + 1]))
    betas = [(0.3, 0.99) if number % 3 == 1 else (0.9, 0.999) for number in range(len(sizes))]
    displacement = side.adamw(sizes, element_type)
    moments = [torch.zeros(n, dtype=dtype) for _ in range(2)]
    homes = [
        [side.hold(bits_of(part), before) for part in moment.split(sizes)]
        for moment, before in zip(moments, (offset, GUARD), strict=True)
    ]
    torchs = [nn.Parameter(torch.zeros(size)) for size in sizes]
    groups = [{"params": [p], "betas": both} for p, both in zip(torchs, betas, strict=True)]
    fused = None
    if element_type == "float32":
        fused = torch.optim.AdamW(groups, lr=rate, eps=eps, weight_decay=0.0, fused=True)
    left, counts = side.hold(rng.standard_normal(n).astype(np.float32) / 99), [0] * len(sizes)
    f = np.float32
    for step in range(3):
        gradient = torch.from_numpy((rng.standard_normal(n) ** 3).astype(f)).to(dtype)
        there = [number != absent or step != 1 for number in range(len(sizes))]
        counts = [count + here for count, here in zip(counts, there, strict=True)]
        terms = np.array(
            [adamw_terms(rate, both, eps, count) for both, count in zip(betas, counts, strict=True)], f
        )
        given = [side.hold(bits_of(part)) for part in gradient.split(sizes)]
        addresses = np.array([[part.address for part in each] for each in (given, *homes)])
        addresses[0] *= there
        displacement.set_step(addresses, terms)
        weight, from_gradient, beta2, square, by, root, small = np.repeat(terms, sizes, axis=0).T
        g, m, v = (vector.float().numpy() for vector in (gradient, *moments))
        base = np.where(from_gradient == 1, g, m)
        mean = (weight.astype(np.float64) * (g - m) + base).astype(f)
        squares = ((square * g).astype(np.float64) * g + v * beta2).astype(f)
        with np.errstate(all="ignore"):
            moved = (by * mean) / (np.sqrt(squares) / root + small)
        wanted = [torch.from_numpy(x).to(dtype) for x in (mean, squares)]
        if step == 1:
            moved[missing] = 0
            for new, old in zip(wanted, moments, strict=True):
                new[missing] = old[missing]
        check_select(side, displacement, moved, left, 0.02)
        for each, moment in zip(homes, wanted, strict=True):
            assert b"".join(part.get().tobytes() for part in each) == bits_of(moment).tobytes()
        moments = wanted
        if fused is not None:
            for parameter, part, here in zip(torchs, gradient.split(sizes), there, strict=True):
                parameter.grad = part if here else None
            fused.step()
            for moment, name in zip(moments, ("exp_avg", "exp_avg_sq"), strict=True):
                assert_torchs(moment.split(sizes), [fused.state[p][name] for p in torchs])
