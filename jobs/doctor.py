"""`python -m jobs.doctor` is `oktopk-doctor` that also looks for the packages of the jobs."""

from __future__ import annotations

import sys

from oktopk.doctor.__main__ import main
from oktopk.doctor.verdict import Optional

JOBS = Optional(
    ("torch", "h5py", "matplotlib", "pydantic", "scikit-learn", "tabulate", "tqdm"),
    "for jobs.train and reports alone",
    "pip install -e '.[jobs]'",
)

if __name__ == "__main__":
    sys.exit(main(prog="python -m jobs.doctor", optional=JOBS))
