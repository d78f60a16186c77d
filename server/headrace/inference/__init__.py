"""Runs requests: queue, batches and instances, pipelines over them, response cache, and their simulation."""
