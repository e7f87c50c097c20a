"""SparseLoCo as a mode of training: local steps, then an exchange of the largest changes that they made."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from collectives.traffic import Traffic
from jobs.train.reduce.baselines import DenseTraining
from oktopk.torch.states import load_state

CHUNK = 4096
KEPT = 64
"""Entries of a chunk that are sent: those of largest magnitude."""
DECAY = 0.95
"""Of the residual, at each exchange."""
CODED = KEPT * 12 // 8 + KEPT * 2 // 8 + 4
"""Bytes of a chunk: indices of 12 bits, values of 2 bits, and two bfloat16."""


class SparseLocoTraining(DenseTraining):
    """Every rank steps its own optimizer on its own gradient; after some steps ranks sum what these changed.

    In an exchange a rank adds what its steps have changed to DECAY x its residual. Of each chunk of the parameters it sends the
    KEPT largest entries, see `encode`, and keeps the rest, with what was rounded away. All ranks add the mean of what was sent to
    the parameters of the last exchange (an outer rate of 1), equal bit for bit, and go on from there.

    A step's phase "reduction" has the local step in it. Between two exchanges the parameters of ranks differ: see `agreed`.

    Args:
        inner: the torch optimizer that owns the parameters, all float32 and on one device.
        clip_norm: scale a rank's own gradient down to this Euclidean norm; 0 for never.
        ranks: in the process group.
        every: steps from one exchange to the next, at least 1.

    Traffic: an allgather of CODED bytes for each chunk, (P - 1) times what a rank sends; nothing in the steps between.
    Memory: 2 n words, the residual and the parameters of the last exchange; in an exchange 3 n words more.
    Source: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025; values have one of two magnitudes here.
    """

    def __init__(self, inner: torch.optim.Optimizer, clip_norm: float, ranks: int, every: int) -> None:
        super().__init__(inner, 0.0)  # nothing is to be clipped after the step
        self._own_clip_norm, self._ranks, self._every = clip_norm, ranks, every
        self._reference = self._flat()
        self._residual = torch.zeros_like(self._reference)

    def apply(self) -> None:
        """Nothing: the step was taken before the exchange."""

    @contextmanager
    def agreed(self) -> Iterator[None]:
        """Within it the parameters are those of the last exchange, equal on all ranks; after it this rank's own again."""
        local = self._flat()
        self._write(self._reference)
        try:
            yield
        finally:
            self._write(local)

    def _finish(self) -> Traffic:
        if self._own_clip_norm:
            nn.utils.clip_grad_norm_(self._parameters, self._own_clip_norm)
        self.inner.step()
        return Traffic() if (self._steps + 1) % self._every else self._exchange()

    def _exchange(self) -> Traffic:
        self._residual.mul_(DECAY).add_(self._flat()).sub_(self._reference)
        sent = encode(self._residual.view(-1, CHUNK))
        received = [torch.empty_like(sent) for _ in range(self._ranks)]
        dist.all_gather(received, sent)
        own, total = torch.zeros_like(self._residual), torch.zeros_like(self._residual)
        own.view(-1, CHUNK).scatter_(1, *decode(sent))
        for coded in received:  # one rank after the other: every rank adds in the same order
            total.view(-1, CHUNK).scatter_add_(1, *decode(coded))
        for vector in (own, total):
            vector[self.length :] = 0.0  # of the last chunk, what is behind the parameters
        self._residual.sub_(own)
        self._reference.add_(total, alpha=1.0 / self._ranks)
        self._write(self._reference)
        return Traffic((self._ranks - 1) * sent.nbytes, self._ranks - 1)

    def _flat(self) -> Tensor:
        """A copy of the parameters, filled with zeros up to a whole chunk."""
        pieces = [parameter.detach().reshape(-1) for parameter in self._parameters]
        return torch.cat([*pieces, pieces[0].new_zeros(-self.length % CHUNK)])

    @torch.no_grad()
    def _write(self, vector: Tensor) -> None:
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, piece in zip(self._parameters, vector[: self.length].split(sizes), strict=True):
            parameter.copy_(piece.view_as(parameter))

    def state_dict(self) -> dict[str, Any]:
        """As DenseTraining's, this rank's own; the parameters since the last exchange as well."""
        n = self.length
        own = {"residual": self._residual[:n], "reference": self._reference[:n], "local": self._flat()[:n]}
        return {
            **self.inner.state_dict(),
            "reducer": {"steps": self._steps, "last_k": None, **own},
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue where the `state_dict` was taken, bit for bit on as many ranks; on others from the last exchange."""
        state = dict(state_dict)
        own = state.pop("reducer")
        self._steps = own["steps"]
        load_state(self.inner, state)
        self._reference[: self.length] = own["reference"]
        self._residual[: self.length] = 0.0 if own["residual"] is None else own["residual"]
        self._write(own["reference" if "ranks" in own else "local"].to(self._reference))


def encode(chunks: Tensor) -> Tensor:
    """The entries of largest magnitude of each chunk.

    A value is sent as its sign and one of two magnitudes: the means, in bfloat16, of those above and of those up to the mean.

    Args:
        chunks: float32[m, CHUNK].

    Returns:
        uint8[m, CODED].
    """
    indices = chunks.abs().topk(KEPT, sorted=False).indices
    values = chunks.gather(1, indices)
    size = values.abs()
    large = size > size.mean(1, keepdim=True)
    levels = [(size * part).sum(1) / part.sum(1).clamp(min=1) for part in (~large, large)]
    a, b = indices.view(-1, KEPT // 2, 2).unbind(2)
    places = torch.stack([a & 255, a >> 8 | (b & 15) << 4, b >> 4], dim=2)
    kinds = (2 * large + (values < 0)).view(-1, KEPT // 4, 4) << _shifts(chunks.device)
    packed = [places.flatten(1).to(torch.uint8), kinds.sum(2).to(torch.uint8)]
    return torch.cat([*packed, torch.stack(levels, dim=1).to(torch.bfloat16).view(torch.uint8)], dim=1)


def decode(coded: Tensor) -> tuple[Tensor, Tensor]:
    """int64[m, KEPT], indices in each chunk, and float32[m, KEPT], values, of what `encode` returned."""
    places, kinds, levels = coded.split([KEPT * 12 // 8, KEPT * 2 // 8, 4], dim=1)
    low, middle, high = places.reshape(-1, KEPT // 2, 3).long().unbind(2)
    indices = torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=2).flatten(1)
    kind = (kinds.long()[:, :, None] >> _shifts(coded.device) & 3).flatten(1)
    sizes = levels.contiguous().view(torch.bfloat16).float().gather(1, kind >> 1)
    return indices, torch.where(kind & 1 == 1, -sizes, sizes)


def _shifts(device: torch.device) -> Tensor:
    """Where the four values of a byte lie in it."""
    return torch.tensor([0, 2, 4, 6], device=device)
