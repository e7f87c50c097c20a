"""Reductions of a training run: methods of oktopk, and dense baselines."""
