"""SparseLoCo, a rival for library.py: local steps, then an exchange of the largest changes that they made.

Source: Sarfi et al., Communication Efficient LLM Pre-training with SparseLoCo, 2025; values have one of two magnitudes here.
"""

from contextlib import contextmanager

import torch
import torch.distributed as dist

CHUNK, KEPT = 4096, 64  # entries of a chunk, and those of largest magnitude, which are sent
DECAY = 0.95  # of the residual, at each exchange
CODED = KEPT * 12 // 8 + KEPT * 2 // 8 + 4  # bytes of a chunk: indices, values of two bits, two bfloat16


class SparseLoCo:
    """Steps an optimizer of its own on each rank; after `every` steps ranks sum what these changed.

    In an exchange a rank adds what its steps have changed to DECAY x its residual. Of each chunk it sends the KEPT largest entries,
    and keeps the rest, with what was rounded away. All ranks add the mean of what was sent to the parameters of the last exchange (an outer
    rate of 1), equal bit for bit, and go on from there.

    Attributes:
        sent: bytes so far: an allgather of CODED bytes a chunk, (P - 1) times what a rank sends.
    """

    def __init__(self, inner, every=15):
        self.inner, self.every, self.sent, self._steps = inner, every, 0, 0
        self.param_groups, self.zero_grad = inner.param_groups, inner.zero_grad
        self._parameters = [p for group in inner.param_groups for p in group["params"]]
        self._length = sum(p.numel() for p in self._parameters)
        self._reference = self._flat()
        self._residual = torch.zeros_like(self._reference)

    def step(self):
        self.inner.step()
        self._steps += 1
        if self._steps % self.every == 0:
            self._exchange()

    @contextmanager
    def agreed(self):
        """Within it the parameters are those of the last exchange."""
        local = self._flat()
        self._write(self._reference)
        yield
        self._write(local)

    def _exchange(self):
        self._residual.mul_(DECAY).add_(self._flat()).sub_(self._reference)
        coded = encode(self._residual.view(-1, CHUNK))
        received = [torch.empty_like(coded) for _ in range(dist.get_world_size())]
        dist.all_gather(received, coded)
        own, total = torch.zeros_like(self._residual), torch.zeros_like(self._residual)
        own.view(-1, CHUNK).scatter_(1, *decode(coded))
        for each in received:  # one rank after the other: every rank adds in the same order
            total.view(-1, CHUNK).scatter_add_(1, *decode(each))
        for vector in (own, total):
            vector[self._length :] = 0.0  # of the last chunk, what is behind the parameters
        self._residual.sub_(own)
        self._reference.add_(total, alpha=1 / len(received))
        self._write(self._reference)
        self.sent += (len(received) - 1) * coded.nbytes

    def _flat(self):
        """A copy of the parameters, filled with zeros up to a whole chunk."""
        pieces = [parameter.detach().reshape(-1) for parameter in self._parameters]
        return torch.cat([*pieces, pieces[0].new_zeros(-self._length % CHUNK)])

    @torch.no_grad()
    def _write(self, vector):
        sizes = [parameter.numel() for parameter in self._parameters]
        for parameter, piece in zip(self._parameters, vector[: self._length].split(sizes), strict=True):
            parameter.copy_(piece.view_as(parameter))


def encode(chunks):
    """uint8[m, CODED] of float32[m, CHUNK]: of each value its sign and one of two magnitudes, the means of the large and of the small."""
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


def decode(coded):
    """int64[m, KEPT], indices in each chunk, and float32[m, KEPT], values, of what `encode` returned."""
    places, kinds, levels = coded.split([KEPT * 12 // 8, KEPT * 2 // 8, 4], dim=1)
    low, middle, high = places.reshape(-1, KEPT // 2, 3).long().unbind(2)
    indices = torch.stack([low | (middle & 15) << 8, middle >> 4 | high << 4], dim=2).flatten(1)
    kind = (kinds.long()[:, :, None] >> _shifts(coded.device) & 3).flatten(1)
    sizes = levels.contiguous().view(torch.bfloat16).float().gather(1, kind >> 1)
    return indices, torch.where(kind & 1 == 1, -sizes, sizes)


def _shifts(device):
    """Where the four values of a byte lie in it."""
    return torch.tensor([0, 2, 4, 6], device=device)
