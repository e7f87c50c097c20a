"""Top-k with error feedback as a DDP communication hook in plain torch, to compare Ok-Topk's hook with."""

# No `from __future__ import annotations`: torch compares a hook's annotations with its classes.

import torch
import torch.distributed as dist
from torch import Tensor


class PlainTopK:
    """What `plain_topk_hook` keeps: the density, and a residual for every parameter.

    Args:
        density: share of the entries of a bucket that each rank sends, in (0, 1].

    Attributes:
        residuals: parameter -> what was not sent yet, flat: views of one vector a bucket.
        received: what came last, for each bucket.
        bytes: sent by this rank since the caller set it to 0, as a ring would.

    Memory: n words of residual, and 2 k words received from each rank.
    """

    def __init__(self, density: float) -> None:
        self.density = density
        self.residuals: dict[Tensor, Tensor] = {}
        self.received: dict[int, Tensor] = {}
        self.bytes = 0
        self._buckets: dict[int, tuple[list[int], Tensor]] = {}

    def residual(self, bucket: dist.GradBucket) -> Tensor:
        """The residual of a bucket, as its gradients lie in its buffer. DDP lays out its buckets anew after the first step."""
        parameters = bucket.parameters()
        members = [id(parameter) for parameter in parameters]
        if bucket.index() not in self._buckets or self._buckets[bucket.index()][0] != members:
            like = bucket.buffer()
            held = [self.residuals.get(p, like.new_zeros(p.numel())) for p in parameters]
            whole = torch.cat(held)
            self.residuals |= zip(parameters, whole.split([p.numel() for p in parameters]), strict=True)
            self._buckets[bucket.index()] = members, whole
        return self._buckets[bucket.index()][1]


def plain_topk_hook(state: PlainTopK, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Apply the mean over the ranks of each rank's k largest entries of residual plus gradient. Collective.

    The rest stays in the residual. k is the density times the bucket's length, at least 1, and equal on all ranks, so that one
    allgather moves values and indices together.

    Returns:
        A future of the bucket's buffer, equal on all ranks.

    Traffic: 2 k (P - 1) words a rank for each bucket, by a ring.
    """
    buffer, ranks = bucket.buffer(), dist.get_world_size()
    whole = state.residual(bucket).add_(buffer)
    k = max(1, round(state.density * len(whole)))
    indices = whole.abs().topk(k, sorted=False).indices
    sent = torch.stack([whole[indices].view(torch.int32), indices.int()])
    whole[indices] = 0
    received = sent.new_empty(ranks, 2, k)
    # a stream of the future's reads it: freed before the step ends, another one could write there
    state.received[bucket.index()] = received
    work = dist.all_gather(list(received), sent, async_op=True)
    state.bytes += (ranks - 1) * sent.nbytes

    def scatter(_: object) -> Tensor:
        buffer.zero_()
        # one rank at a time: indices repeat between ranks only, so sums are added in one order everywhere
        for values, places in received:
            buffer.scatter_add_(0, places.long(), values.view(torch.float32))
        return buffer.div_(ranks)

    reduced: torch.futures.Future[Tensor] = work.get_future().then(scatter)
    return reduced
