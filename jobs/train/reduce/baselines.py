"""Dense reduction as a mode of training: by NCCL in one piece, or by torch's DDP in buckets behind the backward pass.

They are what a sparse method is to be compared with, and are shaped like `oktopk.DistributedOptimizer` for the loop.
"""

from __future__ import annotations

import math
import time
import warnings
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from collectives.traffic import Traffic
from jobs.train.passes import Overlapped, on_stream
from jobs.train.reduce.process_group import ring_traffic, stop_process_group
from oktopk import StepReport
from oktopk.torch.gradients import GradientsInPlace
from oktopk.torch.states import load_state


class DenseTraining(ABC):
    """What the modes have in common.

    Args:
        inner: the torch optimizer that owns the parameters, all of one type and on one device.
        clip_norm: scale the reduced gradient down to this Euclidean norm; 0 for never.

    Attributes:
        inner: as given.
        length: elements of the gradient (n).
        overlapped: what starts buckets in the backward pass, also where a CUDA graph replays it; None where nothing does.
    """

    overlapped: Overlapped | None = None
    hosts = None  # flat steps

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

    def no_sync(self) -> AbstractContextManager[None]:
        """Within it backward passes add up locally."""
        return nullcontext()

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

    def agreed(self) -> AbstractContextManager[None]:
        """As DistributedOptimizer's: parameters always are."""
        return nullcontext()

    def complete(self) -> None:  # noqa: B027 - of no mode
        """Nothing: what is known of a step is known at once."""

    def state_dict(self) -> dict[str, Any]:
        """As DistributedOptimizer's, of a reducer that leaves nothing behind."""
        nothing = dict.fromkeys(("last_k", "residual"))
        return {**self.inner.state_dict(), "reducer": {"steps": self._steps, **nothing}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the `state_dict` was taken."""
        state = dict(state_dict)
        self._steps = state.pop("reducer")["steps"]
        load_state(self.inner, state)

    def close(self) -> None:
        """End the process group. Collective."""
        stop_process_group()


class NcclTraining(DenseTraining):
    """Gradients in one flat vector, averaged by torch.distributed after the backward pass.

    Args:
        inner, clip_norm: as DenseTraining.
        dtype: that gradients travel and are summed in.
    """

    def __init__(self, inner: torch.optim.Optimizer, clip_norm: float, dtype: torch.dtype) -> None:
        super().__init__(inner, clip_norm)
        # autograd adds into the views of the vector, so that nothing is copied but a gradient that was put elsewhere
        self._gradients = GradientsInPlace(self._parameters, self._parameters[0].dtype)
        vector = self._gradients.filled
        self._sent = vector if vector.dtype == dtype else torch.empty_like(vector, dtype=dtype)
        averages = dist.get_backend() == dist.Backend.NCCL  # gloo only sums
        self._operation = dist.ReduceOp.AVG if averages else dist.ReduceOp.SUM
        self._scale = 1.0 if averages else 1.0 / dist.get_world_size()
        self._attach()

    def zero_grad(self) -> None:
        self._gradients.filled.zero_()
        self._attach()

    def _attach(self) -> None:
        for parameter, view in zip(self._parameters, self._gradients.views, strict=True):
            parameter.grad = view

    def _finish(self) -> Traffic:
        vector, sent = self._gradients.collect(), self._sent
        if sent is not vector:
            sent.copy_(vector)
        dist.all_reduce(sent, self._operation)
        if sent is not vector:
            vector.copy_(sent)
        if self._scale != 1.0:
            vector.mul_(self._scale)
        self._attach()
        return ring_traffic(sent.nbytes // 4, dist.get_world_size(), 1)


EAGER_STEPS = 11
"""Of DistributedDataParallel before a capture, as torch asks for: in the first ten it times itself, and waits for the GPU."""


class DdpTraining(DenseTraining):
    """torch's DistributedDataParallel around a model; its hooks reduce in the backward pass.

    DistributedDataParallel forms its buckets anew after its first backward pass. On CPUs it does so here at once, for parameters
    that become ready in the reverse of their order, so that a run that continues has the buckets of the one before.

    A CUDA graph of a backward pass holds what the hooks have launched while it was captured, collectives included, and a replay
    runs no hook.

    Args:
        inner, clip_norm: as DenseTraining.
        network: a module with the parameters of `inner`.
        bucket_mb: size of a bucket, in 1e6 bytes.
        dtype: that gradients travel and are summed in: float32 or bfloat16.
        captured: CUDA graphs will replay it, on GPUs: it is made on the stream that they are captured on, as autograd asks for.

    Attributes:
        network: what losses are to be computed with.
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        clip_norm: float,
        network: nn.Module,
        *,
        bucket_mb: float,
        dtype: torch.dtype = torch.float32,
        captured: bool = False,
    ) -> None:
        super().__init__(inner, clip_norm)
        self._stream = torch.cuda.Stream() if captured else None
        self.overlapped = self
        self._elements_per_word = 4 // dtype.itemsize
        # about: torch cuts the first one smaller
        self._pieces = math.ceil(4 * self.length / (bucket_mb * 1e6))
        # where the graphs will be captured, if any will
        beside = nullcontext() if self._stream is None else on_stream(self._stream)
        with warnings.catch_warnings(), beside:
            # a newer torch has another word for broadcast_buffers, which an older one does not know
            warnings.simplefilter("ignore", FutureWarning)
            self.network = DistributedDataParallel(
                network,
                bucket_cap_mb=bucket_mb * 1e6 / 2**20,
                broadcast_buffers=False,  # batch-norm statistics are averaged before an evaluation
                gradient_as_bucket_view=True,
            )
        if dtype == torch.bfloat16:
            self.network.register_comm_hook(None, default_hooks.bf16_compress_hook)
        if captured:
            # every hundredth step, else, is timed
            self.network._set_ddp_runtime_logging_sample_rate(2**31 - 1)
        # on a GPU sums have no fixed order, and parameters may become ready in another one
        if not self._parameters[0].is_cuda:
            self._form_buckets()

    def _form_buckets(self) -> None:
        """Backward passes of zeros, in the buckets before and in the final ones. Collective."""
        reducer = self.network.reducer
        parameters = [p for p in self.network.parameters() if p.requires_grad]
        for _ in range(2):
            reducer._rebuild_buckets()
            reducer.prepare_for_backward([])
            for parameter in reversed(parameters):
                parameter.backward(torch.zeros_like(parameter))
        self.zero_grad()

    @property
    def eager_start(self) -> tuple[torch.cuda.Stream, int] | None:
        """What precedes the first capture, from here on, see CapturedPasses; None where nothing is captured."""
        return None if self._stream is None else (self._stream, EAGER_STEPS)

    def recording(self) -> AbstractContextManager[None]:
        """Around a backward pass that is captured."""
        return nullcontext()

    def replayed(self, marks: None) -> None:
        """Nothing: the graph holds the reduction."""

    def no_sync(self) -> AbstractContextManager[None]:
        context: AbstractContextManager[None] = self.network.no_sync()
        return context

    def _finish(self) -> Traffic:
        return ring_traffic(self.length // self._elements_per_word, dist.get_world_size(), self._pieces)
