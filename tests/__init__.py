"""The tests; `python -m tests.run` runs all of them (`make test` with its set-up)."""
