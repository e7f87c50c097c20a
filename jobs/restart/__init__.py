"""Restartable runs: checkpoints, signals, and a watchdog."""
