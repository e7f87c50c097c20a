"""Whether this machine can have a Slurm, which is installed where that is possible."""

from __future__ import annotations

import os
import shutil
import subprocess

PACKAGES = ("slurm-wlm", "slurm-wlm-basic-plugins", "munge", "libpmix2", "libpmix-dev")
PROGRAMS = ("slurmctld", "slurmd", "munged", "sbatch", "srun", "scontrol")
SECONDS = 300


def slurm_problem() -> str:
    """Why the tests on Slurm cannot run here, in a sentence; "" if they can."""
    if os.geteuid() != 0:
        return "their Slurm has to be started as root"
    os.environ["PATH"] += os.pathsep + "/usr/sbin"
    if not missing_programs():
        return ""
    if shutil.which("apt-get") is None:
        return f"{', '.join(missing_programs())} are missing, and there is no apt-get to install them"
    print(f"installing {' '.join(PACKAGES)}", flush=True)
    environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    said = ""
    for words in (["update"], ["install", "-y", "--no-install-recommends", *PACKAGES]):
        try:
            done = subprocess.run(
                ["apt-get", "-q", *words],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=SECONDS,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return f"apt-get {words[0]} took longer than {SECONDS} s"
        # an update may fail for one source and still be good enough
        said = done.stdout.strip().splitlines()[-1] if done.stdout.strip() else ""
    if missing_programs():
        return f"{', '.join(missing_programs())} could not be installed by apt-get: {said}"
    return ""


def missing_programs() -> list[str]:
    """Those of PROGRAMS that are not on the path."""
    return [program for program in PROGRAMS if shutil.which(program) is None]
