"""Smaller models: 2:4 sparsity of ONNX weights, and channel pruning with distillation in PyTorch.

The builder needs no PyTorch: `pruning_program` is a program of its own, on an interpreter with PyTorch. Both exchange files.
"""
