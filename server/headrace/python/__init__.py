"""Backend of Python models, each instance in a process of its own."""
