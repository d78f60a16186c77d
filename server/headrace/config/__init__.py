"""Reads a model's folder: configuration, tensors of the model's file, labels, manifests of built engines.

A package of its own, because the builder needs a model's configuration and must not import the control plane.
"""
