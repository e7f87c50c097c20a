"""Steps on host arrays."""

import pkgutil
from importlib import import_module

import collectives.cpu
from collectives.cpu.compiled import fill


def compile_kernels() -> int:
    """Compile all kernels of CPU ranks into Numba's cache, as steps call them. Returns how many signatures it lacked.

    Those of every module: a step takes kernels from more modules than `oktopk.cpu.kernels` imports.
    """
    for path, package in ((collectives.cpu.__path__, "collectives.cpu"), (__path__, __name__)):
        for module in pkgutil.iter_modules(path, f"{package}."):
            if not module.name.endswith("__main__"):
                import_module(module.name)
    return fill()
