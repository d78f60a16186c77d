"""Kernels of our own: pictures to tensors, rows to batches, scores to classes. Each has its reference in `reference.py`."""
