"""Dense allreduce of torch tensors among the GPUs of a host, without NCCL."""

from __future__ import annotations

from contextlib import ExitStack

import torch
from torch import Tensor

from collectives.closing import closes
from collectives.connect import Communicator, communicator, connect
from collectives.cuda.environment import gpu_problem
from collectives.errors import NoPeerMemoryError, refuse
from collectives.limit import Limit
from oktopk.settings import Settings
from oktopk.torch.interop import TYPE_NAMES


class DenseAllreduce:
    """Sums of tensors over the ranks of one host; the bits depend on the values alone, not on the length or the alignment.

    A call puts one kernel on torch's current stream and does not wait. `torch.cuda.graph` captures it, after a first call with
    tensors of that type, which loads the kernels; the graph must not be replayed after `close`, and only `check` shows that a
    replay was aborted. All ranks make the same calls in the same order, replays included. Calls on several
    streams must be ordered by the caller.

    Args:
        comm: as `oktopk.GradientAllreduce` takes it; at most 8 ranks, each with a GPU of its own, which is torch's current one.
            Collective: every rank must construct.
        timeout: seconds that a rank may come late, to the construction or to a call.
        shared_gpus: allow ranks to share a GPU, which is slow.

    Attributes:
        size: how many ranks there are (P).

    Raises:
        collectives.errors.NoPeerMemoryError: a RuntimeError: the ranks cannot read each other's
            memory; on every rank alike, with the reason.
        oktopk.MissingRanksError: ranks did not come in time; on the others, and on a missing rank when it comes.

    Memory, traffic: of `collectives.cuda.dense_p2p.DenseP2P`.

    Example:
        >>> allreduce = oktopk.torch.DenseAllreduce()
        >>> allreduce(activations)  # in place
    """

    def __init__(
        self,
        comm: Communicator | None = None,
        timeout: float = Settings.timeout,
        shared_gpus: bool = False,
    ) -> None:
        self._transport = connect(communicator(comm), Limit("DenseAllreduce(...)", timeout))
        self.size = self._transport.size
        with ExitStack() as opened:  # closed where this raises
            opened.callback(self._transport.close)
            with self._transport.together_or("no dense allreduce through peer memory", NoPeerMemoryError):
                refuse(gpu_problem())
            import cupy

            from collectives.cuda.dense_p2p import DenseP2P
            from collectives.cuda.device import Device
            from collectives.symmetric_memory import symmetric_memory_problem

            self._gpu = torch.device("cuda", torch.cuda.current_device())
            cupy.cuda.Device(self._gpu.index).use()
            if problem := symmetric_memory_problem(self._transport, shared_gpus=shared_gpus):
                raise NoPeerMemoryError(f"no dense allreduce through peer memory: {problem}")
            self._dense = DenseP2P(self._transport, Device(), timeout)
            opened.pop_all()

    def __call__(
        self, tensor: Tensor, out: Tensor | None = None, *, addend: Tensor | None = None, scale: float = 1.0
    ) -> Tensor:
        """Sum a tensor over the ranks. Collective: every rank must call, with as many elements of the same type.

        Args:
            tensor: float32, bfloat16 or float16 on this rank's GPU; contiguous.
            out: of the same type and number of elements, where the result goes; None: into `tensor`. It is `tensor` or `addend`,
                or overlaps neither.
            addend: of the same type and number of elements, or None: is added to the scaled and rounded sum.
            scale: of the sum, in float32.

        Returns:
            `out`.

        Raises:
            TypeError, ValueError: an argument is none of these; on this rank alone.
            oktopk.MissingRanksError: an earlier call was aborted, since a rank did not come within `timeout`; also on that rank.
            RuntimeError: it was aborted, since ranks passed different lengths, types or scales; the sentence says which.
        """
        out = tensor if out is None else out
        for name, array in (("tensor", tensor), ("out", out), ("addend", addend)):
            if array is None:
                continue
            if array.dtype not in TYPE_NAMES or array.dtype != tensor.dtype:
                raise TypeError(
                    f"{name} is {array.dtype}, not {tensor.dtype} of float32, bfloat16 and float16"
                )
            fits = array.device == self._gpu and array.is_contiguous()
            if not fits or array.numel() != tensor.numel():
                raise ValueError(
                    f"{name} of shape {tuple(array.shape)} on {array.device} is not contiguous on {self._gpu}, "
                    f"this rank's GPU, with the {tensor.numel()} elements of tensor"
                )
        self._dense.enqueue(
            tensor.data_ptr(),
            out.data_ptr(),
            0 if addend is None else addend.data_ptr(),
            tensor.numel(),
            TYPE_NAMES[tensor.dtype],
            scale=scale,
            stream=torch.cuda.current_stream(self._gpu).cuda_stream,
        )
        return out

    def check(self) -> None:
        """Wait for all work on the GPU.

        Raises:
            oktopk.MissingRanksError: a call was aborted, since a rank did not come.
            RuntimeError: it was aborted otherwise; the sentence says what ranks passed. No call can follow either.
        """
        torch.cuda.synchronize()
        self._dense.check()

    @closes
    def close(self) -> None:
        """Free the windows. Collective, but after an abort. No captured call may be replayed after it: it would write there."""
        torch.cuda.synchronize()
        self._dense.close()
        self._transport.close()
