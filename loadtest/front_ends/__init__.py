"""Measurements of front-end processes: `python -m loadtest.front_ends`, see docs/performance.md and docs/scaling.md."""
