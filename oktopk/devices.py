"""Devices by name: the backend of each, and the gradient types it takes."""

from __future__ import annotations

from collectives.cpu.compiled import load
from collectives.cuda.environment import gpu_problem, is_cuda_error, kernel_problem
from oktopk.backend import Backend, Stream

GRADIENT_TYPES = {"cpu": ("float32",), "cuda": ("float32", "bfloat16", "float16")}
"""device -> gradient types it takes."""


def make_backend(device: str, gradient_type: str, stream: Stream | None) -> Backend:
    """The backend of a device by name; talks to no other rank.

    Args:
        device: "cpu" or "cuda", the current GPU.
        gradient_type: one of `GRADIENT_TYPES[device]`.
        stream: for "cuda", the cupy stream that gradients are produced on; None: the current one.

    Raises:
        ValueError: device or gradient type is unknown.
        RuntimeError, MemoryError: the device cannot be used; the message says why, and what to do.
    """
    if device not in GRADIENT_TYPES:
        raise ValueError(f"device {device!r} is not one of {', '.join(GRADIENT_TYPES)}")
    if gradient_type not in GRADIENT_TYPES[device]:
        types = ", ".join(GRADIENT_TYPES[device])
        raise ValueError(f"gradient_type {gradient_type!r} on {device} is not one of {types}")
    if device == "cpu":
        load()
        return Backend()
    if problem := gpu_problem():
        raise RuntimeError(f"device 'cuda' cannot be used: {problem}")
    from oktopk.cuda.backend import DeviceBackend

    try:
        return DeviceBackend(gradient_type, stream)
    except Exception as error:
        if not is_cuda_error(error):
            raise
        raise RuntimeError(f"device 'cuda' cannot be used: {kernel_problem(error)}") from error
