"""The bench on GPUs: the device, its speeds, and the table of targets."""
