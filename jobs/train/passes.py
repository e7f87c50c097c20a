"""Forward and backward pass of a step: eager, or replayed as CUDA graphs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Protocol

import torch
from torch import Tensor

from jobs.train.tasks.task import Workload

WARM_UP = 3
"""Passes before the capture: libraries choose their algorithms and make their buffers in the first ones."""


class Overlapped(Protocol):
    """What reduces gradients behind the backward pass, also where that is replayed, as `oktopk.torch.overlap.BackwardBuckets`."""

    def recording(self) -> AbstractContextManager[Any]:
        """Around a backward pass that is captured, or precedes a capture; gives what `replayed` takes."""

    def replayed(self, marks: Any) -> None:
        """The pass that was captured so was replayed. Collective."""


@contextmanager
def on_stream(stream: torch.cuda.Stream) -> Iterator[None]:
    """Within it kernels go to a stream, after those that were asked for before and before those that are asked for later."""
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        yield
    torch.cuda.current_stream().wait_stream(stream)


class EagerPasses:
    """Adds the gradients of one batch to those of the parameters, kernel by kernel; `forward` and `backward` take turns.

    Args:
        workload: whose loss.
        share: of a batch in its step's loss, a scalar on the device.
    """

    def __init__(self, workload: Workload[Any], share: Tensor) -> None:
        self._workload, self._share = workload, share
        self._loss: Tensor | None = None

    def forward(self, batch: Any, *, last: bool = True) -> Tensor:
        """The loss of a batch, detached, and the caller's to keep; whether it is the last one of its step."""
        self._loss = self._workload.loss(batch)
        return self._loss.detach()

    def backward(self) -> None:
        """Add the gradients of that batch."""
        assert self._loss is not None
        self._loss.backward(self._share)
        self._loss = None

    def close(self) -> None:
        """Free what is held on the device; before a process group that took part is ended."""
        self._loss = None


class CapturedPasses:
    """Each pass is one CUDA graph, captured at the first batch and replayed for all: many small kernels wait for no Python.

    Batches must be sequences of tensors whose shapes stay the same, and the loss must not wait for the device. Where the
    optimizer hands out no gradient, the captured ones are given to the parameters: those of the first pass of a step, to which
    the later ones of an accumulation add theirs.

    Args:
        workload, share: as EagerPasses.
        overlapped: what a step's last backward pass begins to reduce; None for nothing.
        start: a stream, and the number of steps of a job that are taken on it kernel by kernel before one is captured there, for
            a reduction that must be in its steady state; the capture follows without passes that leave no trace. None for none.

    Memory: the activations of one batch stay allocated, apart from those of evaluations, and gradients that the optimizer did not
        hand out; during the capture the gradients once more.
    """

    def __init__(
        self,
        workload: Workload[Any],
        share: Tensor,
        overlapped: Overlapped | None = None,
        start: tuple[torch.cuda.Stream, int] | None = None,
    ) -> None:
        self._workload, self._share, self._overlapped = workload, share, overlapped
        self._parameters = [p for p in workload.model.parameters() if p.requires_grad]
        self._stream, self._eager_steps = start or (torch.cuda.Stream(), 0)
        self._pool = torch.cuda.graph_pool_handle()
        self._eager, self._warm = EagerPasses(workload, share), start is not None
        # by whether there are gradients to add to, and whether they are reduced
        self._captured: dict[tuple[bool, bool], _Capture] = {}
        self._current: _Capture | None = None

    def forward(self, batch: Any, *, last: bool = True) -> Tensor:
        if self._eager_steps:
            self._eager_steps -= last
            with on_stream(self._stream):
                return self._eager.forward(batch)
        adds = any(parameter.grad is not None for parameter in self._parameters)
        overlapped = self._overlapped if last else None
        key = adds, overlapped is not None
        if key not in self._captured:
            # they take turns, so that one pool serves all
            if not self._warm:
                self._warm_up(batch, overlapped)
            self._captured[key] = _Capture(
                self._workload, batch, self._parameters, self._share, overlapped, self._stream, self._pool
            )
        self._current = self._captured[key]
        return self._current.forward(batch)

    def _warm_up(self, batch: Any, overlapped: Overlapped | None) -> None:
        """Some passes that leave no trace: gradients, buffers and random numbers are afterwards what they were."""
        model = self._workload.model
        gradients = [None if p.grad is None else p.grad.clone() for p in self._parameters]
        buffers = [buffer.clone() for buffer in model.buffers()]
        drawn = torch.cuda.get_rng_state()
        with on_stream(self._stream):
            for _ in range(WARM_UP):
                with _recording(overlapped):
                    self._workload.loss(batch).backward(self._share)
        torch.cuda.set_rng_state(drawn)
        with torch.no_grad():
            for buffer, before in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(before)
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None:
                parameter.grad = None
            elif parameter.grad is not None:
                parameter.grad.copy_(gradient)

    def backward(self) -> None:
        if self._current is None:
            with on_stream(self._stream):
                self._eager.backward()
        else:
            self._current.backward()
        self._current = None

    def close(self) -> None:
        """As EagerPasses.close: NCCL ends no communicator while a graph holds some of its kernels."""
        self._captured.clear()
        self._current = None
        self._eager.close()


Passes = EagerPasses | CapturedPasses


class _Capture:
    """The two graphs, and where they read and write."""

    def __init__(
        self,
        workload: Workload[Any],
        batch: Sequence[Tensor],
        parameters: Sequence[Tensor],
        share: Tensor,
        overlapped: Overlapped | None,
        stream: torch.cuda.Stream,
        pool: Any,
    ) -> None:
        self._inputs = [tensor.clone() for tensor in batch]
        self._forward, self._backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
        before = [parameter.grad for parameter in parameters]
        self._overlapped = overlapped
        # other threads, NCCL's watchdog among them, go on to ask the device what they like
        how = {"pool": pool, "stream": stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(self._forward, **how):
            loss = workload.loss(self._inputs)
        with torch.cuda.graph(self._backward, **how), _recording(overlapped) as self._marks:
            loss.backward(share)
        self._loss = loss.detach()
        self._created = [
            (parameter, parameter.grad)
            for parameter, gradient in zip(parameters, before, strict=True)
            if parameter.grad is not None and parameter.grad is not gradient
        ]

    def forward(self, batch: Sequence[Tensor]) -> Tensor:
        for buffer, tensor in zip(self._inputs, batch, strict=True):
            buffer.copy_(tensor)
        self._forward.replay()
        return self._loss.clone()

    def backward(self) -> None:
        self._backward.replay()
        for parameter, gradient in self._created:
            parameter.grad = gradient
        if self._overlapped is not None:
            self._overlapped.replayed(self._marks)


def _recording(overlapped: Overlapped | None) -> AbstractContextManager[Any]:
    return nullcontext() if overlapped is None else overlapped.recording()
