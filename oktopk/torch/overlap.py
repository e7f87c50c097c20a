"""Gradients in buckets, whose reduction starts when the backward pass has accumulated the last gradient of each."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from oktopk.buckets import BucketedAllreduce, bucket_ranges
from oktopk.torch.gradients import FlatGradients
from oktopk.torch.interop import TensorMemory

DEFAULT_BUCKET_MB = 25.0
"""Size of a bucket where gradients are reduced behind the backward pass."""

_ALIGNMENT = 64
"""Elements: kernels read several at once, so that a bucket must not begin anywhere."""


class BucketLayout:
    """Where the gradients of all parameters lie in one vector that is cut into buckets.

    Args:
        parameters: of one type.
        bucket_mb: size of a bucket, in 1e6 bytes of float32; one holds whole parameters, the last ones first, and is larger than
            that by less than a parameter.

    Attributes:
        ranges: the numbers of the parameters of each bucket, in the order in which buckets start.
        starts: where each parameter's gradient begins.
        slices: of the vector, one a bucket.
        length: elements of the vector, with some between buckets that stay zero.
    """

    def __init__(self, parameters: Sequence[Tensor], bucket_mb: float) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        self.ranges = [slice(each.start, each.stop) for each in bucket_ranges(sizes, bucket_mb * 1e6 / 4)]
        self.starts = [0] * len(sizes)
        self.slices: list[slice] = []
        self.length = 0
        for each in reversed(self.ranges):
            begin = self.length = -(-self.length // _ALIGNMENT) * _ALIGNMENT
            for number in range(each.start, each.stop):
                self.starts[number] = self.length
                self.length += sizes[number]
            self.slices.insert(0, slice(begin, self.length))

    @property
    def lengths(self) -> list[int]:
        """Elements of each bucket."""
        return [each.stop - each.start for each in self.slices]


def buckets_problem(overlap: Any, bucket_mb: Any, share: Any) -> str:
    """What is wrong with these arguments of `DistributedOptimizer`, in a sentence; "" if nothing is."""
    if not isinstance(overlap, bool):
        return f"overlap {overlap!r} is not True or False"
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, int | float) or not 0 <= bucket_mb < math.inf:
        return f"bucket_mb {bucket_mb!r} is not a number in [0, inf)"
    if share != "bucket" and not (overlap or bucket_mb):
        return f"share {share!r} is for buckets: pass overlap=True, or a bucket_mb"
    return ""


class BackwardBuckets:
    """Starts a bucket when it has all its gradients, and those before it were started. The last one waits for the step.

    Args:
        parameters: whose gradients are reduced.
        gradients: of these, in a vector of this layout.
        layout: of the buckets.
        reducer: of the buckets.
        memory: of the gradients.
        overlapped: start in the backward pass, else all in the step.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: FlatGradients,
        layout: BucketLayout,
        reducer: BucketedAllreduce,
        memory: TensorMemory,
        overlapped: bool,
    ) -> None:
        self._gradients, self._layout, self._reducer, self._memory = gradients, layout, reducer, memory
        self._arrays = [memory.array(gradients.vector[each]) for each in layout.slices]
        self._sizes = [each.stop - each.start for each in layout.ranges]
        self._missing = list(self._sizes)
        self._armed = overlapped
        self._hooks: list[Any] = []
        if overlapped:
            for bucket, each in enumerate(layout.ranges):
                for number in range(each.start, each.stop):
                    hook = self._hook(bucket, number)
                    self._hooks.append(parameters[number].register_post_accumulate_grad_hook(hook))

    def _hook(self, bucket: int, number: int) -> Callable[[Tensor], None]:
        only = slice(number, number + 1)

        def accumulated(parameter: Tensor) -> None:
            if not self._armed:
                return
            if not self._missing[bucket]:
                raise RuntimeError(
                    "a second backward pass before step(), whose first one began to reduce the gradients: put all but the last "
                    "into no_sync()"
                )
            self._gradients.collect(only=only)
            self._missing[bucket] -= 1
            while (first := self._reducer.started) < len(self._sizes) - 1 and not self._missing[first]:
                self._reducer.start(self._arrays[first], self._memory.after_current())

        return accumulated

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Backward passes within add up locally, and start nothing."""
        armed, self._armed = self._armed, False
        try:
            yield
        finally:
            self._armed = armed

    @property
    def started(self) -> int:
        """Buckets that are being reduced."""
        return self._reducer.started

    def check_nothing_started(self, what: str) -> None:
        """Raise RuntimeError if buckets are being reduced."""
        if self.started:
            raise RuntimeError(
                f"{what} while the gradients of the last backward pass are reduced: call step() first"
            )

    def rest(self) -> list[Any]:
        """The buckets that were not started, for `BucketedAllreduce.step`; the next backward pass starts anew."""
        with torch.no_grad():
            for each in self._layout.ranges[self._reducer.started :]:
                self._gradients.collect(only=each)
        self._missing = list(self._sizes)
        return self._arrays[self._reducer.started :]

    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()
