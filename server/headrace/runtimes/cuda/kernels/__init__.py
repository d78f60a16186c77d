"""Our CUDA kernels: images to tensors, rows to batches, scores to classes.

Their NumPy references are in `tests/support/kernel_reference.py`.
"""
