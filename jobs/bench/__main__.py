"""Measure every method on the same gradients: time by stage, words, messages.

    python -m jobs.launch -n 4 -m jobs.bench --methods oktopk,mpi --length 14728266 --density 0.01 --json FILE
    python -m jobs.launch -n 2 -m jobs.bench --device cuda --methods oktopk nccl --json FILE

Rank 0 prints the tables and writes the JSON, which jobs.report prints again and docs.results.bandwidth draws.

Exit status: 0; 2 when what was asked for cannot be done, with one message and before anything is measured.
"""

from jobs.bench.run import main
from jobs.restart.signals import leave

if __name__ == "__main__":
    leave(main())
