"""Run files, their reader, and provenance."""
