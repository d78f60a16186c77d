"""Built-in steps of pipelines."""
