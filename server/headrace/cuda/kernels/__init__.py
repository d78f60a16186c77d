"""Kernels of our own: pictures to tensors, rows to batches, scores to classes.

Their references in NumPy are in `tests/support/kernel_reference.py`.
"""
