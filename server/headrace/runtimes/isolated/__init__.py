"""Runs a backend in a child process."""
