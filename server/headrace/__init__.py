"""Headrace's server."""
