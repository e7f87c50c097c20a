"""Packs a state into named tensors and a JSON tree, without pickle.

A state is nested dictionaries, lists and tuples of tensors, arrays and plain values. Everything else is refused when it is
packed, so nothing that is read back can be more than data.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

_PLAIN = (str, int, float, bool, type(None))


class Snapshot:
    """A copy of a state on the host, which training may go on without changing.

    Taking one again copies into the same memory: first touches of fresh pages would cost several times the copy.

    Attributes:
        tree: JSON that says where each tensor belongs.
        tensors: name -> host tensor; the name is the path in the state, parts joined by "/".
    """

    def __init__(self) -> None:
        self.tree = ""
        self.tensors: dict[str, Tensor] = {}
        self._pending: list[Callable[[], object]] = []

    def take(self, state: Mapping[str, Any]) -> None:
        """Copy the state.

        Copies from a GPU are queued on its current stream, so that they see what has been queued before: `wait` for them.

        Raises:
            TypeError: something in the state is neither data nor a container of it; names where.
        """
        kept, self.tensors = self.tensors, {}
        devices: set[torch.device] = set()

        def copy(tensor: Tensor, name: str) -> None:
            tensor = tensor.detach()
            host = kept.get(name)
            on_gpu = tensor.device.type == "cuda"
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=on_gpu)
            host.copy_(tensor, non_blocking=on_gpu)
            self.tensors[name] = host
            if on_gpu:
                devices.add(tensor.device)

        self.tree = json.dumps(_encode(state, (), copy))
        for device in devices:
            event = torch.cuda.Event()
            event.record(torch.cuda.current_stream(device))
            self._pending.append(event.synchronize)

    def wait(self) -> None:
        """Return when the copies are complete; any thread may wait."""
        while self._pending:
            self._pending.pop()()


def unpack(tree: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state that `Snapshot.take` took; its arrays and tensors are those given.

    Raises:
        ValueError, KeyError: the tree is not one, or names a tensor that is not there.
    """
    state = _decode(json.loads(tree), tensors)
    if not isinstance(state, dict):
        raise ValueError("not a packed state")
    return state


def _encode(value: Any, path: tuple[str, ...], copy: Callable[[Tensor, str], None]) -> Any:
    name = "/".join(path)
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        copy(value, name)
        return {"tensor": name}
    if isinstance(value, np.ndarray):
        copy(torch.from_numpy(np.ascontiguousarray(value)), name)
        return {"array": name}
    if isinstance(value, Mapping):
        if not all(type(key) in (str, int) for key in value):
            raise TypeError(f"{name}: a key is neither text nor an integer")
        return {"dict": [[key, _encode(inner, (*path, str(key)), copy)] for key, inner in value.items()]}
    if isinstance(value, list | tuple):
        inner = [_encode(item, (*path, str(place)), copy) for place, item in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": inner}
    raise TypeError(f"{name}: a checkpoint cannot hold a {type(value).__name__}")


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, _PLAIN):
        return node
    ((kind, content),) = node.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "array":
        return tensors[content].numpy()
    if kind == "dict":
        return {key: _decode(inner, tensors) for key, inner in content}
    if kind in ("list", "tuple"):
        items = [_decode(item, tensors) for item in content]
        return tuple(items) if kind == "tuple" else items
    raise ValueError(f"not a packed state: {kind!r}")
