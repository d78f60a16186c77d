"""The control plane: from a folder of models to versions that serve."""
