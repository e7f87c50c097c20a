"""Kernels for host arrays, in numba."""
