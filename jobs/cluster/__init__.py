"""Batch scripts for Slurm, and the check of what a launcher started."""
