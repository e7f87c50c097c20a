"""Speech: data sets, their file, and batches."""
