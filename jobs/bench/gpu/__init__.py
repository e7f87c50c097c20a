"""The bench on GPUs: the device and its speeds."""
