"""Packs a state into named tensors and a JSON tree, without pickle.

A state is nested dictionaries, lists and tuples of tensors, arrays and plain values. Everything else is refused when it is
packed, so nothing that is read back can be more than data.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
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
        self._copying: list[torch.cuda.Event] = []

    def take(self, state: Mapping[str, Any]) -> None:
        """Copy the state.

        Copies from a GPU are queued on its current stream, so that they see what has been queued before: `wait` for them.

        Raises:
            TypeError: something in the state is neither data nor a container of it; names where.
        """
        tensors: dict[str, Tensor] = {}
        self.tree = json.dumps(_encode(state, "", tensors))
        kept, self.tensors = self.tensors, {}
        for name, tensor in tensors.items():
            host = kept.get(name)
            if host is None or host.shape != tensor.shape or host.dtype != tensor.dtype:
                host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.is_cuda)
            self.tensors[name] = host.copy_(tensor, non_blocking=tensor.is_cuda)
        for device in {tensor.device for tensor in tensors.values() if tensor.is_cuda}:
            self._copying.append(torch.cuda.current_stream(device).record_event())

    def wait(self) -> None:
        """Return when the copies are complete; any thread may wait."""
        while self._copying:
            self._copying.pop().synchronize()


def unpack(tree: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """The state that `Snapshot.take` took; its arrays and tensors are those given.

    Raises:
        ValueError, KeyError: the tree is not one, or names a tensor that is not there.
    """
    state = _decode(json.loads(tree), tensors)
    if not isinstance(state, dict):
        raise ValueError("not a packed state")
    return state


def _encode(value: Any, name: str, tensors: dict[str, Tensor]) -> Any:
    """What JSON can hold of a value; puts the tensors in it among the others."""

    def inner(key: Any, item: Any) -> Any:
        return _encode(item, f"{name}/{key}" if name else str(key), tensors)

    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        tensors[name] = value.detach()
        return {"tensor": name}
    if isinstance(value, np.ndarray):
        tensors[name] = torch.from_numpy(np.ascontiguousarray(value))
        return {"array": name}
    if isinstance(value, Mapping):
        if not all(type(key) in (str, int) for key in value):
            raise TypeError(f"{name}: a key is neither text nor an integer")
        return {"dict": [[key, inner(key, item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        kind = "list" if isinstance(value, list) else "tuple"
        return {kind: [inner(place, item) for place, item in enumerate(value)]}
    raise TypeError(f"{name}: a checkpoint cannot hold a {type(value).__name__}")


def _decode(node: Any, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(node, _PLAIN):
        return node
    match node:
        case {"tensor": name}:
            return tensors[name]
        case {"array": name}:
            return tensors[name].numpy()
        case {"dict": items}:
            return {key: _decode(item, tensors) for key, item in items}
        case {"list": items}:
            return [_decode(item, tensors) for item in items]
        case {"tuple": items}:
            return tuple(_decode(item, tensors) for item in items)
    raise ValueError(f"not a packed state: {str(node)[:60]}")
