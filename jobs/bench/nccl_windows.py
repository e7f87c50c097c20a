"""NCCL by its C interface, for what torch.distributed does not offer: results out of place, and vectors in its windows."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

_TYPES = {torch.float32: 7, torch.float16: 6, torch.bfloat16: 9}  # ncclDataType_t
_SUM = 0
_SYMMETRIC = 1  # NCCL_WIN_COLL_SYMMETRIC: at the same place in a window of every rank


class _UniqueId(ctypes.Structure):
    _fields_ = (("internal", ctypes.c_byte * 128),)


class NcclError(RuntimeError):
    """NCCL lacks a function, or refused."""


class DirectNccl:
    """A communicator of all ranks on their current GPUs.

    Args:
        comm: intracommunicator. Collective: every rank must construct.

    Raises:
        NcclError: a rank has no NCCL, or an old one; on every rank alike. What joins the ranks may fail on one alone.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        unique, self._comm = _UniqueId(), ctypes.c_void_p()
        self._windows: list[tuple[ctypes.c_void_p, ctypes.c_void_p]] = []  # with their memory
        problem = ""
        try:
            self._library = ctypes.CDLL("libnccl.so.2")  # the one that torch has loaded
            if comm.rank == 0:
                self._call("ncclGetUniqueId", ctypes.byref(unique))
        except (OSError, NcclError) as error:
            problem = str(error)
        everyone = comm.allgather((problem, bytes(unique)))
        if problems := [text for text, _ in everyone if text]:
            raise NcclError(problems[0])
        unique = _UniqueId.from_buffer_copy(everyone[0][1])
        self._call("ncclCommInitRank", ctypes.byref(self._comm), comm.size, unique, comm.rank)

    def all_reduce(self, source: Tensor, target: Tensor, stream: int) -> None:
        """Put the sum of `source` into `target`, which may be the same tensor, on a stream by its address."""
        pointers = (ctypes.c_void_p(tensor.data_ptr()) for tensor in (source, target))
        self._call(
            "ncclAllReduce",
            *pointers,
            ctypes.c_size_t(source.numel()),
            _TYPES[source.dtype],
            _SUM,
            self._comm,
            ctypes.c_void_p(stream),
        )

    def window(self, like: Tensor) -> Tensor:
        """A tensor like another one, in memory of NCCL's that is registered as a symmetric window. Collective."""
        pointer, window, nbytes = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_size_t(like.nbytes)
        self._call("ncclMemAlloc", ctypes.byref(pointer), nbytes)
        self._call(
            "ncclCommWindowRegister",
            self._comm,
            pointer,
            nbytes,
            ctypes.byref(window),
            ctypes.c_int(_SYMMETRIC),
        )
        if not window.value:
            raise NcclError("ncclCommWindowRegister gives no window here")
        self._windows.append((window, pointer))
        memory: Any = type("Memory", (), {})()
        memory.__cuda_array_interface__ = {
            "shape": (like.nbytes,), "typestr": "|u1", "data": (pointer.value, False), "version": 3,
        }  # fmt: skip
        return torch.as_tensor(memory, device=like.device).view(like.dtype)

    def free_windows(self) -> None:
        """Free all windows, whose tensors must not be used any more. Collective."""
        torch.cuda.synchronize()
        for window, pointer in self._windows:
            self._call("ncclCommWindowDeregister", self._comm, window)
            self._call("ncclMemFree", pointer)
        self._windows.clear()

    def close(self) -> None:
        """Give the communicator back. Collective."""
        self._call("ncclCommDestroy", self._comm)

    def _call(self, name: str, *arguments: Any) -> None:
        try:
            function = getattr(self._library, name)
        except AttributeError:
            raise NcclError(f"this NCCL has no {name}") from None
        if status := function(*arguments):
            raise NcclError(f"{name}: NCCL error {status}")
