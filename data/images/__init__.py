"""Images: data sets, their file, and batches."""
