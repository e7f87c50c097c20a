"""Training on many ranks."""
