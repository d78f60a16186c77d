"""Smaller models: channel pruning with distillation in PyTorch.

The builder needs no PyTorch: `pruning_program` is a program of its own, on an interpreter with PyTorch. Both exchange files.
"""
