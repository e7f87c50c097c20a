"""What the ranks of updates compare in each exchange, see `oktopk.torch.step_agreement`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from collectives.transport import Transport
from oktopk.torch.local_step import LocalStep
from oktopk.torch.step_agreement import REFERENCE, StepAgreement, agreed_settings
from oktopk.torch.updates.reference_parameters import ReferenceParameters


class UpdatesAgreement(StepAgreement):
    """As the base class, of updates: compares the decay that is due and the reference, too.

    Args:
        optimizer: the wrapped one.
        local: its steps.
        reference: as of now.
        transport: of the ranks.
        every: steps between two exchanges.
        single: as of `agreed_settings`.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        local: LocalStep,
        reference: ReferenceParameters,
        transport: Transport,
        *,
        every: int,
        single: bool,
    ) -> None:
        self._optimizer, self._local = optimizer, local
        self._reference, self._transport = reference, transport
        self._decays, self._single, self._hash = every > 1, single, {REFERENCE: 0}
        super().__init__(self._compared, len(reference.views), self._reconcile)

    def settings(self, groups: Sequence[dict[str, Any]]) -> Sequence[dict[str, Any]]:
        """Of the optimizer's groups, or those of a state, what all ranks agree on."""
        return agreed_settings(self._optimizer, groups, self._single)

    def look(self) -> None:
        """Compute the hash of the reference, for the next `tell`."""
        self._hash[REFERENCE] = self._reference.digest()

    def _compared(self) -> list[dict[str, Any]]:
        groups = self.settings(self._optimizer.param_groups)
        if self._decays:
            # of rates and decays in the steps since the last exchange, which may have been others
            due = zip(groups, self._local.factors, strict=True)
            groups = [{**group, "decay since the last exchange": factor} for group, factor in due]
        return [*groups, self._hash]

    def _reconcile(self) -> bytes:
        """Where tokens tell that ranks may have parted: give all of them what some have written. Collective."""
        self._reference.reconcile(self._transport)
        self.look()
        return b""
