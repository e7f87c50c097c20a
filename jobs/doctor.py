"""`python -m jobs.doctor` is `oktopk-doctor`, which then looks for the packages of this checkout's programs too."""

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
    sys.exit(main(prog="python -m jobs.doctor", optional=[JOBS]))
