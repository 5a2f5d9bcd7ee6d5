"""Measurements: `python -m explorer.bench force | mass | train`. Figures as JSON and as a table."""
