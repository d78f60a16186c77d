"""Headrace in Ray Serve beside Ray Serve's own batching."""
