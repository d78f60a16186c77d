"""Runs TensorRT engines."""
