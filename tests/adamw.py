"""What moments of AdamW are compared by."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

_FUSES = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
_VECTOR = 16  # elements that torch's kernel takes at once, at most; it rounds what is left otherwise


def assert_torchs(mine: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Moments of float32 are those of torch's fused AdamW: where both fuse alike bit for bit, elsewhere to rounding."""
    for one, other in zip(mine, theirs, strict=True):
        one, other = one.reshape(-1), other.reshape(-1)
        body = len(one) - len(one) % _VECTOR
        if _FUSES:
            assert torch.equal(one[:body], other[:body])
        assert torch.allclose(one, other, rtol=1e-5, atol=1e-12)
