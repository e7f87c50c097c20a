"""Checks gradients and samples of parameters on a GPU before a step, by one kernel.

Torch takes some twenty launches for that, and a small tensor for each parameter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from oktopk.torch.interop import TYPE_NAMES, TensorMemory
from oktopk.torch.updates.reference_parameters import ReferenceParameters

if TYPE_CHECKING:
    from oktopk.cuda.step_check import StepCheck


class GradientCheck:
    """Sums the squares of all gradients, and compares samples of all parameters with what the reference noted of them.

    Args:
        parameters: dense, of one type, on one GPU.
        reference: of them.
        kernels: the reducer's, on that GPU.
        memory: of both.

    Raises:
        MemoryError: the GPU's memory does not suffice.

    Memory: n/512 bytes, and some 150 bytes a parameter, on the GPU.
    """

    def __init__(
        self, parameters: Sequence[Tensor], reference: ReferenceParameters, kernels: Any, memory: TensorMemory
    ) -> None:
        self._parameters, self._memory, self._kind = parameters, memory, parameters[0].dtype
        self._reference, self._followed = reference, -1
        sizes = [parameter.numel() for parameter in parameters]
        self._laid = [(parameter.stride(), size) for parameter, size in zip(parameters, sizes, strict=True)]
        with memory.stream_scope():
            self._check: StepCheck = kernels.step_check(sizes, TYPE_NAMES[self._kind], len(reference.sample))

    def begin(self) -> StepCheck | None:
        """Begin to check the gradients that are there; None where something is laid out otherwise than when wrapped."""
        reference, addresses = self._reference, list[int]()
        for parameter, laid in zip(self._parameters, self._laid, strict=True):
            if (gradient := parameter.grad) is None:
                addresses.append(0)
            elif (gradient.stride(), gradient.numel()) == laid and gradient.dtype == self._kind:
                addresses.append(gradient.data_ptr())
            else:
                return None
        with self._memory.stream_scope():
            if self._followed != reference.followed:
                if (places := reference.sample_places()) is None:
                    return None
                self._check.set_samples(places)
                self._followed = reference.followed
            self._check.set_pointers(addresses)
            self._check.begin(reference.sample.data_ptr())
        return self._check
