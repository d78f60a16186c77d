"""Preprocessing and postprocessing: images to tensors, scores to classes."""
