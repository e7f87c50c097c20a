"""Entry points: training, reports, launching. They run from the checkout and are not installed."""

from contextlib import suppress

with suppress(ModuleNotFoundError):  # of NumPy: the doctor must still be able to say that it is missing
    import collectives  # noqa: F401 - before any job imports mpi4py.MPI, so that MPI finds a UCX with CUDA
