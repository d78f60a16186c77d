"""Everything that is read from a model's folder: configuration, signature of the model, labels, stamps of what was built."""
