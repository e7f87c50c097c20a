"""Steps of an elementwise optimizer on this rank's shard of the parameters that the ranks of a host step on together."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from collectives.errors import EVERY_RANK_CALLS
from oktopk.allreduce import GradientAllreduce
from oktopk.damage import StateError
from oktopk.torch.adamw import AdamW
from oktopk.torch.gradients import dense_views
from oktopk.torch.interop import TensorMemory
from oktopk.torch.local_step import has_step_hooks
from oktopk.torch.replica import Replica
from oktopk.torch.states import by_number, is_whole
from oktopk.torch.updates.host_reference import HostReference

# these make what they keep in their first step
_TORCHS = "Adam", "AdamW", "RAdam", "Adamax", "SGD", "RMSprop"
_ELEMENTWISE = AdamW, *(getattr(torch.optim, name) for name in _TORCHS)


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether a step moves each element by its own gradient and state alone: of these classes, or where `elementwise` is True.

    A class that is derived from one of them may do otherwise, and so may hooks. One that says so and keeps something already,
    perhaps since it was made, may need it once it is no longer wrapped.
    """
    known = type(optimizer) in _ELEMENTWISE
    says = getattr(optimizer, "elementwise", False) is True and not optimizer.state
    return (known or says) and not has_step_hooks(optimizer)


class ShardStep:
    """Steps on this rank's shard of the parameters alone, so that the optimizer keeps moments of its elements alone.

    The *piece* of a parameter is what of it is in the shard, in one dimension, in the order of the vector; it may be empty. The
    optimizer's state is kept here, by parameter as ever, and has the shapes of pieces. The optimizer has it while it
    is lent alone, as it could not step on parameters with it once this object is gone.

    Args:
        inner: the wrapped optimizer, see `is_elementwise`. Its state stays where it is until `adopt`.
        replica: of the parameters that the reference is of.
        reducer: in two levels.
        memory: of both.
        reference: of the parameters.

    Attributes:
        pieces: one a parameter.
        state: the optimizer's; empty until `adopt`.

    Memory: the shard, in the parameters' type; while a step runs some 16 bytes an element of the shard.
    Memory traffic: of a step the parameters and float32[n], and some 30 bytes an element of the shard; of gradients that the
        replica has not left in the buffer, or that were clipped, them and float32[n].
    """

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        replica: Replica,
        reducer: GradientAllreduce,
        memory: TensorMemory,
        reference: HostReference,
    ) -> None:
        assert reducer.group is not None
        self._group = group = reducer.group
        self._inner, self._replica, self._reference, self._memory = inner, replica, reference, memory
        self._parameters = parameters = replica.parameters
        self._layout, self._shard = group.layout, group.shard
        # no other rank reads it between the mean of the gradients and the next one
        self._gradients = memory.tensor(reducer.gradient_buffer)
        self._views = dense_views(self._gradients, reference.views)
        device = reference.vector.device
        self._vector = torch.zeros(group.shard_length, dtype=parameters[0].dtype, device=device)
        ends = accumulate((view.numel() for view in reference.views), initial=0)
        self._spans, self._numbers = list(pairwise(ends)), {id(p): n for n, p in enumerate(parameters)}
        self._own = [self._of_shard(span) for span in self._spans]
        self.pieces = [Parameter(self._vector[begin:end]) for begin, end in self._own]
        self.state: Any = defaultdict(dict)
        self._cut_state = {
            parameter: {
                name: value if name == "step" else self._cut(value, parameter) for name, value in kept.items()
            }
            for parameter, kept in inner.state.items()
        }

    def adopt(self) -> None:
        """Take the optimizer's state: what it keeps of whole parameters was cut to their pieces at construction."""
        self.state.update(self._cut_state)
        self._cut_state, self._inner.state = {}, defaultdict(dict)

    def _of_shard(self, span: tuple[int, int]) -> tuple[int, int]:
        """Where the shard has a span of the vector."""
        spans = () if self._shard is None else self._layout.spans_of_shard((span,), self._shard)
        return spans[0] if spans else (0, 0)

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Within, the optimizer has its state, by parameter."""
        self._inner.state = self.state
        try:
            yield
        finally:
            self.state, self._inner.state = self._inner.state, defaultdict(dict)

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Within, the optimizer has its state, and in its groups and there pieces in place of their parameters."""
        groups = self._inner.param_groups
        before = [group["params"] for group in groups]
        pairs = list(zip(self._parameters, self.pieces, strict=True))
        for group, whole in zip(groups, before, strict=True):
            numbers = [self._numbers.get(id(parameter)) for parameter in whole]
            group["params"] = [
                p if n is None else self.pieces[n] for n, p in zip(numbers, whole, strict=True)
            ]
        for parameter, piece in pairs:
            if parameter in self.state:
                self.state[piece] = self.state.pop(parameter)
        try:
            with self.lent():
                yield
        finally:
            for parameter, piece in pairs:
                if piece in self.state:
                    self.state[parameter] = self.state.pop(piece)
            for group, whole in zip(groups, before, strict=True):
                group["params"] = whole

    def step(self) -> None:
        """Step on the shard, and set `HostReference.stepped`; the parameters stay as they are."""
        with torch.no_grad():
            gradients = [parameter.grad for parameter in self._parameters]
            pairs = zip(self._views, gradients, strict=True)
            copied = [(v, g) for v, g in pairs if g is not None and not self._replica.in_buffer(g)]
            if copied:
                targets, sources = zip(*copied, strict=True)
                torch._foreach_copy_(targets, sources)
            own = self._reference.of_shard(self._gradients).to(self._vector.dtype)
            shown = self._reference.shown_shard()
            # what the parameters hold, and so what was written where nothing watches; the buffer is
            # float32, which holds each of their values exactly
            self._reference.copy_to(self._views)
            self._replica.buffer_changed()
            self._vector.copy_(self._reference.of_shard(self._gradients))
        for piece, (begin, end), gradient in zip(self.pieces, self._own, gradients, strict=True):
            piece.grad = None if gradient is None else own[begin:end]
        try:
            with self.in_place():
                self._inner.step()
        finally:
            for piece in self.pieces:
                piece.grad = None
        self._reference.stepped = shown, self._vector

    def moved(self) -> list[Tensor]:
        """The pieces that the last step has moved. Waits for a GPU."""
        if self._reference.stepped is None:
            return []
        shown, _ = self._reference.stepped
        moved, pairs = self._vector != shown, zip(self.pieces, self._own, strict=True)
        return [piece for piece, (begin, end) in pairs if begin < end and bool(moved[begin:end].any())]

    # states

    def give_back(self, timeout: float, problem: str = "") -> None:
        """Give the optimizer its state of whole parameters, put together of those of this host's ranks. Collective in the host.

        Moments are equal on the ranks of a host then, and unlike those of other hosts. Where ranks keep unlike things of a
        parameter, nothing is given of it. Elements travel as float32.

        Args:
            timeout: seconds that ranks may come late.
            problem: why this rank's parameters cannot have moments of their shapes, in a sentence; "" if they can.

        Raises:
            MissingRanksError: ranks of the host have not come.
            ValueError: a problem of some rank, or no memory on its device; on every rank of the host alike.

        Memory: what the optimizer keeps of n elements; beside it what it kept of the shard, and 4n/G bytes.
        Traffic: that of `HostGroup.share_shards` for each kind of moments, in the memory of gradients; a control allgather of
            their names.
        """
        group, host = self._group, self._group.host
        kept = [self.state.get(parameter) or {} for parameter in self._parameters]
        shapes = [
            {name: name != "step" and is_whole(value, piece) for name, value in state.items()}
            for state, piece in zip(kept, self.pieces, strict=True)
        ]
        group.expect_all("close", timeout, EVERY_RANK_CALLS)
        try:
            everyone = host.allgather_objects(shapes)
            with host.together():
                if problem:
                    raise ValueError(problem)
                whole: list[dict[Any, Any]] = [
                    {
                        name: torch.empty_like(parameter, dtype=value.dtype, device=value.device)
                        for name, value in state.items()
                        if here[name]
                    }
                    for parameter, state, here in zip(self._parameters, kept, shapes, strict=True)
                ]
                values = torch.empty(len(self._vector), dtype=torch.float32, device=self._vector.device)
            alike = [all(each[number] == here for each in everyone) for number, here in enumerate(shapes)]
            names = {name for state, same in zip(whole, alike, strict=True) if same for name in state}
            for name in sorted(names):
                having = [n for n, same in enumerate(alike) if same and name in whole[n]]
                for number in having:
                    begin, end = self._own[number]
                    values[begin:end].copy_(kept[number][name].reshape(-1))
                with self._memory.stream_scope():
                    group.share_shards(self._memory.array(values), group.gradient)
                for number in having:
                    whole[number][name].copy_(self._views[number])
        finally:
            group.expect_none()
        for parameter, state, new, same in zip(self._parameters, kept, whole, alike, strict=True):
            state.update(new)
            if not same:
                self.state.pop(parameter, None)
        self._inner.state, self.state = self.state, defaultdict(dict)

    @property
    def sharding(self) -> list[Any]:
        """[this rank's shard, begin and end of each parameter in the vector by its number in a state], as `loaded` takes it."""
        owned = enumerate(parameter for group in self._inner.param_groups for parameter in group["params"])
        numbers = ((number, self._numbers.get(id(parameter))) for number, parameter in owned)
        return [self._shard, {number: list(self._spans[n]) for number, n in numbers if n is not None}]

    def loaded(self, optimizer: dict[str, Any], sharding: list[Any] | None) -> dict[Any, Any]:
        """What the optimizer is to keep, by number.

        Args:
            optimizer: its "state" and "param_groups", as a state has them.
            sharding: as the attribute, when that was saved; None or empty: it is of whole parameters, which are cut.

        Raises:
            StateError: it is of another shard.
        """
        if not sharding:
            kept = by_number(optimizer, self._inner.param_groups, self._cut)
            # torch fills in {} for what flattened names of an optimizer without moments lack
            return {
                number: of_one
                for number, of_one in kept.items()
                if any(each != {} for each in of_one.values())
            }
        if sharding != self.sharding:
            raise StateError("the state has moments of another shard: each rank saves and loads its own")
        own: dict[Any, Any] = optimizer["state"]
        return own

    def _cut(self, value: Any, parameter: Tensor) -> Any:
        """The piece of what an optimizer keeps of a whole parameter; anything else stays as it is."""
        number = self._numbers.get(id(parameter))
        if number is None or not is_whole(value, parameter):
            return value
        view, (start, _) = self._reference.views[number], self._spans[number]
        flat = value
        if value.shape == view.shape:
            flat = value.new_empty(view.numel())
            dense_views(flat, [view])[0].copy_(value)
        places = self._layout.places(self._shard or 0, *self._own[number]) - start
        return flat[torch.from_numpy(places).to(flat.device)]
