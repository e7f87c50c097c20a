"""Renders tables and charts: what jobs.bench and jobs.report share."""
