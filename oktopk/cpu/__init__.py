"""Steps on host arrays."""
