"""The algorithms of dense allreduces over peer memory: their kernels, and what a window holds for them. See `dense_p2p.cu`."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import NamedTuple

import cupy

from collectives.cuda.device import Device
from collectives.cuda.launch import Kernel, compiled, has_native_atomics
from collectives.cuda.layouts import (
    CHUNK_BYTES,
    CHUNK_DATA,
    DENSE_BLOCKS,
    DENSE_SLOTS,
    DENSE_THREADS,
    DENSE_VECTORS,
)
from collectives.element_types import ELEMENT_TYPES
from collectives.transport import Transport

ALGORITHMS = ("one_shot", "lines", "two_shot", "two_shot_lines")
"""All give the same bits. Those in lines do as NCCL's LL128."""

_SOURCE = Path(__file__).with_name("dense_p2p.cu")
_RING_BLOCKS = DENSE_BLOCKS  # of a launch through rings at most, for two ranks
_AT_ONCE = 132  # blocks that a GPU runs at once of a launch in tiles for more ranks, one a multiprocessor of an H100 or H200
_WARPS = DENSE_THREADS // 32
_TILE = DENSE_THREADS * DENSE_VECTORS * 16  # bytes
_FLAGGED = 2 << 20  # bytes of data that all sources together may send by `one_shot`
# bytes that a rank sends of its vector to all others, up to which `one_shot` and `lines` are the fastest
_MOST_FLAGGED, _MOST_WHOLE = 400 << 10, 1 << 20
_ALIGNMENT = 256  # bytes, of what lies in a window


class Areas(NamedTuple):
    """Where what a window holds begins, in bytes from the start of its payload, and how many bytes that is."""

    calls: int
    flagged: int
    tiles: int
    flags: int
    lines: int
    nbytes: int


def areas(ranks: int) -> Areas:
    """The parts of a window for so many ranks."""
    places = 2 * (ranks - 1) * DENSE_SLOTS  # for each block
    tiles = places * tile_blocks(ranks)
    chunks = places * line_blocks(ranks) * _WARPS * line_vectors(ranks)
    ends = [0]
    for nbytes in (
        2 * ranks * 16,
        2 * ranks * most_units(ranks) * 16,
        tiles * _TILE,
        tiles * 8,
        chunks * CHUNK_BYTES,
    ):
        ends.append(-(-(ends[-1] + nbytes) // _ALIGNMENT) * _ALIGNMENT)
    return Areas(*ends)


def counters(ranks: int) -> tuple[int, int, int]:
    """How many counters `one_shot`, `two_shot` and the algorithms in lines have."""
    return DENSE_BLOCKS, tile_blocks(ranks), 2 * line_blocks(ranks) * _WARPS


def most_units(ranks: int) -> int:
    """Units of 8 bytes that a vector has at most which goes by `one_shot`."""
    return _FLAGGED // ranks // 8


def algorithm_for(nbytes: int, ranks: int, lines: bool) -> str:
    """Which algorithm a vector of so many bytes takes.

    Args:
        lines: whether lines arrive whole.

    Source: own; in float32 on two H100 and four H200 within 4 % of the fastest at each length, see `docs/results/dense.md`.
    """
    sent = nbytes * (ranks - 1)
    if nbytes <= 8 * most_units(ranks) and (sent <= _MOST_FLAGGED or not lines):
        return "one_shot"
    if not lines:
        return "two_shot"
    return "lines" if ranks <= 2 or sent <= _MOST_WHOLE else "two_shot_lines"


def tile_blocks(ranks: int) -> int:
    """Blocks of a launch in tiles that move data, at most: fewer for more ranks, whose rings take more memory."""
    most = _RING_BLOCKS // max(1, ranks - 1)
    return most if ranks <= 2 else min(most, _AT_ONCE)


def line_blocks(ranks: int) -> int:
    """As `tile_blocks`, of a launch in lines, whose rings take half as much memory."""
    return min(_RING_BLOCKS, 3 * _RING_BLOCKS // max(1, ranks - 1))


def line_vectors(ranks: int) -> int:
    """Chunks that a warp sends before it waits: for more than two ranks one, so that registers suffice for twice the warps."""
    return 2 if ranks <= 2 else 1


def blocks_of(algorithm: str, length: int, size: int, ranks: int) -> int:
    """Blocks that move data of a vector.

    Args:
        length: its elements.
        size: bytes of one.
    """
    if algorithm == "one_shot":
        return min(-(-length * size // (8 * DENSE_THREADS)), DENSE_BLOCKS)
    parts = 1 if algorithm == "lines" else ranks
    if algorithm == "two_shot":
        return min(-(-length * size // (_TILE * parts)), tile_blocks(ranks))
    chunk = CHUNK_DATA // size  # elements
    return min(-(-length // (chunk * parts * _WARPS)), line_blocks(ranks))


def bytes_sent(algorithm: str, nbytes: int, ranks: int) -> tuple[int, int]:
    """Bytes of data that a rank sends of a vector, and of flags beside them; see `dense_p2p.cu`.

    Args:
        nbytes: of the vector.
    """
    whole = algorithm in ("one_shot", "lines")
    sent = nbytes * (ranks - 1) if whole else 2 * nbytes * (ranks - 1) // ranks
    if algorithm == "one_shot":
        return sent, sent
    return sent, 0 if algorithm == "two_shot" else sent // 15


@functools.cache
def dense_kernels(element_type: str, ranks: int) -> dict[str, Kernel]:
    """The kernels of all algorithms, by name, for so many ranks."""
    sizes = {"TILE_BLOCKS": tile_blocks, "LINE_BLOCKS": line_blocks, "LINE_VECTORS": line_vectors}
    defines = [f"DENSE_{name}={of(ranks)}" for name, of in sizes.items()]
    module = compiled(_SOURCE, f"GRADIENT={ELEMENT_TYPES[element_type].cuda}", f"RANKS={ranks}", *defines)
    return {name: Kernel(module, f"dense_{name}") for name in ALGORITHMS}


def lines_arrive_whole(transport: Transport, device: Device) -> bool:
    """Whether a warp's store of 128 bytes reaches another rank's GPU whole, as it does over NVLink. Collective.

    NCCL's LL128 relies on it, too. Where a rank cannot see another one's GPU, or shares it, the answer is no.
    """
    gpus = transport.allgather_objects(cupy.cuda.runtime.deviceGetPCIBusId(device.id))
    try:
        whole = all(
            has_native_atomics(device.id, cupy.cuda.runtime.deviceGetByPCIBusId(gpu))
            for rank, gpu in enumerate(gpus)
            if rank != transport.rank
        )
    except cupy.cuda.runtime.CUDARuntimeError:  # hidden by CUDA_VISIBLE_DEVICES
        whole = False
    return all(transport.allgather_objects(whole))
