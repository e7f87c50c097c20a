"""PowerSGD as a mode of training: torch's own hook in DistributedDataParallel, with a state that checkpoints hold."""

# No `from __future__ import annotations`: torch compares the hook's annotations with its classes.

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook

from collectives.traffic import Traffic
from jobs.train.passes import EagerStart
from jobs.train.reduce.baselines import DdpTraining
from jobs.train.reduce.process_group import ring_traffic

LEAST_RATE = 2
"""A parameter is approximated where that divides its elements by more than this: torch's default."""
EPSILON = 1e-8
"""Added to the norm of a column of P or Q, so that a gradient of zeros does not become NaN."""


class LowRank(NamedTuple):
    """Elements that are summed over the ranks in place of some gradients: those of P, of Q, and of what is summed whole."""

    p: int
    q: int
    whole: int


def low_rank(shapes: Iterable[Sequence[int]], rank: int) -> LowRank:
    """What torch's hook sums for parameters of these shapes, each of at least one dimension.

    A gradient is a matrix of its first dimension by all others, n x m, and r = min(rank, n, m). It is approximated by P of
    n x r and Q of m x r where LEAST_RATE (n + m) r < n m, and summed whole elsewhere.
    """
    p = q = whole = 0
    for first, *others in shapes:
        rest = int(torch.Size(others).numel())
        r = min(rank, first, rest)
        if LEAST_RATE * (first + rest) * r < first * rest:
            p, q = p + first * r, q + rest * r
        else:
            whole += first * rest
    return LowRank(p, q, whole)


class _InPlace(dict[int, torch.Tensor]):
    """Tensors that stay where they are: what is to replace one is copied into it."""

    def __setitem__(self, key: int, value: torch.Tensor) -> None:
        self[key].copy_(value)


@dataclass
class _Hook:
    """What DistributedDataParallel hands to `_reduce`. It holds no parameter: the garbage collector cannot see who holds it.

    Attributes:
        state: of torch's hook.
        numbers: id of a parameter -> its place among the optimizer's.
        layout: bucket -> places of its parameters, in its order.
        rehearsing: only note the layout.
    """

    state: PowerSGDState
    numbers: dict[int, int]
    layout: dict[int, list[int]] = field(default_factory=dict)
    rehearsing: bool = True


def _reduce(hook: _Hook, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    if hook.rehearsing:
        hook.layout[bucket.index()] = [hook.numbers[id(p)] for p in bucket.parameters()]
        done: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        done.set_result(bucket.buffer())
        return done
    return reduce_low_rank(hook.state, bucket)


def reduce_low_rank(state: PowerSGDState, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    """torch's hook, for several buckets on gloo as well, and for GPUs without a race."""
    if bucket.buffer().device.type == "cpu":
        future = powerSGD_hook(state, bucket)
        # gloo runs the hook's later parts in its two threads, where each waits for a sum that needs one of them: with several
        # buckets at work the ranks hang
        future.wait()
        return future
    # The hook reads its copy of the gradient on another stream, and frees it without telling the allocator. Where it is made on a
    # stream of its own, which waits for that reader, its memory is not given to the backward pass that goes on beside.
    stream = _stream_of(bucket.index())
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        future = powerSGD_hook(state, bucket)
        future.wait()
    return future


@cache
def _stream_of(bucket: int) -> torch.cuda.Stream:
    return torch.cuda.Stream()


class PowerSgdTraining(DdpTraining):
    """DistributedDataParallel with torch's PowerSGD hook, with error feedback and warm start.

    Each gradient is a matrix M, see `low_rank`. Ranks sum P = M Q, make its columns orthonormal, sum Q = transposed M P, and step
    on P times transposed Q over the number of ranks. What this rank's M has beyond that is added to its next gradient.

    With a rank of 1 or 2 torch's hook stops updating a parameter whose gradients and errors were 0 on all ranks in one step: its
    Q is 0 from then on. Later gradients stay in the error.

    A CUDA graph is captured after the first approximated step, which makes the errors and draws Q. In a graph the error is copied
    once more, to where the next replay reads it, and the hook does not wait for the GPU before it is computed.

    Args:
        inner, clip_norm, network, ranks, bucket_mb, captured: as DdpTraining. Every parameter has at least one dimension.
        rank: of P and Q, at least 1.
        start: steps that sum the whole gradient first, at least 2.

    Raises:
        ValueError: a parameter without dimensions.

    Traffic: two thirds of the messages are P and Q; words as `low_rank` says, by a ring.
    Memory: the error, n words on each rank; on GPUs a copy of the gradient, too.
    Source: Vogels et al., NeurIPS 2019; torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook.
    """

    _at_once_on_gpus = True  # its state is of the buckets

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        clip_norm: float,
        network: nn.Module,
        ranks: int,
        *,
        bucket_mb: float,
        rank: int,
        start: int,
        captured: bool = False,
    ) -> None:
        scalars = [name for name, p in network.named_parameters() if p.requires_grad and not p.ndim]
        if scalars:
            raise ValueError(
                f"powersgd takes parameters of at least one dimension, and {', '.join(scalars)} has none"
            )
        self._start = start
        self._powersgd = PowerSGDState(
            None,
            matrix_approximation_rank=rank,
            start_powerSGD_iter=start,
            min_compression_rate=LEAST_RATE,
            orthogonalization_epsilon=EPSILON,
        )
        super().__init__(inner, clip_norm, network, ranks, bucket_mb=bucket_mb, captured=captured)
        self._sums = [
            low_rank([self._parameters[number].shape for number in members], rank) for members in self._layout
        ]

    @property
    def _layout(self) -> list[list[int]]:
        return [self._hook.layout[bucket] for bucket in range(len(self._hook.layout))]

    def _register_hook(self, dtype: torch.dtype) -> None:
        self._hook = _Hook(self._powersgd, {id(p): number for number, p in enumerate(self._parameters)})
        self.network.register_comm_hook(self._hook, _reduce)

    def _form_buckets(self) -> None:
        """As DdpTraining's; nothing is communicated but which parameters a bucket has."""
        super()._form_buckets()
        self._hook.rehearsing = False

    @property
    def eager_start(self) -> EagerStart | None:
        """As DdpTraining's."""
        start = super().eager_start
        return start and EagerStart(start.stream, max(start.steps, self._start + 1 - self._steps))

    @contextmanager
    def recording(self) -> Iterator[None]:
        """As DdpTraining's. What is captured leaves errors where they are, and waits for no GPU."""
        own = self._powersgd
        own.error_dict = _InPlace(own.error_dict)
        try:
            with patch.object(torch.cuda, "synchronize", lambda device=None: None):
                yield
        finally:
            own.error_dict = dict(own.error_dict)

    def _finish(self) -> Traffic:
        if self._steps < self._start:
            return super()._finish()
        words = sum(sum(sums) for sums in self._sums)
        return ring_traffic(words, self._ranks, 3 * len(self._sums))

    def state_dict(self) -> dict[str, Any]:
        """As DdpTraining's, with the error as the residual, in the order of the parameters, and the matrices Q of each bucket."""
        state = super().state_dict()
        errors, matrices = self._powersgd.error_dict, self._powersgd.q_memory_dict
        pieces: dict[int, torch.Tensor] = {}
        for bucket, members in enumerate(self._layout if errors else []):
            sizes = [self._parameters[number].numel() for number in members]
            pieces |= zip(members, errors[bucket].split(sizes), strict=True)
        state["reducer"] |= {
            "residual": torch.cat([pieces[number] for number in sorted(pieces)]) if pieces else None,
            "matrices": [matrices[bucket] for bucket in sorted(matrices)],
        }
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the `state_dict` was taken, bit for bit on CPUs; a residual of None begins without an error.

        Raises:
            ValueError: it was taken with other buckets or another rank of the matrices.
        """
        residual, matrices = (state_dict["reducer"].get(name) for name in ("residual", "matrices"))
        sizes = [sums.q for sums in self._sums]
        if matrices and [len(each) for each in matrices] != sizes:
            raise ValueError(
                f"a state of PowerSGD with {[len(each) for each in matrices]} elements in its buckets is not for {sizes}"
            )
        super().load_state_dict(state_dict)
        own = self._powersgd
        own.iter = self._steps
        for kept in (own.error_dict, own.p_memory_dict, own.q_memory_dict):
            kept.clear()
        like = self._parameters[0]
        if residual is not None:
            errors = torch.as_tensor(residual).to(like).split([p.numel() for p in self._parameters])
            for bucket, members in enumerate(self._layout):
                own.error_dict[bucket] = torch.cat([errors[number] for number in members])
        for bucket, matrix in enumerate(matrices or []):
            own.q_memory_dict[bucket] = torch.as_tensor(matrix).to(like, copy=True)
            own.p_memory_dict[bucket] = like.new_empty(self._sums[bucket].p)  # computed from Q
