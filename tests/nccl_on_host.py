"""What stands for NCCL where GPUs are on the host: gloo moves the device arrays, in batches that end one after another."""

from __future__ import annotations

import ctypes
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

from collectives import process_group_cuda


class GlooMessages:
    """In place of `NcclMessages`: a batch is over before the next one starts, as on NCCL's stream."""

    def __init__(self, whole: Any, device: Any) -> None:
        self.users = 0
        store = dist.PrefixStore("gloo messages", whole.store)
        self._gloo = dist.ProcessGroupGloo(store, whole.rank, whole.size, timedelta(seconds=30))

    def exchange(self, operations: Any, stream: int) -> Any:
        assert operations
        works = [getattr(self._gloo, operation)([tensor], rank, 0) for operation, tensor, rank in operations]
        for work in works:
            work.wait()
        return object()

    def wait(self, work: Any, stream: int) -> None:
        assert work is not None

    def close(self) -> None:
        """Nothing is shared with other processes."""


def _tensor(array: Any, gpu: int) -> torch.Tensor:
    memory = (ctypes.c_uint8 * array.nbytes).from_address(process_group_cuda.address_of(array))
    return torch.frombuffer(memory, dtype=torch.uint8)


def take_the_place_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    """Process groups of gloo's are taken for NCCL's."""
    monkeypatch.setattr(dist, "get_backend_config", lambda group: "cuda:nccl")
    monkeypatch.setattr(process_group_cuda, "NcclMessages", GlooMessages)
    monkeypatch.setattr(process_group_cuda, "_tensor", _tensor)
