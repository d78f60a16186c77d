"""Sequence batching: requests of one sequence run in order on one slot of one instance."""
