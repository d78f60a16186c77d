"""What runs a model. One file a library, imported when a model asks for it."""
