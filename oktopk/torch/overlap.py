"""Gradients in buckets, whose reduction starts when the backward pass has accumulated the last gradient of each."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from collectives.closing import closes
from collectives.sparse import Array
from oktopk.buckets import BucketedAllreduce, bucket_ranges
from oktopk.cuda.multi_tensor import GradientTensors
from oktopk.settings import DEFAULT_BUCKET_MB
from oktopk.torch.alive import alive
from oktopk.torch.engine import OneVector
from oktopk.torch.gradients import GradientsInPlace
from oktopk.torch.interop import TensorMemory

_ON_GPUS_MB = 240.0
"""Size of a bucket on GPUs. Large ones won: through peer memory the thresholds of a small one, such as a table of embeddings,
miss so often that the host must wait for it, and over messages each has latencies of its own."""

_ALIGNMENT = 64
"""Elements: kernels read several at once, so that a bucket must not begin anywhere."""


def in_models_order(parameters: Sequence[Tensor]) -> list[Tensor]:
    """Parameters as the smallest module that holds all of them lists them, in their own order where there is none.

    The groups of an optimizer often part weights from biases. A bucket of all biases would have its last gradient only when the
    backward pass ends, and every later bucket would wait for it. Of modules of one size the one is taken that lists them most
    like the given order, so that all ranks take the same.
    """
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    best: tuple[int, list[int]] | None = None
    for module in alive(nn.Module):
        try:
            listed = list(dict.fromkeys(map(id, module.parameters())))
        except Exception:  # it is being made, or is of a kind that has none
            continue
        if places.keys() <= set(listed):
            here = len(listed), [places[each] for each in listed if each in places]
            best = here if best is None else min(best, here)
    return list(parameters) if best is None else [parameters[place] for place in best[1]]


class BucketLayout:
    """Where the gradients of all parameters lie in one vector that is cut into buckets.

    Args:
        parameters: of one type, in the order in which the model uses them.
        bucket_mb: size of a bucket, in 1e6 bytes of float32; one holds whole parameters, the last ones first, and is larger than
            that by less than a parameter. 0: DEFAULT_BUCKET_MB, on GPUs 240.

    Attributes:
        ranges: the numbers of the parameters of each bucket, in the order in which buckets start.
        starts: where each parameter's gradient begins.
        slices: of the vector, one a bucket.
        length: elements of the vector, with some between buckets that stay zero.
    """

    def __init__(self, parameters: Sequence[Tensor], bucket_mb: float) -> None:
        sizes = [parameter.numel() for parameter in parameters]
        bucket_mb = bucket_mb or (_ON_GPUS_MB if parameters[0].is_cuda else DEFAULT_BUCKET_MB)
        ranges = bucket_ranges(sizes, bucket_mb * 1e6 / 4)
        self.ranges = [slice(each.start, each.stop) for each in ranges]
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


def check_buckets(overlap: object, bucket_mb: object, ordered: bool) -> None:
    """Raise ValueError where these arguments of `DistributedOptimizer` do not fit.

    Args:
        ordered: whether `order` is given.
    """
    if not isinstance(overlap, bool):
        raise ValueError(f"overlap {overlap!r} is not True or False")
    if isinstance(bucket_mb, bool) or not isinstance(bucket_mb, int | float) or not 0 <= bucket_mb < math.inf:
        raise ValueError(f"bucket_mb {bucket_mb!r} is not a number in [0, inf)")
    if ordered and not (overlap or bucket_mb):
        raise ValueError("order is for buckets: pass overlap=True, or a bucket_mb")


@dataclass(slots=True)
class Recorded:
    """A backward pass that was recorded, see `BackwardBuckets.recording`.

    Attributes:
        marks: of the buckets that it filled, in their order: where on the stream it had done so.
        gradients: one a parameter, where the pass put it and each replay writes it; None where it gave none.
    """

    marks: list[Any] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)


class BackwardBuckets:
    """Starts a bucket when it has all its gradients, and those before it were started. The last one waits for the step.

    A backward pass that is captured into a CUDA graph runs no hook when it is replayed. Put its capture, and passes before it
    that leave nothing, into `recording()`, and call `replayed` after each replay:

        >>> optimizer.zero_grad()
        >>> with optimizer.overlapped.recording() as recorded, torch.cuda.graph(graph):
        ...     loss.backward()
        >>> for batch in batches:
        ...     optimizer.zero_grad()
        ...     graph.replay()
        ...     optimizer.overlapped.replayed(recorded)
        ...     optimizer.step()

    Args:
        parameters: whose gradients are reduced.
        gradients: of these, whose vector has this layout.
        layout: of the buckets.
        reducer: of the buckets.
        memory: of the gradients.
        overlapped: start in the backward pass, else all in the step.
        postponed: whether this step starts with a collective call of another kind, so that no bucket may come before it: equal on
            all ranks. All buckets then start in the step.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        gradients: GradientsInPlace,
        layout: BucketLayout,
        reducer: BucketedAllreduce | OneVector,
        memory: TensorMemory,
        overlapped: bool,
        postponed: Callable[[], bool] = lambda: False,
    ) -> None:
        self._postponed = postponed
        self._gradients, self._layout, self._reducer, self._memory = gradients, layout, reducer, memory
        self._arrays: list[Array] | None = None  # of buckets in the vector, once a step takes one
        self._sizes = [each.stop - each.start for each in layout.ranges]
        self._missing = list(self._sizes)
        self._armed = overlapped
        self._recorded: Recorded | None = None  # the pass that is being recorded
        # parameter -> version of its gradient, when the backward pass had accumulated it
        self._versions: dict[int, int] = {}
        self._seen: dict[int, Tensor | None] = {}  # the gradients of these
        self._parameters = parameters
        self._hooks: list[RemovableHandle] = []
        self._numbers: dict[Tensor, tuple[int, int]] = {}  # parameter -> its bucket, and its number
        if overlapped:
            for bucket, each in enumerate(layout.ranges):
                for number in range(each.start, each.stop):
                    self._numbers[parameters[number]] = bucket, number
            self._hooks = when_accumulated(self._numbers, self.accumulated)

    def accumulated(self, parameter: Tensor) -> None:
        """Take the gradient of a parameter, which the backward pass has accumulated, and start buckets that are complete.

        One that the user has taken away since then is forgotten, with all that was started. Every rank must do so then.

        Raises:
            RuntimeError: it is the second one since the last step.
        """
        if not self._armed:
            return
        (bucket, number), gradient = self._numbers[parameter], parameter.grad
        if number in self._seen and gradient is not self._seen[number]:
            self.abandon()  # as after model.zero_grad(): what was started is of gradients that are gone
        if not self._missing[bucket]:
            raise RuntimeError(
                "a second backward pass before step(), whose first one began to reduce the gradients: put all but the last "
                "into no_sync()"
            )
        self._versions[number], self._seen[number] = self._version(number), gradient
        self._missing[bucket] -= 1
        if self._recorded is None and self._postponed():
            return
        while (first := self._filled) < len(self._sizes) - 1 and not self._missing[first]:
            if self._recorded is None:
                self._start(first)
                continue
            if self._gradients.in_vector:
                self._gradients.collect(only=self._layout.ranges[first])
            self._recorded.marks.append(self._memory.mark())

    def _start(self, number: int) -> None:
        gradient, _, more = self._bucket(number, self._changed(first=not number))
        self._reducer.start(gradient, self._memory.after_current(), **more)

    def _bucket(self, number: int, problem: str = "") -> tuple[Any, bool, dict[str, Any]]:
        """A bucket as the reducer takes it, whether the current stream copies gradients for it, and a problem, if any."""
        try:
            bucket = self._read(number, problem)
        except (RuntimeError, TypeError) as error:  # on this rank alone, perhaps: as without `overlap`
            problem = str(error).splitlines()[0]
            bucket = self._read(number, problem)
        return *bucket, {"problem": problem} if problem else {}

    def _read(self, number: int, problem: str) -> tuple[Array | GradientTensors, bool]:
        if self._reducer.reads_tensors(number):
            return self._gradients.tensors(bucket=number, problem=problem)
        return self._array(self._gradients.collect(self._layout.ranges[number], problem), number), True

    def _changed(self, first: bool) -> str:
        """What has changed of the parameters since they were wrapped, see `AsWrapped.problem`; looks with the first bucket."""
        if first:
            self._gradients.as_wrapped.look()
        return self._gradients.as_wrapped.problem

    def _array(self, vector: Tensor, number: int) -> Array:
        if self._arrays is None:
            self._arrays = [self._memory.array(vector[each]) for each in self._layout.slices]
        return self._arrays[number]

    @property
    def _filled(self) -> int:
        """Buckets that this backward pass has filled, one after the other from the first."""
        return self._reducer.started if self._recorded is None else len(self._recorded.marks)

    @contextmanager
    def recording(self) -> Iterator[Recorded]:
        """Within it backward passes start nothing; gives what `replayed` takes, of the one pass within."""
        self.check_nothing_started("a capture")
        self._recorded = recorded = Recorded()
        try:
            yield recorded
            recorded.gradients = [parameter.grad for parameter in self._parameters]
        finally:
            self._recorded = None
            self.forget()

    def replayed(self, recorded: Recorded) -> None:
        """Start the buckets of a backward pass that was captured and has just been replayed. Collective.

        Parameters whose gradients were cleared in between get those that the replay has written.

        Raises:
            RuntimeError: buckets of an earlier pass are being reduced; or a parameter has a gradient elsewhere than where the
                replay has written one.
        """
        self.check_nothing_started("a replay")
        self._give_back(recorded.gradients)
        for number, mark in enumerate([] if self._postponed() else recorded.marks):
            more: dict[str, Any]
            if self._gradients.in_vector:  # the pass has filled the vector
                gradient, copied, more = self._array(self._gradients.filled, number), False, {}
            else:
                gradient, copied, more = self._bucket(number)
            ready = self._memory.after_current() if copied else self._memory.after(mark)
            self._reducer.start(gradient, ready, **more)
        self._missing = [0] * len(self._sizes)  # a further pass would add to what is being reduced

    def _give_back(self, gradients: Sequence[Tensor | None]) -> None:
        """Make each `p.grad` what a replay has written."""
        for parameter, gradient in zip(self._parameters, gradients, strict=True):
            if gradient is None or parameter.grad is gradient:
                continue
            if parameter.grad is not None and parameter.grad.data_ptr() != gradient.data_ptr():
                raise RuntimeError(
                    f"a parameter of shape {tuple(parameter.shape)} has a gradient of another backward pass, to which the replay "
                    "has added nothing: call zero_grad() before the replay, or capture a pass that adds to it"
                )
            parameter.grad = gradient

    def _version(self, number: int) -> int:
        """Of a parameter's gradient."""
        gradient = self._parameters[number].grad
        return -1 if gradient is None else gradient._version

    def _check_unchanged(self) -> None:
        """Raise RuntimeError where gradients were changed after they were accumulated, and buckets of them are being reduced."""
        if not self.started:
            return
        for number, version in self._versions.items():
            if self._version(number) != version:
                raise RuntimeError(
                    "gradients were changed between the backward pass and step(), while they are reduced: pass clip_norm to clip "
                    "the reduced gradient, or overlap=False"
                )

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
                f"{what} while the gradients of the last backward pass are reduced: call step() first, or abandon() on every rank"
            )

    def rest(self, problem: str = "") -> list[tuple[Array | GradientTensors, dict[str, Any]]]:
        """The buckets that were not started, for `BucketedAllreduce.start`; the next backward pass starts anew.

        Args:
            problem: why the step will not be taken.

        Returns:
            Of each the gradient, and under "problem" why the step will not be taken, if so.

        Raises:
            RuntimeError: gradients were changed while they are reduced.
        """
        self._check_unchanged()
        numbers = range(self._reducer.started, len(self._sizes))
        rest = [
            (gradient, more) for gradient, _, more in (self._bucket(number, problem) for number in numbers)
        ]
        self.forget()
        return rest

    def abandon(self) -> None:
        """Undo what a backward pass has begun. Every rank must call."""
        self._reducer.abandon()
        self.forget()

    def forget(self) -> None:
        """Let the next backward pass start anew, after one of which nothing is to be reduced."""
        self._missing = list(self._sizes)
        self._versions, self._seen = {}, {}

    @closes
    def remove(self) -> None:
        """Take the hooks off the parameters."""
        for hook in self._hooks:
            hook.remove()


def when_accumulated(parameters: Iterable[Tensor], call: Callable[[Tensor], None]) -> list[RemovableHandle]:
    """Call a method with each parameter whose gradient a backward pass has accumulated; returns the hooks.

    Nothing is called once the method's object is gone: a parameter outlives it, and its hooks with it.
    """
    method = weakref.WeakMethod(call)

    def accumulated(parameter: Tensor) -> None:
        if (own := method()) is not None:
            own(parameter)

    return [parameter.register_post_accumulate_grad_hook(accumulated) for parameter in parameters]
