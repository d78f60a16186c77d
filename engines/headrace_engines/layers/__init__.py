"""Layers of two precisions compared: tensors of one graph in another, differences, the first layer that deviates."""
