"""Dense reduction as a mode of training: in buckets behind the backward pass, by NCCL in one piece, or by torch's own DDP.

They are what a sparse method is to be compared with, and are shaped like `oktopk.DistributedOptimizer` for the loop.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from collectives.traffic import Traffic
from jobs.train.reduce.background import Wire, ring_traffic, stop_process_group
from oktopk import StepReport
from oktopk.torch.gradients import FlatGradients
from oktopk.torch.optimizer import load_state


class DenseTraining(ABC):
    """What the modes have in common.

    Args:
        inner: the torch optimizer that owns the parameters, all of one type and on one device.
        clip_norm: scale the reduced gradient down to this Euclidean norm; 0 for never.

    Attributes:
        inner: as given.
        length: elements of the gradient (n).
    """

    def __init__(self, inner: torch.optim.Optimizer, clip_norm: float) -> None:
        self.inner = inner
        self._parameters = [p for group in inner.param_groups for p in group["params"] if p.requires_grad]
        self.length = sum(p.numel() for p in self._parameters)
        self._clip_norm = clip_norm
        self._steps = 0

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """Those of the torch optimizer within."""
        return self.inner.param_groups

    def zero_grad(self) -> None:
        """Forget all gradients."""
        self.inner.zero_grad(set_to_none=True)

    @abstractmethod
    def no_sync(self) -> AbstractContextManager[None]:
        """Within it backward passes add up locally."""

    @abstractmethod
    def _finish(self) -> Traffic:
        """Return when each `p.grad` is the mean over the ranks, or is sure to be before whatever a GPU is asked for next."""

    def reduce(self, *, measure: bool = False) -> StepReport:
        """The first half of a step: from here on each `p.grad` is the mean over the ranks. Collective.

        Args:
            measure: not for these modes.

        Returns:
            A dense step's report. Its seconds are what the backward pass did not hide.
        """
        started = time.perf_counter()
        traffic = self._finish()
        if self._clip_norm:
            nn.utils.clip_grad_norm_(self._parameters, self._clip_norm)
        seconds = {"allreduce": time.perf_counter() - started}
        report = StepReport(self._steps, "dense", self.length, self.length, seconds, local_exact=True)
        report.local_nnz = report.global_nnz = self.length
        report.words, report.messages = traffic.words, traffic.messages
        report.control_words, report.control_messages = traffic.control_words, traffic.control_messages
        self._steps += 1
        return report

    def apply(self) -> None:
        """The second half of a step: the wrapped optimizer's own."""
        self.inner.step()

    def complete(self) -> None:  # noqa: B027 - of no mode
        """Nothing: what is known of a step is known at once."""

    @property
    def hosts(self) -> None:
        """Flat steps."""
        return None

    @property
    def gradient(self) -> NDArray[np.float32]:
        """float32[n]: the reduced gradient on the host; what this rank alone computed is not kept."""
        return (
            torch.cat([p.grad.float().reshape(-1) for p in self._parameters if p.grad is not None])
            .cpu()
            .numpy()
        )

    def state_dict(self) -> dict[str, Any]:
        """As DistributedOptimizer's, of a reducer that leaves nothing behind."""
        nothing = dict.fromkeys(("last_k", "residual", "velocity"))
        return {**self.inner.state_dict(), "reducer": {"steps": self._steps, **nothing}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the `state_dict` was taken."""
        state = dict(state_dict)
        self._steps = state.pop("reducer")["steps"]
        load_state(self.inner, state)

    @abstractmethod
    def close(self) -> None:
        """Free what was set up. Collective."""


class BucketedTraining(DenseTraining):
    """Gradients in one flat buffer, reduced bucket by bucket, each as soon as the backward pass has filled it.

    Buckets start in one order on all ranks, last parameters first, whatever order autograd takes.

    Args:
        inner, clip_norm: as DenseTraining.
        buckets: consecutive pieces of the flat gradient, in the order in which they are to start; see `bucket_slices`.
        wire: sums up pieces; see `jobs.train.reduce.background`.
        flat: the gradients; the wire's pieces are slices of it.
        overlapped: start in the backward pass, else after it.

    Attributes:
        overlapped: as given.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        clip_norm: float,
        flat: FlatGradients,
        buckets: Sequence[slice],
        wire: Wire,
        *,
        overlapped: bool,
    ) -> None:
        super().__init__(inner, clip_norm)
        self._flat = flat
        self._wire = wire
        self._bucket_of = _buckets_of(self._parameters, buckets)
        self._sizes = [self._bucket_of.count(bucket) for bucket in range(len(buckets))]
        self._missing = list(self._sizes)
        self._started = 0
        self.overlapped = self._armed = overlapped
        self._captured: Traffic | None = None
        self._hooks = [
            parameter.register_post_accumulate_grad_hook(self._hook(bucket))
            for parameter, bucket in zip(self._parameters, self._bucket_of, strict=True)
        ]
        flat.attach()

    def zero_grad(self) -> None:
        self._flat.zero()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        armed, self._armed = self._armed, False
        try:
            yield
        finally:
            self._armed = armed

    def _hook(self, bucket: int) -> Any:
        def filled(parameter: Tensor) -> None:
            if not self._armed:
                return
            if bucket < self._started:
                raise RuntimeError(
                    "a backward pass after the one that reduces: put all but the last in no_sync()"
                )
            self._missing[bucket] -= 1
            while self._started < len(self._missing) and not self._missing[self._started]:
                self._wire.start(self._started)
                self._started += 1

        return filled

    def settle(self) -> None:
        """Wait for what a backward pass began, on the device's stream: the end of one that is captured, or that precedes it.

        What is captured so is replayed with the pass, and `reduce` only accounts for it.
        """
        assert self.overlapped
        self._captured = self._end()

    def _finish(self) -> Traffic:
        untouched = not self._started and self._missing == self._sizes
        return self._captured if untouched and self._captured is not None else self._end()

    def _end(self) -> Traffic:
        # a parameter that got no gradient held its bucket, and all after it, back
        for bucket in range(self._started, len(self._sizes)):
            self._wire.start(bucket)
        self._started = 0
        self._missing = list(self._sizes)
        return self._wire.finish()

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._wire.close()


class DdpTraining(DenseTraining):
    """torch's DistributedDataParallel around a model; its hooks reduce in the backward pass.

    Args:
        inner, clip_norm: as DenseTraining.
        network: a module with the parameters of `inner`.
        ranks: in the process group.
        bucket_mb: size of a bucket, in 1e6 bytes.
        compressed: reduce in bfloat16.

    Attributes:
        network: what losses are to be computed with.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        clip_norm: float,
        network: nn.Module,
        ranks: int,
        *,
        bucket_mb: float,
        compressed: bool,
    ) -> None:
        super().__init__(inner, clip_norm)
        self._ranks = ranks
        self._elements_per_word = 2 if compressed else 1
        self._pieces = math.ceil(
            4 * self.length / (bucket_mb * 1e6)
        )  # about: torch cuts the first one smaller
        with warnings.catch_warnings():
            # a newer torch has another word for broadcast_buffers, which an older one does not know
            warnings.simplefilter("ignore", FutureWarning)
            self.network = DistributedDataParallel(
                network,
                bucket_cap_mb=bucket_mb * 1e6 / 2**20,
                broadcast_buffers=False,  # batch-norm statistics are averaged before an evaluation
                gradient_as_bucket_view=True,
            )
        if compressed:
            self.network.register_comm_hook(None, default_hooks.bf16_compress_hook)

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.network.no_sync()
        return context

    def close(self) -> None:
        stop_process_group()

    def _finish(self) -> Traffic:
        return ring_traffic(self.length // self._elements_per_word, self._ranks, self._pieces)


def bucket_slices(parameters: Sequence[Tensor], nbytes: float) -> list[slice]:
    """Cut the flat gradient into buckets of whole parameters, from its end, each at least so large but for the last one.

    Args:
        parameters: in the order of the flat gradient.
        nbytes: of a bucket.

    Returns:
        Slices of elements, those of the last parameters first; they tile the gradient.
    """
    slices: list[slice] = []
    start = stop = sum(p.numel() for p in parameters)
    for parameter in reversed(parameters):
        start -= parameter.numel()
        if (stop - start) * parameter.element_size() >= nbytes:
            slices.append(slice(start, stop))
            stop = start
    return [*slices, slice(0, stop)] if stop else slices


def _buckets_of(parameters: Sequence[Tensor], buckets: Sequence[slice]) -> list[int]:
    """The number of the bucket that each parameter lies in."""
    numbers, start = [], 0
    for parameter in parameters:
        numbers.append(
            next((number for number, piece in enumerate(buckets) if piece.start <= start < piece.stop), 0)
        )
        start += parameter.numel()
    return numbers
