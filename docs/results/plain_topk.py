"""The table of communication hooks with one more: top-k with error feedback as one writes it in plain torch.

    python -m jobs.launch -n 4 -m docs.results.plain_topk --steps 16 --warmup 4 --set threshold_interval=16 --json FILE

It takes the options of `docs.results.hook`, and measures and writes the same.
"""

# No `from __future__ import annotations`: torch compares a hook's annotations with its classes.

import sys

import torch
import torch.distributed as dist
from torch import Tensor

from docs.results.hook import main
from jobs.restart.signals import leave


class PlainTopK:
    """The density, and a residual for every parameter: views of one vector a bucket. `bytes` counts what a ring would send."""

    def __init__(self, density: float) -> None:
        self.density, self.bytes = density, 0
        self.residuals: dict[Tensor, Tensor] = {}
        self.received: dict[int, Tensor] = {}
        self.buckets: dict[int, tuple[list[int], Tensor]] = {}

    def residual(self, bucket: dist.GradBucket) -> Tensor:
        """The residual of a bucket, as its gradients lie in its buffer. DDP lays out its buckets anew after the first step."""
        parameters = bucket.parameters()
        members = [id(parameter) for parameter in parameters]
        if bucket.index() not in self.buckets or self.buckets[bucket.index()][0] != members:
            like = bucket.buffer()
            whole = torch.cat([self.residuals.get(p, like.new_zeros(p.numel())) for p in parameters])
            self.residuals |= zip(parameters, whole.split([p.numel() for p in parameters]), strict=True)
            self.buckets[bucket.index()] = members, whole
        return self.buckets[bucket.index()][1]

    def taken(self) -> int:
        """Bytes since this was asked the last time."""
        sent, self.bytes = self.bytes, 0
        return sent


def plain_topk_hook(state: PlainTopK, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    """Apply the mean over the ranks of each rank's k largest entries of residual plus gradient; the rest stays. Collective.

    k is equal on all ranks, so that one allgather moves values and indices together: 2 k (P - 1) words a rank for each bucket.
    """
    buffer, ranks = bucket.buffer(), dist.get_world_size()
    whole = state.residual(bucket).add_(buffer)
    indices = whole.abs().topk(max(1, round(state.density * len(whole))), sorted=False).indices
    sent = torch.stack([whole[indices].view(torch.int32), indices.int()])
    whole[indices] = 0
    received = sent.new_empty(ranks, *sent.shape)
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


def rivals(density):
    """Plain top-k, as docs.results.hook takes further contestants."""
    state = PlainTopK(density)
    return {"plain-topk": (plain_topk_hook, state, state.taken)}


if __name__ == "__main__":
    leave(main(sys.argv[1:], "docs.results.plain_topk", rivals))
