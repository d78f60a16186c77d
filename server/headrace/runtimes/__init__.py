"""Backends: one library that runs models in each module, imported when a model needs it."""
