"""The launches that compute an exact threshold: the k-th largest magnitude of lists, digit by digit, without the host."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import numpy as np

from collectives.cuda.device import DeviceEntries
from collectives.cuda.launch import Kernel, PreparedLaunch, compiled
from collectives.cuda.layouts import COMPACT_THREADS, COMPACT_TILE
from collectives.device_transport import DeviceTransport
from oktopk.cpu.histograms import LEVELS
from oktopk.cuda.layouts import Search
from oktopk.selection import most_equal

_KERNELS = Path(__file__).parent


class KthSelect:
    """Laid out once for a k.

    Args:
        transport: of the ranks, which all use symmetric memory.
        p2p: as kernels take it.
        k: entries wanted.
        trigger: a block this many times the mean is skewed.
        header: device address of a selection's header.
        packed: ENTRY[2k], the selection, trimmed in place.
        sums: the sums of this rank's region, zeros among them, as many as the entries that were summed last.
        kept: ENTRY[5k/4 + 1], for the sums that reach the threshold.
        boundaries: device address.
        needs_no_trim: device address of the word that a selection sets.
        selected, decided: addresses of mailboxes.
    """

    def __init__(
        self,
        transport: DeviceTransport,
        p2p: Any,
        k: int,
        trigger: float,
        *,
        header: int,
        packed: DeviceEntries,
        sums: DeviceEntries,
        kept: DeviceEntries,
        boundaries: int,
        needs_no_trim: int,
        selected: int,
        decided: int,
    ) -> None:
        device = transport.device
        kernels = transport.kernels
        kth = compiled(_KERNELS / "kth.cu")
        histogram, agree = Kernel(kth, "kth_histogram"), Kernel(kth, "agree_on_digit")
        search = device.scratch("search", ctypes.sizeof(Search) // 4, np.uint32).data.ptr
        shared = {
            "k": k,
            "most_equal": most_equal(k),
            "search": search,
            "counts": device.scratch("digits", 1 << max(width for _, width in LEVELS), np.uint32).data.ptr,
            "finished": device.scratch("digits finished", 1, np.uint32).data.ptr,
        }
        self._local: list[PreparedLaunch] = []
        self._digits: list[PreparedLaunch] = []
        self._agree: list[PreparedLaunch] = []
        for level, (shift, width) in enumerate(LEVELS):
            local = histogram.prepare(
                entries=packed.pointer, count=header, skip=needs_no_trim, level=level, shift=shift, width=width, **shared
            )  # fmt: skip
            self._local.append(local)
            self._digits.append(
                local.copy(p2p=p2p, entries=sums.pointer, count=kernels.summed, skip=p2p.decision)
            )
            self._agree.append(
                agree.prepare(
                    p2p=p2p,
                    k=k,
                    level=level,
                    width=width,
                    trigger=trigger,
                    search=search,
                    mailbox=decided,
                )
            )
        self._kept_tiles = -(-sums.size // COMPACT_TILE)
        self._take_kept = Kernel(kth, "take_exact").prepare(
            p2p=p2p, entries=sums.pointer, count=kernels.summed, search=search, kept=kept.pointer, capacity=kept.size,
            scan=device.scan("take kept", self._kept_tiles),
        )  # fmt: skip
        self._trim_tiles = -(-2 * k // COMPACT_TILE)
        self._trim = Kernel(kth, "trim_selection").prepare(
            p2p=p2p, entries=packed.pointer, capacity=2 * k, search=search, needs_no_trim=needs_no_trim,
            scan=device.scan("trim", self._trim_tiles), trimmed=device.scratch("trimmed", 2, np.uint32).data.ptr,
            finished=device.scratch("trim finished", 1, np.uint32).data.ptr, boundaries=boundaries, header=header,
            mailbox=selected,
        )  # fmt: skip
        self._blocks = max(1, min(2 * device.processors, -(-k // 1024)))  # a few entries a thread

    def trim(self, stream: int) -> None:
        """Trim the selection to its exact top k and signal it, unless it needs no trim; can be captured."""
        for histogram in self._local:
            histogram(self._blocks, 256, stream)
        self._trim(self._trim_tiles, COMPACT_THREADS, stream)

    def select_global(self, stream: int) -> None:
        """Agree on the exact global threshold, and take what reaches it; can be captured.

        Every rank's launches wait for all ranks'.
        """
        for histogram, agree in zip(self._digits, self._agree, strict=True):
            histogram(self._blocks, 256, stream)
            agree(1, 256, stream)
        self._take_kept(self._kept_tiles, COMPACT_THREADS, stream)
