"""Preprocess and postprocess: images to tensors, scores to classes."""
