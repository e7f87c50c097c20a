"""Mutation check: programs that are broken on purpose, and whether the tests of `make test` find out. See `__main__`."""
