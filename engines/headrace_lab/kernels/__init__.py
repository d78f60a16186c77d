"""Convolution kernels of our own, one module for each algorithm.

`base` has the contract, `algorithms` the list. `headrace lab conv` measures them; the TensorRT plug-in launches them in an
engine.
"""
