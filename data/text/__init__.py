"""Text: words packed into sequences, their file, and masked batches."""
