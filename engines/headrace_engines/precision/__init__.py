"""Writes a model in a lower precision: casts, Q/DQ pairs, layers that stay in floating point."""
