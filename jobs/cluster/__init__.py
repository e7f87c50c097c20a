"""Batch scripts for Slurm, the launch check, and decisions of all ranks."""
