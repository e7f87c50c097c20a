"""Kernels for device arrays, in CUDA; what they need of a GPU."""
