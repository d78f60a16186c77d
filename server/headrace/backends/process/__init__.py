"""A backend in a process of its own."""
