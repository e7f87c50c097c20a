"""What jobs/batch.sh makes of how the ranks end, without a Slurm."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parent.parent


def leave_with(folder: Path, mpiexec: str) -> int:
    """The status of a batch script whose launcher is `mpiexec`."""
    site = folder / "site.sh"
    site.write_text(
        f"load_modules() {{ :; }}\nCONTAINER=()\nPYTHON=python3\nMPIEXEC={mpiexec}\nLAUNCHER=mpiexec\n"
        f"RUNS={folder}\nGPUS_PER_RANK=0\n"
    )
    slurm = {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_NTASKS": "2", "SLURM_JOB_ID": "1"}
    words = ["bash", "-c", "source jobs/batch.sh; run_ranks -m jobs.train"]
    environment = {**os.environ, **slurm, "OKTOPK_SITE": str(site)}
    return subprocess.run(words, cwd=ROOT, env=environment, capture_output=True, check=False).returncode


def test_a_launcher_that_is_not_there_is_a_failure(tmp_path: Path) -> None:
    assert leave_with(tmp_path, "/nonexistent") == 127
    assert leave_with(tmp_path, "true") == 0
    assert leave_with(tmp_path, "false") == 1
