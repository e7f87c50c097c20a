"""Entry points: training, reports, launching. They run from the checkout and are not installed."""

import collectives  # noqa: F401 - before any job imports mpi4py.MPI, so that MPI finds a UCX with CUDA
