"""The parameters that all ranks agree on, and what a rank's own parameters make of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from collectives.transport import Transport
from oktopk.allreduce import GradientAllreduce
from oktopk.damage import StateError
from oktopk.displacement import Displacement
from oktopk.torch.as_wrapped import AsWrapped
from oktopk.torch.gradients import dense_views, is_dense
from oktopk.torch.interop import TYPE_NAMES, TensorMemory
from oktopk.torch.states import is_whole
from oktopk.torch.updates.replica_residual import ReplicaResidual

SAMPLES = 16
"""Elements of a parameter that are compared to find what a user has written."""

_BITS = {2: torch.int16, 4: torch.int32}

_PART = 1 << 22
"""Elements of a parameter that ranks compare at a time."""


class ReferenceParameters:
    """The reference: float32 values of all parameters, equal on all ranks, bit for bit.

    A rank's own parameters hold round(reference - share · residual), until its optimizer moves them.

    Of flat steps; `HostReference` is of steps in two levels.

    Args:
        parameters: on one device, of one type, each dense in memory (`is_dense`). Of this very list, which is kept, those are
            used that are in it when `as_wrapped` has looked.
        reducer: whose residual it is.
        memory: of both.
        share: of the residual that a replica's parameters hold, in [0, 1].
        as_wrapped: what the parameters were at construction: the reference is laid out as they.

    Raises:
        ValueError: the device has no memory for it; on every rank alike. Collective.

    Attributes:
        vector: float32[n], the reference, parameter by parameter in their memory layout.
        views: of the vector, one a parameter.
        residual: of the replica.
        share: as given; in two levels over the ranks of the host.
        followed: how often `look` has found a parameter elsewhere, or laid out otherwise.
        sample: the bits of some elements of each parameter, as `watch` or `show` has left them.
        marked: for each parameter that was written to since the last exchange, by number, bool of its shape: what was taken.

    Memory: 4n bytes. A byte an element of marked parameters. A parameter that is laid out otherwise than it was, once more.
    Traffic: that of `ReplicaResidual.gather` alone.
    """

    _ranks = 1  # of a replica, over which the residual is a sum

    def __init__(
        self,
        parameters: Sequence[Tensor],
        reducer: GradientAllreduce,
        memory: TensorMemory,
        share: float,
        as_wrapped: AsWrapped,
    ) -> None:
        self._parameters, self.share, self._as_wrapped = parameters, share / self._ranks, as_wrapped
        self._reducer, self._memory = reducer, memory
        self.vector = torch.zeros(reducer.length, dtype=torch.float32, device=parameters[0].device)
        self._array = memory.array(self.vector)
        kind, sizes = TYPE_NAMES[parameters[0].dtype], [p.numel() for p in parameters]
        with memory.stream_scope():
            self._displacement = reducer.displacement(sizes, kind, self._array, self.share)
        self.residual = self._new_residual(sizes)
        self.views = dense_views(self.vector, parameters)
        self.marked: dict[int, Tensor] = {}
        # what `reconcile` found: a parameter, places in it, their values, and whether this rank was given them
        self._reconciled: list[tuple[int, Tensor, Tensor, Tensor]] = []
        self._tensors = [parameter.detach() for parameter in parameters]
        self._samples = [
            _sample(tensor, view) for tensor, view in zip(self._tensors, self.views, strict=True)
        ]
        self._resampled: list[int] = []  # the samples that are copies, as parameters are laid out otherwise
        self._addresses = [tensor.data_ptr() for tensor in self._tensors]
        self._unfit: list[int] = []  # the parameters that kernels read in a copy, laid out as the reference
        self._copies: dict[int, Tensor] = {}
        as_wrapped.look()
        self.followed = as_wrapped.changes
        torch._foreach_copy_(self.views, self._tensors)
        self.watch()

    def _new_residual(self, sizes: Sequence[int]) -> ReplicaResidual:
        """Of parameters of these sizes."""
        return ReplicaResidual(self._reducer, self._memory, sizes)

    def displacement(self, present: Sequence[int | bool], flagged: bool) -> Displacement:
        """What the parameters have moved since `show`, for the next step of the reducer; of where `look` has found them.

        Args:
            present: of each parameter, whether it may have moved; others count as where they were.
            flagged: as `Displacement.flagged`.
        """
        self._displacement.flagged = flagged
        self._set_pointers(present)
        return self._displacement

    def subtract_update(self) -> None:
        """reference -= the reducer's update."""
        with self._memory.stream_scope():
            self._reducer.subtract_update(self._array)

    def set_share(self, share: float) -> None:
        """Set what share of the residual the next `show` leaves in the parameters; to be called between a step and it."""
        if (share := share / self._ranks) != self.share:
            self.share = share
            with self._memory.stream_scope():
                self._displacement.set_share(share)

    def show(self, factors: Sequence[float] | None = None) -> None:
        """Make the parameters round(reference - share · residual), where `look` has found them.

        Args:
            factors: one a parameter, which its reference is multiplied by first; None: 1 for each.
        """
        self._set_pointers(None)
        with self._memory.stream_scope():
            self._displacement.show(self.residual.array, factors)
        if self._unfit:
            torch._foreach_copy_(
                [self._tensors[n] for n in self._unfit], [self._copies[n] for n in self._unfit]
            )
        self._reconciled.clear()
        self._as_wrapped.count_write()
        self._note()

    def _set_pointers(self, present: Sequence[int | bool] | None) -> None:
        """Tell kernels where parameters lie, None for all; those that are laid out otherwise than before are copied."""
        addresses = self._addresses
        if present is not None and not all(present):
            addresses = [address if here else 0 for address, here in zip(addresses, present, strict=True)]
        copied = [number for number in self._unfit if present is None or present[number]]
        if copied:
            addresses = list(addresses)
            for number in copied:
                if number not in self._copies:
                    self._copies[number] = self._as_wrapped.like(number)
                addresses[number] = self._copies[number].copy_(self._tensors[number]).data_ptr()
        self._displacement.set_pointers(addresses)

    def show_agreed(self) -> list[Tensor]:
        """Make the parameters round(reference), equal on all ranks. Returns copies of what they held, for `leave_agreed`."""
        self.look()
        kept = [parameter.clone() for parameter in self._tensors]
        torch._foreach_copy_(self._tensors, self.views)
        self.watch()
        return kept

    def leave_agreed(self, kept: list[Tensor]) -> None:
        """Make the parameters what they held before `show_agreed`, but for elements that were written to since.

        Those keep what was written, which becomes the reference; their residual becomes zero.
        """
        residuals = dense_views(self.residual.vector, self.views)
        numbers = self.written()
        for number in numbers:
            agreed = self.views[number].to(kept[number].dtype)
            self._take(number, self._tensors[number] != agreed, residuals[number], kept[number])
        if numbers:
            self.residual.put()
        torch._foreach_copy_(self._tensors, kept)
        self.watch()

    def state(self, kept: list[Tensor] | None) -> dict[str, Any]:
        """What `load` takes, on the host. kept: what `show_agreed` returned, within `agreed`."""
        return {
            "reference": self.vector.cpu().clone(),
            "marked": {number: mask.cpu().clone() for number, mask in self.marked.items()},
            "local": self.flat(kept).cpu(),
            "share": self.share,
        }

    def check_state(self, state: dict[str, Any]) -> None:
        """Raise StateError, or what `state_errors` takes for one, where a state cannot be loaded on this rank."""
        length = len(self.vector)
        for name in ("reference", "local"):
            vector = state[name]
            if (vector is not None or name == "reference") and vector.shape != (length,):
                raise StateError(f"{name} of the state has shape {tuple(vector.shape)}, not ({length},)")
        for number, mask in _marks(state).items():
            if mask.dtype != torch.bool or mask.shape != self.views[number].shape:
                raise StateError(
                    f"the state has marks of {mask.dtype}{list(mask.shape)} for parameter {number}"
                )
        float(state["share"])

    def fits(self, state: dict[str, Any]) -> bool:
        """Whether the parameters hold what a state was saved with: this rank's own, or its reference."""
        current, local = self.flat(), state["local"]
        if local is not None and torch.equal(current, local.to(current.device)):
            return True
        return torch.equal(current, state["reference"].to(current.device).to(current.dtype))

    def in_shape(self, value: Any, parameter: Tensor) -> Any:
        """What is kept of a parameter in its shape, where `oktopk.elastic.redistribute` made it one dimension of the vector."""
        numbers = {id(each): number for number, each in enumerate(self._parameters)}
        if id(parameter) not in numbers or not is_whole(value, parameter) or value.shape == parameter.shape:
            return value
        return dense_views(value, [self.views[numbers[id(parameter)]]])[0]

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a state, with what this rank's parameters held, where it has that.

        They then hold `share` of the residual, whatever the state's share was.
        """
        device, local = self.vector.device, state["local"]
        self.vector.copy_(state["reference"].to(device))
        self.marked.clear()
        self.marked |= {number: mask.to(device) for number, mask in _marks(state).items()}
        if local is None:
            self.show()
            return
        self.look()
        flat = local.to(device)
        if state["share"] != self.share:
            flat = flat.float().add(self.residual.vector, alpha=state["share"] - self.share)
        torch._foreach_copy_(self._tensors, dense_views(flat, self.views))
        self.watch()

    def flat(self, tensors: Sequence[Tensor] | None = None) -> Tensor:
        """A copy of what the parameters hold, or of what is given, [n] of their type, in the order of the reference."""
        self.look()
        tensors = self._tensors if tensors is None else list(tensors)
        whole = torch.empty(len(self.vector), dtype=tensors[0].dtype, device=self.vector.device)
        torch._foreach_copy_(dense_views(whole, self.views), tensors)
        return whole

    def copy_to(self, views: Sequence[Tensor]) -> None:
        """Copy what the parameters hold to a tensor of its shape each."""
        self.look()
        torch._foreach_copy_(list(views), self._tensors)

    def watch(self) -> None:
        """Note what the parameters hold: `written` finds what changes from now on."""
        self.look()
        self._note()

    def _note(self) -> None:
        self._seen = self._written_to()
        self.sample = self._sampled()

    def sample_places(self) -> NDArray[np.uint64] | None:
        """Addresses of the elements of `sample`, where `look` has found them; None where one is not laid out as the reference."""
        if self._resampled:
            return None
        places = [
            each.data_ptr() + each.element_size() * each.stride(0) * np.arange(len(each), dtype=np.uint64)
            for each in self._samples
        ]
        return np.concatenate(places)

    def changed(self, compare: bool = True) -> Tensor | None:
        """bool[], on the parameters' device: whether a sample of their elements has changed since `watch`. For `written`.

        Of the parameters where `look` has found them. Not compared where something else does: then None.
        """
        now, seen = self._written_to(), self._seen
        pairs = zip(zip(*now, strict=True), zip(*seen, strict=True), strict=True)
        self._rewritten = [] if now == seen else [n for n, (one, other) in enumerate(pairs) if one != other]
        self._now = self._sampled() if compare else None
        return None if self._now is None else (self._now != self.sample).any()

    def moved(self) -> list[bool]:
        """Of each parameter whether it holds other values than the ones that were shown. Waits for a GPU."""
        residuals = dense_views(self.residual.vector, self.views)
        return [
            not torch.equal(tensor, self._shown(number, residuals[number]))
            for number, tensor in enumerate(self._tensors)
        ]

    def written(self, by_version: bool = True, changed: bool | None = None) -> list[int]:
        """The parameters that may have changed since `watch`: by version, by address or by a sample of their elements.

        Args:
            by_version: name those, too, that were written to where no sample lies, and those that were written back.
            changed: what `changed` has just given, or what has compared in its place; None: ask it here, which waits for a GPU.
        """
        if changed is None:
            self.look()
            changed = bool(self.changed())
        numbers = set(self._rewritten) if by_version else set()
        if changed:
            now = self._sampled() if self._now is None else self._now
            differs = (now != self.sample).split([len(each) for each in self._samples])
            numbers |= {number for number, each in enumerate(differs) if bool(each.any())}
        for number in set(self._rewritten) - numbers:  # other ranks may have found a change of theirs
            self._mark(number, torch.zeros_like(self.views[number], dtype=torch.bool))
        return sorted(numbers)

    def take(self, numbers: Sequence[int]) -> None:
        """Make elements that the parameters do not hold as `show` left them the reference; the residual becomes zero there.

        Args:
            numbers: of the parameters to compare.
        """
        self.look()
        residuals = dense_views(self.residual.vector, self.views)
        for number in numbers:
            shown = self._shown(number, residuals[number])
            self._take(number, self._tensors[number] != shown, residuals[number])
        self.residual.put()

    def take_all(self) -> None:
        """Make what the parameters hold the reference; the residual stays."""
        self.look()
        torch._foreach_copy_(self.views, self._tensors)
        self.marked.clear()

    def reconcile(self, transport: Transport) -> None:
        """Where some ranks have taken an element since the last exchange and others have not, give these the same value.

        One rank holds what is loaded already, by chance or as bfloat16 rounds; a bound cuts what another rank holds. Nothing is
        done where the ranks that took an element took unlike values, and for a parameter that a rank has not written to. Call
        `settle` behind the update of this exchange, and `show` at its end. Collective.

        Memory: some 100 bytes an element of a part of a parameter, of four million elements at most; 9 bytes an element that is
            given.
        Traffic: an allgather of the marked parameters' numbers. For each of them an or of 2 bits an element, then of 8 bytes
            for each element that some ranks have taken and others not.
        """

        def any_of(bits: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            transport.allreduce_or(bits.view(np.uint8))
            return bits

        self._reconciled.clear()
        for number in sorted(set.intersection(*map(set, transport.allgather_objects(list(self.marked))))):
            # in the order of the parameter's dimensions, which is the same on all ranks
            whole, marks = self.views[number].reshape(-1), self.marked[number].reshape(-1)
            for begin in range(0, len(marks), _PART):
                marks_here = marks[begin : begin + _PART].cpu().numpy()
                some, others = (
                    np.unpackbits(any_of(np.packbits(each)), count=len(marks_here))
                    for each in (marks_here, ~marks_here)
                )
                unlike = np.flatnonzero(some & others)
                if not len(unlike):
                    continue
                here, places = marks_here[unlike], torch.from_numpy(unlike + begin).to(whole.device)
                values = whole[places].cpu().numpy().view(np.int32)
                ones, zeros = (any_of(np.where(here, each, 0).astype(np.int32)) for each in (values, ~values))
                alike = torch.from_numpy(ones == ~zeros).to(whole.device)
                agreed = torch.from_numpy(ones.view(np.float32)).to(whole.device)[alike]
                own = torch.from_numpy(~here).to(whole.device)[alike]
                self._reconciled.append((number, places[alike], agreed, own))
        self.settle()

    def settle(self) -> None:
        """Make the elements that `reconcile` found what it found, and drop what this rank had not sent of those it was given.

        What ranks have sent of these in the exchange since then is dropped, too.
        """
        if not self._reconciled:
            return
        residuals = dense_views(self.residual.vector, self.views)
        for number, places, values, own in self._reconciled:
            for view, at, value in (
                (self.views[number], places, values),
                (residuals[number], places[own], torch.zeros((), dtype=torch.float32, device=values.device)),
            ):
                whole = view.reshape(-1)
                whole[at] = value
                if whole.data_ptr() != view.data_ptr():  # a copy, of another layout
                    view.copy_(whole.view_as(view))
        self.residual.put()

    def _written_to(self) -> tuple[list[int], list[int]]:
        """Of each parameter how often torch has written to it; and where it lies, as `look` found it."""
        return self._as_wrapped.versions(), self._addresses.copy()

    def _sampled(self) -> Tensor:
        """The samples as they are now, one after the other."""
        for number in self._resampled:
            self._samples[number] = _sample(self._tensors[number], self.views[number])
        return torch.cat(self._samples)

    def look(self) -> None:
        """Look where the parameters lie now: `p.data = ...` and conversions move them."""
        self._as_wrapped.look()
        if self._as_wrapped.changes == self.followed:
            return
        self.followed = self._as_wrapped.changes
        self._resampled, self._unfit = [], []
        for number, (parameter, view) in enumerate(zip(self._parameters, self.views, strict=True)):
            tensor = self._tensors[number] = parameter.detach()
            self._addresses[number] = tensor.data_ptr()
            if not self._as_wrapped.fits(number, tensor):
                self._unfit.append(number)
            if self._as_wrapped.problem:  # of another type or shape: the next step says so on all ranks
                continue
            self._samples[number] = _sample(tensor, view)
            if tensor.stride() != view.stride():
                self._resampled.append(number)

    def _take(self, number: int, changed: Tensor, residual: Tensor, kept: Tensor | None = None) -> None:
        """Take elements of a parameter into the reference and, if given, into `kept`; their residual becomes zero."""
        tensor = self._tensors[number]
        self._mark(number, changed)
        self.views[number].copy_(torch.where(changed, tensor.float(), self.views[number]))
        residual.masked_fill_(changed, 0)
        if kept is not None:
            kept.copy_(torch.where(changed, tensor, kept))

    def _mark(self, number: int, mask: Tensor) -> None:
        before = self.marked.get(number)
        self.marked[number] = mask if before is None else mask | before

    def digest(self) -> int:
        """A hash of the reference, equal on all ranks: the sum of its bits as integers of 64 bits, modulo 2^64.

        Waits once for a GPU. Memory traffic: 4n bytes.
        """
        bits = self.vector.view(torch.int32)
        even = len(bits) & ~1
        # pairs of elements: to widen each one takes a CPU ten times as long
        pairs, last = bits[:even].view(torch.int64), bits[even:]
        return int(pairs.sum() + last.sum(dtype=torch.int64))

    def _shown(self, number: int, residual: Tensor) -> Tensor:
        """round(reference - share · residual) of one parameter, as kernels compute it: each operation is rounded by itself."""
        return (self.views[number] - residual * self.share).to(self._tensors[number].dtype)


def _marks(state: dict[str, Any]) -> dict[int, Tensor]:
    """Those of a state; a distributed checkpoint leaves out what is empty."""
    return state.get("marked") or {}


def _sample(tensor: Tensor, view: Tensor) -> Tensor:
    """The bits of `SAMPLES` evenly spaced elements or of all, where these are fewer, in the order of a view of the reference.

    A view of the tensor, if it is laid out as that; else a copy.
    """
    size = tensor.numel()
    if tensor.stride() != view.stride():
        tensor = torch.empty_like(view, dtype=tensor.dtype).copy_(tensor)
    elements = tensor.as_strided((size,), (1,)) if is_dense(tensor) else tensor.reshape(-1)
    return elements[:: max(1, size // SAMPLES)].view(_BITS[tensor.element_size()])
