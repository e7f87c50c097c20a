"""What ranks must have alike of an optimizer, and when they compare it.

| what of it | among | when |
|---|---|---|
| settings of its groups; with updates of single ranks without their own rates | all ranks | construction, each exchange, load |
| all settings of its groups | the ranks that shard a model | construction, each step, load |
| what it keeps, with gradients | all ranks | construction, load, the step behind a load |
| what it keeps, with updates: the names alone | all ranks | load |
| decay since the last exchange, with `every` above 1 | all ranks | each exchange |
| hash of the reference, with updates | all ranks | the first 20 exchanges, every tenth, behind an error or a write |

A rank's own rates: `agreed_settings`. In construction and load `oktopk.torch.agreement` compares, in steps a `StepAgreement`,
whose tokens also tell which parameters have a gradient on some rank.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from numbers import Real
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from collectives.tokens import parts_of, token_of
from collectives.transport import Transport
from oktopk.torch.local_step import decays, is_zero

REFERENCE = "reference"
"""A number that stands for parameters which all ranks agree on: a group of its own, see `numbers_of`."""

_RATES = frozenset(("lr", "initial_lr", "max_lr", "min_lr", "base_lr"))
"""What groups have of rates, by torch's schedulers, too."""

_MOST_KEPT = 64
_PLAIN = (bool, int, float, str, type(None))


def numbers_of(groups: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The plain values of each group, as learning rate, decay and betas; the rest, and tensors on a GPU, are left out."""
    return [
        {name: plain for name, value in _settings(group) if (plain := _plain(value)) is not None}
        for group in groups
    ]


def agreed_settings(
    optimizer: torch.optim.Optimizer, groups: Sequence[dict[str, Any]], single: bool
) -> Sequence[dict[str, Any]]:
    """What all ranks agree on: of single ranks, and a group without decoupled decay, a rate is the rank's own, unless it is zero.

    Decoupled decay multiplies the reference by the rate: there rates stay. A rank whose rate is zero forgets otherwise than the
    others. Where nothing is kept of parameters, as by SGD without momentum, a step at a rate of zero may be one that only sets
    up the optimizer, which ranks ask each other: there rates stay, too.

    Args:
        optimizer: the wrapped one.
        groups: its own, or those of a state.
        single: whether updates are sent, and each replica is a rank. Else ranks agree on all settings.
    """
    return [
        _without_rates(group)
        if single
        and not decays(optimizer, group)
        and (group.get("momentum") or "betas" in group)
        and isinstance(group.get("lr"), Real | Tensor)  # else it is none, perhaps on this rank alone
        else group
        for group in groups
    ]


def _without_rates(group: dict[str, Any]) -> dict[str, Any]:
    """A group without its rate and without what schedulers keep of rates; `lr` is then 0 or says that it is not."""
    rate = {"lr": 0.0 if is_zero(group["lr"]) else "not 0"}
    return {name: value for name, value in group.items() if name not in _RATES} | rate


def _settings(group: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """What a group has beside its parameters."""
    return ((name, value) for name, value in group.items() if name != "params")


def _plain(value: object) -> Any:
    """A value that can be compared without waiting for a GPU; None where it cannot."""
    if isinstance(value, float | np.generic):
        return value.item() if isinstance(value, np.generic) else value
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        return value.item() if value.numel() == 1 and value.device.type == "cpu" else None
    if isinstance(value, tuple | list) and all(isinstance(each, (*_PLAIN, Tensor)) for each in value):
        return tuple(map(_plain, value))  # betas are a list in a file of settings
    return None


def _may_change(value: object) -> bool:
    """Whether a value can become another one where it is."""
    return isinstance(value, Tensor | list) or (isinstance(value, tuple) and any(map(_may_change, value)))


def groups_difference(ranks: Sequence[Sequence[dict[str, Any]]]) -> str:
    """Which number differs between ranks, in a sentence that names group and values; "" if none does.

    Args:
        ranks: `numbers_of` of each; where they have unlike numbers of groups, nothing is told.
    """
    for number, groups in enumerate(zip(*ranks, strict=True) if len(set(map(len, ranks))) == 1 else ()):
        for name in dict.fromkeys(name for group in groups for name in group):
            values = [group.get(name) for group in groups]
            if any(repr(value) != repr(values[0]) for value in values):
                listed = ", ".join(f"{value} on rank {rank}" for rank, value in enumerate(values))
                if name == REFERENCE:
                    return (
                        f"the parameters that all ranks agree on have parted: their hash is {listed}. Write the same into them "
                        "on all ranks, within `with optimizer.agreed():`, and let nothing else move them, as an optimizer in the "
                        "backward pass or max_norm in the forward pass does"
                    )
                return (
                    f"{name!r} of the optimizer's group {number} differs between ranks: {listed}. Change it alike on all ranks: "
                    "give a scheduler a loss that is averaged over them, and load one state on all"
                )
    return ""


class _Sent(NamedTuple):
    """What this rank sent in a step."""

    token: int
    present: bytes
    numbers: list[dict[str, Any]]
    state: bytes


class StepAgreement:
    """Compares over the ranks, by a token of each that travels with a step's messages, see `collectives.tokens`.

    Only where tokens differ in a way that has not been seen lately the ranks exchange what is behind them.

    Args:
        groups: gives the optimizer's groups, whose numbers are compared.
        parameters: how many there are of which some may have no gradient.
        renew: called on all ranks where tokens tell that numbers differ, before the numbers are compared; returns `state`.

    Attributes:
        state: a checksum of the state that was loaded last; compared, too.
    """

    def __init__(
        self,
        groups: Callable[[], Sequence[dict[str, Any]]],
        parameters: int = 0,
        renew: Callable[[], bytes] | None = None,
    ) -> None:
        self._groups, self._renew = groups, renew
        self._values: list[Any] = []  # of all groups, when they were last looked at
        self._may_change = False  # whether one of them can become another where it is
        self._ignored: tuple[int, ...] = ()  # checksums of numbers that could not be compared
        self.state = b""
        self._sent = [_Sent(-1, bytes([1]) * parameters, [], b"")] * 2  # in this step, and in the last one
        self._anywhere = self._sent[0].present
        self._known: dict[
            tuple[int, ...], bytes
        ] = {}  # checksums of `present` on all ranks -> on any of them

    def tell(self, present: bytes = b"") -> int:
        """The token of a step.

        Args:
            present: for each parameter 1 if it has a gradient on this rank, else 0.
        """
        last = self._sent[0]
        groups = self._groups()
        values = [value for _, value in chain.from_iterable(map(_settings, groups))]
        same = len(values) == len(self._values) and all(map(operator.is_, values, self._values))
        if not same or self._may_change:
            numbers, self._values = numbers_of(groups), values
            self._may_change = any(map(_may_change, values))
        else:
            numbers = last.numbers
        token = last.token
        if (present, numbers, self.state) != last[1:] or token < 0:
            token = token_of(present, repr(numbers).encode() + self.state)
        self._sent = [_Sent(token, present, numbers, self.state), last]
        return token

    def hear(self, tokens: Sequence[int] | None, transport: Transport, earlier: bool = False) -> bytes:
        """For each parameter 1 if it has a gradient on any rank, else 0: in this step, or what was last known.

        Equal on all ranks. Collective where tokens are new and differ.

        Args:
            tokens: as `GradientAllreduce.tokens`; None: not known.
            transport: of the ranks.
            earlier: the tokens are those of the step before, as this one is not over.

        Raises:
            ValueError: numbers of the groups differ, see `groups_difference`; on every rank alike.
        """
        sent = self._sent[earlier]
        if tokens is None or sent.token < 0:
            return self._anywhere
        own = parts_of(sent.token)
        present, numbers = zip(*map(parts_of, tokens), strict=True)
        if any(each != own[1] for each in numbers) and numbers != self._ignored:
            if self._renew is not None:
                self.state = self._renew()
                sent = sent._replace(numbers=numbers_of(self._groups()), state=self.state)
            ranks = transport.allgather_objects((sent.numbers, sent.state))
            if problem := groups_difference([each for each, _ in ranks]):
                raise ValueError(problem)
            if len({state for _, state in ranks}) > 1:
                raise ValueError(
                    "the ranks have loaded different states into the optimizer: load one on all of them"
                )
            self._ignored = numbers
        if all(each == own[0] for each in present):
            self._anywhere = sent.present
        elif present in self._known:
            self._anywhere = self._known[present]
        else:
            if len(self._known) == _MOST_KEPT:
                self._known.clear()
            everyone = transport.allgather_objects(sent.present)
            self._anywhere = self._known[present] = bytes(map(max, zip(*everyone, strict=True)))
        return self._anywhere
