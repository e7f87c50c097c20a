"""CUDA graphs of steps, which cost the host one launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import cupy

if TYPE_CHECKING:
    from collectives.cuda.device import Device

_MOST = 8  # of gradients that live elsewhere


class StepGraphs:
    """Graphs of steps by what they read and write, captured the second time that it comes.

    Args:
        device: where steps run.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._graphs: dict[Any, dict[bool, Any] | None] = {}  # by key, then by `exact`; None: seen once

    def launch(self, key: Hashable, exact: bool, enqueue: Callable[[int, bool], None]) -> None:
        """Put a step on the device's stream.

        Args:
            key: steps of equal keys are alike, but for `exact`.
            exact: passed to `enqueue`.
            enqueue: (stream, exact) -> put the launches of one step on that stream.
        """
        graphs = self._graphs.get(key) or self._second(key, enqueue)
        if graphs is None:
            enqueue(self._device.stream.ptr, exact)
        else:
            graphs[exact].launch(self._device.stream)

    def clear(self) -> None:
        self._graphs.clear()

    def _second(self, key: Any, enqueue: Callable[[int, bool], None]) -> dict[bool, Any] | None:
        """Both graphs of a key that comes a second time, so that no later step takes longer; None the first time."""
        if key not in self._graphs:
            if len(self._graphs) >= _MOST:
                self._graphs.clear()
            self._graphs[key] = None
            return None
        graphs = self._graphs[key] = {exact: self._captured(enqueue, exact) for exact in (False, True)}
        return graphs

    def _captured(self, enqueue: Callable[[int, bool], None], exact: bool) -> cupy.cuda.Graph:
        capturing = self._device.capturing
        capturing.begin_capture(cupy.cuda.runtime.streamCaptureModeRelaxed)
        try:
            enqueue(capturing.ptr, exact)
        except BaseException:
            with suppress(cupy.cuda.runtime.CUDARuntimeError):  # half a step is no graph
                capturing.end_capture()
            raise
        return capturing.end_capture()
