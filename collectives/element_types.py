"""The types of elements that are summed: of gradients, of parameters and of tables."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray


class ElementType(NamedTuple):
    """One type.

    Attributes:
        name: as settings and torch call it.
        dtype: how NumPy and CuPy hold it; bfloat16 by its bits.
        cuda: its name in CUDA.
    """

    name: str
    dtype: np.dtype[Any]
    cuda: str

    @property
    def nbytes(self) -> int:
        """Bytes of an element."""
        return self.dtype.itemsize


ELEMENT_TYPES = {
    each.name: each
    for each in (
        ElementType("float32", np.dtype(np.float32), "float"),
        ElementType("float16", np.dtype(np.float16), "__half"),
        ElementType("bfloat16", np.dtype(np.uint16), "__nv_bfloat16"),
    )
}
"""By name; calls of `cuda.dense_p2p` name a type by its place here. `oktopk.torch.agreement.GRADIENT_TYPES` has torch's."""

NAMES = {each.dtype: each.name for each in ELEMENT_TYPES.values()}
"""The name of the type that an array of NumPy or CuPy holds, by the array's dtype."""


def widen(values: NDArray[Any], element_type: str) -> NDArray[np.float32]:
    """Elements of a type as float32; those of float32 as they are."""
    if element_type == "bfloat16":
        return (values.astype(np.uint32) << 16).view(np.float32)
    return values.astype(np.float32, copy=False)


def narrow(values: NDArray[np.float32], element_type: str) -> NDArray[Any]:
    """float32 rounded to a type, to nearest even; a NaN stays one."""
    if element_type == "bfloat16":
        bits = values.view(np.uint32)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        rounded[np.isnan(values)] = 0x7FC0
        return rounded
    with np.errstate(over="ignore"):
        return values.astype(ELEMENT_TYPES[element_type].dtype, copy=False)
