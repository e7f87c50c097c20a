"""Programs for `tests/oktopk/test_frameworks.py`, which starts each by torchrun or mpiexec."""
