"""Metrics, statistics, traces and logs of the server."""
