"""What happens to data before a model and after it."""
