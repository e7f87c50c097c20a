"""What a run writes and what it depends on: run files, recorded gradients, provenance."""
