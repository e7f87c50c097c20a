"""Steps on a GPU: over messages, or by kernels that read each other's memory."""
