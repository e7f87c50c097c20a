"""The bench on GPUs."""
